# SPDX-License-Identifier: Apache-2.0
"""Guest instructions a round trip, by kernel function: the figure that a busy host cannot
blur.

A measurement is run at two iteration counts under QEMU's counting plugin. What differs
between them, divided by the difference of the counts, is the cost of one round trip; what a
run costs once is in both and cancels. What goes on per second and not per round trip, the
timer's interrupts, does not: on a busy host a round trip takes longer and has more of them. So
they are counted, what one costs is measured on a guest that does nothing else, and a total
without them stands beside the total.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter as Multiset
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any, Protocol, TypedDict

from rdmalab.errors import RdmalabError, UsageError
from rdmalab.measure import bench
from rdmalab.measure.counter import BEGIN, END, Counter, Delta, Mark
from rdmalab.measure.kallsyms import Function, Symbols
from rdmalab.measure.measurement import Measurement, Point
from rdmalab.measure.node import loops
from rdmalab.measure.node.request import describe
from rdmalab.measure.proof import kind_of
from rdmalab.measure.report.rows import ProofCell, coverage

COUNTS = (500, 1500)
ROUNDS = 3
#: All of user space, every process of the node: a block's address does not tell whose it is.
USER = Function("(user space)")
#: Where an interrupt of the CPU's timer enters the kernel (arch/x86/include/asm/idtentry.h).
TIMER_ENTRY = "asm_sysvec_apic_timer_interrupt"
#: Several intervals, so that a burst of other work in one of them does not stand for all.
_INTERVALS = 11
_INTERVAL_SECONDS = 0.4

Progress = Callable[[str], None]


class Node(bench.Node, Protocol):
    def run(self, argv: Sequence[str], *, timeout: float = ..., check: bool = ...) -> Any: ...
    def popen(self, argv: Sequence[str]) -> Any: ...


@dataclass(frozen=True)
class Figure:
    """One figure in every round, in order."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.rounds)

    @property
    def low(self) -> float:
        return min(self.rounds)

    @property
    def high(self) -> float:
        return max(self.rounds)

    @property
    def spread_percent(self) -> float | None:
        """The range of the rounds in per cent of their median; None where that is 0."""
        middle = self.median
        return 100.0 * (self.high - self.low) / abs(middle) if middle else None


@dataclass(frozen=True)
class FunctionCost:
    """Instructions a round trip in one function: over all nodes, and the median of each.
    ``calls`` is how often it was entered at its first instruction, None where unknown."""

    function: Function
    all: Figure
    nodes: Mapping[str, float]
    calls: float | None = None


@dataclass(frozen=True)
class NodeCost:
    """Instructions a round trip on one node. ``bracket`` tells what was counted: "loop" (the
    node's program marked its timed loop) or "run" (all between request and answer, of which
    the slope takes what depends on the count). ``idle`` is what the node executes doing nothing
    for as long as a round trip takes. ``timer`` are timer interrupts a round trip,
    ``timer_cost`` the kernel's instructions for one."""

    node: str
    bracket: str
    kernel: Figure
    user: Figure
    idle: float
    timer: Figure
    timer_cost: float


@dataclass(frozen=True)
class Instructions:
    """The result. ``counts`` are the two iteration counts, ``us`` microseconds a round trip
    while counting (no speed: the plugin slows the guest down)."""

    point: Point
    link: str
    counts: tuple[int, int]
    nodes: tuple[NodeCost, ...]
    functions: tuple[FunctionCost, ...]
    kernel: Figure
    user: Figure
    us: Figure
    proof: Measurement
    accelerator: str
    vcpus: int
    kernel_release: str

    @property
    def total(self) -> Figure:
        pairs = zip(self.kernel.rounds, self.user.rounds, strict=True)
        return Figure(tuple(kernel + user for kernel, user in pairs))

    @property
    def without_timer(self) -> Figure:
        """The total less what the counted timer interrupts cost."""
        return Figure(
            tuple(
                all_ - sum(node.timer.rounds[i] * node.timer_cost for node in self.nodes)
                for i, all_ in enumerate(self.total.rounds)
            )
        )


@dataclass(frozen=True)
class Background:
    """What a node does by itself, in intervals: executed while idle, and while a program spun
    in user space and the kernel had little but its timer to serve."""

    idle: tuple[Delta, ...]
    spinning: tuple[Delta, ...]


@dataclass(frozen=True)
class Sample:
    """What one node executed in one run of ``iterations`` round trips."""

    iterations: int
    bracket: str
    delta: Delta


def run(
    from_: Node,
    to: Node,
    point: Point,
    counters: Mapping[str, Counter],
    *,
    setting: bench.Setting,
    counts: tuple[int, int] = COUNTS,
    rounds: int = ROUNDS,
    route: bench.Route | None = None,
    factor: float = 1.0,
    progress: Progress = lambda line: None,
) -> Instructions:
    """Count ``point`` between two nodes; ``counters`` by node's name.

    Raises UsageError for what cannot be counted, RdmalabError where the transport is not
    proven (no proof, no number) or a run fails.
    """
    refuse(point, counts, rounds)
    nodes = (from_, to)
    for node in nodes:
        counters[node.name].hello()
    where = route or bench.route_between(from_, to)
    low, high = counts
    samples: dict[str, list[tuple[Sample, Sample]]] = {node.name: [] for node in nodes}
    proofs: list[Measurement] = []
    with bench.Pair(from_, to, where, factor=factor) as pair:
        # The first run translates, faults pages in and fills caches that the others find.
        progress(f"{describe(point)}: warming up")
        pair.run("rdmalab", replace(point, iterations=low))
        progress("what the nodes do by themselves")
        background = _background(nodes, counters)
        for turn in range(rounds):
            found: dict[int, dict[str, Sample]] = {}
            # Who goes first changes, so that a drift within a round favours neither.
            for count in counts if turn % 2 == 0 else counts[::-1]:
                progress(f"{describe(point)}: {count} round trips, round {turn + 1} of {rounds}")
                found[count], proof = _count(
                    pair, replace(point, iterations=count), counters, setting
                )
                proofs.append(proof)
            for name, pairs in samples.items():
                pairs.append((found[low][name], found[high][name]))
    progress(f"{describe(point)}: naming functions")
    symbols = {node.name: _symbols(node) for node in nodes}
    return combine(
        replace(point, iterations=high), where.link, counts, samples, symbols, background,
        min(proofs, key=_least_covered), setting,
    )  # fmt: skip


def refuse(point: Point, counts: tuple[int, int], rounds: int) -> None:
    """UsageError for what cannot be counted."""
    loops.refuse(point)
    kind_of(point.transport)
    if point.kind != "latency":
        raise UsageError(
            f"instructions of a {point.kind} measurement", todo="round trips are counted: latency"
        )
    if not 1 <= counts[0] < counts[1]:
        raise UsageError(
            f"counts {counts[0]},{counts[1]}", todo="give two, the smaller one first and above 0"
        )
    if rounds < 1:
        raise UsageError(f"{rounds} rounds", todo="ask for one at least")


def _count(
    pair: bench.Pair, point: Point, counters: Mapping[str, Counter], setting: bench.Setting
) -> tuple[dict[str, Sample], Measurement]:
    for counter in counters.values():
        counter.reset()
        counter.mark()
    answer = pair.run("rdmalab", point)
    names = (pair.nodes[0].name, pair.nodes[1].name)
    for counter in counters.values():
        counter.mark()
    measured = bench.measurement("rdmalab", point, pair.route.link, names, setting, answer)
    if measured.proof.verdict != "proven":
        raise RdmalabError(f"{describe(point)}: no proof, no number", seen=measured.proof.reason)
    samples = {}
    for name in names:
        counter = counters[name]
        begin, end, bracket = bracket_of(counter.marks())
        samples[name] = Sample(point.iterations, bracket, counter.delta(begin, end))
    return samples, measured


def bracket_of(marks: Sequence[Mark]) -> tuple[Mark, Mark, str]:
    """The marks around the timed loop where the guest set both, each once; else ours, the
    first and the last. A passive target (of a read) has no loop to mark."""
    begins = [mark for mark in marks if mark.guest == BEGIN]
    ends = [mark for mark in marks if mark.guest == END]
    if len(begins) == len(ends) == 1 and begins[0].number < ends[0].number:
        return begins[0], ends[0], "loop"
    ours = [mark for mark in marks if mark.guest is None]
    return ours[0], ours[-1], "run"


def _background(nodes: Sequence[Node], counters: Mapping[str, Counter]) -> dict[str, Background]:
    def intervals() -> dict[str, tuple[Delta, ...]]:
        for counter in counters.values():
            counter.reset()
            counter.mark()
        for _ in range(_INTERVALS):
            time.sleep(_INTERVAL_SECONDS)
            for counter in counters.values():
                counter.mark()
        deltas = {}
        for name, counter in counters.items():
            marks = counter.marks()
            deltas[name] = tuple(counter.delta(*pair) for pair in pairwise(marks))
        return deltas

    idle = intervals()
    with contextlib.ExitStack() as stack:
        for node in nodes:
            spin = node.popen(["sh", "-c", "echo; while :; do :; done"])
            stack.callback(spin.stop)
            spin.stdout.readline(60.0)
        spinning = intervals()
    return {name: Background(idle[name], spinning[name]) for name in idle}


def _symbols(node: Node) -> Symbols:
    text = node.run(["cat", "/proc/kallsyms"], timeout=120.0).stdout
    return Symbols.parse(text, node.name)


def _least_covered(measured: Measurement) -> float:
    return min((share for share in coverage(measured.proof) if share is not None), default=0.0)


@dataclass(frozen=True)
class Costs:
    """Instructions a round trip by function (user space as USER), and calls of the functions
    whose entries could be counted."""

    executed: Mapping[Function, float]
    calls: Mapping[Function, float]
    ns: float

    @property
    def kernel(self) -> float:
        return sum(value for function, value in self.executed.items() if function != USER)


def slope(low: Sample, high: Sample, symbols: Symbols) -> Costs:
    """What one round trip more costs."""
    executed: Multiset[Function] = Multiset()
    calls: Multiset[Function] = Multiset()
    uncounted: set[Function] = set()
    for sign, sample in ((1, high), (-1, low)):
        for address, instructions in sample.delta.kernel.items():
            executed[symbols.find(address)] += sign * instructions
            entered = symbols.entered(address)
            if entered is None:
                continue
            if address in sample.delta.entries:
                calls[entered] += sign * sample.delta.entries[address]
            else:
                uncounted.add(entered)
        executed[USER] += sign * sample.delta.user
    trips = high.iterations - low.iterations
    return Costs(
        {function: value / trips for function, value in executed.items()},
        {f: value / trips for f, value in calls.items() if f not in uncounted},
        (high.delta.ns - low.delta.ns) / trips,
    )


def timer_interrupts(delta: Delta, symbols: Symbols) -> int:
    """How many were served, 0 where the kernel has another way in."""
    return sum(
        entries
        for address, entries in delta.entries.items()
        if symbols.entered(address) == Function(TIMER_ENTRY)
    )


def combine(
    point: Point,
    link: str,
    counts: tuple[int, int],
    samples: Mapping[str, Sequence[tuple[Sample, Sample]]],
    symbols: Mapping[str, Symbols],
    background: Mapping[str, Background],
    proof: Measurement,
    setting: bench.Setting,
) -> Instructions:
    """The result of all rounds: ``samples`` by node, a (low, high) pair a round. Functions by
    cost, the dearest first."""
    costs = {
        name: [slope(low, high, symbols[name]) for low, high in pairs]
        for name, pairs in samples.items()
    }
    nodes = tuple(
        _node_cost(name, samples[name], costs[name], symbols[name], background[name])
        for name in samples
    )
    rounds = range(len(nodes[0].kernel.rounds))
    return Instructions(
        point=point,
        link=link,
        counts=counts,
        nodes=nodes,
        functions=_function_costs(costs, rounds),
        kernel=Figure(tuple(sum(node.kernel.rounds[i] for node in nodes) for i in rounds)),
        user=Figure(tuple(sum(node.user.rounds[i] for node in nodes) for i in rounds)),
        us=Figure(tuple(cost.ns / 1000 for cost in costs[nodes[0].node])),
        proof=proof,
        accelerator=setting.accelerator,
        vcpus=setting.vcpus,
        kernel_release=setting.kernel,
    )


def _node_cost(
    name: str,
    pairs: Sequence[tuple[Sample, Sample]],
    costs: Sequence[Costs],
    symbols: Symbols,
    background: Background,
) -> NodeCost:
    brackets = {sample.bracket for pair in pairs for sample in pair}
    timer = Function(TIMER_ENTRY)
    served = [(timer_interrupts(delta, symbols), delta) for delta in background.spinning]
    return NodeCost(
        node=name,
        bracket="loop" if brackets == {"loop"} else "run",
        kernel=Figure(tuple(cost.kernel for cost in costs)),
        user=Figure(tuple(cost.executed.get(USER, 0.0) for cost in costs)),
        idle=median((sum(d.kernel.values()) + d.user) / d.ns for d in background.idle)
        * median(cost.ns for cost in costs),
        timer=Figure(tuple(cost.calls.get(timer, 0.0) for cost in costs)),
        timer_cost=median([sum(d.kernel.values()) / n for n, d in served if n] or [0.0]),
    )


def _function_costs(
    costs: Mapping[str, Sequence[Costs]], rounds: Sequence[int]
) -> tuple[FunctionCost, ...]:
    found = []
    every = [cost for each in costs.values() for cost in each]
    for function in sorted({function for cost in every for function in cost.executed}):
        each = {
            name: [cost.executed.get(function, 0.0) for cost in node]
            for name, node in costs.items()
        }
        # Where it ran without its entry being counted in some round, the sum would be short.
        counted = all(function in c.calls for c in every if c.executed.get(function))
        calls = [sum(node[i].calls.get(function, 0.0) for node in costs.values()) for i in rounds]
        found.append(
            FunctionCost(
                function,
                Figure(tuple(sum(values[i] for values in each.values()) for i in rounds)),
                {name: median(values) for name, values in each.items()},
                median(calls) if counted and function != USER else None,
            )
        )
    return tuple(sorted(found, key=lambda cost: -cost.all.median))


# -- what --json prints (docs/schemas/instructions.schema.json) ----------------------------


class FigureCell(TypedDict):
    median: float
    low: float
    high: float
    spread_percent: float | None
    rounds: list[float]


class FunctionCell(TypedDict):
    function: str
    module: str
    instructions: FigureCell
    calls: float | None
    nodes: dict[str, float]


class NodeCell(TypedDict):
    node: str
    bracket: str
    kernel: FigureCell
    user: FigureCell
    idle: float
    timer_interrupts: FigureCell
    timer_interrupt_cost: float


class Row(TypedDict):
    """Everything is a round trip's; instructions, and microseconds in ``us``."""

    tool: str
    kind: str
    op: str
    mode: str
    size: int
    qps: int
    direction: str
    service: str
    transport: str
    link: str
    counts: list[int]
    rounds: int
    total: FigureCell
    without_timer: FigureCell
    kernel_instructions: FigureCell
    user_instructions: FigureCell
    us: FigureCell
    nodes: list[NodeCell]
    functions: list[FunctionCell]
    proof: ProofCell
    accelerator: str
    vcpus: int
    kernel: str


def to_row(result: Instructions) -> Row:
    point = result.point
    return Row(
        tool="rdmalab",
        kind="instructions",
        op=point.op,
        mode=point.mode,
        size=point.size,
        qps=point.qps,
        direction=point.direction,
        service=point.service,
        transport=point.transport,
        link=result.link,
        counts=list(result.counts),
        rounds=len(result.total.rounds),
        total=_figure(result.total),
        without_timer=_figure(result.without_timer),
        kernel_instructions=_figure(result.kernel),
        user_instructions=_figure(result.user),
        us=_figure(result.us),
        nodes=[
            NodeCell(
                node=node.node,
                bracket=node.bracket,
                kernel=_figure(node.kernel),
                user=_figure(node.user),
                idle=_rounded(node.idle),
                timer_interrupts=_figure(node.timer),
                timer_interrupt_cost=_rounded(node.timer_cost),
            )
            for node in result.nodes
        ],
        functions=[
            FunctionCell(
                function=cost.function.name,
                module=cost.function.module,
                instructions=_figure(cost.all),
                calls=None if cost.calls is None else _rounded(cost.calls),
                nodes={name: _rounded(value) for name, value in cost.nodes.items()},
            )
            for cost in result.functions
        ],
        proof=ProofCell(
            verdict=result.proof.proof.verdict,
            reason=result.proof.proof.reason,
            coverage=coverage(result.proof.proof),
        ),
        accelerator=result.accelerator,
        vcpus=result.vcpus,
        kernel=result.kernel_release,
    )


def _figure(figure: Figure) -> FigureCell:
    spread = figure.spread_percent
    return FigureCell(
        median=_rounded(figure.median),
        low=_rounded(figure.low),
        high=_rounded(figure.high),
        spread_percent=None if spread is None else round(spread, 2),
        rounds=[_rounded(value) for value in figure.rounds],
    )


def _rounded(value: float) -> float:
    """A thousandth of an instruction is far below what a slope can tell."""
    return round(value, 3)
