# SPDX-License-Identifier: Apache-2.0
"""A measurement as the row that ``--json`` prints (docs/schemas/bench.schema.json)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypedDict

from rdmalab.errors import RdmalabError
from rdmalab.measure.measurement import Counters, Measurement, Point, Proof
from rdmalab.measure.report.statistics import PER_MILLE, Percentiles, is_founded, percentiles


class ProofCell(TypedDict):
    """Why the row's numbers may be read, or why there are none.

    ``coverage`` is the share of the packets posted that the transport's counters saw at
    each end, in per cent; ``None`` where nothing was posted or a counter is unsupported.
    """

    verdict: str
    reason: str
    coverage: list[float | None]


class Row(TypedDict):
    """One measurement. Latencies in microseconds, ``mib_s`` in MiB per second, ``size`` in
    bytes; a number is ``None`` where it was not measured, is not founded on enough samples,
    or its transport was not proven."""

    tool: str
    kind: str
    op: str
    mode: str
    size: int
    qps: int
    direction: str
    service: str
    transport: str
    link: str
    round: int
    p50_us: float | None
    p90_us: float | None
    p99_us: float | None
    p999_us: float | None
    max_us: float | None
    mib_s: float | None
    samples: int
    proof: ProofCell
    accelerator: str
    vcpus: int
    kernel: str


#: Of its iterations perftest has one interval fewer, and takes its percentiles without the
#: two slowest (LAT_MEASURE_TAIL).
PERFTEST_DROPS = 3

#: What perftest and we ourselves may call a percentile that was given, not recorded.
_GIVEN_NAMES = {
    "p50_us": ("p50_us", "p50", "typical"),
    "p90_us": ("p90_us", "p90"),
    "p99_us": ("p99_us", "p99"),
    "p999_us": ("p999_us", "p999", "p99.9"),
    "max_us": ("max_us", "max"),
}


def identity(measurement: Measurement) -> tuple[str, Point, str]:
    """What makes two measurements rounds of one: tool, point and link."""
    return measurement.tool, measurement.point, measurement.link


def is_proven(measurement: Measurement) -> bool:
    return measurement.proof.verdict == "proven"


def to_rows(measurements: Sequence[Measurement]) -> list[Row]:
    """One row a measurement, in order; ``round`` counts repeats of one point from 1."""
    seen: Counter[tuple[str, Point, str]] = Counter()
    rows = []
    for measurement in measurements:
        key = identity(measurement)
        seen[key] += 1
        rows.append(to_row(measurement, seen[key]))
    return rows


def to_row(measurement: Measurement, round_number: int = 1) -> Row:
    """The measurement's row. Raises RdmalabError where a recorded sample is no number."""
    point = measurement.point
    proven = is_proven(measurement)
    shown = row_percentiles(measurement) if proven else _NO_PERCENTILES
    return Row(
        tool=measurement.tool,
        kind=point.kind,
        op=point.op,
        mode=point.mode,
        size=point.size,
        qps=point.qps,
        direction=point.direction,
        service=point.service,
        transport=point.transport,
        link=measurement.link,
        round=round_number,
        p50_us=shown.p50_us,
        p90_us=shown.p90_us,
        p99_us=shown.p99_us,
        p999_us=shown.p999_us,
        max_us=shown.max_us,
        mib_s=measurement.mib_s if proven else None,
        samples=sample_count(measurement),
        proof=ProofCell(
            verdict=measurement.proof.verdict,
            reason=measurement.proof.reason,
            coverage=coverage(measurement.proof),
        ),
        accelerator=measurement.accelerator,
        vcpus=measurement.vcpus,
        kernel=measurement.kernel,
    )


def row_percentiles(measurement: Measurement) -> Percentiles:
    """From the recorded samples; else what the tool gave, under the same rule of ten."""
    if measurement.samples_us:
        try:
            return percentiles(measurement.samples_us)
        except ValueError as error:
            raise RdmalabError(
                f"{measurement.tool} {measurement.point.op} {measurement.point.size} B over "
                f"{measurement.point.transport} has no percentiles",
                seen=str(error),
            ) from error
    given = {
        key: next(
            (measurement.given_us[name] for name in names if name in measurement.given_us), None
        )
        for key, names in _GIVEN_NAMES.items()
    }
    for key, per_mille in PER_MILLE.items():
        if not is_founded(sample_count(measurement), per_mille):
            given[key] = None
    return Percentiles(**given)


def sample_count(measurement: Measurement) -> int:
    """Latencies behind the percentiles: recorded, or timed inside a tool that gives only
    percentiles; 0 for a bandwidth, which is one figure over all its messages."""
    if measurement.samples_us or not measurement.given_us:
        return len(measurement.samples_us)
    if measurement.tool == "perftest":
        return max(0, measurement.point.iterations - PERFTEST_DROPS)
    return measurement.point.iterations


def coverage(proof: Proof) -> list[float | None]:
    """Per cent of the packets posted that each end's counters saw: the worse of what it
    sent and what it received."""
    forward, backward = proof.posted
    first, second = proof.ends
    return [_end_coverage(first, forward, backward), _end_coverage(second, backward, forward)]


def proof_text(proof: Proof) -> str:
    """A few characters: ``proven 99.8/100.0 %``, ``refused``."""
    if proof.verdict != "proven":
        return proof.verdict
    shares = coverage(proof)
    if all(share is None for share in shares):
        return proof.verdict
    return f"{proof.verdict} {'/'.join(_per_cent(share) for share in shares)} %"


def _end_coverage(end: Counters, out: int, back: int) -> float | None:
    shares = []
    for seen, posted in ((end.sent, out), (end.received, back)):
        if posted <= 0:
            continue
        if seen is None:
            return None
        # Rounded down, so that 100 is all of them.
        shares.append(10_000 * seen // posted / 100)
    return min(shares, default=None)


def _per_cent(share: float | None) -> str:
    if share is None:
        return "?"
    # Rounded down like the share itself. Retransmissions and acknowledgements make more
    # packets than were posted; the excess proves nothing more.
    return f"{round(min(share, 100.0) * 100) // 10 / 10:.1f}"


_NO_PERCENTILES = Percentiles(None, None, None, None, None)
