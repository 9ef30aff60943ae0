# SPDX-License-Identifier: Apache-2.0
"""A file that is there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rdmalab.errors import RdmalabError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a path beside ``path`` to write to, and rename it over ``path`` at the end.

    Where the body fails, ``path`` is as it was before and the half file is gone. Raises
    RdmalabError where the folder cannot be written (missing, read-only, full).
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        part.replace(path)
    except OSError as error:
        raise RdmalabError(
            f"cannot write {path}",
            seen=error.strerror or str(error),
            todo="free space, or choose a folder that can be written",
        ) from error
    finally:
        part.unlink(missing_ok=True)
