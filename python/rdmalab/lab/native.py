# SPDX-License-Identifier: Apache-2.0
"""C that runs on nodes beside our Python: each FILE.c becomes FILE.so, built in the sysroot."""

from __future__ import annotations

import hashlib
from pathlib import Path

from rdmalab.lab.cachelock import making
from rdmalab.lab.paths import Paths
from rdmalab.lab.progress import Progress
from rdmalab.lab.sysroot import Sysroot

FLAGS = ("-O2", "-g", "-std=gnu17", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
LIBRARIES = ("-libverbs", "-lrdmacm", "-lpthread")


def sources(paths: Paths) -> list[Path]:
    return sorted((paths.repo / "python/rdmalab/measure/node/native").glob("*.[ch]"))


def ensure(sysroot: Sysroot, progress: Progress) -> list[Path]:
    """Build what is older than its sources or the sysroot; the shared objects, sorted."""
    files = sources(sysroot.paths)
    digest = hashlib.sha256(f"{sysroot.key} {FLAGS} {LIBRARIES}".encode())
    for file in files:
        digest.update(file.name.encode() + file.read_bytes())
    folder = sysroot.paths.native / digest.hexdigest()[:16]
    names = [file.stem for file in files if file.suffix == ".c"]
    wanted = [folder / f"{name}.so" for name in names]
    if all(path.exists() for path in wanted):
        return wanted
    with making(folder):
        if not all(path.exists() for path in wanted):
            with progress.step("timed loops"):
                _build(sysroot, files[0].parent, names, folder)
    return wanted


def _build(sysroot: Sysroot, source: Path, names: list[str], folder: Path) -> None:
    partial = folder.with_suffix(".partial")
    partial.mkdir(parents=True, exist_ok=True)
    for name in names:
        sysroot.run(
            ["gcc", *FLAGS, f"/mnt/source/{name}.c", "-o", f"/mnt/out/{name}.so", *LIBRARIES],
            binds={source: "/mnt/source", partial: "/mnt/out"},
        )
    if folder.exists():
        for path in partial.iterdir():
            path.replace(folder / path.name)
        partial.rmdir()
    else:
        partial.rename(folder)
