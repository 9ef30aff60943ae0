# SPDX-License-Identifier: Apache-2.0
"""pytest on a lab: ``-p rdmalab.lab.pytest_plugin``.

Fixtures ``lab`` (one for the session, booted or attached to), ``node0``, ``node1`` and
``run_folder``. Markers:

- ``expects_splat(regex)``: such a splat must appear, and is no failure;
- ``expects_panic(regex)``: the guest must panic, with that in its splat;
- ``kills(node, ...)``: the QEMU of these nodes may end;
- ``deadline(seconds)``: on the reference machine, instead of ``--deadline``.

A splat, a panic or a hang fails the test that ran. A QEMU that ends otherwise ends the
session with exit status 3: that test has neither failed nor passed.
"""

from __future__ import annotations

import random
import re
import secrets
import signal
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Protocol, cast

import pytest

from rdmalab.errors import NodeLost, RdmalabError, UsageError
from rdmalab.lab import junit
from rdmalab.lab.console import Allowed, read_allowed
from rdmalab.lab.deadline import Deadline
from rdmalab.lab.guard import Expectation, Guard, LabLike, Verdict
from rdmalab.lab.node import Node
from rdmalab.lab.run import LabFacts, Run

LOST_STATUS = NodeLost.exit_status
_ALARM_GRACE = 15.0  # seconds, times the factor: what waits in ssh ends by itself before
_MARKERS = {
    "expects_splat": "expects_splat(regex): such a splat must appear, and is no failure",
    "expects_panic": "expects_panic(regex): the guest must panic, with that in its splat",
    "kills": "kills(node, ...): the QEMU of these nodes may end",
    "deadline": "deadline(seconds): the test's deadline on the reference machine",
}


class LabSource(Protocol):
    """Where the lab comes from."""

    def get(self, config: pytest.Config) -> tuple[LabLike, bool]:
        """The lab, and whether it is ours to take down."""

    def versions(self) -> dict[str, str]:
        """What the lock file says."""

    def allow_list(self) -> Path:
        """The file of splats that are no failure."""

    def results(self) -> Path:
        """Where run folders go."""


class _RealSource:
    """A lab of that name that is up, else a new one."""

    def get(self, config: pytest.Config) -> tuple[LabLike, bool]:
        from rdmalab.lab.lab import Lab, LabSpec, names
        from rdmalab.lab.paths import Paths

        name = str(config.getoption("--lab"))
        given = {
            key: value
            for key in ("topology", "kernel", "mode", "accel", "vcpus", "memory")
            if (value := config.getoption(f"--{key}")) is not None
        }
        if name in names(Paths.find()):
            lab = Lab.attach(name)
            has = {"topology": lab.topology.name, "kernel": lab.tier, "mode": lab.mode,
                   "vcpus": lab.vcpus, "accel": lab.accelerator}  # fmt: skip
            for key, value in given.items():
                if key in has and has[key] != value and value != "auto":
                    raise UsageError(
                        f"lab {name} is up with --{key} {has[key]}",
                        seen=f"--{key} {value} was asked for",
                        todo=f"rdmalab down --name {name}, or give --lab another name",
                    )
            return cast(LabLike, lab), False
        if "memory" in given:
            given["memory_mib"] = given.pop("memory")
        return cast(LabLike, Lab.up(LabSpec(name=name, **given))), True

    def versions(self) -> dict[str, str]:
        from rdmalab.lab.lockfile import Lock
        from rdmalab.lab.paths import Paths

        lock = Lock.read(Paths.find().lock)
        kernels = {f"kernel {tier}": found.version for tier, found in lock.kernels.items()}
        return {**kernels, **lock.packages}

    def allow_list(self) -> Path:
        from rdmalab.lab.paths import Paths

        return Paths.find().vm / "splats.toml"

    def results(self) -> Path:
        from rdmalab.lab.paths import Paths

        return Paths.find().results


class _Session:
    """The state of one pytest session, in the place that pytest has for it."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.seed: int | None = None
        self.run: Run | None = None
        self.guard: Guard | None = None
        self.lost: NodeLost | None = None
        self.item: pytest.Item | None = None
        self.results: list[junit.TestResult] = []
        self.started = time.time()
        self.armed = False
        self.deadline: Deadline | None = None
        self.run_deadline: Deadline | None = None
        self.failed = False
        self.run_over = False
        self._last: Verdict | None = None  # of the test whose teardown took the lab down

    # The lab

    def open_run(self, source: LabSource) -> Run:
        if self.run is None:
            given = self.config.getoption("--results")
            root = Path(given) if given else source.results()
            name = str(self.config.getoption("--run-name"))
            argv = ["pytest", *map(str, self.config.invocation_params.args)]
            self.run = Run.create(root, name, argv=argv, seed=self.seed)
        return self.run

    def use(self, lab: LabLike, source: LabSource, allowed: Sequence[Allowed]) -> None:
        """Watch this lab from now on."""
        run = self.open_run(source)
        facts = LabFacts(
            lab.name, lab.tier, lab.kernel, lab.accelerator, lab.vcpus, lab.mode,
            str(lab.topology.name), lab.deadlines.factor, tuple(lab.nodes),
        )  # fmt: skip
        run.use_lab(facts, source.versions())
        seconds = float(self.config.getoption("--run-deadline"))
        self.run_deadline = lab.deadlines.make("run", seconds, scaled=False)
        lab.deadlines.push(self.run_deadline)
        self.guard = Guard(lab, run, allowed, self._on_alarm)
        self.guard.repair()
        self._note_boot_splats()

    def _note_boot_splats(self) -> None:
        guard = self.guard
        if guard is None:
            return
        for splat in guard.boot_splats:
            line = f"{splat.node}: {splat.title}"
            self.results.append(
                junit.TestResult("boot", splat.node, "failed", message=line, text=splat.text)
            )
        guard.boot_splats.clear()

    def release(self) -> None:
        if self.guard is not None:
            if self.deadline is not None:
                self._last = self.guard.after(self.failed)
            self.guard.close()
            if self.run_deadline is not None:
                self.guard.lab.deadlines.pop(self.run_deadline)
            self.guard = None

    # One test

    def start(self, item: pytest.Item) -> None:
        """The test's time begins, if it uses the lab and the lab is there."""
        if self.guard is None or not _uses_lab(item) or self.deadline is not None:
            return
        self.failed = False
        default = float(self.config.getoption("--deadline"))
        self.deadline = self.guard.begin(item.nodeid, _expectation(item, default))

    def judge(self, item: pytest.Item, when: str, error: BaseException | None) -> None:
        """Raise what the test must not get away with, or what it raised itself."""
        if self.guard is None or self.deadline is None:
            if error is not None:
                raise error
            return
        if isinstance(error, pytest.skip.Exception | KeyboardInterrupt | pytest.exit.Exception):
            raise error
        self._settle(item, when, self.guard.judge(error), error)

    def finish(self, item: pytest.Item, error: BaseException | None) -> None:
        """After the teardown."""
        verdict, self._last = self._last, None
        if verdict is None and self.guard is not None and self.deadline is not None:
            verdict = self.guard.after(self.failed or error is not None)
        self.deadline = None
        if verdict is None:
            if error is not None:
                raise error
            return
        if self.guard is not None and self.guard.broken and isinstance(error, RdmalabError):
            # A fixture that could not reach the node that the test has broken.
            item.add_report_section("teardown", "on a broken node", str(error))
            error = None
        self._settle(item, "teardown", verdict, error)

    def _settle(
        self, item: pytest.Item, when: str, verdict: Verdict, error: BaseException | None
    ) -> None:
        for title, text in verdict.sections:
            item.add_report_section(when, title, text)
        # The guard's first line says why; what the test saw is the consequence. But an
        # assertion of the test's own comes first.
        ours = error is None or isinstance(error, RdmalabError)
        for line in verdict.failures[1:] if ours else verdict.failures:
            item.add_report_section(when, "and also", line)
        if verdict.lost is not None and self.lost is None:
            self.lost = verdict.lost
            item.session.shouldstop = f"the lab is lost: {verdict.lost}"
            raise verdict.lost from error
        if self.run_deadline is not None and self.guard is not None:
            passed = self.guard.lab.deadlines.passed()
            if passed is self.run_deadline:
                self.run_over = True
                item.session.shouldstop = f"the run's deadline of {passed.seconds:g} s has passed"
        if verdict.failures and ours:
            raise pytest.fail.Exception(verdict.failures[0], pytrace=False) from error
        if error is not None:
            raise error

    # The alarm, for what blocks anywhere but in a wait on a node

    @contextmanager
    def alarm(self) -> Iterator[None]:
        deadline, guard = self.deadline, self.guard
        if deadline is None or guard is None:
            yield
            return
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        nearest = guard.lab.deadlines.remaining()
        previous = signal.signal(signal.SIGALRM, self._on_signal)
        self.armed = True
        seconds = nearest + _ALARM_GRACE * guard.lab.deadlines.factor
        signal.setitimer(signal.ITIMER_REAL, max(0.1, seconds))
        try:
            yield
        finally:
            self.armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)

    def _on_alarm(self) -> None:
        if self.armed:
            signal.pthread_kill(_main_thread(), signal.SIGALRM)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.armed or self.guard is None:
            return
        self.armed = False
        if self.guard.pending is not None:
            raise self.guard.pending
        passed = self.guard.lab.deadlines.passed() or self.deadline
        if passed is not None:
            raise passed.error("the test still runs")


def _main_thread() -> int:
    return threading.main_thread().ident or 0


_KEY: pytest.StashKey[_Session] = pytest.StashKey()


def _uses_lab(item: pytest.Item) -> bool:
    return "lab" in getattr(item, "fixturenames", ())


def _expectation(item: pytest.Item, seconds: float) -> Expectation:
    splats = [_regex(item, mark) for mark in item.iter_markers("expects_splat")]
    panic = item.get_closest_marker("expects_panic")
    kills = {str(name) for mark in item.iter_markers("kills") for name in mark.args}
    deadline = item.get_closest_marker("deadline")
    if deadline is not None:
        seconds = float(deadline.args[0])
    return Expectation(
        tuple(splats),
        None if panic is None else _regex(item, panic),
        frozenset(kills),
        seconds,
    )


def _regex(item: pytest.Item, mark: pytest.Mark) -> str:
    try:
        return str(re.compile(mark.args[0]).pattern)
    except (IndexError, TypeError, re.error) as error:
        raise UsageError(
            f"{item.nodeid}: the marker {mark.name} needs a regular expression", seen=str(error)
        ) from error


# Options and configuration


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rdmalab", "the lab that VM tests run on")
    group.addoption("--lab", default="test", help="the lab's name; attached to if it is up")
    group.addoption("--topology", help="topology of a lab that is booted (pair)")
    group.addoption("--kernel", help="kernel tier of a lab that is booted (stock)")
    group.addoption("--mode", help="fast or full")
    group.addoption("--accel", help="auto, tcg or kvm")
    group.addoption("--vcpus", type=int, help="vCPUs of each node")
    group.addoption("--memory", type=int, help="MiB of each node")
    group.addoption("--results", help="directory for the run folder")
    group.addoption("--run-name", default="vm-tests", help="name of the run folder")
    group.addoption("--deadline", type=float, default=60.0,
                    help="seconds for each test on the reference machine")  # fmt: skip
    group.addoption("--run-deadline", type=float, default=3600.0, help="seconds for all of it")
    group.addoption("--shuffle", metavar="SEED",
                    help="run in an order drawn from SEED (a number, or 'random')")  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    for text in _MARKERS.values():
        config.addinivalue_line("markers", text)
    session = _Session(config)
    config.stash[_KEY] = session
    config.pluginmanager.register(_Recorder(session), "rdmalab-recorder")
    given = config.getoption("--shuffle")
    if given is not None:
        if given != "random" and not re.fullmatch(r"\d{1,18}", given):
            raise pytest.UsageError(f"--shuffle {given}: give a number, or 'random'")
        session.seed = secrets.randbelow(1 << 31) if given == "random" else int(given)


def pytest_report_header(config: pytest.Config) -> str | None:
    seed = config.stash[_KEY].seed
    return None if seed is None else f"rdmalab: order from --shuffle {seed}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.stash[_KEY].seed
    if seed is not None:
        # From one order to begin with, whatever the file system's or the caller's was.
        items.sort(key=lambda item: item.nodeid)
        random.Random(seed).shuffle(items)


# Fixtures


@pytest.fixture(scope="session")
def lab_source() -> LabSource:
    """Where the lab comes from; tests of the harness put another in its place."""
    return _RealSource()


@pytest.fixture(scope="session")
def run_folder(pytestconfig: pytest.Config, lab_source: LabSource) -> Run:
    """The folder of this run, for what tests want to keep."""
    return pytestconfig.stash[_KEY].open_run(lab_source)


@pytest.fixture(scope="session")
def lab(pytestconfig: pytest.Config, lab_source: LabSource) -> Iterator[LabLike]:
    """The lab, up."""
    session = pytestconfig.stash[_KEY]
    try:
        allowed = read_allowed(lab_source.allow_list())
        session.open_run(lab_source)
        found, ours = lab_source.get(pytestconfig)
    except RdmalabError as error:
        outcome = "lost" if isinstance(error, NodeLost) else "error"
        session.results.append(
            junit.TestResult("boot", "lab", outcome, message=str(error), text=str(error))
        )
        pytest.exit(f"no lab: {error}", returncode=error.exit_status)
    try:
        session.use(found, lab_source, allowed)
        if session.item is not None:
            session.start(session.item)
        yield found
    finally:
        session.release()
        if ours:
            found.down()
        else:
            for node in found.nodes.values():
                node.close()


@pytest.fixture(scope="session")
def node0(lab: LabLike) -> Node:
    """The node of that name."""
    return _node(lab, "node0")


@pytest.fixture(scope="session")
def node1(lab: LabLike) -> Node:
    """The node of that name."""
    return _node(lab, "node1")


def _node(lab: LabLike, name: str) -> Node:
    if name not in lab.nodes:
        raise UsageError(
            f"topology {lab.topology.name} has no {name}",
            seen=", ".join(lab.nodes),
            todo="run these tests with --topology pair",
        )
    return lab.nodes[name]


# The course of a test


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    session = item.config.stash[_KEY]
    session.item, session.failed, session.deadline = item, False, None
    if session.guard is not None and _uses_lab(item):
        try:
            session.guard.repair()
        except RdmalabError as error:
            # A lab that cannot be brought back is of no use to the tests that follow.
            session.lost = NodeLost(f"a node could not be restarted: {error}")
            item.session.shouldstop = f"the lab is lost: {error}"
            raise session.lost from error
        session._note_boot_splats()
    session.start(item)
    try:
        with session.alarm():
            yield
    except BaseException as error:
        session.judge(item, "setup", error)
        raise


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    session = item.config.stash[_KEY]
    error: BaseException | None = None
    try:
        with session.alarm():
            yield
    except BaseException as caught:
        error = caught
    session.judge(item, "call", error)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    session = item.config.stash[_KEY]
    session.item = None
    error: BaseException | None = None
    guard, deadline = session.guard, session.deadline
    own = None if guard is None else guard.lab.deadlines.make("teardown", 60.0)
    if guard is not None and own is not None and deadline is not None:
        guard.lab.deadlines.push(own)
    try:
        with session.alarm():
            yield
    except BaseException as caught:
        error = caught
    finally:
        if guard is not None and own is not None:
            guard.lab.deadlines.pop(own)
    session.finish(item, error)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    session = item.config.stash[_KEY]
    if report.failed:
        session.failed = True
    if call.excinfo is not None and call.excinfo.value is session.lost:
        report.longrepr = str(session.lost)
        setattr(report, "rdmalab_lost", True)  # noqa: B010  reports take attributes of plugins
    return report


def pytest_report_teststatus(
    report: pytest.CollectReport | pytest.TestReport,
) -> tuple[str, str, str] | None:
    return ("lost", "L", "LOST") if getattr(report, "rdmalab_lost", False) else None


# What is left


class _Recorder:
    """Results, the run folder and the exit status of one session."""

    def __init__(self, session: _Session) -> None:
        self._session = session

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        result = _result_of(report)
        if result is not None:
            self._session.results.append(result)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        state = self._session
        if state.lost is not None:
            session.exitstatus = LOST_STATUS
        elif state.run_over or (session.exitstatus == 0 and self._suite().counts()["failed"]):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        yield  # the lab goes down, if it has not yet
        if state.run is not None:
            junit.write(state.run.path("junit.xml"), [self._suite()])
            state.run.finish(int(session.exitstatus), self._suite().counts())

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        state = self._session
        if state.run is None:
            return
        for result in state.results:
            if result.classname == "boot" and result.outcome != "passed":
                terminalreporter.write_line(
                    f"{result.outcome.upper()} while booting: {result.message}"
                )
        if state.lost is not None:
            terminalreporter.write_line(f"LOST {state.lost}")
        counts = ", ".join(f"{n} {outcome}" for outcome, n in self._suite().counts().items() if n)
        seconds = time.time() - state.started
        terminalreporter.write_line(
            f"vm tests: {counts or 'none ran'} in {seconds:.0f} s; run {state.run.folder}"
        )

    def _suite(self) -> junit.Suite:
        state = self._session
        properties = {}
        if state.run is not None and (lab := state.run.manifest.lab) is not None:
            properties = {"kernel": lab.kernel, "tier": lab.tier, "mode": lab.mode,
                          "accelerator": lab.accelerator, "vcpus": str(lab.vcpus)}  # fmt: skip
        if state.seed is not None:
            properties["seed"] = str(state.seed)
        return junit.Suite("vm", tuple(state.results), properties, state.started)


def _result_of(report: pytest.TestReport) -> junit.TestResult | None:
    lost = getattr(report, "rdmalab_lost", False)
    if report.when != "call" and report.passed:
        return None
    outcome: str = "lost" if lost else report.outcome
    if report.when != "call" and outcome == "failed":
        outcome = "error"
    if report.when == "call" and hasattr(report, "wasxfail"):
        outcome = "skipped" if report.skipped else "failed"
    text = report.longreprtext
    crash = getattr(report.longrepr, "reprcrash", None)
    message = str(getattr(crash, "message", "")) or text
    if report.skipped and isinstance(report.longrepr, tuple):
        message = str(report.longrepr[2])
    sections = [f"---- {title}\n{content}" for title, content in report.sections]
    path, _, name = report.nodeid.partition("::")
    return junit.TestResult(
        path.removesuffix(".py").replace("/", "."),
        name or path,
        outcome,
        report.duration,
        # "Failed: " is the name of pytest's own exception.
        (message.strip().splitlines() or [""])[0].removeprefix("Failed: "),
        text,
        "\n".join(sections),
    )
