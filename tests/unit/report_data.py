# SPDX-License-Identifier: Apache-2.0
"""Made-up measurements for the report's tests: shaped like real ones, never shipped."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache
from typing import Any

from rdmalab.measure.measurement import Counters, Measurement, Point, Proof
from rdmalab.probe.buckets import BUCKETS, bucket_of, to_buckets
from rdmalab.probe.histogram import Bucket, Histogram

KERNEL = "7.3.4+deb13-amd64"
NODES = ("node0", "node1")

MANIFEST: dict[str, Any] = {
    "schema": 1,
    "name": "vm-test",
    "rdmalab": "0.1.0",
    "git": {"revision": "3f9c2ab4d6e1c0b7a9f8e7d6c5b4a39281706f5e", "dirty": False},
    "argv": ["rdmalab", "vm-test"],
    "started": "2026-11-30T18:42:07+00:00",
    "ended": "2026-11-30T18:44:30+00:00",
    "exit_status": 0,
    "counts": {"passed": 14, "failed": 0},
    "seed": 20261130,
    "lab": {
        "name": "vm-test",
        "tier": "stock",
        "kernel": KERNEL,
        "accelerator": "tcg",
        "vcpus": 1,
        "mode": "fast",
        "topology": "pair",
        "slow_factor": 1.4,
        "nodes": ["node0", "node1"],
    },
    "versions": {"qemu-system-x86": "11.1.3", "rdma-core": "56.1-1", "perftest": "25.01.0"},
}


def proven(transport: str, packets: int, *, lost: int = 0) -> Proof:
    """A proof whose second end saw ``lost`` packets fewer than were posted."""
    return Proof(
        transport=transport,
        posted=(packets, packets),
        ends=(
            Counters(NODES[0], packets, packets, 3, 2),
            Counters(NODES[1], packets - lost, packets - lost, 2, 3),
        ),
        verdict="proven",
        reason=f"{100.0:.1f} % and {100.0 * (packets - lost) / packets:.1f} % of the packets "
        "posted, rival idle",
    )


def refused(transport: str, packets: int) -> Proof:
    return Proof(
        transport=transport,
        posted=(packets, packets),
        ends=(
            Counters(NODES[0], 12, 11, packets, packets),
            Counters(NODES[1], 11, 12, packets, packets),
        ),
        verdict="refused",
        reason="node0: rxe counters cover 0.6 % of the packets posted and tcp's cover 100 %",
    )


@cache  # a sweep has hundred thousands of samples, which many tests only read
def measurement(
    *,
    tool: str = "rdmalab",
    samples: int = 2000,
    median_us: float = 640.0,
    seed: int = 1,
    proof: Proof | None = None,
    histograms: tuple[Histogram, ...] = (),
    mib_s: float | None = None,
    **point: Any,
) -> Measurement:
    """A measurement with a log-normal body and a heavy tail, as ping-pong loops have."""
    asked = Point(**{"op": "send", "size": 64, "iterations": samples, **point})
    chance = random.Random(f"{seed} {tool} {asked}")
    latencies: tuple[float, ...] = ()
    given: dict[str, float] = {}
    if asked.kind == "latency":
        latencies = tuple(
            median_us
            * math.exp(chance.gauss(0.0, 0.09))
            * (1.0 + (chance.paretovariate(1.4) if chance.random() < 0.012 else 0.0))
            for _ in range(samples)
        )
        if tool == "perftest":
            ordered = sorted(latencies)
            given = {
                "p50_us": ordered[samples // 2],
                "p99_us": ordered[samples * 99 // 100],
                "p999_us": ordered[samples * 999 // 1000],
                "max_us": ordered[-1],
            }
            latencies = ()
    return Measurement(
        tool=tool,
        point=asked,
        link="roce0",
        nodes=NODES,
        accelerator="tcg",
        vcpus=1,
        kernel=KERNEL,
        proof=proof or proven(asked.transport, samples),
        samples_us=latencies,
        given_us=given,
        mib_s=mib_s,
        seconds=samples * median_us * 2e-6,
        histograms=histograms,
    )


@cache
def probes(seed: int, scale: float = 1.0) -> tuple[Histogram, ...]:
    """What the probes of one measurement leave on both nodes, in the buckets that they count in."""
    chance = random.Random(seed)
    found = []
    for node in NODES:
        for probe, key, median in (
            ("post_to_completion", "SEND", 610_000.0),
            ("post_to_completion", "RECV", 1_240_000.0),
            ("driver", "rxe_post_send", 31_000.0),
            ("driver", "rxe_requester", 52_000.0),
            ("driver", "rxe_responder", 47_000.0),
            ("driver", "rxe_completer", 22_000.0),
            ("workqueue_delay", "rxe_wq", 84_000.0),
        ):
            values = [int(median * scale * math.exp(chance.gauss(0, 0.5))) for _ in range(2000)]
            found.append(Histogram(node, probe, key, "ns", _counted(values)))
        polls = (Bucket(0, 1, 412), Bucket(1, 2, 1913), Bucket(2, 3, 41), Bucket(5, 6, 3))
        found.append(Histogram(node, "completions_per_poll", "", "count", polls))
        found.append(Histogram(node, "idle", "", "ns"))
        found.append(
            Histogram(
                node, "driver", "rxe_sender", "ns", (), "no function rxe_sender in this kernel"
            )
        )
    return tuple(found)


def _counted(values: list[int]) -> tuple[Bucket, ...]:
    indices = [bucket_of(value) for value in values]
    return to_buckets([indices.count(index) for index in range(BUCKETS)])


def table_run() -> list[Measurement]:
    """What the main job leaves: rxe, TCP and perftest, alternating, three rounds."""
    found = []
    for number in range(3):
        drift = 1.0 + 0.06 * number
        for size, base in ((64, 640.0), (4096, 910.0)):
            found += [
                measurement(
                    transport="rxe",
                    size=size,
                    median_us=base * drift,
                    seed=number,
                    proof=proven("rxe", 2100, lost=4),
                    histograms=probes(number, base / 640.0),
                ),
                measurement(transport="tcp", size=size, median_us=0.62 * base * drift, seed=number),
                measurement(
                    tool="perftest",
                    transport="rxe",
                    size=size,
                    median_us=0.93 * base * drift,
                    seed=number,
                ),
            ]
    return found


def sweep_run() -> list[Measurement]:
    """A sweep over every size, with one refusal in it."""
    found = table_run()
    for power in range(1, 24, 2):
        size = 2**power
        for transport, fixed, per_byte in (("rxe", 620.0, 0.06), ("tcp", 400.0, 0.012)):
            found.append(
                measurement(
                    transport=transport,
                    size=size,
                    mode="poll",
                    samples=600,
                    median_us=fixed + per_byte * size,
                    proof=refused("rxe", 600) if size == 8192 and transport == "rxe" else None,
                )
            )
            for op in ("send", "write") if transport == "rxe" else ("send",):
                rate = size / (fixed * 0.2 + per_byte * size * (0.9 if op == "write" else 1.0))
                found.append(
                    measurement(
                        transport=transport,
                        op=op,
                        size=size,
                        kind="bandwidth",
                        samples=600,
                        mib_s=rate * 1e6 / 2**20,
                    )
                )
    return found


def with_reason(one: Measurement, reason: str) -> Measurement:
    """The same measurement whose proof says something else."""
    return replace(one, proof=replace(one.proof, reason=reason))
