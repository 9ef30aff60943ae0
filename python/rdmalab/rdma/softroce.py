# SPDX-License-Identifier: Apache-2.0
"""SoftRoCE (the kernel's ``rdma_rxe``) on a netdev: set up and torn down.

Both are idempotent: what is already so is left alone, and said.
"""

from __future__ import annotations

import ipaddress
import json
import platform
import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from rdmalab.errors import DeadlineExceeded, HostError, RdmalabError, UsageError
from rdmalab.rdma import netlink
from rdmalab.rdma.model import ROCE_V2, IpAddress
from rdmalab.rdma.sysfs import ROOT, DeviceFiles, device_names

# ib_uverbs and rdma_ucm are what user space opens; nothing that rdma_rxe depends on pulls
# them in, and a node without udev's rules has nobody to load them.
MODULES = ("rdma_rxe", "ib_uverbs", "rdma_ucm")

CM_DEVICE = Path("/dev/infiniband/rdma_cm")

_POLL = 0.05
# The kernel's IB_DEVICE_NAME_MAX is 64 with the final zero; "%" would be a template.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}")


@dataclass(frozen=True)
class Made:
    """A device that is ready; ``created`` is False when it was there before."""

    device: str
    netdev: str
    created: bool


def default_name(netdev: str) -> str:
    return f"rxe_{netdev}"


def setup(netdev: str, name: str | None = None, *, seconds: float = 20.0) -> Made:
    """A SoftRoCE device on ``netdev``, its port ACTIVE and every address of the netdev in
    its GID table as RoCE v2 (link-local ones excepted: those may come later).

    Raises ``UsageError`` for a netdev that does not exist and a name that is taken,
    ``HostError`` for a missing module, ``DeadlineExceeded`` naming what is not there after
    ``seconds``.
    """
    if "/" in netdev or not (ROOT / "class/net" / netdev).exists():
        there = ", ".join(sorted(p.name for p in (ROOT / "class/net").iterdir()))
        raise UsageError(f"no netdev {netdev}", seen=f"netdevs: {there}")
    name = name or default_name(netdev)
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is no name for an RDMA device", todo="letters, digits, _ . -")
    for module in MODULES:
        _load(module)
    created = not _exists(netdev, name)
    if created:
        _add(netdev, name)
    _wait_ready(netdev, name, time.monotonic() + seconds, seconds)
    return Made(name, netdev, created)


def teardown(
    name: str | None = None, netdev: str | None = None, *, seconds: float = 20.0
) -> tuple[str, ...]:
    """Deletes the SoftRoCE device of that name or netdev, or all of them; returns those that
    were there.

    A device of another driver is refused with ``UsageError``. The kernel deletes
    asynchronously: this returns once the devices are gone from sysfs.
    """
    ours = _softroce()
    if name is not None and name in device_names() and name not in ours:
        raise UsageError(f"{name} is not a SoftRoCE device", todo="only those are torn down")
    doomed = tuple(
        device for device, on in ours.items() if name in (None, device) and netdev in (None, on)
    )
    for device in doomed:
        try:
            netlink.run_rdma("link", "delete", device)
        except netlink.RdmaToolError:
            if device in device_names():  # gone meanwhile is what was wanted
                raise
    deadline = time.monotonic() + seconds
    while left := [device for device in doomed if device in device_names()]:
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"{', '.join(left)} is not gone",
                seen=f"deadline {seconds:g} s",
                todo="end what holds it open (rdma resource show qp)",
            )
        time.sleep(_POLL)
    return doomed


def _softroce() -> dict[str, str]:
    """Netdev by SoftRoCE device."""
    if not device_names():
        return {}
    indexes = netlink.device_indexes()
    return {
        row["ifname"]: row.get("netdev", "")
        for row in netlink.links()
        if _is_softroce(row["ifname"], indexes)
    }


def _is_softroce(name: str, indexes: dict[str, int]) -> bool:
    # netlink knows drivers by their character devices, which are there only with ib_uverbs;
    # "parent" is a file that rdma_rxe alone makes.
    if (ROOT / "class/infiniband" / name / "parent").exists():
        return True
    return name in indexes and netlink.driver_name(indexes[name]) == "rxe"


def _exists(netdev: str, name: str) -> bool:
    """Whether the device is there as asked; ``UsageError`` when name or netdev are taken."""
    ours = _softroce()
    if name in device_names():
        if name not in ours:
            raise UsageError(f"the name {name} is taken", seen="a device of another driver has it")
        if ours[name] != netdev:
            raise UsageError(
                f"the name {name} is taken",
                seen=f"it is SoftRoCE on {ours[name]}, not {netdev}",
                todo="give another --name or tear it down",
            )
        return True
    for other, on in ours.items():
        if on == netdev:
            raise UsageError(
                f"{netdev} already carries SoftRoCE device {other}",
                todo=f"use that, or tear it down before making {name}",
            )
    return False


def _add(netdev: str, name: str) -> None:
    try:
        netlink.run_rdma("link", "add", name, "type", "rxe", "netdev", netdev)
    except netlink.RdmaToolError as error:
        raise RdmalabError(
            f"the kernel refuses SoftRoCE on {netdev}",
            seen=error.stderr,
            todo="a netdev that is itself RDMA, or lo on some kernels, cannot carry it",
        ) from error


def _load(module: str) -> None:
    if (ROOT / "module" / module).exists():
        return
    try:
        done = subprocess.run(
            ["modprobe", module], capture_output=True, text=True, timeout=60, check=False
        )
    except FileNotFoundError:
        raise HostError("modprobe is missing", todo="apt-get install kmod") from None
    except subprocess.TimeoutExpired:
        raise DeadlineExceeded(f"modprobe {module} hangs", seen="deadline 60 s") from None
    if done.returncode != 0:
        raise HostError(
            f"kernel {platform.release()} cannot load module {module}",
            seen=done.stderr,
            todo=f"install the modules of that kernel (a linux-image that has {module})",
        )


def _wait_ready(netdev: str, name: str, deadline: float, seconds: float) -> None:
    files = DeviceFiles(name)
    while True:
        lacking = _lacking(files, netdev)
        if not lacking:
            return
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"{name} on {netdev} is not ready",
                seen=f"{lacking} after {seconds:g} s",
                todo=f"look at: ip addr show {netdev}",
            )
        time.sleep(_POLL)


def _lacking(files: DeviceFiles, netdev: str) -> str:
    """What is not there yet, "" when all is."""
    if not files.ports():
        return "the device has no port"
    state = files.text("ports/1/state") or "unknown"
    if not state.endswith("ACTIVE"):
        return f"port 1 is {state.partition(': ')[2] or state}"
    there = {gid.address for gid in files.gids(1) if gid.type == ROCE_V2}
    missing = [str(address) for address in _addresses(netdev) if address not in there]
    if missing:
        return f"no RoCE v2 GID of {', '.join(missing)}"
    if not CM_DEVICE.exists():
        return f"no {CM_DEVICE}"
    return ""


def _addresses(netdev: str) -> list[IpAddress]:
    """The netdev's usable addresses without link-local ones."""
    done = subprocess.run(
        ["ip", "-j", "addr", "show", "dev", netdev],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    if done.returncode != 0:
        raise RdmalabError(f"ip addr show {netdev} failed", seen=done.stderr)
    found = []
    for link in json.loads(done.stdout or "[]"):
        for info in link.get("addr_info", ()):
            if info.get("tentative") or info.get("dadfailed"):
                continue
            address = ipaddress.ip_address(info["local"])
            if not address.is_link_local:
                found.append(address)
    return found
