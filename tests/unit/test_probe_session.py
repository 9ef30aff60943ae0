# SPDX-License-Identifier: Apache-2.0
"""Both sides of a probe session: the node's answers, and what the host makes of them."""

from __future__ import annotations

import io
import json
import queue
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmalab.errors import DeadlineExceeded, HostError, RdmalabError, UsageError
from rdmalab.probe import agent
from rdmalab.probe.catalogue import PROBES
from rdmalab.probe.group import ProbeGroup
from rdmalab.probe.histogram import Bucket, Histogram
from rdmalab.probe.loader import Loader
from rdmalab.probe.overhead import overhead
from rdmalab.probe.session import ProbeSession, start_all
from rdmalab.probe.text import render

SCHEMA = json.loads(
    (Path(__file__).parents[2] / "docs" / "schemas" / "probe.schema.json").read_text()
)
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
HISTOGRAM = Histogram("node0", "stage_time", "rxe_rcv", "ns", (Bucket(1024, 1280, 7),), lost=2)

histograms = st.builds(
    Histogram,
    node=st.text(),
    probe=st.sampled_from(list(PROBES)),
    key=st.text(),
    unit=st.sampled_from(["ns", "count"]),
    buckets=st.lists(
        st.builds(Bucket, st.integers(0, 2**41), st.integers(1, 2**41), st.integers(1, 2**63))
    ).map(tuple),
    missing=st.text(),
    lost=st.integers(0, 2**63),
)


@settings(deadline=None)  # a busy machine is no failure
@given(st.lists(histograms, max_size=3))
def test_histograms_survive_json_and_fit_the_schema(given_: list[Histogram]) -> None:
    data = json.loads(json.dumps({"histograms": [h.to_json() for h in given_]}))
    VALIDATOR.validate(data)
    assert [Histogram.from_json(each) for each in data["histograms"]] == given_


def test_histogram_written_before_losses_were_counted_is_read() -> None:
    data = HISTOGRAM.to_json()
    del data["lost"]
    assert Histogram.from_json(data).lost == 0


@dataclass
class FakeLoader:
    """The kernel's side: counts one event a snapshot while it is attached."""

    attached: bool = False
    count: int = 0
    log: list[str] = field(default_factory=list)

    def attach(self) -> None:
        self.attached = True
        self.log.append("attach")

    def detach(self) -> None:
        self.attached = False
        self.log.append("detach")

    def clear(self) -> None:
        self.count = 0
        self.log.append("clear")

    def snapshot(self) -> list[Histogram]:
        self.count += self.attached
        buckets = (Bucket(1, 2, self.count),) if self.count else ()
        return [Histogram("node0", "stage_time", "rxe_rcv", "ns", buckets)]


def serve(text: str) -> tuple[FakeLoader, list[str]]:
    loader, sink = FakeLoader(), io.StringIO()
    assert agent.serve(cast(Loader, loader), io.StringIO(text), sink) == 0
    return loader, sink.getvalue().splitlines()


@pytest.mark.parametrize("ending", ["", "\n", "\nsnapshot\n"])
def test_agent_ends_at_an_empty_line_or_the_end_of_input(ending: str) -> None:
    loader, lines = serve(ending)
    assert lines[0] == "ready"
    assert len(lines) == 2
    VALIDATOR.validate(json.loads(lines[1]))
    assert not loader.attached


def test_agent_answers_each_command_with_one_line() -> None:
    loader, lines = serve("snapshot\nclear\ndetach\nattach\nsnapshot\n")
    answers = [line if not line.startswith("{") else "json" for line in lines]
    assert answers == ["ready", "json", "cleared", "detached", "attached", "json", "json"]
    assert loader.log == ["attach", "clear", "detach", "attach", "detach"]


def test_agent_refuses_a_command_it_does_not_know() -> None:
    with pytest.raises(UsageError, match="no command 'cler'; there are: clear"):
        serve("cler\n")


class FakeLines:
    def __init__(self) -> None:
        self.queue: queue.Queue[str | None] = queue.Queue()

    def readline(self, timeout: float | None = None) -> str | None:
        try:
            return self.queue.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError from None

    def write(self, text: str) -> None:
        for line in text.splitlines():
            self.queue.put(line)

    def flush(self) -> None:
        pass


@dataclass
class FakeEnd:
    status: int


class FakeProcess:
    """The agent in a thread, or one that dies at once or says nothing."""

    def __init__(self, behaviour: str) -> None:
        self.stdout = FakeLines()
        self.loader = FakeLoader()
        self.stopped = False
        self.behaviour = behaviour
        self._input, self.stdin = self._pipe()
        if behaviour == "good":
            self.thread = threading.Thread(target=self._serve, daemon=True)
            self.thread.start()
        elif behaviour != "silent":
            self.stdout.queue.put(None)

    def _pipe(self) -> tuple[Any, Any]:
        import os

        read, write = os.pipe()
        return os.fdopen(read, "r"), os.fdopen(write, "w")

    def _serve(self) -> None:
        agent.serve(cast(Loader, self.loader), self._input, cast(Any, self.stdout))
        self.stdout.queue.put(None)

    def wait(self, timeout: float | None = None) -> FakeEnd:
        return FakeEnd({"headers": 4, "dead": 1}.get(self.behaviour, 0))

    def stderr(self) -> str:
        return {"headers": "a line\nno headers of kernel 6.1\n"}.get(self.behaviour, "")

    def stop(self) -> None:
        self.stopped = True
        self.stdin.close()


@dataclass
class FakeDeadlines:
    factor: float = 1.0


class FakeNode:
    def __init__(self, behaviour: str = "good", name: str = "node0") -> None:
        self.name = name
        self.behaviour = behaviour
        self.deadlines = FakeDeadlines()
        self.processes: list[FakeProcess] = []
        self.argv: list[str] = []

    def popen_python(self, module: str, args: list[str]) -> FakeProcess:
        assert module == "rdmalab.probe"
        self.argv = args
        self.processes.append(FakeProcess(self.behaviour))
        return self.processes[-1]


def session(node: FakeNode, *probes: str) -> ProbeSession:
    return ProbeSession(cast(Any, node), probes)


def test_one_start_serves_many_measurements() -> None:
    node = FakeNode()
    with session(node, "stage_time") as probes:
        for _ in range(3):
            probes.clear()
            (found,) = probes.snapshot()
            assert [b.count for b in found.buckets] == [1]
    assert len(node.processes) == 1
    assert node.processes[0].stopped
    assert not node.processes[0].loader.attached
    assert node.argv == ["run", "--json", "--node", "node0", "--probes", "stage_time"]


def test_stop_gives_the_last_counts() -> None:
    probes = session(FakeNode())
    probes.start()
    probes.snapshot()
    assert [b.count for b in probes.stop()[0].buckets] == [1], "detached before it counted again"
    assert probes.stop() == []


def test_error_inside_ends_the_node_side() -> None:
    node = FakeNode()
    with pytest.raises(KeyboardInterrupt), session(node):
        raise KeyboardInterrupt
    assert node.processes[0].stopped


def test_what_the_node_lacks_is_told_with_its_status() -> None:
    node = FakeNode("headers")
    with pytest.raises(HostError, match=r"node0: the probes ended: no headers of kernel 6\.1"):
        session(node).start()
    assert node.processes[0].stopped


def test_agent_that_dies_is_an_error() -> None:
    with pytest.raises(RdmalabError, match="status 1, nothing on stderr"):
        session(FakeNode("dead")).start()


def test_agent_that_says_nothing_meets_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rdmalab.probe.session.READY_SECONDS", 0.05)
    node = FakeNode("silent")
    with pytest.raises(DeadlineExceeded, match=r"no ready: the deadline of 0.05 s passed"):
        session(node).start()
    assert node.processes[0].stopped


def test_session_that_is_not_started_is_wrong_use() -> None:
    with pytest.raises(UsageError, match="not running"):
        session(FakeNode()).snapshot()


def test_unknown_probe_is_refused_before_anything_is_started() -> None:
    node = FakeNode()
    with pytest.raises(UsageError, match="no probe named x"):
        session(node, "x")
    assert node.processes == []


def test_where_one_node_fails_the_others_are_ended() -> None:
    good, bad = FakeNode(), FakeNode("dead", "node1")
    with pytest.raises(RdmalabError, match="node1"):
        start_all([session(good), session(bad)])
    assert good.processes[0].stopped
    assert bad.processes[0].stopped


def test_group_is_attached_only_while_it_measures() -> None:
    nodes = [FakeNode(), FakeNode(name="node1")]
    with ProbeGroup([cast(Any, n) for n in nodes]) as group:
        loaders = [node.processes[0].loader for node in nodes]
        assert not any(loader.attached for loader in loaders)
        for _ in range(2):
            group.start()
            assert all(loader.attached and loader.count == 0 for loader in loaders)
            group.stop()
            assert not any(loader.attached for loader in loaders)
    assert all(len(node.processes) == 1 and node.processes[0].stopped for node in nodes)


class Switch:
    def __init__(self) -> None:
        self.on = False

    def start(self) -> None:
        self.on = True

    def stop(self) -> None:
        self.on = False


def test_overhead_alternates_and_divides_within_a_round() -> None:
    switch, order = Switch(), []
    drift = iter(range(1, 100))

    def measure() -> float:
        order.append(switch.on)
        return float(next(drift)) * (3 if switch.on else 1)

    result = overhead(measure, switch, 2)
    assert order == [False, True, True, False]
    assert result.without == (1.0, 4.0)
    assert result.with_probes == (6.0, 9.0)
    assert result.ratios == (6.0, 2.25)
    assert result.ratio == 4.125
    assert result.spread == (2.25, 6.0)


def test_overhead_takes_the_probes_off_when_a_measurement_fails() -> None:
    switch = Switch()

    def measure() -> float:
        if switch.on:
            raise RdmalabError("broken")
        return 1.0

    with pytest.raises(RdmalabError, match="broken"):
        overhead(measure, switch, 1)
    assert not switch.on


def test_no_rounds_are_wrong_use() -> None:
    with pytest.raises(UsageError):
        overhead(lambda: 1.0, Switch(), 0)


def test_text_shows_counts_losses_and_what_is_missing() -> None:
    text = render([HISTOGRAM, Histogram("node0", "work_delay", "", "ns", missing="no do_work")])
    assert "node0 stage_time rxe_rcv: 7, p50 < 1.28 us, p99 < 1.28 us, 2 lost" in text
    assert "node0 work_delay: missing: no do_work" in text
    assert "nothing counted" in render([Histogram("node0", "work_delay", "", "ns")])


def test_listing_of_the_catalogue_fits_the_schema() -> None:
    VALIDATOR.validate({"probes": [agent.describe_probe(probe) for probe in PROBES.values()]})
