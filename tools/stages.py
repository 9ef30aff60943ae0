# SPDX-License-Identifier: Apache-2.0
"""The stages of `make test`: every one runs, whatever the one before came to.

Each leaves a JUnit file; the closing line counts them all. The exit status is the worst
of the stages' (3: the lab was lost, which is no test's failure and no pass either).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Stage:
    """A command, and the JUnit file or run folder that it leaves ("" for none)."""

    name: str
    argv: tuple[str, ...]
    junit: Path | None = None


@dataclass(frozen=True)
class Counts:
    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.passed + other.passed, self.failed + other.failed, self.skipped + other.skipped
        )

    def __str__(self) -> str:
        text = f"{self.passed} passed, {self.failed} failed"
        return text + (f", {self.skipped} skipped" if self.skipped else "")


def counts(path: Path) -> Counts:
    """The counts of a JUnit file; errors count as failures."""
    total = Counts()
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        tags = {child.tag for child in case}
        if tags & {"failure", "error"}:
            total += Counts(failed=1)
        elif "skipped" in tags:
            total += Counts(skipped=1)
        else:
            total += Counts(passed=1)
    return total


def stages(kernels: list[str], folder: Path) -> list[Stage]:
    def pytest(name: str, *words: str) -> Stage:
        junit = folder / f"{name.replace(' ', '-')}.xml"
        return Stage(name, (str(BIN / "pytest"), f"--junitxml={junit}", *words), junit)

    found = [
        Stage("lint", ("tools/lint",)),
        pytest("unit tests", "tests/unit"),
    ]
    if any(Path("tests/playbooks").rglob("test_*.py")):
        found.append(pytest("playbooks", "tests/playbooks"))
    for kernel in kernels:
        job = (str(BIN / "rdmalab"), "vm-test", "--kernel", kernel)
        found.append(Stage(f"main job on {kernel}", job))
        found.append(pytest(f"VM tests on {kernel}", "tests/vm", f"--kernel={kernel}"))
    return found


def main() -> int:
    total = Counts()
    worst = 0
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for stage in stages(sys.argv[1:], Path(folder)):
            print(f"== {stage.name}", flush=True)
            began = time.monotonic()
            env = {**os.environ, "KERNELS": " ".join(sys.argv[1:])}
            status = subprocess.run(stage.argv, check=False, env=env).returncode
            seconds = time.monotonic() - began
            found = Counts(passed=0 if status else 1, failed=1 if status else 0)
            if stage.junit is not None and stage.junit.exists():
                found = counts(stage.junit)
                if status and not found.failed:
                    found += Counts(failed=1)  # it ended badly for a reason of its own
            rows.append(f"{stage.name:24} {seconds:6.0f} s  {found}")
            total += found
            if stage.name == "unit tests" or not 0 <= status <= 4:
                status = min(abs(status), 1)  # pytest's own statuses are not the lab's
            worst = max(worst, status)
    print("\n" + "\n".join(rows))
    print(total)
    return worst


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
