# SPDX-License-Identifier: Apache-2.0
"""Guest instructions a round trip, by kernel function: the figure that a busy host cannot
blur.

A measurement is run at two iteration counts under QEMU's counting plugin. What differs
between them, divided by the difference of the counts, is the cost of one round trip; what a
run costs once is in both and cancels. What goes on per second, not per round trip (timer
ticks of an idle guest), does not cancel: it is measured before and said beside.
"""

from __future__ import annotations

import time
from collections import Counter as Multiset
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Protocol, TypedDict

from rdmalab.errors import RdmalabError, UsageError
from rdmalab.measure import bench
from rdmalab.measure.counter import BEGIN, END, Counter, Delta, Mark
from rdmalab.measure.kallsyms import Function, Symbols
from rdmalab.measure.measurement import Measurement, Point
from rdmalab.measure.node.request import describe
from rdmalab.measure.report.rows import ProofCell, coverage

COUNTS = (500, 1500)
ROUNDS = 3
#: All of user space, every process of the node: a block's address does not tell whose it is.
USER = Function("(user space)")
_IDLE_SECONDS = 2.0

Progress = Callable[[str], None]


class Node(bench.Node, Protocol):
    def run(self, argv: Sequence[str], *, timeout: float = ..., check: bool = ...) -> Any: ...


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
    """Instructions a round trip in one function: over all nodes, and the median of each."""

    function: Function
    all: Figure
    nodes: Mapping[str, float]


@dataclass(frozen=True)
class NodeCost:
    """Instructions a round trip on one node. ``bracket`` tells what was counted: "loop" (the
    node's program marked its timed loop) or "run" (all between request and answer, of which
    the slope takes what depends on the count). ``idle`` is what the node would have executed
    doing nothing for as long as a round trip takes, an upper bound of what background there
    is in the other figures."""

    node: str
    bracket: str
    kernel: Figure
    user: Figure
    idle: float


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


@dataclass(frozen=True)
class Sample:
    """What one node executed in one run of ``iterations`` round trips."""

    iterations: int
    bracket: str
    delta: Delta


Costs = dict[Function, float]


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
    _refuse(point, counts, rounds)
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
        idle = _idle([counters[node.name] for node in nodes])
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
        replace(point, iterations=high), where.link, counts, samples, symbols, idle,
        min(proofs, key=_least_covered), setting,
    )  # fmt: skip


def _refuse(point: Point, counts: tuple[int, int], rounds: int) -> None:
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


def _idle(counters: Sequence[Counter]) -> dict[str, float]:
    """Instructions a nanosecond of each node while nothing is asked of it."""
    begins = {}
    for counter in counters:
        counter.reset()
        begins[counter.node] = counter.mark()
    time.sleep(_IDLE_SECONDS)
    rates = {}
    for counter in counters:
        counter.mark()
        first, *_, last = counter.marks()
        executed = last.kernel + last.user - first.kernel - first.user
        rates[counter.node] = executed / (last.ns - first.ns)
    return rates


def _symbols(node: Node) -> Symbols:
    text = node.run(["cat", "/proc/kallsyms"], timeout=120.0).stdout
    return Symbols.parse(text, node.name)


def _least_covered(measured: Measurement) -> float:
    return min((share for share in coverage(measured.proof) if share is not None), default=0.0)


def slope(low: Sample, high: Sample, symbols: Symbols) -> Costs:
    """Instructions a round trip by function, user space as USER."""
    cost: Costs = {}
    executed: Multiset[Function] = Multiset()
    for sign, sample in ((1, high), (-1, low)):
        for address, instructions in sample.delta.kernel.items():
            executed[symbols.find(address)] += sign * instructions
        executed[USER] += sign * sample.delta.user
    trips = high.iterations - low.iterations
    for function, instructions in executed.items():
        cost[function] = instructions / trips
    return cost


def combine(
    point: Point,
    link: str,
    counts: tuple[int, int],
    samples: Mapping[str, Sequence[tuple[Sample, Sample]]],
    symbols: Mapping[str, Symbols],
    idle: Mapping[str, float],
    proof: Measurement,
    setting: bench.Setting,
) -> Instructions:
    """The result of all rounds: ``samples`` by node, a (low, high) pair a round; ``idle``
    in instructions a nanosecond. Functions by cost, the dearest first."""
    costs = {
        name: [slope(low, high, symbols[name]) for low, high in pairs]
        for name, pairs in samples.items()
    }
    rounds = range(len(next(iter(costs.values()))))
    ns = {
        name: [
            (high.delta.ns - low.delta.ns) / (high.iterations - low.iterations)
            for low, high in pairs
        ]
        for name, pairs in samples.items()
    }
    nodes = []
    for name, pairs in samples.items():
        brackets = {sample.bracket for pair in pairs for sample in pair}
        nodes.append(
            NodeCost(
                node=name,
                bracket="loop" if brackets == {"loop"} else "run",
                kernel=Figure(tuple(_kernel(cost) for cost in costs[name])),
                user=Figure(tuple(cost.get(USER, 0.0) for cost in costs[name])),
                idle=idle[name] * median(ns[name]),
            )
        )
    functions = []
    for function in sorted({f for all_ in costs.values() for cost in all_ for f in cost}):
        each = {name: [c.get(function, 0.0) for c in costs[name]] for name in costs}
        functions.append(
            FunctionCost(
                function,
                Figure(tuple(sum(values[i] for values in each.values()) for i in rounds)),
                {name: median(values) for name, values in each.items()},
            )
        )
    functions.sort(key=lambda cost: -cost.all.median)
    first = next(iter(samples))
    return Instructions(
        point=point,
        link=link,
        counts=counts,
        nodes=tuple(nodes),
        functions=tuple(functions),
        kernel=Figure(tuple(sum(node.kernel.rounds[i] for node in nodes) for i in rounds)),
        user=Figure(tuple(sum(node.user.rounds[i] for node in nodes) for i in rounds)),
        us=Figure(tuple(value / 1000 for value in ns[first])),
        proof=proof,
        accelerator=setting.accelerator,
        vcpus=setting.vcpus,
        kernel_release=setting.kernel,
    )


def _kernel(cost: Costs) -> float:
    return sum(value for function, value in cost.items() if function != USER)


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
    nodes: dict[str, float]


class NodeCell(TypedDict):
    node: str
    bracket: str
    kernel: FigureCell
    user: FigureCell
    idle: float


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
            )
            for node in result.nodes
        ],
        functions=[
            FunctionCell(
                function=cost.function.name,
                module=cost.function.module,
                instructions=_figure(cost.all),
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
