# SPDX-License-Identifier: Apache-2.0
"""Nodes from and into an Ansible inventory in YAML, so that guests and real machines are
named in one way for the playbooks and for us.

Read are, for each host under ``all`` (its own or inherited from ``vars`` of its groups):
``ansible_host``, ``ansible_port``, ``ansible_user``, ``ansible_ssh_private_key_file``,
``rdmalab_known_hosts`` (the known_hosts file; OpenSSH's default without it) and
``rdmalab_links`` (a list of mappings with the fields of ``LinkEnd``). All else is Ansible's.
"""

from __future__ import annotations

import ipaddress
import re
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import yaml

from rdmalab.errors import UsageError
from rdmalab.lab.deadline import Deadlines
from rdmalab.lab.node import LinkEnd, Node
from rdmalab.lab.ssh import Endpoint

KINDS = ("roce", "usb4", "tcp")

_MAC = re.compile(r"^[0-9a-f]{2}(:[0-9a-f]{2}){5}$", re.I)
_NAME = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")
_NETDEV = re.compile(r"^[^\s/:]{1,15}$")
_TEMPLATE = re.compile(r"\{\{|\{%")


def read(path: Path, deadlines: Deadlines | None = None) -> dict[str, Node]:
    """The hosts of an inventory by name, in its order. ``deadlines`` is shared by all.

    Relative paths in it are relative to its directory. Raises UsageError naming the file,
    the line, the key, and what to write instead.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read the inventory {path}", seen=str(error), todo="name a YAML inventory"
        ) from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        problem = getattr(error, "problem", None) or str(error)
        raise UsageError(f"{where}: no YAML", seen=problem, todo="mend the file") from error
    reader = _Reader(path, deadlines or Deadlines())
    top = reader.mapping(root, "the inventory")
    if "all" not in top:
        raise reader.error(root, "all", "is missing", "write all: with hosts: below it")
    found: dict[str, Node] = {}
    for name, node, variables in reader.hosts(top["all"], "all", {}):
        if name in found:
            raise reader.error(node, name, "is there twice", "name each host once")
        found[name] = reader.host(name, node, variables)
    if not found:
        raise reader.error(top["all"], "all.hosts", "has no host", "add one")
    reader.check_peers(found)
    return found


def write(path: Path, hosts: Mapping[str, Node]) -> None:
    """Write an inventory for these nodes, at once; ``read`` gives them back, and
    ansible-playbook reaches them with the same keys and host keys."""
    data = {"all": {"hosts": {name: _host_vars(host) for name, host in hosts.items()}}}
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=".inventory-", encoding="utf-8", delete=False
    ) as file:
        yaml.safe_dump(data, file, sort_keys=False, allow_unicode=True)
    Path(file.name).chmod(0o644)
    Path(file.name).replace(path)


def _host_vars(host: Node) -> dict[str, Any]:
    endpoint = host.endpoint
    variables: dict[str, Any] = {
        "ansible_host": endpoint.host,
        "ansible_port": endpoint.port,
        "ansible_user": endpoint.user,
        "ansible_python_interpreter": "/usr/bin/python3",
    }
    if endpoint.key is not None:
        variables["ansible_ssh_private_key_file"] = str(endpoint.key.absolute())
    options = ["-o", "StrictHostKeyChecking=yes"]
    if endpoint.known_hosts is not None:
        known = str(endpoint.known_hosts.absolute())
        variables["rdmalab_known_hosts"] = known
        options += ["-o", f'UserKnownHostsFile="{known}"', "-o", "GlobalKnownHostsFile=/dev/null"]
    if endpoint.host_key_alias:
        variables["rdmalab_host_key_alias"] = endpoint.host_key_alias
        options += ["-o", f"HostKeyAlias={endpoint.host_key_alias}"]
    variables["ansible_ssh_common_args"] = shlex.join(options)
    if host.links:
        variables["rdmalab_links"] = [asdict(end) for end in host.links.values()]
    return variables


_Variables = dict[str, yaml.Node]


class _Reader:
    """Goes through YAML's nodes, not its values, so that errors can name lines."""

    def __init__(self, path: Path, deadlines: Deadlines) -> None:
        self._path = path
        self._deadlines = deadlines
        self._places: dict[tuple[str, str], yaml.Node] = {}

    def error(self, node: yaml.Node | None, key: str, seen: str, todo: str) -> UsageError:
        line = f":{node.start_mark.line + 1}" if node is not None else ""
        return UsageError(f"{self._path}{line}: {key}", seen=seen, todo=todo)

    def mapping(self, node: yaml.Node | None, key: str) -> _Variables:
        if not isinstance(node, yaml.MappingNode):
            raise self.error(node, key, "is no mapping", "write key: value lines below it")
        found: _Variables = {}
        for name, value in node.value:
            if not isinstance(name, yaml.ScalarNode):
                raise self.error(name, key, "has a key that is no word", "write a plain key")
            if name.value in found:
                raise self.error(name, f"{key}.{name.value}", "is there twice", "keep one")
            found[name.value] = value
        return found

    def hosts(
        self, group: yaml.Node, key: str, inherited: _Variables
    ) -> Iterator[tuple[str, yaml.Node, _Variables]]:
        content = self._optional(group, key)
        unknown = set(content) - {"hosts", "children", "vars"}
        if unknown:
            name = sorted(unknown)[0]
            raise self.error(
                content[name],
                f"{key}.{name}",
                "is no part of a group",
                "a group has hosts, children and vars",
            )
        variables = {**inherited, **self._optional(content.get("vars"), f"{key}.vars")}
        for name, node in self._optional(content.get("hosts"), f"{key}.hosts").items():
            own = self._optional(node, f"{key}.hosts.{name}")
            if not _NAME.match(name):
                raise self.error(
                    node, f"{key}.hosts.{name}", "is no host name", "use letters, digits, - and ."
                )
            yield name, node, {**variables, **own}
        children = self._optional(content.get("children"), f"{key}.children")
        for name, child in children.items():
            yield from self.hosts(child, f"{key}.children.{name}", variables)

    def host(self, name: str, node: yaml.Node, variables: _Variables) -> Node:
        key = f"host {name}"
        port_node = variables.get("ansible_port")
        port = self._integer(variables, key, "ansible_port", 22)
        if not 1 <= port <= 65535:
            raise self.error(
                port_node, f"{key}: ansible_port", f"{port} is no port", "write 1 to 65535"
            )
        endpoint = Endpoint(
            self._text(variables, key, "ansible_host") or name,
            port,
            self._text(variables, key, "ansible_user") or "root",
            self._file(variables, key, "ansible_ssh_private_key_file"),
            self._file(variables, key, "rdmalab_known_hosts"),
            self._text(variables, key, "rdmalab_host_key_alias"),
        )
        links = {end.link: end for end in self._links(name, variables.get("rdmalab_links"))}
        return Node(name, endpoint, links, deadlines=self._deadlines)

    def check_peers(self, hosts: Mapping[str, Node]) -> None:
        for host in hosts.values():
            for end in host.links.values():
                where = f"host {host.name}: rdmalab_links, link {end.link}"
                node = self._places.get((host.name, end.link))
                peer = hosts.get(end.peer)
                if peer is None or peer is host:
                    raise self.error(
                        node,
                        f"{where}: peer",
                        f"{end.peer!r} is no other host here",
                        f"name one of {', '.join(n for n in hosts if n != host.name) or 'none'}",
                    )
                if not any(o.link == end.link and o.peer == host.name for o in peer.links.values()):
                    raise self.error(
                        node,
                        where,
                        f"{end.peer} has no end of it to {host.name}",
                        "describe both ends",
                    )

    def _links(self, host: str, node: yaml.Node | None) -> Iterator[LinkEnd]:
        if node is None:
            return
        key = f"host {host}: rdmalab_links"
        if not isinstance(node, yaml.SequenceNode):
            raise self.error(node, key, "is no list", "write one - item per link")
        names: set[str] = set()
        for item in node.value:
            values = self.mapping(item, key)
            wanted = [each.name for each in fields(LinkEnd)]
            for missing in (name for name in wanted if name not in values):
                raise self.error(item, f"{key}: {missing}", "is missing", f"give {missing}:")
            for unknown in (name for name in values if name not in wanted):
                raise self.error(
                    values[unknown],
                    f"{key}: {unknown}",
                    "is no field of a link",
                    f"the fields are {', '.join(wanted)}",
                )
            end = LinkEnd(
                **{name: self._text(values, key, name) for name in wanted if name != "mtu"},
                mtu=self._integer(values, key, "mtu", 0),
            )
            self._check(end, values, key)
            if end.link in names:
                raise self.error(
                    item, f"{key}: {end.link}", "is there twice", "name each link once"
                )
            names.add(end.link)
            self._places[host, end.link] = item
            yield end

    def _check(self, end: LinkEnd, nodes: _Variables, key: str) -> None:
        def refuse(name: str, todo: str) -> UsageError:
            seen = f"{getattr(end, name)!r} will not do"
            return self.error(nodes[name], f"{key}: {name}", seen, todo)

        if not _NAME.match(end.link):
            raise refuse("link", "use letters, digits, - and .")
        if end.kind not in KINDS:
            raise refuse("kind", f"one of {', '.join(KINDS)}")
        if not _NETDEV.match(end.netdev):
            raise refuse("netdev", "give the interface's name, at most 15 characters")
        if not _MAC.match(end.mac):
            raise refuse("mac", "six pairs of hexadecimal digits with colons, in quotes")
        if not 68 <= end.mtu <= 65535:
            raise refuse("mtu", "a number of bytes from 68 to 65535")
        for name, kind in (
            ("ipv4", ipaddress.IPv4Interface),
            ("ipv6", ipaddress.IPv6Interface),
        ):
            value = getattr(end, name)
            try:
                good = "/" in value and bool(kind(value))
            except ValueError:
                good = False
            if not good:
                raise refuse(
                    name, "an address with its prefix length, like 10.0.0.1/24, fd00::1/64"
                )

    def _optional(self, node: yaml.Node | None, key: str) -> _Variables:
        empty = isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"
        return {} if node is None or empty else self.mapping(node, key)

    def _text(self, variables: _Variables, key: str, name: str) -> str:
        node = variables.get(name)
        if node is None:
            return ""
        if not isinstance(node, yaml.ScalarNode) or node.tag.endswith((":null", ":bool")):
            raise self.error(node, f"{key}: {name}", "is no text", "write one value, in quotes")
        text = str(node.value)
        if _TEMPLATE.search(text):
            raise self.error(
                node, f"{key}: {name}", "is a template, which only Ansible fills", "write the value"
            )
        return text

    def _integer(self, variables: _Variables, key: str, name: str, default: int) -> int:
        text = self._text(variables, key, name)
        if not text:
            return default
        if not re.fullmatch(r"\d{1,9}", text):
            raise self.error(
                variables[name], f"{key}: {name}", f"{text!r} is no number", "write a whole number"
            )
        return int(text)

    def _file(self, variables: _Variables, key: str, name: str) -> Path | None:
        text = self._text(variables, key, name)
        if not text:
            return None
        path = Path(text).expanduser()
        if not path.is_absolute():
            path = self._path.parent.absolute() / path
        if not path.is_file():
            raise self.error(variables[name], f"{key}: {name}", f"no file {path}", "name one")
        return path
