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
import fcntl
import hashlib
import ipaddress
import json
import os
import re
import shutil
import struct
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rdmalab.errors import CommandFailed, RdmalabError, UsageError

if TYPE_CHECKING:
    from rdmalab.lab.progress import Progress
    from rdmalab.lab.sysroot import Sysroot

_SECTOR = 512
_FIRST_SECTOR = 2048  # of the partition: 1 MiB, what every partitioner leaves for GRUB
_SIGNATURE = 0x6C6D6472  # of the disk; build.sh has it in PART_UUID
_SIZE_MIB = 10240  # sparse: what a role may fill, not what the image takes
_LAYOUT = 1  # raised when the code below makes another disk of the same files
_MAC = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}")
_NETDEV = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,14}")
_HOSTNAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,62})")


@dataclass(frozen=True)
class Nic:
    """A network interface, known by its MAC. ``addresses`` are "10.77.0.1/24" and the like;
    ``mtu`` in bytes, 0 to leave it; ``gateway`` an address, "" for none."""

    mac: str
    name: str
    addresses: tuple[str, ...] = ()
    mtu: int = 0
    gateway: str = ""


@dataclass(frozen=True)
class Identity:
    """What a node is given at its first boot and keeps unless something in it changes it.

    ``host_key`` is the text of an OpenSSH ed25519 private key without a passphrase;
    ``authorized_keys`` are the lines for root. ``hosts`` adds "ADDRESS NAME" lines to
    /etc/hosts. Raises UsageError for what would be no name, MAC or address.
    """

    hostname: str
    host_key: str
    authorized_keys: tuple[str, ...]
    nics: tuple[Nic, ...] = ()
    hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _HOSTNAME.fullmatch(self.hostname):
            raise UsageError(f"{self.hostname!r} is no host name")
        for nic in self.nics:
            if not _MAC.fullmatch(nic.mac):
                raise UsageError(f"{nic.mac!r} is no MAC", node=self.hostname)
            if not _NETDEV.fullmatch(nic.name):
                raise UsageError(f"{nic.name!r} cannot name a netdev", node=self.hostname)
            try:
                for address in nic.addresses:
                    ipaddress.ip_interface(address)
                if nic.gateway:
                    ipaddress.ip_address(nic.gateway)
            except ValueError as error:
                raise UsageError(
                    f"{nic.name} cannot be configured", node=self.hostname, seen=str(error)
                ) from error

    @property
    def machine_id(self) -> str:
        """32 hexadecimal digits, the same for the same host key."""
        return hashlib.sha256(self.host_key.encode()).hexdigest()[:32]

    def credentials(self) -> dict[str, str]:
        """systemd's credentials by name: nothing in the guest is ours to run, systemd-tmpfiles
        and systemd-networkd read them."""
        files = {
            "/etc/ssh/ssh_host_ed25519_key": ("0600", self.host_key),
            "/etc/ssh/ssh_host_ed25519_key.pub": ("0644", public_key(self.host_key) + "\n"),
            "/etc/hostname": ("0644", self.hostname + "\n"),
            "/etc/hosts": ("0644", self._hosts()),
        }
        lines = []
        for path, (mode, text) in files.items():
            encoded = base64.b64encode(text.encode()).decode()
            # "f": only where it is absent, so that a role's change survives a reboot.
            lines.append(f"f~ {path} {mode} root root - {encoded}")
        found = {
            "system.hostname": self.hostname,
            "system.machine_id": self.machine_id,
            "ssh.authorized_keys.root": "".join(f"{key}\n" for key in self.authorized_keys),
            "tmpfiles.extra": "\n".join(lines) + "\n",
        }
        for nic in self.nics:
            found[f"network.link.50-{nic.name}"] = _link(nic)
            found[f"network.network.50-{nic.name}"] = _network(nic)
        return found

    def _hosts(self) -> str:
        lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
        lines += [f"127.0.1.1 {self.hostname}", *self.hosts]
        return "\n".join(lines) + "\n"


def _link(nic: Nic) -> str:
    text = f"[Match]\nMACAddress={nic.mac}\n[Link]\nNamePolicy=\nName={nic.name}\n"
    return text + (f"MTUBytes={nic.mtu}\n" if nic.mtu else "")


def _network(nic: Nic) -> str:
    text = f"[Match]\nMACAddress={nic.mac}\n[Network]\nLinkLocalAddressing=ipv6\n"
    # Addresses are there at once: no carrier is waited for, no duplicates are looked for.
    text += "IPv6AcceptRA=no\nConfigureWithoutCarrier=yes\nIPv6DuplicateAddressDetection=0\n"
    text += "".join(f"Address={address}\n" for address in nic.addresses)
    return text + (f"Gateway={nic.gateway}\n" if nic.gateway else "")


def public_key(private_key: str) -> str:
    """The "ssh-ed25519 …" line of an OpenSSH private key, which holds it in the clear
    (openssh PROTOCOL.key). Raises UsageError for anything else."""
    body = "".join(line for line in private_key.split("\n") if line and "-----" not in line)
    try:
        data = base64.b64decode(body, validate=True)
        magic = b"openssh-key-v1\0"
        if not data.startswith(magic):
            raise ValueError("no openssh-key-v1")
        rest = data[len(magic) :]
        for _ in range(3):  # cipher, key derivation, its options
            rest = _ssh_string(rest)[1]
        blob, _ = _ssh_string(rest[4:])  # after the number of keys
        kind = _ssh_string(blob)[0].decode()
    except (ValueError, struct.error) as error:
        raise UsageError("the host key is no OpenSSH private key", seen=str(error)) from error
    return f"{kind} {base64.b64encode(blob).decode()}"


def _ssh_string(data: bytes) -> tuple[bytes, bytes]:
    (size,) = struct.unpack_from(">I", data)
    if len(data) < 4 + size:
        raise ValueError("it is cut short")
    return data[4 : 4 + size], data[4 + size :]


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
    entry = struct.pack(
        "<B3sB3sII", 0x80, chs, 0x83, chs, _FIRST_SECTOR, sectors - _FIRST_SECTOR
    )
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
            content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes()
            executable = os.access(path, os.X_OK)
            digest.update(f"{path.relative_to(data)}\0{executable}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()[:16]


def build_base(
    sysroot: Sysroot, release: str, tier: str, cache: Path, data: Path, progress: Progress
) -> Path:
    """The base image of ``tier`` with the kernel ``release``, built where it is absent (about
    40 s); a raw, sparse file. Others of the same tier are removed.

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
    with (cache / f".full-{tier}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
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
            make_bootable(
                disk, (work / "boot.img").read_bytes(), (work / "core.img").read_bytes()
            )
            for old in cache.glob(f"full-{tier}-*.raw"):
                old.unlink()
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
        sysroot.run(
            ["find", "/mnt/work", "-mindepth", "1", "-delete"], binds={folder: "/mnt/work"}
        )
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
