# SPDX-License-Identifier: Apache-2.0
"""A run: one execution, with its folder of results.

``results/<UTC time>-<name>/`` holds

- ``manifest.json``: what ran where, see ``SCHEMA``;
- ``console-<node>.log``: each node's console from its first byte;
- ``junit.xml``, ``*.ktap``: results of tests;
- ``captures/<test>-<link>.pcap``: packets of tests that failed;
- ``*.parquet``, ``report.html``: measurements.

``results/latest`` points to the newest. Files appear whole or not at all.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jsonschema

import rdmalab
from rdmalab.errors import RdmalabError, UsageError

MANIFEST = "manifest.json"
VERSION = 1

SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "rdmalab run manifest",
    "type": "object",
    "additionalProperties": False,
    "required": ["schema", "name", "rdmalab", "git", "argv", "started"],
    "properties": {
        "schema": {"const": VERSION},
        "name": {"type": "string", "description": "what was run: vm-test, latency"},
        "rdmalab": {"type": "string", "description": "version of rdmalab"},
        "git": {
            "type": "object",
            "additionalProperties": False,
            "required": ["revision", "dirty"],
            "properties": {
                "revision": {"type": ["string", "null"], "description": "null: no git checkout"},
                "dirty": {"type": ["boolean", "null"]},
            },
        },
        "argv": {"type": "array", "items": {"type": "string"}},
        "started": {"type": "string", "description": "UTC, ISO 8601"},
        "ended": {"type": ["string", "null"], "description": "null: it runs, or was killed"},
        "exit_status": {"type": ["integer", "null"]},
        "counts": {"type": "object", "additionalProperties": {"type": "integer"}},
        "seed": {"type": ["integer", "null"]},
        "lab": {
            "type": ["object", "null"],
            "additionalProperties": False,
            "required": ["name", "tier", "kernel", "accelerator", "vcpus", "mode", "topology",
                         "slow_factor", "nodes"],
            "properties": {
                "name": {"type": "string"},
                "tier": {"type": "string", "description": "stock, lts, debug, patched"},
                "kernel": {"type": "string", "description": "its release, as of uname -r"},
                "accelerator": {"type": "string", "description": "tcg, kvm or hardware"},
                "vcpus": {"type": "integer", "description": "of each node"},
                "mode": {"type": "string", "description": "fast or full"},
                "topology": {"type": "string"},
                "slow_factor": {"type": "number"},
                "nodes": {"type": "array", "items": {"type": "string"}},
            },
        },
        "versions": {
            "type": "object",
            "description": "what was resolved into the sysroot, from the lock file",
            "additionalProperties": {"type": "string"},
        },
    },
}  # fmt: skip

_SLUG = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True)
class LabFacts:
    """The lab that a run used; fields as in ``SCHEMA``."""

    name: str
    tier: str
    kernel: str
    accelerator: str
    vcpus: int
    mode: str
    topology: str
    slow_factor: float
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json; times are UTC in ISO 8601."""

    name: str
    rdmalab: str
    revision: str | None
    dirty: bool | None
    argv: tuple[str, ...]
    started: str
    ended: str | None = None
    exit_status: int | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    seed: int | None = None
    lab: LabFacts | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": VERSION,
            "name": self.name,
            "rdmalab": self.rdmalab,
            "git": {"revision": self.revision, "dirty": self.dirty},
            "argv": list(self.argv),
            "started": self.started,
            "ended": self.ended,
            "exit_status": self.exit_status,
            "counts": dict(self.counts),
            "seed": self.seed,
            "lab": None if self.lab is None else {**asdict(self.lab), "nodes": [*self.lab.nodes]},
            "versions": dict(self.versions),
        }

    @classmethod
    def from_json(cls, data: Any) -> Manifest:
        """Raises jsonschema.ValidationError for what ``SCHEMA`` does not allow."""
        jsonschema.validate(data, SCHEMA)
        lab = data.get("lab")
        return cls(
            data["name"],
            data["rdmalab"],
            data["git"]["revision"],
            data["git"]["dirty"],
            tuple(data["argv"]),
            data["started"],
            data.get("ended"),
            data.get("exit_status"),
            data.get("counts", {}),
            data.get("seed"),
            None if lab is None else LabFacts(**{**lab, "nodes": tuple(lab["nodes"])}),
            data.get("versions", {}),
        )


class Run:
    """A run's folder. Made by ``create``, found again by ``open``."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest

    @classmethod
    def create(
        cls, root: Path, name: str, *, argv: Sequence[str] = (), seed: int | None = None
    ) -> Run:
        """Make a new folder under ``root`` and point ``latest`` at it.

        Raises RdmalabError if that cannot be written.
        """
        now = datetime.now(UTC)
        revision, dirty = git_revision(Path(rdmalab.__file__).parent)
        manifest = Manifest(
            name, rdmalab.__version__, revision, dirty, tuple(argv), _iso(now), seed=seed
        )
        base = f"{now:%Y%m%dT%H%M%SZ}-{slug(name)}"
        try:
            root.mkdir(parents=True, exist_ok=True)
            folder = _make(root, base)
            run = cls(folder, manifest)
            run._save()
            _point(root / "latest", folder.name)
        except OSError as error:
            raise RdmalabError(
                f"cannot make a run folder in {root}",
                seen=error.strerror or str(error),
                todo="make room there, or name another place for results",
            ) from error
        return run

    @classmethod
    def open(cls, folder: Path) -> Run:
        """Read a run again, by its folder or a link to it.

        Raises UsageError if there is none, or its manifest is not what ``SCHEMA`` says.
        """
        path = folder / MANIFEST
        try:
            manifest = Manifest.from_json(json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise UsageError(
                f"{folder} is no run folder",
                seen=f"{MANIFEST}: {error.strerror}",
                todo="name a folder under results/, or results/latest",
            ) from error
        except (ValueError, jsonschema.ValidationError) as error:
            seen = error.message if isinstance(error, jsonschema.ValidationError) else str(error)
            raise UsageError(f"{path} is no manifest of this version", seen=seen) from error
        return cls(folder.resolve(), manifest)

    def use_lab(self, lab: LabFacts, versions: Mapping[str, str] | None = None) -> None:
        """Note the lab, and the versions of its lock file."""
        self._change(replace(self.manifest, lab=lab, versions=dict(versions or {})))

    def finish(self, exit_status: int, counts: Mapping[str, int] | None = None) -> None:
        """Note the end."""
        self._change(
            replace(
                self.manifest,
                ended=_iso(datetime.now(UTC)),
                exit_status=exit_status,
                counts=dict(counts or {}),
            )
        )

    def path(self, name: str) -> Path:
        """A path in the folder, whose directory exists. Raises ValueError for one outside."""
        path = self.folder / name
        if not path.resolve().is_relative_to(self.folder.resolve()):
            raise ValueError(f"{name} is outside of the run folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def write(self, name: str, data: str | bytes) -> Path:
        """Write a file of the folder, at once."""
        path = self.path(name)
        _write(path, data.encode(errors="replace") if isinstance(data, str) else data)
        return path

    def keep(self, source: Path, name: str = "") -> Path:
        """Keep a file that others write: as a second link where the file system allows
        (then it goes on growing here), else as a copy. Replaces an older one."""
        path = self.path(name or source.name)
        if path.exists() and path.samefile(source):
            return path
        new = path.with_name(f".{path.name}.new")
        new.unlink(missing_ok=True)
        try:
            os.link(source, new)
        except OSError:
            shutil.copyfile(source, new)
        new.replace(path)
        return path

    def _change(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._save()

    def _save(self) -> None:
        self.write(MANIFEST, json.dumps(self.manifest.to_json(), indent=2) + "\n")


def slug(text: str, limit: int = 100) -> str:
    """``text`` as a file name."""
    return _SLUG.sub("-", text).strip("-.")[:limit] or "run"


def git_revision(directory: Path) -> tuple[str | None, bool | None]:
    """The checked-out revision that ``directory`` belongs to and whether files differ
    from it; (None, None) outside of a checkout or without git."""
    try:
        revision = _git(directory, "rev-parse", "HEAD").strip()
        return revision, bool(_git(directory, "status", "--porcelain", "-uno").strip())
    except (OSError, subprocess.SubprocessError):
        return None, None


def _git(directory: Path, *words: str) -> str:
    # --no-optional-locks: a status must not write to the index beside a git of the user's.
    command = ["git", "--no-optional-locks", "-C", str(directory), *words]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, errors="replace", timeout=30
    ).stdout


def _iso(time: datetime) -> str:
    return time.isoformat("T", "milliseconds").replace("+00:00", "Z")


def _make(root: Path, base: str) -> Path:
    number = 1
    while True:
        folder = root / (base if number == 1 else f"{base}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
            continue
        return folder


def _point(link: Path, target: str) -> None:
    new = link.with_name(f".latest.{os.getpid()}")
    new.unlink(missing_ok=True)
    new.symlink_to(target)
    new.replace(link)


def _write(path: Path, data: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".new-", delete=False) as file:
        try:
            file.write(data)
            file.close()
            Path(file.name).chmod(0o644)
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
