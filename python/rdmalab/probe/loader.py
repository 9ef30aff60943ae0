# SPDX-License-Identifier: Apache-2.0
"""Compiles a plan through bcc, attaches it, reads and clears its histograms.

Everything that is attached hangs on a file descriptor of this process, so that nothing of it
outlives the process, however it ends.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Callable
from typing import Any

from rdmalab.errors import HostError, RdmalabError
from rdmalab.probe.buckets import BUCKETS, to_buckets
from rdmalab.probe.catalogue import MODULE, PROBES
from rdmalab.probe.headers import find as find_headers
from rdmalab.probe.histogram import Histogram
from rdmalab.probe.plan import Attach, Plan, probe_number

# bcc includes <linux/log2.h> and <asm/page.h> in front of every program; ours need neither,
# and what they pull in is half of the time to compile (7.6 s against 4.1 s, emulated). Their
# include guards keep them out.
_LEAN = {"x86_64": ("-D_LINUX_LOG2_H", "-D_ASM_X86_PAGE_H")}

# offsetof(struct bpf_prog_info, recursion_misses), Linux 5.12
_RECURSION_MISSES = 208
_PROG_INFO_SIZE = 216


class ProbeError(RdmalabError):
    """A probe program was refused by the compiler, the verifier, or at its attachment."""


def check_root() -> None:
    """HostError for anyone but root."""
    if os.geteuid():
        raise HostError("probes need root", todo="run as root")


def _bpf_class() -> Any:
    try:
        from bcc import BPF
    except ImportError as error:
        raise HostError(
            "bcc is not installed", seen=str(error), todo="apt-get install python3-bpfcc"
        ) from None

    class Module(BPF):  # type: ignore[misc]  # bcc has no types
        def _trace_autoload(self) -> None:
            """Attach nothing by itself: one refused program would cost all the others."""

    return Module


class Loader:
    """The compiled programs of one plan; a context manager that detaches on leaving."""

    def __init__(self, plan: Plan, node: str) -> None:
        """Compiles and loads, attaches nothing. ProbeError where the compiler refuses;
        what the verifier refuses is missing from its probes."""
        self._plan = plan
        self._node = node
        self._missing = {(m.probe, m.key): m.reason for m in plan.missing}
        self._detaches: list[Callable[[], None]] = []
        self._missed: dict[str, int] = {}
        self._bpf: Any = None
        if plan.text:
            self._bpf = self._compile()
            self._missed = self._misses()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def _compile(self) -> Any:
        module = _bpf_class()
        headers = find_headers()
        os.environ.update(headers.environment)
        cflags = [*_LEAN.get(platform.machine(), ()), *headers.cflags]
        try:
            return module(text=self._plan.text, cflags=cflags)
        except Exception as error:
            raise ProbeError(
                "the probe programs do not compile",
                node=self._node,
                seen=str(error),
                todo="see the compiler's messages on stderr",
            ) from None

    def attach(self) -> None:
        """Attaches all programs. One that the kernel refuses is taken off the plan, and its
        probes say so in ``missing``; what the kernel took of them stays attached unread."""
        if self._detaches or self._bpf is None:
            return
        # Ends before starts: a call that is under way then meets no start, never a start
        # without its end.
        late = ("fentry", "kprobe")
        for attach in sorted(self._plan.attaches, key=lambda a: a.kind in late):
            try:
                self._detaches.append(self._attach(attach))
            except Exception as error:
                for probe in attach.probes:
                    reason = f"{attach.kind} on {attach.target} refused: {error}"
                    key = attach.target if PROBES[probe].independent else ""
                    self._missing[probe, key] = reason

    def _attach(self, attach: Attach) -> Callable[[], None]:
        bpf, program, target = self._bpf, attach.program, attach.target
        if attach.kind == "fentry":
            bpf.attach_kfunc(fn_name=program)
            return lambda: bpf.detach_kfunc(program)
        if attach.kind == "fexit":
            bpf.attach_kretfunc(fn_name=program)
            return lambda: bpf.detach_kretfunc(program)
        if attach.kind == "kprobe":
            bpf.attach_kprobe(event=target, fn_name=program)
            return lambda: bpf.detach_kprobe(target, program)
        if attach.kind == "kretprobe":
            bpf.attach_kretprobe(event=target, fn_name=program)
            return lambda: bpf.detach_kretprobe(target, program)
        if attach.kind == "tracepoint":
            bpf.attach_raw_tracepoint(tp=target, fn_name=program)
            return lambda: bpf.detach_raw_tracepoint(target)
        bpf.attach_uretprobe(name=target, addr=attach.address, fn_name=program)
        return lambda: bpf.detach_uretprobe(name=target, addr=attach.address)

    def detach(self) -> None:
        """Detaches all programs; what was counted stays, and ``attach`` may follow."""
        while self._detaches:
            self._detaches.pop()()

    def clear(self) -> None:
        """Sets all counts to 0."""
        if self._bpf is None:
            return
        for name in ("rows", "lost"):
            table = self._bpf[name]
            empty = table.Leaf()
            for index in range(table.max_entries):
                table[table.Key(index)] = empty
        self._missed = self._misses()

    def _misses(self) -> dict[str, int]:
        """How often the kernel left each program out because it was running on that CPU
        already, summed for each probe that the program serves."""
        from bcc import lib

        total: dict[str, int] = {}
        for attach in self._plan.attaches:
            function = self._bpf.funcs.get(attach.program.encode())
            if function is None:
                continue
            info = ctypes.create_string_buffer(_PROG_INFO_SIZE)
            size = ctypes.c_uint32(_PROG_INFO_SIZE)
            if lib.bpf_obj_get_info(function.fd, info, ctypes.byref(size)) == 0:
                (missed,) = struct.unpack_from("<Q", info, _RECURSION_MISSES)
                for probe in attach.probes:
                    total[probe] = total.get(probe, 0) + missed
        return total

    def snapshot(self) -> list[Histogram]:
        """What was counted since the start or the last ``clear``.

        A key with no value is left out; a probe that is attached and counted nothing is one
        histogram without key and buckets. Missing probes and keys have one each with the
        reason.
        """
        result: list[Histogram] = []
        counts, lost = self._read()
        for name, probe in PROBES.items():
            whole = self._missing.get((name, ""))
            if whole is not None:
                result.append(Histogram(self._node, name, "", probe.unit, missing=whole))
                continue
            keys = [slot for slot in self._plan.slots if slot.probe == name]
            seen = [
                Histogram(
                    self._node,
                    name,
                    slot.key,
                    probe.unit,
                    to_buckets(counts[slot.index]),
                    lost=lost.get(name, 0),
                )
                for slot in keys
                if any(counts[slot.index])
            ]
            if keys and not seen:
                seen = [Histogram(self._node, name, "", probe.unit, lost=lost.get(name, 0))]
            result += seen
            result += [
                Histogram(self._node, name, key, probe.unit, missing=reason)
                for (missing_probe, key), reason in self._missing.items()
                if missing_probe == name
            ]
        return result

    def _read(self) -> tuple[list[list[int]], dict[str, int]]:
        """Counts by slot and bucket, and losses by probe, summed over the CPUs."""
        if self._bpf is None:
            return [], {}
        rows, losses = self._bpf["rows"], self._bpf["lost"]
        counts = []
        for slot in self._plan.slots:
            per_cpu = [tuple(row.count) for row in rows[rows.Key(slot.index)]]
            counts.append([sum(row[i] for row in per_cpu) for i in range(BUCKETS)])
        missed = self._misses()
        lost = {}
        for name in {slot.probe for slot in self._plan.slots}:
            value = sum(losses[losses.Key(probe_number(name))])
            lost[name] = int(value) + missed.get(name, 0) - self._missed.get(name, 0)
        return counts, lost


def describe(attach: Attach) -> str:
    """One attach point for people: ``fentry rdma_rxe:rxe_rcv``."""
    if attach.kind == "uretprobe":
        return f"uretprobe {attach.target}+{attach.address:#x}"
    if attach.kind == "tracepoint":
        return f"tracepoint {attach.target}"
    return f"{attach.kind} {MODULE}:{attach.target}"
