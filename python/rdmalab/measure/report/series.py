# SPDX-License-Identifier: Apache-2.0
"""Measurements arranged for reading: rounds of one point, facets, and comparisons.

A *cell* is one point measured by one tool, in one or more rounds. A *facet* holds the cells
that may stand in one chart: they differ in size, transport and tool only. A *comparison* is
the ratio of two cells of one facet and size, round against round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from rdmalab.measure.measurement import Measurement, Point
from rdmalab.measure.report.rows import Row, identity, is_proven, to_row
from rdmalab.measure.report.statistics import Spread, ratio, spread

#: The transport that the others are compared with.
BASELINE_TRANSPORT = "tcp"

#: Our own tool; what any other measured (perftest, iperf3) is the check on it.
OWN_TOOL = "rdmalab"
PROBED_TOOL = "probed"  # ours while eBPF probes are on the driver


@dataclass(frozen=True)
class Cell:
    """All rounds of one point by one tool; ``order`` holds each round's place in the run."""

    tool: str
    point: Point
    link: str
    rounds: tuple[Measurement, ...]
    rows: tuple[Row, ...]
    order: tuple[int, ...]

    @property
    def label(self) -> str:
        """``rxe``, or ``rxe perftest`` where the tool is not ours."""
        if self.tool == OWN_TOOL:
            return self.point.transport
        return f"{self.point.transport} {self.tool}"

    @property
    def proven(self) -> bool:
        """Whether there is a round whose numbers may be shown."""
        return any(map(is_proven, self.rounds))

    def over_rounds(self, figure: Callable[[Row], float | None]) -> Spread | None:
        """A figure's median and range over the proven rounds; ``None`` where any of them
        lacks it: a median of what happened to be there would compare unlike things."""
        values = [figure(row) for row in self.rows if row["proof"]["verdict"] == "proven"]
        present = [value for value in values if value is not None]
        return spread(present) if len(present) == len(values) else None


@dataclass(frozen=True)
class Facet:
    """Cells that differ in size, transport and tool only, by size and then as measured."""

    point: Point
    link: str
    cells: tuple[Cell, ...]
    names_link: bool = False

    @property
    def title(self) -> str:
        """``send latency, event``: what all cells have in common, the usual left unsaid.

        The link is named where the run measured over several.
        """
        point = self.point
        parts = [f"{point.op.replace('_', ' ')} {point.kind}", point.mode]
        if point.kind == "bandwidth":
            parts.append(point.direction)
        if point.qps != 1:
            parts.append(f"{point.qps} QPs")
        if point.service != "RC":
            parts.append(point.service)
        if self.names_link:
            parts.append(self.link)
        return ", ".join(parts)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(sorted({cell.point.size for cell in self.cells}))

    @property
    def labels(self) -> tuple[str, ...]:
        """The curves of this facet's charts, in the order measured."""
        return tuple(dict.fromkeys(cell.label for cell in self.cells))

    def at(self, size: int) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if cell.point.size == size)


@dataclass(frozen=True)
class Comparison:
    """``subject`` divided by ``base``: latencies' p50, or bandwidths.

    ``alternating`` says whether each round of the two was over before the next began; where
    it was not, drift of the machine is in the ratio.
    """

    subject: Cell
    base: Cell
    ratio: Spread
    alternating: bool

    @property
    def figure(self) -> str:
        return "p50" if self.subject.point.kind == "latency" else "MiB/s"


def to_cells(measurements: Sequence[Measurement]) -> tuple[Cell, ...]:
    """Rounds gathered, in the order in which each point was first measured."""
    places: dict[tuple[str, Point, str], list[int]] = {}
    for place, measurement in enumerate(measurements):
        places.setdefault(identity(measurement), []).append(place)
    cells = []
    for (tool, point, link), order in places.items():
        rounds = tuple(measurements[place] for place in order)
        rows = tuple(to_row(one, number) for number, one in enumerate(rounds, 1))
        cells.append(Cell(tool, point, link, rounds, rows, tuple(order)))
    return tuple(cells)


def to_facets(cells: Sequence[Cell]) -> tuple[Facet, ...]:
    """Facets, latencies first, otherwise in the order measured."""
    groups: dict[tuple[Point, str], list[Cell]] = {}
    for cell in cells:
        # Iterations and warm-up are how often, not what: tools differ in them.
        common = replace(cell.point, size=0, transport="", iterations=0, warmup=0)
        groups.setdefault((common, cell.link), []).append(cell)
    several_links = len({link for _, link in groups}) > 1
    facets = [
        Facet(point, link, tuple(sorted(group, key=lambda cell: cell.point.size)), several_links)
        for (point, link), group in groups.items()
    ]
    return tuple(sorted(facets, key=lambda facet: facet.point.kind != "latency"))


def to_comparisons(facets: Sequence[Facet]) -> tuple[Comparison, ...]:
    """Every transport with TCP, and every tool's check with ours, size by size.

    Only proven rounds count, and round k only with round k.
    """
    found = []
    for facet in facets:
        for size in facet.sizes:
            cells = facet.at(size)
            for subject in cells:
                found += [_compare(subject, base) for base in cells if _comparable(subject, base)]
    return tuple(comparison for comparison in found if comparison is not None)


def headline(row: Row) -> float | None:
    """The one figure that a row is compared by: p50 in microseconds, or MiB per second."""
    return row["p50_us"] if row["kind"] == "latency" else row["mib_s"]


def _comparable(subject: Cell, base: Cell) -> bool:
    if subject.tool == PROBED_TOOL:
        return base.tool == OWN_TOOL and subject.point.transport == base.point.transport
    if subject.tool != OWN_TOOL or base.tool == PROBED_TOOL:
        return False
    if subject.point.transport == base.point.transport:
        return base.tool != OWN_TOOL
    return base.tool == OWN_TOOL and base.point.transport == BASELINE_TRANSPORT


def _compare(subject: Cell, base: Cell) -> Comparison | None:
    pairs = [
        (ours, theirs)
        for ours, theirs in zip(map(headline, subject.rows), map(headline, base.rows), strict=False)
        if ours is not None and theirs is not None
    ]
    divided = ratio(pairs)
    if divided is None:
        return None
    return Comparison(subject, base, divided, _alternate(subject.order, base.order))


def _alternate(one: Sequence[int], other: Sequence[int]) -> bool:
    if len(one) != len(other):
        return False
    rounds = list(zip(one, other, strict=True))
    return all(max(this) < min(following) for this, following in pairwise(rounds))
