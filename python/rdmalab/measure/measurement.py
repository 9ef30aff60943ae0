# SPDX-License-Identifier: Apache-2.0
"""One measurement: what was asked, what was recorded, and the proof of what carried it."""

from __future__ import annotations

from dataclasses import dataclass, field

from rdmalab.probe.histogram import Histogram


@dataclass(frozen=True)
class Counters:
    """Packet deltas at one end of the link while the measurement ran.

    ``None`` means that the counter is unsupported there, never zero.
    """

    node: str
    sent: int | None
    received: int | None
    rival_sent: int | None
    rival_received: int | None


@dataclass(frozen=True)
class Proof:
    """Why a number may be shown: packet deltas at both ends cover at least 95 % of the
    packets posted, and the rival transport's do not.

    ``posted`` is the number of packets that the posted work needs in each direction
    (initiator to target, target to initiator).
    """

    transport: str
    posted: tuple[int, int]
    ends: tuple[Counters, Counters]
    verdict: str  # "proven" or "refused"
    reason: str  # one line; for "proven" the coverage in per cent at both ends


@dataclass(frozen=True)
class Point:
    """What is asked of one measurement. Sizes in bytes."""

    op: str  # send | write | write_imm | read | fetch_add | cmp_swap ; tcp knows send only
    size: int
    mode: str = "event"  # event | poll
    qps: int = 1
    direction: str = "one-way"  # one-way | two-way (bandwidth only)
    kind: str = "latency"  # latency | bandwidth
    transport: str = "rxe"  # rxe | tcp | the name of a real device's driver
    service: str = "RC"  # RC | UC | UD
    iterations: int = 2000
    warmup: int = 100


@dataclass(frozen=True)
class Measurement:
    """One row set. ``samples_us`` are latencies in microseconds in the order taken: half a
    round trip for send and write, a whole one for read and atomics. For a tool that gives
    only percentiles (perftest) ``samples_us`` is empty and ``given_us`` has them by name."""

    tool: str  # rdmalab | perftest
    point: Point
    link: str
    nodes: tuple[str, str]
    accelerator: str  # tcg | kvm | hardware
    vcpus: int
    kernel: str
    proof: Proof
    samples_us: tuple[float, ...] = ()
    given_us: dict[str, float] = field(default_factory=dict)
    mib_s: float | None = None
    seconds: float = 0.0
    histograms: tuple[Histogram, ...] = ()
