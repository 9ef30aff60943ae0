# SPDX-License-Identifier: Apache-2.0
"""The C loops, called through ctypes. The structures mirror native/loop.c and native/tcp.c;
their sizes are compared before anything runs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rdmalab
from rdmalab.errors import HostError, RdmalabError, UsageError
from rdmalab.measure.measurement import Point

OPS = ("send", "write", "write_imm", "read", "fetch_add", "cmp_swap")
ONE_SIDED = ("read", "fetch_add", "cmp_swap")
SERVICES = ("RC", "UC", "UD")

MIN_SIZE = 1
MAX_SIZE = 8 << 20
MAX_MESSAGES = (1 << 32) - 2  # their number has to fit into an immediate
MAX_BUFFER = 512 << 20  # bytes of pinned memory a node
_TX_DEPTH = 128  # messages in flight per queue pair: perftest's default
_TX_BUDGET = 16 << 20  # bytes of messages in flight, over all queue pairs
_SIGNAL_EVERY = 100  # perftest's "CQ moderation"
_LARGE = 8192  # bytes from which perftest asks for every completion
_SEED = 0x5DEECE66D

ERROR_BYTES = 256


class LoopError(RdmalabError):
    """The timed loop ended with an error: a completion's status by name, lost or foreign
    bytes, or a deadline."""


class _LoopQp(ctypes.Structure):
    _fields_ = (
        ("qp", ctypes.c_void_p),
        ("ah", ctypes.c_void_p),
        ("remote_qpn", ctypes.c_uint32),
        ("remote_qkey", ctypes.c_uint32),
        ("remote_addr", ctypes.c_uint64),
        ("rkey", ctypes.c_uint32),
        ("lkey", ctypes.c_uint32),
        ("base", ctypes.c_void_p),
    )


class _LoopJob(ctypes.Structure):
    _fields_ = (
        ("struct_bytes", ctypes.c_uint64),
        ("op", ctypes.c_uint32),
        ("bandwidth", ctypes.c_uint32),
        ("event", ctypes.c_uint32),
        ("initiator", ctypes.c_uint32),
        ("two_way", ctypes.c_uint32),
        ("qps", ctypes.c_uint32),
        ("inline_max", ctypes.c_uint32),
        ("signal_every", ctypes.c_uint32),
        ("tx_slots", ctypes.c_uint32),
        ("rx_slots", ctypes.c_uint32),
        ("mtu", ctypes.c_uint32),
        ("control_fd", ctypes.c_int32),
        ("size", ctypes.c_uint64),
        ("iterations", ctypes.c_uint64),
        ("warmup", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("idle_ns", ctypes.c_uint64),
        ("total_ns", ctypes.c_uint64),
        ("qp", ctypes.POINTER(_LoopQp)),
        ("samples", ctypes.POINTER(ctypes.c_uint64)),
        ("sample_count", ctypes.c_uint64),
        ("elapsed_ns", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("tx_messages", ctypes.c_uint64),
        ("rx_messages", ctypes.c_uint64),
        ("tx_credits", ctypes.c_uint64),
        ("rx_credits", ctypes.c_uint64),
        ("events", ctypes.c_uint64),
        ("polls", ctypes.c_uint64),
        ("completions", ctypes.c_uint64),
        ("lost_events", ctypes.c_uint64),
        ("wc_status", ctypes.c_int32),
        ("vendor_err", ctypes.c_int32),
        ("error", ctypes.c_char * ERROR_BYTES),
    )


class _TcpJob(ctypes.Structure):
    _fields_ = (
        ("struct_bytes", ctypes.c_uint64),
        ("bandwidth", ctypes.c_uint32),
        ("event", ctypes.c_uint32),
        ("initiator", ctypes.c_uint32),
        ("two_way", ctypes.c_uint32),
        ("connections", ctypes.c_uint32),
        ("control_fd", ctypes.c_int32),
        ("size", ctypes.c_uint64),
        ("iterations", ctypes.c_uint64),
        ("warmup", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("idle_ns", ctypes.c_uint64),
        ("total_ns", ctypes.c_uint64),
        ("fds", ctypes.POINTER(ctypes.c_int32)),
        ("buffer", ctypes.c_void_p),
        ("samples", ctypes.POINTER(ctypes.c_uint64)),
        ("sample_count", ctypes.c_uint64),
        ("elapsed_ns", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("tx_messages", ctypes.c_uint64),
        ("rx_messages", ctypes.c_uint64),
        ("tx_bytes", ctypes.c_uint64),
        ("rx_bytes", ctypes.c_uint64),
        ("error", ctypes.c_char * ERROR_BYTES),
    )


@dataclass(frozen=True)
class Outcome:
    """What a loop recorded. ``samples_ns``: the initiator's, from post to post, whole round
    trips. ``tx_messages`` and ``rx_messages`` count warm-up and the last, untimed message
    too; ``tx_credits`` the empty messages by which a UC or UD receiver says what arrived."""

    samples_ns: tuple[int, ...]
    elapsed_ns: int
    bytes: int
    tx_messages: int
    rx_messages: int
    tx_credits: int = 0
    rx_credits: int = 0
    events: int = 0
    polls: int = 0
    completions: int = 0
    lost_events: int = 0


@dataclass(frozen=True)
class Layout:
    """How the registered buffer is used: slots per queue pair, and what queues must hold."""

    tx_slots: int
    rx_slots: int
    slot_bytes: int

    @property
    def qp_bytes(self) -> int:
        return (self.tx_slots + self.rx_slots) * self.slot_bytes

    @property
    def send_depth(self) -> int:
        # Credits share the send queue; there are at most as many as messages.
        return 2 * self.tx_slots + 2

    @property
    def recv_depth(self) -> int:
        return self.rx_slots


def layout(point: Point) -> Layout:
    """Latency needs one message in flight; bandwidth as many as perftest's 128, fewer where
    they would pin too much memory. Receives are twice as many and two, which leaves room
    for credits (loop.c)."""
    in_flight = _TX_BUDGET // (point.size * point.qps)
    tx = 1 if point.kind == "latency" else max(1, min(_TX_DEPTH, in_flight))
    slot_bytes = (point.size + 40 + 63) // 64 * 64
    return Layout(tx, 2 * tx + 2, slot_bytes)


def refuse(point: Point, *, mtu: int | None = None) -> None:
    """Raises UsageError for a point that no loop can measure, before anything is made for
    it. ``mtu`` is the path MTU where it is known already. loop.c checks again."""
    tcp = point.transport == "tcp"
    atomic = point.op in ("fetch_add", "cmp_swap")
    latency = point.kind == "latency"
    what = f"{point.op} {point.kind} of {point.size} B over {point.transport} {point.service}"

    def no(seen: str, todo: str = "") -> UsageError:
        return UsageError(f"cannot measure {what}", seen=seen, todo=todo)

    for name, value, allowed in (
        ("op", point.op, OPS),
        ("kind", point.kind, ("latency", "bandwidth")),
        ("mode", point.mode, ("event", "poll")),
        ("direction", point.direction, ("one-way", "two-way")),
        ("service", point.service, SERVICES),
    ):
        if value not in allowed:
            raise no(f"{name} {value!r}", f"allowed: {', '.join(allowed)}")
    if not MIN_SIZE <= point.size <= MAX_SIZE:
        raise no(f"size {point.size}", f"allowed: {MIN_SIZE} to {MAX_SIZE} bytes")
    if point.iterations < 1 or point.warmup < 0:
        raise no(f"{point.iterations} iterations after {point.warmup} of warm-up")
    if point.iterations + point.warmup >= MAX_MESSAGES:
        raise no(f"{point.iterations} iterations", f"allowed: fewer than {MAX_MESSAGES}")
    if not 1 <= point.qps <= 64:
        raise no(f"{point.qps} queue pairs", "allowed: 1 to 64")
    if latency and point.qps != 1:
        raise no(f"latency on {point.qps} queue pairs", "latency is measured on one")
    if latency and point.direction != "one-way":
        raise no("two-way latency", "two-way is for bandwidth")
    if tcp:
        if point.op != "send":
            raise no("TCP has send only")
        return
    if point.service == "UD" and point.op != "send":
        raise no(f"{point.op} is not defined for UD", "use send, or service RC")
    if point.service != "RC" and point.op in ONE_SIDED:
        raise no(f"{point.op} is not defined for {point.service}", "use service RC")
    if point.service == "UD" and mtu is not None and point.size > mtu:
        raise no(f"a datagram is one packet of at most {mtu} bytes", "use RC or UC")
    if atomic and point.size != 8:
        raise no("an atomic is on 8 bytes", "use size 8")
    if latency and point.op == "write" and point.mode == "event":
        raise no(
            "a write completes nothing at the target, so there is no event to wait for",
            "use mode poll, or op write_imm",
        )
    if (needed := layout(point).qp_bytes * point.qps) > MAX_BUFFER:
        raise no(f"{needed >> 20} MiB of pinned memory", "use fewer queue pairs or a smaller size")


@dataclass(frozen=True)
class VerbsQp:
    """One queue pair: pointers of struct ibv_qp and (UD) ibv_ah, the peer's numbers, and
    where its part of the two buffers begins."""

    qp: int
    handle: int | None
    remote_qpn: int
    remote_qkey: int
    remote_addr: int
    rkey: int
    base: int
    lkey: int


class VerbsLoop:
    """loop.c for one point at one end: ``prepare``, barrier, ``run``, barrier, ``check``."""

    def __init__(
        self,
        point: Point,
        initiator: bool,
        qps: Sequence[VerbsQp],
        *,
        mtu: int,
        inline: int,
        idle_s: float,
        total_s: float,
        control_fd: int = -1,
    ) -> None:
        self._library = load("loop")
        slots = layout(point)
        self._qps = (_LoopQp * len(qps))(
            *(
                _LoopQp(
                    q.qp,
                    q.handle,
                    q.remote_qpn,
                    q.remote_qkey,
                    q.remote_addr,
                    q.rkey,
                    q.lkey,
                    q.base,
                )
                for q in qps
            )
        )
        self._samples = (ctypes.c_uint64 * point.iterations)()
        self._job = _LoopJob(
            struct_bytes=ctypes.sizeof(_LoopJob),
            op=OPS.index(point.op),
            bandwidth=point.kind == "bandwidth",
            event=point.mode == "event",
            initiator=initiator,
            two_way=point.direction == "two-way",
            qps=len(qps),
            inline_max=inline,
            signal_every=_signal_every(point),
            tx_slots=slots.tx_slots,
            rx_slots=slots.rx_slots,
            mtu=mtu,
            control_fd=control_fd,
            size=point.size,
            iterations=point.iterations,
            warmup=point.warmup,
            seed=_SEED,
            idle_ns=int(idle_s * 1e9),
            total_ns=int(total_s * 1e9),
            qp=self._qps,
            samples=self._samples,
        )
        if self._library.loop_layout(ctypes.byref(self._job)) != slots.qp_bytes:
            raise HostError("loop.so and loops.py disagree about the buffer's layout")

    def prepare(self) -> None:
        """Refuses what cannot work, fills the buffer, posts receives, arms queues."""
        self._call("loop_prepare")

    def run(self) -> Outcome:
        """Raises LoopError; never takes longer than the point's deadlines."""
        self._call("loop_run")
        job = self._job
        return Outcome(
            samples_ns=tuple(self._samples[: job.sample_count]),
            elapsed_ns=job.elapsed_ns,
            bytes=job.bytes,
            tx_messages=job.tx_messages,
            rx_messages=job.rx_messages,
            tx_credits=job.tx_credits,
            rx_credits=job.rx_credits,
            events=job.events,
            polls=job.polls,
            completions=job.completions,
            lost_events=job.lost_events,
        )

    def check(self) -> None:
        """What writes and atomics left in this end's memory."""
        self._call("loop_check")

    def _call(self, name: str) -> None:
        if getattr(self._library, name)(ctypes.byref(self._job)):
            raise LoopError(self._job.error.decode("utf-8", "replace"))


class TcpLoop:
    """tcp.c for one point at one end, on connected sockets."""

    def __init__(
        self,
        point: Point,
        initiator: bool,
        descriptors: Sequence[int],
        *,
        idle_s: float,
        total_s: float,
        control_fd: int = -1,
        library: ctypes.CDLL | None = None,
    ) -> None:
        self._library = library or load("tcp")
        self._samples = (ctypes.c_uint64 * point.iterations)()
        self._descriptors = (ctypes.c_int32 * len(descriptors))(*descriptors)
        self._job = _TcpJob(
            struct_bytes=ctypes.sizeof(_TcpJob),
            bandwidth=point.kind == "bandwidth",
            event=point.mode == "event",
            initiator=initiator,
            two_way=point.direction == "two-way",
            connections=len(descriptors),
            control_fd=control_fd,
            size=point.size,
            iterations=point.iterations,
            warmup=point.warmup,
            seed=_SEED,
            idle_ns=int(idle_s * 1e9),
            total_ns=int(total_s * 1e9),
            fds=self._descriptors,
            samples=self._samples,
        )
        self._buffer = (ctypes.c_uint8 * (2 * point.size * len(descriptors)))()
        self._job.buffer = ctypes.addressof(self._buffer)

    def run(self) -> Outcome:
        """Raises LoopError; never takes longer than the point's deadlines."""
        if self._library.tcp_run(ctypes.byref(self._job)):
            raise LoopError(self._job.error.decode("utf-8", "replace"))
        job = self._job
        return Outcome(
            samples_ns=tuple(self._samples[: job.sample_count]),
            elapsed_ns=job.elapsed_ns,
            bytes=job.bytes,
            tx_messages=job.tx_messages,
            rx_messages=job.rx_messages,
        )


def _signal_every(point: Point) -> int:
    # As perftest: rare completions for small messages, unless somebody sleeps for them.
    return 1 if point.size > _LARGE and point.mode == "poll" else _SIGNAL_EVERY


def load(name: str, path: Path | None = None) -> ctypes.CDLL:
    """The shared object built from native/NAME.c; HostError where it is not there."""
    library = path or Path(rdmalab.__file__).parent / "_native" / f"{name}.so"
    try:
        loaded = ctypes.CDLL(str(library))
    except OSError as error:
        raise HostError(
            f"no {name}.so", seen=str(error), todo="build the native parts (make setup)"
        ) from error
    declare(loaded, name)
    return loaded


def declare(library: Any, name: str) -> None:
    """Sets the C signatures and compares the structure's size with ours."""
    structure, calls = {
        "loop": (_LoopJob, ("loop_prepare", "loop_run", "loop_check")),
        "tcp": (_TcpJob, ("tcp_run",)),
    }[name]
    for call in calls:
        getattr(library, call).argtypes = [ctypes.POINTER(structure)]
        getattr(library, call).restype = ctypes.c_int
    if name == "loop":
        library.loop_layout.argtypes = [ctypes.POINTER(structure)]
        library.loop_layout.restype = ctypes.c_uint64
    size = getattr(library, f"{name}_struct_bytes")
    size.restype = ctypes.c_uint64
    if size() != ctypes.sizeof(structure):
        raise HostError(
            f"{name}.so is of another version",
            seen=f"a job of {size()} bytes, not {ctypes.sizeof(structure)}",
            todo="build the native parts again",
        )
