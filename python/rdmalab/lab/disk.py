# SPDX-License-Identifier: Apache-2.0
"""The disk of a full node: one base image a kernel tier, shared by all, under an overlay of
each node's own.

The image is made from the sysroot by ``vm/full/build.sh`` (packages, settings, kernel,
initramfs, grub.cfg, ext4) and gets its boot record here. No loop device, and no mount
outside the namespace that `Sysroot.run` makes. What tells two nodes apart is in no image: it
reaches systemd as credentials in SMBIOS strings (systemd.system-credentials(7)).
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import struct
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rdmalab.errors import CommandFailed, RdmalabError, UsageError
from rdmalab.lab.cachelock import drop_unused, making
from rdmalab.lab.identity import Identity

if TYPE_CHECKING:
    from rdmalab.lab.progress import Progress
    from rdmalab.lab.sysroot import Sysroot

_SECTOR = 512
_FIRST_SECTOR = 2048  # of the partition: 1 MiB, what every partitioner leaves for GRUB
_SIGNATURE = 0x6C6D6472  # of the disk; build.sh has it in PART_UUID
_SIZE_MIB = 10240  # sparse: what a role may fill, not what the image takes
_LAYOUT = 1  # raised when the code below makes another disk of the same files


def boot_record(boot_img: bytes, sectors: int) -> bytes:
    """The first sector of a disk of ``sectors`` sectors: GRUB's ``boot.img`` (512 bytes) with
    one bootable Linux partition from 1 MiB to the end. It loads core.img from sector 1."""
    if len(boot_img) != _SECTOR or boot_img[510:] != b"\x55\xaa":
        raise RdmalabError("GRUB's boot.img is no boot sector", seen=f"{len(boot_img)} bytes")
    code = bytearray(boot_img[:440])
    # grub-install does the same on a disk that is no floppy: trust the drive number that
    # the BIOS passes (GRUB_BOOT_MACHINE_DRIVE_CHECK, two bytes, become nops).
    code[0x66:0x68] = b"\x90\x90"
    chs = b"\xfe\xff\xff"  # beyond what CHS can say
    entry = struct.pack("<B3sB3sII", 0x80, chs, 0x83, chs, _FIRST_SECTOR, sectors - _FIRST_SECTOR)
    return bytes(code) + struct.pack("<IH", _SIGNATURE, 0) + entry + bytes(48) + b"\x55\xaa"


def make_bootable(disk: Path, boot_img: bytes, core_img: bytes) -> None:
    """Write the boot record and GRUB's core image before the partition of ``disk``, in place.
    Raises RdmalabError where the core image does not fit."""
    room = (_FIRST_SECTOR - 1) * _SECTOR
    if len(core_img) > room:
        raise RdmalabError(f"GRUB's core.img has {len(core_img)} bytes, and {room} fit")
    with disk.open("r+b") as file:
        file.write(boot_record(boot_img, disk.stat().st_size // _SECTOR))
        file.write(core_img)


@dataclass(frozen=True)
class _Packages:
    """vm/full/packages.toml, checked."""

    add: tuple[str, ...]
    remove: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> _Packages:
        try:
            data: dict[str, Any] = tomllib.loads(path.read_text())
            return cls(add=tuple(data["add"]), remove=tuple(data["remove"]))
        except (OSError, KeyError, TypeError, tomllib.TOMLDecodeError) as error:
            raise UsageError(f"{path} cannot be used", seen=str(error)) from error


def image_key(sysroot_key: str, release: str, data: Path) -> str:
    """Names the image that ``build_base`` makes of these: 16 hexadecimal digits that change
    with the sysroot, the kernel and every file under ``data`` (name, mode, content)."""
    digest = hashlib.sha256(f"{_LAYOUT}\n{sysroot_key}\n{release}\n".encode())
    for path in sorted(data.rglob("*")):
        if path.is_file() or path.is_symlink():
            content = bytes(path.readlink()) if path.is_symlink() else path.read_bytes()
            executable = os.access(path, os.X_OK)
            digest.update(f"{path.relative_to(data)}\0{executable}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()[:16]


def build_base(
    sysroot: Sysroot, release: str, tier: str, cache: Path, data: Path, progress: Progress
) -> Path:
    """The base image of ``tier`` with the kernel ``release``, built where it is absent (about
    40 s); a raw, sparse file. Others of the same tier are removed unless a lab is up.

    ``cache`` is a folder on a disk; ``data`` is vm/full. A second process waits for the
    first. A killed build leaves nothing that is taken for an image. Raises HostError where
    the disk is full, CommandFailed with the telling line where a step fails.
    """
    cache.mkdir(parents=True, exist_ok=True)
    name = f"full-{tier}-{image_key(sysroot.key, release, data)}.raw"
    image = cache / name
    if image.exists():
        return image
    work = cache / f"full-{tier}.partial"
    with making(cache / f"full-{tier}"):
        if image.exists():
            return image
        _remove(sysroot, work)
        work.mkdir()
        packages = _Packages.read(data / "packages.toml")
        with progress.step(f"full image: {tier} {release}"):
            sysroot.run(
                [
                    "/mnt/data/build.sh", "/mnt/data", "/mnt/work", release, str(_SIZE_MIB),
                    " ".join(packages.add), " ".join(packages.remove),
                ],
                binds={data: "/mnt/data", work: "/mnt/work"},
            )  # fmt: skip
            disk = work / "disk"
            make_bootable(disk, (work / "boot.img").read_bytes(), (work / "core.img").read_bytes())
            drop_unused(sysroot.paths.labs, cache, f"full-{tier}-*.raw", image)
            disk.rename(image)
        _remove(sysroot, work)
    return image


def _remove(sysroot: Sysroot, folder: Path) -> None:
    """Delete a build's folder, as whoever owns its files (the sysroot's root)."""
    if not folder.exists():
        return
    try:
        shutil.rmtree(folder)
    except OSError:
        sysroot.run(["find", "/mnt/work", "-mindepth", "1", "-delete"], binds={folder: "/mnt/work"})
        folder.rmdir()


def create_overlay(sysroot: Sysroot, base: Path, overlay: Path) -> None:
    """Make ``overlay``, an empty qcow2 disk over ``base``. An older one is replaced.
    Raises CommandFailed."""
    overlay.unlink(missing_ok=True)
    done = subprocess.run(
        [
            *sysroot.host_command("qemu-img"), "create", "-q", "-f", "qcow2",
            "-F", "raw", "-b", str(base.absolute()), str(overlay),
        ],
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise CommandFailed(f"{overlay} cannot be made", seen=done.stderr.strip())


def qemu_args(base: Path, overlay: Path, identity: Identity) -> list[str]:
    """QEMU's arguments for the disk and the identity: the machine boots from it through its
    BIOS; -kernel and -initrd are not for this mode.

    Writes the credentials beside the overlay (``<overlay>.credentials/``, readable by the
    owner only: they hold the host key), which go with it at ``down``; QEMU reads them when
    it starts.
    """
    nodes: list[dict[str, Any]] = [
        {
            "node-name": "base",
            "driver": "raw",
            "read-only": True,
            "file": {"driver": "file", "filename": str(base.absolute())},
        },
        {
            "node-name": "disk",
            "driver": "qcow2",
            "backing": "base",
            "discard": "unmap",
            # The disk lives as long as the lab: no flush reaches the host's disk.
            "cache": {"no-flush": True},
            "file": {"driver": "file", "filename": str(overlay.absolute())},
        },
    ]
    argv = []
    for node in nodes:
        argv += ["-blockdev", json.dumps(node)]
    argv += ["-device", "virtio-blk-pci,drive=disk,bootindex=1"]
    folder = overlay.with_name(overlay.name + ".credentials")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    for name, text in identity.credentials().items():
        encoded = base64.b64encode(text.encode()).decode()
        path = folder / name
        path.write_text(f"io.systemd.credential.binary:{name}={encoded}")
        argv += ["-smbios", f"type=11,path={str(path.absolute()).replace(',', ',,')}"]
    return argv
