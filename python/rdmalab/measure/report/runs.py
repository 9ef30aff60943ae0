# SPDX-License-Identifier: Apache-2.0
"""Which run folder a name means."""

from __future__ import annotations

from pathlib import Path

from rdmalab.errors import UsageError
from rdmalab.lab.run import MANIFEST

LATEST = "latest"


def find_run(run: str, results: Path) -> Path:
    """The folder of a run given as a path, as a name under ``results``, or as ``latest``.

    ``latest`` is the newest folder that holds measurements; names begin with the time, so
    that their order is the runs'. Raises UsageError where there is none, or no run in it.
    """
    if run == LATEST:
        # The harness keeps a link of this name to the newest run, which may be one of tests.
        folders = sorted(
            {path.parent.resolve() for path in results.glob("*/*.parquet")},
            key=lambda folder: folder.name,
        )
        if not folders:
            raise UsageError(
                f"no run with measurements in {results.absolute()}",
                todo="run a bench first, or name a run's folder",
            )
        return folders[-1]
    for folder in (Path(run), results / run):
        if folder.is_dir():
            if not (folder / MANIFEST).is_file():
                raise UsageError(
                    f"{folder} is no run's folder",
                    seen=f"no {MANIFEST} in it",
                    todo=f"name a folder under {results.absolute()}, or {LATEST}",
                )
            return folder.resolve()
    raise UsageError(
        f"no run {run}",
        seen=f"neither a folder nor a name in {results.absolute()}",
        todo=f"name a run's folder, or {LATEST}",
    )
