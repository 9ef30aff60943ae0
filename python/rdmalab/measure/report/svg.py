# SPDX-License-Identifier: Apache-2.0
"""Charts as SVG that takes its colours and fonts from the page's style sheet.

Drawn here and not by a plotting library, because the page needs what those do not give:
text that stays text, colours that follow the reader's scheme, marks that say their value,
and a second layout for narrow screens, in a few kilobytes a chart.

The classes are those of templates/report.css; ``c0``..``c5`` choose a series' colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from rdmalab.measure.report.scale import Scale

#: Colours there are; further series share the last.
COLOURS = 6


@dataclass(frozen=True)
class Box:
    """Outer width and height in CSS pixels at the scale the chart is meant for."""

    width: float
    height: float
    left: float = 44.0
    right: float = 12.0
    top: float = 22.0
    bottom: float = 34.0

    @property
    def plot_width(self) -> float:
        return self.width - self.left - self.right

    @property
    def plot_height(self) -> float:
        return self.height - self.top - self.bottom


#: For a column of its own: a phone's width, or half a page's.
NARROW = Box(360, 250)
#: As wide as NARROW, for bars.
LOW = Box(360, 190)
#: For the width of the page's main column.
WIDE = Box(800, 320, left=52, bottom=38)


@dataclass
class Chart:
    """A drawing between two axes; coordinates handed in are places between 0 and 1."""

    box: Box
    x: Scale
    y: Scale
    x_name: str
    y_name: str
    title: str
    description: str
    _marks: list[str] = field(default_factory=list)

    def line(self, points: Sequence[tuple[float, float]], style: str) -> None:
        if len(points) > 1:
            self._marks.append(f'<path class="{escape(style)}" d="{self._path(points)}"/>')

    def area(
        self,
        upper: Sequence[tuple[float, float]],
        lower: Sequence[tuple[float, float]],
        style: str,
    ) -> None:
        if len(upper) > 1:
            around = self._path([*upper, *reversed(lower)])
            self._marks.append(f'<path class="{escape(style)}" d="{around}Z"/>')

    def dot(self, point: tuple[float, float], style: str, says: str) -> None:
        """A mark that says its value to a mouse and to a screen reader."""
        x, y = self._place(point)
        self._marks.append(
            f'<circle class="{escape(style)}" cx="{_short(x)}" cy="{_short(y)}" r="3.2">'
            f"<title>{escape(says)}</title></circle>"
        )

    def bar(self, left: float, right: float, top: float, style: str, says: str) -> None:
        x0, y = self._place((left, top))
        x1, base = self._place((right, 0.0))
        # One event among thousands is still to be seen.
        y = min(y, base - 1.5)
        self._marks.append(
            f'<rect class="{escape(style)}" x="{_short(x0)}" y="{_short(y)}" '
            f'width="{_short(x1 - x0)}" height="{_short(base - y)}">'
            f"<title>{escape(says)}</title></rect>"
        )

    def render(self, extra_class: str = "") -> str:
        """The ``<svg>`` element, everything in it escaped."""
        box = self.box
        parts = [
            f'<svg class="chart {escape(extra_class)}" role="img" '
            f'viewBox="0 0 {_short(box.width)} {_short(box.height)}" '
            'xmlns="http://www.w3.org/2000/svg">',
            f"<title>{escape(self.title)}</title><desc>{escape(self.description)}</desc>",
            *self._axes(),
            *self._marks,
            "</svg>",
        ]
        return "".join(parts)

    def _axes(self) -> list[str]:
        box = self.box
        right, bottom = box.width - box.right, box.height - box.bottom
        parts = []
        for tick in self.y.ticks:
            _, y = self._place((0.0, tick.at))
            parts.append(
                f'<path class="grid" d="M{_short(box.left)} {_short(y)}H{_short(right)}"/>'
            )
            parts.append(_text(box.left - 6, y + 4, "end", tick.label))
        for tick in self.x.ticks:
            x, _ = self._place((tick.at, 0.0))
            parts.append(f'<path class="tick" d="M{_short(x)} {_short(bottom)}v4"/>')
            parts.append(_text(x, bottom + 16, _anchor(tick.at), tick.label))
        parts.append(
            f'<path class="axis" d="M{_short(box.left)} {_short(bottom)}H{_short(right)}"/>'
        )
        # A unit stands over its tick labels; longer names need the room from the left edge on.
        short = len(self.y_name) <= 5
        parts.append(
            _text(
                box.left - 6 if short else 0, 12, "end" if short else "start", self.y_name, "name"
            )
        )
        parts.append(_text(right, box.height - 3, "end", self.x_name, "name"))
        return parts

    def _path(self, points: Sequence[tuple[float, float]]) -> str:
        places = [self._place(point) for point in points]
        return "M" + "L".join(f"{_short(x)} {_short(y)}" for x, y in places)

    def _place(self, point: tuple[float, float]) -> tuple[float, float]:
        box = self.box
        return (
            box.left + point[0] * box.plot_width,
            box.top + (1.0 - point[1]) * box.plot_height,
        )


def _anchor(at: float) -> str:
    """Labels at the ends stay inside the drawing."""
    return "end" if at > 0.97 else "middle"


def _text(x: float, y: float, anchor: str, words: str, style: str = "") -> str:
    named = f' class="{style}"' if style else ""
    return (
        f'<text{named} x="{_short(x)}" y="{_short(y)}" text-anchor="{anchor}">'
        f"{escape(words)}</text>"
    )


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
