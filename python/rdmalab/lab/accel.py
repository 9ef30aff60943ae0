# SPDX-License-Identifier: Apache-2.0
"""Which accelerator QEMU uses, and why.

/dev/kvm may exist, open and even create a VM, and a guest still hang for ever where
virtualisation is not passed through. So KVM is taken only where the CPU shows vmx or svm
*and* a tiny guest has run to its end within a bound.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rdmalab.errors import UsageError

ACCELERATORS = ("auto", "tcg", "kvm")

#: A boot sector that writes 0 to isa-debug-exit (QEMU then ends with status 1):
#: mov dx,0x501; xor ax,ax; out dx,al; hlt; jmp $-1
_PROBE_CODE = bytes.fromhex("ba010531c0eef4ebfd")
_PROBE_SECONDS = 5.0


@dataclass(frozen=True)
class Accelerator:
    name: str  # "tcg" or "kvm"
    reason: str


def hardware_virtualisation(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """True where the CPU's flags have vmx (Intel) or svm (AMD)."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return False
    for line in text.splitlines():
        if line.startswith("flags"):
            flags = line.split()
            return "vmx" in flags or "svm" in flags
    return False


def _kvm_boots(qemu: Sequence[str], env: dict[str, str]) -> tuple[bool, str]:
    sector = _PROBE_CODE.ljust(510, b"\0") + b"\x55\xaa"
    with tempfile.NamedTemporaryFile(suffix=".img") as image:
        image.write(sector)
        image.flush()
        argv = [
            *qemu, "-accel", "kvm", "-machine", "q35", "-m", "16", "-nodefaults",
            "-display", "none", "-no-reboot",
            "-device", "isa-debug-exit,iobase=0x501,iosize=2",
            "-drive", f"file={image.name},format=raw,if=ide,readonly=on",
        ]  # fmt: skip
        try:
            done = subprocess.run(
                argv, env=env, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return False, f"a probe guest hung under KVM for {_PROBE_SECONDS:.0f} s"
        except OSError as error:
            return False, f"the probe could not start: {error}"
    if done.returncode == 1:  # (0 << 1) | 1, as isa-debug-exit defines it
        return True, "vmx or svm, and a probe guest ran under KVM"
    last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    return False, f"a probe guest failed under KVM: {last}"


def check(asked: str) -> None:
    """Raises UsageError where ``asked`` is none of auto, tcg, kvm."""
    if asked not in ACCELERATORS:
        raise UsageError(
            f"no accelerator is called {asked!r}", todo=f"choose one of {', '.join(ACCELERATORS)}"
        )


def choose(asked: str, qemu: Sequence[str], env: dict[str, str]) -> Accelerator:
    """The accelerator for ``asked`` in auto, tcg, kvm. A forced one is taken as it is.
    Raises UsageError for another name."""
    check(asked)
    if asked != "auto":
        return Accelerator(asked, "forced by --accel")
    if not hardware_virtualisation():
        return Accelerator("tcg", "the CPU shows neither vmx nor svm")
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return Accelerator("tcg", "/dev/kvm cannot be opened")
    boots, reason = _kvm_boots(qemu, env)
    return Accelerator("kvm" if boots else "tcg", reason)
