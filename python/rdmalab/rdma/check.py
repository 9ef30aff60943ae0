# SPDX-License-Identifier: Apache-2.0
"""Messages over queue pairs made from a profile, there and back, every byte compared.

The shortest proof that two nodes can talk RDMA with a profile, before anything is measured.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from rdmalab.errors import RdmalabError, UsageError
from rdmalab.rdma import cm, exchange
from rdmalab.rdma.endpoint import GRH_BYTES, Endpoint, EndpointAddress, device_with
from rdmalab.rdma.model import IpAddress
from rdmalab.rdma.profile import Profile


@dataclass(frozen=True)
class Plan:
    """What a check does; both ends need the same but for ``node``.

    ``size`` in bytes, ``messages`` each way on each queue pair, ``seconds`` the deadline of
    each step, ``via`` what carries the exchange: ``"tcp"`` or ``"cm"``.
    """

    node: str
    profile: Profile
    via: str = "tcp"
    port: int = exchange.DEFAULT_PORT
    size: int = 4096
    messages: int = 10
    qp_count: int = 1
    seconds: float = 30.0
    device: str | None = None
    gid_index: int | None = None


def serve(plan: Plan, address: IpAddress) -> dict[str, Any]:
    """Listens at ``address`` and answers the messages of one peer."""
    with ExitStack() as undo:
        endpoint = undo.enter_context(_endpoint(plan, address))
        if plan.via == "cm":
            link = undo.enter_context(cm.listen(endpoint, plan.port, seconds=plan.seconds))
            seconds = _answer(plan, endpoint, link.remote)
            return _report(plan, endpoint, link.remote, None, seconds)
        listener = undo.enter_context(exchange.Listener(str(address), plan.port))
        channel = undo.enter_context(listener.accept(plan.node, plan.seconds))
        return _over_tcp(plan, endpoint, channel, _answer)


def call(plan: Plan, peer: IpAddress) -> dict[str, Any]:
    """Sends the messages to the peer that serves at ``peer`` and compares its answers."""
    with ExitStack() as undo:
        endpoint = undo.enter_context(_endpoint(plan, _source_towards(peer)))
        if plan.via == "cm":
            link = undo.enter_context(
                cm.connect(endpoint, str(peer), plan.port, seconds=plan.seconds)
            )
            seconds = _ask(plan, endpoint, link.remote)
            return _report(plan, endpoint, link.remote, None, seconds)
        channel = undo.enter_context(
            exchange.connect(str(peer), plan.port, plan.node, plan.seconds)
        )
        return _over_tcp(plan, endpoint, channel, _ask)


def _over_tcp(
    plan: Plan,
    endpoint: Endpoint,
    channel: exchange.Channel,
    talk: Callable[[Plan, Endpoint, EndpointAddress], float],
) -> dict[str, Any]:
    remote = EndpointAddress.from_json(channel.exchange(endpoint.local.to_json()))
    endpoint.connect(remote)
    # Nobody sends before both are ready: what comes to a UC or UD queue pair that is not is
    # lost for good.
    channel.barrier("ready")
    seconds = talk(plan, endpoint, remote)
    channel.barrier("done")
    return _report(plan, endpoint, remote, channel.peer, seconds)


def _endpoint(plan: Plan, address: IpAddress) -> Endpoint:
    """An endpoint whose receives are posted (so in INIT)."""
    if plan.messages > plan.profile.recv_depth:
        raise UsageError(
            f"{plan.messages} messages do not fit recv_depth = {plan.profile.recv_depth}"
        )
    # The listener knows its own address, the caller the one that routes to the peer: with a
    # GID index of the user's choice that entry is held to the same address.
    endpoint = Endpoint(
        plan.device or device_with(address),
        plan.profile,
        address=address,
        gid_index=plan.gid_index,
        buffer_bytes=2 * _slot(plan),
        qp_count=plan.qp_count,
    )
    with contextlib.ExitStack() as undo:
        undo.callback(endpoint.close)
        if plan.profile.service == "UD" and plan.size > endpoint.active_mtu:
            raise UsageError(
                f"a UD message of {plan.size} bytes does not fit one packet",
                todo=f"at most the active MTU, {endpoint.active_mtu}",
            )
        endpoint.to_init()
        for index in range(plan.qp_count):
            for _ in range(plan.messages):
                _post_receive(plan, endpoint, index)
        undo.pop_all()
    return endpoint


def _slot(plan: Plan) -> int:
    """Bytes of the receive half of the buffer; the send half is as large."""
    return plan.size + GRH_BYTES


def _answer(plan: Plan, endpoint: Endpoint, remote: EndpointAddress) -> float:
    return _talk(plan, endpoint, remote, asks=False)


def _ask(plan: Plan, endpoint: Endpoint, remote: EndpointAddress) -> float:
    return _talk(plan, endpoint, remote, asks=True)


def _talk(plan: Plan, endpoint: Endpoint, remote: EndpointAddress, *, asks: bool) -> float:
    """Strictly by turns, so that one buffer serves; returns the seconds it took."""
    start = time.monotonic()
    for number in range(plan.messages):
        for index in range(plan.qp_count):
            if asks:
                _send(plan, endpoint, remote, index, _pattern(plan, number, index, asks=True))
            [got] = endpoint.completions(endpoint.recv_cq, 1, seconds=plan.seconds)
            _compare(plan, endpoint, got, _pattern(plan, number, index, asks=not asks))
            if not asks:
                _send(plan, endpoint, remote, index, _pattern(plan, number, index, asks=False))
    return time.monotonic() - start


def _pattern(plan: Plan, number: int, index: int, *, asks: bool) -> bytes:
    """Bytes that differ by message, queue pair and direction."""
    start = 7 * number + 31 * index + (128 if asks else 0)
    period = bytes((start + step) % 251 for step in range(251))
    return (period * (plan.size // 251 + 1))[: plan.size]


def _post_receive(plan: Plan, endpoint: Endpoint, index: int) -> None:
    from pyverbs.wr import SGE, RecvWR

    entry = SGE(endpoint.mr.buf, _slot(plan), endpoint.mr.lkey)
    endpoint.qps[index].post_recv(RecvWR(num_sge=1, sg=[entry]))


def _send(plan: Plan, endpoint: Endpoint, remote: EndpointAddress, index: int, data: bytes) -> None:
    import pyverbs.enums as e
    from pyverbs.wr import SGE, SendWR

    offset = _slot(plan)
    endpoint.mr.write(data, len(data), offset)
    entry = SGE(endpoint.mr.buf + offset, len(data), endpoint.mr.lkey)
    work = SendWR(opcode=e.IBV_WR_SEND, num_sge=1, sg=[entry], send_flags=e.IBV_SEND_SIGNALED)
    if plan.profile.service == "UD":
        work.set_wr_ud(endpoint.handles[index], remote.qps[index].qp_num, remote.qps[index].qkey)
    endpoint.qps[index].post_send(work)
    endpoint.completions(endpoint.send_cq, 1, seconds=plan.seconds)


def _compare(plan: Plan, endpoint: Endpoint, completion: Any, expected: bytes) -> None:
    grh = GRH_BYTES if plan.profile.service == "UD" else 0
    got = endpoint.mr.read(plan.size, grh)
    if completion.byte_len != plan.size + grh or got != expected:
        wrong = next((n for n, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b), -1)
        raise RdmalabError(
            f"a message on {endpoint.device} arrived changed",
            seen=f"{completion.byte_len - grh} of {plan.size} bytes, first wrong one at {wrong}",
        )


def _report(
    plan: Plan, endpoint: Endpoint, remote: EndpointAddress, peer: str | None, seconds: float
) -> dict[str, Any]:
    return {
        "node": plan.node,
        "peer": peer,
        "via": plan.via,
        "device": endpoint.device,
        "service": plan.profile.service,
        "cq_mode": plan.profile.cq_mode,
        "gid": {
            "index": endpoint.gid.index,
            "type": endpoint.gid.type,
            "address": str(endpoint.gid.address),
        },
        "peer_gid": remote.gid,
        "path_mtu": endpoint.path_mtu,
        "size": plan.size,
        "messages": plan.messages * plan.qp_count,
        "qps": [qp.qp_num for qp in endpoint.qps],
        "peer_qps": [qp.qp_num for qp in remote.qps],
        "qp_pointers": len(set(endpoint.qp_pointers())),
        "handle_pointers": len(set(endpoint.handle_pointers())),
        "seconds": round(seconds, 6),
    }


def _source_towards(peer: IpAddress) -> IpAddress:
    """The address this host would send from, by its routing table; nothing is sent."""
    family = socket.AF_INET if peer.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(peer), 9))
            return ipaddress.ip_address(probe.getsockname()[0])
    except OSError as error:
        raise RdmalabError(f"no route to {peer}", seen=error.strerror or str(error)) from None
