# SPDX-License-Identifier: Apache-2.0
"""rdmalab vm-test: the main job."""

from __future__ import annotations

import sys
import time

import click
from rich.console import Console

from rdmalab.errors import NodeLost
from rdmalab.lab.lab import Lab, LabSpec
from rdmalab.lab.paths import Paths
from rdmalab.lab.progress import Progress
from rdmalab.lab.run import Run
from rdmalab.measure import vmtest
from rdmalab.measure.report.table import print_tables


@click.command(epilog="\b\nExamples:\n  rdmalab vm-test\n  rdmalab vm-test --kernel lts")
@click.option("--kernel", default="stock", show_default=True, help="stock or lts.")
@click.option("--accel", default="auto", show_default=True, help="auto, tcg or kvm.")
@click.option("--vcpus", default=1, show_default=True, help="Of each node.")
def vm_test(kernel: str, accel: str, vcpus: int) -> int:
    """Boot two nodes, measure rxe and tcp with probes, try each module; one report."""
    began = time.monotonic()
    paths = Paths.find()
    progress = Progress()
    spec = LabSpec(name=f"vm-test-{kernel}", kernel=kernel, accel=accel, vcpus=vcpus)
    with Lab.up(spec, progress, paths) as lab:
        kept = Run.create(paths.results, "vm-test", argv=sys.argv)
        kept.use_lab(lab.facts(), lab.versions())
        try:
            outcome = vmtest.run(lab, kept, progress)
        except NodeLost:
            kept.finish(3)
            raise
    failed = outcome.count("failed") + outcome.count("error")
    kept.finish(1 if failed else 0, {"passed": outcome.count("passed"), "failed": failed})
    console = Console()
    if outcome.measurements:
        print_tables(console, outcome.measurements)
        console.print()
    for suite in outcome.suites:
        for result in suite.results:
            if result.outcome not in ("passed", "skipped"):
                line = f"{result.outcome}: {result.classname} {result.name}: {result.message}"
                console.print(line, markup=False, soft_wrap=True)
    seconds = time.monotonic() - began
    console.print(f"run {kept.folder}", markup=False, soft_wrap=True)
    console.print(f"report {outcome.report}", markup=False, soft_wrap=True)
    console.print(f"vm-test on {kernel} took {seconds:.0f} s", markup=False, highlight=False)
    counts = f"{outcome.count('passed')} passed, {failed} failed"
    if skipped := outcome.count("skipped"):
        counts += f", {skipped} skipped"
    console.print(counts, highlight=False)
    return 1 if failed else 0
