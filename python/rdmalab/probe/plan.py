# SPDX-License-Identifier: Apache-2.0
"""From the probes that are wanted and what a node offers: one program text, what to attach
where, which histogram lies in which slot, and what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rdmalab.probe.buckets import BUCKETS
from rdmalab.probe.catalogue import (
    IDLE_STAGES,
    MODULE,
    OPCODES,
    PROBES,
    ROLES,
    TASK_FUNCTIONS,
    WORK_FUNCTION,
    Hook,
    Probe,
    Role,
)
from rdmalab.probe.facts import Facts

_PROBE_NUMBERS = {name: number for number, name in enumerate(PROBES)}


@dataclass(frozen=True)
class Slot:
    """A histogram in the kernel: row ``index`` of the map ``rows``."""

    index: int
    probe: str
    key: str


@dataclass(frozen=True)
class Attach:
    """``kind``: fentry, fexit, kprobe, kretprobe, tracepoint, uretprobe. ``target``: function,
    tracepoint or path of a library; ``address`` within the library. ``probes`` are those that
    the program serves."""

    kind: str
    target: str
    program: str
    probes: tuple[str, ...]
    address: int = 0


@dataclass(frozen=True)
class Missing:
    """``key``: the part of the probe that is missing; empty for all of it."""

    probe: str
    key: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """``text`` is empty where nothing can be attached."""

    text: str
    slots: tuple[Slot, ...]
    attaches: tuple[Attach, ...]
    missing: tuple[Missing, ...]


@dataclass(frozen=True)
class _Call:
    """A handler called from the program on a function: C expression and probe, and whether
    the handler uses what is kept of the thread."""

    expression: str
    probe: str
    thread: bool


class _Builder:
    def __init__(self, facts: Facts, by_name: bool) -> None:
        self.facts = facts
        self.by_name = by_name
        self.slots: list[Slot] = []
        self.missing: list[Missing] = []
        self.attaches: list[Attach] = []
        self.constants: dict[str, int] = {}
        self.sources: list[str] = []
        self.extra: list[str] = []
        self.calls: dict[tuple[str, str], list[_Call]] = {}  # (role, at)

    def slot(self, probe: str, key: str) -> int:
        self.slots.append(Slot(len(self.slots), probe, key))
        return len(self.slots) - 1

    def miss(self, probe: Probe, reason: str, key: str = "") -> None:
        self.missing.append(Missing(probe.name, key, reason))

    def hooking(self, role: str) -> tuple[str, str]:
        """The function that plays ``role``, or why it cannot be hooked."""
        found = self.facts.symbols.find(ROLES[role].names)
        if found.missing:
            return "", found.missing
        if not self.uses_btf(found.name) and not self.facts.kprobes:
            return "", f"no type information of {found.name}, and perf has no kprobes"
        return found.name, ""

    def uses_btf(self, function: str) -> bool:
        types = self.facts.types
        return not self.by_name and types is not None and function in types.functions

    def offsets(self, probe: Probe) -> str:
        """Takes up the constants of ``probe``; the reason where one is not to be had."""
        if probe.offsets and self.facts.types is None:
            return self.facts.types_missing or f"no type information of {MODULE}"
        values: dict[str, int] = {}
        for constant, path in probe.offsets:
            assert self.facts.types is not None
            for member in path:
                try:
                    value = self.facts.types.offset(member)
                except KeyError:
                    return f"{MODULE} has no {member}"
                values[constant] = values.get(constant, 0) + value
        self.constants.update(values)
        return ""

    def add(self, probe: Probe) -> None:
        if not self.facts.symbols.functions and not probe.uretprobe:
            self.miss(probe, f"module {MODULE} is not loaded")
            return
        reason = self.offsets(probe)
        if reason:
            self.miss(probe, reason)
        elif probe.independent:
            self.add_stages(probe)
        elif probe.hooks:
            self.add_hooks(probe)
        elif probe.tracepoints:
            self.add_tracepoints(probe)
        else:
            self.add_polls(probe)
        if any(s.probe == probe.name for s in self.slots):
            self.sources.append(probe.source)

    def add_stages(self, probe: Probe) -> None:
        numbers: dict[str, tuple[int, int]] = {}
        for hook in probe.hooks:
            if hook.role not in numbers:
                function, reason = self.hooking(hook.role)
                if reason:
                    if hook.at == "enter":
                        self.miss(probe, reason, hook.role)
                    continue
                busy = self.slot(probe.name, function)
                idle = busy
                if hook.role in IDLE_STAGES:
                    idle = self.slot(probe.name, f"{function} idle")
                numbers[hook.role] = busy, idle
            arguments = ", ".join(str(n) for n in numbers[hook.role][: hook.slots])
            self.call(hook, f"{hook.handler}(&call, {arguments})", probe)

    def add_hooks(self, probe: Probe) -> None:
        for hook in probe.hooks:
            function, reason = self.hooking(hook.role)
            if not reason and probe.offsets and not self.uses_btf(function):
                reason = f"{function} can only be attached by name, without typed arguments"
            if reason:
                self.miss(probe, reason)
                return
        first = len(self.slots)
        for opcode in OPCODES:
            self.slot(probe.name, opcode)
        for hook in probe.hooks:
            arguments = f"&call, {first}" if hook.slots else "&call"
            self.call(hook, f"{hook.handler}({arguments})", probe)

    def call(self, hook: Hook, expression: str, probe: Probe) -> None:
        calls = self.calls.setdefault((hook.role, hook.at), [])
        calls.append(_Call(expression, probe.name, hook.thread))

    def add_tracepoints(self, probe: Probe) -> None:
        for tracepoint, _ in probe.tracepoints:
            if tracepoint not in self.facts.tracepoints:
                self.miss(probe, f"the kernel has no tracepoint {tracepoint}")
                return
        work = self.facts.symbols.find(WORK_FUNCTION)
        if work.missing or not work.address:
            self.miss(probe, work.missing or "the kernel hides the addresses of its functions")
            return
        self.constants["WORK_FUNCTION"] = work.address
        lines = ["static __always_inline u32 work_delay_slot(u64 function)", "{"]
        for name in TASK_FUNCTIONS:
            found = self.facts.symbols.find((name,))
            if not found.missing:
                slot = self.slot(probe.name, name)
                lines += [f"\tif (function == {found.address:#x})", f"\t\treturn {slot};"]
        lines += [f"\treturn {self.slot(probe.name, 'other')};", "}"]
        self.extra.append("\n".join(lines))
        for tracepoint, program in probe.tracepoints:
            self.attaches.append(Attach("tracepoint", tracepoint, program, (probe.name,)))

    def add_polls(self, probe: Probe) -> None:
        if not self.facts.polls:
            self.miss(probe, self.facts.polls_missing)
            return
        if not self.facts.uprobes:
            self.miss(probe, "perf has no uprobes")
            return
        for number, poll in enumerate(self.facts.polls):
            self.attaches.append(
                Attach(
                    "uretprobe", poll.path, f"poll_{number}", (probe.name,), address=poll.address
                )
            )
            self.slot(probe.name, poll.library)

    def programs(self) -> list[str]:
        """The programs on functions and on returns of the poll functions."""
        texts = []
        for (role_name, at), calls in self.calls.items():
            role = ROLES[role_name]
            function = self.hooking(role_name)[0]
            thread = any(call.thread for call in calls)
            kind, program, head = self.dispatch(role, function, at, thread)
            body = "".join(f"\t{call.expression};\n" for call in calls)
            texts.append(f"{head}{body}\treturn 0;\n}}\n")
            probes = tuple(dict.fromkeys(call.probe for call in calls))
            self.attaches.append(Attach(kind, function, program, probes))
        for attach in self.attaches:
            if attach.kind == "uretprobe":
                handler = PROBES[attach.probes[0]].uretprobe
                number = int(attach.program.removeprefix("poll_"))
                slot = [s for s in self.slots if s.probe == attach.probes[0]][number].index
                texts.append(
                    f"int {attach.program}(struct pt_regs *ctx)\n"
                    f"{{\n\t{handler}(ctx, {slot});\n\treturn 0;\n}}\n"
                )
        return texts

    def dispatch(self, role: Role, function: str, at: str, thread: bool) -> tuple[str, str, str]:
        """Kind of attachment, name of the program, and its text up to the handlers."""
        common = ".now = bpf_ktime_get_ns()" + (", .thread = this_thread()" if thread else "")
        if self.uses_btf(function):
            # bcc takes from this name what the program is to be attached to
            prefix = "kfunc" if at == "enter" else "kretfunc"
            program, context = f"{prefix}__{MODULE}__{function}", "unsigned long long *ctx"
            fields = [f".arg{n + 1} = ctx[{n}]" for n in range(min(role.arguments, 2))]
            if at == "leave" and role.returns:
                fields.append(f".ret = ctx[{role.arguments}]")
            kind = "fentry" if at == "enter" else "fexit"
        else:
            program, context = f"{at}_{function}", "struct pt_regs *ctx"
            if at == "enter":
                fields = [f".arg{n + 1} = PT_REGS_PARM{n + 1}(ctx)" for n in range(2)]
            else:
                fields = [".ret = PT_REGS_RC(ctx)"] if role.returns else []
            kind = "kprobe" if at == "enter" else "kretprobe"
        head = (
            f"int {program}({context})\n{{\n"
            f"\tstruct call call = {{ {', '.join([*fields, common])} }};\n\n"
        )
        return kind, program, head

    def plan(self) -> Plan:
        programs = self.programs()
        if not programs and not self.attaches:
            return Plan("", (), (), tuple(self.missing))
        constants = {"BUCKETS": BUCKETS, "SLOTS": len(self.slots), "PROBES": len(PROBES)}
        constants |= {f"PROBE_{n.upper()}": number for n, number in _PROBE_NUMBERS.items()}
        constants |= self.constants
        texts = [
            f"#define {name} {value}{'ULL' if value >> 31 else ''}\n"
            for name, value in constants.items()
        ]
        if any(a.kind in ("kprobe", "kretprobe", "uretprobe") for a in self.attaches):
            texts.insert(0, "#include <uapi/linux/ptrace.h>\n")
        here = Path(__file__).parent
        texts.append((here / "common.bcc.h").read_text())
        texts += self.extra
        texts += [(here / source).read_text() for source in self.sources]
        texts += programs
        return Plan("\n".join(texts), tuple(self.slots), tuple(self.attaches), tuple(self.missing))


def make(probes: Sequence[Probe], facts: Facts, *, by_name: bool = False) -> Plan:
    """``by_name``: attach by function name (kprobes) even where type information would allow
    the cheaper fentry and fexit."""
    builder = _Builder(facts, by_name)
    for probe in probes:
        builder.add(probe)
    return builder.plan()


def probe_number(name: str) -> int:
    """The probe's index in the map ``lost``."""
    return _PROBE_NUMBERS[name]
