# SPDX-License-Identifier: Apache-2.0
"""What makes one node of many that share an image: names, keys, addresses."""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import re
import struct
from dataclasses import dataclass

from rdmalab.errors import UsageError

_MAC = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}")
_NETDEV = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,14}")
_HOSTNAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,62})")


@dataclass(frozen=True)
class Nic:
    """A network interface, known by its MAC. ``addresses`` are "10.77.0.1/24" and the like;
    ``mtu`` in bytes, 0 to leave it; ``gateway`` an address, "" for none."""

    mac: str
    name: str
    addresses: tuple[str, ...] = ()
    mtu: int = 0
    gateway: str = ""


@dataclass(frozen=True)
class Identity:
    """What a node is given at its first boot and keeps unless something in it changes it.

    ``host_key`` is the text of an OpenSSH ed25519 private key without a passphrase;
    ``authorized_keys`` are the lines for root. ``hosts`` adds "ADDRESS NAME" lines to
    /etc/hosts. Raises UsageError for what would be no name, MAC or address.
    """

    hostname: str
    host_key: str
    authorized_keys: tuple[str, ...]
    nics: tuple[Nic, ...] = ()
    hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _HOSTNAME.fullmatch(self.hostname):
            raise UsageError(f"{self.hostname!r} is no host name")
        for nic in self.nics:
            if not _MAC.fullmatch(nic.mac):
                raise UsageError(f"{nic.mac!r} is no MAC", node=self.hostname)
            if not _NETDEV.fullmatch(nic.name):
                raise UsageError(f"{nic.name!r} cannot name a netdev", node=self.hostname)
            try:
                for address in nic.addresses:
                    ipaddress.ip_interface(address)
                if nic.gateway:
                    ipaddress.ip_address(nic.gateway)
            except ValueError as error:
                raise UsageError(
                    f"{nic.name} cannot be configured", node=self.hostname, seen=str(error)
                ) from error

    @property
    def machine_id(self) -> str:
        """32 hexadecimal digits, the same for the same host key."""
        return hashlib.sha256(self.host_key.encode()).hexdigest()[:32]

    def credentials(self) -> dict[str, str]:
        """systemd's credentials by name: nothing in the guest is ours to run, systemd-tmpfiles
        and systemd-networkd read them."""
        files = {
            "/etc/ssh/ssh_host_ed25519_key": ("0600", self.host_key),
            "/etc/ssh/ssh_host_ed25519_key.pub": ("0644", public_key(self.host_key) + "\n"),
            "/etc/hostname": ("0644", self.hostname + "\n"),
            "/etc/hosts": ("0644", self._hosts()),
        }
        lines = []
        for path, (mode, text) in files.items():
            encoded = base64.b64encode(text.encode()).decode()
            # "f": only where it is absent, so that a role's change survives a reboot.
            lines.append(f"f~ {path} {mode} root root - {encoded}")
        found = {
            "system.hostname": self.hostname,
            "system.machine_id": self.machine_id,
            "ssh.authorized_keys.root": "".join(f"{key}\n" for key in self.authorized_keys),
            "tmpfiles.extra": "\n".join(lines) + "\n",
        }
        for nic in self.nics:
            found[f"network.link.50-{nic.name}"] = _link(nic)
            found[f"network.network.50-{nic.name}"] = _network(nic)
        return found

    def _hosts(self) -> str:
        lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
        lines += [f"127.0.1.1 {self.hostname}", *self.hosts]
        return "\n".join(lines) + "\n"


def _link(nic: Nic) -> str:
    text = f"[Match]\nMACAddress={nic.mac}\n[Link]\nNamePolicy=\nName={nic.name}\n"
    return text + (f"MTUBytes={nic.mtu}\n" if nic.mtu else "")


def _network(nic: Nic) -> str:
    text = f"[Match]\nMACAddress={nic.mac}\n[Network]\nLinkLocalAddressing=ipv6\n"
    # Addresses are there at once: no carrier is waited for, no duplicates are looked for.
    text += "IPv6AcceptRA=no\nConfigureWithoutCarrier=yes\nIPv6DuplicateAddressDetection=0\n"
    text += "".join(f"Address={address}\n" for address in nic.addresses)
    return text + (f"Gateway={nic.gateway}\n" if nic.gateway else "")


def public_key(private_key: str) -> str:
    """The "ssh-ed25519 …" line of an OpenSSH private key, which holds it in the clear
    (openssh PROTOCOL.key). Raises UsageError for anything else."""
    body = "".join(line for line in private_key.split("\n") if line and "-----" not in line)
    try:
        data = base64.b64decode(body, validate=True)
        magic = b"openssh-key-v1\0"
        if not data.startswith(magic):
            raise ValueError("no openssh-key-v1")
        rest = data[len(magic) :]
        for _ in range(3):  # cipher, key derivation, its options
            rest = _ssh_string(rest)[1]
        blob, _ = _ssh_string(rest[4:])  # after the number of keys
        kind = _ssh_string(blob)[0].decode()
    except (ValueError, struct.error) as error:
        raise UsageError("the host key is no OpenSSH private key", seen=str(error)) from error
    return f"{kind} {base64.b64encode(blob).decode()}"


def _ssh_string(data: bytes) -> tuple[bytes, bytes]:
    (size,) = struct.unpack_from(">I", data)
    if len(data) < 4 + size:
        raise ValueError("it is cut short")
    return data[4 : 4 + size], data[4 + size :]
