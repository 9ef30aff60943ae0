# SPDX-License-Identifier: Apache-2.0
"""What only RDMA netlink tells: links, resources, drivers; and links made and deleted.

No release of pyroute2 speaks RDMA netlink (looked at: 0.7.7 of Debian 13 up to 0.9.7 of
PyPI), so links and resources go through iproute2's ``rdma``, which does. The driver of a
software device is in neither: one netlink message (RDMA_NLDEV_CMD_GET_CHARDEV, the one that
libibverbs finds its providers by) is sent from here.
"""

from __future__ import annotations

import json
import socket
import struct
import subprocess
from typing import Any

from rdmalab.errors import RdmalabError

_SECONDS = 20.0

# include/uapi/linux/netlink.h and include/uapi/rdma/rdma_netlink.h
_NETLINK_RDMA = 20
_RDMA_NL_NLDEV = 5
_NLDEV_CMD_GET_CHARDEV = 15
_NLDEV_ATTR_DEV_INDEX = 1
_NLDEV_ATTR_CHARDEV_TYPE = 69
_NLDEV_ATTR_UVERBS_DRIVER_ID = 73
_NLM_F_REQUEST = 1
_NLMSG_ERROR = 2

# enum rdma_driver_id, include/uapi/rdma/ib_user_ioctl_verbs.h
_DRIVERS = {
    1: "mlx5",
    2: "mlx4",
    3: "cxgb3",
    4: "cxgb4",
    5: "mthca",
    6: "bnxt_re",
    7: "ocrdma",
    8: "nes",
    9: "irdma",
    10: "vmw_pvrdma",
    11: "qedr",
    12: "hns",
    13: "usnic",
    14: "rxe",
    15: "hfi1",
    16: "qib",
    17: "efa",
    18: "siw",
    19: "erdma",
    20: "mana",
    21: "ionic",
}


class RdmaToolError(RdmalabError):
    """iproute2's ``rdma`` refused; ``stderr`` is what it said."""

    def __init__(self, argv: list[str], status: int, stderr: str) -> None:
        self.stderr = stderr
        super().__init__(f"{' '.join(argv)} ended with {status}", seen=stderr)


def run_rdma(*arguments: str) -> str:
    """Standard output of ``rdma ARGUMENTS``; ``RdmaToolError`` when it fails."""
    argv = ["rdma", *arguments]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except FileNotFoundError:
        raise RdmalabError(
            "the rdma command is missing", todo="install iproute2 with its rdma tool"
        ) from None
    except subprocess.TimeoutExpired:
        raise RdmalabError(f"{' '.join(argv)} hangs", seen=f"deadline {_SECONDS:g} s") from None
    if done.returncode != 0:
        raise RdmaToolError(argv, done.returncode, done.stderr)
    return done.stdout


def links() -> list[dict[str, Any]]:
    """``rdma -j link``: one object a port with ifname, port, state, physical_state and,
    where it has one, netdev."""
    return _rows("link")


def resources() -> dict[str, dict[str, int]]:
    """``rdma -j resource``: by device, how many of each kind (qp, cq, mr, pd, …) exist."""
    return {
        row["ifname"]: {kind: n for kind, n in row.items() if isinstance(n, int)}
        for row in _rows("resource")
    }


def _rows(what: str) -> list[dict[str, Any]]:
    text = run_rdma("-j", what).strip()
    try:
        rows = json.loads(text) if text else []
    except ValueError as error:
        raise RdmalabError(f"rdma -j {what} printed no JSON", seen=str(error)) from error
    return list(rows)


def driver_name(device_index: int) -> str | None:
    """The driver of the device with that index, as its verbs character device says.

    ``None`` where the device has none (``ib_uverbs`` not loaded), or the driver is unknown
    to the kernel's list of drivers (RDMA_DRIVER_UNKNOWN).
    """
    body = _attribute(_NLDEV_ATTR_CHARDEV_TYPE, b"uverbs\0") + _attribute(
        _NLDEV_ATTR_DEV_INDEX, struct.pack("=I", device_index)
    )
    reply = _ask(_NLDEV_CMD_GET_CHARDEV, body)
    attributes = dict(_attributes(reply)) if reply is not None else {}
    value = attributes.get(_NLDEV_ATTR_UVERBS_DRIVER_ID)
    return _DRIVERS.get(struct.unpack("=I", value[:4])[0]) if value else None


def device_indexes() -> dict[str, int]:
    """The kernel's index of each device, by name."""
    return {row["ifname"]: int(row["ifindex"]) for row in _rows("dev")}


def _attribute(kind: int, value: bytes) -> bytes:
    data = struct.pack("=HH", len(value) + 4, kind) + value
    return data + b"\0" * (-len(data) % 4)


def _attributes(data: bytes) -> list[tuple[int, bytes]]:
    found = []
    while len(data) >= 4:
        length, kind = struct.unpack_from("=HH", data)
        if length < 4:
            break
        found.append((kind & 0x3FFF, data[4:length]))
        data = data[(length + 3) & ~3 :]
    return found


def _ask(command: int, body: bytes) -> bytes | None:
    """The attributes of the kernel's answer, or ``None`` when it refuses."""
    kind = (_RDMA_NL_NLDEV << 10) | command
    header = struct.pack("=IHHII", 16 + len(body), kind, _NLM_F_REQUEST, 1, 0)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_RDMA) as netlink:
            netlink.settimeout(_SECONDS)
            netlink.bind((0, 0))
            netlink.send(header + body)
            reply = netlink.recv(65536)
    except OSError:
        return None
    if len(reply) < 16 or struct.unpack_from("=H", reply, 4)[0] == _NLMSG_ERROR:
        return None
    return reply[16:]
