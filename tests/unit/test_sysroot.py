# SPDX-License-Identifier: Apache-2.0
"""What the sysroot's set-up reads and keeps: package tables, the lock file, kernel images."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rdmalab.errors import CommandFailed, HostError, UsageError
from rdmalab.lab.kernel import payload
from rdmalab.lab.lockfile import Lock, LockedKernel
from rdmalab.lab.paths import Paths
from rdmalab.lab.progress import Progress
from rdmalab.lab.sysroot import (
    Packages,
    Sysroot,
    image_package,
    parse_madison,
    preferences,
    source_package,
)

REPO = Path(__file__).parents[2]

MADISON = """\
linux-image-amd64 | 7.3.4-1~bpo13+1 | http://mirror.example/debian trixie-backports/main amd64 Packages
linux-image-amd64 | 6.12.118-1 | http://mirror.example/debian-security trixie-security/main amd64 Packages
linux-signed-amd64 | 6.12.118+1 | http://mirror.example/debian trixie/main Sources
"""  # noqa: E501


def test_madison_gives_versions_with_their_suites_and_no_sources() -> None:
    assert parse_madison(MADISON) == [
        ("7.3.4-1~bpo13+1", "trixie-backports"),
        ("6.12.118-1", "trixie-security"),
    ]


@pytest.mark.parametrize(
    ("show", "package"),
    [
        (
            "Depends: linux-base-amd64 (= 1), linux-image-7.3.4+deb13-amd64 (= 7.3.4-1~bpo13+1)",
            "linux-image-7.3.4+deb13-amd64",
        ),
        ("Depends: linux-image-6.12.118+deb13-amd64", "linux-image-6.12.118+deb13-amd64"),
    ],
)
def test_the_kernel_of_a_metapackage_is_found(show: str, package: str) -> None:
    assert image_package(show) == package


def test_a_metapackage_without_a_kernel_is_refused() -> None:
    with pytest.raises(HostError):
        image_package("Depends: linux-base")


def test_packages_toml_is_valid_and_any_change_changes_its_digest(tmp_path: Path) -> None:
    path = REPO / "vm" / "packages.toml"
    packages = Packages.read(path)
    assert {"stock", "lts"} <= set(packages.kernels)
    assert set(packages.locked) <= {*packages.packages, *packages.backports_packages, "libc6"}
    changed = tmp_path / "packages.toml"
    changed.write_text(path.read_text() + "# more\n")
    assert Packages.read(changed).digest != packages.digest


def test_a_damaged_packages_toml_is_named(tmp_path: Path) -> None:
    path = tmp_path / "packages.toml"
    path.write_text("suite = 'x'\n")
    with pytest.raises(UsageError, match=r"packages\.toml"):
        Packages.read(path)


def test_a_lock_is_read_as_it_was_written_and_an_absent_one_is_empty(tmp_path: Path) -> None:
    lock = Lock({"gcc": "14"}, {"stock": LockedKernel("7.3.4+deb13-amd64", "7.3.4-1")})
    path = tmp_path / "build.lock.json"
    assert Lock.read(path) == Lock()
    lock.write(path)
    assert Lock.read(path) == lock
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 99}', '{"schema": 1}'])
def test_a_damaged_lock_is_refused_with_what_to_do(tmp_path: Path, text: str) -> None:
    path = tmp_path / "build.lock.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="delete it"):
        Lock.read(path)


def bz_image(data: bytes) -> bytes:
    head = bytearray(0x260)
    head[0x1F1] = 3
    head[0x202:0x206] = b"HdrS"
    head[0x248:0x24C] = (16).to_bytes(4, "little")
    head[0x24C:0x250] = (len(data) + 4).to_bytes(4, "little")
    return bytes(head).ljust(4 * 512 + 16, b"\0") + data + b"SIZE"


def test_the_payload_of_a_kernel_image_is_found() -> None:
    data = b"\x28\xb5\x2f\xfd compressed"
    assert payload(bz_image(data)) == data


@pytest.mark.parametrize("image", [b"", b"MZ" * 500, bz_image(b"\x1f\x8b gzip")])
def test_what_is_no_zstd_kernel_is_refused(image: bytes) -> None:
    with pytest.raises(ValueError, match=r"bzImage|zstd"):
        payload(image)


@pytest.mark.parametrize(
    ("show", "source"),
    [
        ("Package: gcc\nSource: gcc-defaults (1.220)\nVersion: 4:14.2.0-1\n", "gcc-defaults"),
        ("Package: gcc\nSource: glibc\n", "glibc"),
        ("Package: gcc\nDescription: Source: none\n", "gcc"),
    ],
)
def test_the_source_of_a_package_is_found(show: str, source: str) -> None:
    assert source_package(show, "gcc") == source


def test_all_binaries_of_a_locked_packages_source_are_pinned_before_the_backports() -> None:
    text = preferences("b", {"libc6": "2.41-12", "qemu-utils": "11"}, {
        "libc6": "glibc", "qemu-utils": "qemu",
    })  # fmt: skip
    blocks = [dict(line.split(": ", 1) for line in b.splitlines()) for b in text.split("\n\n")]
    assert [block["Package"].split()[0] for block in blocks] == [
        "libc6", "src:glibc", "qemu-utils", "src:qemu", "src:qemu",
    ]  # fmt: skip
    assert blocks[1] == {
        "Package": "src:glibc", "Pin": "version 2.41-12", "Pin-Priority": "1001",
    }  # fmt: skip
    assert blocks[-1]["Pin"] == "release n=b"


class Root(Sysroot):
    """A sysroot whose apt is played: it has two versions of all, and installs what
    ``can`` says of the preferences."""

    can = True

    def __init__(self, folder: Path) -> None:
        super().__init__(Paths(repo=REPO, cache=folder / "build"))
        (self.root / "etc/apt/preferences.d").mkdir(parents=True)

    @property
    def preferences(self) -> str:
        return (self.root / "etc/apt/preferences.d/rdmalab").read_text()

    def run(self, argv: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        said = ""
        if argv[:2] == ["apt-cache", "madison"]:
            suite = "trixie-backports" if argv[2].startswith("qemu") else "trixie"
            said = "".join(
                f"{argv[2]} | {version} | http://m/debian {s}/main amd64 Packages\n"
                for version, s in (("2", suite), ("1", suite), ("2", "trixie-backports"))
            )
        elif argv[:2] == ["apt-cache", "show"]:
            said = "Source: of-" + argv[2].split("=")[0] + "\nDepends: linux-image-7.3-amd64\n"
        elif "--simulate" in argv and not self.can:
            raise CommandFailed("apt-get ended with status 100", seen="E: held broken packages")
        return subprocess.CompletedProcess(list(argv), 0, said, "")


class Said(Progress):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def test_the_locks_versions_are_taken_where_apt_can_install_them(tmp_path: Path) -> None:
    root, said = Root(tmp_path), Said()
    assert root._choose(Lock({"libc6": "1"}), said).packages["libc6"] == "1"
    assert "Package: src:of-libc6\nPin: version 1\n" in root.preferences
    assert said.lines == []


def test_a_lock_that_apt_cannot_satisfy_is_left_with_a_line(tmp_path: Path) -> None:
    root, said = Root(tmp_path), Said()
    root.can = False
    assert root._choose(Lock({"libc6": "1"}), said).packages["libc6"] == "2"
    assert "Package: src:of-libc6\nPin: version 2\n" in root.preferences
    assert len(said.lines) == 1
    assert "held broken packages" in said.lines[0]


def test_a_lock_file_that_a_killed_set_up_did_not_write_is_written(tmp_path: Path) -> None:
    root = Sysroot(Paths(repo=REPO, cache=tmp_path / "build"))
    root.root.mkdir(parents=True)
    stamp = {"digest": root.packages.digest, "packages": {"gcc": "14"}, "kernels": {}}
    (root.root / ".rdmalab.json").write_text(json.dumps(stamp))
    root.ensure(Progress())
    assert Lock.read(root.paths.lock) == Lock({"gcc": "14"})
    root.paths.lock.write_text("mine")
    root.ensure(Progress())
    assert root.paths.lock.read_text() == "mine"
