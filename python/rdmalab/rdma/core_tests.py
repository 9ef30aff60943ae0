# SPDX-License-Identifier: Apache-2.0
"""Runs the distribution's own rdma-core tests on one device of this node.

``python3 -m rdmalab.rdma.core_tests --device rxe_roce0``: JSON on stdout, progress on stderr.

The tests ship gzipped with the package's documentation. They are unpacked beside each other
as they are, but for ``tests/__init__.py``, which would import all of them at once. pyverbs
is imported once, and each module then runs in a fork of its own, with a time limit for each
test: one that hangs is killed with all its children, and the rest of its module goes on in a
new fork. A test that took the whole process with it counts as failed.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import gzip
import importlib
import ipaddress
import json
import os
import platform
import select
import shutil
import signal
import sys
import tempfile
import time
import unittest
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from rdmalab.errors import HostError, RdmalabError, UsageError
from rdmalab.rdma import gid as gids
from rdmalab.rdma.model import ROCE_V2
from rdmalab.rdma.sysfs import DeviceFiles, device_names

SOURCE = Path("/usr/share/doc/rdma-core/tests")
SCHEMA = "rdma-core-tests/1"

# Modules that others import and that hold no tests.
_SHARED = ("tests.base", "tests.utils", "tests.base_rdmacm", "tests.rdmacm_utils")


@dataclass(frozen=True)
class Outcome:
    """One test. ``outcome`` is passed, failed or skipped; ``reason`` one line for the latter
    two: the exception, or what the test says it lacks; ``trace`` the end of the traceback."""

    test: str
    outcome: str
    seconds: float
    reason: str = ""
    trace: str = ""


def run(
    device: str, gid_index: int, *, limit: float, only: Sequence[str] = (), port: int = 1
) -> list[Outcome]:
    """Every test of every module (or of those in ``only``: ``test_qp``), in order.

    ``limit`` is each test's own, in seconds.
    """
    if not SOURCE.is_dir():
        raise HostError("rdma-core's tests are missing", todo="apt-get install rdma-core")
    with _unpacked() as folder:
        modules = sorted(p.stem for p in (folder / "tests").glob("test_*.py"))
        if unknown := set(only) - set(modules):
            raise UsageError(f"no test module {', '.join(sorted(unknown))}")
        _import_shared(folder, device, gid_index, port)
        outcomes: list[Outcome] = []
        for module in only or modules:
            found = _run_module(module, limit, folder)
            outcomes += found
            counts = _counts(found)
            print(f"{module}: {counts}", file=sys.stderr, flush=True)
        return outcomes


@contextlib.contextmanager
def _unpacked() -> Iterator[Path]:
    # multiprocessing's semaphores live on /dev/shm as well, so a tmpfs has to be there.
    if not os.path.ismount("/dev/shm"):
        raise HostError("/dev/shm is no tmpfs", todo="mount -t tmpfs tmpfs /dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="rdma-core-tests-", dir="/dev/shm"))
    try:
        (folder / "tests").mkdir()
        for path in SOURCE.iterdir():
            if path.name.endswith(".py"):
                shutil.copyfile(path, folder / "tests" / path.name)
            elif path.name.endswith(".py.gz"):
                with gzip.open(path) as packed:
                    (folder / "tests" / path.stem).write_bytes(packed.read())
        (folder / "tests/__init__.py").write_text("")
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _import_shared(folder: Path, device: str, gid_index: int, port: int) -> None:
    sys.path[:0] = [str(folder / "tests"), str(folder)]
    sys.dont_write_bytecode = True
    # As run_tests.py does it: the parser keeps its own options and leaves unittest's.
    sys.argv[1:] = ["-v", "--dev", device, "--port", str(port), "--gid", str(gid_index)]
    importlib.import_module("args_parser").parser.parse_args()
    for name in _SHARED:
        importlib.import_module(name)


def _run_module(module: str, limit: float, folder: Path) -> list[Outcome]:
    outcomes: list[Outcome] = []
    skip: set[str] = set()
    while True:
        finished, hung = _one_fork(module, limit, folder, frozenset(skip))
        outcomes += finished
        if hung is None:
            return outcomes
        outcomes.append(hung)
        skip.update(outcome.test for outcome in (*finished, hung))


def _one_fork(
    module: str, limit: float, folder: Path, skip: frozenset[str]
) -> tuple[list[Outcome], Outcome | None]:
    """What ended, and the test that hung or took the process down (``None``: all ended)."""
    reading, writing = os.pipe()
    stacks = folder / "stacks"
    stacks.write_text("")
    child = os.fork()
    if child == 0:
        os.close(reading)
        _child(module, writing, stacks, skip)
    os.close(writing)
    finished: list[Outcome] = []
    running, started = "", time.monotonic()
    try:
        with os.fdopen(reading, encoding="utf-8") as events:
            lines = _lines(events, lambda: started + limit)
            for line in lines:
                if line is None:
                    reason, trace = _kill_and_tell(child, stacks)
                    seconds = time.monotonic() - started
                    name = running or f"tests.{module}"
                    reason = f"hangs for {limit:g} s{reason}"
                    return finished, Outcome(name, "failed", seconds, reason, trace)
                event = json.loads(line)
                started = time.monotonic()
                if event["event"] == "start":
                    running = event["test"]
                elif event["event"] == "end":
                    finished.append(Outcome(**event["outcome"]))
                    running = ""
                elif event["event"] == "done":
                    return finished, None
    finally:
        status = _reap(child)
    how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"status {status >> 8}"
    name = running or f"tests.{module}"
    seconds = time.monotonic() - started
    lost = Outcome(name, "failed", seconds, f"the process ended with {how}", _head(stacks))
    if not running:
        # It died outside any test, so another try would die as well.
        return [*finished, lost], None
    return finished, lost


def _lines(events: TextIO, until: Any) -> Iterator[str | None]:
    """Lines as they come; ``None`` once when none came until the deadline."""
    descriptor = events.fileno()
    pending = b""
    while True:
        while b"\n" in pending:
            line, _, pending = pending.partition(b"\n")
            yield line.decode("utf-8")
        left = max(0.0, until() - time.monotonic())
        if not select.select([descriptor], [], [], left)[0]:
            yield None
            return
        chunk = os.read(descriptor, 65536)
        if not chunk:
            return
        pending += chunk


def _child(module: str, writing: int, stacks: Path, skip: frozenset[str]) -> None:
    """The fork: runs the module's tests and never returns."""
    status = 1
    try:
        os.setsid()
        # pyverbs 56.1 crashes now and then when the collector takes what a skipped test left
        # half made: its objects are cleared in any order, and each still closes the others.
        gc.disable()
        with stacks.open("w") as dump, os.fdopen(writing, "w", encoding="utf-8") as events:
            faulthandler.enable(dump)
            faulthandler.register(signal.SIGUSR1, dump, all_threads=True)
            # What the tests print is theirs; our standard output is data.
            quiet = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(quiet, descriptor)
            result = _Result(events)
            try:
                loaded = importlib.import_module(f"tests.{module}")
                suite = unittest.TestSuite(
                    test
                    for test in _flat(unittest.defaultTestLoader.loadTestsFromModule(loaded))
                    if test.id() not in skip
                )
            except BaseException as error:
                result.end(f"tests.{module}", "failed", repr(error))
            else:
                suite.run(result)
            result.say({"event": "done"})
            status = 0
    finally:
        # No clean-up of the parent's: this process is a copy of it.
        os._exit(status)


def _flat(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for item in suite:
        if isinstance(item, unittest.TestSuite):
            yield from _flat(item)
        else:
            yield item


class _Result(unittest.TestResult):
    """Says each test's start and end as a line of JSON."""

    def __init__(self, events: TextIO) -> None:
        super().__init__()
        self._events = events
        self._start = time.monotonic()
        self._ended = False

    def say(self, event: dict[str, Any]) -> None:
        self._events.write(json.dumps(event) + "\n")
        self._events.flush()

    def end(self, test: str, outcome: str, reason: str = "", trace: str = "") -> None:
        if self._ended:  # a test whose tearDown fails as well ends once, as its first failure
            return
        self._ended = True
        line = " ".join(reason.split())[:400]
        seconds = round(time.monotonic() - self._start, 3)
        self.say(
            {
                "event": "end",
                "outcome": asdict(Outcome(test, outcome, seconds, line, trace[-3000:])),
            }
        )

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802 (unittest's name)
        super().startTest(test)
        self._start, self._ended = time.monotonic(), False
        self.say({"event": "start", "test": test.id()})

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        self.end(test.id(), "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        self._holder(test)
        self.end(test.id(), "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        self._fail(test, err)

    def addError(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        self._fail(test, err)

    def addSubTest(  # noqa: N802
        self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any
    ) -> None:
        if err is not None:
            self._fail(test, err)

    def _fail(self, test: unittest.TestCase, err: Any) -> None:
        self._holder(test)
        trace = self._exc_info_to_string(err, test)  # type: ignore[attr-defined]
        self.end(test.id(), "failed", f"{err[0].__name__}: {err[1]}", trace)

    def _holder(self, test: unittest.TestCase) -> None:
        # What fails in setUpClass is reported for a holder that was never started.
        if not isinstance(test, unittest.TestCase):
            self._start, self._ended = time.monotonic(), False


def _kill_and_tell(child: int, stacks: Path) -> tuple[str, str]:
    """Ends the fork with its children; where it hung, as " in f at file:line", and stacks."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGUSR1)
        time.sleep(0.5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    text = _head(stacks)
    first = next((line.strip() for line in text.splitlines() if line.startswith("  File")), "")
    return (f" in {first}" if first else ""), text


def _head(stacks: Path) -> str:
    """The innermost frames: faulthandler writes them first."""
    return stacks.read_text(errors="replace")[:3000]


def _reap(child: int) -> int:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def _counts(outcomes: Sequence[Outcome]) -> dict[str, int]:
    return {
        kind: sum(outcome.outcome == kind for outcome in outcomes)
        for kind in ("passed", "failed", "skipped")
    }


def _gid_index(device: str, port: int, address: str | None) -> int:
    if device not in device_names():
        raise UsageError(
            f"no RDMA device {device}", seen=f"devices: {', '.join(device_names()) or 'none'}"
        )
    rule = gids.GidRule(
        ROCE_V2, "ipv4", ipaddress.ip_address(address) if address is not None else None
    )
    return gids.resolve(DeviceFiles(device).gids(port), rule, where=f"{device} port {port}").index


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="rdmalab.rdma.core_tests", description=__doc__)
    parser.add_argument("--device", required=True)
    parser.add_argument("--port", type=int, default=1)
    parser.add_argument("--address", help="whose RoCE v2 GID to use; any IPv4 one if not given")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each test")
    parser.add_argument("--only", action="append", default=[], metavar="MODULE")
    arguments = parser.parse_args(argv)
    try:
        index = _gid_index(arguments.device, arguments.port, arguments.address)
        start = time.monotonic()
        outcomes = run(
            arguments.device,
            index,
            limit=arguments.limit,
            only=arguments.only,
            port=arguments.port,
        )
    except RdmalabError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    json.dump(
        {
            "schema": SCHEMA,
            "device": arguments.device,
            "gid_index": index,
            "kernel": platform.release(),
            "seconds": round(time.monotonic() - start, 1),
            "counts": _counts(outcomes),
            "tests": [asdict(outcome) for outcome in outcomes],
        },
        sys.stdout,
        indent=1,
    )
    print(flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
