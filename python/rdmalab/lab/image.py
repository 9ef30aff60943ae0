# SPDX-License-Identifier: Apache-2.0
"""The read-only images that fast guests share: the root, and one of modules for each kernel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rdmalab.lab.cachelock import drop_unused, making
from rdmalab.lab.kernel import Kernel
from rdmalab.lab.progress import Progress
from rdmalab.lab.sysroot import Sysroot

#: What only the host or a build needs, as POSIX extended regular expressions on paths
#: without their leading slash.
_NOT_IN_GUESTS = (
    r"^(proc|sys|dev|run|tmp|mnt|boot)/.+",
    r"^var/(cache|log|lib/(apt|dpkg/info))/.+",
    r"^usr/share/(qemu|seabios|ipxe|grub|i18n)/.+",
    r"^usr/lib/(grub|gcc|python3[^/]*/test)/.+",
    r"^usr/lib/x86_64-linux-gnu/(qemu/.+|.+\.a$)",
    r"^usr/bin/(qemu-.+|x86_64-linux-gnu-(lto|gcov|ld|gold|dwp|as|gprof).*)",
    r"^usr/libexec/gcc/.+",
    r"^\.rdmalab",
)


def _make(sysroot: Sysroot, source: Path | None, target: Path, exclude: Sequence[str]) -> None:
    partial = target.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    binds = {target.parent: "/mnt/images"}
    if source is not None:
        binds[source] = "/mnt/source"
    sysroot.run(
        ["mkfs.erofs", "--quiet", "-Enoinline_data", *(f"--exclude-regex={rx}" for rx in exclude),
         f"/mnt/images/{partial.name}", "/mnt/source" if source else "/"],
        binds=binds,
    )  # fmt: skip
    partial.rename(target)


def root_image(sysroot: Sysroot, progress: Progress) -> Path:
    """The guests' root as erofs, made where the sysroot is newer. Older ones are deleted
    unless a lab is up."""
    folder = sysroot.paths.images
    target = folder / f"root-{sysroot.key}.erofs"
    if target.exists():
        return target
    with making(folder / "root"):
        if not target.exists():
            with progress.step("guest root image"):
                _make(sysroot, None, target, _NOT_IN_GUESTS)
            drop_unused(sysroot.paths.labs, folder, "root-*.erofs", target)
    return target


def modules_image(sysroot: Sysroot, kernel: Kernel, progress: Progress) -> Path:
    """The modules of ``kernel`` as erofs, to be mounted at /usr/lib/modules/RELEASE."""
    folder = sysroot.paths.images
    target = folder / f"modules-{kernel.release}-{kernel.version.replace('/', '_')}.erofs"
    if target.exists():
        return target
    with making(target):
        if not target.exists():
            with progress.step(f"modules image of {kernel.release}"):
                _make(sysroot, kernel.modules, target, (r"^(vmlinuz|System\.map)$",))
    return target
