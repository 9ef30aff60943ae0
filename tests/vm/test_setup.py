# SPDX-License-Identifier: Apache-2.0
"""Set-up that is killed, interrupted or runs out of disk. Needs root, mmdebstrap and a mirror.

The sysroot here is a small one: what is tested is how it is built, not what is in it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
SMALL = """\
suite = "trixie"
backports = "trixie-backports"
packages = ["busybox-static", "kmod", "zstd"]
backports_packages = []
locked = ["busybox-static"]
[kernels]
"""
ENSURE = """
import sys
from rdmalab.errors import RdmalabError
from rdmalab.lab.paths import Paths
from rdmalab.lab.progress import Progress
from rdmalab.lab.sysroot import Sysroot
try:
    Sysroot(Paths.find()).ensure(Progress())
except RdmalabError as error:
    print(f"rdmalab: {error}", file=sys.stderr)
    sys.exit(error.exit_status)
"""


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A repository that asks for little."""
    made = tmp_path / "repo"
    shutil.copytree(REPO / "vm", made / "vm", symlinks=True)
    (made / "vm" / "packages.toml").write_text(SMALL)
    return made


def start(repo: Path, cache: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "RDMALAB_REPO": str(repo), "RDMALAB_CACHE": str(cache)}
    return subprocess.Popen(
        [sys.executable, "-c", ENSURE], env=env, text=True, stderr=subprocess.PIPE,
        start_new_session=True,
        # A shell that runs us in the background has SIGINT ignored, which is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def users_of(path: Path) -> list[str]:
    """Command lines of processes that name ``path``, other than this one's."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if str(path) in line:
                found.append(line)
    return found


def wait_until(what: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "it did not come about in time"
        time.sleep(0.05)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "cache"
    yield path
    assert users_of(path) == []
    assert str(path) not in Path("/proc/mounts").read_text()
    subprocess.run(["rm", "-rf", "--one-file-system", str(path)], check=True)


@pytest.mark.timeout(600)
def test_a_killed_set_up_leaves_nothing_running_and_is_taken_up_again(
    repo: Path, cache: Path
) -> None:
    partial = cache / "sysroot.partial"
    moments: list[Callable[[], bool]] = [
        lambda: (partial / "var/lib/dpkg").exists(),  # mmdebstrap is at work
        lambda: (partial / ".rdmalab-base").exists(),  # apt is
    ]
    for moment in moments:
        setup = start(repo, cache)
        wait_until(moment, 300)
        assert setup.poll() is None
        setup.kill()
        setup.wait()
        wait_until(lambda: users_of(cache) == [], 5)
        assert not (cache / "sysroot").exists()
    setup = start(repo, cache)
    said = setup.communicate(timeout=300)[1]
    assert setup.returncode == 0, said
    assert "Debian trixie" not in said  # the base was whole and has been kept
    assert (cache / "sysroot/usr/bin/busybox").exists()
    assert "busybox-static" in cache.with_name("cache.lock.json").read_text()
    again = start(repo, cache)
    assert again.communicate(timeout=60)[1] == ""  # nothing left to do
    assert again.returncode == 0


@pytest.mark.timeout(300)
def test_ctrl_c_during_set_up_leaves_nothing_running(repo: Path, cache: Path) -> None:
    setup = start(repo, cache)
    wait_until(lambda: (cache / "sysroot.partial").exists() or setup.poll() is not None, 120)
    os.killpg(setup.pid, signal.SIGINT)
    setup.communicate(timeout=20)
    wait_until(lambda: users_of(cache) == [], 5)
    assert not (cache / "sysroot").exists()


@pytest.fixture
def small_disk(cache: Path) -> Iterator[Path]:
    cache.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5300m", "tmpfs", str(cache)], check=True)
    yield cache
    subprocess.run(["umount", str(cache)], check=True)


@pytest.mark.timeout(300)
def test_a_disk_that_fills_during_set_up_is_named_in_one_line(repo: Path, small_disk: Path) -> None:
    setup = start(repo, small_disk)
    wait_until(lambda: (small_disk / "sysroot.partial").exists() or setup.poll() is not None, 120)
    with (small_disk / "filler").open("wb") as filler:
        os.posix_fallocate(filler.fileno(), 0, 5220 << 20)
    said = setup.communicate(timeout=240)[1]
    assert setup.returncode == 4, said
    (line,) = [line for line in said.splitlines() if line.startswith("rdmalab: ")]
    assert "full" in line
    assert str(small_disk) in line
    assert not (small_disk / "sysroot").exists()


def test_a_disk_that_is_too_small_is_refused_before_anything_is_made(
    repo: Path, small_disk: Path
) -> None:
    with (small_disk / "filler").open("wb") as filler:
        os.posix_fallocate(filler.fileno(), 0, 1 << 30)
    setup = start(repo, small_disk)
    said = setup.communicate(timeout=60)[1]
    assert setup.returncode == 4, said
    assert "GiB free" in said
    assert not (small_disk / "sysroot.partial").exists()
