# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of the log-linear buckets that the probes count in.

``common.bcc.h`` has the same in C. Values 0 to 3 have a bucket each; every power of two
above is cut into four buckets of equal width, so a bucket is at most a quarter of its lower
bound wide. The last bucket also takes whatever is larger.
"""

from __future__ import annotations

from collections.abc import Sequence

from rdmalab.probe.histogram import Bucket

BUCKETS = 160
"""Up to 2**41 - 1: in nanoseconds 36 minutes."""


def bucket_of(value: int) -> int:
    """The index of the bucket that counts ``value`` (not negative)."""
    if value < 0:
        raise ValueError(f"a probe counts no negative value: {value}")
    if value < 4:
        return value
    power = value.bit_length() - 1
    index = (power - 1) * 4 + ((value >> (power - 2)) & 3)
    return min(index, BUCKETS - 1)


def bounds(index: int) -> tuple[int, int]:
    """``(low, high)`` of a bucket: it counts ``low <= value < high``."""
    if not 0 <= index < BUCKETS:
        raise ValueError(f"no bucket {index}: there are {BUCKETS}")
    if index < 4:
        return index, index + 1
    power = index // 4 + 1
    width = 1 << (power - 2)
    low = (4 + index % 4) * width
    return low, low + width


def to_buckets(counts: Sequence[int]) -> tuple[Bucket, ...]:
    """``counts`` by bucket index, as the buckets that are not empty, in ascending order."""
    return tuple(Bucket(*bounds(i), count) for i, count in enumerate(counts) if count)


def quantile(buckets: Sequence[Bucket], share: float) -> int | None:
    """The upper bound of the bucket in which the ``share`` (0 to 1) of all values is
    reached; None where nothing was counted."""
    total = sum(b.count for b in buckets)
    if not total:
        return None
    seen = 0
    for bucket in buckets:
        seen += bucket.count
        if seen >= share * total:
            return bucket.high
    return buckets[-1].high
