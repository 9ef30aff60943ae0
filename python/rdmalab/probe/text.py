# SPDX-License-Identifier: Apache-2.0
"""Histograms for people, as plain text."""

from __future__ import annotations

from collections.abc import Sequence

from rdmalab.probe.buckets import quantile
from rdmalab.probe.histogram import Bucket, Histogram

_WIDTH = 40


def format_value(value: int, unit: str) -> str:
    """``1.5 us`` for nanoseconds, the bare number for counts."""
    if unit != "ns":
        return str(value)
    for scale, name in ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us")):
        if value >= scale:
            return f"{value / scale:.4g} {name}"
    return f"{value} ns"


def _octaves(buckets: Sequence[Bucket]) -> list[Bucket]:
    """The quarters of a power of two put together: a terminal has few lines."""
    merged: dict[int, int] = {}
    for bucket in buckets:
        power = bucket.low.bit_length()
        merged[power] = merged.get(power, 0) + bucket.count
    return [
        Bucket(1 << power >> 1, max(1 << power, 1), count)
        for power, count in sorted(merged.items())
    ]


def _one(histogram: Histogram) -> list[str]:
    title = " ".join(x for x in (histogram.node, histogram.probe, histogram.key) if x)
    if histogram.missing:
        return [f"{title}: missing: {histogram.missing}"]
    total = sum(b.count for b in histogram.buckets)
    if not total:
        return [f"{title}: nothing counted"]
    marks = []
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        value = quantile(histogram.buckets, share)
        assert value is not None
        marks.append(f"{name} < {format_value(value, histogram.unit)}")
    lost = f", {histogram.lost} lost by this probe" if histogram.lost else ""
    lines = [f"{title}: {total}, {', '.join(marks)}{lost}"]
    rows = _octaves(histogram.buckets)
    most = max(row.count for row in rows)
    for row in rows:
        bar = "#" * max(1, row.count * _WIDTH // most)
        low = format_value(row.low, histogram.unit)
        high = format_value(row.high, histogram.unit)
        lines.append(f"  {low:>9} .. {high:>9} {row.count:>9} {bar}")
    return lines


def render(histograms: Sequence[Histogram]) -> str:
    """All histograms one below the other."""
    return "\n".join(line for histogram in histograms for line in _one(histogram))
