# SPDX-License-Identifier: Apache-2.0
"""What the probes cost: the same measurement without and with them, in turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Protocol

from rdmalab.errors import RdmalabError, UsageError


class Probes(Protocol):
    """Probes that are on the functions from ``start`` to ``stop`` (ProbeGroup)."""

    def start(self) -> None: ...
    def stop(self) -> object: ...


@dataclass(frozen=True)
class Overhead:
    """``without`` and ``with_probes`` hold one value a round, in the unit of the measurement;
    a ratio is with / without of one round."""

    without: tuple[float, ...]
    with_probes: tuple[float, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        return tuple(w / o for o, w in zip(self.without, self.with_probes, strict=True))

    @property
    def ratio(self) -> float:
        """The median of the rounds' ratios."""
        return median(self.ratios)

    @property
    def spread(self) -> tuple[float, float]:
        """The smallest and the largest of the rounds' ratios."""
        return min(self.ratios), max(self.ratios)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "ratios": self.ratios,
            "ratio": self.ratio,
            "spread": self.spread,
        }


def overhead(measure: Callable[[], float], probes: Probes, rounds: int) -> Overhead:
    """Runs ``measure`` ``rounds`` times without and with ``probes``.

    Which of the two goes first changes from round to round, so that a drift of the machine
    favours neither. RdmalabError where a measurement without probes gives no positive value.
    """
    if rounds < 1:
        raise UsageError(f"{rounds} rounds", todo="ask for one at least")
    without: list[float] = []
    with_probes: list[float] = []
    for turn in range(rounds):
        for probed in (False, True) if turn % 2 == 0 else (True, False):
            if not probed:
                without.append(measure())
                continue
            probes.start()
            try:
                with_probes.append(measure())
            finally:
                probes.stop()
        if not without[-1] > 0:
            raise RdmalabError("no ratio to a measurement of nothing", seen=f"{without[-1]}")
    return Overhead(tuple(without), tuple(with_probes))
