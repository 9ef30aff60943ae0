# SPDX-License-Identifier: Apache-2.0
"""The main job: one boot of two nodes, rxe and tcp measured with probes, each module tried."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rdmalab.errors import NodeLost, RdmalabError
from rdmalab.lab import junit, ktap, module
from rdmalab.lab.console import ConsoleFile, read_allowed, unexpected
from rdmalab.lab.junit import Suite, TestResult
from rdmalab.lab.lab import Lab
from rdmalab.lab.node import Node
from rdmalab.lab.paths import Paths
from rdmalab.lab.progress import Progress, Step
from rdmalab.lab.run import Run
from rdmalab.measure import bench
from rdmalab.measure.measurement import Measurement, Point
from rdmalab.measure.report import page, store
from rdmalab.probe.group import ProbeGroup

#: What is measured, each round in this order: the transports alternate.
POINTS = (
    Point("send", 64, iterations=1000, transport="rxe"),
    Point("send", 64, iterations=1000, transport="tcp"),
    Point("send", 4096, iterations=1000, transport="rxe"),
    Point("send", 4096, iterations=1000, transport="tcp"),
    Point("send", 65536, iterations=200, warmup=10, kind="bandwidth", transport="rxe"),
    Point("send", 65536, iterations=200, warmup=10, kind="bandwidth", transport="tcp"),
)
ROUNDS = 2


@dataclass(frozen=True)
class Outcome:
    """What the main job came to."""

    measurements: tuple[Measurement, ...]
    suites: tuple[Suite, ...]
    report: Path

    def count(self, outcome: str) -> int:
        return sum(suite.counts()[outcome] for suite in self.suites)


def _attempt(results: list[TestResult], group: str, name: str, what: Callable[[], str]) -> None:
    """Run one check: its text on success; a lost lab goes through, all else fails it."""
    began = time.monotonic()
    try:
        said = what()
    except NodeLost:
        raise
    except RdmalabError as error:
        results.append(
            TestResult(group, name, "failed", time.monotonic() - began, str(error), str(error))
        )
    else:
        results.append(TestResult(group, name, "passed", time.monotonic() - began, output=said))


def _both(nodes: Sequence[Node], what: Callable[[Node], object]) -> None:
    """Do something on all nodes at the same time."""
    with ThreadPoolExecutor(len(nodes)) as pool:
        for done in [pool.submit(what, node) for node in nodes]:
            done.result()


def _detail(step: Step) -> Callable[[str], None]:
    return lambda line: step.update(detail=line)


def _measure(lab: Lab, nodes: Sequence[Node], progress: Progress) -> list[Measurement]:
    setting = bench.Setting(lab.accelerator, lab.vcpus, lab.kernel)
    with (
        ProbeGroup(nodes) as probes,
        progress.step(f"{ROUNDS} rounds of rxe and tcp") as step,
    ):
        return bench.run(
            nodes[0],
            nodes[1],
            POINTS,
            setting=setting,
            alternations=ROUNDS,
            probes=probes,
            factor=lab.slow_factor,
            progress=_detail(step),
        )


def _proofs(measurements: Sequence[Measurement]) -> list[TestResult]:
    """One result a measurement: passed where its transport is proven."""
    results = []
    for one in measurements:
        point = one.point
        name = f"{point.transport} {point.op} {point.kind} {point.size} B"
        passed = one.proof.verdict == "proven"
        results.append(
            TestResult(
                "transport",
                name,
                "passed" if passed else "failed",
                one.seconds,
                "" if passed else one.proof.reason,
                output=one.proof.reason,
            )
        )
    return results


def _smoke(node: Node, paths: Paths, name: str) -> tuple[str, ktap.Report | None]:
    """Load a module, run its self-test where it has one, unload it."""
    module.load(node, name, paths.modules)
    try:
        path = f"/sys/kernel/debug/{name}/selftest"
        if node.run(["test", "-e", path], check=False).status:
            return "loaded and unloaded; it has no self-test", None
        text = node.run(["cat", path]).stdout
    finally:
        module.unload(node, name)
    return text, ktap.parse(text)


def _splats(lab: Lab, paths: Paths) -> list[TestResult]:
    """One result a node: passed where its console holds no splat that is not allowed."""
    allowed = read_allowed(paths.vm / "splats.toml")
    results = []
    for name in lab.nodes:
        found = list(
            unexpected(ConsoleFile(name, lab.folder / f"console-{name}.log").finish(), allowed)
        )
        results.append(
            TestResult(
                "console",
                name,
                "failed" if found else "passed",
                message=found[0].title if found else "",
                text="\n\n".join(splat.text for splat in found),
            )
        )
    return results


def run(lab: Lab, kept: Run, progress: Progress) -> Outcome:
    """The whole job on a lab that is up, its results in the run folder ``kept``.

    A guest that panics fails the check that ran. Raises NodeLost where a node went away for
    a reason outside of it; what was found until then is kept all the same.
    """
    lab.watch()
    suites: list[Suite] = []
    measurements: list[Measurement] = []
    try:
        _checks(lab, kept, progress, suites, measurements)
    except NodeLost as error:
        lost = TestResult("lab", error.node or "lab", "lost", message=str(error), text=str(error))
        suites.append(Suite("lab", (lost,)))
        raise
    finally:
        suites.append(Suite("console", tuple(_splats(lab, Paths.find()))))
        store.write_measurements(kept.path("measurements.parquet"), measurements)
        junit.write(kept.path("junit.xml"), suites)
        for name in lab.nodes:
            kept.keep(lab.folder / f"console-{name}.log")
        report = page.write_report(kept.folder, kept.manifest.to_json(), measurements)
    return Outcome(tuple(measurements), tuple(suites), report)


def _checks(
    lab: Lab,
    kept: Run,
    progress: Progress,
    suites: list[Suite],
    measurements: list[Measurement],
) -> None:
    """Set-up, transports, modules; what they come to goes to ``suites`` as it is found."""
    paths = Paths.find()
    nodes = list(lab.nodes.values())[:2]
    setup: list[TestResult] = []
    with progress.step("SoftRoCE on both nodes"):
        lock = threading.Lock()

        def make(node: Node) -> None:
            netdev = next(iter(node.links.values())).netdev
            found: list[TestResult] = []

            def softroce() -> str:
                return node.python("rdmalab.rdma", ["setup", "--netdev", netdev]).stdout

            _attempt(found, "set-up", f"SoftRoCE on {node.name}", softroce)
            with lock:
                setup.extend(found)

        _both(nodes, make)
    suites.append(Suite("set-up", tuple(setup)))
    transport: list[TestResult] = []
    if all(result.outcome == "passed" for result in setup):

        def measure() -> str:
            measurements.extend(_measure(lab, nodes, progress))
            return "both transports"

        _attempt(transport, "transport", "measured", measure)
        transport += _proofs(measurements)
    suites.append(Suite("transport", tuple(transport)))
    smoke: list[TestResult] = []
    names = sorted(Path(path).stem for path in lab.plan.modules)
    with progress.step(f"modules: {', '.join(names)}"):
        for name in names:
            reports: list[ktap.Report] = []

            def attempt(name: str = name, reports: list[ktap.Report] = reports) -> str:
                text, report = _smoke(nodes[0], paths, name)
                if report is not None:
                    kept.write(f"{name}.ktap", text)
                    reports.append(report)
                return text

            _attempt(smoke, "modules", name, attempt)
            suites += [junit.from_ktap(name, report) for report in reports]
    suites.append(Suite("modules", tuple(smoke)))
