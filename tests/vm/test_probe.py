# SPDX-License-Identifier: Apache-2.0
"""Probes on guests: they count what was sent, and nothing of them is ever left behind."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from rdmalab.errors import HostError
from rdmalab.lab.lab import Lab
from rdmalab.lab.node import Node
from rdmalab.measure import bench
from rdmalab.measure.measurement import Measurement, Point
from rdmalab.probe.catalogue import PROBES
from rdmalab.probe.group import ProbeGroup
from rdmalab.probe.histogram import Histogram
from rdmalab.probe.session import ProbeSession

SCHEMA = json.loads(
    (Path(__file__).parents[2] / "docs" / "schemas" / "probe.schema.json").read_text()
)
ITERATIONS, WARMUP = 100, 10
MESSAGES = ITERATIONS + WARMUP + 1
"""The timed loop sends one more than was asked, untimed."""


@pytest.fixture(scope="module")
def group(lab: Lab) -> Iterator[ProbeGroup]:
    """Compiled once for all tests here that measure."""
    nodes = [lab.nodes["node0"], lab.nodes["node1"]]
    for node in nodes:
        _rxe(node)
    with ProbeGroup(nodes) as probes:
        yield probes


def _rxe(node: Node) -> None:
    netdev = node.links["roce0"].netdev
    script = (
        "modprobe rdma_rxe; modprobe ib_uverbs; "
        f"test -e /sys/class/infiniband/rxe_{netdev} "
        f"|| rdma link add rxe_{netdev} type rxe netdev {netdev}"
    )
    node.run(["sh", "-c", script])


def _measure(lab: Lab, probes: ProbeGroup, **point: object) -> Measurement:
    wanted = Point(**{"iterations": ITERATIONS, "warmup": WARMUP, "size": 64} | point)  # type: ignore[arg-type]
    plain, found = bench.run(
        lab.nodes["node0"],
        lab.nodes["node1"],
        [wanted],
        setting=bench.Setting(lab.accelerator, lab.vcpus, lab.kernel),
        probes=probes,
        factor=lab.slow_factor,
    )
    assert (plain.tool, plain.histograms) == ("rdmalab", ())
    assert found.tool == bench.PROBED
    assert found.proof.verdict == "proven", found.proof.reason
    return found


def _total(histograms: tuple[Histogram, ...], node: str, probe: str, key: str) -> int:
    return sum(
        bucket.count
        for each in histograms
        if (each.node, each.probe, each.key) == (node, probe, key)
        for bucket in each.buckets
    )


def _lost(histograms: tuple[Histogram, ...], node: str, probe: str) -> int:
    return max((h.lost for h in histograms if (h.node, h.probe) == (node, probe)), default=0)


def test_sends_are_counted_at_both_ends_and_at_every_stage(lab: Lab, group: ProbeGroup) -> None:
    histograms = _measure(lab, group, op="send").histograms
    assert not [h for h in histograms if h.missing]
    for node in ("node0", "node1"):
        lost = _lost(histograms, node, "post_to_completion")
        counted = _total(histograms, node, "post_to_completion", "SEND")
        assert MESSAGES - lost <= counted <= MESSAGES, "one for each message of a ping-pong"
        lost = _lost(histograms, node, "stage_time")
        for stage in ("rxe_post_send", "rxe_requester", "rxe_receiver", "rxe_completer"):
            assert _total(histograms, node, "stage_time", stage) >= MESSAGES - lost
        # a request and an acknowledgement for each message
        for stage in ("rxe_xmit_packet", "rxe_rcv"):
            assert _total(histograms, node, "stage_time", stage) >= 2 * MESSAGES - lost
        for task in ("rxe_sender", "rxe_receiver"):
            assert _total(histograms, node, "work_delay", task) > 0


def test_polls_return_what_was_completed(lab: Lab, group: ProbeGroup) -> None:
    histograms = _measure(lab, group, op="send").histograms
    for node in ("node0", "node1"):
        polls = [h for h in histograms if (h.node, h.probe) == (node, "completions_per_poll")]
        returned = sum(b.low * b.count for h in polls for b in h.buckets)
        # a send and a receive of each message; buckets below 8 hold one value each
        assert returned == 2 * MESSAGES


@pytest.mark.parametrize(
    ("op", "opcode"),
    [("write", "WRITE"), ("read", "READ"), ("fetch_add", "FETCH_AND_ADD")],
)
def test_opcodes_are_told_apart(lab: Lab, group: ProbeGroup, op: str, opcode: str) -> None:
    size = 8 if op == "fetch_add" else 64
    mode = "poll" if op == "write" else "event"
    histograms = _measure(lab, group, op=op, size=size, mode=mode).histograms
    found = {h.key for h in histograms if h.probe == "post_to_completion" and h.buckets}
    assert found == {opcode}


def test_times_of_the_probes_fit_into_the_time_of_the_measurement(
    lab: Lab, group: ProbeGroup
) -> None:
    """From post to completion takes less than the whole round trip that holds it."""
    found = _measure(lab, group, op="read")
    spent = sum(found.samples_us) * 1000
    inside = sum(
        b.low * b.count
        for h in found.histograms
        if (h.node, h.probe, h.key) == ("node0", "post_to_completion", "READ")
        for b in h.buckets
    )
    # the probes have seen the untimed ones as well
    share = ITERATIONS / MESSAGES
    assert 0.2 * spent < inside * share < 1.5 * spent


def _traces(node: Node) -> dict[str, str]:
    """What probes would leave: programs, links and maps of BPF, events in tracefs."""
    script = (
        "mountpoint -q /sys/kernel/tracing || mount -t tracefs tracefs /sys/kernel/tracing;"
        'for kind in prog link map; do echo "== $kind"; bpftool $kind list | grep -v "^\\s"; done;'
        "cd /sys/kernel/tracing; for kind in kprobe uprobe; do"
        ' echo "== $kind"; cat ${kind}_events; done'
    )
    text = node.run(["sh", "-c", script]).stdout
    parts = text.split("== ")[1:]
    return {part.split("\n", 1)[0]: part.split("\n", 1)[1] for part in parts}


def _settled(node: Node, wanted: dict[str, str]) -> dict[str, str]:
    """The kernel frees programs and maps some time after their last user is gone."""
    until = time.monotonic() + 20 * node.deadlines.factor
    while (seen := _traces(node)) != wanted and time.monotonic() < until:
        time.sleep(0.5)
    return seen


def _agents(node: Node) -> list[str]:
    return node.run(["pgrep", "-f", "^python3 -m rdmalab.probe run"], check=False).stdout.split()


@pytest.mark.deadline(240)
@pytest.mark.parametrize(
    ("end", "attach"),
    [("stop", "auto"), ("kill -9", "auto"), ("kill -9", "name"), ("ssh gone", "auto")],
)
def test_nothing_is_left_behind(node0: Node, end: str, attach: str) -> None:
    _rxe(node0)
    before = _traces(node0)
    others = set(_agents(node0))
    arguments = ["run", "--json", "--attach", attach, "--probes"]
    arguments.append(",".join(PROBES) if attach == "auto" else "stage_time,completions_per_poll")
    process = node0.popen_python("rdmalab.probe", arguments)
    try:
        assert process.stdout.readline(300 * node0.deadlines.factor) == "ready", process.stderr()
        (agent,) = set(_agents(node0)) - others
        during = _traces(node0)
        assert during["prog"] != before["prog"], "the test would see what is left"
        if end == "stop":
            process.stdin.write("\n")
            process.stdin.flush()
            line = process.stdout.readline(30 * node0.deadlines.factor)
            assert line is not None
            jsonschema.validate(json.loads(line), SCHEMA)
            assert process.wait(30).status == 0
        elif end == "kill -9":
            node0.run(["kill", "-9", agent])
        else:
            process._local.kill()
        assert _settled(node0, before) == before
        assert set(_agents(node0)) == others
    finally:
        process.stop()


@pytest.mark.deadline(180)
def test_one_session_is_cleared_and_read_many_times(node0: Node) -> None:
    _rxe(node0)
    with ProbeSession(node0, ["work_delay"]) as probes:
        for _ in range(3):
            probes.clear()
            histograms = probes.snapshot()
            assert [h.probe for h in histograms] == ["work_delay"]
            assert histograms[0].node == node0.name


@pytest.mark.deadline(180)
def test_without_the_driver_the_probes_say_so(node0: Node, group: ProbeGroup) -> None:
    """And do not fail: a measurement over TCP has nothing of it to show."""
    group.close()  # its programs hold the module even while they are attached nowhere
    # All devices of the driver; it is in use for a moment longer than they are there.
    node0.run(
        ["sh", "-c", "for d in /sys/class/infiniband/rxe*; do [ -e $d ] && "
         "rdma link delete ${d##*/}; done; for i in $(seq 100); do rmmod rdma_rxe && exit 0; "
         "[ -e /sys/module/rdma_rxe ] || exit 0; sleep 0.2; done; exit 1"],
    )  # fmt: skip
    try:
        result = node0.python("rdmalab.probe", ["list", "--json"])
        listed = json.loads(result.stdout)
        jsonschema.validate(listed, SCHEMA)
        reasons = {p["name"]: [m["reason"] for m in p["missing"]] for p in listed["probes"]}
        assert reasons["stage_time"] == ["module rdma_rxe is not loaded"]
        assert reasons["completions_per_poll"][0].startswith("no RDMA device")
        with ProbeSession(node0) as probes:
            assert all(h.missing for h in probes.snapshot())
    finally:
        _rxe(node0)


@pytest.mark.deadline(180)
def test_headers_that_are_not_there_are_named(node0: Node) -> None:
    """A node without the headers of its kernel: exit status 4 and the package's name."""
    _rxe(node0)
    release = node0.run(["uname", "-r"]).stdout.strip()
    node0.run(["mount", "-t", "tmpfs", "empty", f"/lib/modules/{release}"])
    try:
        with pytest.raises(HostError, match=f"apt-get install linux-headers-{release[0]}"):
            ProbeSession(node0, ["stage_time"]).start()
    finally:
        node0.run(["umount", f"/lib/modules/{release}"])
