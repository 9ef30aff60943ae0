# SPDX-License-Identifier: Apache-2.0
"""--name and --inventory: which nodes a command speaks to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import click

from rdmalab.errors import UsageError
from rdmalab.lab import inventory as inventories
from rdmalab.lab.lab import DEFAULT_NAME, Lab
from rdmalab.lab.node import Node

F = TypeVar("F", bound=Callable[..., object])


@dataclass(frozen=True)
class Target:
    """Nodes, and what is known of where they run. ``lab`` is None for real nodes."""

    nodes: Mapping[str, Node]
    accelerator: str  # tcg | kvm | hardware
    vcpus: int  # of each node; 0 where unknown
    kernel: str  # release; "" where unknown
    lab: Lab | None = field(default=None, repr=False)

    def node(self, name: str) -> Node:
        """Raises UsageError for a name that is not there."""
        if name not in self.nodes:
            raise UsageError(
                f"no node is called {name!r}", todo=f"choose one of {', '.join(self.nodes)}"
            )
        return self.nodes[name]


def options(function: F) -> F:
    """Add --name and --inventory."""
    for option in (
        click.option(
            "--inventory",
            type=click.Path(dir_okay=False, path_type=Path),
            help="Real nodes: an Ansible inventory (YAML).",
        ),
        click.option("--name", default=DEFAULT_NAME, show_default=True, help="The lab."),
    ):
        function = option(function)
    return function


def find(name: str, inventory: Path | None) -> Target:
    """The lab ``name``, or the nodes of ``inventory``."""
    if inventory is not None:
        nodes = inventories.read(inventory)
        first = next(iter(nodes.values()))
        kernel = first.run(["uname", "-r"]).stdout.strip()
        vcpus = int(first.run(["nproc"]).stdout)
        return Target(nodes, "hardware", vcpus, kernel)
    lab = Lab.attach(name)
    lab.watch()
    return Target(lab.nodes, lab.accelerator, lab.vcpus, lab.kernel, lab)
