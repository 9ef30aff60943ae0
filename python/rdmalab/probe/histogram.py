# SPDX-License-Identifier: Apache-2.0
"""A histogram as a probe reads it out of the kernel."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Bucket:
    """Counts of values with ``low <= value < high`` (in the histogram's unit)."""

    low: int
    high: int
    count: int


@dataclass(frozen=True)
class Histogram:
    """One distribution on one node.

    ``probe`` is the probe's name ("post_to_completion"), ``key`` what it is split by
    ("SEND", "rxe_requester"), ``unit`` "ns" or "count". ``missing`` names why a probe could
    not attach; then ``buckets`` is empty. ``lost`` counts the events that the whole probe
    saw but could not count (the same figure in each of its histograms, so it is not to be
    summed over them).
    """

    node: str
    probe: str
    key: str
    unit: str
    buckets: tuple[Bucket, ...] = ()
    missing: str = ""
    lost: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Histogram:
        buckets = tuple(Bucket(**b) for b in data["buckets"])
        return cls(**{**data, "buckets": buckets})
