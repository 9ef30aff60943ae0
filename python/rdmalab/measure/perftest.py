# SPDX-License-Identifier: Apache-2.0
"""What perftest prints, read."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from rdmalab.errors import RdmalabError
from rdmalab.measure.measurement import Point

_LATENCY = ("t_min", "t_max", "t_typical", "t_avg", "t_stdev", "99% percentile", "99.9% percentile")
_LATENCY_NAMES = ("min", "max", "p50", "mean", "stdev", "p99", "p999")
_BANDWIDTH = ("BW peak", "BW average", "MsgRate")


@dataclass(frozen=True)
class Report:
    """A result line. ``given_us`` holds min, max, p50, mean, stdev, p99 and p999 in
    microseconds: half a round trip for send and write, whole ones for read and atomics.
    ``max`` and the percentiles leave out perftest's two slowest samples (its
    ``LAT_MEASURE_TAIL``). ``mib_s`` is the average bandwidth in MiB/s."""

    size: int
    iterations: int
    given_us: dict[str, float] = field(default_factory=dict)
    mib_s: float | None = None


def parse(output: str, point: Point) -> Report:
    """The result that the client printed for ``point``.

    Columns are found by their titles, not by their places, since versions and options add
    some. Raises RdmalabError for a text without a result of the point's size, and for a
    unit that is not the one read here.
    """
    lines = output.splitlines()
    for index, line in enumerate(lines):
        if not line.lstrip().startswith("#bytes"):
            continue
        for values in lines[index + 1 :]:
            words = values.split()
            if not words or not words[0].isdigit():
                continue
            report = _row(line, words, point)
            if report.size == point.size:
                return report
            break
    raise RdmalabError(
        "perftest printed no result", seen=_seen(lines), todo="run it by hand on the node"
    )


def _row(header: str, words: list[str], point: Point) -> Report:
    titles = _titles(header)
    if len(words) < len(titles):
        raise RdmalabError(
            "a result line of perftest is short", seen=f"{' '.join(words)!r} under {header!r}"
        )
    try:
        values = dict(zip((name for name, _ in titles), map(float, words), strict=False))
    except ValueError:
        raise RdmalabError(
            "a result line of perftest is no row of numbers", seen=" ".join(words)[:120]
        ) from None
    units = dict(titles)
    wanted = _LATENCY if point.kind == "latency" else _BANDWIDTH[1:2]
    unit = "usec" if point.kind == "latency" else "MiB/sec"
    for name in wanted:
        if name not in values or units[name] != unit:
            raise RdmalabError(
                f"perftest printed no {name} in {unit}", seen=" ".join(header.split())
            )
    size, iterations = int(values["#bytes"]), int(values["#iterations"])
    if point.kind == "latency":
        given = {new: values[old] for old, new in zip(_LATENCY, _LATENCY_NAMES, strict=True)}
        return Report(size, iterations, given_us=given)
    return Report(size, iterations, mib_s=values["BW average"])


def _titles(header: str) -> list[tuple[str, str]]:
    """``("t_min", "usec")`` for each column of a header line."""
    return [
        (" ".join(name.split()), unit)
        for name, unit in re.findall(
            r"(#\w+|t_\w+|[\d.]+% percentile|BW peak|BW average|MsgRate)(?:\[([^\]]*)\])?", header
        )
    ]


def _seen(lines: list[str]) -> str:
    said = [line.strip() for line in lines if line.strip(" -\t")]
    return said[-1][:200] if said else "nothing"
