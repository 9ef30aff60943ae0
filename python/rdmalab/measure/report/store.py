# SPDX-License-Identifier: Apache-2.0
"""Measurements in Parquet: one row per sample set, read back as exactly what was written.

The samples are a list column, so that a notebook gets them with
``pandas.read_parquet(path).explode("samples_us")``. The file's metadata names the schema
and its version under the keys ``rdmalab.schema`` and ``rdmalab.schema_version``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rdmalab.errors import RdmalabError
from rdmalab.measure.measurement import Counters, Measurement, Point, Proof
from rdmalab.measure.report.wholefile import replacing
from rdmalab.probe.histogram import Histogram

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

#: Raised when a column changes its meaning or goes; a new optional column does not raise it.
SCHEMA_VERSION = 1

_SCHEMA_NAME = "rdmalab.measurements"
_NAME_KEY = b"rdmalab.schema"
_VERSION_KEY = b"rdmalab.schema_version"

_POINT_COLUMNS = (
    "op",
    "size",
    "mode",
    "qps",
    "direction",
    "kind",
    "transport",
    "service",
    "iterations",
    "warmup",
)


def write_measurements(path: Path, measurements: Sequence[Measurement]) -> Path:
    """Write a Parquet file whole or not at all: a reader never sees half of one.

    Raises RdmalabError where the folder cannot be written (a full disk, say).
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pa.Table.from_pandas(frame(measurements), schema=_schema(), preserve_index=False)
    except (pa.ArrowException, OverflowError) as error:
        raise RdmalabError(
            f"cannot store measurements in {path}", seen=_first_line(error)
        ) from error
    table = table.replace_schema_metadata(
        {
            **(table.schema.metadata or {}),
            _NAME_KEY: _SCHEMA_NAME.encode(),
            _VERSION_KEY: str(SCHEMA_VERSION).encode(),
        }
    )
    with replacing(path) as part:
        pq.write_table(table, part, compression="zstd")
    return path


def read_measurements(path: Path) -> tuple[Measurement, ...]:
    """What :func:`write_measurements` wrote, in order.

    Raises RdmalabError where the file is damaged, is no file of ours, or was written by a
    newer rdmalab.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, partitioning=None)
    except (OSError, pa.ArrowException) as error:
        raise RdmalabError(
            f"cannot read measurements from {path}",
            seen=_first_line(error),
            todo="take an undamaged copy, or measure again",
        ) from error
    metadata = table.schema.metadata or {}
    if metadata.get(_NAME_KEY) != _SCHEMA_NAME.encode():
        raise RdmalabError(
            f"{path} holds no rdmalab measurements", seen="the schema's name is missing"
        )
    version = metadata.get(_VERSION_KEY, b"").decode("ascii", "replace")
    if version != str(SCHEMA_VERSION):
        raise RdmalabError(
            f"{path} has another schema version",
            seen=f"version {version or 'missing'}, this rdmalab reads {SCHEMA_VERSION}",
            todo="read it with the rdmalab that wrote it",
        )
    try:
        return tuple(_from_record(record) for record in table.to_pylist())
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RdmalabError(
            f"{path} is damaged: a column is missing or of another type",
            seen=f"{type(error).__name__}: {_first_line(error)}",
            todo="measure again",
        ) from error


def is_measurements(path: Path) -> bool:
    """Whether a Parquet file says that it is ours. A damaged file is taken for one, so that
    reading it names the damage instead of passing over it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_schema(path).metadata or {}
    except (OSError, pa.ArrowException):
        return True
    return metadata.get(_NAME_KEY) == _SCHEMA_NAME.encode()


def read_folder(folder: Path) -> tuple[Measurement, ...]:
    """All measurements of a run folder: its Parquet files in the order of their names.

    Raises RdmalabError where one is damaged or there is none.
    """
    paths = [path for path in sorted(folder.glob("*.parquet")) if is_measurements(path)]
    if not paths:
        raise RdmalabError(
            f"no measurements in {folder}",
            seen="no Parquet file of rdmalab's",
            todo="name a folder that a bench run left",
        )
    return tuple(measurement for path in paths for measurement in read_measurements(path))


def frame(measurements: Sequence[Measurement]) -> pd.DataFrame:
    """One row per measurement, the columns of the Parquet file."""
    import pandas as pd

    records = [_to_record(measurement) for measurement in measurements]
    # dtype=object keeps None apart from NaN and integers apart from floats.
    return pd.DataFrame(records, columns=_schema().names, dtype=object)


def _schema() -> pa.Schema:
    import pyarrow as pa

    text, whole, real = pa.string(), pa.int64(), pa.float64()
    counters = pa.struct(
        [
            ("node", text),
            ("sent", whole),
            ("received", whole),
            ("rival_sent", whole),
            ("rival_received", whole),
        ]
    )
    bucket = pa.struct([("low", whole), ("high", whole), ("count", whole)])
    histogram = pa.struct(
        [
            ("node", text),
            ("probe", text),
            ("key", text),
            ("unit", text),
            ("buckets", pa.list_(bucket)),
            ("missing", text),
            ("lost", whole),
        ]
    )
    integers = {"size", "qps", "iterations", "warmup"}
    return pa.schema(
        [
            ("tool", text),
            *((name, whole if name in integers else text) for name in _POINT_COLUMNS),
            ("link", text),
            ("nodes", pa.list_(text)),
            ("accelerator", text),
            ("vcpus", whole),
            ("kernel", text),
            ("proof_transport", text),
            ("proof_posted", pa.list_(whole)),
            ("proof_ends", pa.list_(counters)),
            ("proof_verdict", text),
            ("proof_reason", text),
            ("samples_us", pa.list_(real)),
            ("given_us", pa.map_(text, real)),
            ("mib_s", real),
            ("seconds", real),
            ("histograms", pa.list_(histogram)),
        ]
    )


def _to_record(measurement: Measurement) -> dict[str, Any]:
    proof = measurement.proof
    return {
        "tool": measurement.tool,
        **{name: getattr(measurement.point, name) for name in _POINT_COLUMNS},
        "link": measurement.link,
        "nodes": list(measurement.nodes),
        "accelerator": measurement.accelerator,
        "vcpus": measurement.vcpus,
        "kernel": measurement.kernel,
        "proof_transport": proof.transport,
        "proof_posted": list(proof.posted),
        "proof_ends": [asdict(end) for end in proof.ends],
        "proof_verdict": proof.verdict,
        "proof_reason": proof.reason,
        "samples_us": list(measurement.samples_us),
        "given_us": list(measurement.given_us.items()),
        "mib_s": measurement.mib_s,
        "seconds": measurement.seconds,
        "histograms": [histogram.to_json() for histogram in measurement.histograms],
    }


def _from_record(record: dict[str, Any]) -> Measurement:
    first, second = (Counters(**end) for end in record["proof_ends"])
    forward, backward = record["proof_posted"]
    initiator, target = record["nodes"]
    return Measurement(
        tool=record["tool"],
        point=Point(**{name: record[name] for name in _POINT_COLUMNS}),
        link=record["link"],
        nodes=(initiator, target),
        accelerator=record["accelerator"],
        vcpus=record["vcpus"],
        kernel=record["kernel"],
        proof=Proof(
            transport=record["proof_transport"],
            posted=(forward, backward),
            ends=(first, second),
            verdict=record["proof_verdict"],
            reason=record["proof_reason"],
        ),
        samples_us=tuple(record["samples_us"]),
        given_us=dict(record["given_us"]),
        mib_s=record["mib_s"],
        seconds=record["seconds"],
        histograms=tuple(map(Histogram.from_json, record["histograms"])),
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
