# SPDX-License-Identifier: Apache-2.0
"""Kernel functions by address, from the text of a node's /proc/kallsyms."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from rdmalab.errors import RdmalabError

_COLD = ".cold"
_LINE = re.compile(r"([0-9a-f]+) ([tTwW]) (\S+)(?:\s+\[(\S+)\])?")


@dataclass(frozen=True, order=True)
class Function:
    """``module`` is empty for the kernel's own image."""

    name: str
    module: str = ""


UNKNOWN = Function("(no symbol)")


class Symbols:
    """Functions in order of address. A function reaches to where the next one begins."""

    def __init__(self, functions: Iterable[tuple[int, str, Function]]) -> None:
        """``functions``: (address, the type letter of nm, function). Of several names of one
        address the global one stands, then the shortest. ``foo.cold`` is foo: the part of it
        that the compiler put aside."""
        best: dict[int, tuple[bool, int, Function]] = {}
        self._entries: dict[int, Function] = {}
        for address, letter, function in functions:
            if function.name.endswith(_COLD):
                function = Function(function.name.removesuffix(_COLD), function.module)
            else:
                self._entries[address] = function
            rank = (letter != "T", len(function.name), function)
            if address not in best or rank < best[address]:
                best[address] = rank
        self._addresses = sorted(best)
        self._functions = [best[address][2] for address in self._addresses]
        for address in self._entries:
            self._entries[address] = best[address][2]

    @classmethod
    def parse(cls, text: str, node: str = "") -> Symbols:
        """Raises RdmalabError where the node hides its addresses or gave no functions.

        ``__pfx_foo`` is padding before foo, in which nothing runs.
        """
        found = []
        for match in _LINE.finditer(text):
            if not match[3].startswith("__pfx_"):
                function = Function(match[3], match[4] or "")
                found.append((int(match[1], 16), match[2], function))
        if not found:
            raise RdmalabError("/proc/kallsyms names no functions", node=node)
        if not any(address for address, _, _ in found):
            raise RdmalabError(
                "/proc/kallsyms hides its addresses",
                node=node,
                todo="write 0 to /proc/sys/kernel/kptr_restrict and read it as root",
            )
        return cls(found)

    def __len__(self) -> int:
        return len(self._addresses)

    def find(self, address: int) -> Function:
        """The function that ``address`` lies in; UNKNOWN below the first one."""
        index = bisect_right(self._addresses, address) - 1
        return self._functions[index] if index >= 0 else UNKNOWN

    def entered(self, address: int) -> Function | None:
        """The function that begins at ``address``, None where none does."""
        return self._entries.get(address)
