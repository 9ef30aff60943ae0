# SPDX-License-Identifier: Apache-2.0
"""report.html: self-contained, escaped, small, and true to the measurements."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest
import report_data
from click.testing import CliRunner

from rdmalab.cli.report import report
from rdmalab.errors import RdmalabError, UsageError
from rdmalab.lab.run import SCHEMA as MANIFEST_SCHEMA
from rdmalab.measure.measurement import Measurement
from rdmalab.measure.report.charts import probe_figures
from rdmalab.measure.report.page import regenerate, render, write_report
from rdmalab.measure.report.runs import find_run
from rdmalab.measure.report.series import to_cells
from rdmalab.measure.report.store import write_measurements
from rdmalab.probe.histogram import Bucket, Histogram

SCHEMA = Path(__file__).parents[2] / "docs" / "schemas" / "bench.schema.json"
_VOID = {"meta", "link", "br", "img", "input", "hr"}


class _Page(HTMLParser):
    """What a browser would see: elements with attributes, texts, and whether tags match."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.unmatched: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        self.unmatched += self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            self.unmatched.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def page_of(measurements: list[Measurement], **manifest: Any) -> str:
    return render("20261130-table", {**report_data.MANIFEST, **manifest}, measurements)


@pytest.fixture(scope="module")
def sweep() -> str:
    return page_of(report_data.sweep_run())


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    (tmp_path / "vm").mkdir()
    (tmp_path / "vm" / "packages.toml").touch()
    folder = tmp_path / "results" / "20261130T184207Z-table"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps(report_data.MANIFEST))
    write_measurements(folder / "measurements.parquet", report_data.table_run())
    return folder


def test_tags_match_and_ids_are_unique(sweep: str) -> None:
    page = _Page(sweep)
    assert page.unmatched == []
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    targets = [str(attrs["href"])[1:] for tag, attrs in page.elements if tag == "a"]
    assert set(targets) <= set(ids)


def test_nothing_is_loaded_from_elsewhere(sweep: str) -> None:
    for tag, attrs in _Page(sweep).elements:
        assert tag not in {"script", "iframe", "img", "object", "embed"}
        for name in ("src", "href", "srcset", "data", "action"):
            value = str(attrs.get(name) or "")
            assert not value or value.startswith("#") or value == "data:,", (tag, name, value)
    assert not re.search(r"@import|url\(", sweep)
    assert "default-src 'none'" in sweep


def test_every_chart_is_whole_xml_with_a_title_and_a_description(sweep: str) -> None:
    drawings = re.findall(r'<svg class="chart.*?</svg>', sweep, re.S)
    assert len(drawings) > 20
    for drawing in drawings:
        root = ElementTree.fromstring(drawing)
        assert root.findtext("{http://www.w3.org/2000/svg}title")
        assert root.findtext("{http://www.w3.org/2000/svg}desc")
        assert root.get("role") == "img"


def test_nothing_is_drawn_outside_of_a_chart(sweep: str) -> None:
    for drawing in re.findall(r'<svg class="chart.*?</svg>', sweep, re.S):
        root = ElementTree.fromstring(drawing)
        _, _, width, height = map(float, str(root.get("viewBox")).split())
        for path in root.iter("{http://www.w3.org/2000/svg}path"):
            for x, y in re.findall(r"([\d.-]+) ([\d.-]+)", str(path.get("d"))):
                assert 0 <= float(x) <= width
                assert 0 <= float(y) <= height
        assert "nan" not in drawing
        assert "inf" not in drawing


def test_charts_take_their_colours_from_the_reader(sweep: str) -> None:
    assert "prefers-color-scheme: dark" in sweep
    body = sweep.split("</style>")[1]
    assert not re.search(r"#[0-9a-f]{3,8}\b(?!\")|rgb\(|(?:fill|stroke)=", body)


def test_a_phone_gets_its_own_layout(sweep: str) -> None:
    assert 'content="width=device-width, initial-scale=1"' in sweep
    wide = sweep.count('<svg class="chart wide"')
    assert wide
    assert wide == sweep.count('<svg class="chart narrow"')


def test_a_whole_sweep_stays_under_a_megabyte() -> None:
    probed = report_data.measurement(histograms=report_data.probes(1))
    runs = [
        replace(
            probed,
            point=replace(probed.point, transport=transport, op=op, mode=mode, size=2**power),
        )
        for _ in range(3)
        for op in ("send", "write", "read")
        for mode in ("event", "poll")
        for power in range(1, 24)
        for transport in ("rxe", "tcp")
    ]
    assert len(page_of(runs).encode()) < 1_000_000


@pytest.mark.parametrize("evil", ["<script>alert(1)</script>", '"><b onload=x>', "a&b</style>"])
def test_everything_from_a_run_is_escaped(evil: str) -> None:
    histogram = Histogram(evil, evil, evil, evil, (Bucket(1, 2, 3),))
    missing = Histogram(evil, evil, evil, "ns", (), evil)
    proof = replace(
        report_data.refused(evil, 5),
        reason=evil,
        ends=tuple(replace(end, node=evil) for end in report_data.refused("x", 5).ends),
    )
    good = report_data.proven(evil, 2000)
    runs = [
        replace(
            report_data.measurement(
                tool=tool, op=evil, mode=evil, transport=evil, size=size, proof=one,
                histograms=(histogram, missing),
            ),
            kernel=evil,
            accelerator=evil,
            link=evil,
        )
        for tool in ("rdmalab", evil)
        for size in (1, 2, 3, 4)
        for one in (proof, good)
    ]  # fmt: skip
    text = render(evil, {"name": evil, evil: {evil: [evil]}, "started": evil}, runs)
    clean = _Page(page_of(report_data.sweep_run()))
    page = _Page(text)
    assert page.unmatched == []
    assert {tag for tag, _ in page.elements} <= {tag for tag, _ in clean.elements} | {"p", "li"}
    assert not any("onload" in attrs for _, attrs in page.elements)
    assert evil in page.text


def test_it_says_where_it_was_measured_and_what_that_means(sweep: str) -> None:
    text = _Page(sweep).text
    assert "accelerator TCG" in text
    assert "per node 1 vCPU" in text
    assert "kernel 7.3.4+deb13-amd64" in text
    assert "started 2026-11-30 18:42:07 UTC" in text
    assert "a time here is no speed" in text
    assert "took 143 s" in text
    assert "versions.qemu-system-x86 11.1.3" in text
    assert "lab.topology pair" in text


def test_a_refusal_is_at_the_head_with_its_reason(sweep: str) -> None:
    header = _Page(sweep.split("</header>")[0]).text
    assert "rxe send 8 KiB has no number." in header
    assert "rxe counters cover 0.6 %" in header
    assert "proven 77 of 78" in header


def test_a_refused_measurement_is_in_no_chart_and_no_figure() -> None:
    secret = replace(
        report_data.measurement(proof=report_data.refused("rxe", 2000)),
        samples_us=(123456.0,) * 2000,
    )
    text = page_of([secret])
    assert '<svg class="chart' not in text
    assert "123456" not in text


def test_a_curve_is_broken_where_a_size_was_refused() -> None:
    def bandwidths(verdict: str) -> str:
        runs = [
            report_data.measurement(kind="bandwidth", mib_s=10.0, size=2**power)
            for power in range(1, 8)
        ]
        runs[3] = replace(runs[3], proof=replace(runs[3].proof, verdict=verdict))
        return page_of(runs)

    assert bandwidths("proven").count('<path class="c0 line"') == 2  # wide and narrow
    assert bandwidths("refused").count('<path class="c0 line"') == 4


def test_a_refused_round_is_not_drawn_among_proven_ones() -> None:
    good = report_data.measurement()
    bad = replace(good, proof=report_data.refused("rxe", 2000))
    assert page_of([good, good, good]).count('<path class="c0 line"') == 3
    assert page_of([good, bad, good]).count('<path class="c0 line"') == 2


def test_figures_and_ranges_of_rounds_are_in_the_table() -> None:
    runs = [
        replace(report_data.measurement(transport="rxe"), samples_us=(value,) * 2000)
        for value in (101.0, 105.0, 117.0)
    ]
    text = _Page(page_of(runs)).text
    assert "105 101..117" in text


def test_an_unsupported_counter_is_called_so() -> None:
    one = report_data.measurement()
    first, second = one.proof.ends
    blind = replace(second, rival_sent=None, rival_received=None)
    text = _Page(page_of([replace(one, proof=replace(one.proof, ends=(first, blind)))])).text
    assert "unsupported" in text


def test_probes_of_rounds_are_added_up_and_missing_ones_named() -> None:
    text = _Page(page_of(report_data.table_run())).text
    assert "node0: 6000 events, median < " in text
    assert "idle on node0: counted nothing" in text
    assert "driver: rxe_sender on node0: no function rxe_sender in this kernel" in text


def test_what_a_run_writes_as_its_manifest_is_shown() -> None:
    jsonschema.validate(report_data.MANIFEST, MANIFEST_SCHEMA)


def test_events_that_a_probe_lost_are_said() -> None:
    lossy = Histogram("node1", "post_to_completion", "SEND", "ns", (Bucket(1, 2, 9),), "", 7)
    runs = [report_data.measurement(histograms=(lossy,))] * 2
    assert "the probe lost 14 events on node1" in _Page(page_of(runs)).text


def test_equal_counts_are_equal_areas_in_a_times_histogram() -> None:
    # Two buckets, one doubling and two doublings wide, with a gap between them.
    histogram = Histogram(
        "node0", "driver", "x", "ns", (Bucket(128, 256, 100), Bucket(1024, 4096, 100))
    )
    (figure,) = probe_figures(to_cells([report_data.measurement(histograms=(histogram,))])[0])
    path = re.search(r'outline" d="M([^"]*)"', figure.svg)
    assert path
    points = [tuple(map(float, point.split())) for point in path[1].split("L")]
    base = points[0][1]
    areas = [
        (right - left) * (base - top)
        for (left, top), (right, same) in pairwise(points)
        if top == same and top < base
    ]
    assert len(areas) == 2
    assert areas[0] == pytest.approx(areas[1], rel=0.01)


def test_counts_keep_room_for_a_gap() -> None:
    histogram = Histogram(
        "node0", "completions_per_poll", "", "count", (Bucket(0, 1, 4), Bucket(3, 4, 4))
    )
    (figure,) = probe_figures(to_cells([report_data.measurement(histograms=(histogram,))])[0])
    labels = re.findall(r">([\d.]+)</text>", figure.svg)
    assert labels[-3:] == ["0", "1..2", "3"]


def test_an_empty_run_has_a_page() -> None:
    text = render("empty", {}, [])
    assert _Page(text).unmatched == []
    assert "Nothing was measured" in text


@pytest.mark.parametrize("samples", [1, 2, 11, 25])
def test_few_samples_are_drawn_too(samples: int) -> None:
    page = _Page(page_of([report_data.measurement(samples=samples)]))
    assert page.unmatched == []
    assert "–" in page.text  # noqa: RUF001 (the dash that the page prints)


def test_a_run_is_made_again_from_its_folder(run_folder: Path) -> None:
    written = write_report(run_folder, report_data.MANIFEST, report_data.table_run())
    before = written.read_bytes()
    written.unlink()
    path, measurements = regenerate(run_folder)
    assert path.read_bytes() == before
    assert list(measurements) == report_data.table_run()


@pytest.mark.parametrize("content", ["{", "[]", None])
def test_a_damaged_or_missing_manifest_is_one_line(run_folder: Path, content: str | None) -> None:
    manifest = run_folder / "manifest.json"
    if content is None:
        manifest.unlink()
    else:
        manifest.write_text(content)
    with pytest.raises(RdmalabError, match=r"manifest\.json"):
        regenerate(run_folder)


@pytest.mark.parametrize("link", ["20261129T090000Z-sweep", "20261201T090000Z-tests"])
def test_latest_is_the_newest_run_with_measurements(run_folder: Path, link: str) -> None:
    older = run_folder.with_name("20261129T090000Z-sweep")
    newer = run_folder.with_name("20261201T090000Z-tests")
    older.mkdir()
    newer.mkdir()
    write_measurements(older / "measurements.parquet", [])
    (run_folder.parent / "latest").symlink_to(link)
    assert find_run("latest", run_folder.parent) == run_folder
    assert find_run(run_folder.name, run_folder.parent) == run_folder
    assert find_run(str(run_folder), run_folder.parent) == run_folder


@pytest.mark.parametrize("run", ["latest", "nothing"])
def test_a_run_that_is_not_there_is_wrong_use(tmp_path: Path, run: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_run(run, tmp_path)
    assert caught.value.exit_status == 2


def test_a_folder_that_no_run_left_is_wrong_use(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is no run's folder: no manifest\.json in it"):
        find_run(str(tmp_path), tmp_path)


def test_the_command_prints_tables_rows_or_the_path(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RDMALAB_REPO", str(run_folder.parent.parent))
    tables = CliRunner().invoke(report, ["latest"])
    assert tables.exit_code == 0, tables.output
    assert "rxe / tcp" in tables.stdout
    assert tables.stdout.rstrip().endswith("report.html")
    document = json.loads(CliRunner().invoke(report, ["latest", "--json"]).stdout)
    jsonschema.validate(document, json.loads(SCHEMA.read_text()))
    assert len(document["rows"]) == len(report_data.table_run())
    assert document["run"] == str(run_folder)
    path = CliRunner().invoke(report, ["latest", "--open-path"]).stdout
    assert path == f"{run_folder / 'report.html'}\n"
