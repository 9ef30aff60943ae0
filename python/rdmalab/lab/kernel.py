# SPDX-License-Identifier: Apache-2.0
"""Kernels: the distribution's packages of a tier, unpacked, with what QEMU and guests need."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from rdmalab.errors import HostError, UsageError
from rdmalab.lab.cachelock import making
from rdmalab.lab.progress import Progress
from rdmalab.lab.sysroot import Sysroot

#: zstd's frame magic (RFC 8878, 3.1.1); Debian's kernels are CONFIG_KERNEL_ZSTD
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True)
class Kernel:
    """One kernel in the cache. ``folder`` is as the packages unpack, modules uncompressed."""

    tier: str
    release: str
    version: str
    folder: Path

    @property
    def vmlinux(self) -> Path:
        """The uncompressed ELF, which QEMU boots through PVH with nothing to unpack."""
        return self.folder / "vmlinux"

    @property
    def modules(self) -> Path:
        return self.folder / "usr/lib/modules" / self.release

    @property
    def config(self) -> Path:
        for path in (self.modules / "config", self.folder / "boot" / f"config-{self.release}"):
            if path.exists():
                return path
        raise HostError(f"kernel {self.release} has no config", seen=str(self.folder))

    @property
    def debs(self) -> Path:
        """The packages themselves, for a guest that installs its kernel."""
        return self.folder / "debs"


def payload(image: bytes) -> bytes:
    """The zstd payload of a bzImage (Documentation/arch/x86/boot.rst, fields setup_sects,
    payload_offset and payload_length of the header at 0x1f1). Raises ValueError."""
    if image[0x202:0x206] != b"HdrS":
        raise ValueError("no bzImage")
    setup = (image[0x1F1] or 4) + 1
    offset = int.from_bytes(image[0x248:0x24C], "little") + setup * 512
    length = int.from_bytes(image[0x24C:0x250], "little")
    data = image[offset : offset + length]
    if not data.startswith(_ZSTD_MAGIC):
        raise ValueError("the kernel is not compressed with zstd")
    return data[:-4]  # the last four bytes are the unpacked size


def tiers(sysroot: Sysroot) -> list[str]:
    return list(sysroot.packages.kernels)


def check_tier(sysroot: Sysroot, tier: str) -> None:
    """Raises UsageError for a tier that vm/packages.toml does not have. Nothing needs to be
    built for it."""
    known = tiers(sysroot)
    if tier not in known:
        raise UsageError(
            f"no kernel is called {tier!r}", todo=f"choose one of {', '.join(sorted(known))}"
        )


def find(sysroot: Sysroot, tier: str) -> Kernel:
    """The kernel of ``tier`` as the lock has it, unpacked or not. Raises UsageError for an
    unknown tier."""
    check_tier(sysroot, tier)
    kernels = sysroot.lock().kernels
    if tier not in kernels:
        raise HostError(f"the sysroot was built without kernel {tier}", todo="run `make setup`")
    locked = kernels[tier]
    folder = sysroot.paths.kernels / locked.release
    return Kernel(tier, locked.release, locked.version, folder)


def ensure(sysroot: Sysroot, tier: str, progress: Progress) -> Kernel:
    """Fetch and unpack the kernel of ``tier`` where it is not there yet. A second process
    waits for the first."""
    kernel = find(sysroot, tier)
    if kernel.vmlinux.exists():
        return kernel
    with making(kernel.folder):
        if kernel.vmlinux.exists():
            return kernel
        partial = kernel.folder.with_name(kernel.folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "debs").mkdir(parents=True)
        with progress.step(f"kernel {tier}: {kernel.release}"):
            _fetch(sysroot, kernel, partial)
            _unpack(sysroot, kernel, partial)
        shutil.rmtree(kernel.folder, ignore_errors=True)
        partial.rename(kernel.folder)
    return kernel


def _fetch(sysroot: Sysroot, kernel: Kernel, partial: Path) -> None:
    """The image package and those it depends on: from 7.x on linux-image is empty and
    linux-binary, linux-modules and linux-base hold the kernel."""
    image = f"linux-image-{kernel.release}"
    depends = sysroot.run(["apt-cache", "depends", "--no-suggests", image]).stdout
    names = [image]
    for line in depends.splitlines():
        name = line.split("Depends:")[-1].strip()
        if "Depends:" in line and name.endswith(kernel.release):
            names.append(name)
    sysroot.run(
        ["apt-get", "download", "-q", "-o", "APT::Sandbox::User=root", *names],
        binds={partial / "debs": "/mnt/debs"},
        cwd="/mnt/debs",
    )


def _unpack(sysroot: Sysroot, kernel: Kernel, partial: Path) -> None:
    for deb in sorted((partial / "debs").glob("*.deb")):
        sysroot.run(
            ["dpkg-deb", "-x", f"/mnt/k/debs/{deb.name}", "/mnt/k/tree"],
            binds={partial: "/mnt/k"},
        )
    tree = partial / "tree"
    for name in ("usr/lib/modules", "lib/modules"):
        source = tree / name / kernel.release
        if source.exists():
            target = partial / "usr/lib/modules" / kernel.release
            target.parent.mkdir(parents=True)
            source.rename(target)
            break
    else:
        raise HostError(f"the packages of kernel {kernel.release} hold no modules")
    if (tree / "boot").exists():
        (tree / "boot").rename(partial / "boot")
    shutil.rmtree(tree)
    modules = partial / "usr/lib/modules" / kernel.release
    (partial / "lib").symlink_to("usr/lib")  # where depmod looks
    # Guests load a dozen modules each boot, and xz costs an emulated CPU dearly.
    sysroot.run(
        ["sh", "-c", "find . -name '*.ko.xz' -print0 | xargs -0 -P2 -n64 xz -d && "
         "depmod -b /mnt/k $1", "unpack",
         kernel.release],
        binds={partial: "/mnt/k"},
        cwd=f"/mnt/k/usr/lib/modules/{kernel.release}",
    )  # fmt: skip
    # The headers packages bring these links, and bcc looks at both.
    for name in ("build", "source"):
        link = sysroot.root / "usr/lib/modules" / kernel.release / name
        if link.is_symlink():
            (modules / name).unlink(missing_ok=True)
            (modules / name).symlink_to(link.readlink())
    images = [modules / "vmlinuz", partial / "boot" / f"vmlinuz-{kernel.release}"]
    found = [path for path in images if path.exists()]
    if not found:
        raise HostError(f"the packages of kernel {kernel.release} hold no vmlinuz")
    try:
        data = payload(found[0].read_bytes())
    except ValueError as error:
        raise HostError(f"{found[0]} cannot be unpacked", seen=str(error)) from error
    unpacked = subprocess.run(
        [*sysroot.host_command("zstd"), "-dc"], input=data, capture_output=True, check=False
    )
    if unpacked.returncode:
        raise HostError(f"{found[0]} cannot be unpacked", seen=unpacked.stderr.decode().strip())
    (partial / "vmlinux").write_bytes(unpacked.stdout)
