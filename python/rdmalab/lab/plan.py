# SPDX-License-Identifier: Apache-2.0
"""What a supervisor needs to run a lab: all decisions made, as a file in the lab's folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class PlannedLink:
    """A node's end of a link; the fields of rdmalab.lab.node.LinkEnd."""

    link: str
    kind: str
    netdev: str
    mac: str
    ipv4: str
    ipv6: str
    mtu: int
    peer: str


@dataclass(frozen=True)
class PlannedNode:
    name: str
    argv: tuple[str, ...]
    ssh_port: int  # 0: any free one
    links: tuple[PlannedLink, ...]


@dataclass(frozen=True)
class Plan:
    lab: str
    topology: str
    tier: str
    release: str
    mode: str
    accelerator: str
    accelerator_reason: str
    vcpus: int
    memory_mib: int
    instructions: bool
    env: dict[str, str]
    modules: tuple[str, ...]  # our own, on the host
    nodes: tuple[PlannedNode, ...]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Raises OSError, ValueError, KeyError or TypeError on what no plan is."""
        data: dict[str, Any] = json.loads(path.read_text())
        nodes = tuple(
            PlannedNode(
                name=node["name"],
                argv=tuple(node["argv"]),
                ssh_port=node["ssh_port"],
                links=tuple(PlannedLink(**link) for link in node["links"]),
            )
            for node in data.pop("nodes")
        )
        modules = tuple(data.pop("modules"))
        return cls(**data, modules=modules, nodes=nodes)
