# SPDX-License-Identifier: Apache-2.0
"""Deadlines in layers: boot, idle, per test, whole run, each times a slow-machine factor.

A layer is pushed for as long as it applies; what waits asks the stack how long it may
still wait, and so a wait inside ssh ends in time for the test that it belongs to.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from rdmalab.errors import DeadlineExceeded, UsageError

REFERENCE_BOOT_SECONDS = 9.0
"""Two fast guests to ssh on the machine for which the layers below were chosen
(two cores, TCG, otherwise idle)."""

MAX_SLOW_FACTOR = 20.0
"""A boot slower than this many references is a fault to be seen, not a slow machine."""

SLOW_FACTOR_VARIABLE = "RDMALAB_SLOW_FACTOR"

_Clock = Callable[[], float]


@dataclass(frozen=True)
class Layers:
    """Seconds on the reference machine, before the slow-machine factor.

    ``boot``: from QEMU's start to an answer over ssh. ``idle``: longest silence of
    something that should be talking. ``test``: one test's call. ``run``: the session;
    it alone is not multiplied, since whoever waits for it does not know the factor.
    ``boot`` is generous because the factor is only known after it.
    """

    boot: float = 120.0
    idle: float = 30.0
    test: float = 60.0
    run: float = 3600.0


def slow_factor(
    boot_seconds: float,
    reference: float = REFERENCE_BOOT_SECONDS,
    environment: Mapping[str, str] | None = None,
) -> float:
    """How many times slower than the reference this machine is: never below 1, at most
    ``MAX_SLOW_FACTOR``. ``RDMALAB_SLOW_FACTOR`` overrides the measurement.

    Raises UsageError for an override that is no number of at least 1.
    """
    given = (os.environ if environment is None else environment).get(SLOW_FACTOR_VARIABLE, "")
    if given:
        try:
            factor = float(given)
        except ValueError:
            factor = float("nan")
        if not 1.0 <= factor <= 1000.0:  # false for NaN too
            raise UsageError(
                f"{SLOW_FACTOR_VARIABLE} is no factor",
                seen=repr(given),
                todo="give a number from 1 to 1000, or unset it",
            )
        return factor
    if reference <= 0 or boot_seconds < 0:
        raise ValueError(f"boot {boot_seconds} s against a reference of {reference} s")
    return min(max(boot_seconds / reference, 1.0), MAX_SLOW_FACTOR)


@dataclass(frozen=True)
class Deadline:
    """One moment after which a layer's step has failed. ``seconds`` is its whole length,
    factor included; ``at`` is on the clock that made it."""

    layer: str
    seconds: float
    at: float

    def error(self, what: str, *, node: str = "", seen: str = "") -> DeadlineExceeded:
        """The one line that names this deadline."""
        return DeadlineExceeded(
            what, node=node, seen=seen or f"the {self.layer} deadline of {self.seconds:g} s passed"
        )


class Deadlines:
    """The layers that apply now, outermost first. Threads may share one."""

    def __init__(self, factor: float = 1.0, clock: _Clock = time.monotonic) -> None:
        if not factor >= 1.0:
            raise ValueError(f"slow-machine factor {factor} is below 1")
        self.factor = factor
        self._clock = clock
        self._lock = threading.Lock()
        self._stack: list[Deadline] = []

    def make(self, layer: str, seconds: float, *, scaled: bool = True) -> Deadline:
        """A deadline ``seconds`` from now (times the factor unless told otherwise)."""
        length = seconds * self.factor if scaled else seconds
        return Deadline(layer, length, self._clock() + length)

    @contextmanager
    def layer(self, layer: str, seconds: float, *, scaled: bool = True) -> Iterator[Deadline]:
        """Apply a layer to all that runs inside, in whatever thread."""
        deadline = self.make(layer, seconds, scaled=scaled)
        self.push(deadline)
        try:
            yield deadline
        finally:
            self.pop(deadline)

    def push(self, deadline: Deadline) -> None:
        with self._lock:
            self._stack.append(deadline)

    def pop(self, deadline: Deadline) -> None:
        with self._lock:
            # By identity: two layers of one length are equal.
            self._stack = [each for each in self._stack if each is not deadline]

    def nearest(self, own: Deadline | None = None) -> Deadline | None:
        """The deadline that comes first, of all layers and ``own``."""
        with self._lock:
            candidates = [*self._stack]
        if own is not None:
            candidates.append(own)
        return min(candidates, key=lambda each: each.at, default=None)

    def remaining(self, own: Deadline | None = None) -> float:
        """Seconds until the nearest deadline: infinity without one, never negative."""
        nearest = self.nearest(own)
        return float("inf") if nearest is None else max(0.0, nearest.at - self._clock())

    def passed(self, own: Deadline | None = None) -> Deadline | None:
        """The nearest deadline if it has passed."""
        nearest = self.nearest(own)
        return nearest if nearest is not None and nearest.at <= self._clock() else None


class Idle:
    """A deadline that starts anew at each sign of life."""

    def __init__(self, deadlines: Deadlines, seconds: float) -> None:
        self._deadlines = deadlines
        self._seconds = seconds
        self._deadline = deadlines.make("idle", seconds)

    def touch(self) -> None:
        """There was a sign of life just now."""
        self._deadline = self._deadlines.make("idle", self._seconds)

    def check(self, what: str, *, node: str = "") -> None:
        """Raise DeadlineExceeded if the silence has lasted too long."""
        if self._deadlines.passed(self._deadline) is self._deadline:
            raise self._deadline.error(
                what, node=node, seen=f"silent for {self._deadline.seconds:g} s (idle deadline)"
            )
