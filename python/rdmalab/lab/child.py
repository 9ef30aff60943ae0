# SPDX-License-Identifier: Apache-2.0
"""Child processes that cannot outlive us."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # include/uapi/linux/prctl.h
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(expected_parent: int | None = None) -> Callable[[], None]:
    """A ``preexec_fn``: the child gets SIGKILL when the thread that started it dies, however
    that comes about (prctl(2), PR_SET_PDEATHSIG). A parent that was gone before the call took
    effect is seen by its pid. Call it in the parent, pass what it returns."""
    parent = os.getpid() if expected_parent is None else expected_parent

    def arm() -> None:
        if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0 or os.getppid() != parent:
            os._exit(127)

    return arm


def last_line(text: str) -> str:
    """The last line of a program's output that says something, for a one-line error."""
    for line in reversed(text.splitlines()):
        if line.strip():
            return line.strip()
    return "it said nothing"


def python() -> list[str]:
    """The interpreter that runs us, for children that run our modules."""
    return [sys.executable, "-m"]
