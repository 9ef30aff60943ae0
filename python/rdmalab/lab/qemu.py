# SPDX-License-Identifier: Apache-2.0
"""QEMU's command line for one guest. Nothing runs here."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rdmalab.lab.accel import Accelerator
from rdmalab.lab.topology import Link, Topology

#: Stands in a command line where the supervisor puts the port it found free.
SSH_PORT = "@SSH_PORT@"
MANAGEMENT_NETDEV = "mgmt0"
#: QEMU's user-mode network gives its one guest this address (net/slirp.c).
MANAGEMENT_ADDRESS = "10.0.2.15/24"
GATEWAY = "10.0.2.2"
#: Devices of the machine that nobody here uses and a guest would spend time probing.
_ABSENT = "usb=off,vmport=off,hpet=off,sata=off,smbus=off,i8042=off"
#: oops=panic makes an oops end the guest, which pvpanic tells the host; panic=0 keeps it
#: there for a dump; an NMI, which the harness sends to a guest that hangs, makes it say
#: where it stood. No soft-lockup panics: a stalled host is not a guest's fault.
COMMON_CMDLINE = (
    "console=ttyS0,115200 loglevel=7 oops=panic panic=0 mitigations=off "
    "net.ifnames=0 random.trust_cpu=on no_timer_check tsc=reliable "
    "nmi_watchdog=0 unknown_nmi_panic audit=0 apparmor=0 printk.devkmsg=on"
)


@dataclass(frozen=True)
class Guest:
    name: str
    vcpus: int
    memory_mib: int
    boot: tuple[str, ...]  # the arguments that bring kernel and disks, which differ by mode
    links: tuple[Link, ...]
    plugin: Path | None = None  # TCG plugin that counts instructions


def mac(node: str, device: str) -> str:
    """A locally administered address that is the same at every boot."""
    digest = hashlib.sha256(f"{node}/{device}".encode()).digest()
    return "52:54:00:" + ":".join(f"{byte:02x}" for byte in digest[:3])


def addresses(topology: Topology, link: Link, node: str) -> tuple[str, str]:
    """IPv4 and IPv6 address of ``node`` on ``link`` with prefix length: the host part is
    the node's place in the topology, from 1 on."""
    number = topology.nodes.index(node) + 1
    return (
        f"{link.ipv4.network_address + number}/{link.ipv4.prefixlen}",
        f"{link.ipv6.network_address + number}/{link.ipv6.prefixlen}",
    )


def fast_boot(
    kernel: Path, initrd: Path, root: Path, modules: Path, extra_cmdline: str
) -> tuple[str, ...]:
    """Direct kernel boot with two shared read-only images as /dev/vda and /dev/vdb."""
    arguments = ["-kernel", str(kernel), "-initrd", str(initrd)]
    arguments += ["-append", f"{COMMON_CMDLINE} {extra_cmdline}".strip()]
    for name, image in (("root", root), ("modules", modules)):
        arguments += [
            "-drive", f"if=none,id={name},file={image},format=raw,readonly=on,cache=unsafe",
            "-device", f"virtio-blk-pci,drive={name}",
        ]  # fmt: skip
    return tuple(arguments)


def _link_arguments(node: str, link: Link) -> list[str]:
    """One end of a guest-to-guest wire over a UNIX socket: the first node of the link
    listens, the other one connects and connects again after a restart."""
    stream = f"stream,id={link.name},addr.type=unix,addr.path=link-{link.name}.sock"
    if node == link.nodes[0]:
        stream += ",server=on"
    else:
        stream += ",server=off,reconnect-ms=100"
    device = f"virtio-net-pci,netdev={link.name},mac={mac(node, link.name)},romfile="
    return ["-netdev", stream, "-device", f"{device},host_mtu={link.mtu}"]


def command(
    qemu: Sequence[str], guest: Guest, accelerator: Accelerator, ssh_host: str = "127.0.0.1"
) -> list[str]:
    """The whole command line. Paths of sockets and logs are relative to the lab's folder,
    which keeps them within what a UNIX socket's address holds (108 bytes)."""
    management = f"netdev={MANAGEMENT_NETDEV},mac={mac(guest.name, MANAGEMENT_NETDEV)}"
    accel = "tcg,thread=multi" if accelerator.name == "tcg" else "kvm"
    if guest.plugin is not None:
        # With -icount all vCPUs share one thread.
        accel = "tcg,thread=single"
    argv = [
        *qemu,
        "-name", f"guest={guest.name},debug-threads=on",
        "-nodefaults", "-no-user-config", "-display", "none",
        "-machine", f"q35,memory-backend=mem,{_ABSENT}",
        "-accel", accel,
        "-cpu", "max" if accelerator.name == "tcg" else "host",
        "-smp", str(guest.vcpus),
        "-m", str(guest.memory_mib),
        # Shared by a file descriptor, so that a device model can map it.
        "-object", f"memory-backend-memfd,id=mem,size={guest.memory_mib}M,share=on",
        "-chardev", f"file,id=console,path=console-{guest.name}.log,append=on",
        "-serial", "chardev:console",
        "-qmp", f"unix:qmp-{guest.name}.sock,server=on,wait=off",
        "-action", "panic=pause",
        "-device", "pvpanic-pci",
        "-device", "virtio-rng-pci",
        "-netdev", f"user,id={MANAGEMENT_NETDEV},hostfwd=tcp:{ssh_host}:{SSH_PORT}-:22",
        "-device", f"virtio-net-pci,{management},romfile=",
        *guest.boot,
    ]  # fmt: skip
    for link in guest.links:
        argv += _link_arguments(guest.name, link)
    if guest.plugin is not None:
        # The guest's clock counts its instructions while it runs, one a nanosecond, and is
        # the host's only while it idles: however slow the host, as many timer interrupts
        # come between the same instructions.
        argv += ["-icount", "shift=0,sleep=on"]
        argv += ["-plugin", f"{guest.plugin},socket=insn-{guest.name}.sock"]
    return argv
