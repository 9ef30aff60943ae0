# SPDX-License-Identifier: Apache-2.0
"""What an RDMA device is made of, as typed values and as JSON.

The JSON is documented by ``docs/schemas/rdma-show.schema.json``. A value the kernel or the
device does not give is ``null`` (``None``); it is never 0.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rdmalab.errors import RdmalabError

IB_OR_ROCE_V1 = "IB/RoCE v1"
ROCE_V2 = "RoCE v2"

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


def gid_address(gid: str) -> IpAddress:
    """The IP address a RoCE GID stands for: IPv4 when it is IPv4-mapped.

    Raises ``ValueError`` for text that is no GID.
    """
    address = ipaddress.IPv6Address(gid)
    return address.ipv4_mapped or address


def gid_text(gid: str | bytes) -> str:
    """A GID, in any spelling or as 16 bytes, in the kernel's spelling: eight groups of four
    digits. (``IPv6Address.exploded`` writes IPv4-mapped ones with dots since Python 3.13.)

    Raises ``ValueError`` for what is no GID.
    """
    digits = ipaddress.IPv6Address(gid).packed.hex()
    return ":".join(digits[at : at + 4] for at in range(0, 32, 4))


@dataclass(frozen=True)
class Gid:
    """One entry of a port's GID table.

    ``gid`` is spelled as the kernel does (``0000:…:ffff:0a4d:0001``), ``address`` is the
    same as an IP address, ``type`` is ``"IB/RoCE v1"`` or ``"RoCE v2"``; ``netdev`` is
    ``None`` on InfiniBand.
    """

    index: int
    gid: str
    type: str
    netdev: str | None

    @property
    def address(self) -> IpAddress:
        return gid_address(self.gid)


@dataclass(frozen=True)
class Port:
    """A port. ``active_mtu`` and ``max_mtu`` are RDMA path MTUs in bytes, ``rate`` is the
    kernel's text. A counter that is ``None`` is one the kernel names but cannot read
    (``"unsupported"`` in the JSON)."""

    number: int
    state: str  # ACTIVE, DOWN, INIT, ARMED
    physical_state: str
    link_layer: str  # Ethernet | InfiniBand
    rate: str
    netdev: str | None
    active_mtu: int | None
    max_mtu: int | None
    gids: tuple[Gid, ...]
    hw_counters: Mapping[str, int | None]


@dataclass(frozen=True)
class Limits:
    """What the device allows, as ``ibv_query_device`` says."""

    max_qp: int
    max_qp_wr: int
    max_sge: int
    max_cq: int
    max_cqe: int
    max_mr: int
    max_pd: int
    max_ah: int
    max_srq: int
    max_qp_rd_atom: int
    max_qp_init_rd_atom: int
    max_mr_size: int


@dataclass(frozen=True)
class InUse:
    """How many of each resource exist now, the kernel's own included (``rdma resource``).
    ``None`` where the kernel does not count that kind."""

    qp: int | None
    cq: int | None
    mr: int | None
    pd: int | None
    ctx: int | None
    cm_id: int | None
    srq: int | None


@dataclass(frozen=True)
class Device:
    """An RDMA device. ``driver`` is the kernel driver's name (``rxe``, ``mlx5_core``, …),
    ``firmware`` is ``None`` for a driver that has none, ``limits`` is ``None`` where no verbs
    device could be opened (``limits_missing`` then says why)."""

    name: str
    driver: str
    node_type: str
    node_guid: str
    sys_image_guid: str
    firmware: str | None
    ports: tuple[Port, ...]
    in_use: InUse
    limits: Limits | None
    limits_missing: str = ""

    def port(self, number: int) -> Port:
        """The port of that number (they start at 1); ``RdmalabError`` when there is none."""
        for port in self.ports:
            if port.number == number:
                return port
        raise RdmalabError(
            f"{self.name} has no port {number}",
            seen=f"ports {', '.join(str(p.number) for p in self.ports) or 'none'}",
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON object: see the schema. Counters that cannot be read are
        ``"unsupported"``; each GID also carries its ``address``."""
        data = asdict(self)
        data["ports"] = [_port_to_json(port) for port in self.ports]
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Device:
        """The inverse of ``to_json``; ``RdmalabError`` for an object of another shape."""
        try:
            return cls(
                **{
                    **data,
                    "ports": tuple(_port_from_json(port) for port in data["ports"]),
                    "in_use": InUse(**data["in_use"]),
                    "limits": None if data["limits"] is None else Limits(**data["limits"]),
                }
            )
        except (KeyError, TypeError, ValueError) as error:
            raise RdmalabError("not an RDMA device's description", seen=repr(error)) from error


def _port_to_json(port: Port) -> dict[str, Any]:
    data = asdict(port)
    data["gids"] = [{**asdict(gid), "address": str(gid.address)} for gid in port.gids]
    data["hw_counters"] = {
        name: "unsupported" if value is None else value for name, value in port.hw_counters.items()
    }
    return data


def _port_from_json(data: Mapping[str, Any]) -> Port:
    gids = tuple(Gid(g["index"], g["gid"], g["type"], g["netdev"]) for g in data["gids"])
    counters = {
        name: None if value == "unsupported" else int(value)
        for name, value in data["hw_counters"].items()
    }
    return Port(**{**data, "gids": gids, "hw_counters": counters})
