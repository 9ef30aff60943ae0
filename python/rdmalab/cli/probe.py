# SPDX-License-Identifier: Apache-2.0
"""rdmalab probe list, run, overhead."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

from rdmalab.cli import target
from rdmalab.errors import RdmalabError, UsageError
from rdmalab.measure.node import loops
from rdmalab.probe.agent import describe_probe
from rdmalab.probe.catalogue import PROBES, select
from rdmalab.probe.group import ProbeGroup
from rdmalab.probe.histogram import Histogram
from rdmalab.probe.overhead import Overhead, overhead
from rdmalab.probe.session import ProbeSession, start_all
from rdmalab.probe.text import render


def _names(_: click.Context, __: click.Parameter, value: str) -> tuple[str, ...]:
    return tuple(each.name for each in select(name for name in value.split(",") if name))


def _complete(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    done, comma, part = incomplete.rpartition(",")
    return [done + comma + name for name in PROBES if name.startswith(part)]


_probes = click.option(
    "--probes",
    default="",
    callback=_names,
    shell_complete=_complete,
    help="Names, comma separated. [default: all]",
)
_json = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON (docs/schemas/probe.schema.json)."
)


@click.group(
    epilog="""\b
Examples:
  rdmalab probe list --node node0
  rdmalab probe run node0 node1 --seconds 10
  rdmalab probe overhead --rounds 5"""
)
def probe() -> None:
    """eBPF probes: histograms of what the driver does while a measurement runs."""


def _print_static(found: dict[str, object]) -> None:
    for title in ("measures", "start", "end", "split"):
        click.echo(f"  {title:<9}{found[title]}")


@probe.command(
    "list",
    epilog="\b\nExamples:\n  rdmalab probe list\n  rdmalab probe list --node node0 --json",
)
@target.options
@click.option("--node", help="Ask this node which functions it has and what is missing.")
@_json
def list_(name: str, inventory: Path | None, node: str | None, as_json: bool) -> None:
    """What each probe measures, exactly between which points, and where it would sit."""
    listed = [describe_probe(each) for each in PROBES.values()]
    found: dict[str, object] = {"probes": listed}
    if node is not None:
        result = target.find(name, inventory).node(node).python("rdmalab.probe", ["list", "--json"])
        found = json.loads(result.stdout)
        found["node"] = node
        listed = found["probes"]  # type: ignore[assignment]
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    for each in listed:
        click.echo(f"{each['name']} ({each['unit']})")
        _print_static(each)
        for point in each.get("attach", ()):
            click.echo(f"  found    {point}")
        for missing in each.get("missing", ()):
            click.echo(f"  missing  {' '.join(filter(None, missing.values()))}")


@probe.command(
    "run",
    epilog="""\b
Examples:
  rdmalab probe run node0 node1 --seconds 10
  rdmalab probe run node0 --probes stage_time,work_delay      (until Enter)""",
)
@target.options
@_probes
@click.option("--seconds", type=click.FloatRange(min=0), help="How long. [default: until Enter]")
@_json
@click.argument("nodes", nargs=-1, required=True)
def run(
    nodes: tuple[str, ...],
    name: str,
    inventory: Path | None,
    probes: tuple[str, ...],
    seconds: float | None,
    as_json: bool,
) -> None:
    """Run probes on nodes beside whatever runs there, and print their histograms."""
    where = target.find(name, inventory)
    sessions = [ProbeSession(where.node(node), probes) for node in dict.fromkeys(nodes)]
    start_all(sessions)
    try:
        click.echo("attached; Enter ends" if seconds is None else "attached", err=True)
        if seconds is None:
            sys.stdin.readline()
        else:
            time.sleep(seconds)
        histograms = [each for session in sessions for each in session.stop()]
    finally:
        for session in sessions:
            session.abandon()
    _print(histograms, as_json)


def _print(histograms: Sequence[Histogram], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"histograms": [each.to_json() for each in histograms]}, indent=2))
    else:
        click.echo(render(histograms))


@probe.command(
    "overhead",
    epilog="""\b
Examples:
  rdmalab probe overhead --rounds 5
  rdmalab probe overhead --from node0 --to node1 --op write --mode poll --size 4096 --json""",
)
@target.options
@_probes
@click.option("--from", "from_", default="node0", show_default=True, help="The initiator.")
@click.option("--to", default="node1", show_default=True, help="The target.")
@click.option("--link", default="", help="Where several links join the two.")
@click.option("--transport", default="rxe", show_default=True, help="rxe.")
@click.option("--op", type=click.Choice(loops.OPS), default="send", show_default=True)
@click.option("--mode", type=click.Choice(["event", "poll"]), default="event", show_default=True)
@click.option("--size", default=64, show_default=True, help="Bytes.")
@click.option("--iterations", default=1000, show_default=True, help="Of each measurement.")
@click.option("--rounds", default=5, show_default=True, help="Pairs of without and with.")
@click.option("--no-keep", is_flag=True, help="Leave no run folder under results/.")
@_json
def overhead_(
    from_: str,
    to: str,
    name: str,
    inventory: Path | None,
    probes: tuple[str, ...],
    link: str,
    transport: str,
    op: str,
    mode: str,
    size: int,
    iterations: int,
    rounds: int,
    no_keep: bool,
    as_json: bool,
) -> None:
    """What the probes cost: median latency without and with them, in turn."""
    from rdmalab.measure import bench
    from rdmalab.measure.keep import keep_json
    from rdmalab.measure.measurement import Point
    from rdmalab.measure.proof import kind_of

    if transport == "tcp":
        raise UsageError("probes cost TCP nothing", seen="they are on RDMA drivers")
    point = Point(op=op, size=size, mode=mode, transport=transport, iterations=iterations)
    kind_of(transport)
    loops.refuse(point)
    if rounds < 1:
        raise UsageError(f"{rounds} rounds", todo="ask for one at least")
    where = target.find(name, inventory)
    ends = where.node(from_), where.node(to)
    setting = bench.Setting(where.accelerator, where.vcpus, where.kernel)
    route = bench.route_between(*ends, link)

    def p50() -> float:
        (found,) = bench.run(
            *ends, [point], setting=setting, route=route, factor=ends[0].deadlines.factor
        )
        if found.proof.verdict != "proven":
            raise RdmalabError("no number without proof", seen=found.proof.reason)
        return statistics.median(found.samples_us)

    with ProbeGroup(ends, probes) as group:
        result = overhead(p50, group, rounds)
    row = {
        "probes": list(probes),
        "transport": transport,
        "op": op,
        "mode": mode,
        "size": size,
        "link": route.link,
        "accelerator": where.accelerator,
        "vcpus": where.vcpus,
        "kernel": where.kernel,
        "unit": "us",
    } | result.to_json()
    if not no_keep:
        kept = keep_json("probe-overhead", row, where.lab, sys.argv[1:])
        click.echo(f"kept in {kept}", err=True)
    if as_json:
        click.echo(json.dumps(row, indent=2))
    else:
        click.echo(_overhead_text(result))
        click.echo(
            f"{where.accelerator}, {where.vcpus} vCPU, {where.kernel}; {transport} {op} {size} B,"
            f" {mode}; {', '.join(probes)}"
        )


def _overhead_text(result: Overhead) -> str:
    lines = [f"{'round':>5} {'without us':>11} {'with us':>11} {'ratio':>7}"]
    rows = zip(result.without, result.with_probes, result.ratios, strict=True)
    for number, (without, with_probes, ratio) in enumerate(rows, 1):
        lines.append(f"{number:>5} {without:>11.1f} {with_probes:>11.1f} {ratio:>7.3f}")
    low, high = result.spread
    lines.append(f"p50 with probes / without: {result.ratio:.3f} ({low:.3f} to {high:.3f})")
    return "\n".join(lines)
