# SPDX-License-Identifier: Apache-2.0
"""Devices as the kernel shows them, as JSON by the documented schema, and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from rdmalab.errors import RdmalabError
from rdmalab.rdma import inventory, netlink
from rdmalab.rdma.model import Device
from rdmalab.rdma.sysfs import DeviceFiles, device_names

_SCHEMA = Path(__file__).parents[2] / "docs/schemas/rdma-show.schema.json"
_NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """A device with one port as the kernel shows it: GID entries with a gap, one counter
    that cannot be read."""
    device = tmp_path / "class/infiniband/mlx5_0"
    port = device / "ports/1"
    files = {
        device / "node_type": "1: CA",
        device / "node_guid": "5054:00ff:fe00:0200",
        device / "sys_image_guid": "5054:00ff:fe00:0200",
        device / "fw_ver": "16.35.2000",
        device / "hw_counters/lifespan": "12",
        device / "hw_counters/on_device": "7",
        port / "state": "4: ACTIVE",
        port / "phys_state": "5: LinkUp",
        port / "link_layer": "Ethernet",
        port / "rate": "100 Gb/sec (4X EDR)",
        port / "gids/0": "fe80:0000:0000:0000:5054:00ff:fe00:0200",
        port / "gid_attrs/types/0": "IB/RoCE v1",
        port / "gid_attrs/ndevs/0": "eth0",
        port / "gids/1": _NO_GID,
        port / "gids/2": "0000:0000:0000:0000:0000:ffff:0a4d:0001",
        port / "gid_attrs/types/2": "RoCE v2",
        port / "gid_attrs/ndevs/2": "eth0",
        port / "gids/10": "fd77:0000:0000:0000:0000:0000:0000:0001",
        port / "gid_attrs/types/10": "RoCE v2",
        port / "hw_counters/lifespan": "12",
        port / "hw_counters/sent_pkts": "42",
        port / "hw_counters/out_of_sequence": "0",
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    # A folder cannot be read as a file: stands for EINVAL and EOPNOTSUPP.
    (port / "hw_counters/np_cnp_sent").mkdir()
    driver = tmp_path / "bus/pci/drivers/mlx5_core"
    driver.mkdir(parents=True)
    (device / "device").mkdir()
    (device / "device/driver").symlink_to(driver)
    return tmp_path


@pytest.fixture
def device(sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> Device:
    monkeypatch.setattr(inventory, "device_names", lambda: device_names(sysfs))
    monkeypatch.setattr(inventory, "DeviceFiles", lambda name: DeviceFiles(name, sysfs))
    tool = {
        "link": [{"ifname": "mlx5_0", "port": 1, "state": "ACTIVE", "netdev": "eth0"}],
        "resource": [{"ifindex": 3, "ifname": "mlx5_0", "qp": 2, "cq": 3, "mr": 0, "pd": 1}],
        "dev": [{"ifindex": 3, "ifname": "mlx5_0"}],
    }
    monkeypatch.setattr(netlink, "run_rdma", lambda *argv: json.dumps(tool[argv[-1]]))
    [found] = inventory.devices()
    return found


def test_what_the_kernel_shows_is_what_is_said(device: Device) -> None:
    assert (device.name, device.driver, device.firmware) == ("mlx5_0", "mlx5_core", "16.35.2000")
    port = device.port(1)
    assert (port.state, port.link_layer, port.netdev) == ("ACTIVE", "Ethernet", "eth0")
    assert [(gid.index, gid.type, str(gid.address), gid.netdev) for gid in port.gids] == [
        (0, "IB/RoCE v1", "fe80::5054:ff:fe00:200", "eth0"),
        (2, "RoCE v2", "10.77.0.1", "eth0"),
        (10, "RoCE v2", "fd77::1", None),
    ]
    assert (device.in_use.qp, device.in_use.mr) == (2, 0)


def test_what_is_not_known_is_not_zero(device: Device) -> None:
    port = device.port(1)
    assert port.hw_counters == {
        "np_cnp_sent": None,
        "on_device": 7,
        "out_of_sequence": 0,
        "sent_pkts": 42,
    }
    assert device.in_use.srq is None
    # There is no pyverbs where unit tests run, and no such device if there were.
    assert device.limits is None
    assert device.limits_missing
    assert port.active_mtu is None
    shown = device.to_json()["ports"][0]["hw_counters"]
    assert (shown["np_cnp_sent"], shown["out_of_sequence"]) == ("unsupported", 0)


def test_json_is_by_the_schema_and_comes_back(device: Device) -> None:
    text = json.dumps(inventory.to_json([device]))
    _validate(json.loads(text))
    assert inventory.parse(text) == [device]


@pytest.mark.parametrize("path", [("devices", 0, "driver"), ("devices", 0, "ports", 0, "gids")])
def test_schema_wants_every_key(device: Device, path: tuple[Any, ...]) -> None:
    data = json.loads(json.dumps(inventory.to_json([device])))
    inner = data
    for step in path[:-1]:
        inner = inner[step]
    del inner[path[-1]]
    with pytest.raises(jsonschema.ValidationError):
        _validate(data)


def test_no_device_is_an_empty_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "device_names", lambda: device_names(tmp_path))
    assert inventory.devices() == []


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "no list of devices"),
        ("[]", "no list of devices"),
        ('{"schema": "rdma-show/1"}', "no list of devices"),
        ('{"schema": "rdma-show/2", "devices": []}', "schema 'rdma-show/2', not 'rdma-show/1'"),
        ('{"schema": "rdma-show/1", "devices": [{}]}', "not an RDMA device's description"),
        ('{"schema": "rdma-show/1", "devices": [3]}', "not an RDMA device's description"),
    ],
)
def test_other_output_is_refused(text: str, line: str) -> None:
    with pytest.raises(RdmalabError, match=line):
        inventory.parse(text)


@dataclass
class _Output:
    stdout: str


class _Node:
    name = "node7"

    def __init__(self, stdout: str) -> None:
        self._stdout = stdout
        self.asked: tuple[str, list[str]] | None = None

    def python(self, module: str, args: Sequence[str] = ()) -> _Output:
        self.asked = module, list(args)
        return _Output(self._stdout)


def test_show_asks_the_node(device: Device) -> None:
    node = _Node(json.dumps(inventory.to_json([device])))
    assert inventory.show(node) == [device]
    assert node.asked == ("rdmalab.rdma", ["show", "--json"])
    with pytest.raises(RdmalabError, match=r"^node7: "):
        inventory.show(_Node("Traceback"))


def test_a_port_that_is_not_there(device: Device) -> None:
    with pytest.raises(RdmalabError, match="mlx5_0 has no port 2: ports 1"):
        device.port(2)


def _validate(data: Any) -> None:
    schema = json.loads(_SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(data)
