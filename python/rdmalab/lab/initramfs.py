# SPDX-License-Identifier: Apache-2.0
"""The initial RAM file system of fast guests: busybox, a few modules, and a node's identity."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from rdmalab.errors import HostError
from rdmalab.lab.identity import Identity
from rdmalab.lab.kernel import Kernel
from rdmalab.lab.sysroot import Sysroot

#: What a fast guest needs before its root is there, in order; built-in ones are passed over.
_MODULES = (
    "virtio_pci", "virtio_blk", "erofs", "overlay", "virtio_net", "virtio_rng", "pvpanic_pci",
)  # fmt: skip
#: Needed where the kernel has it: up to 6.12 erofs asks the crypto API for CRC32C by name
#: (softdep of libcrc32c), later kernels compute it in a library.
_WHERE_THERE = ("crc32c_generic",)
_DIRECTORY, _FILE, _LINK = 0o040000, 0o100000, 0o120000


class Archive:
    """A cpio archive in the "newc" format (Documentation/driver-api/early-userspace/
    buffer-format.rst). All files are root's; times are zero, so equal input gives equal bytes."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._inode = 0
        self._directories: set[str] = set()

    def _entry(self, name: str, mode: int, data: bytes) -> None:
        self._inode += 1
        fields = [self._inode, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0]
        head = "070701" + "".join(f"{value:08X}" for value in fields) + name + "\0"
        self._parts.append(head.encode().ljust(-(-len(head) // 4) * 4, b"\0"))
        self._parts.append(data.ljust(-(-len(data) // 4) * 4, b"\0"))

    def directory(self, name: str) -> None:
        """Add ``name`` and the directories above it."""
        parts = name.strip("/").split("/")
        for depth in range(1, len(parts) + 1):
            path = "/".join(parts[:depth])
            if path not in self._directories:
                self._directories.add(path)
                self._entry(path, _DIRECTORY | 0o755, b"")

    def file(self, name: str, data: bytes, mode: int = 0o644) -> None:
        name = name.strip("/")
        if "/" in name:
            self.directory(name.rsplit("/", 1)[0])
        self._entry(name, _FILE | mode, data)

    def link(self, name: str, target: str) -> None:
        self._entry(name.strip("/"), _LINK | 0o777, target.encode())

    def bytes(self) -> bytes:
        tail = Archive()
        tail._entry("TRAILER!!!", 0, b"")
        whole = b"".join(self._parts + tail._parts)
        return whole.ljust(-(-len(whole) // 512) * 512, b"\0")


def load_order(modules: Path, names: Iterable[str], where_there: Iterable[str] = ()) -> list[str]:
    """Module files for ``names`` in the order they can be loaded, from modules.dep; what
    modules.builtin names is left out. Raises HostError for one that is neither. Those of
    ``where_there`` that the kernel has come first."""
    dependencies: dict[str, list[str]] = {}
    by_name: dict[str, str] = {}
    for line in (modules / "modules.dep").read_text().splitlines():
        file, _, needs = line.partition(":")
        dependencies[file] = needs.split()
        by_name[Path(file).name.split(".")[0].replace("-", "_")] = file
    builtin = {
        Path(line).name.split(".")[0].replace("-", "_")
        for line in (modules / "modules.builtin").read_text().split()
    }
    order: list[str] = []

    def add(file: str) -> None:
        for need in reversed(dependencies[file]):
            if need not in order:
                add(need)
        if file not in order:
            order.append(file)

    for name in where_there:
        if name in by_name:
            add(by_name[name])
    for name in names:
        if name in by_name:
            add(by_name[name])
        elif name not in builtin:
            raise HostError(f"kernel {modules.name} has no module {name}")
    return order


def base(sysroot: Sysroot, kernel: Kernel, guest: Path) -> bytes:
    """The part that all fast guests of a kernel share; ``guest`` is vm/guest."""
    archive = Archive()
    for name in ("bin", "dev", "proc", "sys", "mnt", "modules"):
        archive.directory(name)
    archive.file("bin/busybox", (sysroot.root / "usr/bin/busybox").read_bytes(), 0o755)
    for applet in ("sh", "mount", "mkdir", "insmod", "cat", "cp", "switch_root"):
        archive.link(f"bin/{applet}", "busybox")
    archive.file("init", (guest / "init").read_bytes(), 0o755)
    order = load_order(kernel.modules, _MODULES, _WHERE_THERE)
    for file in order:
        archive.file(f"modules/{Path(file).name}", (kernel.modules / file).read_bytes())
    listing = "".join(f"{Path(file).name}\n" for file in order)
    archive.file("modules/order", listing.encode())
    archive.file("rdmalab/release", f"{kernel.release}\n".encode())
    archive.file("rdmalab/setup", (guest / "setup").read_bytes(), 0o755)
    archive.file("rdmalab/ssh/sshd_config", (guest / "sshd_config").read_bytes())
    return archive.bytes()


def node_part(identity: Identity, modules: Mapping[str, Path]) -> bytes:
    """The part that is one node's own; the kernel unpacks archives one after the other.
    ``modules`` are our own, by file name."""
    archive = Archive()
    archive.file("rdmalab/hostname", f"{identity.hostname}\n".encode())
    lines = [f"{n.mac} {n.name} {n.mtu} {' '.join(n.addresses)}\n" for n in identity.nics]
    archive.file("rdmalab/net", "".join(lines).encode())
    archive.file("rdmalab/ssh/host_key", identity.host_key.encode(), 0o600)
    archive.file(
        "rdmalab/ssh/authorized_keys",
        "".join(f"{key}\n" for key in identity.authorized_keys).encode(),
        0o600,
    )
    archive.directory("rdmalab/modules")
    for name, path in sorted(modules.items()):
        archive.file(f"rdmalab/modules/{name}", path.read_bytes())
    return archive.bytes()


def write(shared: Path, identity: Identity, modules: Mapping[str, Path], target: Path) -> None:
    """``target`` = the shared part and the node's own."""
    with target.open("wb") as out:
        with shared.open("rb") as part:
            shutil.copyfileobj(part, out)
        out.write(node_part(identity, modules))
