# SPDX-License-Identifier: Apache-2.0
"""Counted instructions as a table for a terminal, 80 columns wide."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rdmalab.measure.instructions import Figure, Instructions
from rdmalab.measure.report.text import byte_size

TOP = 25


def print_instructions(console: Console, result: Instructions, top: int = TOP) -> None:
    """The dearest ``top`` functions, what the others come to, and the totals."""
    point = result.point
    names = [node.node for node in result.nodes]
    console.print(
        Text(f"{result.accelerator}, {result.vcpus} vCPU, {result.kernel_release}", style="bold")
    )
    title = (
        f"Guest instructions a round trip: {point.transport} {point.op} "
        f"{byte_size(point.size)}, {point.mode} mode"
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("function", no_wrap=True, max_width=30, overflow="ellipsis")
    table.add_column("module", no_wrap=True, max_width=10, overflow="ellipsis")
    for name in (*names, "sum"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("range", justify="right", no_wrap=True)
    table.add_column("%", justify="right", no_wrap=True)
    whole = result.total.median
    shown = result.functions[:top]
    for cost in shown:
        each = [cost.nodes.get(name, 0.0) for name in names]
        _row(table, cost.function.name, cost.function.module, each, cost.all, whole)
    rest = result.functions[top:]
    if rest:
        each = [sum(cost.nodes.get(name, 0.0) for cost in rest) for name in names]
        rounds = range(len(result.total.rounds))
        others = Figure(tuple(sum(cost.all.rounds[i] for cost in rest) for i in rounds))
        _row(table, f"({len(rest)} others)", "", each, others, whole)
    table.add_section()
    kernels = [node.kernel.median for node in result.nodes]
    users = [node.user.median for node in result.nodes]
    both = [kernel + user for kernel, user in zip(kernels, users, strict=True)]
    _row(table, "kernel", "", kernels, result.kernel, whole)
    _row(table, "user space", "", users, result.user, whole)
    _row(table, "total", "", both, result.total, whole)
    console.print(table)
    spread = result.total.spread_percent
    low, high = result.counts
    console.print(
        f"Median of {len(result.total.rounds)} rounds, slope between {low} and {high} round "
        f"trips; the total's range is {spread or 0.0:.2f} % of it."
    )
    idle = ", ".join(f"{node.node} {node.idle:,.0f}" for node in result.nodes)
    console.print(f"An idle node executes in the time of a round trip: {idle}.")
    runs = [node.node for node in result.nodes if node.bracket == "run"]
    if runs:
        console.print(
            f"{', '.join(runs)}: counted from request to answer; there is no loop to bracket."
        )
    console.print(f"Proof: {result.proof.proof.reason}")


def _row(
    table: Table, name: str, module: str, nodes: list[float], every: Figure, whole: float
) -> None:
    table.add_row(
        name,
        module,
        *(f"{value:,.0f}" for value in nodes),
        f"{every.median:,.0f}",
        f"{every.low:,.0f}..{every.high:,.0f}" if len(every.rounds) > 1 else "",
        f"{100 * every.median / whole:.1f}" if whole else "",
    )
