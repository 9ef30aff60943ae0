# SPDX-License-Identifier: Apache-2.0
"""The tables that a terminal shows, 80 columns wide."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rdmalab.measure.measurement import Measurement
from rdmalab.measure.report.rows import Row, coverage, is_proven, proof_text
from rdmalab.measure.report.series import (
    Cell,
    Comparison,
    Facet,
    to_cells,
    to_comparisons,
    to_facets,
)
from rdmalab.measure.report.setting import TCG_NOTE, setting_of
from rdmalab.measure.report.text import byte_size, counted, number, spread

_PERCENTILES: tuple[tuple[str, Callable[[Row], float | None]], ...] = (
    ("p50", lambda row: row["p50_us"]),
    ("p90", lambda row: row["p90_us"]),
    ("p99", lambda row: row["p99_us"]),
    ("p99.9", lambda row: row["p999_us"]),
    ("max", lambda row: row["max_us"]),
)

# With these the columns of consecutive tables stand under each other, and a line with a
# proof of both ends fits in 80 characters.
_LABEL_WIDTH = 12
_SIZE_WIDTH = 7
_NUMBER_WIDTH = 6


def print_tables(console: Console, measurements: Sequence[Measurement]) -> None:
    """Latency, bandwidth and ratio tables, with the setting said above and, below, why each
    refused measurement has no number."""
    setting = setting_of(measurements)
    console.print(Text(setting.line, style="bold"))
    if setting.emulated:
        console.print(Text(TCG_NOTE, style="yellow"))
    facets = to_facets(to_cells(measurements))
    for facet in facets:
        make = _latency_table if facet.point.kind == "latency" else _bandwidth_table
        console.print()
        console.print(make(facet))
    comparisons = to_comparisons(facets)
    if comparisons:
        console.print()
        console.print(_ratio_table(comparisons))
    _print_refusals(console, measurements)


def worst_proof(cell: Cell) -> Measurement:
    """The round whose proof stands for the cell: a refused one, else the least covered."""

    def strength(one: Measurement) -> tuple[bool, float]:
        shares = [share for share in coverage(one.proof) if share is not None]
        return is_proven(one), min(shares, default=0.0)

    return min(cell.rounds, key=strength)


def _latency_table(facet: Facet) -> Table:
    table = _table(_title(facet, "µs"))
    _column(table, "transport", left=True, width=_LABEL_WIDTH)
    _column(table, "size", width=_SIZE_WIDTH)
    for name, _ in _PERCENTILES:
        _column(table, name, width=_NUMBER_WIDTH)
    _column(table, "proof", left=True)
    for cell in facet.cells:
        table.add_row(
            cell.label,
            byte_size(cell.point.size),
            *(number(_median(cell, figure)) for _, figure in _PERCENTILES),
            _proof(cell),
        )
    return table


def _bandwidth_table(facet: Facet) -> Table:
    table = _table(_title(facet, "MiB/s"))
    _column(table, "transport", left=True, width=_LABEL_WIDTH)
    _column(table, "size", width=_SIZE_WIDTH)
    _column(table, "MiB/s (range of rounds)", width=5 * _NUMBER_WIDTH + 4)
    _column(table, "proof", left=True)
    for cell in facet.cells:
        table.add_row(
            cell.label,
            byte_size(cell.point.size),
            spread(cell.over_rounds(lambda row: row["mib_s"])),
            _proof(cell),
        )
    return table


def _ratio_table(comparisons: Sequence[Comparison]) -> Table:
    table = _table("ratios, round against round")
    _column(table, "compared", left=True)
    _column(table, "size", width=_SIZE_WIDTH)
    _column(table, "of", left=True)
    _column(table, "ratio (range)")
    _column(table, "rounds", left=True)
    for comparison in comparisons:
        point = comparison.subject.point
        note = "" if comparison.alternating else ", not alternating"
        table.add_row(
            f"{comparison.subject.label} / {comparison.base.label}",
            byte_size(point.size),
            f"{point.op} {point.mode} {comparison.figure}",
            spread(comparison.ratio),
            f"{comparison.ratio.rounds}{note}",
        )
    return table


def _title(facet: Facet, unit: str) -> str:
    rounds = max(len(cell.rounds) for cell in facet.cells)
    over = f", median of {counted(rounds, 'round')}" if rounds > 1 else ""
    return f"{facet.title}: {unit}{over}"


def _print_refusals(console: Console, measurements: Sequence[Measurement]) -> None:
    lines = dict.fromkeys(
        f"{one.point.transport} {one.point.op} {byte_size(one.point.size)}: {one.proof.reason}"
        for one in measurements
        if not is_proven(one)
    )
    if lines:
        console.print()
        console.print(Text("No proof, no number:", style="bold red"))
    for line in lines:
        console.print(Text(f"  {line}"))


def _median(cell: Cell, figure: Callable[[Row], float | None]) -> float | None:
    over = cell.over_rounds(figure)
    return over.median if over else None


def _proof(cell: Cell) -> Text:
    worst = worst_proof(cell)
    return Text(proof_text(worst.proof), style="green" if is_proven(worst) else "bold red")


def _table(title: str) -> Table:
    return Table(
        title=Text(title, style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=0,
        pad_edge=False,
    )


def _column(table: Table, header: str, *, left: bool = False, width: int | None = None) -> None:
    # Only the first column may fold: a long name does, before a figure is cut.
    table.add_column(
        header,
        justify="left" if left else "right",
        no_wrap=bool(table.columns),
        min_width=width,
    )
