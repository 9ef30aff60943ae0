# SPDX-License-Identifier: Apache-2.0
"""rdmalab bench: latency and bandwidth between two nodes, with proof."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from rdmalab.cli import target
from rdmalab.cli.instructions import instructions
from rdmalab.errors import RdmalabError, UsageError
from rdmalab.measure.plan import (
    bandwidth_points,
    latency_points,
    parse_sizes,
    profile_settings,
    sweep_points,
)

if TYPE_CHECKING:
    from rdmalab.lab.lab import Lab
    from rdmalab.measure.measurement import Measurement, Point

F = TypeVar("F", bound=Callable[..., object])

INTERRUPTED = 130
OPS = ("send", "write", "write_imm", "read", "fetch_add", "cmp_swap")


class _Words(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """Words with commas between, each one of ``allowed`` (none: any)."""

    name = "list"

    def __init__(self, *allowed: str) -> None:
        self._allowed = allowed

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        words = tuple(dict.fromkeys(word.strip() for word in str(value).split(",") if word.strip()))
        for word in words:
            if self._allowed and word not in self._allowed:
                self.fail(f"{word!r} is none of {', '.join(self._allowed)}", param, ctx)
        if not words:
            self.fail("an empty list", param, ctx)
        return words


class _Sizes(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """``64,4096,8M``: bytes, K and M are binary."""

    name = "sizes"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return parse_sizes(str(value))
        except UsageError as error:
            self.fail(str(error), param, ctx)


def _common(rounds: int, perftest: bool) -> Callable[[F], F]:
    """The options that every measurement has."""

    def add(function: F) -> F:
        for option in (
            click.option("--json", "as_json", is_flag=True, help='Print {"rows": [...]}.'),
            click.option("--no-keep", is_flag=True, help="Leave no run folder under results/."),
            click.option(
                "--probes", is_flag=True, help="Measure RDMA once more with eBPF probes on."
            ),
            click.option(
                "--profile",
                default="default",
                show_default=True,
                help="Queue pair profile: a name or a .toml file.",
            ),
            click.option(
                "--perftest/--no-perftest",
                default=perftest,
                show_default=True,
                help="Alternate with perftest, where it can measure the same.",
            ),
            click.option(
                "--rounds", default=rounds, show_default=True, help="Alternations of each point."
            ),
            click.option("--warmup", default=100, show_default=True, help="Untimed messages."),
            click.option("--link", default="", help="Needed where several links join the two."),
            click.option(
                "--service", type=_Words("RC", "UC", "UD"), default="RC", show_default=True
            ),
            click.option(
                "--transport",
                type=_Words(),
                default="rxe",
                show_default=True,
                help="rxe, tcp, or both: rxe,tcp.",
            ),
            click.option("--to", default="node1", show_default=True, help="The target."),
            click.option("--from", "from_", default="node0", show_default=True, help="Initiator."),
        ):
            function = option(function)
        return target.options(function)

    return add


@click.group(
    epilog="""\b
Examples:
  rdmalab bench latency --transport rxe --op send --mode event --sizes 64,4096
  rdmalab bench bandwidth --transport rxe,tcp --sizes 64K,1M
  rdmalab bench instructions --from node0 --to node1"""
)
def bench() -> None:
    """Measure between two nodes. Every number is proven by packet counters at both ends."""


@bench.command(
    epilog="""\b
Examples:
  rdmalab bench latency --transport rxe --op send --mode event --sizes 64,4096
  rdmalab bench latency --transport rxe,tcp --sizes 64 --no-perftest --json | jq '.rows[].p50_us'
  rdmalab bench latency --inventory lab.yml --from a --to b --op read --mode poll"""
)
@_common(rounds=5, perftest=True)
@click.option("--op", type=_Words(*OPS), default="send", show_default=True)
@click.option("--mode", type=_Words("event", "poll"), default="event", show_default=True)
@click.option("--sizes", type=_Sizes(), default="64,4096", show_default=True, help="Bytes; K, M.")
@click.option("--samples", default=2000, show_default=True, help="Timed messages a round.")
def latency(
    op: tuple[str, ...],
    mode: tuple[str, ...],
    sizes: tuple[int, ...],
    samples: int,
    transport: tuple[str, ...],
    service: tuple[str, ...],
    warmup: int,
    **common: Any,
) -> int:
    """Ping-pong: half a round trip for send and write, a whole one for read and atomics."""
    points = latency_points(transport, service, op, mode, sizes, samples, warmup)
    return _measure("latency", points, **common)


@bench.command(
    epilog="""\b
Examples:
  rdmalab bench bandwidth --transport rxe --op write --sizes 4K,64K,1M
  rdmalab bench bandwidth --op send --qps 4 --direction two-way --no-perftest"""
)
@_common(rounds=3, perftest=True)
@click.option("--op", type=_Words(*OPS), default="write", show_default=True)
@click.option("--mode", type=_Words("event", "poll"), default="poll", show_default=True)
@click.option("--sizes", type=_Sizes(), default="4K,64K,1M", show_default=True, help="Bytes; K, M.")
@click.option("--samples", default=0, help="Messages a round and queue pair; 0: by size.")
@click.option("--qps", default=1, show_default=True, help="Queue pairs (TCP: connections).")
@click.option(
    "--direction", type=click.Choice(["one-way", "two-way"]), default="one-way", show_default=True
)
def bandwidth(
    op: tuple[str, ...],
    mode: tuple[str, ...],
    sizes: tuple[int, ...],
    samples: int,
    qps: int,
    direction: str,
    transport: tuple[str, ...],
    service: tuple[str, ...],
    warmup: int,
    **common: Any,
) -> int:
    """Streaming: as many messages in flight as perftest has. MiB per second."""
    points = bandwidth_points(transport, service, op, mode, sizes, samples, warmup, qps, direction)
    return _measure("bandwidth", points, **common)


@bench.command(
    epilog="""\b
Examples:
  rdmalab bench sweep --transport rxe,tcp
  rdmalab bench sweep --op read --sizes 2,64,4K,1M --samples 500 --json"""
)
@_common(rounds=1, perftest=False)
@click.option("--op", type=_Words(*OPS), default="send", show_default=True)
@click.option("--mode", type=_Words("event", "poll"), default="event", show_default=True)
@click.option(
    "--sizes",
    type=_Sizes(),
    default="2,16,64,256,1K,4K,16K,64K,256K,1M,8M",
    show_default=True,
    help="Bytes; K, M.",
)
@click.option("--samples", default=0, help="Messages a point; 0: by size.")
def sweep(
    op: tuple[str, ...],
    mode: tuple[str, ...],
    sizes: tuple[int, ...],
    samples: int,
    transport: tuple[str, ...],
    service: tuple[str, ...],
    warmup: int,
    **common: Any,
) -> int:
    """Latency and bandwidth against size. Points that are not defined (a datagram over the
    MTU, a write's events) are left out, and named."""
    points, left_out = sweep_points(transport, service, op, mode, sizes, samples, warmup)
    for why in left_out:
        _say(f"left out: {why}")
    return _measure("sweep", points, **common)


def _measure(
    what: str,
    points: Sequence[Point],
    *,
    from_: str,
    to: str,
    link: str,
    rounds: int,
    perftest: bool,
    profile: str,
    probes: bool,
    no_keep: bool,
    as_json: bool,
    name: str,
    inventory: Path | None,
) -> int:
    from rich.console import Console

    from rdmalab.measure import bench as benches
    from rdmalab.measure.report.rows import is_proven, to_rows
    from rdmalab.measure.report.table import print_tables

    settings = profile_settings(profile)
    found = target.find(name, inventory)
    ends = found.node(from_), found.node(to)
    # On a guest SoftRoCE is set up as needed; a real machine's owner does it.
    route = benches.route_between(*ends, link, setup=found.lab is not None)
    measurements: list[Measurement] = []
    document: dict[str, Any] = {}
    try:
        with ExitStack() as stack:
            group = None
            if probes:
                from rdmalab.probe.group import ProbeGroup

                group = stack.enter_context(ProbeGroup(ends))
            benches.run(
                *ends,
                points,
                setting=benches.Setting(found.accelerator, found.vcpus, found.kernel),
                route=route,
                alternations=rounds,
                perftest=perftest,
                probes=group,
                profile=settings,
                factor=ends[0].deadlines.factor,
                progress=_say,
                done=measurements,
            )
        status = 0 if all(map(is_proven, measurements)) else 1
    except BaseException as error:
        # A failure does not take what was measured before it, nor is it hidden by another.
        status = error.exit_status if isinstance(error, RdmalabError) else INTERRUPTED
        if measurements and not no_keep:
            try:
                _keep(f"bench-{what}", measurements, found.lab, status)
            except RdmalabError as second:
                _say(f"not kept: {second}")
        raise
    if not no_keep:
        document = _keep(f"bench-{what}", measurements, found.lab, status)
    if as_json:
        document["rows"] = to_rows(measurements)
        click.echo(json.dumps(document, indent=2, allow_nan=False))
    else:
        print_tables(Console(), measurements)
    return status


def _keep(
    name: str, measurements: Sequence[Measurement], lab: Lab | None, status: int
) -> dict[str, Any]:
    """Where it was kept."""
    from rdmalab.measure.keep import keep

    folder, page = keep(name, measurements, lab, sys.argv[1:], status)
    _say(f"kept in {folder}")
    return {"run": str(folder), "report": str(page)}


def _say(line: str) -> None:
    click.echo(line, err=True)


bench.add_command(instructions)
