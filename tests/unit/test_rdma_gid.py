# SPDX-License-Identifier: Apache-2.0
"""A GID is found by type and address wherever it stands in the table."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmalab.rdma.gid import GidError, GidRule, check, resolve
from rdmalab.rdma.model import IB_OR_ROCE_V1, ROCE_V2, Gid, gid_address, gid_text

_ADDRESSES = ("fe80::1", "10.77.0.1", "fd77::1", "10.77.0.9")


def _gid(index: int, address: str, kind: str) -> Gid:
    text = f"::ffff:{address}" if "." in address else address
    return Gid(index, gid_text(text), kind, "roce0")


# As a real NIC has it: every address once as v1 and once as v2.
_TABLE = tuple(
    _gid(2 * n + (kind == ROCE_V2), address, kind)
    for n, address in enumerate(_ADDRESSES)
    for kind in (IB_OR_ROCE_V1, ROCE_V2)
)


@given(st.permutations(_ADDRESSES), st.sampled_from(_ADDRESSES), st.integers(0, 200))
def test_order_of_the_table_does_not_matter(order: list[str], address: str, first: int) -> None:
    table = [
        _gid(first + 2 * n + (kind == ROCE_V2), one, kind)
        for n, one in enumerate(order)
        for kind in (IB_OR_ROCE_V1, ROCE_V2)
    ]
    rule = GidRule(ROCE_V2, address=ipaddress.ip_address(address))
    got = resolve(table, rule, where="dev port 1")
    assert (str(got.address), got.type) == (address, ROCE_V2)
    assert got.index == first + 2 * order.index(address) + 1


@pytest.mark.parametrize(
    ("family", "address"), [("any", "10.77.0.1"), ("ipv4", "10.77.0.1"), ("ipv6", "fd77::1")]
)
def test_without_an_address_the_family_decides_and_link_local_is_last(
    family: str, address: str
) -> None:
    assert str(resolve(_TABLE, GidRule(ROCE_V2, family), where="x").address) == address


def test_only_link_local_is_better_than_none() -> None:
    table = [_gid(0, "fe80::1", ROCE_V2)]
    assert resolve(table, GidRule(ROCE_V2, "ipv6"), where="x").index == 0


def test_wrong_type_names_index_type_and_address() -> None:
    table = [gid for gid in _TABLE if gid.type == IB_OR_ROCE_V1]
    rule = GidRule(ROCE_V2, address=ipaddress.ip_address("10.77.0.1"))
    with pytest.raises(GidError) as caught:
        resolve(table, rule, where="mlx5_0 port 1")
    assert str(caught.value) == (
        "mlx5_0 port 1 has no RoCE v2 GID of 10.77.0.1: GID 2 of 10.77.0.1 is of type IB/RoCE v1"
    )


def test_missing_address_lists_those_there_are() -> None:
    rule = GidRule(ROCE_V2, address=ipaddress.ip_address("10.0.0.1"))
    with pytest.raises(GidError, match=r"no RoCE v2 GID of 10\.0\.0\.1: 0: .*5: RoCE v2 fd77::1"):
        resolve(_TABLE, rule, where="x")
    with pytest.raises(GidError, match="empty GID table"):
        resolve((), rule, where="x")


def test_an_index_is_held_to_the_rule() -> None:
    rule = GidRule(ROCE_V2, address=ipaddress.ip_address("10.77.0.1"))
    assert check(_TABLE, 3, rule, where="x").index == 3
    with pytest.raises(
        GidError, match=r"GID 2 of x is refused: it is IB/RoCE v1 of 10\.77\.0\.1, not a RoCE v2"
    ):
        check(_TABLE, 2, rule, where="x")
    with pytest.raises(GidError, match=r"GID 1 of x is refused: it is RoCE v2 of fe80::1"):
        check(_TABLE, 1, rule, where="x")
    with pytest.raises(GidError, match="GID 99 of x is refused: that entry is empty"):
        check(_TABLE, 99, rule, where="x")


@given(st.ip_addresses())
def test_gid_text_is_the_kernels_and_goes_back(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    text = gid_text(f"::ffff:{address}" if address.version == 4 else str(address))
    assert len(text) == 39
    assert text.replace(":", "").isalnum()
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    assert gid_address(text) == (mapped or address)
