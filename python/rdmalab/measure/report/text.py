# SPDX-License-Identifier: Apache-2.0
"""Figures as they are printed: three digits that mean something, sizes in binary units."""

from __future__ import annotations

from rdmalab.measure.report.statistics import Spread

#: What stands where there is no number.
NOTHING = "\N{EN DASH}"

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def number(value: float | None) -> str:
    """At most six characters below a million: ``0.0421``, ``8.31``, ``64.2``, ``1250``."""
    if value is None:
        return NOTHING
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 999_999.5 or size < 0.00995:
        return f"{value:.2e}".replace("e+0", "e").replace("e-0", "e-")
    if size >= 99.95:
        return f"{value:.0f}"
    if size >= 9.995:
        return f"{value:.1f}"
    if size >= 0.9995:
        return f"{value:.2f}"
    return f"{value:.3f}" if size >= 0.09995 else f"{value:.4f}"


def axis_number(value: float) -> str:
    """A round number beside an axis: ``0.5``, ``20``, ``5000``, ``20k``, ``1.5M``."""
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= max(factor, 1e4):
            return f"{value / factor:g}{letter}"
    return f"{value:g}"


def byte_size(size: float) -> str:
    """``64 B``, ``4 KiB``, ``1.5 MiB``."""
    unit = 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size /= 1024
        unit += 1
    return f"{size:.4g} {_UNITS[unit]}"


def nanoseconds(value: float) -> str:
    """``512 ns``, ``16.4 µs``, ``2.1 ms``."""
    for unit in ("ns", "µs", "ms"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} s"


def spread(of: Spread | None) -> str:
    """``1.07 (1.02..1.11)``; the range only where there is more than one round."""
    if of is None:
        return NOTHING
    if of.rounds == 1:
        return number(of.median)
    return f"{number(of.median)} ({number(of.low)}..{number(of.high)})"


def counted(count: int, one: str, many: str = "") -> str:
    """``1 round``, ``5 rounds``."""
    return f"{count} {one if count == 1 else many or one + 's'}"
