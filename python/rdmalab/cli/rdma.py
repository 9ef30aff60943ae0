# SPDX-License-Identifier: Apache-2.0
"""rdmalab rdma show, setup, teardown: RDMA devices of a node."""

from __future__ import annotations

from pathlib import Path

import click

from rdmalab.cli import target
from rdmalab.errors import UsageError
from rdmalab.lab.child import last_line
from rdmalab.lab.node import Node


@click.group(
    epilog="""\b
Examples:
  rdmalab rdma setup node0 && rdmalab rdma setup node1
  rdmalab rdma show node0
  rdmalab rdma teardown node0"""
)
def rdma() -> None:
    """RDMA devices, ports, GIDs, limits and counters of a node."""


def _netdevs(node: Node, link: str, netdev: str) -> list[str]:
    """The netdevs to work on: the one named, the link's, or those of all RoCE links."""
    if netdev:
        return [netdev]
    if link:
        if link not in node.links:
            raise UsageError(
                f"no link is called {link!r}",
                node=node.name,
                todo=f"choose one of {', '.join(node.links) or 'none'}",
            )
        return [node.links[link].netdev]
    found = [end.netdev for end in node.links.values() if end.kind == "roce"]
    if not found:
        raise UsageError("it has no RoCE link", node=node.name, todo="name a --netdev")
    return found


def _on_node(node: Node, args: list[str]) -> int:
    """Run our module there; its output and status are passed on, its error as our line."""
    done = node.python("rdmalab.rdma", args, check=False)
    click.echo(done.stdout, nl=False)
    if done.status:
        click.echo(f"rdmalab: {node.name}: {last_line(done.stderr)}", err=True)
    return done.status


@rdma.command(epilog="\b\nExamples:\n  rdmalab rdma show node0\n  rdmalab rdma show node0 --json")
@target.options
@click.option("--json", "as_json", is_flag=True, help="Print JSON (docs/json.md).")
@click.argument("node")
def show(node: str, name: str, inventory: Path | None, as_json: bool) -> int:
    """Devices, ports, GID table, limits and what is in use, counters."""
    args = ["show", "--json"] if as_json else ["show"]
    return _on_node(target.find(name, inventory).node(node), args)


@rdma.command(
    epilog="\b\nExamples:\n  rdmalab rdma setup node0\n  rdmalab rdma setup n --netdev eth1"
)
@target.options
@click.option("--link", default="", help="One link of several.")
@click.option("--netdev", default="", help="A netdev that belongs to no link.")
@click.argument("node")
def setup(node: str, name: str, inventory: Path | None, link: str, netdev: str) -> int:
    """Make a SoftRoCE device on the node's links and wait until it is usable."""
    chosen = target.find(name, inventory).node(node)
    wanted = _netdevs(chosen, link, netdev)
    return max(_on_node(chosen, ["setup", "--netdev", each]) for each in wanted)


@rdma.command(epilog="\b\nExample:\n  rdmalab rdma teardown node0")
@target.options
@click.option("--link", default="", help="One link of several.")
@click.option("--netdev", default="", help="A netdev that belongs to no link.")
@click.argument("node")
def teardown(node: str, name: str, inventory: Path | None, link: str, netdev: str) -> int:
    """Delete the SoftRoCE devices of the node's links."""
    chosen = target.find(name, inventory).node(node)
    wanted = _netdevs(chosen, link, netdev)
    return max(_on_node(chosen, ["teardown", "--netdev", each]) for each in wanted)
