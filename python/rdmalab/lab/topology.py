# SPDX-License-Identifier: Apache-2.0
"""Topologies: which nodes there are and what joins them (vm/topologies/*.toml)."""

from __future__ import annotations

import ipaddress
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rdmalab.errors import UsageError

#: Linux's IFNAMSIZ is 16 with the terminating NUL, and the device on it is "rxe_<link>".
_LINK_NAME = re.compile(r"[a-z][a-z0-9]{0,10}")
_NODE_NAME = re.compile(r"[a-z][a-z0-9-]{0,30}")
KINDS = ("roce",)
_MTU = range(1280, 65522)


@dataclass(frozen=True)
class Link:
    """A cable between two nodes. ``kind`` "roce": a virtual NIC for SoftRoCE. MTU in bytes."""

    name: str
    kind: str
    nodes: tuple[str, str]
    mtu: int
    ipv4: ipaddress.IPv4Network
    ipv6: ipaddress.IPv6Network


@dataclass(frozen=True)
class Topology:
    name: str
    description: str
    nodes: tuple[str, ...]
    links: tuple[Link, ...]

    def links_of(self, node: str) -> list[Link]:
        return [link for link in self.links if node in link.nodes]


def names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.toml"))


def file_of(folder: Path, name: str) -> Path:
    """The file of a topology's name, or ``name`` itself where it ends as a .toml path.
    Raises UsageError for an unknown name."""
    if name.endswith(".toml"):
        return Path(name)
    path = folder / f"{name}.toml"
    if not path.is_file():
        raise UsageError(
            f"no topology is called {name!r}",
            todo=f"choose one of {', '.join(names(folder))}, or give a .toml file",
        )
    return path


def read(folder: Path, name: str) -> Topology:
    """The topology ``name`` of ``folder``, or of the file ``name`` ends as a .toml path.
    Raises UsageError with file, place, what was seen and what is allowed."""
    path = file_of(folder, name)
    try:
        data = tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"{path} cannot be read", seen=error.strerror or str(error)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no TOML", seen=str(error)) from error
    return parse(data, path)


def _refuse(path: Path, where: str, seen: str, todo: str) -> UsageError:
    return UsageError(f"{path}: {where}", seen=seen, todo=todo)


def parse(data: dict[str, Any], path: Path) -> Topology:
    """Check ``data`` as read from ``path``; the addresses of links that name none are
    10.77.<n>.0/24 and fd77:<n>::/64 by the link's place."""
    unknown = sorted(set(data) - {"description", "nodes", "links"})
    if unknown:
        raise _refuse(path, f"key {unknown[0]!r}", "unknown", "use description, nodes, links")
    nodes = data.get("nodes")
    if not isinstance(nodes, list) or not nodes or not all(isinstance(n, str) for n in nodes):
        raise _refuse(path, "nodes", repr(nodes), 'give a list such as ["node0", "node1"]')
    for node in nodes:
        if not _NODE_NAME.fullmatch(node):
            raise _refuse(path, "nodes", repr(node), "use lower-case letters, digits and -")
    if len(set(nodes)) != len(nodes):
        raise _refuse(path, "nodes", "a name stands twice", "give each node a name of its own")
    description = data.get("description", "")
    if not isinstance(description, str):
        raise _refuse(path, "description", repr(description), "give a text")
    tables = data.get("links", [])
    if not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
        raise _refuse(path, "links", type(tables).__name__, "write [[links]] tables")
    links: list[Link] = []
    for index, table in enumerate(tables):
        link = _link(table, index, nodes, path)
        for other in links:
            if other.name == link.name:
                raise _refuse(path, f"links[{index}].name", repr(link.name), "it stands twice")
            if other.ipv4.overlaps(link.ipv4) or other.ipv6.overlaps(link.ipv6):
                raise _refuse(
                    path, f"links[{index}]", f"its addresses overlap {other.name}'s",
                    "give each link a network of its own",
                )  # fmt: skip
        links.append(link)
    return Topology(path.stem, description, tuple(nodes), tuple(links))


def _link(table: dict[str, Any], index: int, nodes: list[str], path: Path) -> Link:
    where = f"links[{index}]"
    unknown = sorted(set(table) - {"name", "kind", "nodes", "mtu", "ipv4", "ipv6"})
    if unknown:
        raise _refuse(
            path, f"{where}.{unknown[0]}", "unknown key", "use name, kind, nodes, mtu, ipv4, ipv6"
        )
    name = table.get("name")
    if not isinstance(name, str) or not _LINK_NAME.fullmatch(name):
        raise _refuse(
            path, f"{where}.name", repr(name), "use up to 11 lower-case letters and digits"
        )
    kind = table.get("kind", "roce")
    if kind not in KINDS:
        raise _refuse(path, f"{where}.kind", repr(kind), f"use one of {', '.join(KINDS)}")
    ends = table.get("nodes")
    if not isinstance(ends, list) or len(ends) != 2 or ends[0] == ends[1]:
        raise _refuse(path, f"{where}.nodes", repr(ends), "name the two nodes it joins")
    for end in ends:
        if end not in nodes:
            raise _refuse(path, f"{where}.nodes", repr(end), f"use one of {', '.join(nodes)}")
    mtu = table.get("mtu", 4200)
    if not isinstance(mtu, int) or isinstance(mtu, bool) or mtu not in _MTU:
        raise _refuse(path, f"{where}.mtu", repr(mtu), f"use {_MTU.start}..{_MTU.stop - 1} bytes")
    try:
        ipv4 = ipaddress.IPv4Network(table.get("ipv4", f"10.77.{index}.0/24"))
        ipv6 = ipaddress.IPv6Network(table.get("ipv6", f"fd77:{index:x}::/64"))
    except ValueError as error:
        raise _refuse(path, where, str(error), "give networks such as 10.77.0.0/24") from error
    if ipv4.num_addresses < 4 or ipv6.num_addresses < 4:
        raise _refuse(path, where, "its network is too small", "two nodes need /30 or more")
    return Link(name, kind, (ends[0], ends[1]), mtu, ipv4, ipv6)
