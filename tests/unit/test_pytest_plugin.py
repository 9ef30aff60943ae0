# SPDX-License-Identifier: Apache-2.0
"""The plugin's verdicts, on a lab without guests: what each fault does to a session."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from junitparser import JUnitXml

from rdmalab.lab import guard, pytest_plugin
from rdmalab.lab.run import Run

pytest_plugins = ["pytester"]

UNIT = str(Path(__file__).parent)

CONFTEST = """
import sys
from pathlib import Path
import pytest
sys.path.insert(0, {unit!r})
from fake_lab import FakeSource
from rdmalab.errors import HostError, NodeLost, UsageError

@pytest.fixture(scope="session")
def lab_source():
    return FakeSource(Path({here!r}), {error})
"""


class Outcome:
    def __init__(self, result: pytest.RunResult, here: Path) -> None:
        self.status = int(result.ret)
        self.text = "\n".join(result.outlines)
        self.here = here
        self.run = Run.open(here / "results" / "latest")
        [suite] = list(JUnitXml.fromfile(str(self.run.folder / "junit.xml")))
        self.cases = {
            case.name: [(each.type, each.message) for each in case.result] for case in suite
        }
        journal = here / "lab" / "journal"
        self.journal = journal.read_text().splitlines() if journal.exists() else []

    @property
    def actions(self) -> list[str]:
        return [line for line in self.journal if line != "capture_stop"]

    @property
    def captures(self) -> list[str]:
        return sorted(path.name for path in (self.run.folder / "captures").iterdir())


Session = Callable[..., Outcome]


@pytest.fixture
def session(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Session:
    # A node without a guest answers at once or never.
    monkeypatch.setattr(guard, "_ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(guard, "_DUMP_QUIET", 0.3)
    monkeypatch.setattr(guard, "_EVENT_SECONDS", 0.5)

    def go(source: str, *options: str, error: str = "None") -> Outcome:
        here = pytester.path
        pytester.makeconftest(CONFTEST.format(unit=UNIT, here=str(here), error=error))
        pytester.makepyfile(test_inner="import pytest, time\n" + source)
        result = pytester.runpytest_inprocess(
            "-p", "rdmalab.lab.pytest_plugin", "-p", "no:cacheprovider", *options
        )
        return Outcome(result, here)

    return go


def test_a_quiet_session_passes_and_leaves_its_run(session: Session) -> None:
    outcome = session(
        """
def test_a(node0, node1):
    node0.run(["true"])

def test_b(lab, run_folder):
    run_folder.write("note.txt", lab.name)

def test_c(lab):
    pytest.skip("no device")
"""
    )
    assert outcome.status == 0
    assert outcome.cases == {
        "test_a": [],
        "test_b": [],
        "test_c": [("skipped", "Skipped: no device")],
    }
    assert outcome.actions == ["down"]
    manifest = outcome.run.manifest
    assert manifest.lab is not None
    assert (manifest.lab.kernel, manifest.lab.nodes) == ("7.3.4-fake", ("node0", "node1"))
    assert (manifest.exit_status, manifest.versions) == (0, {"qemu": "11.1.3"})
    assert manifest.counts == {"passed": 2, "failed": 0, "error": 0, "lost": 0, "skipped": 1}
    assert manifest.ended is not None
    assert (outcome.run.folder / "note.txt").read_text() == "fake"
    assert "Linux version" in (outcome.run.folder / "console-node1.log").read_text()
    assert outcome.captures == []
    assert re.search(r"vm tests: 2 passed, 1 skipped in \d+ s; run .*", outcome.text)


def test_a_failed_test_keeps_its_packets(session: Session) -> None:
    outcome = session("def test_a(node0):\n    assert 1 == 2\n\ndef test_b(node0):\n    pass\n")
    assert outcome.status == 1
    assert outcome.captures == ["test_inner.py-test_a-roce0.pcap"]
    assert outcome.cases["test_a"][0][0] == "failed"
    assert outcome.cases["test_b"] == []


def test_a_splat_fails_the_test_that_ran_by_name(session: Session) -> None:
    outcome = session(
        'def test_a(node0):\n    node0.run(["splat", "warning-7.3"])\n\n'
        "def test_b(node0):\n    pass\n"
    )
    assert outcome.status == 1
    assert outcome.cases == {
        "test_a": [("failed", "node0: WARNING at raise.c:42 faultpoint_warn")],
        "test_b": [],
    }
    assert "full_proxy_write" in outcome.text
    assert outcome.actions == ["down"]


def test_a_splat_beside_a_failure_is_shown(session: Session) -> None:
    outcome = session('def test_a(node0):\n    node0.run(["splat", "kasan"])\n    assert 1 == 2\n')
    [(_, message)] = outcome.cases["test_a"]
    assert "assert 1 == 2" in message
    assert "node0: KASAN: slab-use-after-free in rxe_completer" in outcome.text


def test_a_splat_in_teardown_is_an_error_of_its_test(session: Session) -> None:
    outcome = session(
        """
@pytest.fixture
def device(node0):
    yield
    node0.run(["splat", "bug"])

def test_a(device):
    pass

def test_b(node0):
    pass
"""
    )
    assert outcome.status == 1
    # Seen by whoever counts either: the test and the error of its teardown.
    assert "node0: kernel BUG at rxe_pool.c:120 (during teardown)" in outcome.text
    assert outcome.cases["test_b"] == []


def test_a_splat_in_the_last_teardown_is_seen(session: Session) -> None:
    outcome = session(
        """
@pytest.fixture
def device(node0):
    yield
    node0.run(["splat", "bug"])

def test_a(device):
    pass
"""
    )
    assert outcome.status == 1
    assert "kernel BUG at rxe_pool.c:120 (during teardown)" in outcome.text
    assert outcome.captures == ["test_inner.py-test_a-roce0.pcap"]


def test_expected_splats_pass_and_only_they(session: Session) -> None:
    outcome = session(
        """
@pytest.mark.expects_splat(r"raise\\.c:42")
def test_a(node0):
    node0.run(["splat", "warning-7.3"])

@pytest.mark.expects_splat(r"raise\\.c:42")
def test_b(node0):
    pass

@pytest.mark.expects_splat(r"raise\\.c:42")
def test_c(node0):
    node0.run(["splat", "warning-7.3"])
    node0.run(["splat", "bug"])
"""
    )
    assert outcome.status == 1
    assert outcome.cases["test_a"] == []
    [(_, message)] = outcome.cases["test_b"]
    assert "a splat was expected" in message
    assert outcome.cases["test_c"] == [("failed", "node0: kernel BUG at rxe_pool.c:120")]


def test_a_panic_fails_its_test_and_the_node_comes_back(session: Session) -> None:
    outcome = session(
        """
def test_a(node0):
    node0.run(["panic"])

def test_b(node0, node1):
    node0.run(["true"])
"""
    )
    assert outcome.status == 1
    [(kind, message)] = outcome.cases["test_a"]
    assert kind == "failed"
    assert message.startswith(
        "node0: the guest panicked: kernel NULL pointer dereference in faultpo"
    )
    assert outcome.cases["test_b"] == []
    assert outcome.actions == ["restart node0", "down"]
    assert "console of node0, last lines" in outcome.text


def test_a_panic_interrupts_a_test_that_waits_elsewhere(session: Session) -> None:
    outcome = session(
        """
def test_a(lab, node0):
    lab.event("node1", "GUEST_PANICKED")
    time.sleep(30)
"""
    )
    assert outcome.status == 1
    assert outcome.cases["test_a"] == [
        ("failed", "node1: the guest panicked: its console does not say why")
    ]
    case_seconds = float(re.findall(r'name="test_a" time="([\d.]+)"', _xml(outcome))[0])
    assert case_seconds < 10


def _xml(outcome: Outcome) -> str:
    return (outcome.run.folder / "junit.xml").read_text()


def test_an_expected_panic_passes(session: Session) -> None:
    outcome = session(
        """
from rdmalab.lab.node import NodePanicked

@pytest.mark.expects_splat("faultpoint_oops")
@pytest.mark.expects_panic("Fatal exception")
def test_a(node0):
    with pytest.raises(NodePanicked):
        node0.run(["panic"])

@pytest.mark.expects_panic("Fatal exception")
def test_b(node0):
    node0.run(["true"])
"""
    )
    assert outcome.cases["test_a"] == []
    assert outcome.cases["test_b"] == [
        ("failed", "a panic was expected ('Fatal exception'), and none came")
    ]
    assert outcome.actions == ["restart node0", "down"]


def test_a_connection_that_breaks_while_qemu_runs_is_the_guests_doing(session: Session) -> None:
    outcome = session(
        """
def test_a(lab, node0):
    lab.nodes["node0"].state = "broken"
    node0.run(["true"])

def test_b(node0):
    pass
"""
    )
    assert outcome.status == 1
    [(kind, message)] = outcome.cases["test_a"]
    assert (kind, message) == ("failed", "node0: the connection broke")
    assert outcome.cases["test_b"] == []
    assert "restart node0" in outcome.actions


def test_a_lost_qemu_ends_the_session(session: Session) -> None:
    outcome = session(
        """
def test_a(lab, node0):
    lab.kill("node0")
    node0.run(["true"])

def test_b(node0):
    pass
"""
    )
    assert outcome.status == 3
    [(kind, message)] = outcome.cases["test_a"]
    assert kind == "lost"
    assert message.startswith("node0: its QEMU ended without a panic of the guest: status -9")
    assert "test_b" not in outcome.cases
    assert outcome.run.manifest.counts == {
        "passed": 0, "failed": 0, "error": 0, "lost": 1, "skipped": 0,
    }  # fmt: skip
    assert outcome.run.manifest.exit_status == 3
    assert "LOST node0: its QEMU ended" in outcome.text
    assert outcome.actions == ["down"]


def test_a_qemu_lost_behind_a_passing_test_is_lost_all_the_same(session: Session) -> None:
    outcome = session('def test_a(lab):\n    lab.kill("node1")\n')
    assert outcome.status == 3
    assert outcome.cases["test_a"][0][0] == "lost"


def test_a_node_that_a_test_kills_comes_back(session: Session) -> None:
    outcome = session(
        """
from rdmalab.errors import NodeLost

@pytest.mark.kills("node0")
def test_a(lab, node0):
    lab.kill("node0")
    time.sleep(0.6)
    with pytest.raises(NodeLost):
        node0.run(["true"])

def test_b(node0):
    node0.run(["true"])
"""
    )
    assert outcome.status == 0
    assert outcome.actions == ["restart node0", "down"]


def test_a_guest_that_powers_itself_off_fails_its_test(session: Session) -> None:
    outcome = session(
        'def test_a(node0):\n    node0.run(["poweroff"])\n\ndef test_b(node0):\n    pass\n'
    )
    assert outcome.status == 1
    assert outcome.cases == {
        "test_a": [("failed", "node0: the guest powered itself off")],
        "test_b": [],
    }


def test_a_hang_is_dumped_and_the_node_comes_back(session: Session) -> None:
    outcome = session(
        """
@pytest.mark.deadline(1)
def test_a(node0):
    node0.run(["hang"])

def test_b(node0):
    node0.run(["true"])
"""
    )
    assert outcome.status == 1
    [(kind, message)] = outcome.cases["test_a"]
    assert kind == "failed"
    assert message.startswith("node0: the guest hangs")
    assert "the test deadline of 1 s passed" in message
    assert "Kernel panic: NMI: Not continuing in faultpoint_hang" in outcome.text
    assert outcome.cases["test_b"] == []
    # node1 answered, but what the test left there is not known.
    assert outcome.actions == ["nmi node0", "restart node0", "restart node1", "down"]


def test_a_test_that_leaves_a_node_hanging_is_caught(session: Session) -> None:
    outcome = session(
        'def test_a(lab):\n    lab.nodes["node1"].state = "hung"\n', "--deadline", "2"
    )
    assert outcome.status == 1
    assert outcome.cases["test_a"][0][1].startswith("node1: the guest hangs")


def test_a_test_that_waits_for_ever_on_a_healthy_node(session: Session) -> None:
    outcome = session(
        "@pytest.mark.deadline(1)\ndef test_a(node0):\n"
        '    node0.run(["sleep", "100"])\n\ndef test_b(node0):\n    pass\n'
    )
    assert outcome.status == 1
    assert "the test deadline of 1 s passed" in outcome.cases["test_a"][0][1]
    assert "nmi node0" not in outcome.journal
    assert outcome.cases["test_b"] == []


def test_a_loop_in_the_test_itself_is_ended(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pytest_plugin, "_ALARM_GRACE", 0.5)
    outcome = session(
        """
@pytest.mark.deadline(0.5)
def test_a(lab):
    while True:
        pass
"""
    )
    assert outcome.status == 1
    assert "the test still runs: the test deadline of 0.5 s passed" in outcome.text


def test_the_runs_deadline_ends_the_session(session: Session) -> None:
    outcome = session(
        'def test_a(node0):\n    node0.run(["sleep", "100"])\n\ndef test_b(node0):\n    pass\n',
        "--run-deadline",
        "1",
    )
    assert outcome.status == 1
    assert "the run deadline of 1 s passed" in outcome.text
    assert "test_b" not in outcome.cases


def test_a_splat_at_boot_is_a_failure_of_its_own(
    session: Session, pytester: pytest.Pytester
) -> None:
    warning = (Path(__file__).parent.parent / "data" / "console" / "warning-7.3.txt").read_text()
    (pytester.path / "boot.txt").write_text(warning)
    outcome = session("def test_a(node0):\n    pass\n")
    assert outcome.status == 1
    assert outcome.cases == {
        "node0": [("failed", "node0: WARNING at raise.c:42 faultpoint_warn")],
        "test_a": [],
    }
    assert "FAILED while booting: node0: WARNING at raise.c:42" in outcome.text


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ("HostError('no KVM', todo='apt install it')", 4),
        ("UsageError('no such topology')", 2),
        ("NodeLost('QEMU ended')", 3),
    ],
)
def test_a_lab_that_does_not_come_up_ends_with_its_status(
    session: Session, error: str, status: int
) -> None:
    outcome = session("def test_a(node0):\n    pass\n", error=error)
    assert outcome.status == status
    assert outcome.run.manifest.exit_status == status
    assert list(outcome.cases) == ["lab"]


def test_a_bad_allow_list_is_wrong_use(pytester: pytest.Pytester) -> None:
    (pytester.path / "splats.toml").write_text('[[splat]]\nmatch = "x"\n')
    pytester.makeconftest(CONFTEST.format(unit=UNIT, here=str(pytester.path), error="None"))
    pytester.makepyfile("def test_a(node0):\n    pass\n")
    result = pytester.runpytest_inprocess("-p", "rdmalab.lab.pytest_plugin")
    assert result.ret == 2
    assert "splat 1 has no reason" in "\n".join([*result.outlines, *result.errlines])


def test_shuffle_draws_an_order_and_says_the_seed(session: Session) -> None:
    source = (
        "\n".join(f"def test_{n}():\n    pass\n" for n in range(8)) + "\ndef test_x(lab): pass\n"
    )
    first = session(source, "--shuffle", "7", "-v")
    assert "rdmalab: order from --shuffle 7" in first.text
    assert first.run.manifest.seed == 7
    order = re.findall(r"::(test_\w+) PASSED", first.text)
    assert len(order) == 9
    assert order != sorted(order)


def test_the_manifest_is_json_with_the_command_line(session: Session) -> None:
    outcome = session("def test_a(lab):\n    pass\n")
    data = json.loads((outcome.run.folder / "manifest.json").read_text())
    assert data["schema"] == 1
    assert "no:cacheprovider" in data["argv"]


def test_without_a_lab_nothing_is_made(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_a(): pass")
    result = pytester.runpytest_inprocess("-p", "rdmalab.lab.pytest_plugin")
    result.assert_outcomes(passed=1)
    assert not (pytester.path / "results").exists()


@pytest.mark.parametrize("seed", ["x", "-1", "1.5"])
def test_a_bad_seed_is_refused(pytester: pytest.Pytester, seed: str) -> None:
    result = pytester.runpytest_inprocess("-p", "rdmalab.lab.pytest_plugin", f"--shuffle={seed}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "give a number, or 'random'" in "\n".join(result.errlines)
