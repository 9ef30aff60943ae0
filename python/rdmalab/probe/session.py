# SPDX-License-Identifier: Apache-2.0
"""Probes on a node, from here: started once, then read for each measurement."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

from rdmalab.errors import DeadlineExceeded, HostError, RdmalabError, UsageError
from rdmalab.probe.catalogue import select
from rdmalab.probe.histogram import Histogram

if TYPE_CHECKING:
    from rdmalab.lab.node import Node, Process

READY_SECONDS = 120.0
"""To import bcc, compile and attach on the reference machine, with a cold page cache."""

ANSWER_SECONDS = 20.0
"""For one command."""


class ProbeSession:
    """Probes on one node; a context manager from ``start`` to ``stop``.

    Compiling takes seconds, so one session serves a whole sweep: ``clear`` before each
    measurement, ``snapshot`` behind it. ``probes`` are names of the catalogue, none: all.
    """

    def __init__(self, node: Node, probes: Sequence[str] = ()) -> None:
        """UsageError for a name that the catalogue does not have; nothing is started."""
        self._node = node
        self._probes = tuple(probe.name for probe in select(probes))
        self._process: Process | None = None

    @property
    def node(self) -> str:
        """The node's name."""
        return self._node.name

    def __enter__(self) -> ProbeSession:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.stop()
        else:
            self.abandon()

    def launch(self) -> None:
        """Starts the node's side and does not wait: two nodes compile at the same time."""
        if self._process is None:
            self._process = self._node.popen_python(
                "rdmalab.probe",
                ["run", "--json", "--node", self._node.name, "--probes", ",".join(self._probes)],
            )

    def start(self) -> None:
        """Waits until the probes are attached, launching them if need be.

        Raises HostError where the node lacks what they need, DeadlineExceeded, NodeLost.
        """
        self.launch()
        try:
            self._expect("ready", READY_SECONDS)
        except BaseException:
            self.abandon()
            raise

    def clear(self) -> None:
        """All counts to 0."""
        self._command("clear", "cleared")

    def snapshot(self) -> list[Histogram]:
        """The counts since the start or the last ``clear``; what is missing says why."""
        self._send("snapshot")
        return self._histograms()

    def detach(self) -> None:
        """Takes the probes off the functions and keeps the programs and counts."""
        self._command("detach", "detached")

    def attach(self) -> None:
        """Puts them back; nothing happens where they are on."""
        self._command("attach", "attached")

    def stop(self) -> list[Histogram]:
        """Takes the probes off and ends the node's side; the last counts."""
        if self._process is None:
            return []
        try:
            self._send("")
            histograms = self._histograms()
            self._process.wait(ANSWER_SECONDS)
        finally:
            self.abandon()
        return histograms

    def abandon(self) -> None:
        """Ends the node's side at once, without asking for the counts. Never raises; the
        kernel takes the probes off when their process is gone."""
        process, self._process = self._process, None
        if process is not None:
            process.stop()

    def _command(self, command: str, answer: str) -> None:
        self._send(command)
        self._expect(answer, ANSWER_SECONDS)

    def _send(self, line: str) -> None:
        if self._process is None:
            raise UsageError("the probes are not running", node=self._node.name)
        # A process that is gone has said why: the answer that is missing tells of it.
        with suppress(OSError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def _expect(self, answer: str, seconds: float) -> None:
        line = self._line(answer, seconds)
        if line != answer:
            raise RdmalabError(
                f"the probes did not answer {answer}", node=self._node.name, seen=line[:200]
            )

    def _histograms(self) -> list[Histogram]:
        line = self._line("the histograms", ANSWER_SECONDS)
        try:
            return [Histogram.from_json(each) for each in json.loads(line)["histograms"]]
        except (ValueError, KeyError, TypeError) as error:
            raise RdmalabError(
                "the probes' answer is no histograms",
                node=self._node.name,
                seen=f"{line[:100]} ({error})",
            ) from error

    def _line(self, what: str, seconds: float) -> str:
        assert self._process is not None
        limit = seconds * self._node.deadlines.factor
        try:
            line = self._process.stdout.readline(limit)
        except TimeoutError:
            raise DeadlineExceeded(
                f"waiting for the probes: no {what}",
                node=self._node.name,
                seen=f"the deadline of {limit:g} s passed",
                todo="see what the node is busy with",
            ) from None
        if line is None:
            raise self._ended()
        return line

    def _ended(self) -> RdmalabError:
        assert self._process is not None
        status = self._process.wait(ANSWER_SECONDS).status
        said = self._process.stderr().strip().splitlines()
        kind = {2: UsageError, 4: HostError}.get(status, RdmalabError)
        return kind(
            "the probes ended",
            node=self._node.name,
            seen=said[-1] if said else f"status {status}, nothing on stderr",
        )


def start_all(sessions: Sequence[ProbeSession]) -> None:
    """Starts several sessions at the same time; where one fails all are ended."""
    try:
        for session in sessions:
            session.launch()
        for session in sessions:
            session.start()
    except BaseException:
        for session in sessions:
            session.abandon()
        raise
