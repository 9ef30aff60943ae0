# SPDX-License-Identifier: Apache-2.0
"""Two nodes measured from here: the real driver in two local processes, TCP over loopback."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import rdmalab
from rdmalab.errors import RdmalabError, UsageError
from rdmalab.lab.package import Package
from rdmalab.lab.process import Lines
from rdmalab.measure import bench, proof
from rdmalab.measure.measurement import Measurement, Point
from rdmalab.measure.node import driver
from rdmalab.measure.node.request import Claim, Request
from rdmalab.probe.histogram import Bucket, Histogram
from rdmalab.rdma import endpoint

NATIVE = Path(rdmalab.__file__).parent / "measure/node/native"
SETTING = bench.Setting("hardware", 2, "test")
LATENCY = Point("send", 64, transport="tcp", iterations=60, warmup=5)
STREAM = replace(LATENCY, kind="bandwidth", size=4096, qps=2)
ROUTE = bench.Route("loop", ("127.0.0.1", "127.0.0.1"), ("lo", "lo"))


@dataclass
class End:
    link: str
    peer: str
    netdev: str = "lo"
    kind: str = "tcp"
    ipv4: str = "127.0.0.1/8"


class LocalProcess:
    """Like lab.process.Process, for a process of this host."""

    def __init__(self, argv: Sequence[str], path: Path) -> None:
        self.local = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(path), "PYTHONSAFEPATH": "1"},
        )
        assert self.local.stdin is not None
        assert self.local.stdout is not None
        self.stdin = io.TextIOWrapper(self.local.stdin, line_buffering=True)
        self.stdout = Lines(self.local.stdout, lambda: 0.1)

    def poll(self) -> int | None:
        return self.local.poll()

    def stop(self) -> None:
        self.local.kill()
        self.local.wait()

    def stderr(self) -> str:
        assert self.local.stderr is not None
        return self.local.stderr.read().decode() if self.local.poll() is not None else ""


@dataclass
class LocalNode:
    """Runs a driver here, from a copy of the package such as nodes get."""

    name: str
    path: Path
    links: dict[str, End] = field(default_factory=dict)
    started: list[LocalProcess] = field(default_factory=list)

    def popen_python(self, module: str, args: Sequence[str] = ()) -> LocalProcess:
        process = LocalProcess([sys.executable, "-m", module, *args], self.path)
        self.started.append(process)
        return process


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (gcc) on this host")
    folder = tmp_path_factory.mktemp("package")
    library = folder / "tcp.so"
    subprocess.run(
        [compiler, "-O2", "-shared", "-fPIC", str(NATIVE / "tcp.c"), "-o", str(library)],
        check=True,
    )
    with tarfile.open(fileobj=io.BytesIO(Package.build(native=[library]).archive)) as archive:
        archive.extractall(folder / "copy", filter="data")
    return folder / "copy"


@pytest.fixture(autouse=True)
def _one_netdev(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loopback counts what either end sends at both, so half is beside the work."""
    monkeypatch.setattr(proof, "REST_FLOOR", 1 << 60)


@pytest.fixture
def nodes(package: Path) -> Iterator[tuple[LocalNode, LocalNode]]:
    pair = (
        LocalNode("a", package, {"loop": End("loop", "b")}),
        LocalNode("b", package, {"loop": End("loop", "a")}),
    )
    yield pair
    left = [one for node in pair for one in node.started if one.poll() is None]
    for one in left:
        one.stop()
    assert not left, "processes were left running"


def run(nodes: tuple[LocalNode, LocalNode], *points: Point, **options: Any) -> list[Measurement]:
    return bench.run(*nodes, points, setting=SETTING, **{"route": ROUTE, **options})


def test_points_are_measured_in_turn_by_one_pair_of_processes(
    nodes: tuple[LocalNode, LocalNode],
) -> None:
    said: list[str] = []
    found = run(nodes, LATENCY, STREAM, alternations=2, progress=said.append)
    assert [one.point.kind for one in found] == ["latency", "bandwidth"] * 2
    for one in found:
        assert (one.proof.verdict, one.tool, one.nodes) == ("proven", "rdmalab", ("a", "b"))
        assert (one.accelerator, one.vcpus, one.kernel, one.link) == ("hardware", 2, "test", "loop")
    latency, stream = found[0], found[1]
    assert len(latency.samples_us) == 60
    assert all(0 < us < 1e6 for us in latency.samples_us)
    assert latency.mib_s is None
    assert stream.mib_s is not None
    assert stream.mib_s > 0
    assert stream.samples_us == ()
    assert [len(node.started) for node in nodes] == [1, 1]
    assert "tcp send latency 64 B event: rdmalab, round 2 of 2" in said


def test_latency_is_half_of_what_the_loop_timed(nodes: tuple[LocalNode, LocalNode]) -> None:
    """Samples and the loop's own sum of round trips come on two ways."""
    with bench.Pair(*nodes, ROUTE) as pair:
        found = pair.run("rdmalab", LATENCY)
    one = bench.measurement("rdmalab", LATENCY, "loop", ("a", "b"), SETTING, found)
    elapsed_us = found.answers["initiator"]["outcome"]["elapsed_ns"] / 1000
    assert sum(one.samples_us) == pytest.approx(elapsed_us / 2)


def test_more_samples_than_fit_on_a_line_all_arrive(nodes: tuple[LocalNode, LocalNode]) -> None:
    (one,) = run(nodes, replace(LATENCY, iterations=20_500))
    assert len(one.samples_us) == 20_500


def test_work_that_went_over_another_link_has_no_number(
    nodes: tuple[LocalNode, LocalNode],
) -> None:
    """The bytes go over loopback; the link that is claimed is another, idle netdev."""
    idle = next(
        (path.name for path in sorted(Path("/sys/class/net").iterdir()) if path.name != "lo"),
        "none",
    )
    said: list[str] = []
    point = replace(STREAM, size=1 << 20, iterations=40)
    (one,) = run(nodes, point, route=replace(ROUTE, netdevs=(idle, idle)), progress=said.append)
    assert one.proof.verdict == "refused"
    assert "the link" in one.proof.reason
    assert (one.samples_us, one.given_us, one.mib_s) == ((), {}, None)
    assert said[-1] == f"tcp send bandwidth 1048576 B event 2 QPs: refused: {one.proof.reason}"


@pytest.mark.parametrize("victim", [0, 1])
def test_an_end_that_is_killed_ends_the_run_with_one_line(
    nodes: tuple[LocalNode, LocalNode], victim: int
) -> None:
    def kill() -> None:
        """Once it is in its loop, which the processor time it took shows."""
        until = time.monotonic() + 60
        while time.monotonic() < until:
            time.sleep(0.05)
            if all(node.started and _cpu_seconds(node.started[0]) > 0.8 for node in nodes):
                break
        nodes[victim].started[0].local.send_signal(signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    endless = replace(LATENCY, iterations=3_000_000)
    with pytest.raises(RdmalabError) as error:
        run(nodes, endless)
    thread.join()
    line = str(error.value)
    name = "ab"[victim]
    assert line.startswith(f"{name}: the measuring process ended during a measurement: status -9")
    assert "\n" not in line


def _cpu_seconds(process: LocalProcess) -> float:
    words = Path(f"/proc/{process.local.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def test_an_end_that_fails_is_named_and_not_the_one_that_saw_it(
    nodes: tuple[LocalNode, LocalNode],
) -> None:
    """b has no address 192.0.2.1 to listen on; a only finds nobody."""
    elsewhere = replace(ROUTE, addresses=("127.0.0.1", "192.0.2.1"))
    with pytest.raises(RdmalabError, match=r"cannot listen on 192\.0\.2\.1") as error:
        run(nodes, LATENCY, route=elsewhere, factor=0.05)
    assert str(error.value).startswith("b: rdmalab tcp send latency 64 B event failed")


def test_an_interrupt_leaves_nothing_running(nodes: tuple[LocalNode, LocalNode]) -> None:
    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(nodes, LATENCY, LATENCY, progress=_second(interrupt))
    assert [len(node.started) for node in nodes] == [1, 1]


def _second(then: Callable[[str], None]) -> Callable[[str], None]:
    lines: list[str] = []

    def progress(line: str) -> None:
        lines.append(line)
        if len(lines) == 2:
            then(line)

    return progress


def test_a_point_that_cannot_be_measured_starts_nothing(
    nodes: tuple[LocalNode, LocalNode],
) -> None:
    with pytest.raises(UsageError, match="TCP has send only"):
        run(nodes, LATENCY, replace(LATENCY, op="read"))
    with pytest.raises(UsageError, match="transport bogus cannot be proven"):
        run(nodes, replace(LATENCY, transport="bogus"))
    assert [node.started for node in nodes] == [[], []]


def test_perftest_is_left_out_where_it_cannot_measure_and_that_is_said(
    nodes: tuple[LocalNode, LocalNode],
) -> None:
    said: list[str] = []
    found = run(nodes, LATENCY, perftest=True, progress=said.append)
    assert [one.tool for one in found] == ["rdmalab"]
    assert said[0] == "tcp send latency 64 B event: without perftest: perftest measures RDMA only"


def test_probes_are_on_for_a_measurement_of_their_own_beside_the_plain_one(
    nodes: tuple[LocalNode, LocalNode],
) -> None:
    class Probes:
        calls: list[str] = []  # noqa: RUF012 (one test's own)

        def covers(self, transport: str) -> bool:
            return True

        def start(self) -> None:
            self.calls.append("start")

        def stop(self) -> list[Histogram]:
            self.calls.append("stop")
            return [Histogram("a", "post_to_completion", "SEND", "ns", (Bucket(1, 2, 3),))]

    probes = Probes()
    found = run(nodes, LATENCY, alternations=2, probes=probes)
    assert probes.calls == ["start", "stop"] * 2
    assert [one.tool for one in found] == ["rdmalab", "probed", "probed", "rdmalab"]
    for one in found:
        probes_seen = [histogram.probe for histogram in one.histograms]
        assert probes_seen == (["post_to_completion"] if one.tool == "probed" else [])


def test_the_route_is_the_only_link_or_the_one_named(
    nodes: tuple[LocalNode, LocalNode],
) -> None:
    a, b = nodes
    assert bench.route_between(a, b) == ROUTE
    a.links["second"] = End("second", "b", "eth9")
    b.links["second"] = End("second", "a", "eth8", ipv4="10.1.0.2/24")
    with pytest.raises(UsageError, match="several links join a and b; name one with --link"):
        bench.route_between(a, b)
    assert bench.route_between(a, b, "second").netdevs == ("eth9", "eth8")
    with pytest.raises(UsageError, match="link third does not join a and b"):
        bench.route_between(a, b, "third")
    with pytest.raises(UsageError, match="are both a"):
        bench.route_between(a, a)
    with pytest.raises(UsageError, match="no link joins"):
        bench.route_between(a, LocalNode("c", a.path))


def test_a_device_that_cannot_be_read_is_not_taken_for_absent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else TCP would be measured with its rival's counters out of sight."""

    def unreadable(netdev: str) -> str:
        raise RdmalabError("rxe0 has gone", node=netdev)

    def absent(netdev: str) -> str:
        raise endpoint.NoDevice("none", node=netdev)

    claim = Claim("tcp", "", "eth9")
    request = Request(1, "rdmalab", "target", "a", LATENCY, "", "::1", "::1", 1, claim)
    monkeypatch.setattr(endpoint, "device_on", unreadable)
    with pytest.raises(RdmalabError, match="rxe0 has gone"):
        driver.Driver()._resolve(request)
    monkeypatch.setattr(endpoint, "device_on", absent)
    assert driver.Driver()._resolve(request).claim.device == ""
