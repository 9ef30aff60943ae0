# SPDX-License-Identifier: Apache-2.0
"""report.html: one file that needs no network, made from measurements and a manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from rdmalab.errors import RdmalabError
from rdmalab.measure.measurement import Counters, Measurement
from rdmalab.measure.report import charts, text
from rdmalab.measure.report.rows import Row, coverage, is_proven, proof_text
from rdmalab.measure.report.scale import Scale, log_scale
from rdmalab.measure.report.series import (
    Cell,
    Comparison,
    Facet,
    to_cells,
    to_comparisons,
    to_facets,
)
from rdmalab.measure.report.setting import TCG_NOTE, setting_of
from rdmalab.measure.report.statistics import MIN_BEYOND
from rdmalab.measure.report.store import read_folder
from rdmalab.measure.report.table import worst_proof
from rdmalab.measure.report.wholefile import replacing

_T = TypeVar("_T")

#: The page's name in a run folder.
REPORT_NAME = "report.html"
MANIFEST_NAME = "manifest.json"

# So that a sweep's page stays under a megabyte and can be read to its end; everything is in
# the tables and the Parquet file.
_DISTRIBUTIONS_A_FACET = 4
_CELLS_WITH_PROBES = 6

_COLUMNS = (
    ("p50", "p50_us"),
    ("p90", "p90_us"),
    ("p99", "p99_us"),
    ("p99.9", "p999_us"),
    ("max", "max_us"),
)


@dataclass(frozen=True)
class _Line:
    """One cell's line in a facet's table: ``figures`` are (name, text, range)."""

    label: str
    colour: int
    size: str
    figures: tuple[tuple[str, str, str], ...]
    samples: str
    proof: str
    proven: bool


@dataclass(frozen=True)
class _Panel:
    """A facet as the page shows it; ``samples`` says whether lines count latencies."""

    title: str
    unit: str
    rounds: int
    samples: bool
    lines: tuple[_Line, ...]
    against_size: charts.Figure | None
    figures: tuple[charts.Figure, ...]
    left_out: int


@dataclass(frozen=True)
class _Ratio:
    """A comparison with its places on the common axis, in per cent of its width."""

    what: str
    size: str
    figure: str
    value: str
    span: str
    rounds: int
    alternating: bool
    colour: int
    low: float
    middle: float
    high: float


@dataclass(frozen=True)
class _RatioGroup:
    title: str
    reading: str
    ratios: tuple[_Ratio, ...]


@dataclass(frozen=True)
class _Evidence:
    """One measurement's proof: at each end (name, sent, received, rival, coverage)."""

    what: str
    detail: str
    proven: bool
    verdict: str
    reason: str
    posted: str
    ends: tuple[tuple[str, str, str, str, str], ...]


@dataclass(frozen=True)
class _ProbeCell:
    title: str
    figures: tuple[charts.Figure, ...]


def write_report(
    run_folder: Path, manifest: Mapping[str, Any], measurements: Sequence[Measurement]
) -> Path:
    """Write ``report.html`` into the run folder and return its path.

    Whatever is in the manifest (:mod:`rdmalab.lab.run`) is shown; its ``name``, ``started``
    and ``ended`` make the head. Raises RdmalabError where the folder cannot be written.
    """
    path = run_folder / REPORT_NAME
    page = render(run_folder.resolve().name, manifest, measurements)
    with replacing(path) as part:
        part.write_text(page, encoding="utf-8")
    return path


def regenerate(run_folder: Path) -> tuple[Path, tuple[Measurement, ...]]:
    """Make the report again from the folder's Parquet files and manifest.

    Raises RdmalabError where a file is damaged or missing.
    """
    manifest = read_manifest(run_folder)
    measurements = read_folder(run_folder)
    return write_report(run_folder, manifest, measurements), measurements


def read_manifest(run_folder: Path) -> dict[str, Any]:
    """The run's manifest. Raises RdmalabError where it is missing or no JSON object."""
    path = run_folder / MANIFEST_NAME
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RdmalabError(
            f"cannot read {path}",
            seen=error.strerror or str(error),
            todo="name a folder that a run left",
        ) from error
    except ValueError as error:
        raise RdmalabError(f"{path} is no JSON", seen=str(error)) from error
    if not isinstance(manifest, dict):
        raise RdmalabError(f"{path} is no JSON object", seen=type(manifest).__name__)
    return manifest


def render(
    folder_name: str, manifest: Mapping[str, Any], measurements: Sequence[Measurement]
) -> str:
    """The page as text; nothing in it comes unescaped from a run."""
    import jinja2
    from markupsafe import Markup

    facets = to_facets(to_cells(measurements))
    cells = [cell for facet in facets for cell in facet.cells]
    palette = charts.colours(list(dict.fromkeys(cell.point.transport for cell in cells)))
    groups, axis = _ratio_groups(facets, palette)
    probe_cells, probes_left_out = _probe_cells(cells)
    refused = [_evidence(one) for one in measurements if not is_proven(one)]
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("rdmalab.measure.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # The charts and the style sheet are ours and escaped already.
    environment.filters["drawn"] = Markup
    templates = Path(__file__).parent / "templates"
    return environment.get_template("report.html.j2").render(
        style=Markup((templates / "report.css").read_text(encoding="utf-8")),
        name=str(manifest.get("name") or folder_name),
        folder=folder_name,
        head=_head(manifest),
        setting=setting_of(measurements),
        tcg_note=TCG_NOTE,
        min_beyond=MIN_BEYOND,
        panels=[_panel(facet, palette) for facet in facets],
        ratio_groups=groups,
        axis=axis,
        probe_cells=probe_cells,
        probes_left_out=probes_left_out,
        silent_probes=_silent_probes(measurements),
        measured=len(measurements),
        refused=refused,
        # A refusal is shown for each round that it befell; of a point that was proven every
        # time, the round with the least coverage stands for all.
        proven=[_evidence(worst_proof(cell)) for cell in cells if all(map(is_proven, cell.rounds))],
        manifest=_flat(manifest),
        manifest_json=json.dumps(manifest, indent=2, ensure_ascii=False, default=str),
    )


def _head(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    started, ended = _moment(manifest.get("started")), _moment(manifest.get("ended"))
    facts = []
    if started:
        facts.append(("started", started.strftime("%Y-%m-%d %H:%M:%S %Z").strip()))
    if started and ended and (started.tzinfo is None) == (ended.tzinfo is None):
        facts.append(("took", f"{(ended - started).total_seconds():.0f} s"))
    return facts


def _moment(written: object) -> datetime | None:
    try:
        return datetime.fromisoformat(str(written))
    except ValueError:
        return None


def _panel(facet: Facet, palette: Mapping[str, int]) -> _Panel:
    latency = facet.point.kind == "latency"
    chosen = _spread_out(facet.sizes, _DISTRIBUTIONS_A_FACET) if latency else []
    figures = [charts.distribution(facet, size, palette) for size in chosen]
    against = charts.against_size(facet, palette)
    wide = against is not None and against.wide
    if not wide:
        figures.append(against)
    return _Panel(
        title=facet.title,
        unit="µs" if latency else "MiB/s",
        rounds=max(len(cell.rounds) for cell in facet.cells),
        samples=latency,
        lines=tuple(_line(cell, palette) for cell in facet.cells),
        against_size=against if wide else None,
        figures=tuple(figure for figure in figures if figure),
        left_out=len(facet.sizes) - len(chosen) if latency else 0,
    )


def _line(cell: Cell, palette: Mapping[str, int]) -> _Line:
    names = _COLUMNS if cell.point.kind == "latency" else (("MiB/s", "mib_s"),)
    worst = worst_proof(cell)
    samples = sum(row["samples"] for row in cell.rows)
    return _Line(
        label=cell.label,
        colour=palette[cell.point.transport],
        size=text.byte_size(cell.point.size),
        figures=tuple((name, *_figure(cell, key)) for name, key in names),
        samples=str(samples) if samples else text.NOTHING,
        proof=proof_text(worst.proof),
        proven=is_proven(worst),
    )


def _figure(cell: Cell, key: str) -> tuple[str, str]:
    def figure(row: Row) -> float | None:
        value = row[key]  # type: ignore[literal-required]
        return None if value is None else float(value)

    over = cell.over_rounds(figure)
    if over is None:
        return text.NOTHING, ""
    span = f"{text.number(over.low)}..{text.number(over.high)}" if over.rounds > 1 else ""
    return text.number(over.median), span


def _ratio_groups(
    facets: Sequence[Facet], palette: Mapping[str, int]
) -> tuple[list[_RatioGroup], list[tuple[float, str]]]:
    """Comparisons by what is compared, on one axis: (place in per cent, label) its ticks."""
    comparisons = to_comparisons(facets)
    ends = [end for one in comparisons for end in (one.ratio.low, one.ratio.high)]
    axis = log_scale([*ends, 1.0], most_ticks=6)
    titles = {(cell.tool, cell.point, cell.link): f.title for f in facets for cell in f.cells}
    groups: dict[str, list[Comparison]] = {}
    for one in comparisons:
        subject = one.subject
        facet_title = titles[subject.tool, subject.point, subject.link]
        title = f"{subject.label} / {one.base.label}: {facet_title}"
        groups.setdefault(title, []).append(one)
    made = [
        _RatioGroup(
            title,
            "above 1 is slower" if group[0].figure == "p50" else "above 1 is faster",
            tuple(_ratio(one, axis, palette) for one in group),
        )
        for title, group in groups.items()
    ]
    return made, [(100 * tick.at, tick.label) for tick in axis.ticks]


def _ratio(one: Comparison, axis: Scale, palette: Mapping[str, int]) -> _Ratio:
    over = one.ratio
    return _Ratio(
        what=f"{one.subject.label} / {one.base.label}",
        size=text.byte_size(one.subject.point.size),
        figure=one.figure,
        value=text.number(over.median),
        span=f"{text.number(over.low)}..{text.number(over.high)}" if over.rounds > 1 else "",
        rounds=over.rounds,
        alternating=one.alternating,
        colour=palette[one.subject.point.transport],
        low=100 * axis.at(over.low),
        middle=100 * axis.at(over.median),
        high=100 * axis.at(over.high),
    )


def _evidence(one: Measurement) -> _Evidence:
    forward, backward = one.proof.posted
    point = one.point
    shares = coverage(one.proof)
    return _Evidence(
        what=f"{point.transport} {point.op} {text.byte_size(point.size)}",
        detail=", ".join([point.kind, point.mode, *([one.tool] if one.tool != "rdmalab" else [])]),
        proven=is_proven(one),
        verdict=one.proof.verdict,
        reason=one.proof.reason,
        posted=f"{forward} / {backward}",
        ends=tuple(_end(end, share) for end, share in zip(one.proof.ends, shares, strict=True)),
    )


def _end(end: Counters, share: float | None) -> tuple[str, str, str, str, str]:
    rivals = (end.rival_sent, end.rival_received)
    return (
        end.node,
        _counter(end.sent),
        _counter(end.received),
        " / ".join(map(_counter, rivals)) if rivals != (None, None) else _counter(None),
        text.NOTHING if share is None else f"{share:.1f} %",
    )


def _counter(value: int | None) -> str:
    return "unsupported" if value is None else str(value)


def _probe_cells(cells: Sequence[Cell]) -> tuple[list[_ProbeCell], int]:
    probed = [
        cell
        for cell in cells
        if any(histogram.buckets for one in cell.rounds for histogram in one.histograms)
    ]
    chosen = _spread_out(probed, _CELLS_WITH_PROBES)
    made = []
    for cell in chosen:
        point = cell.point
        title = f"{cell.label}, {point.op} {point.kind} {text.byte_size(point.size)}, {point.mode}"
        if len(cell.rounds) > 1:
            title += f", {text.counted(len(cell.rounds), 'round')} added up"
        made.append(_ProbeCell(title, tuple(charts.probe_figures(cell))))
    return made, len(probed) - len(chosen)


def _silent_probes(measurements: Sequence[Measurement]) -> list[tuple[str, str, str]]:
    """(node, probe, why) of probes that show nothing in this run, each once: those that could
    not attach, and those that were attached and counted nothing throughout."""
    histograms = [one for measurement in measurements for one in measurement.histograms]
    counted = {(one.node, one.probe) for one in histograms if one.buckets}
    return list(
        dict.fromkeys(
            (one.node, charts.probe_title(one.probe, one.key), one.missing or "counted nothing")
            for one in histograms
            if one.missing or (one.node, one.probe) not in counted
        )
    )


def _flat(value: Any, path: str = "") -> list[tuple[str, str]]:
    """A manifest's leaves by dotted path; a list of plain values is one leaf."""
    if isinstance(value, Mapping):
        return [
            leaf
            for key, inner in value.items()
            for leaf in _flat(inner, f"{path}.{key}" if path else str(key))
        ]
    if isinstance(value, (list, tuple)):
        if not any(isinstance(inner, (Mapping, list, tuple)) for inner in value):
            return [(path, ", ".join(map(str, value)))]
        return [
            leaf for place, inner in enumerate(value) for leaf in _flat(inner, f"{path}.{place}")
        ]
    return [(path, text.NOTHING if value is None else str(value))]


def _spread_out(items: Sequence[_T], most: int) -> list[_T]:
    """At most ``most`` items, the first and the last among them, the rest evenly between."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]
