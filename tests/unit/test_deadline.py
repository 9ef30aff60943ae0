# SPDX-License-Identifier: Apache-2.0
"""Layered deadlines on a clock that the tests move."""

from __future__ import annotations

import pytest

from rdmalab.errors import DeadlineExceeded, UsageError
from rdmalab.lab.deadline import MAX_SLOW_FACTOR, Deadlines, Idle, slow_factor


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


class TestSlowFactor:
    @pytest.mark.parametrize(
        ("boot", "wanted"),
        [(0.0, 1.0), (3.0, 1.0), (6.0, 1.0), (12.0, 2.0), (9.0, 1.5), (1e9, MAX_SLOW_FACTOR)],
    )
    def test_it_is_the_ratio_and_never_below_one(self, boot: float, wanted: float) -> None:
        assert slow_factor(boot, 6.0, {}) == wanted

    def test_the_environment_overrides(self) -> None:
        assert slow_factor(60.0, 6.0, {"RDMALAB_SLOW_FACTOR": "2.5"}) == 2.5
        assert slow_factor(60.0, 6.0, {"RDMALAB_SLOW_FACTOR": ""}) == 10

    @pytest.mark.parametrize("text", ["fast", "0", "0.5", "-1", "nan", "inf", "1e9"])
    def test_a_bad_override_is_wrong_use(self, text: str) -> None:
        with pytest.raises(UsageError, match="RDMALAB_SLOW_FACTOR"):
            slow_factor(6.0, 6.0, {"RDMALAB_SLOW_FACTOR": text})

    def test_a_bad_measurement_is_a_bug(self) -> None:
        with pytest.raises(ValueError, match="reference"):
            slow_factor(1.0, 0.0, {})


class TestDeadlines:
    def test_without_a_layer_there_is_no_end(self, clock: Clock) -> None:
        deadlines = Deadlines(clock=clock)
        assert deadlines.remaining() == float("inf")
        assert deadlines.passed() is None

    def test_the_nearest_counts_whatever_the_order(self, clock: Clock) -> None:
        deadlines = Deadlines(2.0, clock)
        with deadlines.layer("run", 100, scaled=False), deadlines.layer("test", 10):
            assert deadlines.remaining() == 20
            own = deadlines.make("command", 5)
            assert deadlines.remaining(own) == 10
            clock.now += 15
            assert deadlines.passed(own) is own
            passed = deadlines.passed()
            assert passed is None
            clock.now += 5
            passed = deadlines.passed()
            assert passed is not None
            assert (passed.layer, passed.seconds) == ("test", 20)
            assert deadlines.remaining() == 0
        assert deadlines.remaining() == float("inf")

    def test_an_outer_layer_that_is_nearer_ends_the_inner(self, clock: Clock) -> None:
        deadlines = Deadlines(clock=clock)
        with deadlines.layer("run", 5), deadlines.layer("test", 60):
            assert deadlines.remaining() == 5

    def test_the_error_names_layer_and_seconds(self, clock: Clock) -> None:
        deadline = Deadlines(3.0, clock).make("test", 10)
        error = deadline.error("sleep 99: still running", node="node0")
        assert isinstance(error, DeadlineExceeded)
        assert str(error) == "node0: sleep 99: still running: the test deadline of 30 s passed"

    def test_a_factor_below_one_is_a_bug(self) -> None:
        with pytest.raises(ValueError, match="below 1"):
            Deadlines(0.5)


def test_idle_starts_anew_at_each_sign_of_life(clock: Clock) -> None:
    idle = Idle(Deadlines(2.0, clock), 10)
    clock.now += 15
    idle.touch()
    clock.now += 15
    idle.check("console")
    clock.now += 5
    with pytest.raises(DeadlineExceeded, match="silent for 20 s"):
        idle.check("console")
