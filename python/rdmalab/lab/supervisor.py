# SPDX-License-Identifier: Apache-2.0
"""The process that holds a lab: its QEMUs, their QMP monitors and a control socket.

``python -m rdmalab.lab.supervisor FOLDER`` runs the plan in FOLDER. Its standard input is
the leash: until the line "keep" has come, an end of file takes the lab down, so that an
``up`` that is interrupted or killed leaves nothing. The QEMUs get SIGKILL when this process
dies for whatever reason. All sockets are relative to FOLDER.

The control socket takes one JSON object a line, {"method": NAME, "params": {...}}, and
answers each with {"result": ...} or {"error": TEXT}.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qemu.qmp import QMPClient, QMPError

from rdmalab.lab.child import die_with_parent, last_line
from rdmalab.lab.plan import Plan, PlannedNode
from rdmalab.lab.qemu import SSH_PORT

CONTROL = "control.sock"
_PORT_TRIES = 5
_QMP_SECONDS = 20.0
_EVENTS_KEPT = 10_000
_CAPTURE_POLL = 1.0


def free_port() -> int:
    """A TCP port of loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class _Capture:
    node: str
    path: Path
    max_bytes: int


class _Failed(Exception):
    """A request that cannot be met; its text goes to the client."""


class _Guest:
    """One QEMU and its monitor."""

    def __init__(
        self,
        node: PlannedNode,
        env: dict[str, str],
        record: Callable[[str, str, dict[str, Any]], None],
    ) -> None:
        self.node = node
        self.port = 0
        self.state = "down"  # down | running | panicked | paused | lost | off
        self.started = 0.0
        self._env = env
        self._record = record
        self._process: asyncio.subprocess.Process | None = None
        self._qmp: QMPClient | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._ending = False

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    async def start(self) -> None:
        """Spawn QEMU; a port that was taken in between is replaced, unless it was asked for."""
        for attempt in range(_PORT_TRIES):
            self.port = self.node.ssh_port or self.port or free_port()
            try:
                await self._spawn()
                return
            except _Failed as error:
                taken = "host forwarding rule" in str(error)
                if not taken or self.node.ssh_port or attempt == _PORT_TRIES - 1:
                    if taken:
                        raise _Failed(f"TCP port {self.port} of 127.0.0.1 is taken") from error
                    raise
                self.port = 0

    async def _spawn(self) -> None:
        argv = [word.replace(SSH_PORT, str(self.port)) for word in self.node.argv]
        log = Path(f"qemu-{self.node.name}.log")
        self._ending = False
        self.started = time.time()
        with log.open("w") as out:
            self._process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self._env,
                preexec_fn=die_with_parent(),
            )
        qmp = QMPClient(self.node.name)
        deadline = time.monotonic() + _QMP_SECONDS
        while True:
            if self._process.returncode is not None:
                self.state = "lost"
                raise _Failed(f"{self.node.name}: QEMU ended at once: {last_line(log.read_text())}")
            try:
                await qmp.connect(f"qmp-{self.node.name}.sock")
                break
            except (QMPError, OSError):
                if time.monotonic() > deadline:
                    self._process.kill()
                    raise _Failed(f"{self.node.name}: QEMU's monitor did not answer") from None
                await asyncio.sleep(0.02)
        self._qmp = qmp
        self.state = "running"
        self._tasks = [
            asyncio.create_task(self._follow_events(qmp)),
            asyncio.create_task(self._follow_exit(self._process)),
        ]

    async def _follow_events(self, qmp: QMPClient) -> None:
        async for event in qmp.events:
            name = str(event["event"])
            found = event.get("data")
            data = dict(found) if isinstance(found, dict) else {}
            if name == "GUEST_PANICKED":
                self.state = "panicked"
            elif name == "RESET" and self.state == "panicked":
                self.state = "running"
            if name != "RTC_CHANGE":
                self._record(self.node.name, name, data)

    async def _follow_exit(self, process: asyncio.subprocess.Process) -> None:
        status = await process.wait()
        if self.state != "panicked":
            self.state = "off" if status == 0 and not self._ending else "lost"
        if self._ending:
            self.state = "down"
        self._record(self.node.name, "QEMU_EXIT", {"status": status, "asked": self._ending})

    async def execute(self, command: str, arguments: dict[str, Any] | None = None) -> Any:
        if self._qmp is None or self._process is None or self._process.returncode is not None:
            raise _Failed(f"{self.node.name}: its QEMU does not run")
        try:
            return await asyncio.wait_for(self._qmp.execute(command, arguments), _QMP_SECONDS)
        except (QMPError, OSError, TimeoutError) as error:
            raise _Failed(f"{self.node.name}: QMP {command}: {error}") from error

    async def stop(self) -> None:
        """End QEMU: at once, for a guest's state is of no worth."""
        self._ending = True
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        if self._qmp is not None:
            with contextlib.suppress(QMPError, OSError, EOFError, asyncio.CancelledError):
                await self._qmp.disconnect()
        for task in self._tasks:
            if not task.done():
                with contextlib.suppress(asyncio.TimeoutError, asyncio.CancelledError, Exception):
                    await asyncio.wait_for(task, 1.0)
        self._tasks = []
        self._qmp = None
        self.state = "down"


class Supervisor:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._began = time.time()
        self._events: list[dict[str, Any]] = []
        self._sequence = 0
        self._captures: dict[str, _Capture] = {}
        self._capture_number = 0
        self._done = asyncio.Event()
        env = {**os.environ, **plan.env}
        self._guests = {node.name: _Guest(node, env, self._record) for node in plan.nodes}
        self._methods: dict[str, Callable[..., Awaitable[Any]]] = {
            "status": self._status,
            "events": self._events_since,
            "nmi": self._nmi,
            "set_link": self._set_link,
            "restart": self._restart,
            "kill": self._kill,
            "capture_start": self._capture_start,
            "capture_stop": self._capture_stop,
            "down": self._down,
        }

    def _record(self, node: str, name: str, data: dict[str, Any]) -> None:
        self._sequence += 1
        event = {
            "seq": self._sequence, "time": time.time(), "node": node, "name": name, "data": data,
        }  # fmt: skip
        self._events.append(event)
        del self._events[:-_EVENTS_KEPT]

    def _guest(self, node: str) -> _Guest:
        if node not in self._guests:
            raise _Failed(f"no node is called {node!r}")
        return self._guests[node]

    # -- methods of the control socket ------------------------------------------------

    async def _status(self) -> dict[str, Any]:
        nodes = {
            name: {"state": g.state, "ssh_port": g.port, "pid": g.pid, "started": g.started}
            for name, g in self._guests.items()
        }
        return {"pid": os.getpid(), "began": self._began, "nodes": nodes}

    async def _events_since(self, since: int = 0) -> list[dict[str, Any]]:
        return [event for event in self._events if event["seq"] > since]

    async def _nmi(self, node: str) -> None:
        await self._guest(node).execute("inject-nmi")

    async def _set_link(self, node: str, link: str, up: bool) -> None:
        await self._guest(node).execute("set_link", {"name": link, "up": up})

    async def _restart(self, node: str) -> None:
        guest = self._guest(node)
        self._forget_captures(node)
        await guest.stop()
        await guest.start()

    async def _kill(self, node: str, signal: int) -> None:
        pid = self._guest(node).pid
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal)

    async def _capture_start(self, node: str, link: str, path: str, max_bytes: int) -> str:
        self._capture_number += 1
        name = f"capture{self._capture_number}"
        await self._guest(node).execute(
            "object-add", {"qom-type": "filter-dump", "id": name, "netdev": link, "file": path}
        )
        self._captures[name] = _Capture(node, Path(path), max_bytes)
        return name

    async def _capture_stop(self, capture: str) -> None:
        held = self._captures.pop(capture, None)
        if held is not None:
            with contextlib.suppress(_Failed):
                await self._guest(held.node).execute("object-del", {"id": capture})

    async def _down(self) -> None:
        self._done.set()

    def _forget_captures(self, node: str) -> None:
        for name in [n for n, c in self._captures.items() if c.node == node]:
            del self._captures[name]

    async def _bound_captures(self) -> None:
        """A capture that has reached its size is ended; the file stays."""
        while True:
            await asyncio.sleep(_CAPTURE_POLL)
            for name, capture in list(self._captures.items()):
                with contextlib.suppress(OSError):
                    if capture.path.stat().st_size > capture.max_bytes:
                        self._record(capture.node, "CAPTURE_FULL", {"path": str(capture.path)})
                        await self._capture_stop(name)

    # -- life --------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                answer: dict[str, Any]
                try:
                    request = json.loads(line)
                    method = self._methods[request["method"]]
                    answer = {"result": await method(**request.get("params", {}))}
                except _Failed as error:
                    answer = {"error": str(error)}
                except (ValueError, KeyError, TypeError) as error:
                    answer = {"error": f"no such request: {error!r}"}
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        except (ConnectionError, ValueError):
            pass  # the client went, or its line was longer than a line may be
        finally:
            writer.close()

    async def _hold_leash(self) -> None:
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        line = await reader.readline()
        if line.strip() != b"keep":
            self._done.set()

    async def run(self) -> int:
        """Hold the lab until it is told to go; 0, or 1 where a guest would not start."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._done.set)
        server = await asyncio.start_unix_server(self._serve, CONTROL)
        tasks = [
            asyncio.create_task(self._hold_leash()),
            asyncio.create_task(self._bound_captures()),
        ]
        status = 0
        try:
            for guest in self._guests.values():
                await guest.start()
            Path("started").write_text("ok\n")
            await self._done.wait()
        except _Failed as error:
            Path("started").write_text(f"failed {error}\n")
            status = 1
        finally:
            server.close()
            for guest in self._guests.values():
                await guest.stop()
            for task in tasks:
                task.cancel()
            Path(CONTROL).unlink(missing_ok=True)
        return status


def main() -> int:
    os.chdir(sys.argv[1])
    plan = Plan.read(Path("plan.json"))
    return asyncio.run(_run(plan))


async def _run(plan: Plan) -> int:
    return await Supervisor(plan).run()


if __name__ == "__main__":
    sys.exit(main())
