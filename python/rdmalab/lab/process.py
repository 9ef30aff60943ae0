# SPDX-License-Identifier: Apache-2.0
"""A command that runs on a node while the caller goes on."""

from __future__ import annotations

import io
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Protocol, TextIO

from rdmalab.lab.deadline import Deadline
from rdmalab.lab.leash import Lease

LINE_LIMIT = 1 << 20  # bytes; a longer line arrives in pieces
QUEUE_LIMIT = 4096  # lines read ahead; then the node's pipe is left to fill


@dataclass(frozen=True)
class Result:
    """What a command left. ``stdout`` and ``stderr`` are text (undecodable bytes are
    replaced) of bounded size: of too long an output the middle is cut out, and a line
    says so. ``seconds`` is its wall time seen from here."""

    argv: tuple[str, ...]
    status: int
    stdout: str
    stderr: str
    seconds: float


class Bounded:
    """The first and the last half of ``limit`` bytes of a stream."""

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._head = bytearray()
        self._tail = bytearray()
        self._cut = 0

    def add(self, data: bytes) -> None:
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        # Trimmed at twice its size, not at each byte.
        if len(self._tail) > 2 * self._half:
            self._trim()

    def _trim(self) -> None:
        excess = len(self._tail) - self._half
        if excess > 0:
            del self._tail[:excess]
            self._cut += excess

    def text(self) -> str:
        self._trim()
        head = bytes(self._head).decode(errors="replace")
        tail = bytes(self._tail).decode(errors="replace")
        if not self._cut:
            # In one piece, for a character may lie across the two.
            return bytes(self._head + self._tail).decode(errors="replace")
        return f"{head}\n[... {self._cut} bytes left out ...]\n{tail}"


class Owner(Protocol):
    """What a process needs of the node that started it."""

    def deadline(self, timeout: float) -> Deadline:
        """A deadline that many reference seconds from now."""

    def pause(self, what: str, own: Deadline | None) -> float:
        """Seconds that a wait may last now; raises when a deadline passed or the node
        was lost."""

    def finish(self, lease: Lease, argv: tuple[str, ...], status: int, error: str) -> int:
        """The command's own status, told from ssh's; raises NodeLost."""

    def end(self, lease: Lease, local: subprocess.Popen[bytes]) -> None:
        """End the remote and the local side."""


class Lines:
    """Lines of a stream, without their newline, as they arrive."""

    def __init__(self, pipe: IO[bytes], pause: Callable[[], float]) -> None:
        self._pipe = pipe
        self._pause = pause
        self._queue: queue.Queue[str | None] = queue.Queue(QUEUE_LIMIT)
        self._closing = threading.Event()
        self._ended = False
        threading.Thread(target=self._read, daemon=True).start()

    def __iter__(self) -> Iterator[str]:
        while (line := self.readline()) is not None:
            yield line

    def readline(self, timeout: float | None = None) -> str | None:
        """The next line, or None at the end. Raises TimeoutError after ``timeout``
        seconds, and what the node raises at a deadline or its loss."""
        until = None if timeout is None else time.monotonic() + timeout
        while not self._ended:
            left = self._pause() if until is None else min(self._pause(), until - time.monotonic())
            try:
                line = self._queue.get(timeout=max(0.0, left))
            except queue.Empty:
                if self._closing.is_set():
                    break
                if until is not None and time.monotonic() >= until:
                    raise TimeoutError(f"no line within {timeout:g} s") from None
                continue
            if line is None:
                self._ended = True
                break
            return line
        return None

    def close(self) -> None:
        self._closing.set()

    def _read(self) -> None:
        for line in iter(lambda: self._pipe.readline(LINE_LIMIT), b""):
            self._put(line.decode(errors="replace").rstrip("\r\n"))
        self._put(None)

    def _put(self, line: str | None) -> None:
        # Once closed the rest is read and dropped: ssh does not end with a full pipe.
        while not self._closing.is_set():
            with suppress(queue.Full):
                self._queue.put(line, timeout=0.2)
                return


class Process:
    """Made by ``Node.popen``. As a context manager it stops the process at the end."""

    def __init__(
        self,
        owner: Owner,
        lease: Lease,
        argv: tuple[str, ...],
        local: subprocess.Popen[bytes],
        limit: int,
    ) -> None:
        assert local.stdin is not None
        assert local.stdout is not None
        assert local.stderr is not None
        self.argv = argv
        self._owner = owner
        self._lease = lease
        self._local = local
        self._limit = limit
        self._started = time.monotonic()
        self._status: int | None = None
        self._stopped = False
        self._errors = Bounded(limit)
        self._drain = threading.Thread(target=self._read_errors, args=(local.stderr,), daemon=True)
        self._drain.start()
        what = " ".join(argv)[:80]
        self.stdin: TextIO = io.TextIOWrapper(
            local.stdin, encoding="utf-8", errors="replace", line_buffering=True
        )
        self.stdout = Lines(local.stdout, lambda: owner.pause(what, None))

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def poll(self) -> int | None:
        """The status if the command has ended, else None."""
        status = self._local.poll()
        return None if status is None else self._settle(status)

    def wait(self, timeout: float | None = None) -> Result:
        """Wait for the end; the result's stdout is what was not read as lines yet.

        ``timeout`` is in seconds on the reference machine; at the end of it, or of a
        deadline of the node's, the process goes on and DeadlineExceeded is raised.
        """
        own = None if timeout is None else self._owner.deadline(timeout)
        what = " ".join(self.argv)[:80]
        rest = Bounded(self._limit)
        while True:
            left = self._owner.pause(what, own)
            try:
                line = self.stdout.readline(min(left, 0.2))
            except TimeoutError:
                continue
            if line is None:
                break
            rest.add(line.encode() + b"\n")
        while self._local.poll() is None:
            try:
                self._local.wait(min(self._owner.pause(what, own), 0.2))
            except subprocess.TimeoutExpired:
                continue
        self._drain.join(2.0)
        status = self._settle(self._local.returncode)
        seconds = time.monotonic() - self._started
        return Result(self.argv, status, rest.text(), self._errors.text(), seconds)

    def stop(self) -> None:
        """End the command on the node (TERM, then KILL) and its ssh. Never raises;
        nothing happens to a command that has ended."""
        self._stopped = True
        self.stdout.close()
        if self._status is None:
            self._owner.end(self._lease, self._local)
            if self._status is None:
                self._status = self._local.poll()
        with suppress(OSError):  # what was still to be written has no reader any more
            self.stdin.close()

    def stderr(self) -> str:
        """What it has written to stderr until now."""
        return self._errors.text()

    def _settle(self, status: int) -> int:
        if self._status is None:
            if self._stopped:
                self._status = status
            else:
                self._drain.join(2.0)
                self._status = self._owner.finish(
                    self._lease, self.argv, status, self._errors.text()
                )
        return self._status

    def _read_errors(self, pipe: IO[bytes]) -> None:
        while data := pipe.read1(65536) if isinstance(pipe, io.BufferedReader) else pipe.read(1):
            self._errors.add(data)
