# SPDX-License-Identifier: Apache-2.0
"""Run folders: whole manifests, a latest link, nothing half-written."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

import rdmalab
from rdmalab.errors import RdmalabError, UsageError
from rdmalab.lab.run import LabFacts, Run, git_revision, slug

LAB = LabFacts(
    "pair", "stock", "7.3.4+deb13-amd64", "tcg", 1, "fast", "pair", 1.5, ("node0", "node1")
)


def test_a_run_is_read_as_it_was_made(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "results", "vm-test", argv=["pytest", "-x"], seed=7)
    assert re.fullmatch(r"\d{8}T\d{6}Z-vm-test", run.folder.name)
    running = Run.open(run.folder)
    assert running.manifest.ended is None
    assert running.manifest.rdmalab == rdmalab.__version__
    run.use_lab(LAB, {"qemu": "11.1.3"})
    run.finish(1, {"passed": 3, "failed": 1})
    again = Run.open(tmp_path / "results" / "latest")
    assert again.manifest == run.manifest
    assert again.folder == run.folder.resolve()
    assert again.manifest.lab == LAB
    assert (again.manifest.seed, again.manifest.exit_status) == (7, 1)
    assert again.manifest.ended is not None


def test_two_runs_in_one_second_have_two_folders(tmp_path: Path) -> None:
    folders = {Run.create(tmp_path, "x").folder for _ in range(3)}
    assert len(folders) == 3
    newest = max(folders, key=lambda folder: folder.stat().st_mtime_ns)
    assert (tmp_path / "latest").resolve() == newest.resolve()


@pytest.mark.parametrize(
    ("break_it", "wanted"),
    [
        (lambda d: d.pop("git"), "'git' is a required property"),
        (lambda d: d.update(schema=99), "no manifest of this version"),
        (lambda d: d.update(surprise=1), "surprise"),
        (lambda d: d.update(argv="pytest"), "not of type 'array'"),
        (lambda d: d["git"].update(dirty="no"), "no manifest of this version"),
    ],
)
def test_a_manifest_that_breaks_the_schema_is_refused(
    tmp_path: Path, break_it: object, wanted: str
) -> None:
    run = Run.create(tmp_path, "x")
    data = run.manifest.to_json()
    assert callable(break_it)
    break_it(data)
    (run.folder / "manifest.json").write_text(json.dumps(data))
    with pytest.raises(UsageError, match=re.escape(wanted)):
        Run.open(run.folder)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run folder"):
        Run.open(tmp_path / "none")
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(UsageError, match="no manifest"):
        Run.open(tmp_path)


def test_results_that_cannot_be_written_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("a file")
    with pytest.raises(RdmalabError, match="cannot make a run folder"):
        Run.create(tmp_path / "results", "x")


def test_files_appear_whole(tmp_path: Path) -> None:
    run = Run.create(tmp_path, "x")
    run.write("sub/one.ktap", "KTAP version 1\n")
    run.write("sub/one.ktap", b"\xff")
    assert (run.folder / "sub" / "one.ktap").read_bytes() == b"\xff"
    assert sorted(path.name for path in run.folder.iterdir()) == ["manifest.json", "sub"]
    with pytest.raises(ValueError, match="outside"):
        run.write("../escape", "x")


def test_a_kept_file_goes_on_growing(tmp_path: Path) -> None:
    run = Run.create(tmp_path, "x")
    console = tmp_path / "console-node0.log"
    console.write_text("first\n")
    kept = run.keep(console)
    assert run.keep(console) == kept
    with console.open("a") as file:
        file.write("second\n")
    run.keep(console)
    assert kept.read_text() == "first\nsecond\n"
    console.unlink()
    assert kept.read_text() == "first\nsecond\n"
    console.write_text("another\n")
    run.keep(console)
    assert kept.read_text() == "another\n"


def test_slug_is_a_file_name() -> None:
    assert slug("tests/vm/test_x.py::test_a[64-ü /]") == "tests-vm-test_x.py-test_a-64"
    assert slug("...") == "run"
    assert len(slug("x" * 500)) == 100


def test_git_revision(tmp_path: Path) -> None:
    assert git_revision(tmp_path) == (None, None)

    def git(*words: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "x")
    revision, dirty = git_revision(tmp_path)
    assert revision is not None
    assert re.fullmatch(r"[0-9a-f]{40}", revision)
    assert dirty is False
    (tmp_path / "a").write_text("2")
    assert git_revision(tmp_path) == (revision, True)
