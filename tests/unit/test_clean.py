# SPDX-License-Identifier: Apache-2.0
"""tools/clean deletes what was built, and nothing that was not."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CLEAN = Path(__file__).parents[2] / "tools" / "clean"


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    repo = tmp_path / "repo"
    (repo / "tools").mkdir(parents=True)
    shutil.copy(CLEAN, repo / "tools" / "clean")
    return repo


def _clean(repo: Path, cache: str) -> str:
    env = {**os.environ, "RDMALAB_CACHE": cache}
    done = subprocess.run(
        [repo / "tools/clean"], cwd=repo.parent, env=env, capture_output=True, text=True, check=True
    )
    return done.stderr


def _cache(folder: Path, marker: bool = True) -> Path:
    (folder / "sysroot" / "etc").mkdir(parents=True)
    if marker:
        (folder / ".setup-lock").write_text("")
    return folder


def test_the_repositorys_own_leftovers_go_and_its_sources_stay(repo: Path) -> None:
    for name in ("build/sysroot", "python/rdmalab.egg-info", "python/rdmalab/__pycache__"):
        (repo / name).mkdir(parents=True)
    (repo / "python/rdmalab/a.py").write_text("")
    (repo / "build.lock.json").write_text("{}")
    assert _clean(repo, "") == ""
    left = {str(path.relative_to(repo)) for path in repo.rglob("*") if path.is_file()}
    assert left == {"tools/clean", "python/rdmalab/a.py", "build.lock.json"}
    assert not (repo / "build").exists()
    assert not (repo / "python/rdmalab.egg-info").exists()


@pytest.mark.parametrize("relative", [False, True])
def test_a_cache_elsewhere_goes(repo: Path, relative: bool) -> None:
    cache = _cache(repo.parent / "my cache")
    _clean(repo, cache.name if relative else str(cache))
    assert not cache.exists()


def test_what_others_put_in_a_cache_stays(repo: Path) -> None:
    cache = _cache(repo.parent / "home")
    (cache / "letter").write_text("")
    assert "other files" in _clean(repo, str(cache))
    assert [path.name for path in cache.iterdir()] == ["letter"]


def test_a_folder_that_no_set_up_made_is_left_alone(repo: Path) -> None:
    folder = _cache(repo.parent / "home", marker=False)
    assert "left alone" in _clean(repo, str(folder))
    assert (folder / "sysroot" / "etc").is_dir()
