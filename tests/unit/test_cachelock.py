# SPDX-License-Identifier: Apache-2.0
"""Two that set up one cache at once, and images that a lab which is up may still open."""

from __future__ import annotations

import fcntl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from rdmalab.lab import image, kernel, native
from rdmalab.lab.cachelock import drop_unused, held, making
from rdmalab.lab.kernel import Kernel
from rdmalab.lab.paths import Paths
from rdmalab.lab.progress import Progress
from rdmalab.lab.sysroot import Sysroot


class FakeSysroot:
    """Stands in for the sysroot: each command takes a while and makes the file it is to."""

    key = "k"

    def __init__(self, folder: Path) -> None:
        self.paths = Paths(repo=folder / "repo", cache=folder / "build")
        self.made: list[str] = []

    def run(
        self, argv: Sequence[str], *, binds: Mapping[Path, str] | None = None, **_: Any
    ) -> subprocess.CompletedProcess[str]:
        time.sleep(0.05)
        inside = next(word for word in argv if word.startswith(("/mnt/images/", "/mnt/out/")))
        self.made.append(Path(inside).name)
        folder = next(host for host, at in (binds or {}).items() if inside.startswith(at + "/"))
        (folder / Path(inside).name).write_text("made")
        return subprocess.CompletedProcess(list(argv), 0, "", "")


@pytest.fixture
def fake(tmp_path: Path) -> FakeSysroot:
    return FakeSysroot(tmp_path)


def _twice(call: Callable[[], object]) -> list[object]:
    """What ``call`` gives in two threads that start together."""
    start = threading.Barrier(2)

    def one() -> object:
        start.wait()
        return call()

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(one) for _ in range(2)]
        return [future.result() for future in futures]


@pytest.fixture
def lab_up(fake: FakeSysroot) -> Iterator[None]:
    folder = fake.paths.labs / "default"
    folder.mkdir(parents=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_two_that_need_a_kernel_fetch_it_once(
    fake: FakeSysroot, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = Kernel("stock", "7.3", "7.3-1", fake.paths.kernels / "7.3")

    def fetch(sysroot: Sysroot, found: Kernel, partial: Path) -> None:
        fake.made.append(found.release)
        time.sleep(0.05)
        (partial / "vmlinux").write_text("ELF")

    monkeypatch.setattr(kernel, "find", lambda sysroot, tier: wanted)
    monkeypatch.setattr(kernel, "_fetch", fetch)
    monkeypatch.setattr(kernel, "_unpack", lambda *_: None)
    sysroot = cast(Sysroot, fake)
    assert _twice(lambda: kernel.ensure(sysroot, "stock", Progress())) == [wanted, wanted]
    assert wanted.vmlinux.exists()
    assert fake.made == ["7.3"]


def test_two_that_need_an_image_make_it_once(fake: FakeSysroot) -> None:
    sysroot = cast(Sysroot, fake)
    wanted = Kernel("stock", "7.3", "7.3-1", fake.paths.kernels / "7.3")
    roots = _twice(lambda: image.root_image(sysroot, Progress()))
    modules = _twice(lambda: image.modules_image(sysroot, wanted, Progress()))
    assert all(cast(Path, path).exists() for path in roots + modules)
    assert len(fake.made) == 2


def test_two_that_need_the_timed_loops_build_them_once(fake: FakeSysroot) -> None:
    folder = fake.paths.repo / "python/rdmalab/measure/node/native"
    folder.mkdir(parents=True)
    (folder / "loops.c").write_text("")
    found = _twice(lambda: native.ensure(cast(Sysroot, fake), Progress()))
    assert all(path.exists() for paths in found for path in cast(list[Path], paths))
    assert fake.made == ["loops.so"]


def test_an_older_root_image_goes_where_no_lab_is_up(fake: FakeSysroot) -> None:
    fake.paths.images.mkdir(parents=True)
    old = fake.paths.images / "root-old.erofs"
    old.write_text("")
    assert image.root_image(cast(Sysroot, fake), Progress()).exists()
    assert not old.exists()


@pytest.mark.usefixtures("lab_up")
def test_an_older_root_image_stays_while_a_lab_is_up(fake: FakeSysroot) -> None:
    fake.paths.images.mkdir(parents=True)
    old = fake.paths.images / "root-old.erofs"
    old.write_text("")
    assert image.root_image(cast(Sysroot, fake), Progress()).exists()
    assert old.exists()


def test_the_lock_of_a_lab_that_is_down_holds_nothing(tmp_path: Path) -> None:
    lock = tmp_path / "labs" / "default" / "lock"
    assert not held(lock)
    lock.parent.mkdir(parents=True)
    lock.write_text("")
    assert not held(lock)
    (tmp_path / "a.raw").write_text("")
    (tmp_path / "b.raw").write_text("")
    drop_unused(tmp_path / "labs", tmp_path, "*.raw", tmp_path / "b.raw")
    assert [path.name for path in tmp_path.glob("*.raw")] == ["b.raw"]


def test_the_lock_is_free_again_after_a_failure(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), making(tmp_path / "new" / "thing"):
        raise ZeroDivisionError
    with making(tmp_path / "new" / "thing"):
        assert held(tmp_path / "new" / ".thing.lock")
    assert not held(tmp_path / "new" / ".thing.lock")
