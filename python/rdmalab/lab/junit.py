# SPDX-License-Identifier: Apache-2.0
"""JUnit XML: from our own results and from KTAP."""

from __future__ import annotations

import re
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from rdmalab.lab import ktap

OUTCOMES = ("passed", "failed", "error", "lost", "skipped")
"""``lost``: the lab went away under the test, which neither failed nor passed; in the XML
it is an ``error`` of type "lost"."""

# What XML 1.0 cannot hold, escaped or not.
_ILLEGAL = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class TestResult:
    """``outcome`` is one of ``OUTCOMES``; ``message`` one line, ``text`` the whole story;
    ``output`` what the test printed; ``seconds`` its wall time."""

    # pytest must not take this for a test.
    __test__ = False

    classname: str
    name: str
    outcome: str
    seconds: float = 0.0
    message: str = ""
    text: str = ""
    output: str = ""

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES:
            raise ValueError(f"no such outcome: {self.outcome!r}")


@dataclass(frozen=True)
class Suite:
    """Results that belong together. ``started`` is in seconds since the epoch."""

    name: str
    results: tuple[TestResult, ...]
    properties: Mapping[str, str] = field(default_factory=dict)
    started: float | None = None

    def counts(self) -> dict[str, int]:
        """How many results of each outcome, zeros included."""
        found = Counter(result.outcome for result in self.results)
        return {outcome: found[outcome] for outcome in OUTCOMES}


def from_ktap(name: str, report: ktap.Report) -> Suite:
    """One result per leaf, and one per node of the tree at which the format is broken, so
    that no broken report looks green."""
    results = [
        TestResult(
            ".".join((name, *path[:-1])),
            path[-1],
            _OF_KTAP[case.outcome] if not case.problems else "failed",
            message=case.reason or "; ".join(case.problems),
            text="\n".join((*case.problems, *case.diagnostics)),
        )
        for path, case in report.walk()
        if not case.children or case.problems or case.outcome is ktap.Outcome.MISSING
    ]
    problems = list(report.problems)
    if report.bailed is not None:
        problems.append(f"bailed out: {report.bailed}")
    if not report.cases:
        problems.append("no results")
    if problems:
        line = "; ".join(problems)
        results.append(TestResult(name, "(report)", "error", message=line, text=line))
    return Suite(name, tuple(results))


_OF_KTAP = {
    ktap.Outcome.PASSED: "passed",
    ktap.Outcome.FAILED: "failed",
    ktap.Outcome.SKIPPED: "skipped",
    # A failure that was announced is, as in pytest's own files, a skip with its reason.
    ktap.Outcome.TODO: "skipped",
    ktap.Outcome.MISSING: "error",
}


def to_xml(suites: Iterable[Suite]) -> bytes:
    """A ``<testsuites>`` document in UTF-8. Characters that XML cannot hold are written
    as "\\xNN"."""
    root = ET.Element("testsuites")
    for suite in suites:
        root.append(_suite(suite))
    ET.indent(root)
    document: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=True)
    return document + b"\n"


def write(path: Path, suites: Iterable[Suite]) -> None:
    """Write a document, at once."""
    data = to_xml(suites)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".junit-", delete=False) as file:
        file.write(data)
    Path(file.name).chmod(0o644)
    Path(file.name).replace(path)


def _suite(suite: Suite) -> ET.Element:
    counts = suite.counts()
    element = ET.Element(
        "testsuite",
        {
            "name": _legal(suite.name),
            "tests": str(len(suite.results)),
            "failures": str(counts["failed"]),
            "errors": str(counts["error"] + counts["lost"]),
            "skipped": str(counts["skipped"]),
            "time": f"{sum(result.seconds for result in suite.results):.3f}",
        },
    )
    if suite.started is not None:
        element.set(
            "timestamp", datetime.fromtimestamp(suite.started, UTC).isoformat("T", "seconds")
        )
    if suite.properties:
        properties = ET.SubElement(element, "properties")
        for name, value in suite.properties.items():
            ET.SubElement(properties, "property", {"name": _legal(name), "value": _legal(value)})
    for result in suite.results:
        element.append(_result(result))
    return element


def _result(result: TestResult) -> ET.Element:
    element = ET.Element(
        "testcase",
        {
            "classname": _legal(result.classname),
            "name": _legal(result.name),
            "time": f"{result.seconds:.3f}",
        },
    )
    tag = {"failed": "failure", "error": "error", "lost": "error", "skipped": "skipped"}.get(
        result.outcome
    )
    if tag is not None:
        message = _legal(" ".join(result.message.split()))
        detail = ET.SubElement(element, tag, {"type": result.outcome, "message": message})
        if result.text:
            detail.text = _legal(result.text)
    if result.output:
        ET.SubElement(element, "system-out").text = _legal(result.output)
    return element


def _legal(text: str) -> str:
    return _ILLEGAL.sub(lambda found: ascii(found[0])[1:-1], text)
