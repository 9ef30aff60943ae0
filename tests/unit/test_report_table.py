# SPDX-License-Identifier: Apache-2.0
"""The terminal's tables: whole at 80 columns, and nothing shown that is not proven."""

from __future__ import annotations

import io
from dataclasses import replace

import report_data
from rich.console import Console

from rdmalab.measure.measurement import Measurement
from rdmalab.measure.report.table import print_tables


def printed(measurements: list[Measurement], width: int = 80) -> str:
    stream = io.StringIO()
    print_tables(Console(file=stream, width=width), measurements)
    return stream.getvalue()


def line_of(text: str, *words: str) -> str:
    """The table line that begins with these words; the widths between them are free."""
    return next(line for line in text.splitlines() if line.split()[: len(words)] == list(words))


def test_it_says_first_where_it_was_measured() -> None:
    text = printed(report_data.table_run())
    assert text.splitlines()[0] == "TCG, 1 vCPU a node, kernel 7.3.4+deb13-amd64"
    assert "a time here is no speed" in text.splitlines()[1]


def test_nothing_is_said_about_emulation_where_there_was_none() -> None:
    runs = [replace(one, accelerator="kvm") for one in report_data.table_run()]
    text = printed(runs)
    assert text.startswith("KVM, 1 vCPU")
    assert "no speed" not in text


def test_80_columns_hold_every_figure_and_proof() -> None:
    runs = [
        replace(one, samples_us=tuple(900 + 99_000.0 * i / 20_000 for i in range(20_000)))
        for one in report_data.sweep_run()
        if one.samples_us and one.proof.verdict == "proven"
    ]
    text = printed(runs)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert line_of(text, "rxe", "8", "MiB").split() == [
        "rxe", "8", "MiB", "50395", "89995", "98905", "99796", "99895",
        "proven", "100.0/100.0", "%",
    ]  # fmt: skip


def test_a_long_name_folds_before_a_figure_is_cut() -> None:
    text = printed([report_data.measurement(tool="perftest", transport="usb4_rdma")])
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert "usb4_rdma" in text
    assert "proven 100.0/100.0 %" in text


def test_percentiles_without_samples_are_a_dash() -> None:
    line = line_of(printed(report_data.table_run()), "tcp", "64", "B")
    assert line.split()[6] == "–"  # noqa: RUF001 (the dash that the table prints)
    assert line.rstrip().endswith("proven 100.0/100.0 %")


def test_a_refusal_shows_no_number_and_its_reason() -> None:
    text = printed([report_data.measurement(size=8192, proof=report_data.refused("rxe", 2000))])
    line = line_of(text, "rxe", "8", "KiB")
    assert line.split()[3:] == ["–"] * 5 + ["refused"]  # noqa: RUF001
    assert "No proof, no number" in text
    assert "rxe counters cover 0.6 %" in " ".join(text.split())


def test_one_refused_round_shows_on_the_line() -> None:
    runs = report_data.table_run()
    runs[0] = replace(runs[0], proof=report_data.refused("rxe", 2000))
    assert line_of(printed(runs), "rxe", "64", "B").rstrip().endswith("refused")


def test_ratios_have_their_range_and_rounds() -> None:
    line = line_of(printed(report_data.table_run()), "rxe", "/", "tcp", "64", "B")
    assert line.split()[-2].startswith("(1.")
    assert ".." in line.split()[-2]
    assert line.split()[-1] == "3"


def test_markup_in_a_reason_is_printed_as_it_is() -> None:
    refused = report_data.measurement(proof=report_data.refused("rxe", 2000))
    text = printed([report_data.with_reason(refused, "counter [bold]x[/bold] fell")])
    assert "counter [bold]x[/bold] fell" in text
