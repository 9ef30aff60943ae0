# SPDX-License-Identifier: Apache-2.0
"""Leaves measurements as a run: a folder with Parquet, manifest and report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rdmalab.lab.paths import Paths
from rdmalab.lab.run import LabFacts, Run
from rdmalab.measure.measurement import Measurement
from rdmalab.measure.report.page import write_report
from rdmalab.measure.report.store import write_measurements

if TYPE_CHECKING:
    from rdmalab.lab.lab import Lab

PARQUET = "measurements.parquet"


def keep(
    name: str,
    measurements: Sequence[Measurement],
    lab: Lab | None,
    argv: Sequence[str],
    exit_status: int,
) -> tuple[Path, Path]:
    """The new run's folder and its report.html. Raises RdmalabError where it cannot be
    written."""
    run = Run.create(Paths.find().results, name, argv=argv)
    if lab is not None:
        run.use_lab(
            LabFacts(
                name=lab.name,
                tier=lab.tier,
                kernel=lab.kernel,
                accelerator=lab.accelerator,
                vcpus=lab.vcpus,
                mode=lab.mode,
                topology=lab.plan.topology,
                slow_factor=lab.slow_factor,
                nodes=tuple(lab.nodes),
            )
        )
    write_measurements(run.path(PARQUET), measurements)
    refused = sum(one.proof.verdict != "proven" for one in measurements)
    run.finish(exit_status, {"measurements": len(measurements), "refused": refused})
    return run.folder, write_report(run.folder, run.manifest.to_json(), measurements)
