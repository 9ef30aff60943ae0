# SPDX-License-Identifier: Apache-2.0
"""JUnit files, read back by another's parser."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from junitparser import Error, Failure, JUnitXml, Skipped

from rdmalab.lab import junit, ktap
from rdmalab.lab.junit import OUTCOMES, Suite, TestResult

RESULTS = st.builds(
    TestResult,
    st.text(max_size=20),
    st.text(max_size=20),
    st.sampled_from(OUTCOMES),
    st.floats(0, 1e4),
    st.text(max_size=40),
    st.text(max_size=40),
    st.text(max_size=40),
)


@given(st.lists(RESULTS, max_size=8), st.dictionaries(st.text(max_size=5), st.text(max_size=5)))
@settings(max_examples=200, deadline=None)
def test_any_results_are_valid_and_counted(
    results: list[TestResult], properties: dict[str, str]
) -> None:
    suite = Suite("s", tuple(results), properties, 0.0)
    document = JUnitXml.fromstring(junit.to_xml([suite]))
    [read] = list(document)
    counts = suite.counts()
    assert read.tests == len(results) == len(list(read))
    assert read.failures == counts["failed"]
    assert read.errors == counts["error"] + counts["lost"]
    assert read.skipped == counts["skipped"]
    kinds = {"failed": Failure, "error": Error, "lost": Error, "skipped": Skipped}
    for case, result in zip(read, results, strict=True):
        assert [type(each) for each in case.result] == [
            kinds[result.outcome] for _ in range(result.outcome != "passed")
        ]


def test_lost_is_neither_failed_nor_passed(tmp_path: Path) -> None:
    path = tmp_path / "junit.xml"
    result = TestResult("t", "test_x", "lost", 1.5, "node0: QEMU ended", "more\x00text", "out")
    junit.write(path, [Suite("vm", (result,))])
    [suite] = list(JUnitXml.fromfile(str(path)))
    [case] = list(suite)
    [error] = case.result
    assert isinstance(error, Error)
    assert (error.type, error.message, error.text) == ("lost", "node0: QEMU ended", "more\\x00text")
    assert case.system_out == "out"
    assert [each.name for each in tmp_path.iterdir()] == ["junit.xml"]


def test_an_unknown_outcome_is_a_bug() -> None:
    with pytest.raises(ValueError, match="no such outcome"):
        TestResult("a", "b", "fine")


def test_ktap_leaves_become_results() -> None:
    report = ktap.parse(
        "KTAP version 1\n1..2\n    KTAP version 1\n    # Subtest: suite\n    1..3\n"
        "    ok 1 good\n    # expected 1, seen 2\n    not ok 2 bad\n"
        "    ok 3 none # SKIP no device\n"
        "not ok 1 suite\nnot ok 2 known # TODO soon\n"
    )
    suite = junit.from_ktap("kunit", report)
    assert [(r.classname, r.name, r.outcome, r.message) for r in suite.results] == [
        ("kunit.suite", "good", "passed", ""),
        ("kunit.suite", "bad", "failed", ""),
        ("kunit.suite", "none", "skipped", "no device"),
        ("kunit", "known", "skipped", "soon"),
    ]
    assert "expected 1, seen 2" in suite.results[1].text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no ktap at all\n",
        "KTAP version 1\n1..2\nok 1 a\n",
        "KTAP version 1\n1..1\nBail out! no memory\n",
        "KTAP version 1\n1..1\n    1..1\n    not ok 1 child\nok 1 parent\n",
    ],
)
def test_a_broken_report_is_never_green(text: str) -> None:
    report = ktap.parse(text)
    assert not report.ok
    counts = junit.from_ktap("k", report).counts()
    assert counts["error"] + counts["failed"] > 0
