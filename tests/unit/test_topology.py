# SPDX-License-Identifier: Apache-2.0
"""Topology files: what is taken and what is refused, and how it is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from rdmalab.errors import UsageError
from rdmalab.lab import topology

FOLDER = Path(__file__).parents[2] / "vm" / "topologies"


def write(folder: Path, text: str) -> str:
    path = folder / "mine.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", topology.names(FOLDER))
def test_those_that_come_with_the_repository_are_valid(name: str) -> None:
    shape = topology.read(FOLDER, name)
    assert shape.description
    for link in shape.links:
        assert set(link.nodes) <= set(shape.nodes)


def test_pair_is_two_nodes_and_a_link_that_holds_a_path_mtu_of_4096() -> None:
    shape = topology.read(FOLDER, "pair")
    assert shape.nodes == ("node0", "node1")
    (link,) = shape.links
    assert link.mtu >= 4096 + 62  # IPv6, UDP, BTH, RETH, ICRC


def test_a_line_gives_the_middle_node_two_links() -> None:
    shape = topology.read(FOLDER, "line")
    assert [len(shape.links_of(node)) for node in shape.nodes] == [1, 2, 1]


def test_links_get_networks_of_their_own() -> None:
    first, second = topology.read(FOLDER, "dual").links
    assert not first.ipv4.overlaps(second.ipv4)
    assert not first.ipv6.overlaps(second.ipv6)


NODES = 'nodes = ["a", "b"]\n'
LINK = '[[links]]\nname = "l0"\nnodes = ["a", "b"]\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nodes = 3", "nodes: 3"),
        ("nodes = []", "nodes"),
        ('nodes = ["A"]', "'A'"),
        ('nodes = ["a", "a"]', "twice"),
        (NODES + "color = 1", "'color'"),
        (NODES + "[links]\nname = 1", "links"),
        (NODES + LINK.replace("l0", "much-too-long-name"), "links[0].name"),
        (NODES + LINK + 'kind = "token-ring"', "links[0].kind: 'token-ring'"),
        (NODES + LINK.replace('"b"]', '"c"]'), "links[0].nodes: 'c'"),
        (NODES + LINK.replace('"b"]', '"a"]'), "links[0].nodes"),
        (NODES + LINK + "mtu = 100", "links[0].mtu: 100"),
        (NODES + LINK + "mtu = true", "links[0].mtu: True"),
        (NODES + LINK + 'ipv4 = "10.0.0.0/33"', "'33'"),
        (NODES + LINK + 'ipv4 = "10.0.0.0/31"', "too small"),
        (NODES + LINK + "speed = 1", "links[0].speed"),
        (NODES + LINK + LINK, "twice"),
        (NODES + LINK + LINK.replace("l0", "l1") + 'ipv4 = "10.77.0.128/25"', "overlap l0"),
        ("nodes = [", "no TOML"),
    ],
)
def test_a_bad_one_is_refused_in_one_line_that_names_file_and_place(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(UsageError) as caught:
        topology.read(FOLDER, write(tmp_path, text))
    line = str(caught.value)
    assert "mine.toml" in line
    assert said in line
    assert "\n" not in line
    assert caught.value.exit_status == 2


def test_an_unknown_name_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match="pair"):
        topology.read(FOLDER, "triangle")


def test_a_file_that_is_not_there_or_not_readable_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.toml cannot be read"):
        topology.read(FOLDER, str(tmp_path / "none.toml"))
    folder = tmp_path / "folder.toml"
    folder.mkdir()
    with pytest.raises(UsageError, match="cannot be read"):
        topology.read(FOLDER, str(folder))
