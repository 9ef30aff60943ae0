# SPDX-License-Identifier: Apache-2.0
"""What a lab decides before anything runs: names, addresses, QEMU's command line, the plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from rdmalab.errors import UsageError
from rdmalab.lab import qemu, topology
from rdmalab.lab.accel import Accelerator
from rdmalab.lab.lab import LabSpec
from rdmalab.lab.plan import Plan, PlannedLink, PlannedNode

FOLDER = Path(__file__).parents[2] / "vm" / "topologies"
TCG = Accelerator("tcg", "for this test")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"name": "My Lab"}, "My Lab"),
        ({"name": ""}, "''"),
        ({"mode": "medium"}, "medium"),
        ({"vcpus": 0}, "0 vCPUs"),
        ({"memory_mib": 16}, "16 MiB"),
        ({"ssh_port": 70000}, "70000"),
    ],
)
def test_a_wrong_wish_is_refused_by_name(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        LabSpec(**wrong)  # type: ignore[arg-type]


def guest(name: str, shape: topology.Topology, **more: object) -> list[str]:
    made = qemu.Guest(
        name=name, vcpus=1, memory_mib=512, boot=("-kernel", "vmlinux"),
        links=tuple(shape.links_of(name)), **more,  # type: ignore[arg-type]
    )  # fmt: skip
    return qemu.command(["qemu"], made, TCG)


def values(argv: list[str], option: str) -> list[str]:
    return [argv[i + 1] for i, word in enumerate(argv) if word == option]


def test_the_two_ends_of_a_link_meet_at_one_socket() -> None:
    shape = topology.read(FOLDER, "pair")
    ends = [
        next(v for v in values(guest(node, shape), "-netdev") if v.startswith("stream"))
        for node in shape.nodes
    ]
    assert all("addr.path=link-roce0.sock" in end for end in ends)
    assert "server=on" in ends[0]
    assert "server=off" in ends[1]
    assert "reconnect-ms" in ends[1]  # comes back after a restart of the other end


def test_a_panic_is_told_from_a_dead_qemu() -> None:
    argv = guest("node0", topology.read(FOLDER, "pair"))
    assert "panic=pause" in values(argv, "-action")
    assert "pvpanic-pci" in values(argv, "-device")
    assert "oops=panic" in qemu.COMMON_CMDLINE


def test_memory_is_shared_by_descriptor_for_device_models() -> None:
    (memory,) = values(guest("node0", topology.read(FOLDER, "pair")), "-object")
    assert memory.startswith("memory-backend-memfd")
    assert "share=on" in memory


def test_nothing_listens_beyond_loopback() -> None:
    argv = guest("node0", topology.read(FOLDER, "pair"))
    forwards = [v for v in values(argv, "-netdev") if "hostfwd" in v]
    assert len(forwards) == 1
    assert "hostfwd=tcp:127.0.0.1:" in forwards[0]


def test_addresses_and_macs_differ_between_nodes_and_links() -> None:
    shape = topology.read(FOLDER, "line")
    found = [
        (address, qemu.mac(node, link.name))
        for node in shape.nodes
        for link in shape.links_of(node)
        for address in qemu.addresses(shape, link, node)
    ]
    assert len({address for address, _ in found}) == len(found)
    assert len({mac for _, mac in found}) == len(found) // 2
    assert all(mac.startswith("52:54:00:") for _, mac in found)


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    link = PlannedLink("roce0", "roce", "roce0", "m", "10.77.0.1/24", "fd77::1/64", 4200, "node1")
    plan = Plan(
        lab="x", topology="pair", tier="stock", release="7", mode="fast", accelerator="tcg",
        accelerator_reason="", vcpus=1, memory_mib=512, instructions=False, env={"A": "b"},
        modules=("/m.ko",), nodes=(PlannedNode("node0", ("qemu", "-x"), 0, (link,)),),
    )  # fmt: skip
    plan.write(tmp_path / "plan.json")
    assert Plan.read(tmp_path / "plan.json") == plan
