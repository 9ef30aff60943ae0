# SPDX-License-Identifier: Apache-2.0
"""A node: a host reached over ssh, a guest of ours or a real machine."""

from __future__ import annotations

import os
import selectors
import shlex
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO

from rdmalab.errors import CommandFailed, DeadlineExceeded, NodeLost, RdmalabError, UsageError
from rdmalab.lab.deadline import Deadline, Deadlines
from rdmalab.lab.leash import Lease, Leash
from rdmalab.lab.package import Package
from rdmalab.lab.process import Bounded, Process, Result
from rdmalab.lab.ssh import Endpoint

__all__ = ["Endpoint", "LinkEnd", "Node", "NodePanicked", "Process", "Result"]

OUTPUT_LIMIT = 16 << 20  # bytes kept of each of a command's outputs
_SLICE = 0.2  # seconds between two looks at deadlines and interrupts
_GRACE = 2.0  # seconds from TERM to KILL, times the slow-machine factor up to 3


class NodePanicked(RdmalabError):
    """The guest's kernel panicked: what ran has failed (exit status 1)."""


@dataclass(frozen=True)
class LinkEnd:
    """One end of a link. ``kind`` is roce, usb4 or tcp; ``ipv4`` and ``ipv6`` carry their
    prefix length ("10.77.0.1/24", "fd77:0::1/64"); ``mtu`` is the netdev's, in bytes;
    ``peer`` is the other node's name."""

    link: str
    kind: str
    netdev: str
    mac: str
    ipv4: str
    ipv6: str
    mtu: int
    peer: str


class Node:
    """One host, one persistent connection, made when first needed and made anew when it
    was lost. Its methods may be called from several threads at once.

    ``native`` are shared objects that go to nodes with our package. ``deadlines`` holds
    the slow-machine factor and the layers that apply to every wait. ``ssh`` is the
    program, for tests.
    """

    def __init__(
        self,
        name: str,
        endpoint: Endpoint,
        links: Mapping[str, LinkEnd] | None = None,
        *,
        deadlines: Deadlines | None = None,
        native: Iterable[Path] = (),
        ssh: Sequence[str] = ("ssh",),
    ) -> None:
        self.name = name
        self.endpoint = endpoint
        self.links: Mapping[str, LinkEnd] = MappingProxyType(dict(links or {}))
        self.deadlines = deadlines or Deadlines()
        self._native = tuple(native)
        self._ssh = tuple(ssh)
        self._lock = threading.RLock()
        self._leash: Leash | None = None
        self._package: Package | None = None
        self._shipped = ""
        self._interrupt: RdmalabError | None = None

    def __repr__(self) -> str:
        return f"Node({self.name!r}, {self.endpoint.user}@{self.endpoint.host})"

    # Commands

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float = 60.0,
        check: bool = True,
        input: str | None = None,
    ) -> Result:
        """Run a program (found in PATH, no shell between) to its end.

        ``timeout`` is in seconds on the reference machine. Raises CommandFailed for a
        status other than 0 (unless ``check`` is false), DeadlineExceeded, NodeLost; the
        remote process never outlives the call. A program that leaves a child with its
        stdout open has not ended.
        """
        return self._run(argv, timeout, check, None if input is None else input.encode())

    def popen(self, argv: Sequence[str], *, limit: int = OUTPUT_LIMIT) -> Process:
        """Start a program; at most ``limit`` bytes of each of its outputs are kept."""
        words = _words(argv)
        lease, local = self._connect().command(words)
        return Process(self, lease, words, _spawn(local, subprocess.PIPE, None), limit)

    def python(
        self,
        module: str,
        args: Sequence[str] = (),
        *,
        timeout: float = 60.0,
        check: bool = True,
        input: str | None = None,
    ) -> Result:
        """Run a module of our package on the node, whose copy is brought up to date first."""
        return self.run(self._python(module, args), timeout=timeout, check=check, input=input)

    def popen_python(self, module: str, args: Sequence[str] = ()) -> Process:
        """Like ``python``, without waiting for the end."""
        return self.popen(self._python(module, args))

    # Files

    def put(self, local: Path, remote: str, mode: int = 0o644, *, timeout: float = 120.0) -> None:
        """Copy a file to the node: whole and at once, or not at all."""
        try:
            with local.open("rb") as source:
                self._upload(source, os.fstat(source.fileno()).st_size, remote, mode, timeout)
        except OSError as error:
            raise UsageError(
                f"cannot read {local}", seen=error.strerror or str(error), todo="name another file"
            ) from error

    def get(self, remote: str, local: Path, *, timeout: float = 120.0) -> None:
        """Copy a file from the node: whole and at once, or not at all."""
        with tempfile.NamedTemporaryFile(dir=local.parent, prefix=".get-", delete=False) as target:
            path = Path(target.name)
            try:
                self._run(["cat", "--", remote], timeout, True, None, target)
                target.close()
                path.chmod(0o644)
                path.replace(local)
            finally:
                path.unlink(missing_ok=True)

    # The connection

    def wait_ready(self, timeout: float = 60.0) -> float:
        """Wait until a command runs on the node; returns the seconds that it took.

        Raises DeadlineExceeded with what ssh saw last.
        """
        start = time.monotonic()
        own = self.deadlines.make("boot", timeout)
        seen = ""
        while True:
            try:
                left = self.pause("waiting for ssh", own, 30.0)
                self._connect(max(1.0, left))
                self.run(["true"], timeout=timeout)
            except DeadlineExceeded as error:
                raise own.error("no answer over ssh", node=self.name, seen=seen) from error
            except NodeLost as error:
                if self._interrupt is not None:
                    raise
                seen = f"after {time.monotonic() - start:.0f} s still: {error.seen}"
                time.sleep(_SLICE)
            else:
                return time.monotonic() - start

    def answers(self, timeout: float = 5.0) -> bool:
        """Whether the node says anything within that many reference seconds, whatever
        layer's deadline has passed."""
        seconds = timeout * self.deadlines.factor
        leash = self._leash
        if leash is not None and leash.alive:
            return leash.ask("0", seconds) is not None
        try:
            Leash(self.name, self.endpoint, ssh=self._ssh, timeout=seconds).drop()
        except RdmalabError:
            return False
        return True

    def interrupt(self, error: RdmalabError) -> None:
        """Make every wait on this node, now and later, raise ``error``: the node is known
        to be gone (a panic, its QEMU's end) though ssh may not see it."""
        self._interrupt = error

    def resume(self) -> None:
        """The node is back: forget the interrupt and the old connection."""
        self.drop()
        self._interrupt = None

    def close(self) -> None:
        """End what still runs on the node and the connection."""
        with self._lock:
            leash, self._leash = self._leash, None
        if leash is not None:
            leash.close() if self._interrupt is None else leash.drop()

    def drop(self) -> None:
        """Cut the connection without waiting for the node."""
        with self._lock:
            leash, self._leash = self._leash, None
        if leash is not None:
            leash.drop()

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What processes ask (process.Owner)

    def deadline(self, timeout: float) -> Deadline:
        """A command's own deadline, ``timeout`` reference seconds from now."""
        return self.deadlines.make("command", timeout)

    def pause(self, what: str, own: Deadline | None, longest: float = _SLICE) -> float:
        """How many seconds a wait may last before it must ask again. Raises the interrupt,
        or DeadlineExceeded if the nearest deadline has passed."""
        if self._interrupt is not None:
            raise self._interrupt
        passed = self.deadlines.passed(own)
        if passed is not None:
            raise passed.error(f"{what}: still running", node=self.name)
        return min(longest, self.deadlines.remaining(own))

    def finish(self, lease: Lease, argv: tuple[str, ...], status: int, error: str) -> int:
        """The command's own status from that of its ssh, which is 255 for what ssh itself
        went through as well."""
        # The leash ends what runs when its connection breaks, and that may be told first.
        ended_with_it = status in (137, 143) and not lease.leash.alive
        if status == 255 or status < 0 or ended_with_it:
            fate = lease.fate(5.0 * self.deadlines.factor) if status == 255 else None
            if fate is None or fate == "absent":
                if self._interrupt is not None:
                    raise self._interrupt
                seen = _last(error) or lease.leash.last_error()
                raise NodeLost(
                    f"the connection broke while {shlex.join(argv)[:120]} ran",
                    node=self.name,
                    seen=seen or f"ssh ended with status {status}",
                    todo="see the node's console",
                )
            if fate == "started":
                # Its shell was killed together with it.
                status = 137
        lease.forget()
        return status

    def end(self, lease: Lease, local: subprocess.Popen[bytes]) -> None:
        """End one command: TERM, then KILL, then its ssh."""
        # Bounded also where a deadline on a slow machine has long passed: a node that
        # hangs takes the whole of it.
        grace = _GRACE * min(self.deadlines.factor, 3.0)
        try:
            if self._interrupt is None:
                lease.end("TERM")
                with suppress(subprocess.TimeoutExpired):
                    local.wait(grace)
                # Also when the leader has ended: its group may hold one that ignores TERM.
                lease.end("KILL")
                lease.forget()
                with suppress(subprocess.TimeoutExpired):
                    local.wait(grace)
        finally:
            local.kill()
            local.wait()

    # Private

    def _connect(self, timeout: float | None = None) -> Leash:
        with self._lock:
            if self._interrupt is not None:
                raise self._interrupt
            if self._leash is not None and self._leash.alive:
                return self._leash
            if self._leash is not None:
                self._leash.close()
                self._leash = None
            if timeout is None:
                timeout = max(1.0, min(30.0 * self.deadlines.factor, self.deadlines.remaining()))
            self._shipped = ""
            try:
                self._leash = Leash(self.name, self.endpoint, ssh=self._ssh, timeout=timeout)
            except NodeLost as error:
                passed = self.deadlines.passed()
                if passed is not None:
                    raise passed.error("not connected yet", node=self.name) from error
                raise
            return self._leash

    def _run(
        self,
        argv: Sequence[str],
        timeout: float,
        check: bool,
        data: bytes | IO[bytes] | None,
        sink: IO[bytes] | None = None,
    ) -> Result:
        words = _words(argv)
        what = shlex.join(words)[:120]
        own = self.deadline(timeout)
        start = time.monotonic()
        lease, command = self._connect().command(words)
        with _stdin(data) as stdin:
            local = _spawn(command, stdin, sink)
        out, err = Bounded(OUTPUT_LIMIT), Bounded(OUTPUT_LIMIT)
        try:
            _drain(local, {local.stdout: out, local.stderr: err}, lambda: self.pause(what, own))
        except BaseException:
            self.end(lease, local)
            raise
        finally:
            for pipe in (local.stdout, local.stderr):
                if pipe is not None:
                    pipe.close()
        status = self.finish(lease, words, local.returncode, err.text())
        result = Result(words, status, out.text(), err.text(), time.monotonic() - start)
        if check and status != 0:
            ended = f"ended by signal {status - 128}" if status > 128 else f"exit status {status}"
            line = _last(result.stderr) or _last(result.stdout)
            raise CommandFailed(what, node=self.name, seen=f"{ended}{': ' + line if line else ''}")
        return result

    def _upload(
        self, data: bytes | IO[bytes], size: int, remote: str, mode: int, timeout: float
    ) -> None:
        # The size is checked there: to cat, a connection that breaks looks like the end.
        script = (
            'new=$(dirname -- "$1")/.put-$$ && trap \'rm -f -- "$new"\' EXIT && umask 077'
            ' && cat >"$new" && [ "$(wc -c <"$new")" -eq "$3" ]'
            ' && chmod -- "$2" "$new" && mv -fT -- "$new" "$1"'
        )
        argv = ["sh", "-c", script, "put", remote, f"{mode:o}", str(size)]
        try:
            self._run(argv, timeout, True, data)
        except CommandFailed as error:
            raise CommandFailed(
                f"cannot write {remote}",
                node=self.name,
                seen=error.seen,
                todo="see that the directory exists, is writable and has room",
            ) from error

    def _python(self, module: str, args: Sequence[str]) -> list[str]:
        path = self._ship()
        # Not unbuffered: a module that talks line by line flushes; the rest is faster.
        variables = [f"PYTHONPATH={path}", "PYTHONSAFEPATH=1", "PYTHONUTF8=1"]
        return ["env", *variables, "python3", "-m", module, *args]

    def _ship(self) -> str:
        with self._lock:
            if self._package is None:
                self._package = Package.build(native=self._native)
            leash = self._connect()
            path = f"{leash.base}/python/{self._package.digest}"
            if self._shipped == path:
                return path
            # Renamed in place as a whole: two that ship at once both find a whole one.
            script = (
                '[ -d "$1/rdmalab" ] && exec cat >/dev/null; umask 022;'
                ' new=$1.$$; trap \'rm -rf -- "$new"\' EXIT; mkdir -p -- "$new"'
                ' && tar -xf - -C "$new" && { mv -T -- "$new" "$1" 2>/dev/null'
                ' || [ -d "$1/rdmalab" ]; }'
            )
            # Not "input": archives are bytes.
            self._run(["sh", "-c", script, "ship", path], 60.0, True, self._package.archive)
            self._shipped = path
            return path


def _words(argv: Sequence[str]) -> tuple[str, ...]:
    if isinstance(argv, str) or not argv:
        raise TypeError("argv is a sequence of words, not a string and not empty")
    if any("\0" in word for word in argv):
        raise ValueError("an argument holds a NUL")
    return tuple(argv)


def _last(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip()[:300] if lines else ""


def _stdin(data: bytes | IO[bytes] | None) -> IO[bytes]:
    """A file that ssh reads by itself, so that nobody has to pump."""
    if data is None:
        return Path(os.devnull).open("rb")
    if not isinstance(data, bytes):
        return os.fdopen(os.dup(data.fileno()), "rb")
    file = tempfile.TemporaryFile()  # noqa: SIM115  closed by the caller
    file.write(data)
    file.seek(0)
    return file


def _spawn(
    command: Sequence[str], stdin: int | IO[bytes], sink: IO[bytes] | None
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=stdin,
        stdout=subprocess.PIPE if sink is None else sink,
        stderr=subprocess.PIPE,
        # Ctrl-C reaches us alone; we then end the remote side before its ssh.
        start_new_session=True,
    )


def _drain(
    local: subprocess.Popen[bytes],
    outputs: Mapping[IO[bytes] | None, Bounded],
    pause: Callable[[], float],
) -> None:
    with selectors.DefaultSelector() as selector:
        for pipe, output in outputs.items():
            if pipe is not None:
                selector.register(pipe, selectors.EVENT_READ, output)
        while selector.get_map():
            for key, _ in selector.select(pause()):
                data = os.read(key.fd, 65536)
                if data:
                    key.data.add(data)
                else:
                    selector.unregister(key.fileobj)
    while local.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            local.wait(pause())
