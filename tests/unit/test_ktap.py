# SPDX-License-Identifier: Apache-2.0
"""KTAP as KUnit and kselftest print it, and what breaks it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmalab.lab.ktap import Case, Outcome, Report, parse

P, F, S, T, M = (
    Outcome.PASSED,
    Outcome.FAILED,
    Outcome.SKIPPED,
    Outcome.TODO,
    Outcome.MISSING,
)

KUNIT = """\
[    1.100000] KTAP version 1
[    1.100001] 1..2
[    1.100002]     KTAP version 1
[    1.100003]     # Subtest: usb4_rdma_ring
[    1.100004]     # module: usb4_rdma
[    1.100005]     1..3
[    1.100006]         KTAP version 1
[    1.100007]         # Subtest: sizes
[    1.100008]         ok 1 one byte
[    1.100009]         ok 2 a page
[    1.100010]     # sizes: pass:2 fail:0 skip:0 total:2
[    1.100011]     ok 1 sizes
[    1.100012]     # wraps: EXPECTATION FAILED at ring.c:40
[    1.100013]     Expected head == 1, but
[    1.100014]     not ok 2 wraps
[    1.100015]     ok 3 drains # SKIP no NHI
[    1.100016] # usb4_rdma_ring: pass:1 fail:1 skip:1 total:3
[    1.100017] not ok 1 usb4_rdma_ring
[    1.200000] usb 1-1: new device
[    1.200001]     KTAP version 1
[    1.200002]     # Subtest: other
[    1.200003]     1..1
[    1.200004]     ok 1 a
[    1.200005] ok 2 other
"""

KSELFTEST = """\
TAP version 13
1..2
# timeout set to 45
# selftests: net: one.sh
# TAP version 13
# 1..2
# ok 1 ping
# ok 2 pong # SKIP no netdev
# # Totals: pass:1 fail:0 xfail:0 xpass:0 skip:1 error:0
ok 1 selftests: net: one.sh
# selftests: net: two.sh
# something went wrong
not ok 2 selftests: net: two.sh # exit=1
"""


def _flat(report: Report) -> list[tuple[str, Outcome]]:
    return [("/".join(path), case.outcome) for path, case in report.walk()]


def test_kunit() -> None:
    report = parse(KUNIT)
    assert report.version == "KTAP version 1"
    assert report.plan == 2
    assert _flat(report) == [
        ("usb4_rdma_ring", F),
        ("usb4_rdma_ring/sizes", P),
        ("usb4_rdma_ring/sizes/one byte", P),
        ("usb4_rdma_ring/sizes/a page", P),
        ("usb4_rdma_ring/wraps", F),
        ("usb4_rdma_ring/drains", S),
        ("other", P),
        ("other/a", P),
    ]
    ring = report.cases[0]
    assert "# wraps: EXPECTATION FAILED at ring.c:40" in ring.children[1].diagnostics
    assert ring.children[2].reason == "no NHI"
    assert not report.ok


def test_kunits_parameters_have_no_plan_but_totals() -> None:
    assert parse(KUNIT).cases[0].children[0].problems == ()
    short = parse(KUNIT.replace("[    1.100009]         ok 2 a page\n", ""))
    assert "no plan" in short.cases[0].children[0].problems


def test_kselftest() -> None:
    report = parse(KSELFTEST)
    assert _flat(report) == [
        ("selftests: net: one.sh", P),
        ("selftests: net: one.sh/ping", P),
        ("selftests: net: one.sh/pong", S),
        ("selftests: net: two.sh", F),
    ]
    assert "# something went wrong" in report.cases[1].diagnostics


def test_a_good_report_is_ok() -> None:
    report = parse("KTAP version 1\n1..2\nok 1 a\nok 2 - b # SKIP why\n")
    assert report.ok
    assert [case.name for case in report.cases] == ["a", "b"]


@pytest.mark.parametrize("version", ["KTAP version 1", "KTAP version 2", "TAP version 13"])
def test_versions(version: str) -> None:
    assert parse(f"{version}\n1..1\nok 1 a\n").ok


@pytest.mark.parametrize(
    ("line", "outcome", "name", "reason"),
    [
        ("ok 1 name", P, "name", ""),
        ("ok 1 - name with # inside", P, "name with # inside", ""),
        ("not ok 1 name", F, "name", ""),
        ("ok 1 # SKIP all of it", S, "test 1", "all of it"),
        ("ok 1 name # skip: lower case", S, "name", "lower case"),
        ("not ok 1 name # SKIP", S, "name", ""),
        ("not ok 1 name # TODO known", T, "name", "known"),
        ("ok 1 name # TODO fixed already", P, "name", "fixed already"),
        ("ok 1 name # XFAIL expected", T, "name", "expected"),
        ("not ok 1 name # TIMEOUT 45 seconds", F, "name", "timeout 45 seconds"),
        ("not ok 1 name # ERROR broke", F, "name", "error broke"),
        ("not ok 1", F, "test 1", ""),
    ],
)
def test_result_lines(line: str, outcome: Outcome, name: str, reason: str) -> None:
    [case] = parse(f"KTAP version 1\n1..1\n{line}\n").cases
    assert (case.outcome, case.name, case.reason) == (outcome, name, reason)
    assert case.problems == ()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("1..1\nok 1 a\n", "no version line"),
        ("KTAP version 1\nok 1 a\n", "no plan"),
        ("KTAP version 1\n1..2\nok 1 a\n", "1 of 2 planned results are missing"),
        ("KTAP version 1\n1..1\nok 1 a\nok 2 b\n", "2 results for a plan of 1"),
        ("KTAP version 1\n1..1\n1..2\nok 1 a\n", "a second plan"),
        ("KTAP version 1\n1..99999999999\nok 1 a\n", "an absurd plan"),
        ("", "no version line"),
    ],
)
def test_a_report_that_breaks_the_format_is_not_ok(text: str, problem: str) -> None:
    report = parse(text)
    assert any(problem in each for each in report.problems), report.problems
    assert not report.ok


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("ok 2 a\nok 2 b\n", "number 2 where 1 was due"),
        ("ok 1 a\nok 1 b\n", "number 1 where 2 was due"),
        ("ok a\nok b\n", "no number"),
        ("    1..1\n    not ok 1 child\nok 1 p\nok 2 q\n", "says ok over 'child'"),
        ("    1..2\n    ok 1 child\nok 1 p\nok 2 q\n", "1 of 2 planned results are missing"),
        (
            "    # Subtest: one\n    1..1\n    ok 1 c\nok 1 other\nok 2 q\n",
            "result of 'other' after the subtests of 'one'",
        ),
    ],
)
def test_a_case_that_breaks_the_format_is_not_ok(text: str, problem: str) -> None:
    report = parse("KTAP version 1\n1..2\n" + text)
    problems = [each for _, case in report.walk() for each in case.problems]
    assert any(problem in each for each in problems), problems
    assert not report.ok


def test_missing_results_are_cases() -> None:
    report = parse("KTAP version 1\n1..3\nok 1 a\nok 3 c\n")
    assert [(case.name, case.outcome) for case in report.cases] == [
        ("a", P),
        ("c", P),
        ("test 2", M),
    ]


def test_a_crash_before_the_plan() -> None:
    report = parse("KTAP version 1\nBUG: kernel NULL pointer dereference\n")
    assert not report.ok
    assert report.cases == ()


def test_a_crash_in_a_subtest() -> None:
    report = parse(
        "KTAP version 1\n1..2\n    KTAP version 1\n    # Subtest: ring\n    1..2\n"
        "    ok 1 fills\n    # wraps: about to\nOops: 0002 [#1] SMP\n"
    )
    assert _flat(report) == [
        ("ring", M),
        ("ring/fills", P),
        ("ring/test 2", M),
        ("test 2", M),
    ]
    assert not report.ok


def test_bail_out_ends_it() -> None:
    report = parse("KTAP version 1\n1..2\nok 1 a\nBail out! no memory\nok 2 b\n")
    assert report.bailed == "no memory"
    assert _flat(report) == [("a", P), ("test 2", M)]
    assert not report.ok


def test_noise_between_lines_is_passed_over() -> None:
    noisy = "".join(f"noise {n}\r\n{line}\r\n" for n, line in enumerate(KUNIT.splitlines()))
    assert _flat(parse(noisy)) == _flat(parse(KUNIT))


@given(st.text(alphabet="ok not 12.#-\nKTAP version\tSKIPBail!:", max_size=300))
@settings(max_examples=500, deadline=None)
def test_any_text_is_read(text: str) -> None:
    parse(text)


_NAMES = st.from_regex(r"[a-z][a-z_ ]{0,8}[a-z]", fullmatch=True)
_LEAVES = st.builds(
    lambda name, outcome: Case(0, name, outcome), _NAMES, st.sampled_from([P, F, S, T])
)
_TREES = st.recursive(
    _LEAVES,
    lambda below: st.builds(
        lambda name, children: Case(
            0, name, F if any(c.outcome is F for c in children) else P, children=tuple(children)
        ),
        _NAMES,
        st.lists(below, min_size=1, max_size=3),
    ),
    max_leaves=12,
)


def _render(cases: list[Case], indent: str, step: str) -> list[str]:
    lines = [f"{indent}KTAP version 1", f"{indent}1..{len(cases)}"]
    for number, case in enumerate(cases, 1):
        if case.children:
            lines += _render(list(case.children), indent + step, step)
        word = "ok" if case.outcome in (P, S) else "not ok"
        directive = {S: " # SKIP x", T: " # TODO x"}.get(case.outcome, "")
        lines.append(f"{indent}{word} {number} {case.name}{directive}")
    return lines


@given(st.lists(_TREES, min_size=1, max_size=4), st.sampled_from(["  ", "    ", "# ", "\t"]))
@settings(max_examples=300, deadline=None)
def test_what_is_rendered_is_read(trees: list[Case], step: str) -> None:
    report = parse("\n".join(_render(trees, "", step)) + "\n")
    wanted = [("/".join(path), case.outcome) for tree in trees for path, case in tree.walk()]
    assert _flat(report) == wanted
    assert report.problems == ()
    assert report.ok == (not any(outcome is F for _, outcome in wanted))


@given(st.lists(_TREES, min_size=1, max_size=4), st.data())
@settings(max_examples=300, deadline=None)
def test_a_text_that_is_cut_is_never_ok(trees: list[Case], data: st.DataObject) -> None:
    lines = _render(trees, "", "    ")
    cut = data.draw(st.integers(0, len(lines) - 1))
    report = parse(lines[:cut])
    assert not report.ok
    seen = Counter(outcome for _, outcome in _flat(report))
    assert seen[P] <= sum(1 for tree in trees for _, case in tree.walk() if case.outcome is P)
