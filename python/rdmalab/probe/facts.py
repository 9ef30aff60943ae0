# SPDX-License-Identifier: Apache-2.0
"""What the node that runs this offers to probes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rdmalab.probe import btf, provider, symbols
from rdmalab.probe.catalogue import MODULE, PROBES

_BTF = Path("/sys/kernel/btf")
_KPROBE = Path("/sys/bus/event_source/devices/kprobe/type")
_UPROBE = Path("/sys/bus/event_source/devices/uprobe/type")


@dataclass(frozen=True)
class Facts:
    """``types`` is None where the kernel has no type information of the driver, which
    ``types_missing`` then explains. ``kprobes`` and ``uprobes``: whether the kernel makes
    them as perf events, which end with the process that opened them; bcc would otherwise
    write them into tracefs, where they outlive a killed process.
    """

    symbols: symbols.ModuleSymbols
    types: btf.ModuleTypes | None = None
    types_missing: str = ""
    polls: tuple[provider.PollFunction, ...] = ()
    polls_missing: str = ""
    kprobes: bool = True
    uprobes: bool = True
    tracepoints: frozenset[str] = field(default_factory=frozenset)


def _structures() -> frozenset[str]:
    return frozenset(
        member.split(".")[0]
        for probe in PROBES.values()
        for _, path in probe.offsets
        for member in path
    )


def gather() -> Facts:
    """Reads /proc/kallsyms, /sys/kernel/btf and the provider libraries in use (about a
    second on an emulated CPU)."""
    types: btf.ModuleTypes | None = None
    types_missing = ""
    try:
        types = btf.parse_module(
            (_BTF / MODULE).read_bytes(), (_BTF / "vmlinux").read_bytes(), _structures()
        )
    except FileNotFoundError as error:
        types_missing = f"the kernel has no {error.filename}"
    except btf.BtfError as error:
        types_missing = str(error)
    polls, polls_missing = provider.poll_functions()
    wanted = {name for probe in PROBES.values() for name, _ in probe.tracepoints}
    kallsyms = Path("/proc/kallsyms").read_bytes()
    return Facts(
        symbols=symbols.parse(kallsyms, MODULE),
        types=types,
        types_missing=types_missing,
        polls=polls,
        polls_missing=polls_missing,
        kprobes=_KPROBE.exists(),
        uprobes=_UPROBE.exists(),
        tracepoints=frozenset(
            name for name in wanted if f" __tracepoint_{name}\n".encode() in kallsyms
        ),
    )
