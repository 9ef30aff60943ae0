# SPDX-License-Identifier: Apache-2.0
"""Percentiles, medians of rounds and ratios of alternating pairs.

Nothing is estimated here: a percentile is a sample that was recorded, and is left out
(``None``) where too few samples lie beyond it to say anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

#: Percentiles that a row shows, by the name of their key, in samples per thousand.
PER_MILLE: Mapping[str, int] = {"p50_us": 500, "p90_us": 900, "p99_us": 990, "p999_us": 999}

#: Fewer samples than this beyond a percentile say nothing about it.
MIN_BEYOND = 10


@dataclass(frozen=True)
class Percentiles:
    """Of one sample set, in the samples' unit (microseconds in a row).

    ``None`` where fewer than :data:`MIN_BEYOND` samples lie beyond; ``max_us`` is given
    wherever there is a sample at all.
    """

    p50_us: float | None
    p90_us: float | None
    p99_us: float | None
    p999_us: float | None
    max_us: float | None


@dataclass(frozen=True)
class Spread:
    """A median over rounds with the smallest and largest round."""

    median: float
    low: float
    high: float
    rounds: int


def samples_beyond(count: int, per_mille: int) -> int:
    """How many of ``count`` samples rank above the percentile's own sample.

    Counted by rank, not by value, so that a clock's granularity (many equal samples) does
    not hide a percentile that is well founded.
    """
    return count - _rank(count, per_mille)


def is_founded(count: int, per_mille: int) -> bool:
    """Whether ``count`` samples are enough for the percentile to be shown."""
    return samples_beyond(count, per_mille) >= MIN_BEYOND


def percentile(ordered: Sequence[float], per_mille: int) -> float | None:
    """The nearest-rank percentile of samples that are sorted already, or ``None``.

    Nearest rank is the smallest recorded sample that at least ``per_mille`` thousandths of
    all samples do not exceed (as HdrHistogram counts): no value appears
    in a report that was not measured.
    """
    if not is_founded(len(ordered), per_mille):
        return None
    return ordered[_rank(len(ordered), per_mille) - 1]


def percentiles(samples: Iterable[float]) -> Percentiles:
    """All of a row's percentiles. Raises ValueError where a sample is no finite number."""
    ordered = sorted(samples)
    # sorted() leaves a NaN anywhere, so that the ends alone would not show it.
    if not all(map(math.isfinite, ordered)):
        raise ValueError("a sample is not a finite number")
    return Percentiles(
        **{name: percentile(ordered, per_mille) for name, per_mille in PER_MILLE.items()},
        max_us=ordered[-1] if ordered else None,
    )


def spread(values: Sequence[float]) -> Spread | None:
    """Median and range of one figure over rounds; ``None`` where there is no round."""
    if not values:
        return None
    return Spread(median(values), min(values), max(values), len(values))


def ratio(pairs: Iterable[tuple[float, float]]) -> Spread | None:
    """Median and range of ``a / b`` over the pairs of alternating rounds.

    Each pair is divided before anything is averaged, so that drift of the machine between
    rounds cancels. Pairs whose ``b`` is not above zero carry no ratio and are left out.
    """
    return spread([a / b for a, b in pairs if b > 0])


def _rank(count: int, per_mille: int) -> int:
    """One-based nearest rank; in integers, since 0.999 is no binary fraction."""
    return -(-per_mille * count // 1000)
