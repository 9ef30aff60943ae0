# SPDX-License-Identifier: Apache-2.0
"""A lab without guests, for the tests of the pytest plugin: nothing of it runs anything."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rdmalab.errors import CommandFailed, NodeLost
from rdmalab.lab.deadline import Deadlines
from rdmalab.lab.guard import LabLike
from rdmalab.lab.node import LinkEnd, Node, Result
from rdmalab.lab.ssh import Endpoint

CONSOLE = Path(__file__).parent.parent / "data" / "console"


@dataclass(frozen=True)
class Event:
    seq: int
    time: float
    node: str
    name: str
    data: dict[str, Any]


class FakeNode(Node):
    """Knows the commands of the harness and a few of the tests'."""

    def __init__(self, lab: FakeLab, name: str, peer: str) -> None:
        end = LinkEnd("roce0", "roce", "roce0", "02:00:00:00:00:01", "10.77.0.1/24", "fd77::1/64",
                      4200, peer)  # fmt: skip
        super().__init__(name, Endpoint("192.0.2.1"), {"roce0": end}, deadlines=lab.deadlines)
        self._lab = lab
        self.state = "up"  # up | hung | dead | broken (its sshd alone)

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float = 60.0,
        check: bool = True,
        input: str | None = None,
    ) -> Result:
        own = self.deadline(timeout)
        self.pause(argv[0], own)
        if argv[:2] == ["sh", "-c"] and "kmsg" in argv[2] and self.state == "up":
            self._lab.print(self.name, argv[-1])
        elif argv[0] == "splat":
            self._lab.print(self.name, (CONSOLE / f"{argv[1]}.txt").read_text())
        elif argv[0] == "panic":
            self._lab.print(self.name, (CONSOLE / "oops-panic.txt").read_text())
            self._lab.event(self.name, "GUEST_PANICKED", action="pause")
            self.state = "hung"
        elif argv[0] == "hang":
            self.state = "hung"
        elif argv[0] == "poweroff":
            self._lab.event(self.name, "SHUTDOWN", guest=True, reason="guest-shutdown")
            self._lab.event(self.name, "QEMU_EXIT", status=0, asked=False)
            self.state = "dead"
        elif argv[0] == "false" and check:
            raise CommandFailed("false", node=self.name, seen="exit status 1")
        while self.state == "hung" or argv[0] == "sleep":
            self._wait(self.pause(argv[0], own))
        if self.state in ("dead", "broken"):
            raise NodeLost("the connection broke", node=self.name)
        return Result(tuple(argv), 0, "", "", 0.0)

    def _wait(self, seconds: float) -> None:
        import time

        time.sleep(min(seconds, 0.02))

    def answers(self, timeout: float = 5.0) -> bool:
        return self.state in ("up", "broken")


@dataclass
class FakeLab:
    """``journal`` lists what was done to it."""

    folder: Path
    name: str = "fake"
    tier: str = "stock"
    kernel: str = "7.3.4-fake"
    accelerator: str = "tcg"
    vcpus: int = 1
    mode: str = "fast"
    topology: Any = field(default_factory=lambda: SimpleNamespace(name="pair"))
    deadlines: Deadlines = field(default_factory=Deadlines)
    journal: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._events: list[Event] = []
        self.nodes = {
            "node0": FakeNode(self, "node0", "node1"),
            "node1": FakeNode(self, "node1", "node0"),
        }
        for name in self.nodes:
            self.print(name, "Linux version 7.3.4-fake")

    def print(self, node: str, text: str) -> None:
        with (self.folder / f"console-{node}.log").open("a") as file:
            file.write(text + "\n")

    def event(self, node: str, name: str, **data: Any) -> None:
        self._events.append(Event(len(self._events) + 1, 0.0, node, name, data))

    def events(self, since: int = 0) -> list[Event]:
        return [event for event in self._events if event.seq > since]

    def nmi(self, node: str) -> None:
        self._note(f"nmi {node}")
        self.print(node, "Kernel panic - not syncing: NMI: Not continuing")
        self.print(node, "RIP: 0010:faultpoint_hang+0x11/0x30 [faultpoint]")
        self.print(node, "---[ end Kernel panic - not syncing: NMI: Not continuing ]---")
        self.event(node, "GUEST_PANICKED", action="pause")

    def kill(self, node: str, number: int = signal.SIGKILL) -> None:
        self.nodes[node].state = "dead"
        self.event(node, "QEMU_EXIT", status=-number, asked=False)

    def restart(self, node: str) -> None:
        self._note(f"restart {node}")
        self.event(node, "QEMU_EXIT", status=-9, asked=True)
        self.nodes[node].state = "up"
        self.nodes[node].run(["true"])

    def capture_start(self, node: str, link: str, path: Path) -> str:
        path.write_bytes(b"pcap")
        return str(path)

    def capture_stop(self, capture: str) -> None:
        self._note("capture_stop")

    def down(self) -> None:
        self._note("down")

    def _note(self, text: str) -> None:
        self.journal.append(text)
        with (self.folder / "journal").open("a") as file:
            file.write(text + "\n")


class FakeSource:
    def __init__(self, directory: Path, error: Exception | None = None) -> None:
        self._directory = directory
        self._error = error

    def get(self, config: pytest.Config) -> tuple[LabLike, bool]:
        if self._error is not None:
            raise self._error
        folder = self._directory / "lab"
        folder.mkdir()
        boot = self._directory / "boot.txt"
        lab = FakeLab(folder)
        if boot.exists():
            lab.print("node0", boot.read_text())
        return lab, True

    def versions(self) -> dict[str, str]:
        return {"qemu": "11.1.3"}

    def allow_list(self) -> Path:
        path = self._directory / "splats.toml"
        path.touch()
        return path

    def results(self) -> Path:
        return self._directory / "results"
