# SPDX-License-Identifier: Apache-2.0
"""KTAP and TAP (versions 1 and 2, 13 and 14) read into a tree, strictly.

Source: Documentation/dev-tools/ktap.rst; KUnit's and kselftest's habits where they differ
(KUnit indents subtests, the kselftest runner prefixes them with "# "). What the text does
not say is never taken for a pass: a missing result, a plan that does not match, or a
parent that says ok over a failed child makes the report not ok.
"""

from __future__ import annotations

import enum
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rdmalab.lab.console import clean


class Outcome(enum.Enum):
    """``TODO`` is a failure that the test itself announces as known; ``MISSING`` a test
    that was planned or begun and gave no result."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    TODO = "todo"
    MISSING = "missing"


@dataclass(frozen=True)
class Case:
    """One result line with its subtests. ``number`` as in the text (0: none was given).
    ``reason`` is a directive's text; ``diagnostics`` are the lines before the result that
    are no results; ``problems`` say in words what breaks the format here."""

    number: int
    name: str
    outcome: Outcome
    reason: str = ""
    diagnostics: tuple[str, ...] = ()
    children: tuple[Case, ...] = ()
    problems: tuple[str, ...] = ()

    def walk(self, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Case]]:
        """This case and all below it, each with the names that lead to it."""
        path = (*prefix, self.name)
        yield path, self
        for child in self.children:
            yield from child.walk(path)


@dataclass(frozen=True)
class Report:
    """A whole text. ``version`` is its first line ("KTAP version 1"), empty if there was
    none; ``plan`` the number of tests announced; ``bailed`` the reason of a "Bail out!"."""

    version: str
    plan: int | None
    cases: tuple[Case, ...]
    problems: tuple[str, ...] = ()
    bailed: str | None = None

    def walk(self) -> Iterator[tuple[tuple[str, ...], Case]]:
        """Every case, parents before their children."""
        for case in self.cases:
            yield from case.walk()

    def leaves(self) -> Iterator[tuple[tuple[str, ...], Case]]:
        """The cases without subtests: what is counted."""
        return ((path, case) for path, case in self.walk() if not case.children)

    @property
    def ok(self) -> bool:
        """Whether tests ran, all that were planned, and nothing failed or broke."""
        bad = (Outcome.FAILED, Outcome.MISSING)
        return (
            not self.problems
            and self.bailed is None
            and bool(self.cases)
            and all(case.outcome not in bad and not case.problems for _, case in self.walk())
        )


_VERSION = re.compile(r"^(K?TAP version \d+)$")
_PLAN = re.compile(r"^1\.\.(\d+)(?:\s*#\s*(.*))?$")
_RESULT = re.compile(r"^(not ok|ok)\b(?:[ \t]+(\d+))?[ \t]*(?:-[ \t]*)?(.*)$")
_DIRECTIVE = re.compile(
    r"^(.*?)(?:^|[ \t])#[ \t]*(SKIP|TODO|XFAIL|TIMEOUT|ERROR|exit=\d+)\b:?[ \t]*(.*)$", re.I
)
_BAIL = re.compile(r"^Bail out!\s*(.*)$")
_SUBTEST = re.compile(r"^# Subtest: (.*)$")
_TOTALS = re.compile(r"^# .*\bpass:(\d+) fail:(\d+) (?:\w+:\d+ )*?skip:(\d+)\b")
_MAX_PLAN = 1_000_000


@dataclass
class _Block:
    indent: int
    version: str = ""
    plan: int | None = None
    subject: str = ""
    cases: list[Case] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    diagnostics: list[str] = field(default_factory=list)
    pending: _Block | None = None  # the subtests of the result that comes next


def parse(text: str | Iterable[str]) -> Report:
    """Read a text, or its lines. Time stamps of a console, carriage returns and lines that
    are no KTAP are passed over (kept as diagnostics). Never raises."""
    stack = [_Block(0)]
    bailed: str | None = None
    for raw in text.splitlines() if isinstance(text, str) else text:
        indent, line = _unindent(raw)
        kind = _kind(line)
        if kind is None:
            if line:
                _add_diagnostic(stack, line)
            continue
        if kind == "subtest":
            # Without a version line this opens the block; after one it names it.
            _open(stack, indent if indent else stack[-1].indent, line)
            stack[-1].subject = _SUBTEST.sub(r"\1", line)
            continue
        if found := _BAIL.match(line):
            bailed = found[1].strip()
            break
        _open(stack, indent, line)
        block = stack[-1]
        if found := _VERSION.match(line):
            _begin(stack, block, found[1])
        elif found := _PLAN.match(line):
            _plan(block, int(found[1]), found[2] or "")
        elif found := _RESULT.match(line):
            _result(block, found)
    while len(stack) > 1:
        _leave(stack)
    root = stack[0]
    if not root.version:
        root.problems.insert(0, "no version line")
    cases, problems = _finish(root, bailed is not None, nested=False)
    return Report(root.version, root.plan, cases, problems, bailed)


def _unindent(raw: str) -> tuple[int, str]:
    line = clean(raw.encode(errors="replace")[:65536].replace(b"\n", b""))
    body = line.lstrip(" \t")
    indent = len(line) - len(body)
    # The kselftest runner's "# " before each line of a child is one more level.
    while body.startswith("# ") and _kind(body[2:].lstrip()) not in (None, "subtest"):
        inner = body[2:].lstrip()
        indent += len(body) - len(inner)
        body = inner
    return indent, body


def _kind(line: str) -> str | None:
    if line.startswith("# "):
        if _SUBTEST.match(line):
            return "subtest"
        inner = line[2:].lstrip()
        return _kind(inner) if inner.startswith("# ") or _strict(inner) else None
    return "line" if _strict(line) or _BAIL.match(line) else None


def _strict(line: str) -> bool:
    return any(pattern.match(line) for pattern in (_VERSION, _PLAN, _RESULT))


def _add_diagnostic(stack: list[_Block], line: str) -> None:
    diagnostics = stack[-1].diagnostics
    diagnostics.append(line)
    del diagnostics[:-1000]


def _open(stack: list[_Block], indent: int, line: str) -> None:
    """Make the block of that indentation the innermost."""
    while len(stack) > 1 and indent < stack[-1].indent:
        _leave(stack)
    top = stack[-1]
    if indent > top.indent:
        if top is stack[0] and not top.version and not top.cases and top.plan is None:
            top.indent = indent  # the whole text is indented
            return
        block = _Block(indent)
        stack.append(block)
        if not _VERSION.match(line) and not _SUBTEST.match(line):
            block.version = "none"
    elif top.subject and _SUBTEST.match(line) and top.cases:
        _leave(stack)
        stack.append(_Block(indent))


def _begin(stack: list[_Block], block: _Block, version: str) -> None:
    if block.version and (block.cases or block.plan is not None):
        if block is stack[0]:
            block.problems.append(f"a second {version!r}")
            return
        # The block before it at this indentation never got its parent's result.
        _leave(stack)
        stack.append(_Block(block.indent))
        block = stack[-1]
    block.version = version


def _leave(stack: list[_Block]) -> None:
    block = stack.pop()
    parent = stack[-1]
    if parent.pending is not None:
        _orphan(parent)
    parent.pending = block


def _orphan(parent: _Block) -> None:
    """Subtests whose parent gave no result: it crashed."""
    block, parent.pending = parent.pending, None
    if block is None:
        return
    children, problems = _finish(block, False)
    name = block.subject or f"test {len(parent.cases) + 1}"
    parent.cases.append(
        Case(
            0,
            name,
            Outcome.MISSING,
            "subtests ran, but no result came",
            tuple(block.diagnostics),
            children,
            problems,
        )
    )


def _plan(block: _Block, count: int, directive: str) -> None:
    if block.plan is not None:
        block.problems.append(f"a second plan, 1..{count} after 1..{block.plan}")
    elif count > _MAX_PLAN:
        block.problems.append(f"an absurd plan, 1..{count}")
    else:
        block.plan = count
        if count == 0 and directive:
            block.diagnostics.append(directive)


def _result(block: _Block, found: re.Match[str]) -> None:
    said, number, rest = found[1], int(found[2] or 0), found[3].strip()
    name, word, reason = rest, "", ""
    if directive := _DIRECTIVE.match(rest):
        name, word, reason = directive[1].strip(), directive[2].upper(), directive[3].strip()
    outcome = Outcome.PASSED if said == "ok" else Outcome.FAILED
    problems: list[str] = []
    if word == "SKIP":
        outcome = Outcome.SKIPPED
    elif word in ("TODO", "XFAIL"):
        # An ok TODO has passed unexpectedly, which is still a pass.
        outcome = Outcome.PASSED if said == "ok" and word == "TODO" else Outcome.TODO
    elif word:
        outcome = Outcome.FAILED
        reason = f"{word.lower()} {reason}".strip()
    expected = 1 + max((case.number for case in block.cases), default=0)
    if number == 0:
        problems.append("no number")
    elif number != expected:
        problems.append(f"number {number} where {expected} was due")
    children: tuple[Case, ...] = ()
    diagnostics = list(block.diagnostics)
    block.diagnostics.clear()
    if block.pending is not None:
        below, block.pending = block.pending, None
        if below.subject and name and below.subject != name:
            problems.append(f"result of {name!r} after the subtests of {below.subject!r}")
        children, broken = _finish(below, False)
        problems += broken
        diagnostics += below.diagnostics
        name = name or below.subject
        bad = [c for c in children if c.outcome in (Outcome.FAILED, Outcome.MISSING) or c.problems]
        if bad and outcome in (Outcome.PASSED, Outcome.SKIPPED):
            problems.append(f"says {said} over {bad[0].name!r}, which is {bad[0].outcome.value}")
    if problems and outcome is Outcome.PASSED and children:
        outcome = Outcome.FAILED
    block.cases.append(
        Case(
            number,
            name or f"test {number or expected}",
            outcome,
            reason,
            tuple(diagnostics),
            children,
            tuple(problems),
        )
    )


def _totals_agree(block: _Block) -> bool:
    """KUnit does not know how many parameters a test has, and plans none; what it says
    afterwards, if there was more than one, has to agree."""
    counts = Counter(case.outcome for case in block.cases)
    seen = [counts[each] for each in (Outcome.PASSED, Outcome.FAILED, Outcome.SKIPPED)]
    totals = [found for line in block.diagnostics if (found := _TOTALS.match(line))]
    if not totals:
        return len(block.cases) == 1
    return [int(number) for number in totals[-1].groups()] == seen


def _finish(
    block: _Block, bailed: bool, nested: bool = True
) -> tuple[tuple[Case, ...], tuple[str, ...]]:
    """The block's cases, completed with those that the plan promised, and its problems."""
    _orphan(block)
    problems = list(block.problems)
    if block.plan is None:
        if not bailed and not (nested and _totals_agree(block)):
            problems.append("no plan")
        return tuple(block.cases), tuple(problems)
    given = {case.number for case in block.cases if case.number}
    unnumbered = sum(1 for case in block.cases if not case.number)
    missing = [number for number in range(1, block.plan + 1) if number not in given]
    # Results without a number, or whose parent crashed, stand for as many of the missing.
    missing = missing[unnumbered:]
    if missing:
        problems.append(f"{len(missing)} of {block.plan} planned results are missing")
    surplus = len(block.cases) - block.plan
    if surplus > 0:
        problems.append(f"{len(block.cases)} results for a plan of {block.plan}")
    reason = "bailed out" if bailed else "planned, but no result came"
    cases = block.cases + [
        Case(number, f"test {number}", Outcome.MISSING, reason) for number in missing[:1000]
    ]
    return tuple(cases), tuple(problems)
