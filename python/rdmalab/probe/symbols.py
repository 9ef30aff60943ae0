# SPDX-License-Identifier: Apache-2.0
"""The functions of one kernel module, from the text of /proc/kallsyms."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_LINE = re.compile(rb"^([0-9a-f]+) [tT] (\S+)\t\[", re.MULTILINE)


@dataclass(frozen=True)
class Found:
    """The function chosen among the candidates, or in ``missing`` why there is none."""

    name: str = ""
    address: int = 0
    missing: str = ""


@dataclass(frozen=True)
class ModuleSymbols:
    """``functions``: address by name; the address is 0 where the kernel hides it.
    ``ambiguous``: static functions of one name in several files, which a probe by name
    cannot tell apart."""

    module: str
    functions: dict[str, int]
    ambiguous: frozenset[str] = frozenset()

    def find(self, candidates: Sequence[str]) -> Found:
        """The first of ``candidates`` that the module has.

        A copy that the compiler made with other arguments (``name.isra.0``,
        ``name.constprop.0``) is not taken: its arguments are not those of the source.
        """
        if not self.functions:
            return Found(missing=f"module {self.module} is not loaded")
        for name in candidates:
            if name in self.ambiguous:
                return Found(missing=f"{self.module} has several functions named {name}")
            if name in self.functions:
                return Found(name, self.functions[name])
        for name in candidates:
            changed = [f for f in self.functions if re.match(re.escape(name) + r"\.(?!cold)", f)]
            if changed:
                return Found(
                    missing=f"{self.module} has only {changed[0]}, whose arguments the compiler"
                    " changed"
                )
        return Found(missing=f"{self.module} has no {' or '.join(candidates)}")


def parse(kallsyms: bytes, module: str) -> ModuleSymbols:
    """``kallsyms`` is the whole text: some 10 MB, so it is cut to the module's lines, which
    stand together, before anything is matched."""
    tag = b"\t[" + module.encode() + b"]\n"
    first = kallsyms.find(tag)
    if first < 0:
        return ModuleSymbols(module, {})
    start = kallsyms.rfind(b"\n", 0, first) + 1
    end = kallsyms.rfind(tag) + len(tag)
    functions: dict[str, int] = {}
    ambiguous: set[str] = set()
    for line in kallsyms[start:end].splitlines(keepends=True):
        match = _LINE.match(line)
        if match and line.endswith(tag):
            name = match[2].decode()
            if name in functions:
                ambiguous.add(name)
            functions[name] = int(match[1], 16)
    return ModuleSymbols(module, functions, frozenset(ambiguous))
