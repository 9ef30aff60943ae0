# SPDX-License-Identifier: Apache-2.0
"""The report's charts: distributions, figures against size, probes' histograms."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rdmalab.measure.measurement import Measurement
from rdmalab.measure.report.rows import Row, is_proven, row_percentiles
from rdmalab.measure.report.scale import (
    Scale,
    Tick,
    linear_scale,
    log_scale,
    percentile_scale,
    size_scale,
    time_scale,
)
from rdmalab.measure.report.series import OWN_TOOL, Cell, Facet
from rdmalab.measure.report.statistics import MIN_BEYOND, PER_MILLE
from rdmalab.measure.report.svg import COLOURS, LOW, NARROW, WIDE, Box, Chart
from rdmalab.measure.report.text import byte_size, counted, nanoseconds, number
from rdmalab.probe.buckets import quantile
from rdmalab.probe.histogram import Bucket, Histogram

#: A curve of fewer points takes no more room than a distribution.
SIZES_FOR_A_WIDE_CHART = 4

#: A transport has one colour in every report; others take what is left.
_TRANSPORT_COLOURS = {"rxe": 0, "tcp": 1, "usb4_rdma": 2}


@dataclass(frozen=True)
class Legend:
    """One entry: a swatch of class ``style`` and its name."""

    style: str
    label: str


@dataclass(frozen=True)
class Figure:
    """One figure of the page: ready SVG (escaped), its legend, and the data as a table."""

    title: str
    svg: str
    legend: tuple[Legend, ...] = ()
    note: str = ""
    wide: bool = False
    header: tuple[str, ...] = ()
    data: tuple[tuple[str, ...], ...] = ()


def colours(transports: Sequence[str]) -> Mapping[str, int]:
    """A colour's number for each transport, the same for the same transports."""
    chosen = {name: _TRANSPORT_COLOURS[name] for name in transports if name in _TRANSPORT_COLOURS}
    free = list(range(len(_TRANSPORT_COLOURS), COLOURS))
    for name in transports:
        if name not in chosen:
            chosen[name] = free.pop(0) if free else COLOURS - 1
    return chosen


def distribution(facet: Facet, size: int, palette: Mapping[str, int]) -> Figure | None:
    """Latency by percentile, a curve per round; ``None`` where nothing is proven.

    A curve is solid as far as a percentile is founded on enough samples, dotted beyond.
    """
    cells = [cell for cell in facet.at(size) if cell.proven]
    rounds = [one for cell in cells for one in cell.rounds if is_proven(one)]
    recorded = [sorted(one.samples_us) for one in rounds if one.samples_us]
    ends = [edge for ordered in recorded for edge in (ordered[0], ordered[-1])]
    given = [value for one in rounds for _, value in _given(one)]
    if not ends and not given:
        return None
    x = percentile_scale(max(map(len, recorded), default=1000))
    y = log_scale([*ends, *given])
    title = byte_size(size)
    chart = Chart(
        NARROW, x, y, "percentile", "µs", f"{facet.title}, {title}",
        "Latency in microseconds by percentile; the percentiles are in the table of this facet.",
    )  # fmt: skip
    for cell in cells:
        colour = _colour(cell, palette)
        for one in cell.rounds:
            if not is_proven(one):
                continue
            if one.samples_us:
                _draw_distribution(chart, sorted(one.samples_us), colour)
            for share, value in _given(one):
                says = f"{cell.label} p{100 * share:g}: {number(value)} µs"
                chart.dot((x.at(share), y.at(value)), f"{colour} hollow", says)
    return Figure(title, chart.render(), _legend(cells, palette), _rounds_note(cells))


def against_size(facet: Facet, palette: Mapping[str, int]) -> Figure | None:
    """p50 with the way up to p99, or bandwidth, by size; ``None`` for fewer than two sizes.

    From :data:`SIZES_FOR_A_WIDE_CHART` sizes on it is drawn twice, for a page's whole width
    and for a phone; the style sheet shows one of them.
    """
    latency = facet.point.kind == "latency"
    cells = [cell for cell in facet.cells if cell.proven and _headline(cell) is not None]
    sizes = sorted({cell.point.size for cell in cells})
    if len(sizes) < 2:
        return None
    few = len(sizes) < SIZES_FOR_A_WIDE_CHART
    unit = "µs" if latency else "MiB/s"
    tops = [_over(cell, _p99) for cell in cells if cell.tool == OWN_TOOL]
    values = [*filter(None, map(_headline, cells)), *filter(None, tops)]
    y = log_scale(values)
    title = "against size"
    what = "p50 and p99 of latency" if latency else "Bandwidth"
    description = f"{what} in {unit} against message size; the figures are in the table."

    def draw(box: Box, most_ticks: int) -> str:
        x = size_scale(sizes, most_ticks=most_ticks)
        chart = Chart(box, x, y, "message size", unit, f"{facet.title}, {title}", description)
        for label in facet.labels:
            _draw_sizes(chart, [cell for cell in facet.cells if cell.label == label], palette)
        if few:
            return chart.render()
        return chart.render("wide" if box is WIDE else "narrow")

    note = "p50" if latency else ""
    if any(tops):
        note += ", shaded up to p99"
    return Figure(
        title,
        draw(NARROW, 5) if few else draw(WIDE, 12) + draw(NARROW, 5),
        _legend(cells, palette),
        "; ".join(filter(None, (note, _rounds_note(cells)))),
        wide=not few,
    )


def probe_figures(cell: Cell) -> list[Figure]:
    """One figure per probe and key, its nodes side by side, all rounds added up."""
    merged = merge_histograms([h for one in cell.rounds for h in one.histograms])
    keys = list(dict.fromkeys((one.probe, one.key, one.unit) for one in merged if one.buckets))
    return [
        _histogram([one for one in merged if (one.probe, one.key, one.unit) == key and one.buckets])
        for key in keys
    ]


def merge_histograms(histograms: Sequence[Histogram]) -> tuple[Histogram, ...]:
    """Counts of equal buckets added up over rounds, per node, probe, key and unit."""
    merged: dict[tuple[str, str, str, str], Histogram] = {}
    for one in histograms:
        key = (one.node, one.probe, one.key, one.unit)
        before = merged.get(key)
        if before is None:
            merged[key] = one
            continue
        counts: dict[tuple[int, int], int] = {}
        for bucket in (*before.buckets, *one.buckets):
            edges = (bucket.low, bucket.high)
            counts[edges] = counts.get(edges, 0) + bucket.count
        buckets = tuple(Bucket(*edges, count) for edges, count in sorted(counts.items()))
        # A probe that attached in any round has something to show.
        missing = "" if buckets else before.missing or one.missing
        merged[key] = Histogram(*key, buckets, missing, before.lost + one.lost)
    return tuple(merged.values())


def probe_title(probe: str, key: str) -> str:
    """``post to completion: SEND``."""
    name = probe.replace("_", " ")
    return f"{name}: {key}" if key else name


def _draw_distribution(chart: Chart, ordered: Sequence[float], colour: str) -> None:
    count = len(ordered)
    points = [
        (chart.x.at((rank - 0.5) / count), chart.y.at(ordered[rank - 1]))
        for rank in _shown_ranks(count)
    ]
    founded = sum(count - rank >= MIN_BEYOND for rank in _shown_ranks(count))
    chart.line(points[:founded], f"{colour} line")
    chart.line(points[max(founded - 1, 0) :], f"{colour} line thin")


def _shown_ranks(count: int) -> list[int]:
    """One-based ranks, as dense as the axis shows them: 24 to each further nine."""
    beyond = {min(round(count * 10 ** (-step / 24)), count) for step in range(24 * 7)}
    return sorted({1, count, *(count - far + 1 for far in beyond if far > 0)})


def _draw_sizes(chart: Chart, cells: Sequence[Cell], palette: Mapping[str, int]) -> None:
    """One label's cells, by size. A line is broken where a size has no figure: to draw on
    would show a value that was refused."""
    unit = chart.y_name
    for run in _unbroken(cells):
        colour = _colour(run[0], palette)
        own = run[0].tool == OWN_TOOL
        points = [(chart.x.at(cell.point.size), chart.y.at(_headline(cell) or 0.0)) for cell in run]
        tops = [_over(cell, _p99) for cell in run]
        if own and None not in tops:
            upper = [(x, chart.y.at(top or 0.0)) for (x, _), top in zip(points, tops, strict=True)]
            chart.area(upper, points, f"{colour} shade")
        chart.line(points, f"{colour} line" if own else f"{colour} line thin")
        for cell, point in zip(run, points, strict=True):
            says = f"{cell.label}, {byte_size(cell.point.size)}: {number(_headline(cell))} {unit}"
            chart.dot(point, f"{colour} mark" if own else f"{colour} hollow", says)


def _unbroken(cells: Sequence[Cell]) -> list[list[Cell]]:
    runs: list[list[Cell]] = [[]]
    for cell in cells:
        if _headline(cell) is None:
            runs.append([])
        else:
            runs[-1].append(cell)
    return [run for run in runs if run]


def _histogram(nodes: Sequence[Histogram]) -> Figure:
    first = nodes[0]
    title = probe_title(first.probe, first.key)
    draw = _draw_times if first.unit == "ns" else _draw_counts
    edges = sorted({(bucket.low, bucket.high) for one in nodes for bucket in one.buckets})
    return Figure(
        title,
        draw(nodes, title, "; ".join(_summary(one) for one in nodes)),
        tuple(Legend(f"n{place % 2} bar", _summary(one)) for place, one in enumerate(nodes)),
        "; ".join(
            f"the probe lost {counted(one.lost, 'event')} on {one.node}"
            for one in nodes
            if one.lost
        ),
        header=("bucket", *(one.node for one in nodes)),
        data=tuple(
            (_bucket_name(edge, first.unit), *(str(_count_in(one, edge)) for one in nodes))
            for edge in edges
        ),
    )


def _draw_times(nodes: Sequence[Histogram], title: str, description: str) -> str:
    """Densities over the logarithm of time, so that equal areas are equal counts however
    wide the buckets are."""
    steps = [[_step(bucket) for bucket in one.buckets] for one in nodes]
    filled = [step for one in steps for step in one if step[2]]
    x = time_scale(min(low for low, _, _ in filled), max(high for _, high, _ in filled))
    y = linear_scale(max(density for _, _, density in filled))
    chart = Chart(LOW, x, y, "time", "events per doubling of time", title, description)
    for place, one in enumerate(steps):
        points: list[tuple[float, float]] = []
        for low, high, density in one:
            if points and points[-1][0] < x.at(low):
                # Buckets between these two are empty.
                points += [(points[-1][0], 0.0), (x.at(low), 0.0)]
            elif not points:
                points.append((x.at(low), 0.0))
            points += [(x.at(low), y.at(density)), (x.at(high), y.at(density))]
        points.append((points[-1][0], 0.0))
        chart.line(points, f"n{place % 2} outline")
    return chart.render()


def _step(bucket: Bucket) -> tuple[float, float, float]:
    """A bucket's ends, zero moved to where a logarithm has it, and events per doubling."""
    low, high = max(float(bucket.low), 0.5), max(float(bucket.high), 1.0)
    return low, high, bucket.count / math.log2(high / low)


def _draw_counts(nodes: Sequence[Histogram], title: str, description: str) -> str:
    """A bar for every bucket, and a place for each gap between two."""
    edges = sorted({(bucket.low, bucket.high) for one in nodes for bucket in one.buckets})
    gaps = [(high, low) for (_, high), (low, _) in pairwise(edges) if high < low]
    edges = sorted(edges + gaps)
    room = 1.0 / len(edges)
    ticks = [
        Tick((place + 0.5) * room, _bucket_name(edge, "count")) for place, edge in enumerate(edges)
    ]
    x = Scale(0.0, 1.0, float, tuple(ticks[:: -(-len(ticks) // 10)]))
    y = linear_scale(max(bucket.count for one in nodes for bucket in one.buckets))
    chart = Chart(LOW, x, y, "counted", "events", title, description)
    for place, one in enumerate(nodes):
        width = 0.86 * room / len(nodes)
        for number_, edge in enumerate(edges):
            if count := _count_in(one, edge):
                left = (number_ + 0.07) * room + place * width
                says = f"{one.node}: {count} in {_bucket_name(edge, 'count')}"
                chart.bar(left, left + width, y.at(count), f"n{place % 2} bar", says)
    return chart.render()


def _bucket_name(edge: tuple[int, int], unit: str) -> str:
    low, high = edge
    if unit == "ns":
        return f"{nanoseconds(low)}..{nanoseconds(high)}"
    return str(low) if high - low == 1 else f"{low}..{high - 1}"


def _count_in(histogram: Histogram, edge: tuple[int, int]) -> int:
    return sum(b.count for b in histogram.buckets if (b.low, b.high) == edge)


def _summary(histogram: Histogram) -> str:
    """``node0: 6000 events, median < 655 µs``: the bucket's end is what is known."""
    total = sum(bucket.count for bucket in histogram.buckets)
    end = quantile(histogram.buckets, 0.5)
    words = f"{histogram.node}: {counted(total, 'event')}"
    if end is None:
        return words
    if histogram.unit == "ns":
        return f"{words}, median < {nanoseconds(end)}"
    return f"{words}, median {'' if end < 5 else '≤ '}{end - 1}"


def _given(measurement: Measurement) -> list[tuple[float, float]]:
    """Shares and values of what a tool gave instead of samples."""
    if measurement.samples_us:
        return []
    shown = row_percentiles(measurement)
    values = [(per_mille / 1000, getattr(shown, name)) for name, per_mille in PER_MILLE.items()]
    return [(share, value) for share, value in values if value is not None]


def _legend(cells: Sequence[Cell], palette: Mapping[str, int]) -> tuple[Legend, ...]:
    entries = {
        cell.label: Legend(
            f"{_colour(cell, palette)} {'mark' if cell.tool == OWN_TOOL else 'hollow'}",
            cell.label,
        )
        for cell in cells
    }
    return tuple(entries.values())


def _rounds_note(cells: Sequence[Cell]) -> str:
    rounds = max(len(cell.rounds) for cell in cells)
    return counted(rounds, "round") if rounds > 1 else ""


def _colour(cell: Cell, palette: Mapping[str, int]) -> str:
    return f"c{palette[cell.point.transport]}"


def _headline(cell: Cell) -> float | None:
    return _over(cell, lambda row: row["p50_us"] if row["kind"] == "latency" else row["mib_s"])


def _p99(row: Row) -> float | None:
    return row["p99_us"]


def _over(cell: Cell, figure: Callable[[Row], float | None]) -> float | None:
    over = cell.over_rounds(figure)
    return over.median if over else None
