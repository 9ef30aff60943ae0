# SPDX-License-Identifier: Apache-2.0
"""The TCG plugin that counts guest instructions, built in the sysroot.

Its socket's protocol is described in instructions.c; ``rdmalab.measure.instructions`` speaks it.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

from rdmalab.lab.progress import Progress
from rdmalab.lab.sysroot import Sysroot

_SOURCES = ("instructions.c", "qemu_plugin.h")
_FLAGS = (
    "-O2", "-g", "-std=gnu17", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden",
    "-shared", "-fPIC", "-pthread",
)  # fmt: skip


def ensure(sysroot: Sysroot, progress: Progress) -> Path:
    """The plugin's shared object, built where its sources or the sysroot are newer.

    It is loaded by the QEMU of the same sysroot, whose libraries it uses.
    """
    here = Path(__file__).parent
    digest = hashlib.sha256(f"{sysroot.key} {_FLAGS}".encode())
    for name in _SOURCES:
        digest.update((here / name).read_bytes())
    target = sysroot.paths.cache / "plugin" / f"instructions-{digest.hexdigest()[:16]}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        progress.step("instruction counter"),
        tempfile.TemporaryDirectory(dir=target.parent) as folder,
    ):
        sysroot.run(
            ["gcc", *_FLAGS, "/mnt/source/instructions.c", "-o", "/mnt/out/instructions.so"],
            binds={here: "/mnt/source", Path(folder): "/mnt/out"},
        )
        (Path(folder) / "instructions.so").rename(target)
    return target
