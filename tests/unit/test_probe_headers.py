# SPDX-License-Identifier: Apache-2.0
"""Where bcc is sent for the kernel's headers, in the layouts that nodes have."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from rdmalab.errors import HostError
from rdmalab.probe.headers import find

RELEASE = "7.3.4+deb13-amd64"
BUILD = f"usr/src/linux-headers-{RELEASE}"
COMMON = "usr/src/linux-headers-7.3.4+deb13-common"


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A node with Debian's two trees, and a ``build`` link only."""
    (tmp_path / COMMON / "include/linux").mkdir(parents=True)
    (tmp_path / COMMON / "include/linux/kconfig.h").touch()
    (tmp_path / BUILD).mkdir()
    (tmp_path / BUILD / "Makefile").write_text(
        f"KBUILD_OUTPUT=/{BUILD}\ninclude /{COMMON}/Makefile\n"
    )
    modules = tmp_path / "lib/modules" / RELEASE
    modules.mkdir(parents=True)
    (modules / "build").symlink_to(tmp_path / BUILD)
    return tmp_path


def test_bcc_finds_a_source_link_by_itself(node: Path) -> None:
    (node / "lib/modules" / RELEASE / "source").symlink_to(node / COMMON)
    assert find(RELEASE, node).environment == {}


def test_bcc_finds_a_single_tree_by_itself(node: Path) -> None:
    (node / BUILD / "include/linux").mkdir(parents=True)
    (node / BUILD / "include/linux/kconfig.h").touch()
    assert find(RELEASE, node).environment == {}


def test_common_tree_is_taken_from_the_makefile(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    headers = find(RELEASE, node)
    assert headers.environment == {"BCC_KERNEL_SOURCE": str(node / COMMON)}
    build = node / "lib/modules" / RELEASE / "build"
    assert f"-I{build}/arch/x86/include/generated" in headers.cflags
    assert f"-I{build}/include" in headers.cflags


def test_headers_inside_the_kernel_will_do(tmp_path: Path) -> None:
    (tmp_path / "sys/kernel").mkdir(parents=True)
    (tmp_path / "sys/kernel/kheaders.tar.xz").touch()
    assert find(RELEASE, tmp_path).environment == {}


@pytest.mark.parametrize("broken", ["no modules", "a dead link"])
def test_no_headers_name_the_package(tmp_path: Path, broken: str) -> None:
    if broken == "a dead link":
        modules = tmp_path / "lib/modules" / RELEASE
        modules.mkdir(parents=True)
        (modules / "build").symlink_to(tmp_path / "gone")
    with pytest.raises(HostError, match="apt-get install linux-headers-7"):
        find(RELEASE, tmp_path)
