# SPDX-License-Identifier: Apache-2.0
"""Probes on all nodes of a measurement, on the functions only while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rdmalab.probe.histogram import Histogram
from rdmalab.probe.session import ProbeSession, start_all

if TYPE_CHECKING:
    from rdmalab.lab.node import Node


class ProbeGroup:
    """One session a node. ``start`` and ``stop`` enclose one measurement each; between them
    the programs stay compiled but are attached nowhere, so that what runs there is
    undisturbed. A context manager, at whose end nothing is left on the nodes.
    """

    def __init__(self, nodes: Sequence[Node], probes: Sequence[str] = ()) -> None:
        """UsageError for an unknown probe; nothing is started."""
        self._sessions = [ProbeSession(node, probes) for node in nodes]
        self._running = False

    def __enter__(self) -> ProbeGroup:
        self.prepare()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prepare(self) -> None:
        """Compiles on all nodes at the same time and leaves the probes detached."""
        if self._running:
            return
        start_all(self._sessions)
        self._running = True
        for session in self._sessions:
            session.detach()

    def covers(self, transport: str) -> bool:
        """Whether these probes see anything of ``transport``: they are on RDMA drivers."""
        return transport != "tcp"

    def start(self) -> None:
        """Attaches with all counts at 0."""
        self.prepare()
        for session in self._sessions:
            session.clear()
            session.attach()

    def stop(self) -> list[Histogram]:
        """Detaches; what was counted since ``start``, of all nodes."""
        for session in self._sessions:
            session.detach()
        return [histogram for session in self._sessions for histogram in session.snapshot()]

    def close(self) -> None:
        """Ends the nodes' sides. Never raises; may be called again."""
        self._running = False
        for session in self._sessions:
            session.abandon()
