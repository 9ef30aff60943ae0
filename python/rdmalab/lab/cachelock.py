# SPDX-License-Identifier: Apache-2.0
"""Processes that share a cache: one makes a thing while the others wait, and nothing is
deleted that a lab which is up may still open."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def making(target: Path) -> Iterator[None]:
    """Held by the one that makes ``target``; a killed one frees it. Whoever had to wait must
    look again whether ``target`` is there. The folder it lies in is made where absent."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(f".{target.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def held(lock: Path) -> bool:
    """Whether a process holds ``lock`` for itself; False where it is absent."""
    try:
        with lock.open("r") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return True
    except OSError:
        return False
    return False


def drop_unused(labs: Path, folder: Path, pattern: str, keep: Path) -> None:
    """Delete what matches ``pattern`` in ``folder``, except ``keep``. Nothing is deleted
    while a lab under ``labs`` is up: a node of it that is started anew opens its images."""
    if any(held(lock) for lock in labs.glob("*/lock")):
        return
    for path in folder.glob(pattern):
        if path != keep:
            path.unlink(missing_ok=True)
