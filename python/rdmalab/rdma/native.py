# SPDX-License-Identifier: Apache-2.0
"""The C pointers behind pyverbs' objects, for loops that are written in C.

pyverbs keeps ``struct ibv_qp *`` in a field of its extension type that Python cannot see,
and ships no ``.pxd``. So the words of the object are looked through for a pointer to
something that agrees with everything pyverbs says of the queue pair. Candidates are read
through ``/proc/self/mem``, where an address that is not mapped is an error and not a crash.

The offsets are those of ``struct ibv_qp`` and ``struct ibv_ah`` in ``<infiniband/verbs.h>``,
which are part of libibverbs' ABI (soname 1).
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Iterable
from typing import Any

from rdmalab.errors import RdmalabError

# context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num, state, qp_type
_QP = struct.Struct("@6QIIII")
# context, pd, handle
_AH = struct.Struct("@2QI")
# the first field of struct ibv_pd and of struct ibv_cq: context
_OWNER = struct.Struct("@Q")

_WORD = ctypes.sizeof(ctypes.c_void_p)
_HEAD = object.__basicsize__
_USER_SPACE = range(1 << 16, 1 << 47)


class PointerNotFoundError(RdmalabError):
    """None or several of the words in a pyverbs object fit."""


def qp_pointer(qp: Any, *, context: Any = None, pd: Any = None) -> int:
    """The ``struct ibv_qp *`` of a ``pyverbs.qp.QP`` as an integer; valid until ``qp.close()``.

    ``context`` and ``pd`` are the pyverbs objects the queue pair was made on; with them, the
    structure's context and pd have to be theirs as well. Raises ``PointerNotFoundError`` when no
    word, or more than one, fits: a new layout of pyverbs or libibverbs.
    """
    number, kind, state = qp.qp_num, int(qp.qp_type), int(qp.qp_state)
    contexts = None if context is None else frozenset(_words(context))
    pds = None if pd is None else frozenset(_words(pd))

    def fits(memory: int, address: int) -> bool:
        fields = _peek(memory, address, _QP)
        if fields is None:
            return False
        its_context, _, its_pd, send_cq, recv_cq, _, _, its_number, its_state, its_kind = fields
        return (
            (its_number, its_state, its_kind) == (number, state, kind)
            and (contexts is None or its_context in contexts)
            and (pds is None or its_pd in pds)
            and all(
                _peek(memory, owned, _OWNER) == (its_context,)
                for owned in (its_pd, send_cq, recv_cq)
            )
        )

    return _only(qp, fits, f"QP {number}")


def ah_pointer(ah: Any, *, context: Any, pd: Any) -> int:
    """The ``struct ibv_ah *`` of a ``pyverbs.addr.AH`` made on ``pd``, as ``qp_pointer``."""
    contexts, pds = frozenset(_words(context)), frozenset(_words(pd))

    def fits(memory: int, address: int) -> bool:
        fields = _peek(memory, address, _AH)
        return fields is not None and fields[0] in contexts and fields[1] in pds

    return _only(ah, fits, "address handle")


def _only(holder: Any, fits: Callable[[int, int], bool], what: str) -> int:
    memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        # A set: QPEx keeps one address twice, as ibv_qp and as ibv_qp_ex.
        found = {word for word in _words(holder) if fits(memory, word)}
    finally:
        os.close(memory)
    if len(found) != 1:
        raise PointerNotFoundError(
            f"cannot find the C structure of {what} in pyverbs' {type(holder).__name__}",
            seen=f"{len(found)} of its words fit",
            todo="check the layout against <infiniband/verbs.h> of this libibverbs",
        )
    return found.pop()


def _words(holder: Any) -> Iterable[int]:
    """The words of an extension object that may be pointers into this process."""
    size = type(holder).__basicsize__
    raw = ctypes.string_at(id(holder) + _HEAD, size - _HEAD)
    words = struct.unpack(f"@{len(raw) // _WORD}Q", raw)
    return [word for word in words if word in _USER_SPACE and word % _WORD == 0]


def _peek(memory: int, address: int, layout: struct.Struct) -> tuple[int, ...] | None:
    if address not in _USER_SPACE:
        return None
    try:
        raw = os.pread(memory, layout.size, address)
    except OSError:  # EIO: not mapped
        return None
    return layout.unpack(raw) if len(raw) == layout.size else None
