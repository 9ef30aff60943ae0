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
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    table.add_column("function", no_wrap=True, max_width=32, overflow="ellipsis")
    for name in ("calls", *names, "sum", "range %", "%"):
        table.add_column(name, justify="right", no_wrap=True)
    whole = result.total.median
    for cost in result.functions[:top]:
        module = f" [{cost.function.module}]" if cost.function.module else ""
        each = [cost.nodes.get(name, 0.0) for name in names]
        _row(table, f"{cost.function.name}{module}", cost.calls, each, cost.all, whole)
    rest = result.functions[top:]
    if rest:
        each = [sum(cost.nodes.get(name, 0.0) for cost in rest) for name in names]
        rounds = range(len(result.total.rounds))
        others = Figure(tuple(sum(cost.all.rounds[i] for cost in rest) for i in rounds))
        _row(table, f"({len(rest)} others)", None, each, others, whole)
    table.add_section()
    kernels = [node.kernel.median for node in result.nodes]
    users = [node.user.median for node in result.nodes]
    both = [kernel + user for kernel, user in zip(kernels, users, strict=True)]
    timers = [node.timer.median * node.timer_cost for node in result.nodes]
    bare = [value - timer for value, timer in zip(both, timers, strict=True)]
    _row(table, "kernel", None, kernels, result.kernel, whole)
    _row(table, "user space", None, users, result.user, whole)
    _row(table, "total", None, both, result.total, whole)
    _row(table, "total without timer interrupts", None, bare, result.without_timer, whole)
    console.print(table)
    low, high = result.counts
    console.print(
        f"Median of {len(result.total.rounds)} rounds, slope between {low} and {high} round "
        f"trips; range: of the rounds, in per cent of their median."
    )
    timer = ", ".join(
        f"{node.node} {node.timer.median:.2f} x {node.timer_cost:,.0f}" for node in result.nodes
    )
    console.print(f"Timer interrupts a round trip, and instructions for one: {timer}.")
    idle = ", ".join(f"{node.node} {node.idle:,.0f}" for node in result.nodes)
    console.print(f"An idle node executes in the time of a round trip: {idle}.")
    runs = [node.node for node in result.nodes if node.bracket == "run"]
    if runs:
        console.print(
            f"{', '.join(runs)}: counted from request to answer; there is no loop to bracket."
        )
    console.print(f"Proof: {result.proof.proof.reason}")


def _row(
    table: Table, name: str, calls: float | None, nodes: list[float], every: Figure, whole: float
) -> None:
    spread = every.spread_percent
    table.add_row(
        Text(name),
        "" if calls is None else f"{calls:.2f}",
        *(f"{value:,.0f}" for value in nodes),
        f"{every.median:,.0f}",
        "" if spread is None or len(every.rounds) < 2 else f"{spread:.1f}",
        f"{100 * every.median / whole:.1f}" if whole else "",
    )
