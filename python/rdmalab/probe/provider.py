# SPDX-License-Identifier: Apache-2.0
"""Where the poll function of a verbs provider is.

Providers are stripped and their poll functions are static, so no symbol table names them.
But a program calls them through ``ibv_context.ops``, which verbs.h lays out for its inline
functions and which therefore never changes: open the device, read the pointer, and see in
/proc/self/maps which file it lies in.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# struct ibv_context { struct ibv_device *device; struct ibv_context_ops ops; ... }: poll_cq
# is the twelfth pointer of ops.
_POLL_CQ = 1 + 11


@dataclass(frozen=True)
class PollFunction:
    """``path`` of the provider library, ``address`` in it: relative to its load address."""

    device: str
    path: str
    address: int

    @property
    def library(self) -> str:
        """ "librxe" of librxe-rdmav34.so."""
        return Path(self.path).name.split("-")[0].split(".")[0]


def locate(maps: str, address: int) -> tuple[str, int] | None:
    """The file that ``address`` lies in and the offset from where that file is loaded, from
    the text of /proc/PID/maps; None where it is in no file."""
    bases: dict[str, int] = {}
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) < 6 or not fields[5].startswith("/"):
            continue
        low, high = (int(x, 16) for x in fields[0].split("-"))
        path = fields[5]
        # the first mapping of a shared object starts at its virtual address 0
        base = bases.setdefault(path, low - int(fields[2], 16))
        if low <= address < high:
            return path, address - base
    return None


@contextmanager
def _devices(verbs: ctypes.CDLL) -> Iterator[list[int]]:
    count = ctypes.c_int()
    verbs.ibv_get_device_list.restype = ctypes.c_void_p
    verbs.ibv_free_device_list.argtypes = [ctypes.c_void_p]
    array = verbs.ibv_get_device_list(ctypes.byref(count))
    if not array:
        yield []
        return
    try:
        pointers = ctypes.cast(array, ctypes.POINTER(ctypes.c_void_p))
        yield [pointers[i] for i in range(count.value)]
    finally:
        verbs.ibv_free_device_list(array)


def poll_functions() -> tuple[tuple[PollFunction, ...], str]:
    """One poll function a provider library in use on this node, and why there is none.

    The device of each is opened and closed again: its library stays loaded.
    """
    try:
        verbs = ctypes.CDLL("libibverbs.so.1")
    except OSError:
        return (), "libibverbs.so.1 is not installed"
    verbs.ibv_get_device_name.restype = ctypes.c_char_p
    verbs.ibv_get_device_name.argtypes = [ctypes.c_void_p]
    verbs.ibv_open_device.restype = ctypes.c_void_p
    verbs.ibv_open_device.argtypes = [ctypes.c_void_p]
    verbs.ibv_close_device.argtypes = [ctypes.c_void_p]
    found: dict[tuple[str, int], PollFunction] = {}
    missing = "no RDMA device whose provider could be asked for its poll function"
    with _devices(verbs) as devices:
        for device in devices:
            name = (verbs.ibv_get_device_name(device) or b"?").decode()
            context = verbs.ibv_open_device(device)
            if not context:
                missing = f"{name} cannot be opened"
                continue
            try:
                pointers = ctypes.cast(context, ctypes.POINTER(ctypes.c_void_p))
                address = pointers[_POLL_CQ] or 0
                place = locate(Path("/proc/self/maps").read_text(), address)
            finally:
                verbs.ibv_close_device(context)
            if place is None:
                missing = f"the poll function of {name} is in no library"
            else:
                found.setdefault(place, PollFunction(name, *place))
    return tuple(found.values()), "" if found else missing
