# SPDX-License-Identifier: Apache-2.0
"""The harness on real guests: what it can do on a node, and that each fault ends the way
it should. The faults that fail a test or end a session happen in a session of their own,
in a lab called meta, whose outcome is looked at from here."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from junitparser import JUnitXml

from rdmalab.errors import CommandFailed, DeadlineExceeded, NodeLost
from rdmalab.lab import module
from rdmalab.lab.lab import Lab, names, take_down
from rdmalab.lab.node import Node
from rdmalab.lab.paths import Paths
from rdmalab.lab.run import Run

META = "meta"


@pytest.fixture
def faultpoint(node0: Node) -> Iterator[Node]:
    module.load(node0, "faultpoint", Paths.find().modules)
    yield node0
    module.unload(node0, "faultpoint")


class TestNode:
    def test_arguments_and_input_arrive(self, node0: Node) -> None:
        words = ["a b", "'", '"', "$HOME", "\n", "-n", "--", "ü"]
        program = 'for word; do printf "<%s>" "$word"; done; cat'
        result = node0.run(["sh", "-c", program, "sh", *words], input="in\n")
        assert result.stdout == "".join(f"<{word}>" for word in words) + "in\n"

    def test_failure_and_signal_are_told_apart(self, node1: Node) -> None:
        with pytest.raises(CommandFailed, match="node1: false: exit status 1"):
            node1.run(["false"])
        with pytest.raises(CommandFailed, match="ended by signal 9"):
            node1.run(["sh", "-c", "kill -9 $$"])
        assert node1.run(["sh", "-c", "exit 255"], check=False).status == 255

    def test_files_there_and_back(self, node0: Node, tmp_path: Path) -> None:
        here, back = tmp_path / "here", tmp_path / "back"
        here.write_bytes(os.urandom(1 << 20))
        node0.put(here, "/tmp/a file", 0o600)
        assert node0.run(["stat", "-c", "%a %s", "/tmp/a file"]).stdout == f"600 {1 << 20}\n"
        node0.get("/tmp/a file", back)
        assert back.read_bytes() == here.read_bytes()
        node0.run(["rm", "/tmp/a file"])

    def test_a_timeout_leaves_no_process_on_the_node(self, node0: Node) -> None:
        with pytest.raises(DeadlineExceeded, match=r"node0: sleep 4321\.5: still running"):
            node0.run(["sleep", "4321.5"], timeout=2)
        assert self._sleepers(node0, "4321.5") == ""

    def test_stop_leaves_no_process_on_the_node(self, node0: Node) -> None:
        with node0.popen(["sh", "-c", "echo ready; sleep 4322.5"]) as process:
            assert process.stdout.readline(60) == "ready"
        assert self._sleepers(node0, "4322.5") == ""

    def test_a_killed_caller_leaves_no_process_on_the_node(self, lab: Lab, node0: Node) -> None:
        program = "from rdmalab.cli import main; main()"
        command = ["run", "--name", lab.name, "node0", "--", "sleep", "4323.5"]
        with subprocess.Popen([sys.executable, "-c", program, *command]) as caller:
            self._wait(lambda: self._sleepers(node0, "4323.5") != "")
            caller.kill()
        self._wait(lambda: self._sleepers(node0, "4323.5") == "")

    def test_our_package_runs_there(self, node0: Node) -> None:
        assert node0.python("rdmalab.errors").status == 0
        path = node0.run(["sh", "-c", "ls -d /run/rdmalab/python/*/rdmalab/errors.py"]).stdout
        assert path.count("\n") == 1

    def test_nodes_reach_each_other_over_each_link(self, node0: Node, node1: Node) -> None:
        for link, end in node0.links.items():
            assert node1.links[link].peer == "node0"
            address = node1.links[link].ipv4.partition("/")[0]
            node0.run(["ping", "-c", "1", "-W", "10", "-I", end.netdev, address])

    @staticmethod
    def _sleepers(node: Node, seconds: str) -> str:
        return node.run(["pgrep", "-fx", f"sleep {seconds}"], check=False).stdout

    @staticmethod
    def _wait(condition: Callable[[], bool]) -> None:
        until = time.monotonic() + 40
        while not condition():
            assert time.monotonic() < until
            time.sleep(0.2)


@pytest.mark.expects_splat(r"^WARNING at .*faultpoint_warn")
def test_an_expected_warning_passes(faultpoint: Node) -> None:
    faultpoint.run(["sh", "-c", "echo 1 >/sys/kernel/debug/faultpoint/warn"])


@pytest.mark.kills("node1")
def test_a_killed_qemu_is_a_lost_node(lab: Lab, node1: Node) -> None:
    process = node1.popen(["sleep", "1000"])
    start = time.monotonic()
    lab.kill("node1", signal.SIGKILL)
    with pytest.raises(NodeLost, match="node1"):
        process.wait()
    assert time.monotonic() - start < 10
    with pytest.raises(NodeLost, match="node1"):
        node1.run(["true"])


def test_a_node_that_was_killed_is_back(node0: Node, node1: Node) -> None:
    # In whatever order they ran: no test before this one has left a node dead.
    assert node0.run(["hostname"]).stdout == "node0\n"
    assert node1.run(["hostname"]).stdout == "node1\n"


# Faults that fail a test or end a session

FAULTS = """
import pytest
from rdmalab.lab import module
from rdmalab.lab.paths import Paths


@pytest.fixture
def faultpoint(node0):
    module.load(node0, "faultpoint", Paths.find().modules)
    return node0


def raise_(node, name, value="1"):
    node.run(["sh", "-c", 'echo "$1" >/sys/kernel/debug/faultpoint/$0', name, value])


def test_warn(faultpoint):
    raise_(faultpoint, "warn")


def test_after_warn(node0):
    node0.run(["true"])


def test_oops(faultpoint):
    raise_(faultpoint, "oops")


def test_after_oops(node0, node1):
    assert node0.run(["cat", "/proc/sys/kernel/tainted"]).stdout == "0\\n"
    address = node1.links["roce0"].ipv4.partition("/")[0]
    node0.run(["ping", "-c", "1", "-W", "10", address])


@pytest.mark.deadline(6)
def test_hang(faultpoint):
    raise_(faultpoint, "hang_irq", "forever")


def test_after_hang(node0):
    node0.run(["true"])


def test_packets(node0, node1):
    node0.run(["ping", "-c", "1", "-W", "10", node1.links["roce0"].ipv4.partition("/")[0]])
    assert "the packets" == "kept"
"""

LOSS = """
import signal


def test_lost(lab, node0):
    lab.kill("node0", signal.SIGKILL)
    node0.run(["true"])


def test_never(node0):
    pass
"""

WAIT = """
def test_wait(node0):
    node0.run(["sleep", "1000"])
"""


@dataclass(frozen=True)
class Session:
    """What an inner session left."""

    status: int
    text: str
    run: Run
    outcomes: dict[str, str]


@pytest.fixture
def meta(tmp_path: Path, lab: Lab) -> Iterator[Path]:
    """A directory for an inner session; its lab is gone at the end, whatever happened."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    yield tmp_path
    take_down(Paths.find(), META)


def _command(directory: Path, source: str, lab: Lab, topology: str) -> list[str]:
    (directory / "test_inner.py").write_text(source)
    return [
        *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider"),
        *("-p", "rdmalab.lab.pytest_plugin"),
        *("--lab", META, "--topology", topology, "--kernel", lab.tier, "--accel", lab.accelerator),
        *("--results", str(directory / "results"), str(directory)),
    ]  # fmt: skip


def _run(directory: Path, source: str, lab: Lab, topology: str) -> Session:
    done = subprocess.run(
        _command(directory, source, lab, topology),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
        cwd=directory,
        env={**os.environ, "RDMALAB_REPO": str(Paths.find().repo)},
    )
    print(done.stdout)
    assert names(Paths.find()).count(META) == 0, "the inner session left its lab up"
    run = Run.open(directory / "results" / "latest")
    [suite] = list(JUnitXml.fromfile(str(run.folder / "junit.xml")))
    outcomes = {
        case.name: "; ".join(f"{each.type}: {each.message}" for each in case.result) or "passed"
        for case in suite
    }
    return Session(done.returncode, done.stdout, run, outcomes)


@pytest.mark.deadline(240)
def test_splat_panic_and_hang_fail_their_test_by_name(lab: Lab, meta: Path) -> None:
    session = _run(meta, FAULTS, lab, "pair")
    seen = session.outcomes
    assert re.match(r"failed: node0: WARNING at \S+:\d+ faultpoint_warn", seen["test_warn"])
    assert seen["test_after_warn"] == "passed"
    assert seen["test_oops"].startswith(
        "failed: node0: the guest panicked: kernel NULL pointer dereference in faultpoint_oops"
    )
    assert seen["test_after_oops"] == "passed"
    assert seen["test_hang"].startswith("failed: node0: the guest hangs")
    assert "the test deadline of" in seen["test_hang"]
    assert re.search(r"Kernel panic: NMI.* in \S*(faultpoint|delay)", session.text)
    assert seen["test_after_hang"] == "passed"
    assert seen["test_packets"].startswith("failed: ")
    assert session.status == 1
    assert session.run.manifest.exit_status == 1
    assert session.run.manifest.counts["failed"] == 4
    console = (session.run.folder / "console-node0.log").read_text(errors="replace")
    assert console.count("Linux version") == 3  # the first boot and those after oops and hang
    kept = {path.name: path.stat().st_size for path in (session.run.folder / "captures").iterdir()}
    assert set(kept) == {
        f"test_inner.py-test_{name}-roce0.pcap" for name in ("warn", "oops", "hang", "packets")
    }  # fmt: skip
    assert kept["test_inner.py-test_packets-roce0.pcap"] > 24 + 2 * 16  # two packets at least


@pytest.mark.deadline(120)
def test_a_lost_qemu_ends_the_session_with_status_3(lab: Lab, meta: Path) -> None:
    session = _run(meta, LOSS, lab, "solo")
    assert session.status == 3
    assert list(session.outcomes) == ["test_lost"]
    assert session.outcomes["test_lost"].startswith("lost: node0: its QEMU ended")
    assert session.run.manifest.counts["lost"] == 1
    assert session.run.manifest.counts["failed"] == session.run.manifest.counts["passed"] == 0
    assert len(re.findall(r"^LOST node0: ", session.text, re.M)) == 1


@pytest.mark.deadline(120)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_session_that_is_ended_leaves_nothing(
    lab: Lab, meta: Path, number: signal.Signals
) -> None:
    paths = Paths.find()
    command = _command(meta, WAIT, lab, "solo")
    environment = {**os.environ, "RDMALAB_REPO": str(paths.repo)}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=meta,
        env=environment,
        # A shell that runs us in the background has SIGINT ignored, which is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as session:
        until = time.monotonic() + 60 * lab.slow_factor
        while META not in names(paths) or not (paths.labs / META / "state.json").exists():
            assert time.monotonic() < until, "the inner lab did not come up"
            assert session.poll() is None, session.communicate()[0].decode(errors="replace")
            time.sleep(0.2)
        [status] = Lab.attach(META).status().values()
        time.sleep(1)
        session.send_signal(number)
        session.communicate(timeout=30)
    until = time.monotonic() + 15
    while META in names(paths) or Path(f"/proc/{status.pid}").exists():
        assert time.monotonic() < until, "the inner session left its lab up"
        time.sleep(0.1)
