# SPDX-License-Identifier: Apache-2.0
"""Reads the type information (BTF) of one kernel module.

The module's private structures are in no header package; their offsets in the kernel that
runs are in /sys/kernel/btf/MODULE. Only what the probes ask for is read: the members of a
named structure, and which functions exist. Layout: Documentation/bpf/btf.rst and
include/uapi/linux/btf.h of Linux.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from rdmalab.errors import RdmalabError

_MAGIC = 0xEB9F
_HEADER = struct.Struct("<HBBIIIII")
_TYPE = struct.Struct("<III")
_MEMBER = struct.Struct("<III")

_STRUCT = 4
_UNION = 5
_FUNC = 12
# Bytes behind the type itself: a fixed part, and a part for each of its members.
_TRAILING = {
    0: (0, 0),
    1: (4, 0),  # int
    2: (0, 0),  # pointer
    3: (12, 0),  # array
    _STRUCT: (0, 12),
    _UNION: (0, 12),
    6: (0, 8),  # enum
    7: (0, 0),  # forward
    8: (0, 0),  # typedef
    9: (0, 0),  # volatile
    10: (0, 0),  # const
    11: (0, 0),  # restrict
    _FUNC: (0, 0),
    13: (0, 8),  # function prototype
    14: (4, 0),  # variable
    15: (0, 12),  # data section
    16: (0, 0),  # float
    17: (4, 0),  # declaration tag
    18: (0, 0),  # type tag
    19: (0, 12),  # 64-bit enum
}


class BtfError(RdmalabError):
    """The type information is damaged or of a kind that this reader does not know."""


@dataclass(frozen=True)
class _Section:
    types: bytes
    strings: bytes


@dataclass(frozen=True)
class Structure:
    """``size`` in bytes, ``offsets`` of its members in bytes by name (no bit fields)."""

    size: int
    offsets: dict[str, int]


@dataclass(frozen=True)
class ModuleTypes:
    """The structures and the functions that a module defines."""

    structures: dict[str, Structure]
    functions: frozenset[str]

    def offset(self, path: str) -> int:
        """Offset in bytes of ``"structure.member"``; KeyError where either is not there."""
        structure, member = path.split(".")
        return self.structures[structure].offsets[member]


def _sections(data: bytes, what: str) -> _Section:
    if len(data) < _HEADER.size:
        raise BtfError(f"{what}: type information cut short", seen=f"{len(data)} bytes")
    magic, _, _, length, type_off, type_len, str_off, str_len = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise BtfError(f"{what}: no type information", seen=f"magic {magic:#x}")
    if length + max(type_off + type_len, str_off + str_len) > len(data):
        raise BtfError(f"{what}: type information cut short", seen=f"{len(data)} bytes")
    return _Section(
        data[length + type_off : length + type_off + type_len],
        data[length + str_off : length + str_off + str_len],
    )


def _walk(types: bytes, what: str) -> Iterator[tuple[int, int, int, int, int]]:
    """Each type as ``(name offset, kind, number of members, flag + size, position of what
    follows)``."""
    at = 0
    while at + _TYPE.size <= len(types):
        name, info, size = _TYPE.unpack_from(types, at)
        kind, members = info >> 24 & 0x7F, info & 0xFFFFFF
        at += _TYPE.size
        if kind not in _TRAILING:
            raise BtfError(f"{what}: type information of an unknown kind", seen=f"kind {kind}")
        fixed, each = _TRAILING[kind]
        end = at + fixed + each * members
        if end > len(types):
            raise BtfError(f"{what}: type information cut short", seen=f"kind {kind}")
        yield name, kind, members, (info >> 31) << 32 | size, at
        at = end


def parse_module(module: bytes, base: bytes, wanted: frozenset[str]) -> ModuleTypes:
    """The structures named in ``wanted`` and all functions of a module.

    ``module`` and ``base`` are the contents of /sys/kernel/btf/MODULE and
    /sys/kernel/btf/vmlinux: a module's names may lie in the kernel's strings.
    """
    own = _sections(module, "module")
    kernel = _sections(base, "kernel")

    def name(offset: int) -> str:
        strings = kernel.strings
        if offset >= len(strings):
            offset -= len(strings)
            strings = own.strings
        end = strings.find(b"\0", offset)
        if end < 0 or offset >= len(strings):
            raise BtfError("module: a name outside of its type information")
        try:
            return strings[offset:end].decode("ascii")
        except UnicodeDecodeError:
            raise BtfError("module: a name that is no text") from None

    structures: dict[str, Structure] = {}
    functions: set[str] = set()
    for name_at, kind, members, flagged, at in _walk(own.types, "module"):
        if kind == _FUNC:
            functions.add(name(name_at))
        elif kind == _STRUCT and name_at:
            title = name(name_at)
            if title not in wanted:
                continue
            offsets: dict[str, int] = {}
            for i in range(members):
                member, _, where = _MEMBER.unpack_from(own.types, at + i * _MEMBER.size)
                if flagged >> 32:
                    where &= 0xFFFFFF  # the upper bits are the width of a bit field
                if member and where % 8 == 0:
                    offsets[name(member)] = where // 8
            structures[title] = Structure(flagged & 0xFFFFFFFF, offsets)
    return ModuleTypes(structures, frozenset(functions))
