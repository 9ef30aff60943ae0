# SPDX-License-Identifier: Apache-2.0
"""What the host asks of a node's driver, and what it answers: one JSON object a line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rdmalab.errors import UsageError
from rdmalab.measure.measurement import Point

INITIATOR = "initiator"
TARGET = "target"


@dataclass(frozen=True)
class Claim:
    """Whose counters must move: the transport's kind (a key of ``proof.KINDS``), the RDMA
    device (empty: the one on the netdev, if any) and port, and the netdev of the link that is
    said to carry it."""

    kind: str
    device: str
    netdev: str
    port: int = 1


@dataclass(frozen=True)
class Request:
    """One point for one end.

    ``tool`` is ``"rdmalab"`` or ``"perftest"``. ``device`` is the RDMA device to open (empty:
    the one on the claim's netdev; not used by tcp), ``setup`` whether SoftRoCE may be set up
    there for transport rxe where it is missing, ``address`` this end's IP address, ``peer``
    the other's, ``port`` the TCP port of the exchange at the target (perftest takes the next
    one). ``claim`` is what the counters are taken from; it is the host's, and does not follow
    ``device``. ``idle_s``: no progress for so long ends the point; ``total_s`` bounds it as a
    whole.
    """

    number: int
    tool: str
    role: str
    node: str
    point: Point
    device: str
    address: str
    peer: str
    port: int
    claim: Claim
    profile: dict[str, Any] = field(default_factory=dict)
    idle_s: float = 10.0
    total_s: float = 600.0
    setup: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Request:
        """The inverse of ``to_json``; ``UsageError`` for an object of another shape."""
        try:
            request = cls(
                **{**data, "point": Point(**data["point"]), "claim": Claim(**data["claim"])}
            )
        except (KeyError, TypeError) as error:
            raise UsageError("not a request for a measurement", seen=repr(error)) from error
        if request.tool not in ("rdmalab", "perftest") or request.role not in (INITIATOR, TARGET):
            raise UsageError(
                "not a request for a measurement",
                seen=f"tool {request.tool!r}, role {request.role!r}",
            )
        return request


def describe(point: Point) -> str:
    """A point in a few words, for progress and errors."""
    words = [point.transport, point.service, point.op, point.kind, f"{point.size} B", point.mode]
    if point.transport == "tcp":
        words.remove(point.service)
    if point.qps != 1:
        words.append(f"{point.qps} QPs")
    if point.direction != "one-way":
        words.append(point.direction)
    return " ".join(words)
