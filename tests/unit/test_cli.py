# SPDX-License-Identifier: Apache-2.0
"""What every command line has in common: one line for an error, its status, its stream."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from rdmalab import cli
from rdmalab.lab.sysroot import Sysroot


def _status(*argv: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.mark.parametrize("command", ["setup", "kernel", "modules"])
def test_an_unknown_kernel_is_refused_before_anything_is_built(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Sysroot, "ensure", lambda *_: pytest.fail("the sysroot is built"))
    assert _status(command, "--kernel", "vista") == 2
    said = capsys.readouterr().err
    assert said == "rdmalab: no kernel is called 'vista'; choose one of lts, stock\n"


@pytest.mark.parametrize(
    ("number", "name"),
    [(n, "/a/file") for n in (errno.ENOSPC, errno.EACCES, errno.EROFS, errno.ENOTDIR)]
    + [(errno.ENOENT, "mkfs.erofs"), (errno.EIO, None)],
)
def test_what_the_system_refuses_is_one_line_with_its_path(
    number: int,
    name: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number), name)

    monkeypatch.setattr(Sysroot, "ensure", refuse)
    assert _status("setup") == 4
    place = f"{name}: " if name else ""
    assert capsys.readouterr().err == f"rdmalab: {place}{os.strerror(number)}\n"


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_cache_that_cannot_be_made_is_one_line(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RDMALAB_CACHE", str(tmp_path / name))
    monkeypatch.setattr("rdmalab.lab.host.ensure_packages", lambda say: None)
    assert _status("setup") == 4
    said = capsys.readouterr().err
    assert said.startswith(f"rdmalab: the cache {tmp_path / name} cannot be made: ")
    assert said.count("\n") == 1


@pytest.mark.parametrize("argv", [[], ["host"]])
def test_help_that_stands_in_for_an_argument_is_no_output(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert _status(*argv) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "Usage: rdmalab" in said.err


def test_help_that_was_asked_for_is_output_with_an_example(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _status("host", "--help") == 0
    assert "Example:\n    rdmalab host check\n" in capsys.readouterr().out
