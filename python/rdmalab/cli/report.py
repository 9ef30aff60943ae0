# SPDX-License-Identifier: Apache-2.0
"""``rdmalab report``: a run's tables, rows and page again, from its folder."""

from __future__ import annotations

import json

import click


@click.command(
    epilog="""\b
Examples:
  rdmalab report latest
  rdmalab report results/20261130T184207Z-latency --json | jq '.rows[].p50_us'
  xdg-open "$(rdmalab report latest --open-path)"
"""
)
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
@click.option("--open-path", is_flag=True, help="Print the path of report.html and nothing else.")
def report(run: str, as_json: bool, open_path: bool) -> None:
    """Make report.html of RUN again and print its tables.

    RUN is a run's folder, its name under results/, or "latest": the newest one there that
    holds measurements.
    """
    # pandas and pyarrow take a second to import; `rdmalab --help` does not need them.
    from rich.console import Console

    from rdmalab.errors import UsageError
    from rdmalab.lab.paths import Paths
    from rdmalab.measure.report.page import regenerate
    from rdmalab.measure.report.rows import to_rows
    from rdmalab.measure.report.runs import find_run
    from rdmalab.measure.report.table import print_tables

    if as_json and open_path:
        raise UsageError("--json and --open-path exclude each other", todo="give one of them")
    folder = find_run(run, Paths.find().results)
    path, measurements = regenerate(folder)
    if open_path:
        click.echo(str(path))
    elif as_json:
        document = {"run": str(folder), "report": str(path), "rows": to_rows(measurements)}
        click.echo(json.dumps(document, indent=2, allow_nan=False))
    else:
        print_tables(Console(), measurements)
        click.echo(f"\n{path}")
