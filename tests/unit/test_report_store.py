# SPDX-License-Identifier: Apache-2.0
"""Parquet: read back as what was written, and damage said in one line."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import report_data
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rdmalab.errors import RdmalabError
from rdmalab.measure.measurement import Counters, Measurement, Point, Proof
from rdmalab.measure.report.store import read_folder, read_measurements, write_measurements
from rdmalab.probe.histogram import Bucket, Histogram

TEXT = st.text(max_size=12)
COUNT = st.integers(min_value=0, max_value=2**62)
MAYBE = st.none() | COUNT
REAL = st.floats(min_value=0, max_value=1e12)
COUNTERS = st.builds(Counters, TEXT, MAYBE, MAYBE, MAYBE, MAYBE)
MEASUREMENTS = st.builds(
    Measurement,
    tool=TEXT,
    point=st.builds(Point, op=TEXT, size=COUNT, mode=TEXT, qps=COUNT, iterations=COUNT),
    link=TEXT,
    nodes=st.tuples(TEXT, TEXT),
    accelerator=TEXT,
    vcpus=COUNT,
    kernel=TEXT,
    proof=st.builds(
        Proof, TEXT, st.tuples(COUNT, COUNT), st.tuples(COUNTERS, COUNTERS), TEXT, TEXT
    ),
    samples_us=st.lists(REAL, max_size=20).map(tuple),
    given_us=st.dictionaries(TEXT, REAL, max_size=4),
    mib_s=st.none() | REAL,
    seconds=REAL,
    histograms=st.lists(
        st.builds(
            Histogram,
            TEXT,
            TEXT,
            TEXT,
            TEXT,
            st.lists(st.builds(Bucket, COUNT, COUNT, COUNT), max_size=3).map(tuple),
            TEXT,
            COUNT,
        ),
        max_size=3,
    ).map(tuple),
)


@given(measurements=st.lists(MEASUREMENTS, max_size=4))
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None
)
def test_what_is_read_is_exactly_what_was_written(
    tmp_path: Path, measurements: list[Measurement]
) -> None:
    path = write_measurements(tmp_path / "one.parquet", measurements)
    assert list(read_measurements(path)) == measurements


def test_every_field_of_a_measurement_has_a_column(tmp_path: Path) -> None:
    schema = pq.read_schema(write_measurements(tmp_path / "one.parquet", []))
    inner = {"point", "proof"}
    expected = {one.name for one in fields(Measurement)} - inner
    expected |= {one.name for one in fields(Point)}
    expected |= {f"proof_{one.name}" for one in fields(Proof)}
    assert set(schema.names) == expected
    for column, of in (("proof_ends", Counters), ("histograms", Histogram)):
        assert [one.name for one in schema.field(column).type.value_type] == [
            one.name for one in fields(of)
        ]


def test_pandas_reads_a_row_per_sample_set_with_its_samples(tmp_path: Path) -> None:
    written = report_data.table_run()
    frame = pd.read_parquet(write_measurements(tmp_path / "one.parquet", written))
    assert len(frame) == len(written)
    own = frame[frame["tool"] == "rdmalab"]
    assert len(own.explode("samples_us")) == sum(len(one.samples_us) for one in written)


def test_the_metadata_names_the_schema_and_its_version(tmp_path: Path) -> None:
    metadata = pq.read_schema(write_measurements(tmp_path / "one.parquet", [])).metadata
    assert metadata[b"rdmalab.schema"] == b"rdmalab.measurements"
    assert metadata[b"rdmalab.schema_version"] == b"1"


@pytest.mark.parametrize("damage", ["truncated", "overwritten", "empty", "missing"])
def test_a_damaged_file_is_named_in_one_line(tmp_path: Path, damage: str) -> None:
    path = write_measurements(tmp_path / "one.parquet", report_data.table_run())
    whole = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "overwritten":
        path.write_bytes(whole[:8] + b"\xff" * (len(whole) - 400) + whole[-392:])
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
    with pytest.raises(RdmalabError) as caught:
        read_measurements(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == 1


def test_another_programs_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.parquet"
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(RdmalabError, match="no rdmalab measurements"):
        read_measurements(path)


def test_a_newer_schema_is_refused_with_both_versions(tmp_path: Path) -> None:
    path = write_measurements(tmp_path / "one.parquet", [])
    table = pq.read_table(path)
    changed = {**table.schema.metadata, b"rdmalab.schema_version": b"7"}
    pq.write_table(table.replace_schema_metadata(changed), path)
    with pytest.raises(RdmalabError, match=r"version 7, this rdmalab reads 1"):
        read_measurements(path)


def test_a_missing_column_is_damage(tmp_path: Path) -> None:
    path = write_measurements(tmp_path / "one.parquet", report_data.table_run())
    pq.write_table(pq.read_table(path).drop_columns(["kernel"]), path)
    with pytest.raises(RdmalabError, match="kernel"):
        read_measurements(path)


def test_a_folders_files_are_read_in_order_and_others_passed_over(tmp_path: Path) -> None:
    first, second = report_data.measurement(size=64), report_data.measurement(size=128)
    write_measurements(tmp_path / "b.parquet", [second])
    write_measurements(tmp_path / "a.parquet", [first])
    pq.write_table(pa.table({"function": ["rxe_send"]}), tmp_path / "instructions.parquet")
    assert read_folder(tmp_path) == (first, second)


def test_a_damaged_file_in_a_folder_is_not_passed_over(tmp_path: Path) -> None:
    write_measurements(tmp_path / "a.parquet", [report_data.measurement()])
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(RdmalabError, match=r"b\.parquet"):
        read_folder(tmp_path)


def test_a_failed_write_leaves_the_old_file_and_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_measurements(tmp_path / "one.parquet", [report_data.measurement()])
    before = path.read_bytes()

    def full(table: pa.Table, where: Path, **_: object) -> None:
        Path(where).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(RdmalabError, match="No space left on device"):
        write_measurements(path, [])
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["one.parquet"]


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RdmalabError, match="cannot write"):
        write_measurements(tmp_path / "none" / "one.parquet", [])
