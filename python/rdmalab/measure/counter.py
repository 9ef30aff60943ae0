# SPDX-License-Identifier: Apache-2.0
"""The client of QEMU's instruction counter (lab/plugin/instructions.c tells the protocol)."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rdmalab.errors import NodeLost, RdmalabError, UsageError

VERSION = "2"
#: marks that the timed loops set (measure/node/native/count_mark.h)
BEGIN, END = 1, 2
_SECONDS = 60.0


@dataclass(frozen=True)
class Mark:
    """A copy of all counters. ``guest`` is the number in the guest's marker, None for a mark
    of ours; ``ns`` is the host's monotonic clock; instructions since QEMU's start."""

    number: int
    guest: int | None
    ns: int
    kernel: int
    user: int


@dataclass(frozen=True)
class Delta:
    """Instructions between two marks: of user space (all processes), and of the kernel by the
    address where the translated block began. ``entries`` is how often a block was entered,
    where that is known. ``ns``: the time between the marks."""

    user: int
    kernel: Mapping[int, int]
    ns: int
    entries: Mapping[int, int] = field(default_factory=dict)


class Counter:
    """One node's counter; a connection a request, so that nothing is held between them."""

    def __init__(self, node: str, path: Path) -> None:
        self.node = node
        self.path = path

    def hello(self) -> int:
        """The number of vCPUs counted. Raises UsageError where no counter is loaded."""
        if not self.path.is_socket():
            raise UsageError(
                "its QEMU does not count instructions",
                node=self.node,
                seen=f"no {self.path}",
                todo="boot the lab with `rdmalab up --instructions`",
            )
        words = self._ask("hello")[-1].split()
        if words[1:3] != ["instructions", VERSION]:
            raise RdmalabError(
                "its instruction counter is of another version",
                node=self.node,
                seen=" ".join(words),
                todo="take the lab down and up again",
            )
        return int(words[words.index("vcpus") + 1])

    def mark(self) -> int:
        """Take a mark now; its number."""
        return int(self._ask("mark")[-1].split()[1])

    def marks(self) -> list[Mark]:
        found = []
        for line in self._ask("marks")[:-1]:
            _, number, origin, *rest = line.split()
            values = dict(zip(rest[::2], rest[1::2], strict=True))
            found.append(
                Mark(
                    number=int(number),
                    guest=None if origin == "host" else int(origin.removeprefix("guest:")),
                    ns=int(values["ns"]),
                    kernel=int(values["kernel"]),
                    user=int(values["user"]),
                )
            )
        return found

    def delta(self, begin: Mark, end: Mark) -> Delta:
        user, kernel, entries = 0, {}, {}
        for line in self._ask(f"delta {begin.number} {end.number}")[:-1]:
            kind, *words = line.split()
            if kind == "user":
                user = int(words[0])
                continue
            address, executed, size = int(words[0], 16), int(words[1]), int(words[2])
            kernel[address] = executed
            if size:
                entries[address] = executed // size
        return Delta(user, kernel, end.ns - begin.ns, entries)

    def reset(self) -> None:
        """Forget the marks."""
        self._ask("reset")

    def _ask(self, request: str) -> list[str]:
        """The lines of the answer, of which the last begins with "ok"."""
        lines = []
        try:
            with self._connect() as client, client.makefile("r") as answer:
                client.sendall(request.encode() + b"\n")
                while line := answer.readline():
                    lines.append(line.rstrip("\n"))
                    if line.startswith("error"):
                        raise RdmalabError(
                            f"the instruction counter refused {request}",
                            node=self.node,
                            seen=lines[-1].removeprefix("error "),
                        )
                    if line.startswith("ok"):
                        return lines
        except OSError as error:
            raise NodeLost(
                "its instruction counter does not answer",
                node=self.node,
                seen=str(error),
                todo="see the node's console",
            ) from error
        raise NodeLost("its QEMU ended while it was asked for its counters", node=self.node)

    def _connect(self) -> socket.socket:
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(_SECONDS)
        # By way of a descriptor of the folder: its path may be longer than an address.
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            client.connect(f"/proc/self/fd/{folder}/{self.path.name}")
        except BaseException:
            client.close()
            raise
        finally:
            os.close(folder)
        return client
