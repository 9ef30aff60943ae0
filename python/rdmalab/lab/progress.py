# SPDX-License-Identifier: Apache-2.0
"""Progress of long work, on stderr: bars on a terminal, one line a step elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars


class Step:
    """One step under way; ``update`` may be called as often as one likes."""

    def __init__(self, bars: Bars | None, title: str) -> None:
        self._bars = bars
        self._task = bars.add_task(title, total=None, detail="") if bars else None

    def update(self, fraction: float | None = None, detail: str = "") -> None:
        """``fraction`` 0..1, None where unknown; ``detail`` a few words."""
        if self._bars is None or self._task is None:
            return
        if fraction is None:
            self._bars.update(self._task, detail=detail[:40])
        else:
            self._bars.update(self._task, completed=fraction, total=1.0, detail=detail[:40])


class Progress:
    """Steps of one command. Steps do not nest."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, highlight=False)

    def say(self, line: str) -> None:
        """A line that stays."""
        self.console.print(line, markup=False, soft_wrap=True)

    @contextmanager
    def step(self, title: str) -> Iterator[Step]:
        """Show ``title`` while the block runs and its seconds when it is done."""
        began = time.monotonic()
        if self.console.is_terminal:
            with Bars(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[detail]}"),
                TimeElapsedColumn(),
                console=self.console,
                transient=True,
            ) as bars:
                yield Step(bars, title)
        else:
            self.say(f"{title} ...")
            yield Step(None, title)
        self.say(f"{title}: {time.monotonic() - began:.1f} s")
