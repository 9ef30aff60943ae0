# SPDX-License-Identifier: Apache-2.0
"""Axes: from a value to a place between 0 and 1, and the ticks to label."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rdmalab.measure.report.text import axis_number, byte_size, nanoseconds


@dataclass(frozen=True)
class Tick:
    """``at`` is between 0 and 1 along the axis."""

    at: float
    label: str


@dataclass(frozen=True)
class Scale:
    """Maps ``low``..``high`` onto 0..1 through ``bend``, a rising function."""

    low: float
    high: float
    bend: Callable[[float], float]
    ticks: tuple[Tick, ...]

    def at(self, value: float) -> float:
        """The value's place, cut off at the axis's ends."""
        low, high = self.bend(self.low), self.bend(self.high)
        place = (self.bend(min(max(value, self.low), self.high)) - low) / (high - low)
        return min(max(place, 0.0), 1.0)


def log_scale(values: Sequence[float], *, most_ticks: int = 6) -> Scale:
    """A decimal logarithm over the values above zero, with round ticks.

    The range covers at least a factor of 1.6, so that noise is not blown up to a landscape.
    """
    positive = [value for value in values if value > 0]
    low, high = min(positive, default=1.0), max(positive, default=10.0)
    if high / low < 1.6:
        middle = math.sqrt(low * high)
        low, high = middle / math.sqrt(1.6), middle * math.sqrt(1.6)
    margin = (high / low) ** 0.04
    low, high = low / margin, high * margin
    return _with_ticks(low, high, math.log10, _round_values(low, high, most_ticks), axis_number)


def time_scale(low: float, high: float, *, most_ticks: int = 5) -> Scale:
    """A decimal logarithm over nanoseconds above zero."""
    return _with_ticks(low, high, math.log10, _round_values(low, high, most_ticks), nanoseconds)


def size_scale(sizes: Sequence[int], *, most_ticks: int = 8) -> Scale:
    """A binary logarithm over sizes in bytes; ticks at sizes that were measured."""
    low, high = float(min(sizes)), float(max(sizes))
    if low == high:
        low, high = max(low / 2, 0.5), high * 2
    step = math.ceil(len(sizes) / most_ticks)
    # Thinned from the large end, which a reader looks up first.
    ticks = sorted(sizes, reverse=True)[::step]
    return _with_ticks(low, high, math.log2, sorted(ticks), byte_size)


def linear_scale(high: float, *, most_ticks: int = 4) -> Scale:
    """From zero to ``high`` with round ticks."""
    high = high or 1.0
    step = 10.0 ** math.floor(math.log10(high / most_ticks))
    while high / step > most_ticks:
        step *= 2.5 if f"{step:e}".startswith("2") else 2.0
    ticks = [step * count for count in range(int(high / step) + 1)]
    return _with_ticks(0.0, high, float, ticks, axis_number)


def percentile_scale(count: int) -> Scale:
    """Shares of samples from 0 to those that ``count`` samples can tell, the tail stretched:
    each further nine gets the same room (as HdrHistogram plots)."""
    high = 1.0 - 0.5 / max(count, 1)
    named = {0.0: "0", 0.5: "50", 0.9: "90", 0.99: "99", 0.999: "99.9", 0.9999: "99.99"}
    ticks = [share for share in named if share <= high]
    return _with_ticks(0.0, high, _nines, ticks, lambda share: named[share])


def _nines(share: float) -> float:
    return -math.log10(1.0 - share)


def _round_values(low: float, high: float, most: int) -> list[float]:
    """The finest round values of which at most ``most`` lie between the ends."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for digits in (_QUARTERS, (1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        found = [digit * 10.0**power for power in range(first, last + 1) for digit in digits]
        found = [value for value in found if low <= value <= high]
        if len(found) <= most:
            return found
    step = math.ceil((last - first + 1) / most)
    decades = [10.0**power for power in range(first, last + 1, step)]
    return [value for value in decades if low <= value <= high]


_QUARTERS = (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9)


def _with_ticks(
    low: float,
    high: float,
    bend: Callable[[float], float],
    values: Sequence[float],
    label: Callable[[float], str],
) -> Scale:
    bare = Scale(low, high, bend, ())
    return Scale(low, high, bend, tuple(Tick(bare.at(value), label(value)) for value in values))
