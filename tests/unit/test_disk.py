# SPDX-License-Identifier: Apache-2.0
"""The full node's disk: what the firmware reads first, when an image is made anew, what of
a node's secrets is on the command line."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import struct
import subprocess
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rdmalab.errors import CommandFailed, RdmalabError, UsageError
from rdmalab.lab import disk
from rdmalab.lab.identity import Identity, Nic
from rdmalab.lab.progress import Progress
from rdmalab.lab.sysroot import Sysroot

DATA = Path(__file__).resolve().parents[2] / "vm" / "full"
BOOT_IMG = bytes(range(256)) + bytes(254) + b"\x55\xaa"


def _read(path: Path, offset: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(size)


class TestBootRecord:
    def test_the_bios_finds_code_and_one_active_linux_partition_to_the_end(self) -> None:
        record = disk.boot_record(BOOT_IMG, 20 * 2048)
        assert len(record) == 512
        assert record[510:] == b"\x55\xaa"
        assert record[:0x66] == BOOT_IMG[:0x66]
        active, kind = record[446], record[450]
        first, count = struct.unpack_from("<II", record, 454)
        assert (active, kind, first, first + count) == (0x80, 0x83, 2048, 20 * 2048)
        assert record[462:510] == bytes(48), "the other three entries are empty"

    def test_the_disk_signature_is_the_one_in_the_builders_partuuid(self) -> None:
        record = disk.boot_record(BOOT_IMG, 20 * 2048)
        (signature,) = struct.unpack_from("<I", record, 440)
        assert f"PART_UUID={signature:08x}-01" in (DATA / "build.sh").read_text()

    def test_what_is_no_boot_sector_is_refused(self) -> None:
        with pytest.raises(RdmalabError, match="no boot sector"):
            disk.boot_record(bytes(512), 4096)

    def test_the_partition_is_not_touched(self, tmp_path: Path) -> None:
        image = tmp_path / "disk"
        image.write_bytes(b"\xee" * (4 << 20))
        disk.make_bootable(image, BOOT_IMG, b"core" * 1000)
        assert _read(image, 512, 4000) == b"core" * 1000
        assert image.stat().st_size == 4 << 20
        assert _read(image, 1 << 20, 3 << 20) == b"\xee" * (3 << 20)

    def test_a_core_image_that_would_reach_into_the_partition_is_refused(
        self, tmp_path: Path
    ) -> None:
        image = tmp_path / "disk"
        image.write_bytes(bytes(4 << 20))
        disk.make_bootable(image, BOOT_IMG, bytes(2047 * 512))
        with pytest.raises(RdmalabError, match=r"core\.img"):
            disk.make_bootable(image, BOOT_IMG, bytes(2047 * 512 + 1))


class TestImageKey:
    @pytest.fixture
    def data(self, tmp_path: Path) -> Path:
        (tmp_path / "root").mkdir()
        (tmp_path / "mask").write_text("a.service\n")
        (tmp_path / "root" / "hook").write_text("#!/bin/sh\n")
        return tmp_path

    def test_it_is_the_same_for_the_same(self, data: Path) -> None:
        assert disk.image_key("s", "7.3", data) == disk.image_key("s", "7.3", data)

    def test_sysroot_kernel_content_mode_and_name_each_change_it(self, data: Path) -> None:
        seen = {disk.image_key("s", "7.3", data), disk.image_key("t", "7.3", data)}
        seen.add(disk.image_key("s", "7.4", data))
        (data / "root" / "hook").chmod(0o755)
        seen.add(disk.image_key("s", "7.3", data))
        (data / "mask").write_text("b.service\n")
        seen.add(disk.image_key("s", "7.3", data))
        (data / "mask").rename(data / "masks")
        seen.add(disk.image_key("s", "7.3", data))
        assert len(seen) == 6


class FakeSysroot:
    """Stands in for the sysroot: `run` leaves what build.sh would, or fails half-way."""

    key = "k"

    def __init__(self, labs: Path = Path("/nonexistent")) -> None:
        self.paths = SimpleNamespace(labs=labs)
        self.fail = False
        self.argv: list[str] = []

    def run(
        self, argv: Sequence[str], *, binds: Mapping[Path, str] | None = None, **_: Any
    ) -> subprocess.CompletedProcess[str]:
        self.argv = list(argv)
        work = next(host for host, inside in (binds or {}).items() if inside == "/mnt/work")
        (work / "disk").write_bytes(bytes(4 << 20))
        (work / "upper").mkdir()
        if self.fail:
            raise CommandFailed("build.sh in the sysroot ended with status 100")
        (work / "boot.img").write_bytes(BOOT_IMG)
        (work / "core.img").write_bytes(b"core")
        return subprocess.CompletedProcess(self.argv, 0, "", "")

    def host_command(self, program: str) -> list[str]:
        return ["sh", "-c", "echo 'cannot write' >&2; exit 1", program]


def _build(fake: FakeSysroot, cache: Path, release: str = "7.3", tier: str = "stock") -> Path:
    return disk.build_base(cast(Sysroot, fake), release, tier, cache, DATA, Progress())


class TestBuildBase:
    def test_an_image_is_built_once_and_leaves_nothing_beside_it(self, tmp_path: Path) -> None:
        fake = FakeSysroot()
        image = _build(fake, tmp_path)
        assert _read(image, 510, 6) == b"\x55\xaacore"
        fake.fail = True
        assert _build(fake, tmp_path) == image
        assert [p.name for p in tmp_path.iterdir() if not p.name.startswith(".")] == [image.name]

    def test_a_failed_build_leaves_no_image_and_the_next_one_starts_over(
        self, tmp_path: Path
    ) -> None:
        fake = FakeSysroot()
        fake.fail = True
        with pytest.raises(CommandFailed):
            _build(fake, tmp_path)
        assert list(tmp_path.glob("*.raw")) == []
        fake.fail = False
        assert _build(fake, tmp_path).exists()

    def test_a_newer_kernel_replaces_the_tiers_image_and_no_other(self, tmp_path: Path) -> None:
        fake = FakeSysroot()
        old, lts = _build(fake, tmp_path), _build(fake, tmp_path, "6.12", "lts")
        new = _build(fake, tmp_path, "7.4")
        assert new.exists()
        assert lts.exists()
        assert not old.exists()

    def test_a_lab_that_is_up_keeps_the_image_it_may_start_a_node_from(
        self, tmp_path: Path
    ) -> None:
        fake = FakeSysroot(tmp_path / "labs")
        old = _build(fake, tmp_path / "images")
        lock = tmp_path / "labs" / "default" / "lock"
        lock.parent.mkdir(parents=True)
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            assert _build(fake, tmp_path / "images", "7.4").exists()
            assert old.exists()

    def test_the_builder_is_told_kernel_and_packages(self, tmp_path: Path) -> None:
        fake = FakeSysroot()
        _build(fake, tmp_path, "7.3.4+deb13-amd64")
        assert fake.argv[3] == "7.3.4+deb13-amd64"
        assert "grub-pc" in fake.argv[5].split()
        assert "qemu-system-x86" in fake.argv[6].split()

    def test_unreadable_packages_are_wrong_use(self, tmp_path: Path) -> None:
        data = tmp_path / "data"
        data.mkdir()
        (data / "packages.toml").write_text("add = [\n")
        with pytest.raises(UsageError, match=r"packages\.toml"):
            disk.build_base(
                cast(Sysroot, FakeSysroot()), "7.3", "stock", tmp_path / "c", data, Progress()
            )


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    key = tmp_path_factory.mktemp("key") / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    nic = Nic("52:54:00:00:01:00", "roce0", ("10.77.0.1/24",), 4200)
    return Identity("node0", key.read_text(), ("ssh-ed25519 AAAA me",), (nic,))


class TestQemuArguments:
    def test_the_host_key_is_in_a_file_of_the_owner_alone_and_on_no_command_line(
        self, tmp_path: Path, identity: Identity
    ) -> None:
        argv = disk.qemu_args(tmp_path / "base", tmp_path / "n.qcow2", identity)
        folder = tmp_path / "n.qcow2.credentials"
        assert folder.stat().st_mode & 0o777 == 0o700
        text = (folder / "tmpfiles.extra").read_text()
        prefix, value = text.split("=", 1)
        assert prefix == "io.systemd.credential.binary:tmpfiles.extra"
        lines = base64.b64decode(value).decode().splitlines()
        key = next(line for line in lines if "/ssh_host_ed25519_key " in line)
        kind, _, mode, owner, group, _, encoded = key.split(" ")
        assert (kind, mode, owner, group) == ("f~", "0600", "root", "root")
        assert base64.b64decode(encoded).decode() == identity.host_key
        assert encoded[:40] not in " ".join(argv)

    def test_every_credential_reaches_qemu(self, tmp_path: Path, identity: Identity) -> None:
        argv = disk.qemu_args(tmp_path / "base", tmp_path / "n.qcow2", identity)
        given = [value for flag, value in pairwise(argv) if flag == "-smbios"]
        paths = {Path(value.split("path=")[1]).name for value in given}
        assert paths == set(identity.credentials())
        assert "network.network.50-roce0" in paths

    def test_the_overlay_alone_is_written_to(self, tmp_path: Path, identity: Identity) -> None:
        argv = disk.qemu_args(tmp_path / "base", tmp_path / "n.qcow2", identity)
        nodes = {
            node["node-name"]: node
            for flag, value in pairwise(argv)
            if flag == "-blockdev" and (node := json.loads(value))
        }
        assert nodes["base"]["read-only"] is True
        assert nodes["disk"]["backing"] == "base"
        assert nodes["disk"]["file"]["filename"] == str(tmp_path / "n.qcow2")

    def test_a_comma_in_the_path_does_not_end_it(self, tmp_path: Path, identity: Identity) -> None:
        folder = tmp_path / "a,b"
        folder.mkdir()
        argv = disk.qemu_args(folder / "base", folder / "n.qcow2", identity)
        value = next(v for f, v in pairwise(argv) if f == "-smbios")
        unescaped = value.split("path=")[1].replace(",,", ",")
        assert Path(unescaped).is_file()

    def test_what_is_left_of_another_identity_is_not_passed_on(
        self, tmp_path: Path, identity: Identity
    ) -> None:
        disk.qemu_args(tmp_path / "base", tmp_path / "n.qcow2", identity)
        bare = Identity(identity.hostname, identity.host_key, identity.authorized_keys)
        disk.qemu_args(tmp_path / "base", tmp_path / "n.qcow2", bare)
        left = {path.name for path in (tmp_path / "n.qcow2.credentials").iterdir()}
        assert left == set(bare.credentials())


def test_an_overlay_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match=r"n\.qcow2 cannot be made: cannot write"):
        disk.create_overlay(cast(Sysroot, FakeSysroot()), tmp_path / "base", tmp_path / "n.qcow2")


class TestImageFiles:
    """What a slip in vm/full would break only on a node."""

    def test_every_masked_unit_has_a_reason_or_stands_under_one(self) -> None:
        lines = (DATA / "mask").read_text().splitlines()
        units = [line for line in lines if line and not line.startswith("#")]
        assert units
        assert "#" in units[0]
        assert [u for u in units if not u.split("#")[0].strip().count(".")] == []

    @pytest.mark.parametrize(
        "script",
        ["build.sh", "grub-probe", "root/etc/grub.d/11_linux16",
         "root/etc/initramfs-tools/hooks/rdmalab"],
    )  # fmt: skip
    def test_a_script_is_executable_and_parses(self, script: str) -> None:
        path = DATA / script
        assert os.access(path, os.X_OK)
        subprocess.run(["sh", "-n", str(path)], check=True)

    def test_the_initramfs_init_parses(self) -> None:
        subprocess.run(
            ["sh", "-n", str(DATA / "root/etc/initramfs-tools/rdmalab-init")], check=True
        )

    def test_grub_probe_answers_what_grub_mkconfig_asks(self) -> None:
        env = {"FS_UUID": "u", "PART_UUID": "p", "PATH": os.environ["PATH"]}

        def ask(*argv: str) -> str:
            return subprocess.run(
                [str(DATA / "grub-probe"), *argv], env=env, capture_output=True, text=True,
                check=True,
            ).stdout.strip()  # fmt: skip

        assert ask("--target=device", "/") == "/dev/vda1"
        assert ask("--device", "/dev/vda1", "--target=fs_uuid") == "u"
        assert ask("-t", "fs", "/boot") == "ext2"
        assert ask("--device", "/dev/vda1", "--target=abstraction") == ""
