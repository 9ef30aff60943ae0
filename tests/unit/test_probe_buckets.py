# SPDX-License-Identifier: Apache-2.0
"""The buckets: every value in the bucket whose bounds hold it, in Python and in C alike."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rdmalab.probe
from rdmalab.probe.buckets import BUCKETS, bounds, bucket_of, quantile, to_buckets
from rdmalab.probe.histogram import Bucket

LARGEST = bounds(BUCKETS - 1)[1] - 1


@settings(deadline=None)  # a busy machine is no failure
@given(st.integers(0, LARGEST))
def test_value_lies_in_its_bucket(value: int) -> None:
    low, high = bounds(bucket_of(value))
    assert low <= value < high


@settings(deadline=None)  # a busy machine is no failure
@given(st.integers(LARGEST + 1, 2**64 - 1))
def test_too_large_value_goes_to_the_last_bucket(value: int) -> None:
    assert bucket_of(value) == BUCKETS - 1


def test_buckets_join_without_gap() -> None:
    edges = [bounds(i) for i in range(BUCKETS)]
    assert edges[0][0] == 0
    assert all(one[1] == two[0] for one, two in pairwise(edges))


def test_no_bucket_is_wider_than_a_quarter_of_its_low_bound() -> None:
    assert all(high - low <= max(1, low / 4) for low, high in map(bounds, range(BUCKETS)))


@pytest.fixture(scope="session")
def c_bucket_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], int]:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler (cc, gcc) on this host to compile bucket_of with")
    header = (Path(rdmalab.probe.__file__).parent / "common.bcc.h").read_text()
    match = re.search(r"static __always_inline (u32 bucket_of\(.*?\n})", header, re.DOTALL)
    assert match
    folder = tmp_path_factory.mktemp("bucket")
    source = folder / "bucket.c"
    source.write_text(
        "typedef unsigned int u32; typedef unsigned long long u64;\n"
        f"#define BUCKETS {BUCKETS}\n{match[1]}\n"
    )
    library = folder / "bucket.so"
    subprocess.run(
        [compiler, "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, source], check=True
    )
    function = ctypes.CDLL(str(library)).bucket_of
    function.argtypes = [ctypes.c_uint64]
    function.restype = ctypes.c_uint32
    return lambda value: int(function(value))


@settings(deadline=None)  # a busy machine is no failure
@given(st.integers(0, 2**64 - 1))
def test_c_and_python_agree(c_bucket_of: Callable[[int], int], value: int) -> None:
    assert c_bucket_of(value) == bucket_of(value)


@pytest.mark.parametrize("power", range(64))
def test_c_and_python_agree_around_powers_of_two(
    c_bucket_of: Callable[[int], int], power: int
) -> None:
    for value in {(1 << power) - 1, 1 << power, (1 << power) + 1}:
        assert c_bucket_of(value) == bucket_of(value)


def test_negative_value_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        bucket_of(-1)


@settings(deadline=None)  # a busy machine is no failure
@given(st.lists(st.integers(0, 1000), min_size=BUCKETS, max_size=BUCKETS))
def test_no_count_is_lost_or_made(counts: list[int]) -> None:
    buckets = to_buckets(counts)
    assert sum(b.count for b in buckets) == sum(counts)
    assert all(b.count for b in buckets)
    assert list(buckets) == sorted(buckets, key=lambda b: b.low)


def test_quantile_is_the_upper_bound_of_the_bucket_that_reaches_it() -> None:
    buckets = (Bucket(4, 5, 50), Bucket(8, 10, 49), Bucket(1024, 1280, 1))
    assert quantile(buckets, 0.5) == 5
    assert quantile(buckets, 0.51) == 10
    assert quantile(buckets, 1.0) == 1280
    assert quantile((), 0.5) is None
