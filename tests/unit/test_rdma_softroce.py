# SPDX-License-Identifier: Apache-2.0
"""SoftRoCE is set up once, torn down whole, and nothing of another's is touched.

The kernel is a small model of what sysfs, ``rdma`` and ``ip`` show; the real one is asked in
tests/vm.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rdmalab.errors import DeadlineExceeded, HostError, UsageError
from rdmalab.rdma import netlink, softroce
from rdmalab.rdma.model import gid_text
from rdmalab.rdma.sysfs import DeviceFiles, device_names


class Kernel:
    """What a kernel with rdma_rxe does, in a folder. ``modules`` can be loaded, ``state`` is
    what a new port comes up in, ``lazy`` how many looks at the GID table find it empty."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules = set(softroce.MODULES)
        self.addresses: dict[str, list[dict[str, Any]]] = {}
        self.drivers: dict[str, str] = {}
        self.netdevs: dict[str, str] = {}
        self.state = "4: ACTIVE"
        self.lazy = 0
        self.holds = False
        self.calls: list[tuple[str, ...]] = []
        (root / "class/net").mkdir(parents=True)
        (root / "class/infiniband").mkdir(parents=True)

    def netdev(self, name: str, *addresses: str, **flags: bool) -> None:
        (self.root / "class/net" / name).mkdir()
        self.addresses[name] = [{"local": address, **flags} for address in addresses]

    def add(self, name: str, netdev: str, driver: str = "rxe") -> None:
        port = self.root / "class/infiniband" / name / "ports/1"
        port.mkdir(parents=True)
        if driver == "rxe":
            (port.parents[1] / "parent").write_text(netdev)
        (port / "state").write_text(self.state)
        self.drivers[name], self.netdevs[name] = driver, netdev
        if not self.lazy:
            self.fill(name)

    def fill(self, name: str) -> None:
        port = self.root / "class/infiniband" / name / "ports/1"
        for folder in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
            (port / folder).mkdir(parents=True, exist_ok=True)
        netdev = self.netdevs[name]
        for index, info in enumerate(self.addresses[netdev]):
            address = info["local"]
            mapped = f"::ffff:{address}" if "." in address else address
            (port / f"gids/{index}").write_text(gid_text(mapped))
            (port / f"gid_attrs/types/{index}").write_text("RoCE v2")
            (port / f"gid_attrs/ndevs/{index}").write_text(netdev)

    def rdma(self, *argv: str) -> str:
        self.calls.append(argv)
        if argv == ("-j", "link"):
            return json.dumps(
                [{"ifname": n, "port": 1, "netdev": d} for n, d in self.netdevs.items()]
            )
        if argv == ("-j", "dev"):
            return json.dumps([{"ifname": n, "ifindex": i} for i, n in enumerate(self.netdevs)])
        if argv[:2] == ("link", "add"):
            self.add(argv[2], argv[6])
            return ""
        assert argv[:2] == ("link", "delete")
        if not self.holds:
            folder = self.root / "class/infiniband" / argv[2]
            for path in sorted(folder.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            folder.rmdir()
            del self.drivers[argv[2]], self.netdevs[argv[2]]
        return ""

    def process(self, argv: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if argv[0] == "modprobe":
            known = argv[1] in self.modules
            error = "" if known else f"modprobe: FATAL: Module {argv[1]} not found"
            return subprocess.CompletedProcess(argv, 0 if known else 1, "", error)
        assert argv[:4] == ["ip", "-j", "addr", "show"]
        return subprocess.CompletedProcess(
            argv, 0, json.dumps([{"addr_info": self.addresses[argv[5]]}]), ""
        )

    def sleep(self, _: float) -> None:
        if self.lazy:
            self.lazy -= 1
            if not self.lazy:
                for name in self.netdevs:
                    self.fill(name)


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel(tmp_path)
    names = lambda: device_names(tmp_path)  # noqa: E731
    files: Callable[[str], DeviceFiles] = lambda name: DeviceFiles(name, tmp_path)  # noqa: E731
    cm_device = tmp_path / "rdma_cm"
    cm_device.write_text("")
    monkeypatch.setattr(softroce, "ROOT", tmp_path)
    monkeypatch.setattr(softroce, "CM_DEVICE", cm_device)
    monkeypatch.setattr(softroce, "device_names", names)
    monkeypatch.setattr(softroce, "DeviceFiles", files)
    monkeypatch.setattr(netlink, "run_rdma", kernel.rdma)
    monkeypatch.setattr(netlink, "driver_name", lambda index: list(kernel.drivers.values())[index])
    monkeypatch.setattr(softroce.subprocess, "run", kernel.process)
    monkeypatch.setattr(softroce.time, "sleep", kernel.sleep)
    kernel.netdev("roce0", "10.77.0.1", "fd77::1", "fe80::1")
    return kernel


def test_setup_makes_it_once(kernel: Kernel) -> None:
    assert softroce.setup("roce0") == softroce.Made("rxe_roce0", "roce0", True)
    assert softroce.setup("roce0") == softroce.Made("rxe_roce0", "roce0", False)
    assert [call[1] for call in kernel.calls if call[0] == "link"] == ["add"]


def test_setup_waits_for_the_gids(kernel: Kernel) -> None:
    kernel.lazy = 3
    assert softroce.setup("roce0").created
    assert kernel.lazy == 0


def test_setup_says_which_gid_does_not_come(kernel: Kernel) -> None:
    kernel.lazy = 10**9
    with pytest.raises(DeadlineExceeded, match=r"no RoCE v2 GID of 10\.77\.0\.1, fd77::1 after"):
        softroce.setup("roce0", seconds=0.1)


def test_setup_says_that_the_port_is_down(kernel: Kernel) -> None:
    kernel.state = "1: DOWN"
    with pytest.raises(DeadlineExceeded, match="port 1 is DOWN after"):
        softroce.setup("roce0", seconds=0.1)


def test_addresses_that_are_not_usable_are_not_waited_for(kernel: Kernel) -> None:
    kernel.netdev("eth1", "fd78::1", tentative=True)
    kernel.lazy = 10**9
    assert softroce.setup("eth1", seconds=0.5).created


def test_no_such_netdev(kernel: Kernel) -> None:
    for name in ("nosuch0", "../net/roce0"):
        with pytest.raises(UsageError, match=f"no netdev {name}: netdevs: roce0"):
            softroce.setup(name)


@pytest.mark.parametrize("name", ["", "rxe%d", "a b", "x" * 64, "-x", "a/b"])
def test_bad_name(kernel: Kernel, name: str) -> None:
    if name:
        with pytest.raises(UsageError, match="no name for an RDMA device"):
            softroce.setup("roce0", name)
    else:
        assert softroce.setup("roce0", name).device == "rxe_roce0"


def test_taken_name(kernel: Kernel) -> None:
    kernel.netdev("roce1", "10.78.0.1")
    softroce.setup("roce1", "mine")
    with pytest.raises(UsageError, match="name mine is taken: it is SoftRoCE on roce1, not roce0"):
        softroce.setup("roce0", "mine")
    kernel.add("mlx5_0", "roce0", "mlx5")
    with pytest.raises(UsageError, match="name mlx5_0 is taken: a device of another driver"):
        softroce.setup("roce0", "mlx5_0")


def test_taken_netdev(kernel: Kernel) -> None:
    softroce.setup("roce0", "first")
    with pytest.raises(UsageError, match="roce0 already carries SoftRoCE device first"):
        softroce.setup("roce0", "second")


def test_missing_module(kernel: Kernel) -> None:
    kernel.modules.remove("rdma_rxe")
    with pytest.raises(HostError, match=r"cannot load module rdma_rxe: .*not found; install"):
        softroce.setup("roce0")
    assert device_names(kernel.root) == ()


def test_teardown_takes_all_or_the_named(kernel: Kernel) -> None:
    kernel.netdev("roce1", "10.78.0.1")
    kernel.netdev("roce2", "10.79.0.1")
    for netdev in ("roce0", "roce1", "roce2"):
        softroce.setup(netdev)
    kernel.add("mlx5_0", "roce0", "mlx5")
    assert softroce.teardown("rxe_roce1") == ("rxe_roce1",)
    assert softroce.teardown(netdev="roce2") == ("rxe_roce2",)
    assert softroce.teardown() == ("rxe_roce0",)
    assert softroce.teardown() == ()
    assert device_names(kernel.root) == ("mlx5_0",)


def test_teardown_spares_other_drivers(kernel: Kernel) -> None:
    kernel.add("mlx5_0", "roce0", "mlx5")
    with pytest.raises(UsageError, match="mlx5_0 is not a SoftRoCE device"):
        softroce.teardown("mlx5_0")


def test_teardown_that_does_not_end(kernel: Kernel) -> None:
    softroce.setup("roce0")
    kernel.holds = True
    with pytest.raises(DeadlineExceeded, match=r"rxe_roce0 is not gone: deadline 0\.1 s"):
        softroce.teardown(seconds=0.1)
