# SPDX-License-Identifier: Apache-2.0
"""Kernel functions by address, from the text of a node's /proc/kallsyms."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from rdmalab.errors import RdmalabError

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
        address the global one stands (they sort first), then the shortest."""
        best: dict[int, tuple[bool, int, Function]] = {}
        for address, letter, function in functions:
            rank = (letter != "T", len(function.name), function)
            if address not in best or rank < best[address]:
                best[address] = rank
        self._addresses = sorted(best)
        self._functions = [best[address][2] for address in self._addresses]

    @classmethod
    def parse(cls, text: str, node: str = "") -> Symbols:
        """Raises RdmalabError where the node hides its addresses or gave no functions.

        ``foo.cold`` counts as foo: it is the part of foo that the compiler put aside.
        ``__pfx_foo`` is padding before foo, in which nothing runs.
        """
        found = []
        for match in _LINE.finditer(text):
            name = match[3].removesuffix(".cold")
            if not name.startswith("__pfx_"):
                found.append((int(match[1], 16), match[2], Function(name, match[4] or "")))
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
