# SPDX-License-Identifier: Apache-2.0
"""Rows: the documented keys and nothing unproven in them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import report_data

from rdmalab.errors import RdmalabError
from rdmalab.measure.measurement import Counters
from rdmalab.measure.report.rows import Row, proof_text, to_row, to_rows

SCHEMA = Path(__file__).parents[2] / "docs" / "schemas" / "bench.schema.json"
NUMBERS = ("p50_us", "p90_us", "p99_us", "p999_us", "max_us", "mib_s")


@pytest.fixture(scope="module")
def schema() -> Any:
    loaded = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(loaded)
    return jsonschema.Draft202012Validator(loaded)


def test_rows_of_every_kind_fit_the_schema(schema: Any) -> None:
    rows = to_rows(report_data.sweep_run())
    schema.validate(json.loads(json.dumps({"rows": rows}, allow_nan=False)))


def test_the_schema_names_exactly_the_keys_of_a_row(schema: Any) -> None:
    described = schema.schema["$defs"]["row"]
    assert set(described["required"]) == set(described["properties"]) == set(Row.__annotations__)


def test_the_schema_refuses_a_number_without_a_proof(schema: Any) -> None:
    row = dict(to_row(report_data.measurement(proof=report_data.refused("rxe", 2000))))
    schema.validate({"rows": [row]})
    with pytest.raises(jsonschema.ValidationError):
        schema.validate({"rows": [{**row, "p50_us": 1.0}]})


@pytest.mark.parametrize("kind", ["latency", "bandwidth"])
def test_a_refused_proof_leaves_no_number_and_says_why(kind: str) -> None:
    row = to_row(
        report_data.measurement(kind=kind, mib_s=7.0, proof=report_data.refused("rxe", 2000))
    )
    assert [row[name] for name in NUMBERS] == [None] * len(NUMBERS)  # type: ignore[literal-required]
    assert row["proof"]["verdict"] == "refused"
    assert "cover 0.6 %" in row["proof"]["reason"]


def test_an_unknown_verdict_is_no_proof() -> None:
    proof = replace(report_data.proven("rxe", 2000), verdict="unknown")
    assert to_row(report_data.measurement(proof=proof))["p50_us"] is None


def test_rounds_are_counted_per_point_and_tool() -> None:
    rows = to_rows(report_data.table_run())
    of_one = [
        row["round"]
        for row in rows
        if (row["tool"], row["transport"], row["size"]) == ("rdmalab", "rxe", 64)
    ]
    assert of_one == [1, 2, 3]


def test_what_a_tool_gives_follows_the_rule_of_ten_too() -> None:
    row = to_row(report_data.measurement(tool="perftest", samples=2000))
    assert row["samples"] == 1997
    assert row["p99_us"] is not None
    assert row["p999_us"] is None
    assert row["max_us"] is not None


def test_a_bandwidth_has_no_percentiles() -> None:
    row = to_row(report_data.measurement(kind="bandwidth", mib_s=12.5))
    assert (row["mib_s"], row["p50_us"], row["max_us"], row["samples"]) == (12.5, None, None, 0)


def test_a_sample_that_is_no_number_names_the_measurement() -> None:
    broken = replace(report_data.measurement(), samples_us=(1.0, float("nan")))
    with pytest.raises(RdmalabError, match="send 64 B over rxe"):
        to_row(broken)


def test_coverage_is_the_worse_direction_of_each_end() -> None:
    proof = replace(
        report_data.proven("rxe", 1000),
        ends=(Counters("a", 1000, 970, 0, 0), Counters("b", 998, 1000, 0, 0)),
    )
    assert to_row(report_data.measurement(proof=proof))["proof"]["coverage"] == [97.0, 99.8]
    assert proof_text(proof) == "proven 97.0/99.8 %"


def test_coverage_is_never_rounded_up_to_all() -> None:
    assert proof_text(report_data.proven("rxe", 100_000, lost=1)) == "proven 100.0/99.9 %"


def test_an_unsupported_counter_is_not_zero() -> None:
    proof = replace(
        report_data.proven("rxe", 1000),
        ends=(Counters("a", 1000, 1000, 0, 0), Counters("b", None, None, None, None)),
    )
    assert to_row(report_data.measurement(proof=proof))["proof"]["coverage"] == [100.0, None]
    assert proof_text(proof) == "proven 100.0/? %"


def test_a_direction_that_nothing_was_posted_in_is_not_counted() -> None:
    proof = replace(
        report_data.proven("rxe", 1000),
        posted=(1000, 0),
        ends=(Counters("a", 1000, 3, 0, 0), Counters("b", 3, 990, 0, 0)),
    )
    assert to_row(report_data.measurement(proof=proof))["proof"]["coverage"] == [100.0, 99.0]


def test_histograms_fit_the_probes_schema() -> None:
    schema = json.loads(SCHEMA.with_name("probe.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    found = [json.loads(json.dumps(one.to_json())) for one in report_data.probes(1)]
    jsonschema.validate({"histograms": found}, schema)


def test_every_schema_is_valid_and_named_in_the_documentation() -> None:
    page = (SCHEMA.parents[1] / "json.md").read_text()
    for path in SCHEMA.parent.glob("*.json"):
        jsonschema.Draft202012Validator.check_schema(json.loads(path.read_text()))
        assert f"schemas/{path.name}" in page


@pytest.mark.parametrize(("iterations", "founded"), [(1002, False), (1003, True)])
def test_what_perftest_drops_does_not_found_a_percentile(iterations: int, founded: bool) -> None:
    """1,000 samples have ten beyond the 99th; perftest uses three fewer than it is told."""
    row = to_row(report_data.measurement(tool="perftest", samples=iterations))
    assert (row["p99_us"] is not None) is founded
