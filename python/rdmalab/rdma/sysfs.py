# SPDX-License-Identifier: Apache-2.0
"""What the kernel says of RDMA devices in ``/sys/class/infiniband``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from rdmalab.rdma.model import Gid

ROOT = Path("/sys")

_NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"


def device_names(root: Path = ROOT) -> tuple[str, ...]:
    """Every RDMA device's name, sorted; empty when ``ib_core`` is not there."""
    folder = root / "class/infiniband"
    return tuple(sorted(p.name for p in folder.iterdir())) if folder.is_dir() else ()


@dataclass(frozen=True)
class DeviceFiles:
    """The files of one device."""

    name: str
    root: Path = ROOT

    @property
    def folder(self) -> Path:
        return self.root / "class/infiniband" / self.name

    def text(self, name: str) -> str | None:
        """A file's one line, or ``None`` when it is missing, unreadable or empty."""
        return _text(self.folder / name)

    @property
    def node_type(self) -> str:
        """``"CA"`` from ``"1: CA"``."""
        return (self.text("node_type") or "unknown").partition(": ")[2] or "unknown"

    @property
    def parent_driver(self) -> str | None:
        """The driver of the PCI or bus device beneath, ``None`` for a software device."""
        link = self.folder / "device/driver"
        return link.resolve().name if link.is_symlink() else None

    def ports(self) -> tuple[int, ...]:
        folder = self.folder / "ports"
        return tuple(sorted(int(p.name) for p in folder.iterdir())) if folder.is_dir() else ()

    def gids(self, port: int) -> tuple[Gid, ...]:
        """The port's GID table without its empty entries.

        Reading the type of an empty entry fails with EINVAL, and an entry may be removed
        between two reads: both count as empty.
        """
        found: list[Gid] = []
        attributes = self.folder / f"ports/{port}/gid_attrs"
        for path in _listed(self.folder / f"ports/{port}/gids"):
            gid = _text(path)
            if gid is None or gid == _NO_GID:
                continue
            kind = _text(attributes / "types" / path.name)
            if kind is not None:
                netdev = _text(attributes / "ndevs" / path.name)
                found.append(Gid(int(path.name), gid, kind, netdev))
        return tuple(sorted(found, key=lambda gid: gid.index))

    def hw_counters(self, port: int) -> dict[str, int | None]:
        """Counters of the port and then of the device, by name; ``None`` for one that
        cannot be read. ``lifespan`` is no counter: it is how old, in milliseconds, a cached
        reading may be."""
        counters: dict[str, int | None] = {}
        for folder in (self.folder / "hw_counters", self.folder / f"ports/{port}/hw_counters"):
            for path in _listed(folder):
                if path.name != "lifespan":
                    text = _text(path)
                    counters[path.name] = int(text) if text and text.isdecimal() else None
        return dict(sorted(counters.items()))


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str | None:
    # os.open and one read: pathlib's read_text is several times slower, and a GID table
    # has 1024 entries to look at.
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(handle, 4096).decode("utf-8", "replace").strip() or None
    except OSError:
        return None
    finally:
        os.close(handle)
