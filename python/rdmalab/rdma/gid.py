# SPDX-License-Identifier: Apache-2.0
"""Choosing a GID: by type and address, never by a fixed index.

The index of a GID depends on the order in which addresses were added to the netdev, so it
differs from one node to the next and from one boot to the next.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from rdmalab.errors import RdmalabError
from rdmalab.rdma.model import Gid, IpAddress

FAMILIES = ("any", "ipv4", "ipv6")


class GidError(RdmalabError):
    """No GID is what was asked for; the line names index, type and address."""


@dataclass(frozen=True)
class GidRule:
    """What a GID has to be: ``type`` as the kernel spells it, ``family`` ``"ipv4"``,
    ``"ipv6"`` or ``"any"``, and the exact ``address`` when there is one."""

    type: str
    family: str = "any"
    address: IpAddress | None = None

    def __str__(self) -> str:
        of = (
            str(self.address)
            if self.address
            else {"any": "any address"}.get(self.family, f"an {self.family} address")
        )
        return f"{self.type} GID of {of}"


def resolve(table: Sequence[Gid], rule: GidRule, *, where: str) -> Gid:
    """The one GID of a port's table that ``rule`` describes.

    Without an address in the rule, link-local addresses come last, since they do not reach
    past the link and every netdev has one. ``where`` names the device and port in errors.
    Raises ``GidError`` naming what is there instead.
    """
    of_address = [gid for gid in table if _fits_address(gid, rule)]
    fitting = [gid for gid in of_address if gid.type == rule.type]
    if fitting:
        return min(fitting, key=lambda gid: (gid.address.is_link_local, gid.index))
    if of_address:
        wrong = of_address[0]
        raise GidError(
            f"{where} has no {rule}",
            seen=f"GID {wrong.index} of {wrong.address} is of type {wrong.type}",
        )
    there = ", ".join(f"{gid.index}: {gid.type} {gid.address}" for gid in table)
    raise GidError(
        f"{where} has no {rule}",
        seen=there or "an empty GID table",
        todo="give the netdev that address, or name another",
    )


def check(table: Sequence[Gid], index: int, rule: GidRule, *, where: str) -> Gid:
    """The GID at ``index``, if ``rule`` allows it; ``GidError`` naming index, type and
    address if not."""
    for gid in table:
        if gid.index == index:
            if gid.type != rule.type or not _fits_address(gid, rule):
                raise GidError(
                    f"GID {index} of {where} is refused",
                    seen=f"it is {gid.type} of {gid.address}, not a {rule}",
                )
            return gid
    raise GidError(f"GID {index} of {where} is refused", seen="that entry is empty")


def _fits_address(gid: Gid, rule: GidRule) -> bool:
    if rule.address is not None:
        return gid.address == rule.address
    family = "ipv4" if isinstance(gid.address, ipaddress.IPv4Address) else "ipv6"
    return rule.family in ("any", family)
