# SPDX-License-Identifier: Apache-2.0
"""Rounds, facets and comparisons: like is compared with like, round against round."""

from __future__ import annotations

import pytest
import report_data

from rdmalab.measure.measurement import Measurement
from rdmalab.measure.report.series import Comparison, to_cells, to_comparisons, to_facets


def constant(value: float, **point: object) -> Measurement:
    """A measurement all of whose samples are ``value``."""
    made = report_data.measurement(**point)  # type: ignore[arg-type]
    return type(made)(**{**vars(made), "samples_us": (value,) * 100})


def compared(measurements: list[Measurement]) -> dict[str, Comparison]:
    found = to_comparisons(to_facets(to_cells(measurements)))
    return {f"{one.subject.label} / {one.base.label}": one for one in found}


def test_rounds_are_divided_pair_by_pair() -> None:
    rounds = [(10.0, 5.0), (30.0, 10.0), (44.0, 11.0)]
    measurements = [
        one
        for rxe, tcp in rounds
        for one in (constant(rxe, transport="rxe"), constant(tcp, transport="tcp"))
    ]
    over = compared(measurements)["rxe / tcp"]
    assert (over.ratio.low, over.ratio.median, over.ratio.high) == (2.0, 3.0, 4.0)
    assert over.ratio.rounds == 3
    assert over.alternating


def test_rounds_one_after_another_are_said_not_to_alternate() -> None:
    measurements = [constant(10.0, transport="rxe")] * 3 + [constant(5.0, transport="tcp")] * 3
    assert not compared(measurements)["rxe / tcp"].alternating


def test_a_refused_round_is_in_no_ratio() -> None:
    bad = constant(999.0, transport="rxe", proof=report_data.refused("rxe", 100))
    measurements = [
        constant(10.0, transport="rxe"),
        constant(5.0, transport="tcp"),
        bad,
        constant(5.0, transport="tcp"),
    ]
    over = compared(measurements)["rxe / tcp"]
    assert (over.ratio.rounds, over.ratio.high) == (1, 2.0)


def test_the_check_is_compared_on_its_own_transport_only() -> None:
    assert set(compared(report_data.table_run())) == {"rxe / tcp", "rxe / rxe perftest"}


@pytest.mark.parametrize(
    "other",
    [{"mode": "poll"}, {"qps": 4}, {"op": "write"}, {"service": "UC"}, {"size": 128}],
    ids=lambda other: next(iter(other)),
)
def test_unlike_points_are_not_compared(other: dict[str, object]) -> None:
    assert not compared([constant(1.0, transport="rxe", **other), constant(1.0, transport="tcp")])


def test_iterations_do_not_keep_a_check_apart() -> None:
    ours = constant(2.0, transport="rxe", iterations=2000)
    check = constant(1.0, tool="perftest", transport="rxe", iterations=1000)
    assert compared([ours, check])["rxe / rxe perftest"].ratio.median == 2.0


def test_links_are_not_mixed_and_named_where_several() -> None:
    one = constant(1.0, transport="rxe")
    other = type(one)(**{**vars(one), "link": "roce1"})
    facets = to_facets(to_cells([one, other]))
    assert [facet.title for facet in facets] == [
        "send latency, event, roce0",
        "send latency, event, roce1",
    ]


def test_a_figure_that_one_round_lacks_has_no_median() -> None:
    short = report_data.measurement(samples=50)
    long = type(short)(**{**vars(short), "samples_us": (1.0,) * 2000})
    (cell,) = to_cells([long, short])
    assert cell.over_rounds(lambda row: row["p90_us"]) is None
    assert cell.over_rounds(lambda row: row["p50_us"]) is not None


def test_sizes_rise_and_latency_comes_before_bandwidth() -> None:
    facets = to_facets(to_cells(report_data.sweep_run()[::-1]))
    kinds = [facet.point.kind for facet in facets]
    assert kinds == sorted(kinds, reverse=True)
    for facet in facets:
        sizes = [cell.point.size for cell in facet.cells]
        assert sizes == sorted(sizes)
