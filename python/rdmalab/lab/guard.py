# SPDX-License-Identifier: Apache-2.0
"""Watches a lab while tests run on it, one after the other, and says what a test must not
get away with: a panic, a splat, a hang; and that the lab was lost."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rdmalab.errors import DeadlineExceeded, NodeLost, RdmalabError
from rdmalab.lab.console import Allowed, ConsoleFile, Splat, unexpected
from rdmalab.lab.deadline import Deadline, Deadlines
from rdmalab.lab.node import Node, NodePanicked
from rdmalab.lab.run import Run, slug

_POLL = 0.25  # seconds between two looks at the lab's events
_CAPTURED = ("roce", "tcp")  # kinds of links whose packets QEMU sees
_MARK_SECONDS = 5.0  # for a line from /dev/kmsg to the console file
_ANSWER_SECONDS = 5.0  # for a node that is alive to say so
_DUMP_SECONDS = 20.0  # for what an NMI makes the guest print
_DUMP_QUIET = 1.5  # seconds of silence after which a dump has ended
_EVENT_SECONDS = 2.0  # from a broken connection to the event that explains it


class Event(Protocol):
    """As ``rdmalab.lab.lab.Event``."""

    @property
    def seq(self) -> int: ...
    @property
    def node(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def data(self) -> Mapping[str, Any]: ...


class LabLike(Protocol):
    """What is used of a lab; see ``rdmalab.lab.lab.Lab`` for the meaning."""

    @property
    def name(self) -> str: ...
    @property
    def tier(self) -> str: ...
    @property
    def kernel(self) -> str: ...
    @property
    def accelerator(self) -> str: ...
    @property
    def vcpus(self) -> int: ...
    @property
    def mode(self) -> str: ...
    @property
    def topology(self) -> Any: ...
    @property
    def folder(self) -> Path: ...
    @property
    def nodes(self) -> Mapping[str, Node]: ...
    @property
    def deadlines(self) -> Deadlines: ...

    def events(self, since: int = 0) -> Sequence[Event]: ...
    def nmi(self, node: str) -> None: ...
    def restart(self, node: str) -> None: ...
    def capture_start(self, node: str, link: str, path: Path) -> str: ...
    def capture_stop(self, capture: str) -> None: ...
    def down(self) -> None: ...


@dataclass(frozen=True)
class Expectation:
    """What a test announces with its markers. ``splats``: each must be found in the title or
    text of a splat, and those splats are no failure. ``panic``: None for no panic, else what
    must be found in its splat. ``kills``: nodes whose QEMU may end. ``seconds``: the test's
    deadline on the reference machine."""

    splats: tuple[str, ...] = ()
    panic: str | None = None
    kills: frozenset[str] = frozenset()
    seconds: float = 60.0


@dataclass(frozen=True)
class Verdict:
    """What the guard has seen of a test. ``lost`` ends the session; ``failures`` are one
    line each, the first names the test's failure; ``sections`` are (title, text) for its
    report."""

    lost: NodeLost | None = None
    failures: tuple[str, ...] = ()
    sections: tuple[tuple[str, str], ...] = ()


@dataclass
class _Watched:
    name: str
    expected: Expectation
    deadline: Deadline
    captures: dict[str, Path] = field(default_factory=dict)
    splats: list[Splat] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    sections: list[tuple[str, str]] = field(default_factory=list)


class Guard:
    """One lab, from the moment it is up. ``alarm`` is called, from another thread, when
    what happened means that a running test cannot go on."""

    def __init__(
        self, lab: LabLike, run: Run, allowed: Sequence[Allowed], alarm: Callable[[], None]
    ) -> None:
        self.lab = lab
        self.pending: RdmalabError | None = None  # why the test that runs cannot go on
        self._run = run
        self._allowed = tuple(allowed)
        self._alarm = alarm
        self._lock = threading.RLock()
        self._test: _Watched | None = None
        self._panicked: set[str] = set()
        self._gone: dict[str, NodeLost] = {}
        self._powered_off: set[str] = set()
        self._dirty: set[str] = set()
        self._seq = 0
        self._ending = threading.Event()
        self._consoles = {
            name: ConsoleFile(name, lab.folder / f"console-{name}.log") for name in lab.nodes
        }
        self.boot_splats = [
            splat
            for console in self._consoles.values()
            for splat in unexpected(console.finish(), self._allowed)
        ]
        for event in lab.events():
            self._seq = event.seq
        for name, node in lab.nodes.items():
            if not self._prepare(node):
                self._dirty.add(name)  # of a lab that was attached to
        self.keep_consoles()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="guard")
        self._thread.start()

    # One test

    def repair(self) -> None:
        """Restart every node that the last test left dead, hung or of unknown state.

        Raises what the restart raises.
        """
        with self._lock:
            self._take_events()
        for name in sorted(self._dirty):
            self.lab.nodes[name].resume()
            self.lab.restart(name)
            with self._lock:
                self._take_events()
                self._panicked.discard(name)
                self._powered_off.discard(name)
                self._gone.pop(name, None)
                self._dirty.discard(name)
            node = self.lab.nodes[name]
            node.resume()
            if not self._prepare(node):
                raise NodeLost("it does not answer after its restart", node=name)
            console = self._consoles[name]
            self.boot_splats += unexpected(console.finish(), self._allowed)
        with self._lock:
            self.pending = None

    def begin(self, name: str, expected: Expectation) -> Deadline:
        """A test starts: its captures, its deadline (which also holds for every wait on
        a node), and all that happens from now on is its."""
        deadline = self.lab.deadlines.make("test", expected.seconds)
        self.lab.deadlines.push(deadline)
        test = _Watched(name, expected, deadline)
        with self._lock:
            self._test = test
        for link, end in self._link_ends().items():
            path = self._run.path(f"captures/{slug(name)}-{link}.pcap")
            try:
                test.captures[self.lab.capture_start(end, link, path)] = path
            except RdmalabError as error:
                test.sections.append((f"capture on {link}", f"none: {error}"))
        return deadline

    def judge(self, error: BaseException | None) -> Verdict:
        """What the guard has to say after the test's body, which ended with ``error``.
        May take long after a hang; then the hung nodes are known and dumped."""
        test = self._test
        if test is None:
            return Verdict()
        self.lab.deadlines.pop(test.deadline)
        if isinstance(error, NodeLost):
            self._await_events()
        with self._lock:
            self._take_events()
        explained = self._gone or self._panicked or self._powered_off
        if isinstance(error, DeadlineExceeded):
            self._diagnose(test, str(error))
        elif isinstance(error, NodeLost) and not explained:
            # All QEMUs run: what broke the connection is in the guest, and the test's.
            self._diagnose(test, str(error))
            test.failures.append(str(error))
        self._mark(test)
        self._collect(test)
        lost = self._find_lost(test)
        failures = [*self._find_panics(test), *test.failures, *self._find_splats(test)]
        if lost is not None or failures or error is not None:
            for name in sorted(self._dirty):
                tail = self._consoles[name].tail()
                test.sections.append((f"console of {name}, last lines", tail))
        return self._verdict(test, lost, failures)

    def after(self, failed: bool) -> Verdict:
        """What came during the test's teardown; then its captures are kept or deleted."""
        test = self._test
        if test is None:
            return Verdict()
        self.lab.deadlines.pop(test.deadline)
        with self._lock:
            self._take_events()
        test.splats.clear()
        self._collect(test)
        failures = [
            f"{splat.node}: {splat.title} (during teardown)"
            for splat in self._not_expected(test, test.splats)
        ]
        lost = self._find_lost(test)
        self._end_captures(test, keep=failed or bool(failures) or lost is not None)
        with self._lock:
            self._test = None
        self.keep_consoles()
        return self._verdict(test, lost, failures)

    @property
    def broken(self) -> bool:
        """Whether a node is dead or hung, so that what teardown says of it is no news."""
        return bool(self._dirty)

    # The end

    def close(self) -> None:
        """Stop watching, and keep the consoles in the run folder."""
        self._ending.set()
        self._thread.join(10.0)
        self.keep_consoles()

    def keep_consoles(self) -> None:
        """Have each console in the run folder, however the session ends."""
        for console in self._consoles.values():
            with suppress(OSError):
                self._run.keep(console.path)

    # Private: what happens

    def _prepare(self, node: Node) -> bool:
        """Ready a node for tests; False if it does not answer."""
        # With it an NMI makes the guest print where it is and end; without it the guest
        # says that it is dazed and confused, and goes on.
        try:
            set_it = ["sh", "-c", "echo 1 >/proc/sys/kernel/unknown_nmi_panic"]
            node.run(set_it, timeout=20, check=False)
        except RdmalabError:
            return False
        return True

    def _link_ends(self) -> dict[str, str]:
        """For each link that can be captured, one node that is up."""
        return {
            link: name
            for name, node in sorted(self.lab.nodes.items(), reverse=True)
            for link, end in node.links.items()
            if end.kind in _CAPTURED and name not in self._dirty
        }

    def _watch(self) -> None:
        while not self._ending.wait(_POLL):
            with self._lock:
                self._take_events()
                stop = self.pending is not None and self._test is not None
            if stop:
                # Waits on the node have been interrupted; the alarm is for all else.
                if self._ending.wait(1.0):
                    return
                self._alarm()
                while self.pending is not None and not self._ending.wait(_POLL):
                    with self._lock:
                        self._take_events()

    def _take_events(self) -> None:
        try:
            events = self.lab.events(self._seq)
        except NodeLost as error:
            self._lose("", error)
            return
        for event in events:
            self._seq = event.seq
            if event.name == "GUEST_PANICKED":
                self._panic(event.node)
            elif event.name == "SHUTDOWN" and event.data.get("guest"):
                self._powered_off.add(event.node)
            elif event.name == "QEMU_EXIT" and not event.data.get("asked"):
                self._exit(event.node, event.data.get("status"))

    def _panic(self, name: str) -> None:
        self._panicked.add(name)
        self._dirty.add(name)
        error = NodePanicked("the guest's kernel panicked", node=name, todo="see its console")
        self._interrupt(name, error, expected=self._expects().panic is not None)

    def _exit(self, name: str, status: object) -> None:
        if name in self._panicked:
            return
        self._dirty.add(name)
        if name in self._powered_off:
            off = RdmalabError("the guest powered itself off", node=name, todo="see its console")
            self._interrupt(name, off, expected=name in self._expects().kills)
            return
        error = NodeLost(
            "its QEMU ended without a panic of the guest",
            node=name,
            seen=f"status {status}",
            todo=f"see qemu-{name}.log and the host's kernel log (out of memory?)",
        )
        if name in self._expects().kills:
            self._interrupt(name, error, expected=True)
        else:
            self._lose(name, error)

    def _lose(self, name: str, error: NodeLost) -> None:
        if name not in self._gone:
            self._gone[name] = error
            for node in [name] if name else list(self.lab.nodes):
                self._interrupt(node, error, expected=False)

    def _interrupt(self, name: str, error: RdmalabError, *, expected: bool) -> None:
        self.lab.nodes[name].interrupt(error)
        if not expected and self.pending is None:
            self.pending = error

    def _expects(self) -> Expectation:
        return self._test.expected if self._test is not None else Expectation()

    def _await_events(self) -> None:
        """Give the lab a moment to say why a connection broke."""
        until = time.monotonic() + _EVENT_SECONDS * self.lab.deadlines.factor
        while time.monotonic() < until:
            with self._lock:
                self._take_events()
                if self._panicked or self._gone or self._powered_off:
                    return
            time.sleep(_POLL)

    # Private: what it means

    def _diagnose(self, test: _Watched, error: str) -> None:
        """After a deadline: which nodes hang; what they were doing."""
        suspects = [name for name in sorted(self.lab.nodes) if name not in self._dirty]
        with ThreadPoolExecutor(max(1, len(suspects))) as pool:
            alive = list(
                pool.map(lambda name: self.lab.nodes[name].answers(_ANSWER_SECONDS), suspects)
            )
        for name, answers in zip(suspects, alive, strict=True):
            if name in self._dirty:
                continue  # its panic or its end was seen meanwhile
            # Whatever did not end in time is still there: nobody knows this node's state.
            self._dirty.add(name)
            if not answers:
                self._dump(name)
                test.failures.append(f"{name}: the guest hangs ({error})")
            else:
                self._show_blocked(name)

    def _dump(self, name: str) -> None:
        console = self._consoles[name]
        try:
            self.lab.nmi(name)
        except RdmalabError:
            return  # its QEMU is gone, which an event says
        factor = self.lab.deadlines.factor
        until = time.monotonic() + _DUMP_SECONDS * factor
        last, quiet = -1, time.monotonic()
        while time.monotonic() < until:
            size = console.path.stat().st_size if console.path.exists() else 0
            if size != last:
                last, quiet = size, time.monotonic()
            elif last > 0 and time.monotonic() - quiet > _DUMP_QUIET * factor:
                break
            time.sleep(0.1)
        with self._lock:
            self._take_events()
            # The panic is the NMI's, not the test's.
            self._panicked.discard(name)

    def _show_blocked(self, name: str) -> None:
        """Have a node that answers print its blocked tasks."""
        with suppress(RdmalabError):
            self.lab.nodes[name].run(["sh", "-c", "echo w >/proc/sysrq-trigger"], timeout=10)

    def _mark(self, test: _Watched) -> None:
        """Have each console say where the test ends, and wait until it does: what the
        kernel printed before is in the file then."""
        names = [name for name in sorted(self.lab.nodes) if name not in self._dirty]
        with ThreadPoolExecutor(max(1, len(names))) as pool:
            for name, error in zip(names, pool.map(self._mark_one, names), strict=True):
                if error is not None:
                    with self._lock:
                        self._take_events()
                    if name in self._dirty:
                        continue
                    self._diagnose(test, error)

    def _mark_one(self, name: str) -> str | None:
        test = self._test
        assert test is not None
        text = f"rdmalab: end of {test.name} #{time.monotonic_ns()}"
        console = self._consoles[name]
        start = console.path.stat().st_size if console.path.exists() else 0
        write = ["sh", "-c", 'echo "<2>$1" >/dev/kmsg', "mark", text]
        try:
            self.lab.nodes[name].run(write, timeout=_ANSWER_SECONDS)
        except (DeadlineExceeded, NodeLost) as error:
            return str(error)
        except RdmalabError:
            return None  # no /dev/kmsg for us: then the console is read as it is
        until = time.monotonic() + _MARK_SECONDS * self.lab.deadlines.factor
        wanted = text.rpartition(" ")[2].encode()
        while time.monotonic() < until:
            with suppress(OSError), console.path.open("rb") as file:
                file.seek(start)
                if wanted in file.read():
                    return None
            time.sleep(0.02)
        return None

    def _collect(self, test: _Watched) -> None:
        for console in self._consoles.values():
            test.splats += console.finish()

    def _find_lost(self, test: _Watched) -> NodeLost | None:
        with self._lock:
            gone = [each for name, each in self._gone.items() if name not in test.expected.kills]
        return gone[0] if gone else None

    def _find_panics(self, test: _Watched) -> list[str]:
        wanted = test.expected.panic
        found = []
        for name in sorted(self._panicked):
            titles = self._titles(test, name)
            if wanted is None:
                found.append(f"{name}: the guest panicked: {titles}")
            elif not any(_matches(wanted, splat) for splat in test.splats if splat.node == name):
                found.append(f"{name}: panicked, but not with {wanted!r}: {titles}")
        if wanted is not None and not self._panicked:
            found.append(f"a panic was expected ({wanted!r}), and none came")
        found += [
            f"{name}: the guest powered itself off"
            for name in sorted(self._powered_off & self._dirty - test.expected.kills)
        ]
        return found

    def _titles(self, test: _Watched, name: str) -> str:
        titles = [splat.title for splat in test.splats if splat.node == name]
        return "; ".join(titles) or "its console does not say why"

    def _find_splats(self, test: _Watched) -> list[str]:
        found = [f"{splat.node}: {splat.title}" for splat in self._not_expected(test, test.splats)]
        found += [
            f"a splat was expected ({wanted!r}), and none came"
            for wanted in test.expected.splats
            if not any(_matches(wanted, splat) for splat in test.splats)
        ]
        for splat in test.splats:
            test.sections.append((f"splat on {splat.node}: {splat.title}", splat.text))
        return found

    def _not_expected(self, test: _Watched, splats: Collection[Splat]) -> list[Splat]:
        patterns = [*test.expected.splats]
        if test.expected.panic is not None:
            patterns.append(test.expected.panic)
        return [
            splat
            for splat in unexpected(splats, self._allowed)
            if not any(_matches(pattern, splat) for pattern in patterns)
            and not (test.expected.panic is not None and splat.kind == "panic")
        ]

    def _verdict(self, test: _Watched, lost: NodeLost | None, failures: Sequence[str]) -> Verdict:
        sections, test.sections = tuple(test.sections), []
        return Verdict(lost, tuple(dict.fromkeys(failures)), sections)

    def _end_captures(self, test: _Watched, *, keep: bool) -> None:
        for capture, path in test.captures.items():
            with suppress(RdmalabError):
                self.lab.capture_stop(capture)
            if not keep:
                path.unlink(missing_ok=True)


def _matches(pattern: str, splat: Splat) -> bool:
    return re.search(pattern, splat.title) is not None or re.search(pattern, splat.text) is not None
