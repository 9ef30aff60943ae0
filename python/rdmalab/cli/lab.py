# SPDX-License-Identifier: Apache-2.0
"""rdmalab up, down, status, ssh, run, logs."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from rdmalab.cli import target
from rdmalab.lab import lab as labs
from rdmalab.lab.paths import Paths


@click.command(
    epilog="""\b
Examples:
  rdmalab up
  rdmalab up --name three --topology line --kernel lts
  rdmalab up --mode full --vcpus 2 --accel tcg"""
)
@click.option("--name", default=labs.DEFAULT_NAME, show_default=True, help="What to call the lab.")
@click.option("--topology", default="pair", show_default=True, help="A name or a .toml file.")
@click.option("--kernel", default="stock", show_default=True, help="stock or lts.")
@click.option("--mode", default="fast", show_default=True, help="fast or full (systemd).")
@click.option("--vcpus", default=1, show_default=True, help="Of each node.")
@click.option("--memory", default=1024, show_default=True, help="Of each node, in MiB.")
@click.option("--accel", default="auto", show_default=True, help="auto, tcg or kvm.")
@click.option("--ssh-port", default=0, help="Of the first node; the others follow. 0: any free.")
@click.option("--instructions", is_flag=True, help="Load the plugin that counts instructions.")
@click.option("--json", "as_json", is_flag=True, help="Print the status as JSON.")
def up(
    name: str,
    topology: str,
    kernel: str,
    mode: str,
    vcpus: int,
    memory: int,
    accel: str,
    ssh_port: int,
    instructions: bool,
    as_json: bool,
) -> None:
    """Boot a lab and leave it running."""
    spec = labs.LabSpec(
        name, topology, kernel, mode, accel, vcpus, memory, ssh_port, instructions
    )  # fmt: skip
    lab = labs.Lab.up(spec)
    try:
        text = _status_text(lab, as_json)
    except BaseException:
        lab.down()
        raise
    lab.keep()
    click.echo(text)


@click.command(epilog="\b\nExamples:\n  rdmalab down\n  rdmalab down --all")
@click.option("--name", default=labs.DEFAULT_NAME, show_default=True, help="The lab.")
@click.option("--all", "every", is_flag=True, help="All labs that are up.")
def down(name: str, every: bool) -> None:
    """End a lab's nodes; nothing is left of it. A lab that is not up is no error."""
    paths = Paths.find()
    for each in labs.names(paths) if every else [name]:
        if not labs.take_down(paths, each):
            click.echo(f"lab {each} was not up", err=True)


def _status(lab: labs.Lab) -> dict[str, object]:
    plan = lab.plan
    states = lab.status()
    nodes = {
        name: {
            "state": status.state,
            "ssh_port": status.ssh_port,
            "pid": status.pid,
            "uptime_s": round(time.time() - status.started, 1),
            "links": {
                end.link: {
                    "kind": end.kind, "netdev": end.netdev, "mac": end.mac, "ipv4": end.ipv4,
                    "ipv6": end.ipv6, "mtu": end.mtu, "peer": end.peer,
                }
                for end in lab.nodes[name].links.values()
            },
        }
        for name, status in states.items()
    }  # fmt: skip
    return {
        "name": plan.lab,
        "topology": plan.topology,
        "kernel": plan.tier,
        "release": plan.release,
        "mode": plan.mode,
        "accelerator": plan.accelerator,
        "accelerator_reason": plan.accelerator_reason,
        "vcpus": plan.vcpus,
        "memory_mib": plan.memory_mib,
        "boot_s": round(lab.boot_seconds, 1),
        "slow_factor": round(lab.slow_factor, 2),
        "folder": str(lab.folder),
        "nodes": nodes,
    }


def _status_text(lab: labs.Lab, as_json: bool) -> str:
    status = _status(lab)
    if as_json:
        return json.dumps(status, indent=2)
    table = Table(box=None, pad_edge=False)
    for column in ("node", "state", "ssh", "link", "address", "peer"):
        table.add_column(column)
    for name, node_status in lab.status().items():
        row = [name, node_status.state, f"127.0.0.1:{node_status.ssh_port}"]
        ends = list(lab.nodes[name].links.values())
        if not ends:
            table.add_row(*row, "", "", "")
        for end in ends:
            table.add_row(*row, end.link, end.ipv4, end.peer)
            row = ["", "", ""]
    console = Console(width=100)
    with console.capture() as capture:
        console.print(table)
    plan = lab.plan
    head = (
        f"lab {plan.lab}: {plan.topology}, {plan.release} ({plan.tier}), {plan.mode}, "
        f"{plan.accelerator}, {plan.vcpus} vCPU, up in {lab.boot_seconds:.1f} s\n"
    )
    return (head + capture.get()).rstrip()


@click.command(epilog="\b\nExamples:\n  rdmalab status\n  rdmalab status --json | jq .nodes")
@click.option("--name", default=labs.DEFAULT_NAME, show_default=True, help="The lab.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (docs/json.md).")
def status(name: str, as_json: bool) -> None:
    """Show a lab's nodes and links."""
    click.echo(_status_text(labs.Lab.attach(name), as_json))


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog="\b\nExamples:\n  rdmalab run node0 -- rdma link\n"
    "  rdmalab run node1 -- sh -c 'dmesg | tail'",
)
@target.options
@click.option("--timeout", default=600.0, show_default=True, help="Seconds.")
@click.argument("node")
@click.argument("argv", nargs=-1, required=True, type=click.UNPROCESSED)
def run(node: str, argv: tuple[str, ...], name: str, inventory: Path | None, timeout: float) -> int:
    """Run a program on a node; its output and exit status are passed on."""
    if argv[0] == "--":
        argv = argv[1:]
    result = target.find(name, inventory).node(node).run(argv, timeout=timeout, check=False)
    sys.stdout.write(result.stdout)
    sys.stderr.write(result.stderr)
    return result.status


@click.command(epilog="\b\nExamples:\n  rdmalab ssh node0\n  rdmalab ssh node1 -- dmesg -w")
@target.options
@click.argument("node")
@click.argument("argv", nargs=-1, type=click.UNPROCESSED)
def ssh(node: str, argv: tuple[str, ...], name: str, inventory: Path | None) -> None:
    """A shell on a node, through the ssh client."""
    endpoint = target.find(name, inventory).node(node).endpoint
    options = [word for key, value in endpoint.options() for word in ("-o", f"{key}={value}")]
    sys.stdout.flush()
    os.execvp("ssh", ["ssh", *options, endpoint.host, *argv])


@click.command(epilog="\b\nExamples:\n  rdmalab logs node0\n  rdmalab logs node0 --follow")
@click.option("--name", default=labs.DEFAULT_NAME, show_default=True, help="The lab.")
@click.option("--follow", is_flag=True, help="Go on as the console grows.")
@click.argument("node")
def logs(node: str, name: str, follow: bool) -> None:
    """Print a guest's console from its first byte on, also of a lab that has died."""
    paths = Paths.find()
    console = labs.console(paths, name, node)
    with console.open(errors="replace") as file:
        while True:
            chunk = file.read(1 << 16)
            if chunk:
                click.echo(chunk, nl=False)
            elif not follow or name not in labs.names(paths):
                return
            else:
                time.sleep(0.2)
