# SPDX-License-Identifier: Apache-2.0
"""Verdicts: what counters must show for a number to be kept."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rdmalab.errors import UsageError
from rdmalab.measure import proof
from rdmalab.measure.measurement import Point
from rdmalab.measure.node.counters import Snapshot

NODES = ("node0", "node1")
LATENCY = Point("send", 64, iterations=1000)
TCP = replace(LATENCY, transport="tcp")
WORK = proof.Work((1000, 1000), (64_000, 64_000))


def rxe(sent: int, received: int, *, link: int = 0, control: int = 0) -> Snapshot:
    """An end whose rxe moved so much, with ``link`` other packets beside."""
    return Snapshot(
        rdma={"sent_pkts": sent, "rcvd_pkts": received},
        tcp_sent=None,
        tcp_received=None,
        link_sent=sent + link + control,
        link_received=received + link + control,
        link_sent_bytes=100 * (sent + link),
        link_received_bytes=100 * (received + link),
        control_sent=control,
        control_received=control,
    )


def tcp(
    sent: int,
    received: int,
    *,
    rdma: int | None = 0,
    link: int | None = None,
    link_bytes: int | None = None,
) -> Snapshot:
    """An end whose sockets moved so much, each segment of 64 B and in a frame of its own if
    ``link`` and ``link_bytes`` do not say otherwise."""
    return Snapshot(
        rdma={} if rdma is None else {"sent_pkts": rdma, "rcvd_pkts": rdma},
        tcp_sent=sent,
        tcp_received=received,
        link_sent=sent if link is None else link,
        link_received=received if link is None else link,
        link_sent_bytes=130 * sent if link_bytes is None else link_bytes,
        link_received_bytes=130 * received if link_bytes is None else link_bytes,
        control_sent=4,
        control_received=4,
    )


GOOD = rxe(2000, 2000, control=5)


def judge(left: Snapshot, right: Snapshot, point: Point = LATENCY) -> proof.Proof:
    return proof.judge(point, NODES, WORK, (left, right))


def test_packets_at_both_ends_are_a_proof() -> None:
    found = judge(GOOD, rxe(1000, 1000))
    assert found.verdict == "proven"
    assert "node0 sent 200.0 %" in found.reason
    assert "node1 sent 100.0 %" in found.reason
    assert found.posted == (1000, 1000)
    assert (found.ends[0].sent, found.ends[0].rival_sent) == (2000, 0)


@pytest.mark.parametrize("seen", [0, 900, 949])
def test_too_few_packets_at_either_end_are_none(seen: int) -> None:
    left = judge(rxe(seen, 1000), GOOD)
    assert (left.verdict, left.reason) == (
        "refused",
        f"node0: rxe sent {seen} of 1000 packets posted",
    )
    right = judge(GOOD, rxe(1000, seen))
    assert right.reason == f"node1: rxe received {seen} of 1000 packets posted"


def test_the_bar_is_at_95_per_cent() -> None:
    assert judge(rxe(950, 950), GOOD).verdict == "proven"


def test_a_rival_on_the_link_refutes_it() -> None:
    assert judge(rxe(1000, 1000, link=49), GOOD).verdict == "proven"
    found = judge(rxe(1000, 1000, link=50), GOOD)
    assert found.verdict == "refused"
    assert found.reason == ("node0: other traffic on the link sent 50 packets beside 1000 posted")


def test_the_exchange_s_own_segments_are_no_rival() -> None:
    assert judge(rxe(1000, 1000, control=500), GOOD).verdict == "proven"


def test_a_neighbour_query_beside_a_few_messages_is_no_rival() -> None:
    few = proof.Work((10, 10), (640, 640))
    ends = (rxe(10, 10, link=4), rxe(10, 10))
    assert proof.judge(LATENCY, NODES, few, ends).verdict == "proven"


def test_packets_that_never_came_over_the_link_are_no_proof() -> None:
    """rxe to itself on one node: its counters move, the netdev's do not."""
    looped = replace(GOOD, link_sent=0, link_received=0)
    found = judge(looped, GOOD)
    assert found.reason == "node0: the link sent 0 of 1000 packets posted"


def test_an_unsupported_counter_is_said_and_is_no_proof() -> None:
    found = judge(GOOD, replace(GOOD, rdma={"sent_pkts": 2000}))
    assert found.reason == "node1: no counters sent_pkts and rcvd_pkts of rxe there"
    assert found.ends[1].received is None
    blind = judge(replace(GOOD, link_sent=None), GOOD)
    assert blind.reason == "node0: the link's netdev has no counters"


def test_tcp_is_proven_by_its_connections_and_the_link() -> None:
    assert judge(tcp(1000, 1000), tcp(1000, 1000), TCP).verdict == "proven"
    assert judge(tcp(1000, 1000, rdma=None), tcp(1000, 1000), TCP).verdict == "proven"
    elsewhere = judge(tcp(1000, 1000), tcp(1000, 1000, link_bytes=600), TCP)
    assert elsewhere.reason == "node1: the link sent 600 of 64000 bytes posted"
    beside = judge(tcp(1000, 1000, rdma=1000), tcp(1000, 1000), TCP)
    assert beside.reason == "node0: RDMA sent 1000 packets beside 1000 posted"


def test_messages_in_turn_need_a_frame_each() -> None:
    """Their bytes alone may be anything's: a few large frames are not 2,100 small ones."""
    for size, count, frames in ((2, 2100, 6), (64, 1100, 50)):
        point = replace(TCP, size=size)
        work = proof.work_of(point, (1448, 1448), count, count)
        end = tcp(count, count, link=frames, link_bytes=size * count)
        found = proof.judge(point, NODES, work, (end, end))
        assert found.reason == f"node0: the link sent {frames} of {count} packets posted"


STREAM = replace(TCP, kind="bandwidth", size=65536)
STREAMED = proof.work_of(STREAM, (1448, 1448), 100, 0)
BYTES = 100 * 65536


def stream(sent: int, received: int, **link: int) -> Snapshot:
    return replace(tcp(sent, received), **link)


def ends(**link: int) -> tuple[Snapshot, Snapshot]:
    """The stream's two ends as TSO and GRO leave them: 110 frames for 4,526 segments."""
    merged = {"link_sent": 110, "link_sent_bytes": BYTES + 110 * 66, **link}
    back = {"link_received": 300, "link_received_bytes": 300 * 66}
    other = {
        "link_received": 110,
        "link_received_bytes": BYTES + 110 * 66,
        "link_sent": 300,
        "link_sent_bytes": 300 * 66,
    }
    return stream(4526, 300, **merged, **back), stream(300, 4526, **other)


def test_a_stream_s_merged_frames_are_a_proof() -> None:
    assert proof.judge(STREAM, NODES, STREAMED, ends()).verdict == "proven"
    # Not merged, every frame with its headers.
    plain = ends(link_sent=4526, link_sent_bytes=BYTES + 4526 * 66)
    assert proof.judge(STREAM, NODES, STREAMED, plain).verdict == "proven"


def test_bytes_beside_a_stream_are_none() -> None:
    found = proof.judge(STREAM, NODES, STREAMED, ends(link_sent_bytes=2 * BYTES))
    assert found.verdict == "refused"
    assert "other bytes beside 6553600 posted" in found.reason


def test_small_segments_of_a_stream_are_not_merged() -> None:
    """A sender merges full segments only, so that small ones are as many frames."""
    small = replace(STREAM, size=2)
    work = proof.work_of(small, (1448, 1448), 2100, 0)
    few = stream(2100, 10, link_sent=6, link_sent_bytes=4200)
    there = stream(10, 2100, link_received=2100, link_received_bytes=2100 * 68)
    found = proof.judge(small, NODES, work, (few, there))
    assert found.reason == "node0: the link sent 6 of 2095 packets posted"
    many = stream(2100, 10, link_sent=2100, link_sent_bytes=2100 * 68)
    assert proof.judge(small, NODES, work, (many, there)).verdict == "proven"


def test_rdma_that_cannot_be_counted_is_not_ruled_out() -> None:
    blind = replace(tcp(1000, 1000), rdma={"some_errors": 0})
    found = judge(tcp(1000, 1000), blind, TCP)
    assert found.reason.startswith("node1: the RDMA device has no packet counters")
    # The architecture's own counters will do for a driver that is not known.
    other = {"port_xmit_packets": 3, "port_rcv_packets": 3}
    assert judge(tcp(1000, 1000), replace(blind, rdma=other), TCP).verdict == "proven"
    other = {"port_xmit_packets": 900, "port_rcv_packets": 3}
    found = judge(tcp(1000, 1000), replace(blind, rdma=other), TCP)
    assert found.reason == "node1: RDMA sent 900 packets beside 1000 posted"


def test_perftest_s_own_connection_is_allowed_for() -> None:
    ends = (rxe(1000, 1000, link=70), GOOD)
    assert proof.judge(LATENCY, NODES, WORK, ends).verdict == "refused"
    allowed = proof.judge(LATENCY, NODES, WORK, ends, allowance=proof.PERFTEST_CONTROL)
    assert allowed.verdict == "proven"


def test_nothing_posted_proves_nothing() -> None:
    nothing = proof.judge(LATENCY, NODES, proof.Work((0, 0), (0, 0)), (GOOD, GOOD))
    assert (nothing.verdict, nothing.reason) == ("refused", "nothing was posted")


def test_a_transport_without_known_counters_is_refused_before_it_runs() -> None:
    with pytest.raises(UsageError, match=r"transport siw cannot be proven: .*known: rxe, tcp"):
        proof.kind_of("siw")


@pytest.mark.parametrize(
    ("op", "size", "sent", "answered", "packets", "payload"),
    [
        ("send", 64, 10, 10, (10, 10), (640, 640)),
        ("send", 4096, 10, 0, (10, 0), (40960, 0)),
        ("send", 4097, 10, 0, (20, 0), (40970, 0)),
        ("write", 8 << 20, 1, 0, (2048, 0), (8 << 20, 0)),
        ("write_imm", 1, 3, 3, (3, 3), (3, 3)),
        # A read is asked for in one packet and answered with the bytes.
        ("read", 8192, 10, 0, (10, 20), (0, 81920)),
        ("read", 8192, 10, 5, (20, 25), (40960, 81920)),
        ("fetch_add", 8, 7, 0, (7, 7), (56, 0)),
        ("cmp_swap", 8, 7, 2, (9, 9), (56, 16)),
    ],
)
def test_the_packets_that_work_needs(
    op: str,
    size: int,
    sent: int,
    answered: int,
    packets: tuple[int, int],
    payload: tuple[int, int],
) -> None:
    work = proof.work_of(Point(op, size), (4096, 4096), sent, answered)
    assert work == proof.Work(packets, payload)
    assert work.reversed().packets == packets[::-1]


def test_a_tcp_stream_shares_segments_and_ping_pong_does_not() -> None:
    stream = replace(TCP, kind="bandwidth", size=100)
    assert proof.work_of(stream, (1448, 1448), 1000, 0).packets == (70, 0)
    assert proof.work_of(replace(TCP, size=100), (1448, 1448), 1000, 1000).packets == (1000, 1000)
    # Each direction has its own segment size.
    assert proof.work_of(replace(TCP, size=1500), (1448, 4096), 10, 10).packets == (20, 10)
    assert proof.work_of(replace(TCP, size=1449), (1448, 1448), 1000, 1000).packets == (2000, 2000)
