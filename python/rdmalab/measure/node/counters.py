# SPDX-License-Identifier: Apache-2.0
"""Packet counters of one end: the RDMA device's, TCP's and the link's netdev's.

A snapshot is taken right before the work is started and right after both ends have ended
it, by the process that does the work, so that nothing else of ours lies between. What the
exchange's own connection sends in between is counted as well, so that it can be taken off.

TCP is counted by the kernel for each connection (``TCP_INFO``). ``/proc/net/snmp`` would
not do: it counts what GRO has merged as one segment, and every ssh beside.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rdmalab.measure.node.request import Claim

# tcpi_segs_out, tcpi_segs_in and tcpi_snd_mss of struct tcp_info (linux/tcp.h, since 4.2).
_SEGMENTS = struct.Struct("=136xII")
_SEND_MSS = struct.Struct("=16xI")


@dataclass(frozen=True)
class Snapshot:
    """Counters at one moment, or their deltas. ``None``: not supported here.

    ``rdma`` holds every counter of the device by name, ``tcp_*`` the segments of the work's
    own connections (``None`` where it has none), ``link_*`` the netdev's packets and bytes,
    ``control_*`` the segments of the exchange's connection.
    """

    rdma: Mapping[str, int | None]
    tcp_sent: int | None
    tcp_received: int | None
    link_sent: int | None
    link_received: int | None
    link_sent_bytes: int | None
    link_received_bytes: int | None
    control_sent: int
    control_received: int

    def since(self, before: Snapshot) -> Snapshot:
        """The deltas from ``before`` to this."""
        old, new = asdict(before), asdict(self)
        deltas = {name: _delta(old[name], value) for name, value in new.items() if name != "rdma"}
        rdma = {name: _delta(before.rdma.get(name), value) for name, value in self.rdma.items()}
        return Snapshot(rdma=rdma, **deltas)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Snapshot:
        return cls(**data)


def _delta(old: int | None, new: int | None) -> Any:
    return None if old is None or new is None else new - old


def take(
    claim: Claim,
    control: socket.socket,
    data: Sequence[socket.socket] = (),
    root: Path = Path("/"),
) -> Snapshot:
    """What the claim's device and netdev, the work's connections ``data`` and the
    exchange's, ``control``, count now."""
    statistics = root / "sys/class/net" / claim.netdev / "statistics"
    each = [segments(one) for one in data]
    out, into = segments(control)
    return Snapshot(
        rdma=device_counters(claim.device, claim.port, root) if claim.device else {},
        tcp_sent=sum(one[0] for one in each) if each else None,
        tcp_received=sum(one[1] for one in each) if each else None,
        link_sent=_number(statistics / "tx_packets"),
        link_received=_number(statistics / "rx_packets"),
        link_sent_bytes=_number(statistics / "tx_bytes"),
        link_received_bytes=_number(statistics / "rx_bytes"),
        control_sent=out,
        control_received=into,
    )


def device_counters(device: str, port: int, root: Path = Path("/")) -> dict[str, int | None]:
    """Every counter of a device's port: ``hw_counters`` (the driver's own) and ``counters``
    (the InfiniBand architecture's), ``None`` for one that cannot be read."""
    folder = root / "sys/class/infiniband" / device
    found: dict[str, int | None] = {}
    for place in (
        folder / f"ports/{port}/counters",
        folder / "hw_counters",
        folder / f"ports/{port}/hw_counters",
    ):
        if place.is_dir():
            found.update({path.name: _number(path) for path in sorted(place.iterdir())})
    found.pop("lifespan", None)  # the age of a cached reading, not a counter
    return found


def segments(connection: socket.socket) -> tuple[int, int]:
    """TCP segments sent and received on a connection so far."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SEGMENTS.size)
    out, into = _SEGMENTS.unpack(info)
    return int(out), int(into)


def send_mss(connection: socket.socket) -> int:
    """The most payload bytes of a segment that this end sends."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SEND_MSS.size)
    return int(_SEND_MSS.unpack(info)[0])


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
