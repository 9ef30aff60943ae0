# SPDX-License-Identifier: Apache-2.0
"""Full mode: a systemd machine of its own, which keeps its changes over a reboot and nothing
over `down`. These boot labs of their own, since the session's lab may be a fast one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from rdmalab.errors import RdmalabError
from rdmalab.lab.lab import Lab, LabSpec, take_down
from rdmalab.lab.node import Node
from rdmalab.lab.paths import Paths

BOOT = 120.0  # seconds on the reference machine, for a reboot and what follows it

pytestmark = pytest.mark.deadline(900)


@contextmanager
def _up(name: str, topology: str, config: pytest.Config) -> Iterator[Lab]:
    spec = LabSpec(
        name=f"{name}-{os.getpid()}",
        topology=topology,
        kernel=config.getoption("--kernel") or "stock",
        mode="full",
    )
    try:
        with Lab.up(spec) as lab:
            yield lab
    finally:
        take_down(Paths.find(), spec.name)


@pytest.fixture(scope="module")
def full(pytestconfig: pytest.Config) -> Iterator[Lab]:
    with _up("full", "pair", pytestconfig) as lab:
        yield lab


@pytest.fixture
def node(full: Lab) -> Node:
    return full.nodes["node0"]


def _text(node: Node, path: str) -> str:
    return node.run(["cat", path]).stdout


def _settled(node: Node) -> str:
    """systemd's own judgement once all start jobs are done."""
    argv = ["systemctl", "is-system-running", "--wait"]
    return node.run(argv, timeout=BOOT, check=False).stdout.strip()


def _reboot(node: Node) -> None:
    before = _text(node, "/proc/sys/kernel/random/boot_id")
    with suppress(RdmalabError):  # the connection may be cut before the answer
        node.run(["systemctl", "reboot"], timeout=20.0)
    until = time.monotonic() + BOOT * node.deadlines.factor
    while time.monotonic() < until:
        node.drop()
        with suppress(RdmalabError):
            node.wait_ready(20.0)
            if _text(node, "/proc/sys/kernel/random/boot_id") != before:
                return
        time.sleep(1.0)
    pytest.fail(f"{node.name} did not come back from its reboot")


def test_every_node_is_running_and_no_unit_failed(full: Lab) -> None:
    for node in full.nodes.values():
        failed = node.run(["systemctl", "--failed", "--no-legend", "--plain"]).stdout
        assert (_settled(node), failed) == ("running", ""), node.name


def test_services_timers_journal_and_udev_work(node: Node) -> None:
    node.run(["systemd-run", "--unit=probe", "--on-active=1", "--timer-property=AccuracySec=100ms",
              "sh", "-c", "echo the timer ran"])  # fmt: skip
    for _ in range(60):
        journal = node.run(["journalctl", "--no-pager", "-o", "cat", "-u", "probe.service"]).stdout
        if "the timer ran" in journal:
            break
        time.sleep(1.0)
    assert "the timer ran" in journal
    node.run(["modprobe", "dummy", "numdummies=0"])
    node.run(["ip", "link", "add", "probe0", "type", "dummy"])
    try:
        node.run(["udevadm", "settle"])
        info = node.run(["udevadm", "info", "/sys/class/net/probe0"]).stdout
        assert "ID_NET_DRIVER=dummy" in info
    finally:
        node.run(["ip", "link", "delete", "probe0"])


def test_each_node_has_its_own_identity_and_reaches_the_other(full: Lab) -> None:
    ids = set()
    for name, node in full.nodes.items():
        assert node.run(["hostname"]).stdout.strip() == name
        ids.add(_text(node, "/etc/machine-id"))
        link = node.links["roce0"]
        shown = node.run(["ip", "-o", "address", "show", "dev", link.netdev]).stdout
        assert f" {link.ipv4} " in shown
        assert _text(node, f"/sys/class/net/{link.netdev}/mtu").strip() == str(link.mtu)
        peer = full.nodes[link.peer].links["roce0"].ipv4.split("/")[0]
        node.run(["ping", "-c", "1", "-W", "20", "-M", "do", "-s", "4000", peer])
    assert len(ids) == len(full.nodes)


def test_the_kernel_is_the_nodes_own(full: Lab, node: Node) -> None:
    release = node.run(["uname", "-r"]).stdout.strip()
    assert release == full.kernel
    assert _text(node, "/proc/cmdline").startswith(f"BOOT_IMAGE=/boot/vmlinuz-{release} ")
    # From 7.x on the package's script puts the image into /boot, and no package owns it there.
    argv = ["dpkg-query", "-W", "-f", "${Status}", f"linux-image-{release}"]
    assert node.run(argv).stdout == "install ok installed"


def test_update_grub_boots_what_the_image_came_with(node: Node) -> None:
    """The same kernel, arguments and initial RAM disk, by the same file system. How GRUB finds
    its disk may be said otherwise: the image was made where there was no disk to ask."""

    def boots(config: str) -> list[list[str]]:
        lines = [line.split() for line in config.splitlines()]
        return [words for words in lines if words and words[0].startswith(("linux", "initrd"))]

    made = boots(node.run(["grub-mkconfig"], timeout=120.0).stdout)
    assert made
    assert made == boots(_text(node, "/boot/grub/grub.cfg"))


def test_changes_a_dkms_module_and_a_kernel_argument_survive_a_reboot(
    node: Node, tmp_path: Path
) -> None:
    (tmp_path / "dkms.conf").write_text(
        'PACKAGE_NAME="probe"\nPACKAGE_VERSION="1"\nBUILT_MODULE_NAME[0]="probe"\n'
        'DEST_MODULE_LOCATION[0]="/updates/dkms"\nAUTOINSTALL="yes"\n'
    )
    (tmp_path / "Makefile").write_text("obj-m := probe.o\n")
    (tmp_path / "probe.c").write_text(
        '#include <linux/module.h>\nMODULE_LICENSE("GPL");\nMODULE_DESCRIPTION("probe");\n'
    )
    node.run(["mkdir", "-p", "/usr/src/probe-1", "/root/made"])
    for path in tmp_path.iterdir():
        node.put(path, f"/usr/src/probe-1/{path.name}")
    node.run(["dkms", "install", "probe/1"], timeout=900.0)
    node.run(
        ["sh", "-c", "echo probe > /etc/modules-load.d/probe.conf; date > /root/made/by-a-role"]
    )
    node.run(["sed", "-i", 's/^GRUB_CMDLINE_LINUX="/&rdmalab.role=1 /', "/etc/default/grub"])
    node.run(["update-grub"], timeout=120.0)
    assert "rdmalab.role=1" not in _text(node, "/proc/cmdline")

    _reboot(node)

    assert "rdmalab.role=1" in _text(node, "/proc/cmdline").split()
    assert _text(node, "/root/made/by-a-role") != ""
    assert _settled(node) == "running"
    assert "probe" in [line.split()[0] for line in _text(node, "/proc/modules").splitlines()]
    link = node.links["roce0"]
    shown = node.run(["ip", "-o", "address", "show", "dev", link.netdev]).stdout
    assert f" {link.ipv4} " in shown


def test_down_takes_the_disk_with_it_and_the_next_up_starts_from_the_image(
    pytestconfig: pytest.Config,
) -> None:
    with _up("gone", "solo", pytestconfig) as lab:
        node = next(iter(lab.nodes.values()))
        node.run(["sh", "-c", "echo changed > /etc/a-role-was-here && sync"])
        assert list(lab.folder.glob("*.qcow2"))
    assert not lab.folder.exists()
    with _up("gone", "solo", pytestconfig) as lab:
        node = next(iter(lab.nodes.values()))
        assert node.run(["test", "-e", "/etc/a-role-was-here"], check=False).status == 1
