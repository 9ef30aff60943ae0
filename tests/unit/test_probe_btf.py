# SPDX-License-Identifier: Apache-2.0
"""The reader of type information, against type information that is put together here."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmalab.probe.btf import BtfError, parse_module

INT, PTR, ARRAY, STRUCT, ENUM, FUNC, FUNC_PROTO, VAR, DATASEC, ENUM64 = (
    1, 2, 3, 4, 6, 12, 13, 14, 15, 19,
)  # fmt: skip


class Btf:
    """Type information as the kernel lays it out; ``base`` is that which it is split from."""

    def __init__(self, base: Btf | None = None, header: int = 24) -> None:
        self.base = base
        self.header = header
        self.types = b""
        self.strings = b"" if base else b"\0"

    def name(self, text: str) -> int:
        if not text:
            return 0
        if self.base is not None and (at := self.base.strings.find(f"\0{text}\0".encode())) >= 0:
            return at + 1
        at = len(self.strings) + (len(self.base.strings) if self.base else 0)
        self.strings += text.encode() + b"\0"
        return at

    def add(self, kind: int, name: str, size: int, vlen: int = 0, more: bytes = b"") -> None:
        self.types += struct.pack("<III", self.name(name), kind << 24 | vlen, size) + more

    def structure(self, name: str, size: int, members: dict[str, int], bits: bool = False) -> None:
        """``members`` by offset in bits."""
        packed = b"".join(
            struct.pack("<III", self.name(member), 1, offset) for member, offset in members.items()
        )
        kind = STRUCT | (0x80 if bits else 0)
        self.add(kind, name, size, len(members), packed)

    def data(self) -> bytes:
        head = struct.pack(
            "<HBBIIIII",
            0xEB9F, 1, 0, self.header,
            0, len(self.types), len(self.types), len(self.strings),
        )  # fmt: skip
        return head.ljust(self.header, b"\0") + self.types + self.strings


@pytest.fixture(params=[24, 32], ids=["header of 24", "header of 32"])
def module(request: pytest.FixtureRequest) -> tuple[Btf, Btf]:
    base = Btf()
    base.name("sq")
    base.name("int")
    own = Btf(base, request.param)
    own.add(INT, "int", 4, more=b"\0" * 4)
    own.add(ARRAY, "", 0, more=b"\0" * 12)
    own.add(FUNC_PROTO, "", 1, 2, b"\0" * 16)
    own.add(FUNC, "rxe_rcv", 3)
    own.add(ENUM, "state", 4, 3, b"\0" * 24)
    own.structure("rxe_qp", 1024, {"ibqp": 0, "sq": 512 * 8})
    own.add(VAR, "x", 1, more=b"\0" * 4)
    own.add(DATASEC, ".data", 8, 1, b"\0" * 12)
    own.add(ENUM64, "big", 8, 1, b"\0" * 12)
    own.structure("rxe_sq", 32, {"max_wr": 0, "queue": 24 * 8})
    own.add(FUNC, "rxe_post_send", 3)
    return own, base


WANTED = frozenset({"rxe_qp", "rxe_sq"})


def test_members_and_functions(module: tuple[Btf, Btf]) -> None:
    types = parse_module(module[0].data(), module[1].data(), WANTED)
    assert types.offset("rxe_qp.sq") == 512, "a name among the kernel's strings"
    assert types.offset("rxe_sq.queue") == 24, "a name among the module's own"
    assert types.structures["rxe_sq"].size == 32
    assert types.functions == {"rxe_rcv", "rxe_post_send"}


def test_structure_that_was_not_asked_for_is_not_there(module: tuple[Btf, Btf]) -> None:
    types = parse_module(module[0].data(), module[1].data(), frozenset({"rxe_sq"}))
    with pytest.raises(KeyError):
        types.offset("rxe_qp.sq")


def test_bit_fields_do_not_shift_the_offsets_of_their_structure() -> None:
    base = Btf()
    split = Btf(base)
    split.structure("rxe_qp", 16, {"flag": 3 << 24 | 0, "odd": 2 << 24 | 3, "sq": 64}, bits=True)
    found = parse_module(split.data(), base.data(), WANTED).structures["rxe_qp"]
    assert found.offsets == {"flag": 0, "sq": 8}


def test_unknown_kind_is_refused(module: tuple[Btf, Btf]) -> None:
    own, base = module
    own.add(25, "new", 0)
    with pytest.raises(BtfError, match="kind 25"):
        parse_module(own.data(), base.data(), WANTED)


@settings(deadline=None)  # a busy machine is no failure
@given(st.data())
def test_any_damage_ends_in_an_error_or_an_answer(data: st.DataObject) -> None:
    base = Btf()
    base.name("sq")
    own = Btf(base)
    own.structure("rxe_qp", 1024, {"ibqp": 0, "sq": 512 * 8})
    own.add(FUNC, "rxe_rcv", 3)
    damaged = bytearray(own.data())
    if data.draw(st.booleans()):
        del damaged[data.draw(st.integers(0, len(damaged) - 1)) :]
    for _ in range(data.draw(st.integers(0, 4))):
        if damaged:
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    # Any other exception fails the test.
    with contextlib.suppress(BtfError):
        parse_module(bytes(damaged), base.data(), WANTED)
