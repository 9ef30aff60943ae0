# SPDX-License-Identifier: Apache-2.0
"""Runs points at one end, one after another, in one process.

Importing Python's and pyverbs' modules takes seconds in an emulated guest, so the process
stays: each line of stdin is a request (request.py), each line of stdout its answer.

A point, at both ends alike::

    target listens, initiator connects          exchange.Channel
    queue pairs or sockets made, described      exchange
    receives posted, buffers filled             barrier "ready"
    counters taken                              barrier "counted"
    the work
    both have ended                             barrier "done"
    counters taken
    memory checked                              exchange of verdicts

An end that fails says why on the channel and closes it; the other sees that at its next
step, or within a watchdog's tick while it is in its loop.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rdmalab.errors import RdmalabError
from rdmalab.measure.node import loops, perftest
from rdmalab.measure.node.counters import Snapshot, send_mss, take
from rdmalab.measure.node.request import INITIATOR, Request
from rdmalab.rdma.exchange import Channel, ExchangeError

SETUP_S = 60.0  # a step of the exchange: making queue pairs under emulation takes seconds


@dataclass(frozen=True)
class Answer:
    """What one end says of a point.

    ``outcome`` is a loop's (``None`` for perftest, whose ``output`` is its text), ``deltas``
    the counters' over the work, ``mtu`` the RDMA path MTU or TCP's segment size in bytes.
    """

    number: int
    role: str
    mtu: int
    seconds: float
    deltas: dict[str, Any]
    outcome: dict[str, Any] | None
    output: str


class Connection:
    """A channel to the other end and the socket beneath it, whose segments are counted."""

    def __init__(self, request: Request) -> None:
        if request.role == INITIATOR:
            self.socket = _connect(request.peer, request.port, SETUP_S)
        else:
            self.socket = _accept(request.address, request.port, SETUP_S)
        self.channel = Channel(self.socket, request.node, SETUP_S)

    def step(self, name: str, body: dict[str, Any] | None = None, seconds: float = SETUP_S) -> Any:
        """Both ends come to step ``name`` and tell each other ``body``."""
        self.channel.send({"kind": name, "body": body or {}})
        theirs = self.channel.receive(seconds=seconds)
        if theirs.get("kind") == "failed":
            raise PeerError(f"the peer failed: {theirs.get('why')}")
        if theirs.get("kind") != name:
            raise ExchangeError(
                f"the peer is not at {name}", seen=f"it sent {json.dumps(theirs)[:120]}"
            )
        return theirs.get("body")

    def gone(self) -> bool:
        """Whether the peer has closed the connection; takes nothing from it."""
        look = select.poll()
        look.register(self.socket, select.POLLRDHUP)
        return bool(look.poll(0))

    def fail(self, why: str) -> None:
        """Tells the peer, who may be gone."""
        with contextlib.suppress(RdmalabError):
            self.channel.send({"kind": "failed", "why": why[:400]}, seconds=1.0)


class PeerError(RdmalabError):
    """The other end could not go on; its own answer says why."""


class Driver:
    """Serves one request after another; remembers the RDMA device of each netdev, since
    reading GID tables takes long under emulation."""

    def __init__(self) -> None:
        self._devices: dict[str, str] = {}

    def run(self, request: Request) -> Answer:
        """One point. Raises RdmalabError: one line."""
        loops.refuse(request.point)
        request = self._resolve(request)
        connection = Connection(request)
        with connection.channel:
            try:
                if request.tool == "perftest":
                    return _run_perftest(request, connection)
                if request.point.transport == "tcp":
                    return _run_tcp(request, connection)
                return _run_verbs(request, connection)
            except PeerError:
                raise
            except RdmalabError as error:
                connection.fail(str(error))
                raise
            except BaseException as error:
                connection.fail(f"{type(error).__name__}: {error}")
                raise

    def _resolve(self, request: Request) -> Request:
        """The request with its devices named."""
        claim = request.claim
        if not claim.device:
            claim = replace(claim, device=self._device(request, claim.netdev))
        return replace(request, claim=claim, device=request.device or claim.device)

    def _device(self, request: Request, netdev: str) -> str:
        """The RDMA device on ``netdev``; "" where there is none and TCP needs none."""
        if netdev in self._devices:
            return self._devices[netdev]
        from rdmalab.rdma.endpoint import NoDevice, device_on

        try:
            device = device_on(netdev)
        except NoDevice:
            # Any other error is one: a device that cannot be read is still TCP's rival.
            if request.point.transport == "tcp":
                return ""
            if not request.setup or request.point.transport != "rxe":
                raise
            from rdmalab.rdma import softroce

            device = softroce.setup(netdev, seconds=SETUP_S).device
            print(f"set up {device}", file=sys.stderr, flush=True)
        self._devices[netdev] = device
        return device


def _run_verbs(request: Request, connection: Connection) -> Answer:
    from rdmalab.rdma.endpoint import Endpoint, EndpointAddress

    point = request.point
    initiator = request.role == INITIATOR
    slots = loops.layout(point)
    profile = _profile(request, slots)
    with Endpoint(
        request.device,
        profile,
        address=ipaddress.ip_address(request.address),
        buffer_bytes=max(4096, slots.qp_bytes * point.qps),
        qp_count=point.qps,
    ) as endpoint:
        theirs = EndpointAddress.from_json(connection.step("endpoint", endpoint.local.to_json()))
        endpoint.connect(theirs)
        loops.refuse(point, mtu=endpoint.path_mtu)
        handles = endpoint.handle_pointers() or (None,) * point.qps
        mr = endpoint.mr
        loop = loops.VerbsLoop(
            point,
            initiator,
            [
                loops.VerbsQp(
                    qp=pointer,
                    handle=handle,
                    remote_qpn=peer.qp_num,
                    remote_qkey=peer.qkey,
                    remote_addr=theirs.buffer + index * slots.qp_bytes,
                    rkey=theirs.rkey,
                    base=mr.buf + index * slots.qp_bytes,
                    lkey=mr.lkey,
                )
                for index, (pointer, handle, peer) in enumerate(
                    zip(endpoint.qp_pointers(), handles, theirs.qps, strict=True)
                )
            ],
            mtu=endpoint.path_mtu,
            inline=profile.inline,
            idle_s=request.idle_s,
            total_s=request.total_s,
            control_fd=connection.socket.fileno(),
        )
        loop.prepare()
        outcome, deltas, seconds = _counted(request, connection, loop.run)
        loop.check()
        connection.step("checked")
        return Answer(
            request.number,
            request.role,
            endpoint.path_mtu,
            seconds,
            deltas.to_json(),
            asdict(outcome),
            "",
        )


def _run_tcp(request: Request, connection: Connection) -> Answer:
    point = request.point
    with contextlib.ExitStack() as stack:
        data = [stack.enter_context(one) for one in _data_sockets(request, connection)]
        loop = loops.TcpLoop(
            point,
            request.role == INITIATOR,
            [one.fileno() for one in data],
            idle_s=request.idle_s,
            total_s=request.total_s,
            control_fd=connection.socket.fileno(),
        )
        outcome, deltas, seconds = _counted(request, connection, loop.run, data)
        connection.step("checked")
        mss = min(send_mss(one) for one in data)
        return Answer(
            request.number, request.role, mss, seconds, deltas.to_json(), asdict(outcome), ""
        )


def _run_perftest(request: Request, connection: Connection) -> Answer:
    from rdmalab.rdma import gid as gids
    from rdmalab.rdma.sysfs import DeviceFiles

    profile = _profile(request, loops.layout(request.point))
    rule = gids.GidRule(profile.gid_type, profile.gid_family, ipaddress.ip_address(request.address))
    table = DeviceFiles(request.device).gids(profile.port)
    gid = gids.resolve(table, rule, where=f"{request.device} port {profile.port}")
    active = _active_mtu(request.device, profile.port)
    theirs = connection.step("perftest", {"mtu": active})
    mtu = profile.path_mtu or min(active, int(theirs["mtu"]))
    initiator = request.role == INITIATOR
    port = request.port + 1
    argv = perftest.command(
        request.point,
        device=request.device,
        gid_index=gid.index,
        mtu=mtu,
        port=port,
        inline=profile.inline,
        peer=request.peer if initiator else "",
    )

    def work() -> str:
        with contextlib.ExitStack() as stack:
            if not initiator:
                server = stack.enter_context(perftest.Run(argv, port))
                server.wait_listening(SETUP_S)
                connection.step("listening")
                return server.finish(request.total_s, connection.gone)
            connection.step("listening", seconds=2 * SETUP_S)
            client = stack.enter_context(perftest.Run(argv, port))
            return client.finish(request.total_s, connection.gone)

    output, deltas, seconds = _counted(request, connection, work)
    return Answer(request.number, request.role, mtu, seconds, deltas.to_json(), None, output)


def _counted(
    request: Request,
    connection: Connection,
    work: Callable[[], Any],
    data: Sequence[socket.socket] = (),
) -> tuple[Any, Snapshot, float]:
    """The work between two snapshots that lie before its start and after its end at both
    ends; its result, the deltas and its wall time in seconds."""
    connection.step("ready")
    before = take(request.claim, connection.socket, data)
    connection.step("counted")
    start = time.monotonic()
    result = work()
    seconds = time.monotonic() - start
    # A passive target waits here for as long as the initiator works.
    connection.step("done", seconds=request.total_s + SETUP_S)
    return result, take(request.claim, connection.socket, data).since(before), seconds


def _profile(request: Request, slots: loops.Layout) -> Any:
    """The request's profile with the queues the loop needs, and perftest's RNR handling: a
    receiver that is slow for a moment must not stop a stream (deadlines are ours)."""
    from rdmalab.rdma import profile as profiles

    point = request.point
    settings: dict[str, object] = {
        "rnr_timer": 12,
        "rnr_retry": 7,
        **request.profile,
        "service": point.service,
        "cq_mode": point.mode,
        "send_depth": slots.send_depth,
        "recv_depth": slots.recv_depth,
    }
    return profiles.override(profiles.load("default"), settings)


def _active_mtu(device: str, port: int) -> int:
    """The port's active MTU in bytes, from verbs."""
    from pyverbs.device import Context

    context = Context(name=device)
    try:
        return 128 << int(context.query_port(port).active_mtu)
    finally:
        context.close()


def _accept(address: str, port: int, seconds: float) -> socket.socket:
    with _listener(address, port) as listener:
        return _accept_one(listener, seconds)


def _listener(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=64)
    except OSError as error:
        raise ExchangeError(
            f"cannot listen on {address} port {port}",
            seen=error.strerror or str(error),
            todo="use another --port or end what holds it",
        ) from None


def _accept_one(listener: socket.socket, seconds: float) -> socket.socket:
    listener.settimeout(seconds)
    try:
        connection, _ = listener.accept()
    except TimeoutError:
        raise ExchangeError(
            f"no peer connected to port {listener.getsockname()[1]}",
            seen=f"deadline {seconds:g} s",
        ) from None
    return connection


def _connect(address: str, port: int, seconds: float) -> socket.socket:
    """A refused connection is tried again: either end may come first."""
    until = time.monotonic() + seconds
    seen = ""
    while (left := until - time.monotonic()) > 0:
        try:
            return socket.create_connection((address, port), timeout=left)
        except OSError as error:
            seen = error.strerror or str(error)
            time.sleep(0.05)
    raise ExchangeError(f"no peer at {address} port {port}", seen=f"{seen}, for {seconds:g} s")


def _data_sockets(request: Request, connection: Connection) -> Iterator[socket.socket]:
    """One connection per "queue pair", beside the exchange's. ``step`` follows each, so that
    they come in order."""
    count = request.point.qps
    if request.role == INITIATOR:
        port = int(connection.step("sockets")["port"])
        for _ in range(count):
            yield _blocking(_connect(request.peer, port, SETUP_S))
            connection.step("socket")
        return
    with _listener(request.address, 0) as listener:
        connection.step("sockets", {"port": listener.getsockname()[1]})
        for _ in range(count):
            yield _blocking(_accept_one(listener, SETUP_S))
            connection.step("socket")


def _blocking(one: socket.socket) -> socket.socket:
    # Python makes a socket with a timeout non-blocking beneath.
    one.settimeout(None)
    return one
