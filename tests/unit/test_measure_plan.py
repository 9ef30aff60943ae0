# SPDX-License-Identifier: Apache-2.0
"""What is asked on the command line, as points; and what the command line refuses."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import click
import pytest
import report_data
from click.testing import CliRunner, Result

from rdmalab.cli import probe as probe_cli
from rdmalab.cli import rdma as rdma_cli
from rdmalab.cli import target
from rdmalab.cli.bench import bench
from rdmalab.errors import NodeLost, UsageError
from rdmalab.lab.lab import Lab
from rdmalab.lab.run import LabFacts
from rdmalab.measure import bench as benches
from rdmalab.measure import keep, plan
from rdmalab.measure.measurement import Measurement
from rdmalab.measure.report.store import read_folder


def invoke(*words: str) -> Result:
    return CliRunner().invoke(bench, words)


def test_sizes_are_bytes_with_binary_suffixes() -> None:
    assert plan.parse_sizes("2,64,4K,8m,64") == (2, 64, 4096, 8 << 20)


@pytest.mark.parametrize("text", ["", "x", "4KB", "-2", "1.5K", "0", "9M", "64,,128"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="size"):
        plan.parse_sizes(text)


def test_points_that_are_compared_are_neighbours() -> None:
    points = plan.latency_points(
        ("rxe", "tcp"), ("RC",), ("send", "write_imm"), ("event",), (64, 4096), 100, 10
    )
    assert [(point.transport, point.op, point.size) for point in points] == [
        ("rxe", "send", 64),
        ("tcp", "send", 64),
        ("rxe", "send", 4096),
        ("tcp", "send", 4096),
        # TCP is measured once a size, whatever else is asked for.
        ("rxe", "write_imm", 64),
        ("rxe", "write_imm", 4096),
    ]


def test_atomics_are_measured_once_at_their_one_size() -> None:
    points = plan.latency_points(("rxe",), ("RC",), ("fetch_add",), ("event",), (64, 4096), 9, 1)
    assert [point.size for point in points] == [8]


def test_a_combination_that_is_not_defined_is_refused_before_anything_runs() -> None:
    with pytest.raises(UsageError, match="read is not defined for UC"):
        plan.latency_points(("rxe",), ("RC", "UC"), ("read",), ("event",), (64,), 100, 10)


def test_a_sweep_leaves_out_what_is_not_defined_and_names_it() -> None:
    points, left_out = plan.sweep_points(
        ("rxe",), ("RC",), ("write",), ("event",), (64, 1 << 20), 0, 100
    )
    assert {point.kind for point in points} == {"bandwidth"}
    assert len(left_out) == 2
    assert "there is no event to wait for" in left_out[0]
    with pytest.raises(UsageError, match="nothing is left to measure"):
        plan.sweep_points(("rxe",), ("UD",), ("read",), ("event",), (64,), 0, 100)


@pytest.mark.parametrize(("size", "messages"), [(2, 2000), (65536, 1024), (8 << 20, 8)])
def test_the_default_count_bounds_the_bytes(size: int, messages: int) -> None:
    assert plan.default_messages(size) == messages
    (point,) = plan.bandwidth_points(
        ("rxe",), ("RC",), ("send",), ("poll",), (size,), 0, 100, 1, "one-way"
    )
    assert point.iterations == messages
    # Warm-up is never longer than what it warms up for.
    assert point.warmup == min(100, messages)


def test_a_profile_file_becomes_settings_and_leaves_the_loop_its_own(tmp_path: Path) -> None:
    assert plan.profile_settings("default") == {}
    path = tmp_path / "p.toml"
    path.write_text('inline = 64\nservice = "UC"\n[gid]\nfamily = "ipv6"\n')
    settings = plan.profile_settings(str(path))
    assert settings["inline"] == 64
    assert settings["gid.family"] == "ipv6"
    assert settings["path_mtu"] == "active"
    assert not settings.keys() & {"service", "cq_mode", "send_depth", "recv_depth"}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["latency", "--sizes", "big"], "'big' is no size"),
        (["latency", "--op", "teleport"], "'teleport' is none of send, write"),
        (["latency", "--mode", "hope"], "'hope' is none of event, poll"),
        (["latency", "--op", ","], "an empty list"),
        (["bandwidth", "--direction", "up"], "'up' is not one of"),
        (["latency", "--samples", "many"], "not a valid integer"),
    ],
)
def test_a_wrong_option_is_said_and_ends_with_2(words: list[str], why: str) -> None:
    result = invoke(*words)
    assert result.exit_code == 2
    assert why in result.output


def test_a_lab_that_is_not_up_is_wrong_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RDMALAB_CACHE", str(tmp_path))
    result = invoke("latency", "--name", "nobody")
    assert isinstance(result.exception, UsageError)
    assert "lab nobody is not up" in str(result.exception)


@pytest.mark.parametrize("command", ["latency", "bandwidth", "sweep"])
def test_help_shows_examples(command: str) -> None:
    text = invoke(command, "--help").output
    assert f"rdmalab bench {command} " in text
    assert isinstance(bench.get_command(click.Context(bench), command), click.Command)


@pytest.mark.parametrize(
    ("group", "name"), [(bench, "bench"), (probe_cli.probe, "probe"), (rdma_cli.rdma, "rdma")]
)
def test_a_group_s_help_shows_examples(group: click.Group, name: str) -> None:
    assert f"Examples:\n    rdmalab {name} " in CliRunner().invoke(group, ["--help"]).output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--transport", "tcp"], "they are on RDMA drivers"),
        (["--transport", "siw"], "cannot be proven"),
        (["--op", "write"], "there is no event to wait for"),
        (["--rounds", "0"], "0 rounds"),
        (["--op", "nonsense"], "nonsense"),
        (["--mode", "busy"], "busy"),
    ],
)
def test_overhead_refuses_wrong_words_before_it_looks_for_a_lab(
    monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.setattr(target, "find", lambda *_: pytest.fail("a lab was looked for"))
    done = CliRunner().invoke(probe_cli.probe, ["overhead", *words])
    assert isinstance(done.exception, UsageError | SystemExit)
    assert said in f"{done.output} {done.exception}"


class _Lab:
    """What a run notes of one."""

    def facts(self) -> LabFacts:
        return LabFacts("x", "stock", "7.3.4", "tcg", 1, "fast", "pair", 1.0, ("node0", "node1"))

    def versions(self) -> dict[str, str]:
        return {"perftest": "24.1"}


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where runs are kept."""
    (tmp_path / "vm").mkdir()
    (tmp_path / "vm/packages.toml").touch()
    monkeypatch.setenv("RDMALAB_REPO", str(tmp_path))
    return tmp_path / "results"


def test_what_was_measured_before_a_failure_is_kept(
    monkeypatch: pytest.MonkeyPatch, results: Path
) -> None:
    node = SimpleNamespace(deadlines=SimpleNamespace(factor=1.0))
    where = SimpleNamespace(
        node=lambda _: node, lab=_Lab(), accelerator="tcg", vcpus=1, kernel="7.3.4"
    )
    monkeypatch.setattr(target, "find", lambda *_: where)
    monkeypatch.setattr(benches, "route_between", lambda *_, **__: None)

    def run(*_: object, done: list[Measurement], **__: object) -> None:
        done.append(report_data.measurement(samples=20))
        raise NodeLost("node1 died")

    monkeypatch.setattr(benches, "run", run)
    with pytest.raises(NodeLost):
        CliRunner().invoke(bench, ["latency"], catch_exceptions=False)
    manifest = json.loads((results / "latest/manifest.json").read_text())
    assert (manifest["exit_status"], manifest["counts"]["measurements"]) == (3, 1)
    assert manifest["versions"] == {"perftest": "24.1"}
    assert len(read_folder(results / "latest")) == 1


def test_a_result_that_is_json_is_kept_as_it_is(results: Path) -> None:
    folder = keep.keep_json("probe-overhead", {"ratio": 1.2}, cast(Lab, _Lab()), ["probe"])
    assert json.loads((folder / "result.json").read_text()) == {"ratio": 1.2}
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["exit_status"], manifest["lab"]["tier"]) == (0, "stock")
