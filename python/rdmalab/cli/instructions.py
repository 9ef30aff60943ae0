# SPDX-License-Identifier: Apache-2.0
"""rdmalab bench instructions: guest instructions a round trip, by function."""

from __future__ import annotations

import contextlib
import json
import sys

import click

from rdmalab.errors import UsageError
from rdmalab.lab import lab as labs
from rdmalab.measure.measurement import Point
from rdmalab.measure.node import loops
from rdmalab.measure.proof import KINDS

#: of the lab that counts; the default lab's QEMU has no plugin
NAME = "instructions"


def _two(context: click.Context, option: click.Parameter, value: str) -> tuple[int, int]:
    try:
        low, high = (int(word) for word in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not two numbers, as in 500,1500") from None
    return low, high


@click.command(
    epilog="""\b
Examples:
  rdmalab bench instructions --from node0 --to node1
  rdmalab bench instructions --from node0 --to node1 --op write_imm --size 4096 --json
  rdmalab bench instructions --from node0 --to node1 --transport tcp --top 40

Where no lab of the name is up, one is booted for the run; a lab to keep for several runs is
booted with `rdmalab up --instructions --name instructions`."""
)
@click.option("--from", "from_", required=True, help="The node that initiates.")
@click.option("--to", required=True, help="The node that answers.")
@click.option("--op", type=click.Choice(loops.OPS), default="send", show_default=True)
@click.option("--size", default=64, show_default=True, help="Bytes a message.")
@click.option("--mode", type=click.Choice(["event", "poll"]), default="event", show_default=True)
@click.option("--transport", type=click.Choice(list(KINDS)), default="rxe", show_default=True)
@click.option("--link", default="", help="Where several links join the two nodes.")
@click.option(
    "--counts", callback=_two, default="500,1500", show_default=True, help="Two iteration counts."
)
@click.option("--rounds", default=3, show_default=True, help="How often each is run.")
@click.option("--top", default=25, show_default=True, help="Functions in the table.")
@click.option("--name", default=NAME, show_default=True, help="The lab.")
@click.option("--kernel", help="The lab's. [default: stock, or of the lab that is up]")
@click.option("--no-keep", is_flag=True, help="Leave no run folder under results/.")
@click.option("--json", "as_json", is_flag=True, help="docs/schemas/instructions.schema.json")
def instructions(
    from_: str,
    to: str,
    op: str,
    size: int,
    mode: str,
    transport: str,
    link: str,
    counts: tuple[int, int],
    rounds: int,
    top: int,
    name: str,
    kernel: str | None,
    no_keep: bool,
    as_json: bool,
) -> None:
    """Count guest instructions a round trip, by kernel function and user space.

    Instructions do not depend on how busy the host is, so that regressions can be judged by
    them. Needs QEMU's TCG: under KVM nothing is counted.
    """
    from rich.console import Console

    from rdmalab.measure import bench
    from rdmalab.measure import instructions as counting
    from rdmalab.measure.counter import Counter
    from rdmalab.measure.keep import keep_json
    from rdmalab.measure.report.instructions import print_instructions

    point = Point(op=op, size=size, mode=mode, transport=transport)
    # Before a lab is booted for it.
    counting.refuse(point, counts, rounds)
    console = Console(stderr=True, highlight=False)
    with contextlib.ExitStack() as stack:
        lab = _lab(stack, name, kernel)
        for node in (from_, to):
            if node not in lab.nodes:
                raise UsageError(
                    f"no node is called {node!r}", todo=f"choose one of {', '.join(lab.nodes)}"
                )
        ends = lab.nodes[from_], lab.nodes[to]
        route = bench.route_between(*ends, link)
        if transport == "rxe":
            for end, netdev in zip(ends, route.netdevs, strict=True):
                end.python("rdmalab.rdma", ["setup", "--netdev", netdev], timeout=120.0)
        result = counting.run(
            *ends,
            point,
            {end.name: Counter(end.name, lab.folder / f"insn-{end.name}.sock") for end in ends},
            setting=bench.Setting(lab.accelerator, lab.vcpus, lab.kernel),
            counts=counts,
            rounds=rounds,
            route=route,
            factor=lab.slow_factor,
            progress=lambda line: console.print(line, markup=False),
        )
        document = {"rows": [counting.to_row(result)]}
        if not no_keep:
            kept = keep_json("bench-instructions", document, lab, sys.argv[1:])
            console.print(f"kept in {kept}", markup=False, soft_wrap=True)
    if as_json:
        click.echo(json.dumps(document, indent=2, allow_nan=False))
    else:
        print_instructions(Console(), result, top)


def _lab(stack: contextlib.ExitStack, name: str, kernel: str | None) -> labs.Lab:
    """The lab that is up, or one for this run, which goes down with ``stack``. UsageError for
    a lab that is up but counts nothing, or has another kernel than was asked for."""
    from rdmalab.lab.paths import Paths

    if name not in labs.names(Paths.find()):
        spec = labs.LabSpec(name=name, kernel=kernel or "stock", accel="tcg", instructions=True)
        return stack.enter_context(labs.Lab.up(spec))
    lab = labs.Lab.attach(name)
    if not lab.plan.instructions:
        raise UsageError(
            f"lab {name} counts no instructions",
            seen="it was booted without --instructions",
            todo="leave --name away, or boot it anew with up --instructions",
        )
    if kernel is not None and kernel not in (lab.tier, lab.kernel):
        raise UsageError(
            f"lab {name} has not kernel {kernel}",
            seen=f"it runs {lab.tier}, {lab.kernel}",
            todo=f"rdmalab down --name {name}, or give --name another",
        )
    return lab
