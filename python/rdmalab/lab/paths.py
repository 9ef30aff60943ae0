# SPDX-License-Identifier: Apache-2.0
"""Where things are: the repository's data and the cache. Nothing else is written to."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from rdmalab.errors import UsageError


@dataclass(frozen=True)
class Paths:
    """``repo`` holds vm/, kernel/ and playbooks/; ``cache`` holds all that is built."""

    repo: Path
    cache: Path

    @classmethod
    def find(cls) -> Paths:
        """The repository this package is installed from (editable), the cache in its
        build/ or where ``RDMALAB_CACHE`` says. Raises UsageError outside a repository."""
        repo = Path(os.environ.get("RDMALAB_REPO") or Path(__file__).resolve().parents[3])
        if not (repo / "vm" / "packages.toml").is_file():
            raise UsageError(
                f"{repo} is no rdmalab repository",
                seen="vm/packages.toml is not there",
                todo="install with `make setup`, or set RDMALAB_REPO",
            )
        cache = Path(os.environ.get("RDMALAB_CACHE") or repo / "build").absolute()
        return cls(repo=repo, cache=cache)

    @property
    def vm(self) -> Path:
        return self.repo / "vm"

    @property
    def lock(self) -> Path:
        """The versions that were resolved; beside the cache, so that it outlives it."""
        return self.cache.with_name(self.cache.name + ".lock.json")

    @property
    def sysroot(self) -> Path:
        return self.cache / "sysroot"

    @property
    def kernels(self) -> Path:
        return self.cache / "kernels"

    @property
    def images(self) -> Path:
        return self.cache / "images"

    @property
    def modules(self) -> Path:
        return self.cache / "modules"

    @property
    def native(self) -> Path:
        return self.cache / "native"

    @property
    def labs(self) -> Path:
        return self.cache / "labs"

    @property
    def results(self) -> Path:
        return self.repo / "results"
