# SPDX-License-Identifier: Apache-2.0
"""Leaves results as a run: a folder with a manifest and Parquet and a report, or JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rdmalab.lab.paths import Paths
from rdmalab.lab.run import Run
from rdmalab.measure.measurement import Measurement

if TYPE_CHECKING:
    from rdmalab.lab.lab import Lab

PARQUET = "measurements.parquet"
RESULT = "result.json"


def keep(
    name: str,
    measurements: Sequence[Measurement],
    lab: Lab | None,
    argv: Sequence[str],
    exit_status: int,
) -> tuple[Path, Path]:
    """The new run's folder and its report.html. Raises RdmalabError where it cannot be
    written."""
    # pandas and pyarrow take a second to import.
    from rdmalab.measure.report.page import write_report
    from rdmalab.measure.report.store import write_measurements

    run = _create(name, lab, argv)
    write_measurements(run.path(PARQUET), measurements)
    refused = sum(one.proof.verdict != "proven" for one in measurements)
    run.finish(exit_status, {"measurements": len(measurements), "refused": refused})
    return run.folder, write_report(run.folder, run.manifest.to_json(), measurements)


def keep_json(name: str, document: Mapping[str, Any], lab: Lab | None, argv: Sequence[str]) -> Path:
    """The folder of a new run that holds ``document`` as result.json. Raises RdmalabError
    where it cannot be written."""
    run = _create(name, lab, argv)
    run.write(RESULT, json.dumps(document, indent=2, allow_nan=False) + "\n")
    run.finish(0)
    return run.folder


def _create(name: str, lab: Lab | None, argv: Sequence[str]) -> Run:
    run = Run.create(Paths.find().results, name, argv=argv)
    if lab is not None:
        run.use_lab(lab.facts(), lab.versions())
    return run
