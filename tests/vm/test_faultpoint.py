# SPDX-License-Identifier: Apache-2.0
"""faultpoint on a guest: what it reads, what it refuses, that it comes and goes.

That a warning, an oops and a hang for ever are caught and named is tested with the harness.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rdmalab.errors import CommandFailed
from rdmalab.lab import module
from rdmalab.lab.lab import Lab
from rdmalab.lab.node import Node
from rdmalab.lab.paths import Paths

FOLDER = "/sys/kernel/debug/faultpoint"


@pytest.fixture
def faultpoint(node0: Node) -> Iterator[Node]:
    module.load(node0, "faultpoint", Paths.find().modules)
    yield node0
    module.unload(node0, "faultpoint")


REFUSED = (1, "Invalid argument")


def write(node: Node, file: str, value: str) -> tuple[int, str]:
    """Exit status and the reason said by a program that writes ``value`` as it is."""
    done = node.run(["dd", "status=none", f"of={FOLDER}/{file}"], input=value, check=False)
    return done.status, done.stderr.strip().rsplit(": ", 1)[-1]


def test_its_own_test_passes(faultpoint: Node) -> None:
    lines = faultpoint.run(["cat", f"{FOLDER}/selftest"]).stdout.splitlines()
    assert lines[0] == "KTAP version 1"
    planned = int(lines[1].removeprefix("1.."))
    results = [line for line in lines if re.match(r"(not )?ok ", line)]
    assert len(results) == planned
    assert [line for line in lines[2:] if not line.startswith("ok ")] == []


def test_clock_pairs_agree_with_the_calibration(faultpoint: Node) -> None:
    def pairs() -> tuple[int, list[list[int]]]:
        lines = faultpoint.run(["cat", f"{FOLDER}/clock"]).stdout.splitlines()
        assert lines[1] == "columns tsc_before tsc_after mono_raw_ns uncertainty_ns cpu"
        words = [line.split() for line in lines[2:]]
        assert {word[0] for word in words} == {"pair"}
        return int(lines[0].split()[1]), [[int(w) for w in word[1:]] for word in words]

    khz, first = pairs()
    time.sleep(1)
    _, second = pairs()
    assert khz > 0
    assert len(first) >= 4
    for before, after, _, uncertainty, _ in first + second:
        assert 0 <= after - before <= uncertainty * khz / 1e6
    best = [min(half, key=lambda pair: pair[1] - pair[0]) for half in (first, second)]
    # Each TSC value is known within its bounds, so the rate is too; 1 % is for the kernel's
    # calibration, which under TCG is made against an emulated timer.
    ns = best[1][2] - best[0][2]
    low = (best[1][0] - best[0][1]) / ns * 1e6
    high = (best[1][1] - best[0][0]) / ns * 1e6
    assert low * 0.99 <= khz <= high * 1.01


def test_only_1_triggers(faultpoint: Node) -> None:
    taint = faultpoint.run(["cat", "/proc/sys/kernel/tainted"]).stdout
    for file in ("warn", "oops"):
        for value in ("0", "2", "on", "1 1", "-1", "+1", "0x1", "1\n1", "1\n\n", "1" * 40):
            assert write(faultpoint, file, value) == REFUSED, (file, value)
    assert faultpoint.run(["cat", "/proc/sys/kernel/tainted"]).stdout == taint


def test_only_seconds_or_forever_hang(faultpoint: Node) -> None:
    for file in ("hang_irq", "hang_preempt", "hang_task"):
        for value in ("0", "601", "1.5", "Forever", "forever 1", "-1", "+2", "0x2", "2s"):
            assert write(faultpoint, file, value) == REFUSED, (file, value)


@pytest.mark.parametrize("kind", ["irq", "preempt", "task"])
def test_a_bounded_hang_holds_the_writer_and_ends(faultpoint: Node, lab: Lab, kind: str) -> None:
    began = time.monotonic()
    assert write(faultpoint, f"hang_{kind}", "2\n")[0] == 0
    # The delay loop is calibrated at boot and, on a busy host, off by some.
    assert 1.0 <= time.monotonic() - began <= 60 * lab.slow_factor
    assert lab.status()[faultpoint.name].state == "running"


def test_an_open_file_holds_the_module(faultpoint: Node) -> None:
    script = f"exec 9<{FOLDER}/clock; rmmod faultpoint"
    done = faultpoint.run(["sh", "-c", script], check=False)
    assert done.status == 1
    assert "in use" in done.stderr
    faultpoint.run(["test", "-e", f"{FOLDER}/clock"])


def test_unloading_leaves_nothing(node0: Node) -> None:
    module.load(node0, "faultpoint", Paths.find().modules)
    module.unload(node0, "faultpoint")
    assert node0.run(["test", "-e", FOLDER], check=False).status == 1
    with pytest.raises(CommandFailed, match="not currently loaded"):
        module.unload(node0, "faultpoint")


def test_a_module_of_another_kernel_never_reaches_insmod(node0: Node, tmp_path: Path) -> None:
    release = node0.run(["uname", "-r"]).stdout.strip()
    other = "9.9.9-another"
    ko = tmp_path / "faultpoint.ko"
    data = (Paths.find().modules / release / "faultpoint.ko").read_bytes()
    vermagic = f"vermagic={release} ".encode()
    assert data.count(vermagic) == 1
    ko.write_bytes(data.replace(vermagic, f"vermagic={other} ".encode().ljust(len(vermagic))))
    with pytest.raises(module.ModuleMismatch, match=f"{re.escape(other)}.*{re.escape(release)}"):
        module.load_file(node0, ko)
    assert "version magic" not in node0.run(["dmesg"]).stdout
