# SPDX-License-Identifier: Apache-2.0
"""perftest as a child process of the driver: which program with which options, started so
that its server listens before its client connects, and ended with its output or in time."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rdmalab.errors import HostError, RdmalabError, UsageError
from rdmalab.measure.measurement import Point

#: QP timeout code 18 (4.096 us * 2^18, a second): perftest's own 14 (67 ms) times its seven
#: retries is less than a guest's vCPU may stall.
QP_TIMEOUT = 18

_PROGRAMS = {
    "send": "ib_send",
    "write": "ib_write",
    "write_imm": "ib_write",
    "read": "ib_read",
    "fetch_add": "ib_atomic",
    "cmp_swap": "ib_atomic",
}
_LOOK_S = 1.0  # between two looks at the deadline and the peer
_LISTEN = "0A"  # a socket's state in /proc/net/tcp


def supports(point: Point) -> str:
    """Why perftest cannot measure the point; empty where it can."""
    if point.transport == "tcp":
        return "perftest measures RDMA only"
    if point.op in ("write", "write_imm") and point.mode == "event":
        return f"perftest refuses events for {point.op} (-e)"
    if point.service != "RC" and point.op in ("read", "fetch_add", "cmp_swap"):
        return f"{point.op} is not defined for {point.service}"
    if point.service == "UD" and point.op != "send":
        return f"{point.op} is not defined for UD"
    if point.kind == "latency" and point.qps != 1:
        return "perftest measures latency on one queue pair"
    if point.iterations < 5:
        return "perftest needs 5 iterations at least"
    return ""


def command(
    point: Point, *, device: str, gid_index: int, mtu: int, port: int, inline: int, peer: str = ""
) -> list[str]:
    """The command line; the client's has ``peer``, the server's address. Raises UsageError
    for what ``supports`` refuses."""
    if why := supports(point):
        raise UsageError("perftest cannot measure this", seen=why, todo="use --no-perftest")
    program = f"{_PROGRAMS[point.op]}_{'lat' if point.kind == 'latency' else 'bw'}"
    argv = [program, "-d", device, "-x", str(gid_index), "-m", str(mtu), "-p", str(port), "-F"]
    argv += ["-n", str(point.iterations)]
    if point.op in ("send", "write", "write_imm"):
        argv += ["-I", str(inline)]
    if point.op in ("fetch_add", "cmp_swap"):
        argv += ["-A", "FETCH_AND_ADD" if point.op == "fetch_add" else "CMP_AND_SWAP"]
    else:
        argv += ["-s", str(point.size), "-c", point.service]
    if point.service == "RC":
        argv += ["-u", str(QP_TIMEOUT)]
    if point.op == "write_imm":
        argv += ["--write_with_imm"]
    if point.mode == "event":
        argv += ["-e"]
    if point.kind == "bandwidth":
        # Its peak is taken over two messages only, and costs a clock reading a message.
        argv += ["-q", str(point.qps), "-N"]
        if point.direction == "two-way":
            argv += ["-b"]
    return [*argv, peer] if peer else argv


class Run:
    """One perftest process; as a context manager it is ended at the end."""

    def __init__(self, argv: Sequence[str], port: int) -> None:
        self._argv = list(argv)
        self._port = port
        try:
            self._process = subprocess.Popen(
                self._argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        except FileNotFoundError as error:
            raise HostError(
                f"no {self._argv[0]} here", todo="install it: apt-get install perftest"
            ) from error

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def wait_listening(self, seconds: float, root: Path = Path("/proc")) -> None:
        """Returns once some socket of the node listens on the port; RdmalabError when the
        server ends before, or at the deadline."""
        until = time.monotonic() + seconds
        while not listens(self._port, root):
            if self._process.poll() is not None:
                self.finish(0.0, lambda: False)
            if time.monotonic() > until:
                raise RdmalabError(
                    f"{self._argv[0]} does not listen on port {self._port}",
                    seen=f"deadline {seconds:g} s",
                )
            time.sleep(0.05)

    def finish(self, seconds: float, peer_gone: Callable[[], bool]) -> str:
        """Its output, once it has ended with status 0. RdmalabError with its own last words
        otherwise, at the deadline, or when the peer has gone: perftest's server would wait
        for its client for ever."""
        until = time.monotonic() + seconds
        while True:
            try:
                output, _ = self._process.communicate(timeout=_LOOK_S)
                break
            except subprocess.TimeoutExpired:
                pass
            if peer_gone():
                raise RdmalabError(f"{self._argv[0]} was ended", seen="the other end is gone")
            if time.monotonic() > until:
                raise RdmalabError(f"{self._argv[0]} did not end", seen=f"deadline {seconds:g} s")
        if self._process.returncode != 0:
            raise RdmalabError(
                f"{' '.join(self._argv)} failed",
                seen=f"exit status {self._process.returncode}: {last_words(output)}",
            )
        return output


def listens(port: int, root: Path = Path("/proc")) -> bool:
    """Whether a TCP socket of this node listens on ``port``."""
    for name in ("net/tcp", "net/tcp6"):
        with contextlib.suppress(OSError):
            for line in (root / name).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTEN and int(words[1].rpartition(":")[2], 16) == port:
                    return True
    return False


def last_words(output: str) -> str:
    """The last line that says something; perftest's own last one after a wrong option does
    not."""
    lines = [
        line.strip()
        for line in output.splitlines()
        if line.strip(" -\t") and "Parser function exited" not in line
    ]
    return lines[-1][:200] if lines else "no output"
