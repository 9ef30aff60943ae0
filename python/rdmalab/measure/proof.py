# SPDX-License-Identifier: Apache-2.0
"""Which transport carried a measurement, judged from packet counters at both ends.

A verdict is ``proven`` only if at both ends the transport's own counters, and where it can
see them the link's netdev, moved by at least 95 % of the packets that the posted work needs,
and the rival transport's did not. Acknowledgements, retransmissions and credits only add to
what is counted; nothing that is posted needs fewer packets than is worked out here.

TCP's segments are counted by its sockets, which do not know where they went, and a frame of
the link may carry many of them (TSO, GRO). So the link has to show as many frames as cannot
have been merged, the work's bytes, and few bytes beside them: else other traffic could stand
for work that went elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rdmalab.errors import UsageError
from rdmalab.measure.measurement import Counters, Point, Proof
from rdmalab.measure.node.counters import Snapshot

COVERAGE = 0.95  # of the posted packets that the transport's own counters must show
RIVAL = 0.05  # of the posted packets that the rival's may show
RIVAL_FLOOR = 8  # packets: a neighbour query or two is no rival, however little was posted
#: perftest's own connection (TCP on the same link) cannot be asked what it sent: about
#: twenty segments to set up, some more when many queue pairs are told.
PERFTEST_CONTROL = 64
REST = 0.05  # of TCP's payload that the link may carry beside it, in bytes
REST_FLOOR = 2048  # bytes: neighbour queries, however little was posted
#: At most in a frame beside TCP's payload: Ethernet with a VLAN and a checksum, IPv6, TCP
#: with all its options. A merged frame has them once, which is less.
HEADERS = 14 + 4 + 4 + 40 + 60
CONTROL_SEGMENT = 512  # bytes of a segment of the exchange, headers included, at most
GSO_MAX = 8 * 65535  # the kernel's GSO_MAX_SIZE: bytes of the largest merged frame

Pair = tuple[int | None, int | None]


@dataclass(frozen=True)
class Kind:
    """A transport that can be proven.

    ``own`` reads packets sent and received by the transport from the deltas of one end.
    ``counters`` names them for errors. ``on_link``: its packets pass the link's netdev, whose
    counters see them too; what else that netdev carried is then the rival. A device that
    carries RDMA past the host's network stack has ``on_link`` false: all that its netdev
    carried is rival.
    """

    name: str
    counters: str
    own: Callable[[Snapshot], Pair]
    on_link: bool


def _hardware(sent: str, received: str) -> Callable[[Snapshot], Pair]:
    return lambda deltas: (deltas.rdma.get(sent), deltas.rdma.get(received))


#: By ``Point.transport``. A driver that is not here cannot be proven, so it has no numbers.
KINDS: Mapping[str, Kind] = {
    "rxe": Kind("rxe", "sent_pkts and rcvd_pkts", _hardware("sent_pkts", "rcvd_pkts"), True),
    "tcp": Kind(
        "tcp",
        "segs_out and segs_in",
        lambda deltas: (deltas.tcp_sent, deltas.tcp_received),
        True,
    ),
}


def kind_of(transport: str) -> Kind:
    """UsageError for a transport that nothing can prove."""
    if transport not in KINDS:
        raise UsageError(
            f"transport {transport} cannot be proven",
            seen="its packet counters are unknown",
            todo=f"known: {', '.join(KINDS)}",
        )
    return KINDS[transport]


def packets(size: int, mtu: int) -> int:
    """Packets of one message; an empty one still takes a packet."""
    return max(1, -(-size // mtu))


@dataclass(frozen=True)
class Work:
    """What the posted work needs from initiator to target and back: ``packets``, ``payload``
    in bytes, and ``frames`` on the link at least (None: one a packet).

    ``segment`` is the payload of a full segment of a stream, whose sender may merge full
    segments into one frame but no others; None where nothing streams."""

    packets: tuple[int, int]
    payload: tuple[int, int]
    frames: tuple[int, int] | None = None
    segment: tuple[int, int] | None = None

    def reversed(self) -> Work:
        """The same as the target sees it."""
        return Work(
            self.packets[::-1],
            self.payload[::-1],
            self.frames and self.frames[::-1],
            self.segment and self.segment[::-1],
        )


def work_of(point: Point, mtu: tuple[int, int], sent: int, answered: int) -> Work:
    """What ``sent`` messages posted by the initiator and ``answered`` by the target (its
    own, in ping-pong and two-way) need. ``mtu`` is what a packet carries at most, in bytes,
    from initiator to target and back: the path MTU, for tcp each end's segment size (which
    differs, since it grows with what the peer takes)."""
    carried = (sent * point.size, answered * point.size)
    if point.transport == "tcp" and point.kind == "bandwidth":
        # A stream has no message borders: small messages share segments.
        segments = -(-carried[0] // mtu[0]), -(-carried[1] // mtu[1])
        return Work(segments, carried, (0, 0), mtu)
    out, back = packets(point.size, mtu[0]), packets(point.size, mtu[1])
    if point.transport == "tcp":
        # One message is in flight: its own segments may be merged, messages are not.
        whole = packets(point.size, GSO_MAX)
        return Work((sent * out, answered * back), carried, (sent * whole, answered * whole))
    if point.op == "read":
        # A request is one packet; its answer carries the bytes the other way.
        return Work((sent + answered * out, sent * back + answered), (carried[1], carried[0]))
    if point.op in ("fetch_add", "cmp_swap"):
        return Work((sent + answered, sent + answered), carried)
    return Work((sent * out, answered * back), carried)


def judge(
    point: Point,
    nodes: tuple[str, str],
    work: Work,
    deltas: tuple[Snapshot, Snapshot],
    *,
    allowance: int = 0,
) -> Proof:
    """The proof of one measurement; ``deltas`` are the initiator's and the target's over the
    work. ``allowance``: packets of a tool's own control connection that are no rival's."""
    posted = work.packets
    kind = kind_of(point.transport)
    ends = (
        _counters(kind, nodes[0], deltas[0], allowance),
        _counters(kind, nodes[1], deltas[1], allowance),
    )
    views = (work, work.reversed())
    reasons = [
        reason
        for end, delta, view in zip(ends, deltas, views, strict=True)
        if (reason := _doubt(kind, end, delta, view))
    ]
    if not any(posted):
        reasons.insert(0, "nothing was posted")
    if reasons:
        return Proof(kind.name, posted, ends, "refused", reasons[0])
    covered = "; ".join(
        f"{end.node} {_coverage(end, *view.packets)}" for end, view in zip(ends, views, strict=True)
    )
    return Proof(kind.name, posted, ends, "proven", f"of the packets posted: {covered}")


def _counters(kind: Kind, node: str, deltas: Snapshot, allowance: int) -> Counters:
    sent, received = kind.own(deltas)
    if kind.name == "tcp":
        rival_sent, rival_received = _rdma(deltas)
    else:
        # Seen on the link and neither the transport's, nor the exchange's, nor the tool's.
        rival_sent = _rest(kind, deltas.link_sent, sent, deltas.control_sent + allowance)
        rival_received = _rest(
            kind, deltas.link_received, received, deltas.control_received + allowance
        )
    return Counters(node, sent, received, rival_sent, rival_received)


def _rdma(deltas: Snapshot) -> Pair:
    """Packets of the RDMA device on the link, by the counters of a kind that is known, else
    by the InfiniBand architecture's. (None, None) without a device or such counters."""
    known = [kind.own for kind in KINDS.values() if kind.name != "tcp"]
    for own in (*known, _hardware("port_xmit_packets", "port_rcv_packets")):
        if None not in (pair := own(deltas)):
            return pair
    return None, None


def _rest(kind: Kind, link: int | None, own: int | None, control: int) -> int | None:
    if link is None or own is None:
        return None
    return max(0, link - (own if kind.on_link else 0) - control)


def _doubt(kind: Kind, end: Counters, deltas: Snapshot, work: Work) -> str:
    """Why this end, which sends ``work``'s first direction, proves nothing; empty where it
    does."""
    limit = max(RIVAL_FLOOR, RIVAL * max(work.packets))
    if kind.name == "tcp" and deltas.rdma and None in (end.rival_sent, end.rival_received):
        return f"{end.node}: the RDMA device has no packet counters, so it may have carried this"
    for way in _ways(end, deltas, work):
        if way.own is None:
            return f"{end.node}: no counters {kind.counters} of {kind.name} there"
        if way.own < COVERAGE * way.posted:
            return f"{end.node}: {kind.name} {way.verb} {way.own} of {way.posted} packets posted"
        if kind.on_link and (why := _link_doubt(kind, way)):
            return f"{end.node}: {why}"
        if way.rival is not None and way.rival >= limit:
            name = "RDMA" if kind.name == "tcp" else "other traffic on the link"
            return f"{end.node}: {name} {way.verb} {way.rival} packets beside {way.posted} posted"
    return ""


@dataclass(frozen=True)
class _Way:
    """One direction at one end: what was counted of it and what the work needs."""

    verb: str
    own: int | None
    rival: int | None
    link: int | None
    link_bytes: int | None
    control: int
    posted: int
    payload: int
    most_payload: int  # of both directions
    frames: int
    segment: int  # 0 where nothing is known to be merged


def _ways(end: Counters, deltas: Snapshot, work: Work) -> tuple[_Way, _Way]:
    most = max(work.payload)
    frames = work.packets if work.frames is None else work.frames
    return (
        _Way(
            "sent", end.sent, end.rival_sent, deltas.link_sent, deltas.link_sent_bytes,
            deltas.control_sent, work.packets[0], work.payload[0], most, frames[0],
            work.segment[0] if work.segment else 0,
        ),
        # What a device merges on receipt is not known, hence no segment.
        _Way(
            "received", end.received, end.rival_received, deltas.link_received,
            deltas.link_received_bytes, deltas.control_received, work.packets[1],
            work.payload[1], most, frames[1], 0,
        ),
    )  # fmt: skip


def _link_doubt(kind: Kind, way: _Way) -> str:
    """Why the link's netdev does not confirm what the transport counted; empty where it
    does."""
    if way.link is None or way.link_bytes is None or way.own is None:
        return "the link's netdev has no counters"
    frames = way.frames
    if way.segment:
        # Twice, since the segment size was read at the end and may have grown.
        frames = max(frames, way.own - 2 * way.link_bytes // way.segment)
    if way.link < COVERAGE * frames:
        return f"the link {way.verb} {way.link} of {frames} packets posted"
    if way.link_bytes < COVERAGE * way.payload:
        return f"the link {way.verb} {way.link_bytes} of {way.payload} bytes posted"
    if kind.name == "tcp":
        beside = way.own * HEADERS + way.control * CONTROL_SEGMENT
        rest = way.link_bytes - way.payload - beside
        if rest > max(REST_FLOOR, REST * way.most_payload):
            return f"the link {way.verb} {rest} other bytes beside {way.payload} posted"
    return ""


def _coverage(end: Counters, sends: int, receives: int) -> str:
    words = []
    for verb, posted, own in (("sent", sends, end.sent), ("received", receives, end.received)):
        if posted and own is not None:
            words.append(f"{verb} {100 * own / posted:.1f} %")
    return " and ".join(words) or "had nothing to send"
