# SPDX-License-Identifier: Apache-2.0
"""The versions that were resolved, kept beside the cache so that the next set-up takes the same."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rdmalab.errors import UsageError

SCHEMA = 1


@dataclass(frozen=True)
class LockedKernel:
    """``release`` is what uname -r prints ("7.3.4+deb13-amd64"), ``version`` the package's."""

    release: str
    version: str


@dataclass(frozen=True)
class Lock:
    packages: dict[str, str] = field(default_factory=dict)  # package -> version
    kernels: dict[str, LockedKernel] = field(default_factory=dict)  # tier -> kernel

    @classmethod
    def read(cls, path: Path) -> Lock:
        """An absent file is an empty lock. Raises UsageError on a damaged one."""
        if not path.exists():
            return cls()
        try:
            data = json.loads(path.read_text())
            if data["schema"] != SCHEMA:
                raise ValueError(f"schema {data['schema']}, not {SCHEMA}")
            kernels = {tier: LockedKernel(**k) for tier, k in data["kernels"].items()}
            return cls(packages=dict(data["packages"]), kernels=kernels)
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise UsageError(
                f"{path} cannot be read", seen=str(error), todo="delete it to resolve anew"
            ) from error

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        data = {"schema": SCHEMA, **asdict(self)}
        temporary.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n")
        temporary.replace(path)
