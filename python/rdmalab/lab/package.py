# SPDX-License-Identifier: Apache-2.0
"""The part of our own package that runs on nodes, as a tar that depends on nothing but
the files' content, so that its hash names it."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import rdmalab

NODE_PARTS = (
    "__init__.py",
    "errors.py",
    "rdma",
    "probe",
    "workload",
    "measure/__init__.py",
    "measure/measurement.py",
    "measure/node",
)
"""What may run on a node. A part that does not exist (yet) is left out."""

_SUFFIXES = {".py", ".c", ".h", ".toml", ".json", ".so"}


@dataclass(frozen=True)
class Package:
    """``archive`` is an uncompressed tar with one directory, ``rdmalab``; ``digest`` is
    the first 16 hexadecimal digits of its SHA-256."""

    digest: str
    archive: bytes

    @classmethod
    def build(
        cls,
        source: Path | None = None,
        native: Iterable[Path] = (),
        parts: Iterable[str] = NODE_PARTS,
    ) -> Package:
        """From the package's directory (ours by default) and shared objects, which go
        to ``rdmalab/_native``."""
        root = Path(rdmalab.__file__).parent if source is None else source
        files = dict(_files(root, parts))
        for library in native:
            files[f"_native/{library.name}"] = library
        archive = _tar({f"rdmalab/{name}": path.read_bytes() for name, path in files.items()})
        return cls(hashlib.sha256(archive).hexdigest()[:16], archive)


def _files(root: Path, parts: Iterable[str]) -> Iterator[tuple[str, Path]]:
    for part in parts:
        top = root / part
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            hidden = any(name.startswith((".", "__pycache__")) for name in path.parts[-2:])
            if path.is_file() and path.suffix in _SUFFIXES and not hidden:
                yield path.relative_to(root).as_posix(), path


def _tar(content: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in sorted(content):
            # Time zero, root, one mode: the hash must not see who built it or when. A
            # fixed time is safe for .pyc files because the directory is the hash.
            info = tarfile.TarInfo(name)
            info.size = len(content[name])
            info.mode = 0o755 if name.endswith(".so") else 0o644
            tar.addfile(info, io.BytesIO(content[name]))
    return buffer.getvalue()
