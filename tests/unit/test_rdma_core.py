# SPDX-License-Identifier: Apache-2.0
"""The runner of rdma-core's tests survives what a test may do, and its judge knows a known
failure from a new one. The tests here are stand-ins: no device, no pyverbs."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rdmalab.errors import RdmalabError, UsageError
from rdmalab.rdma import core_known
from rdmalab.rdma.core_tests import SCHEMA

_MODULE = """
import os, signal, subprocess, sys, time, unittest
from args_parser import parser

class T(unittest.TestCase):
    def test_a_passes(self):
        self.assertEqual(parser.args["dev"], "rxe0")
        self.assertEqual(parser.args["gid"], 3)
        print("noise that must not reach standard output")
        subprocess.run(["echo", "noise"])
    def test_b_fails(self):
        self.fail("two\\nlines")
    def test_c_skips(self):
        self.skipTest("lacks it")
    def test_d_hangs_with_a_child(self):
        subprocess.Popen(["sleep", "1000"])
        time.sleep(1000)
    def test_e_crashes(self):
        os.kill(os.getpid(), signal.SIGSEGV)
    def test_f_leaves(self):
        os._exit(7)
    def test_g_passes_after_all_that(self):
        pass
    def test_h_sub(self):
        for n in range(3):
            with self.subTest(n=n):
                self.assertNotEqual(n, 1)

class Setup(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        raise unittest.SkipTest("no such device")
    def test_x(self):
        pass
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise ImportError('imports every module')")
    (folder / "args_parser.py").write_text(
        textwrap.dedent(
            """
            import argparse, sys
            class Parser:
                def parse_args(self):
                    p = argparse.ArgumentParser()
                    p.add_argument("--dev"); p.add_argument("--gid", type=int)
                    p.add_argument("--port", type=int); p.add_argument("-v", action="store_true")
                    self.args = vars(p.parse_args())
            parser = Parser()
            """
        )
    )
    for name in ("base", "utils", "base_rdmacm", "rdmacm_utils"):
        (folder / f"{name}.py.gz").write_bytes(gzip.compress(b""))
    (folder / "test_all.py.gz").write_bytes(gzip.compress(_MODULE.encode()))
    (folder / "test_broken.py").write_text("import there_is_no_such_module")
    return folder


def _run(source: Path, *only: str) -> dict[str, tuple[str, str]]:
    script = (
        "import json, sys; from dataclasses import asdict; from pathlib import Path;"
        "from rdmalab.rdma import core_tests as c; c.SOURCE = Path(sys.argv[1]);"
        "print(json.dumps([asdict(o) for o in"
        " c.run('rxe0', 3, limit=2, only=json.loads(sys.argv[2]))]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(source), json.dumps(only)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return {
        row["test"].removeprefix("tests.test_all."): (row["outcome"], row["reason"])
        for row in json.loads(done.stdout)
    }


def test_every_test_has_an_outcome_whatever_another_did(source: Path) -> None:
    got = _run(source, "test_all")
    hung = got.pop("T.test_d_hangs_with_a_child")
    assert hung[0] == "failed"
    assert hung[1].startswith("hangs for 2 s in File")
    assert "in test_d_hangs_with_a_child" in hung[1]
    assert got == {
        "setUpClass (tests.test_all.Setup)": ("skipped", "no such device"),
        "T.test_a_passes": ("passed", ""),
        "T.test_b_fails": ("failed", "AssertionError: two lines"),
        "T.test_c_skips": ("skipped", "lacks it"),
        "T.test_e_crashes": ("failed", "the process ended with signal 11"),
        "T.test_f_leaves": ("failed", "the process ended with status 7"),
        "T.test_g_passes_after_all_that": ("passed", ""),
        "T.test_h_sub": ("failed", "AssertionError: 1 == 1"),
    }


def test_nothing_is_left_behind(source: Path) -> None:
    _run(source, "test_all")
    assert not list(Path("/dev/shm").glob("rdma-core-tests-*"))
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert path.read_bytes() != b"sleep\x001000\x00"
        except OSError:
            continue


def test_a_module_that_cannot_be_imported_fails(source: Path) -> None:
    got = _run(source, "test_broken")
    [(name, (outcome, reason))] = got.items()
    assert (name, outcome) == ("tests.test_broken", "failed")
    assert "there_is_no_such_module" in reason


def _report(kernel: str = "7.3.4", reason: str = "E: lost 1", **outcomes: str) -> core_known.Report:
    tests = [
        {"test": name, "outcome": outcome, "seconds": 0.1, "reason": reason, "trace": ""}
        for name, outcome in outcomes.items()
    ]
    data = {"schema": SCHEMA, "kernel": kernel, "device": "rxe0", "tests": tests}
    return core_known.parse(json.dumps(data))


@pytest.fixture
def known(tmp_path: Path) -> core_known.KnownFailures:
    path = tmp_path / "known.toml"
    path.write_text(
        "passed_at_least = 2\n"
        '[[failure]]\ntest = "old"\nmatch = "lost"\nreason = "r"\nuntil = "u"\n'
        '[[failure]]\ntest = "race"\nmatch = "lost"\nreason = "r"\nuntil = "u"\n'
        "sometimes = true\n"
        '[[failure]]\ntest = "lts"\nmatch = "lost"\nreason = "r"\nuntil = "u"\n'
        'kernels = ["6.12."]\n'
    )
    return core_known.load(path)


def test_a_new_failure_is_told_from_a_known_one(known: core_known.KnownFailures) -> None:
    report = _report(a="passed", b="passed", old="failed", lts="failed", new="failed")
    found = core_known.judge(report, known)
    assert [test.test for test in found.unknown] == ["lts", "new"]
    assert [test.test for test, _ in found.known] == ["old"]
    assert found.gone == ()
    found = core_known.judge(
        _report("6.12.118+deb13", a="passed", b="passed", old="failed", lts="failed"), known
    )
    assert found.unknown == ()
    assert [test.test for test, _ in found.known] == ["old", "lts"]


def test_a_known_failure_that_passes_is_said(known: core_known.KnownFailures) -> None:
    found = core_known.judge(_report(a="passed", old="passed", lts="passed"), known)
    assert [entry.test for entry in found.gone] == ["old"]
    assert core_known.lines(found) == ["no longer fails: old; take it off the list"]


def test_a_known_failure_of_another_kind_is_new(known: core_known.KnownFailures) -> None:
    found = core_known.judge(_report(a="passed", reason="E: refused", old="failed"), known)
    assert [test.test for test in found.unknown] == ["old"]


def test_what_fails_sometimes_may_pass(known: core_known.KnownFailures) -> None:
    for outcome, count in (("passed", 0), ("failed", 1)):
        found = core_known.judge(_report(a="passed", old="failed", race=outcome), known)
        assert (found.unknown, found.gone) == ((), ())
        assert len(found.known) == 1 + count


def test_all_skipped_is_no_pass(known: core_known.KnownFailures) -> None:
    found = core_known.judge(_report(a="skipped", b="skipped"), known)
    assert found.missing == "0 passed, expected 2 or more"


def test_the_shipped_list_can_be_read() -> None:
    core_known.load(Path(__file__).parents[1] / "data/rdma_core_known.toml")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "passed_at_least = 1\nextra = 1",
        'passed_at_least = 1\n[[failure]]\ntest = "x"\nmatch = "m"\nreason = ""\nuntil = "u"',
        'passed_at_least = 1\n[[failure]]\ntest = "x"',
        'passed_at_least = "many"',
        "[",
    ],
)
def test_a_list_of_another_shape_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "known.toml").write_text(text)
    with pytest.raises(UsageError):
        core_known.load(tmp_path / "known.toml")
    with pytest.raises(RdmalabError):
        core_known.parse(text)
