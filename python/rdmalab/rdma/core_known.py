# SPDX-License-Identifier: Apache-2.0
"""Judges a run of rdma-core's tests against a list of failures that are known.

The list is TOML: ``passed_at_least`` (a run in which everything is skipped is no pass), and
one ``[[failure]]`` for each test that fails, with ``test``, ``match`` (a part of the line it
fails with: another failure of the same test is not known), ``reason`` (why it fails), ``until``
(what has to change for the entry to go), where it fails on some kernels only ``kernels``
(prefixes of their releases), and ``sometimes = true`` where it may pass as well.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rdmalab.errors import RdmalabError, UsageError
from rdmalab.rdma.core_tests import SCHEMA, Outcome


@dataclass(frozen=True)
class Known:
    """A test that fails, and why."""

    test: str
    match: str
    reason: str
    until: str
    kernels: tuple[str, ...] = ()
    sometimes: bool = False

    def on(self, kernel: str) -> bool:
        """Whether it is expected to fail on that kernel release."""
        return not self.kernels or kernel.startswith(self.kernels)


@dataclass(frozen=True)
class KnownFailures:
    """The whole list."""

    passed_at_least: int
    failures: tuple[Known, ...]


@dataclass(frozen=True)
class Report:
    """What ``core_tests`` printed."""

    kernel: str
    device: str
    tests: tuple[Outcome, ...]

    def count(self, outcome: str) -> int:
        return sum(test.outcome == outcome for test in self.tests)


@dataclass(frozen=True)
class Judgement:
    """``unknown`` failures are not in the list, ``known`` ones are; ``gone`` are entries of
    the list whose test should have failed and did not. ``missing`` says that too few passed,
    ``""`` that enough did."""

    unknown: tuple[Outcome, ...]
    known: tuple[tuple[Outcome, Known], ...]
    gone: tuple[Known, ...]
    missing: str


def load(path: Path) -> KnownFailures:
    """The list in a file; ``UsageError`` for one of another shape."""
    try:
        table = tomllib.loads(path.read_text("utf-8"))
        found = KnownFailures(
            int(table.pop("passed_at_least")),
            tuple(
                Known(**{**entry, "kernels": tuple(entry.get("kernels", ()))})
                for entry in table.pop("failure", ())
            ),
        )
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"no list of known failures: {path}", seen=repr(error)) from error
    if table:
        raise UsageError(f"{path}: unknown key {next(iter(table))}")
    for entry in found.failures:
        if not (entry.test and entry.match and entry.reason and entry.until):
            raise UsageError(f"{path}: {entry.test or 'an entry'} lacks a match, reason or end")
    return found


def parse(text: str) -> Report:
    """What ``core_tests`` printed, as a report; ``RdmalabError`` for anything else."""
    try:
        data = json.loads(text)
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']!r}")
        tests = tuple(Outcome(**test) for test in data["tests"])
        return Report(data["kernel"], data["device"], tests)
    except (KeyError, TypeError, ValueError) as error:
        raise RdmalabError("no report of rdma-core's tests", seen=repr(error)) from error


def judge(report: Report, known: KnownFailures) -> Judgement:
    """Each failure is known or unknown, each entry of the list true or gone."""
    expected = {entry.test: entry for entry in known.failures if entry.on(report.kernel)}
    unknown, seen = [], []
    for test in report.tests:
        if test.outcome == "failed":
            entry = expected.get(test.test)
            if entry is not None and entry.match in test.reason:
                seen.append((test, entry))
            else:
                unknown.append(test)
    failed = {test.test for test in report.tests if test.outcome == "failed"}
    passed = report.count("passed")
    enough = passed >= known.passed_at_least
    return Judgement(
        unknown=tuple(unknown),
        known=tuple(seen),
        gone=tuple(e for e in expected.values() if e.test not in failed and not e.sometimes),
        missing="" if enough else f"{passed} passed, expected {known.passed_at_least} or more",
    )


def lines(judgement: Judgement) -> Sequence[str]:
    """What a reader has to know, one line each."""
    return [
        *(f"failed: {test.test}: {test.reason}" for test in judgement.unknown),
        *(f"known failure: {test.test}: {entry.reason}" for test, entry in judgement.known),
        *(f"no longer fails: {entry.test}; take it off the list" for entry in judgement.gone),
        *([judgement.missing] if judgement.missing else []),
    ]
