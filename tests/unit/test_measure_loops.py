# SPDX-License-Identifier: Apache-2.0
"""The timed loops: what they refuse, and the TCP loop itself on this host's loopback."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from ctypes import CDLL
from dataclasses import replace
from pathlib import Path

import pytest

import rdmalab
from rdmalab.errors import UsageError
from rdmalab.measure.measurement import Point
from rdmalab.measure.node import loops

NATIVE = Path(rdmalab.__file__).parent / "measure/node/native"

RC = Point("send", 64)


@pytest.fixture(scope="session")
def tcp_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (gcc) on this host")
    library = tmp_path_factory.mktemp("native") / "tcp.so"
    command = [compiler, "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([*command, str(NATIVE / "tcp.c"), "-o", str(library)], check=True)
    return library


@pytest.fixture
def tcp(tcp_library: Path) -> CDLL:
    return loops.load("tcp", tcp_library)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        right, _ = server.accept()
    with left, right:
        yield left, right


def loop(
    tcp: CDLL, point: Point, initiator: bool, *ends: socket.socket, **limits: float
) -> loops.TcpLoop:
    seconds = {"idle_s": 5.0, "total_s": 30.0, **limits}
    return loops.TcpLoop(
        point, initiator, [end.fileno() for end in ends], library=tcp,
        idle_s=seconds["idle_s"], total_s=seconds["total_s"],
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["event", "poll"])
@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 4096, 100_003])
def test_ping_pong_records_one_sample_a_message(
    tcp: CDLL, pair: tuple[socket.socket, socket.socket], size: int, mode: str
) -> None:
    point = Point("send", size, mode=mode, transport="tcp", iterations=50, warmup=5)
    with Target(tcp, point, pair[1]) as target:
        outcome = loop(tcp, point, True, pair[0]).run()
    assert target.error == ""
    assert len(outcome.samples_ns) == 50
    assert all(ns > 0 for ns in outcome.samples_ns)
    assert sum(outcome.samples_ns) == outcome.elapsed_ns
    # Warm-up, the samples, and the last message that every byte is checked of.
    assert outcome.tx_messages == outcome.rx_messages == 56
    assert outcome.bytes == 50 * size


@pytest.mark.parametrize("mode", ["event", "poll"])
@pytest.mark.parametrize("direction", ["one-way", "two-way"])
@pytest.mark.parametrize("connections", [1, 3])
def test_stream_carries_every_message(
    tcp: CDLL, connections: int, direction: str, mode: str
) -> None:
    point = Point(
        "send", 5000, kind="bandwidth", mode=mode, transport="tcp", qps=connections,
        direction=direction, iterations=40, warmup=4,
    )  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = [socket.create_connection(server.getsockname()) for _ in range(connections)]
        right = [server.accept()[0] for _ in range(connections)]
    try:
        with Target(tcp, point, *right) as target:
            outcome = loop(tcp, point, True, *left).run()
    finally:
        for end in left + right:
            end.close()
    assert target.error == ""
    assert outcome.tx_messages == 45 * connections
    assert outcome.rx_messages == (45 * connections if direction == "two-way" else 0)
    assert outcome.bytes == 40 * 5000 * connections
    assert outcome.elapsed_ns > 0


@pytest.mark.parametrize(
    ("place", "seen"),
    [
        (-1, ""),
        (0, "message 1 differs from what was sent at byte 0 of 512"),
        (100, "message 1 differs from what was sent at byte 100 of 512"),
        (511, "message 0 arrived where 1 was expected"),
        (512 * 10 + 511, "message 10 arrived where 11 was expected"),
        (512 * 22 + 300, "message 23 differs from what was sent at byte 300 of 512"),
    ],
)
def test_bytes_that_were_changed_on_the_way_give_no_number(
    tcp: CDLL, pair: tuple[socket.socket, socket.socket], place: int, seen: str
) -> None:
    """Both ends send the same pattern, so an echo is a good peer, until it flips a bit: in
    a first message, in the end of any, anywhere in the last."""
    point = Point("send", 512, transport="tcp", iterations=20, warmup=2)
    echo = threading.Thread(target=_echo, args=(pair[1], place))
    echo.start()
    try:
        if seen:
            with pytest.raises(loops.LoopError, match=seen):
                loop(tcp, point, True, pair[0]).run()
        else:
            assert len(loop(tcp, point, True, pair[0]).run().samples_ns) == 20
    finally:
        pair[0].close()
        echo.join()


def _echo(end: socket.socket, place: int) -> None:
    seen = 0
    while data := bytearray(end.recv(4096)):
        if seen <= place < seen + len(data):
            data[place - seen] ^= 1
        seen += len(data)
        end.sendall(data)


def test_a_silent_peer_ends_the_loop_at_its_idle_deadline(
    tcp: CDLL, pair: tuple[socket.socket, socket.socket]
) -> None:
    point = Point("send", 64, transport="tcp", iterations=20, warmup=2)
    start = time.monotonic()
    with pytest.raises(loops.LoopError, match=r"no byte within 0\.4 s .*received 0 of 23"):
        loop(tcp, point, True, pair[0], idle_s=0.4).run()
    assert 0.3 < time.monotonic() - start < 3.0


def test_a_trickle_ends_at_the_run_s_deadline(
    tcp: CDLL, pair: tuple[socket.socket, socket.socket]
) -> None:
    """Progress resets the idle deadline and not the other."""
    point = Point("send", 1 << 20, transport="tcp", iterations=20, warmup=2)
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(0.05):
            pair[1].send(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        with pytest.raises(loops.LoopError, match=r"run's deadline of 1\.0 s"):
            loop(tcp, point, False, pair[0], idle_s=0.5, total_s=1.0).run()
    finally:
        stop.set()
        thread.join()


def test_a_closed_connection_is_said(tcp: CDLL, pair: tuple[socket.socket, socket.socket]) -> None:
    point = Point("send", 64, transport="tcp", iterations=20, warmup=2)
    pair[1].close()
    with pytest.raises(loops.LoopError, match=r"closed the connection|reset|pipe"):
        loop(tcp, point, True, pair[0]).run()


def test_the_peer_s_end_on_the_control_connection_ends_the_loop(
    tcp: CDLL, pair: tuple[socket.socket, socket.socket]
) -> None:
    """The data connection stays open and silent; only the control one is closed."""
    point = Point("send", 64, transport="tcp", iterations=20, warmup=2)
    near, far = socket.socketpair()
    with near:
        far.close()
        start = time.monotonic()
        with pytest.raises(loops.LoopError, match="the peer ended"):
            loops.TcpLoop(
                point, True, [pair[0].fileno()], library=tcp, idle_s=8.0, total_s=30.0,
                control_fd=near.fileno(),
            ).run()  # fmt: skip
        assert time.monotonic() - start < 4.0


def test_a_library_of_another_version_is_refused(tmp_path: Path) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (gcc) on this host")
    (tmp_path / "tcp.c").write_text(
        "unsigned long tcp_struct_bytes(void) { return 8; } int tcp_run(void *j) { return !j; }"
    )
    subprocess.run(
        [compiler, "-shared", "-fPIC", str(tmp_path / "tcp.c"), "-o", str(tmp_path / "tcp.so")],
        check=True,
    )
    with pytest.raises(Exception, match=r"tcp\.so is of another version: a job of 8 bytes"):
        loops.load("tcp", tmp_path / "tcp.so")


@pytest.mark.parametrize(
    ("point", "why"),
    [
        (replace(RC, op="write", service="UD"), "write is not defined for UD"),
        (replace(RC, op="write_imm", service="UD"), "write_imm is not defined for UD"),
        (replace(RC, op="read", service="UC"), "read is not defined for UC"),
        (replace(RC, op="fetch_add", size=8, service="UD"), "fetch_add is not defined for UD"),
        (replace(RC, op="cmp_swap", size=8, service="UC"), "cmp_swap is not defined for UC"),
        (replace(RC, op="cmp_swap", size=16), "an atomic is on 8 bytes"),
        (replace(RC, op="write"), "there is no event to wait for; use mode poll"),
        (replace(RC, qps=2), "latency is measured on one"),
        (replace(RC, direction="two-way"), "two-way is for bandwidth"),
        (replace(RC, op="write", transport="tcp"), "TCP has send only"),
        (replace(RC, size=0), "allowed: 1 to 8388608"),
        (replace(RC, size=(8 << 20) + 1), "allowed: 1 to 8388608"),
        (replace(RC, iterations=0), "0 iterations"),
        (replace(RC, op="teleport"), "allowed: send, write"),
        (replace(RC, mode="hope"), "allowed: event, poll"),
        (replace(RC, service="XRC"), "allowed: RC, UC, UD"),
        (replace(RC, kind="bandwidth", qps=64, size=8 << 20), "MiB of pinned memory"),
    ],
)
def test_what_no_loop_can_measure_is_refused_in_one_line(point: Point, why: str) -> None:
    with pytest.raises(UsageError, match=why) as refused:
        loops.refuse(point)
    assert "\n" not in str(refused.value)
    assert refused.value.exit_status == 2


def test_a_datagram_over_the_path_mtu_is_refused_once_that_is_known() -> None:
    point = replace(RC, service="UD", size=1025)
    loops.refuse(point)
    with pytest.raises(UsageError, match="one packet of at most 1024 bytes"):
        loops.refuse(point, mtu=1024)
    loops.refuse(replace(point, size=1024), mtu=1024)


@pytest.mark.parametrize("size", [2, 64, 4096, 65536, 1 << 20, 8 << 20])
@pytest.mark.parametrize("qps", [1, 4])
def test_layout_pins_little_and_leaves_room_for_credits(size: int, qps: int) -> None:
    point = Point("send", size, kind="bandwidth", qps=qps)
    slots = loops.layout(point)
    assert 1 <= slots.tx_slots <= 128
    # In two-way a peer's data and its credits may all be waiting for a receive.
    assert slots.rx_slots >= 2 * slots.tx_slots
    assert slots.slot_bytes >= size + 40
    assert slots.qp_bytes * qps <= 200 << 20


class Target:
    """The target's loop in a process of its own, since the watchdog belongs to one loop a
    process; ``error`` is its line after the end."""

    def __init__(self, tcp: CDLL, point: Point, *ends: socket.socket) -> None:
        self._loop = loop(tcp, point, False, *ends)
        self.error = ""

    def __enter__(self) -> Target:
        import multiprocessing

        context = multiprocessing.get_context("fork")
        self._said, say = context.Pipe(duplex=False)
        self._process = context.Process(target=self._run, args=(say,))
        self._process.start()
        say.close()
        return self

    def _run(self, say: object) -> None:
        try:
            self._loop.run()
            line = ""
        except loops.LoopError as error:
            line = str(error)
        say.send(line)  # type: ignore[attr-defined]

    def __exit__(self, *_: object) -> None:
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
            self.error = "did not end"
        elif self._said.poll(0):
            self.error = self._said.recv()
        else:
            self.error = f"ended with {self._process.exitcode} and said nothing"
