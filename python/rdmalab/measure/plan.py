# SPDX-License-Identifier: Apache-2.0
"""What is asked on the command line, as points."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields

from rdmalab.errors import UsageError
from rdmalab.measure.measurement import Point
from rdmalab.measure.node import loops
from rdmalab.rdma import profile as profiles

_SIZE = re.compile(r"(\d+)([KM]?)", re.I)
_FACTORS = {"": 1, "K": 1 << 10, "M": 1 << 20}

#: What one measurement moves at most by default: an emulated link carries 10 to 40 MB/s.
_BYTES = 64 << 20
_MIN_MESSAGES, _MAX_MESSAGES = 5, 2000


def parse_sizes(text: str) -> tuple[int, ...]:
    """``"64,4K,8M"`` as bytes, in order, each once. UsageError for anything else."""
    sizes = []
    for word in text.split(","):
        match = _SIZE.fullmatch(word.strip())
        if not match:
            raise UsageError(f"{word.strip()!r} is no size", todo="write 64, 4K or 1M")
        size = int(match[1]) * _FACTORS[match[2].upper()]
        if not loops.MIN_SIZE <= size <= loops.MAX_SIZE:
            raise UsageError(
                f"size {word.strip()}", todo=f"allowed: {loops.MIN_SIZE} to {loops.MAX_SIZE} bytes"
            )
        sizes.append(size)
    return tuple(dict.fromkeys(sizes))


def default_messages(size: int) -> int:
    """As many as move 64 MiB, from 5 to 2,000."""
    return max(_MIN_MESSAGES, min(_MAX_MESSAGES, _BYTES // size))


def latency_points(
    transports: Sequence[str],
    services: Sequence[str],
    ops: Sequence[str],
    modes: Sequence[str],
    sizes: Sequence[int],
    samples: int,
    warmup: int,
) -> list[Point]:
    """Every combination. UsageError, before anything runs, for one that cannot be measured;
    sizes of atomics are 8 whatever ``sizes`` say."""
    return _checked(
        _points("latency", transports, services, ops, modes, sizes, samples, warmup, 1, "one-way")
    )


def bandwidth_points(
    transports: Sequence[str],
    services: Sequence[str],
    ops: Sequence[str],
    modes: Sequence[str],
    sizes: Sequence[int],
    samples: int,
    warmup: int,
    qps: int,
    direction: str,
) -> list[Point]:
    """As ``latency_points``. ``samples`` 0: ``default_messages``."""
    return _checked(
        _points(
            "bandwidth", transports, services, ops, modes, sizes, samples, warmup, qps, direction
        )
    )


def sweep_points(
    transports: Sequence[str],
    services: Sequence[str],
    ops: Sequence[str],
    modes: Sequence[str],
    sizes: Sequence[int],
    samples: int,
    warmup: int,
) -> tuple[list[Point], list[str]]:
    """Latency and bandwidth of every combination that can be measured, and why the others
    are not there. UsageError when none is left."""
    points, left_out = [], []
    for kind in ("latency", "bandwidth"):
        for point in _points(
            kind, transports, services, ops, modes, sizes, samples, warmup, 1, "one-way"
        ):
            try:
                loops.refuse(point)
            except UsageError as error:
                left_out.append(str(error))
            else:
                points.append(point)
    if not points:
        raise UsageError("nothing is left to measure", seen=left_out[0] if left_out else "")
    return points, left_out


def profile_settings(name: str) -> dict[str, object]:
    """A queue pair profile as settings that a node's driver can apply. Service, mode and
    queue depths are the measurement's own. UsageError for a file that is none."""
    profile = profiles.load(name)
    if name == "default":
        # The driver's own defaults for RNR hold, which are perftest's.
        return {}
    own = {"service", "cq_mode", "send_depth", "recv_depth", "max_sge"}
    settings = {
        field.metadata["name"] or field.name: getattr(profile, field.name)
        for field in fields(profile)
        if field.name not in own
    }
    if settings["path_mtu"] == profiles.ACTIVE_MTU:
        settings["path_mtu"] = "active"
    return settings


def _points(
    kind: str,
    transports: Sequence[str],
    services: Sequence[str],
    ops: Sequence[str],
    modes: Sequence[str],
    sizes: Sequence[int],
    samples: int,
    warmup: int,
    qps: int,
    direction: str,
) -> Iterator[Point]:
    seen = set()
    # Size varies slowest, transport fastest: what is compared is measured close together.
    for op, mode, size, service, transport in itertools.product(
        ops, modes, sizes, services, transports
    ):
        if transport == "tcp":
            # As the baseline of any operation: TCP has no other than to send.
            op, service = "send", "RC"
        elif op in ("fetch_add", "cmp_swap"):
            size = 8
        messages = samples or default_messages(size)
        point = Point(
            op=op,
            size=size,
            mode=mode,
            qps=qps,
            direction=direction,
            kind=kind,
            transport=transport,
            service=service,
            iterations=messages,
            warmup=min(warmup, messages),
        )
        if point not in seen:
            seen.add(point)
            yield point


def _checked(points: Iterator[Point]) -> list[Point]:
    checked = list(points)
    for point in checked:
        loops.refuse(point)
    return checked
