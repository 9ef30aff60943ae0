# SPDX-License-Identifier: Apache-2.0
"""What a peer says of its end is checked before anything is made of it."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmalab.errors import RdmalabError
from rdmalab.rdma import cm
from rdmalab.rdma.endpoint import EndpointAddress, QpAddress
from rdmalab.rdma.exchange import ExchangeError
from rdmalab.rdma.model import gid_text
from rdmalab.rdma.profile import MTUS

_ADDRESSES = st.builds(
    EndpointAddress,
    service=st.sampled_from(["RC", "UC", "UD"]),
    gid=st.binary(min_size=16, max_size=16).map(gid_text),
    mtu=st.sampled_from(MTUS),
    buffer=st.integers(0, 2**64 - 1),
    length=st.integers(0, 2**63 - 1),
    rkey=st.integers(0, 2**32 - 1),
    qps=st.lists(
        st.builds(
            QpAddress, st.integers(0, 2**24 - 1), st.integers(0, 2**24 - 1), st.integers(0, 2**31)
        ),
        max_size=3,
    ).map(tuple),
)

_GOOD = EndpointAddress(
    "RC", gid_text("::ffff:10.77.0.2"), 4096, 1 << 46, 8192, 77, (QpAddress(17, 5, 0),)
)


@given(_ADDRESSES)
def test_a_description_goes_over_the_exchange_and_comes_back(address: EndpointAddress) -> None:
    assert EndpointAddress.from_json(json.loads(json.dumps(address.to_json()))) == address


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "hello"},
        {"service": "XRC"},
        {"service": ["RC"]},
        {"gid": "10.77.0.2"},
        {"gid": 5},
        {"gid": None},
        {"mtu": 1500},
        {"mtu": 1024.0},
        {"buffer": -1},
        {"buffer": 1 << 64},
        {"rkey": 1 << 32},
        {"rkey": "77"},
        {"length": True},
        {"qps": [[1, 2]]},
        {"qps": [[1 << 24, 0, 0]]},
        {"qps": [[1, 1 << 24, 0]]},
        {"qps": ["abc"]},
        {"qps": 3},
    ],
)
def test_a_bad_description_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ExchangeError, match="the peer described no endpoint: "):
        EndpointAddress.from_json({**_GOOD.to_json(), **changes})


@pytest.mark.parametrize("key", list(_GOOD.to_json()))
def test_a_description_without_a_key_is_refused(key: str) -> None:
    data = _GOOD.to_json()
    del data[key]
    with pytest.raises(ExchangeError, match=f"KeyError: '{key}'"):
        EndpointAddress.from_json(data)


@given(st.dictionaries(st.sampled_from(list(_GOOD.to_json())), st.none() | st.text() | st.floats()))
def test_any_values_are_a_description_or_an_error(changes: dict[str, Any]) -> None:
    with contextlib.suppress(ExchangeError):
        EndpointAddress.from_json({**_GOOD.to_json(), **changes})


def test_private_data_of_rdma_cm_fits_and_comes_back() -> None:
    data = cm.pack(_GOOD)
    assert len(data) <= 56  # what a connect request over RDMA_PS_TCP holds
    # rdma_cm hands it over padded with zeros.
    assert cm.unpack(data + bytes(140)) == _GOOD


@given(st.binary(max_size=80))
def test_any_private_data_is_a_description_or_an_error(data: bytes) -> None:
    with contextlib.suppress(RdmalabError):
        cm.unpack(data)
    with contextlib.suppress(RdmalabError):
        cm.unpack(cm.pack(_GOOD)[:4] + data)


def test_private_data_of_another_version_names_both() -> None:
    data = bytearray(cm.pack(_GOOD))
    data[2:4] = 3, 1
    with pytest.raises(RdmalabError, match=r"speaks version 3\.1 of the exchange, we speak 1\.0"):
        cm.unpack(bytes(data))
