# SPDX-License-Identifier: Apache-2.0
"""Pointers are found in extension objects, and nothing else is taken for one.

An instance of a ctypes structure is such an object: one of its words points to its memory.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from rdmalab.rdma.native import PointerNotFoundError, ah_pointer, qp_pointer


class _Owned(ctypes.Structure):
    """ibv_pd, ibv_cq: the context first."""

    _fields_ = (("context", ctypes.c_void_p), ("rest", ctypes.c_uint64 * 8))


class _Qp(ctypes.Structure):
    _fields_ = (
        ("context", ctypes.c_void_p),
        ("qp_context", ctypes.c_void_p),
        ("pd", ctypes.c_void_p),
        ("send_cq", ctypes.c_void_p),
        ("recv_cq", ctypes.c_void_p),
        ("srq", ctypes.c_void_p),
        ("handle", ctypes.c_uint32),
        ("qp_num", ctypes.c_uint32),
        ("qp_state", ctypes.c_uint32),
        ("qp_type", ctypes.c_uint32),
        ("rest", ctypes.c_uint64 * 16),
    )


class _Ah(ctypes.Structure):
    _fields_ = (
        ("context", ctypes.c_void_p),
        ("pd", ctypes.c_void_p),
        ("handle", ctypes.c_uint32),
        ("rest", ctypes.c_uint64 * 8),
    )


@pytest.fixture
def parts() -> tuple[Any, Any, Any]:
    context, pd, cq = _Owned(), _Owned(), _Owned()
    pd.context = cq.context = ctypes.addressof(context)
    return context, pd, cq


def _qp(parts: tuple[Any, Any, Any], **changes: int) -> Any:
    context, pd, cq = parts
    qp = _Qp(
        context=ctypes.addressof(context),
        pd=ctypes.addressof(pd),
        send_cq=ctypes.addressof(cq),
        recv_cq=ctypes.addressof(cq),
        qp_num=17,
        qp_state=3,
        qp_type=2,
    )
    for name, value in changes.items():
        setattr(qp, name, value)
    return qp


def test_the_pointer_is_found(parts: tuple[Any, Any, Any]) -> None:
    qp = _qp(parts)
    assert qp_pointer(qp) == ctypes.addressof(qp)
    assert qp_pointer(qp, context=parts[0], pd=parts[1]) == ctypes.addressof(qp)


@pytest.mark.parametrize("field", ["context", "pd", "send_cq", "recv_cq"])
@pytest.mark.parametrize("address", [0, 0x10, 0x7F0000001000, 0xFFFF800000000000])
def test_a_structure_whose_parts_are_not_there_is_refused(
    parts: tuple[Any, Any, Any], field: str, address: int
) -> None:
    qp = _qp(parts, **{field: address})
    with pytest.raises(PointerNotFoundError, match="QP 17 in pyverbs' _Qp: 0 of its words fit"):
        qp_pointer(qp)


@pytest.mark.parametrize("attribute", ["qp_num", "qp_type", "qp_state"])
def test_a_structure_that_says_otherwise_is_refused(
    parts: tuple[Any, Any, Any], attribute: str
) -> None:
    class Lying(_Qp):
        pass

    context, pd, cq = parts
    qp = Lying(
        context=ctypes.addressof(context),
        pd=ctypes.addressof(pd),
        send_cq=ctypes.addressof(cq),
        recv_cq=ctypes.addressof(cq),
        qp_num=17,
        qp_state=3,
        qp_type=2,
    )
    setattr(Lying, attribute, property(lambda self: 9))
    with pytest.raises(PointerNotFoundError):
        qp_pointer(qp)


def test_another_context_or_pd_is_refused(parts: tuple[Any, Any, Any]) -> None:
    qp = _qp(parts)
    with pytest.raises(PointerNotFoundError):
        qp_pointer(qp, context=_Owned())
    with pytest.raises(PointerNotFoundError):
        qp_pointer(qp, pd=_Owned())


def test_an_address_handle_is_found(parts: tuple[Any, Any, Any]) -> None:
    context, pd, _ = parts
    ah = _Ah(context=ctypes.addressof(context), pd=ctypes.addressof(pd))
    assert ah_pointer(ah, context=context, pd=pd) == ctypes.addressof(ah)
    with pytest.raises(PointerNotFoundError):
        ah_pointer(ah, context=context, pd=_Owned())
