# SPDX-License-Identifier: Apache-2.0
"""Percentiles, spreads and ratios: what the reports' numbers rest on."""

from __future__ import annotations

import math
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmalab.measure.report.statistics import (
    MIN_BEYOND,
    PER_MILLE,
    percentile,
    percentiles,
    ratio,
    samples_beyond,
    spread,
)

#: How long an example takes says nothing on a machine that does other things too.
UNTIMED = settings(deadline=None)

LATENCIES = st.floats(min_value=0.01, max_value=1e9)


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, ()),
        (1, ()),
        (19, ()),
        (20, ("p50_us",)),
        (99, ("p50_us",)),
        (100, ("p50_us", "p90_us")),
        (999, ("p50_us", "p90_us")),
        (1000, ("p50_us", "p90_us", "p99_us")),
        (9999, ("p50_us", "p90_us", "p99_us")),
        (10_000, ("p50_us", "p90_us", "p99_us", "p999_us")),
    ],
)
def test_a_percentile_needs_ten_samples_beyond_it(count: int, shown: tuple[str, ...]) -> None:
    found = percentiles(float(value) for value in range(count))
    assert tuple(name for name in PER_MILLE if getattr(found, name) is not None) == shown
    assert found.max_us == (count - 1 if count else None)


def test_percentiles_are_the_recorded_samples_of_their_rank() -> None:
    found = percentiles(range(10_000, 0, -1))
    assert (found.p50_us, found.p90_us, found.p99_us) == (5000, 9000, 9900)
    assert (found.p999_us, found.max_us) == (9990, 10_000)


@UNTIMED
@given(st.lists(LATENCIES, max_size=300), st.sampled_from(sorted(PER_MILLE.values())))
def test_a_percentile_was_recorded_and_is_exceeded_by_its_share_only(
    samples: list[float], per_mille: int
) -> None:
    value = percentile(sorted(samples), per_mille)
    if value is None:
        assert samples_beyond(len(samples), per_mille) < MIN_BEYOND
        return
    assert value in samples
    assert sum(one <= value for one in samples) * 1000 >= per_mille * len(samples)
    assert sum(one < value for one in samples) * 1000 < per_mille * len(samples)


@UNTIMED
@given(st.lists(LATENCIES, min_size=1, max_size=300))
def test_percentiles_rise_and_end_at_the_largest_sample(samples: list[float]) -> None:
    found = percentiles(samples)
    known = [found.p50_us, found.p90_us, found.p99_us, found.p999_us, found.max_us]
    values = [value for value in known if value is not None]
    assert values == sorted(values)
    assert values[-1] == max(samples)


@UNTIMED
@given(st.lists(LATENCIES, max_size=200), st.randoms())
def test_the_order_of_samples_does_not_matter(samples: list[float], chance: object) -> None:
    shuffled = list(samples)
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    assert percentiles(shuffled) == percentiles(samples)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_sample_that_is_no_number_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        percentiles([1.0, bad, 2.0])


@UNTIMED
@given(st.lists(LATENCIES, min_size=1, max_size=50))
def test_a_spread_holds_its_median_between_its_ends(values: list[float]) -> None:
    over = spread(values)
    assert over is not None
    assert over.low == min(values)
    assert over.high == max(values)
    assert over.median == median(values)
    assert over.rounds == len(values)


def test_no_round_has_no_spread() -> None:
    assert spread([]) is None


@UNTIMED
@given(st.lists(LATENCIES, min_size=1, max_size=20), st.floats(min_value=0.1, max_value=10))
def test_drift_between_rounds_cancels_in_a_ratio(base: list[float], factor: float) -> None:
    over = ratio((factor * value, value) for value in base)
    assert over is not None
    assert over.low == pytest.approx(factor)
    assert over.high == pytest.approx(factor)


def test_a_ratio_shows_the_range_of_its_rounds() -> None:
    over = ratio([(10.0, 10.0), (12.0, 10.0), (15.0, 10.0)])
    assert over is not None
    assert (over.low, over.median, over.high, over.rounds) == (1.0, 1.2, 1.5, 3)


def test_nothing_is_divided_by_zero() -> None:
    assert ratio([(1.0, 0.0)]) is None
