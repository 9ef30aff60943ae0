# SPDX-License-Identifier: Apache-2.0
"""The RDMA devices of this node as typed values, and of another node through its harness."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rdmalab.errors import RdmalabError
from rdmalab.rdma import netlink
from rdmalab.rdma.model import Device, InUse, Limits, Port
from rdmalab.rdma.sysfs import DeviceFiles, device_names

SCHEMA = "rdma-show/1"

_MTU_OF_ENUM = {1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096}


class ResultLike(Protocol):
    """What a command on a node left."""

    @property
    def stdout(self) -> str: ...


class NodeLike(Protocol):
    """What ``show`` needs of a node: to run one of our modules there."""

    @property
    def name(self) -> str: ...

    def python(self, module: str, args: Sequence[str] = ...) -> ResultLike: ...


def show(node: NodeLike) -> list[Device]:
    """The devices of ``node``, asked for there. Errors are the node's own."""
    return parse(node.python("rdmalab.rdma", ["show", "--json"]).stdout, node=node.name)


def parse(text: str, *, node: str = "") -> list[Device]:
    """What ``show --json`` printed; ``RdmalabError`` for anything else."""
    try:
        data = json.loads(text)
        schema, rows = data["schema"], list(data["devices"])
    except (ValueError, KeyError, TypeError) as error:
        raise RdmalabError(
            "rdma show printed no list of devices", node=node, seen=repr(error)
        ) from error
    if schema != SCHEMA:
        raise RdmalabError(
            f"rdma show printed schema {schema!r}, not {SCHEMA!r}",
            node=node,
            todo="use one version of rdmalab here and there",
        )
    return [Device.from_json(row) for row in rows]


def to_json(found: Sequence[Device]) -> dict[str, Any]:
    """What ``show --json`` prints."""
    return {"schema": SCHEMA, "devices": [device.to_json() for device in found]}


def devices() -> list[Device]:
    """Every RDMA device of this machine."""
    names = device_names()
    if not names:
        return []
    links = {(row["ifname"], row["port"]): row for row in netlink.links() if "port" in row}
    in_use = netlink.resources()
    indexes = netlink.device_indexes()
    return [
        _device(DeviceFiles(name), links, in_use.get(name, {}), indexes.get(name)) for name in names
    ]


def device(name: str) -> Device:
    """One device of this machine; ``RdmalabError`` naming those there are."""
    for found in devices():
        if found.name == name:
            return found
    raise RdmalabError(
        f"no RDMA device {name}", seen=f"devices: {', '.join(device_names()) or 'none'}"
    )


def _device(
    files: DeviceFiles,
    links: Mapping[tuple[str, int], Mapping[str, Any]],
    used: Mapping[str, int],
    index: int | None,
) -> Device:
    limits, mtus, missing = _verbs(files)
    driver = files.parent_driver or (netlink.driver_name(index) if index is not None else None)
    return Device(
        name=files.name,
        driver=driver or "unknown",
        node_type=files.node_type,
        node_guid=files.text("node_guid") or "",
        sys_image_guid=files.text("sys_image_guid") or "",
        firmware=files.text("fw_ver"),
        ports=tuple(
            _port(files, number, links.get((files.name, number), {}), mtus.get(number))
            for number in files.ports()
        ),
        in_use=InUse(
            **{kind: used.get(kind) for kind in ("qp", "cq", "mr", "pd", "ctx", "cm_id", "srq")}
        ),
        limits=limits,
        limits_missing=missing,
    )


def _port(
    files: DeviceFiles, number: int, link: Mapping[str, Any], mtus: tuple[int, int] | None
) -> Port:
    folder = f"ports/{number}"
    gids = files.gids(number)
    # "4: ACTIVE" and "5: LinkUp"
    state = (files.text(f"{folder}/state") or "").partition(": ")[2]
    physical = (files.text(f"{folder}/phys_state") or "").partition(": ")[2]
    return Port(
        number=number,
        state=state or "unknown",
        physical_state=physical or "unknown",
        link_layer=files.text(f"{folder}/link_layer") or "unknown",
        rate=files.text(f"{folder}/rate") or "unknown",
        netdev=link.get("netdev") or next((gid.netdev for gid in gids if gid.netdev), None),
        active_mtu=mtus[0] if mtus else None,
        max_mtu=mtus[1] if mtus else None,
        gids=gids,
        hw_counters=files.hw_counters(number),
    )


def _verbs(
    files: DeviceFiles,
) -> tuple[Limits | None, dict[int, tuple[int, int]], str]:
    """Limits, active and largest MTU by port, and why there are none."""
    try:
        import pyverbs.device
        from pyverbs.pyverbs_error import PyverbsError
    except ImportError as error:
        return None, {}, f"no pyverbs: {error}"
    try:
        with pyverbs.device.Context(name=files.name) as context:
            seen = context.query_device()
            limits = Limits(
                max_qp=seen.max_qp,
                max_qp_wr=seen.max_qp_wr,
                max_sge=seen.max_sge,
                max_cq=seen.max_cq,
                max_cqe=seen.max_cqe,
                max_mr=seen.max_mr,
                max_pd=seen.max_pd,
                max_ah=seen.max_ah,
                max_srq=seen.max_srq,
                max_qp_rd_atom=seen.max_qp_rd_atom,
                max_qp_init_rd_atom=seen.max_qp_init_rd_atom,
                max_mr_size=seen.max_mr_size,
            )
            mtus = {}
            for number in files.ports():
                port = context.query_port(number)
                mtus[number] = (_MTU_OF_ENUM[port.active_mtu], _MTU_OF_ENUM[port.max_mtu])
            return limits, mtus, ""
    except PyverbsError as error:
        why = " ".join(str(error).split())
        return None, {}, f"{why} (is module ib_uverbs loaded?)"
