# SPDX-License-Identifier: Apache-2.0
"""Measuring between two guests: every operation of every service, perftest beside it, and
what must not give a number."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

import jsonschema
import pytest

from rdmalab.errors import RdmalabError
from rdmalab.lab.lab import Lab
from rdmalab.lab.node import Node
from rdmalab.measure import bench
from rdmalab.measure.measurement import Measurement, Point
from rdmalab.measure.report.rows import to_rows

SCHEMA = Path(__file__).parents[2] / "docs/schemas/bench.schema.json"

SEND = Point("send", 64, iterations=40, warmup=4)

OPS = {
    "RC": ("send", "write", "write_imm", "read", "fetch_add", "cmp_swap"),
    "UC": ("send", "write", "write_imm"),
    "UD": ("send",),
}


@pytest.fixture(scope="module")
def route(node0: Node, node1: Node) -> bench.Route:
    return bench.route_between(node0, node1, "roce0", setup=True)


@pytest.fixture(scope="module")
def pair(lab: Lab, node0: Node, node1: Node, route: bench.Route) -> Iterator[bench.Pair]:
    with bench.Pair(node0, node1, route, factor=lab.slow_factor) as drivers:
        yield drivers


def setting(lab: Lab) -> bench.Setting:
    return bench.Setting(lab.accelerator, lab.vcpus, lab.kernel)


def measure(lab: Lab, pair: bench.Pair, point: Point, tool: str = "rdmalab") -> Measurement:
    nodes = pair.nodes[0].name, pair.nodes[1].name
    found = pair.run(tool, point)
    return bench.measurement(tool, point, pair.route.link, nodes, setting(lab), found)


def assert_measured(one: Measurement) -> None:
    assert one.proof.verdict == "proven", one.proof.reason
    if one.point.kind == "latency":
        assert len(one.samples_us) == one.point.iterations
        assert min(one.samples_us) > 0
    else:
        assert one.mib_s is not None
        assert one.mib_s > 0


@pytest.mark.parametrize(
    ("service", "op"), [(service, op) for service, ops in OPS.items() for op in ops]
)
def test_every_operation_is_measured_and_proven(
    lab: Lab, pair: bench.Pair, service: str, op: str
) -> None:
    sizes = (8,) if op in ("fetch_add", "cmp_swap") else (2, 4096)
    for size, mode, kind in itertools.product(sizes, ("event", "poll"), ("latency", "bandwidth")):
        if (op, mode, kind) == ("write", "event", "latency"):
            continue  # refused: nothing completes at the target
        point = replace(SEND, service=service, op=op, size=size, mode=mode, kind=kind)
        assert_measured(measure(lab, pair, point))


@pytest.mark.parametrize("op", ["send", "write", "read"])
def test_messages_of_8_mib_arrive_whole(lab: Lab, pair: bench.Pair, op: str) -> None:
    point = Point(op, 8 << 20, mode="poll", iterations=1, warmup=1)
    one = measure(lab, pair, point)
    assert_measured(one)
    # The packets that a message of this size needs, twice as many as there are samples.
    assert max(one.proof.posted) >= 2 * (8 << 20) // 4096


@pytest.mark.parametrize(
    ("op", "service"), [("send", "RC"), ("send", "UC"), ("write", "UC"), ("read", "RC")]
)
def test_several_queue_pairs_stream_both_ways(
    lab: Lab, pair: bench.Pair, op: str, service: str
) -> None:
    point = Point(
        op, 4096, kind="bandwidth", qps=3, direction="two-way", service=service, iterations=200,
        warmup=10,
    )  # fmt: skip
    one = measure(lab, pair, point)
    assert_measured(one)
    assert min(one.proof.posted) >= 3 * 200


@pytest.mark.parametrize("kind", ["latency", "bandwidth"])
@pytest.mark.parametrize("mode", ["event", "poll"])
def test_tcp_is_the_baseline_over_the_same_link(
    lab: Lab, pair: bench.Pair, mode: str, kind: str
) -> None:
    for size in (64, 65536):
        one = measure(lab, pair, replace(SEND, transport="tcp", size=size, mode=mode, kind=kind))
        assert_measured(one)


def test_perftest_is_run_beside_and_counted_by_the_same_counters(
    lab: Lab, node0: Node, node1: Node, route: bench.Route
) -> None:
    found = bench.run(
        node0, node1, [replace(SEND, iterations=200)], setting=setting(lab), route=route,
        alternations=2, perftest=True, factor=lab.slow_factor,
    )  # fmt: skip
    assert [one.tool for one in found] == ["rdmalab", "perftest", "perftest", "rdmalab"]
    assert [one.proof.verdict for one in found] == ["proven"] * 4
    theirs = [one.given_us["p50"] for one in found if one.tool == "perftest"]
    ours = [median(one.samples_us) for one in found if one.tool == "rdmalab"]
    # Half a round trip in both: a factor of two between them would be a unit mistaken, but
    # a busy host has noise of its own.
    assert 0.2 < median(ours) / median(theirs) < 5
    rows = json.loads(json.dumps({"rows": to_rows(found)}))
    jsonschema.validate(rows, json.loads(SCHEMA.read_text()))
    assert {row["transport"] for row in rows["rows"]} == {"rxe"}


def test_a_datagram_over_the_path_mtu_is_refused_by_name(lab: Lab, pair: bench.Pair) -> None:
    with pytest.raises(RdmalabError, match="one packet of at most 4096 bytes"):
        measure(lab, pair, replace(SEND, service="UD", size=4097))


@pytest.fixture
def side_road(node0: Node, node1: Node) -> Iterator[tuple[str, str]]:
    """A second RDMA device on each node, on a macvlan of the same link: the addresses.

    Neighbours are set by hand: roce0 would answer for the macvlan's address as well, and
    whoever believes it sends to the other device.
    """
    script = (
        "modprobe macvlan"
        " && ip link add link roce0 name side address 02:99:00:00:00:$1 type macvlan mode bridge"
        " && ip addr add 10.99.0.${1#0}/24 dev side && ip link set side up"
        " && ip neigh replace 10.99.0.${2#0} lladdr 02:99:00:00:00:$2 dev side"
        " && rdma link add rxe_side type rxe netdev side"
    )
    try:
        for node, own, other in ((node0, "01", "02"), (node1, "02", "01")):
            node.run(["sh", "-c", script, "side", own, other])
        yield "10.99.0.1", "10.99.0.2"
    finally:
        for node in (node0, node1):
            node.run(["sh", "-c", "rdma link del rxe_side; ip link del side"], check=False)


def test_bytes_that_another_device_carried_are_refused(
    lab: Lab, node0: Node, node1: Node, route: bench.Route, side_road: tuple[str, str]
) -> None:
    """Asked for: rxe on roce0. What works is the rxe beside it, over the same wire."""
    astray = replace(route, addresses=side_road, devices=("rxe_side", "rxe_side"))
    said: list[str] = []
    (one,) = bench.run(
        node0, node1, [SEND], setting=setting(lab), route=astray, factor=lab.slow_factor,
        progress=said.append,
    )  # fmt: skip
    assert one.proof.verdict == "refused"
    assert one.proof.reason == "node0: rxe sent 0 of 45 packets posted"
    # The other device's packets are what the link carried instead.
    assert (one.proof.ends[0].rival_sent or 0) >= 45
    assert (one.samples_us, one.given_us, one.mib_s) == ((), {}, None)
    assert said[-1].endswith(f"refused: {one.proof.reason}")


@pytest.mark.parametrize("transport", ["rxe", "tcp"])
def test_bytes_that_never_left_the_node_are_refused(
    lab: Lab, node0: Node, route: bench.Route, transport: str
) -> None:
    """Both ends on one node: the transport's own counters move, the link's do not."""
    address = route.addresses[0]
    looped = replace(route, addresses=(address, address), netdevs=("roce0", "roce0"))
    (one,) = bench.run(
        node0, node0, [replace(SEND, transport=transport, size=4096)], setting=setting(lab),
        route=looped, factor=lab.slow_factor,
    )  # fmt: skip
    assert one.proof.verdict == "refused"
    assert "node0: the link sent" in one.proof.reason
    assert one.samples_us == ()
    own = one.proof.ends[0].sent
    assert own is not None
    assert own >= 45


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("op", ["send", "write"])
def test_an_end_that_is_killed_ends_the_run_within_its_deadline(
    lab: Lab, node0: Node, node1: Node, route: bench.Route, victim: int, op: str
) -> None:
    """In the loop of events, and in the loop that spins on memory."""
    nodes = (node0, node1)
    endless = Point(
        op, 64, iterations=2_000_000, warmup=1, mode="poll" if op == "write" else "event"
    )
    killed: list[float] = []

    def kill() -> None:
        for node in nodes:
            _wait_for_loop(node)
        nodes[victim].run(["pkill", "-KILL", "-f", "^python3 -m rdmalab.measure.node"])
        killed.append(time.monotonic())

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(RdmalabError) as error:
        bench.run(
            node0, node1, [endless], setting=setting(lab), route=route, factor=lab.slow_factor
        )
    ended = time.monotonic()
    thread.join()
    assert ended - killed[0] < 30 * lab.slow_factor
    assert str(error.value).startswith(f"{nodes[victim].name}: the measuring process ended")
    assert "\n" not in str(error.value)
    for node in nodes:
        left = node.run(["pgrep", "-f", "^python3 -m rdmalab.measure.node"], check=False)
        assert left.stdout == "", f"{node.name} has a driver left"


def _wait_for_loop(node: Node) -> None:
    """Until its RDMA device has a queue pair in RTS of the driver's."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        shown = node.run(["rdma", "resource", "show", "qp"], check=False).stdout
        if any("state RTS" in line and "type GSI" not in line for line in shown.splitlines()):
            return
        time.sleep(0.3)
    raise AssertionError(f"{node.name}: no queue pair in RTS after 120 s: {shown}")
