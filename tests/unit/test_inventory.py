# SPDX-License-Identifier: Apache-2.0
"""Inventories: what is read is what was written, and errors name the line and the key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmalab.errors import UsageError
from rdmalab.lab import inventory
from rdmalab.lab.node import LinkEnd, Node
from rdmalab.lab.ssh import Endpoint

GOOD = """\
all:
  vars:
    ansible_user: admin
  children:
    boxes:
      vars:
        ansible_port: 2222
      hosts:
        strix0:
          ansible_host: 192.0.2.10
          ansible_ssh_private_key_file: key
          rdmalab_links:
            - link: usb0
              kind: usb4
              netdev: thunderbolt0
              mac: "02:00:00:00:00:01"
              ipv4: 10.77.0.1/24
              ipv6: fd77:0::1/64
              mtu: 65520
              peer: strix1
        strix1:
          ansible_user: root
          role_variable: {a: [1, 2]}
          rdmalab_links:
            - {link: usb0, kind: usb4, netdev: thunderbolt0, mac: "02:00:00:00:00:02",
               ipv4: 10.77.0.2/24, ipv6: "fd77:0::2/64", mtu: 65520, peer: strix0}
  hosts:
    lonely:
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "key").write_text("")
    return tmp_path / "inventory.yml"


def test_hosts_groups_and_variables(path: Path) -> None:
    path.write_text(GOOD)
    nodes = inventory.read(path)
    assert list(nodes) == ["lonely", "strix0", "strix1"]
    assert nodes["lonely"].endpoint == Endpoint("lonely", 22, "admin")
    assert nodes["strix0"].endpoint == Endpoint("192.0.2.10", 2222, "admin", path.parent / "key")
    assert nodes["strix1"].endpoint == Endpoint("strix1", 2222, "root")
    end = nodes["strix0"].links["usb0"]
    assert (end.netdev, end.ipv6, end.mtu, end.peer) == (
        "thunderbolt0",
        "fd77:0::1/64",
        65520,
        "strix1",
    )


@pytest.mark.parametrize(
    ("old", "new", "line", "wanted"),
    [
        ("ansible_port: 2222", "ansible_port: abc", 7, "ansible_port: 'abc' is no number"),
        ("ansible_port: 2222", "ansible_port: 0", 7, "0 is no port"),
        ("ansible_port: 2222", "ansible_port: 70000", 7, "70000 is no port"),
        ("ansible_host: 192.0.2.10", "ansible_host: [1]", 10, "ansible_host: is no text"),
        ("ansible_host: 192.0.2.10", "ansible_host: '{{ x }}'", 10, "only Ansible fills"),
        ("_file: key", "_file: none", 11, "no file"),
        ("kind: usb4\n", "kind: serial\n", 14, "one of roce, usb4, tcp"),
        ("ipv4: 10.77.0.1/24", "ipv4: 10.77.0.1", 17, "with its prefix length"),
        ("ipv4: 10.77.0.1/24", "ipv4: 10.77.0.1/40", 17, "with its prefix length"),
        ("ipv6: fd77:0::1/64", "ipv6: 10.0.0.1/24", 18, "with its prefix length"),
        ('mac: "02:00:00:00:00:01"', "mac: 02-00", 16, "six pairs"),
        ("              mtu: 65520\n", "", 13, "mtu: is missing"),
        ("              mtu: 65520\n", "              mtu: 20\n", 19, "from 68 to 65535"),
        ("              mtu: 65520\n", "              mtu: x\n", 19, "'x' is no number"),
        ("link: usb0\n", "link: usb0\n              speed: 1\n", 14, "speed: is no field"),
        ("peer: strix1", "peer: strix9", 13, "'strix9' is no other host here"),
        ("peer: strix1", "peer: strix0", 13, "'strix0' is no other host here"),
        ("peer: strix1", "peer: lonely", 13, "lonely has no end of it to strix0"),
        ("        strix1:\n", "        strix0:\n", 21, "is there twice"),
        ("    lonely:", "    strix0:", None, "is there twice"),
        ("    lonely:", "    lonely: 3", 28, "is no mapping"),
        ("  hosts:\n    lonely:", "  host:\n    lonely:", 28, "all.host: is no part of a group"),
        ("all:\n", "every:\n", 1, "all: is missing"),
        ("  vars:\n", "  vars: [\n", None, "no YAML"),
    ],
)
def test_errors_name_line_and_key(
    path: Path, old: str, new: str, line: int | None, wanted: str
) -> None:
    assert old in GOOD
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(UsageError, match=re.escape(wanted)) as caught:
        inventory.read(path)
    assert str(caught.value).startswith(f"{path}:{line or ''}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "all:\n", "all:\n  hosts:\n", "[]", "all: 3", "\0"])
def test_an_inventory_without_hosts_is_refused(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(UsageError):
        inventory.read(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the inventory"):
        inventory.read(tmp_path / "none.yml")


@given(st.text(max_size=300))
@settings(max_examples=300, deadline=None)
def test_any_text_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yml"
    path.write_bytes(text.encode(errors="replace"))
    with pytest.raises(UsageError):
        inventory.read(path)


_NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,10}", fullmatch=True)
_USERS = st.one_of(_NAMES, st.sampled_from(["yes", "null", "1e3", "0x10", "on", "123"]))


@given(
    st.lists(_NAMES, min_size=2, max_size=4, unique=True),
    st.integers(1, 65535),
    _USERS,
    st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory,
    names: list[str],
    port: int,
    user: str,
    files: bool,
) -> None:
    base = tmp_path_factory.getbasetemp()
    key, known = base / "the key", base / "known 'hosts'"
    key.touch()
    known.touch()
    endpoint = Endpoint(
        "127.0.0.1", port, user, key if files else None, known if files else None, "alias"
    )
    ends = [("roce0", names[0], names[1]), ("roce0", names[1], names[0])]
    links = {
        node: {link: LinkEnd(link, "roce", link, "02:00:00:00:00:01", "10.0.0.1/24", "::1/64",
                             4200, peer)}
        for link, node, peer in ends
    }  # fmt: skip
    nodes = {name: Node(name, endpoint, links.get(name)) for name in names}
    path = base / "round.yml"
    inventory.write(path, nodes)
    again = inventory.read(path)
    assert list(again) == names
    for name in names:
        assert again[name].endpoint == endpoint
        assert again[name].links == nodes[name].links
    arguments = yaml.safe_load(path.read_text())["all"]["hosts"][names[0]]
    assert arguments["ansible_host"] == "127.0.0.1"
    assert "StrictHostKeyChecking=yes" in arguments["ansible_ssh_common_args"]
