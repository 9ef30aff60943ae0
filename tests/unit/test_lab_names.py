# SPDX-License-Identifier: Apache-2.0
"""A lab's name becomes a folder's that `down` deletes: nothing else may be named by it."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rdmalab.errors import UsageError
from rdmalab.lab import lab as labs
from rdmalab.lab.paths import Paths


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    (tmp_path / "cache" / "labs").mkdir(parents=True)
    return Paths(repo=Path(__file__).parents[2], cache=tmp_path / "cache")


@pytest.mark.parametrize("name", ["", ".", "..", "../..", "/etc", "a/b", "A", "a b"])
def test_what_is_no_name_is_refused_before_anything_is_touched(paths: Paths, name: str) -> None:
    precious = paths.labs / "other" / "precious"
    precious.parent.mkdir()
    precious.write_text("here")
    for ask in (labs.take_down, lambda p, n: labs.Lab.attach(n, p)):
        with pytest.raises(UsageError, match="cannot name a lab"):
            ask(paths, name)
    with pytest.raises(UsageError, match="cannot name a lab"):
        labs.console(paths, name, "node0")
    assert precious.read_text() == "here"


def test_only_one_up_of_a_name_at_a_time(paths: Paths) -> None:
    with (paths.labs / ".default.up").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="being booted by another command"):
            labs.Lab.up(labs.LabSpec(), paths=paths)


def test_a_supervisor_that_hangs_is_killed_and_its_folder_goes_after_it(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = paths.labs / "stuck"
    folder.mkdir()
    hold = "import fcntl, sys, time; f = open(sys.argv[2] + '/lock', 'w')\n"
    hold += "fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); time.sleep(600)"
    with subprocess.Popen(
        [sys.executable, "-c", hold, "rdmalab.lab.supervisor", str(folder)], stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        (folder / "supervisor.pid").write_text(f"{holder.pid}\n")
        monkeypatch.setattr(labs, "_REQUEST_SECONDS", 0.3)
        assert labs.names(paths) == ["stuck"]
        assert labs.take_down(paths, "stuck")
        until = time.monotonic() + 5
        while holder.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        assert holder.poll() is not None
    assert not folder.exists()
