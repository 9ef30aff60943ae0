# SPDX-License-Identifier: Apache-2.0
"""Connecting an endpoint through rdma_cm instead of the exchange over TCP.

The endpoint makes the queue pair as always; rdma_cm resolves addresses and carries the
exchange (queue pair numbers, PSNs, and in its private data what ``EndpointAddress`` says),
and gives the attributes that it agreed on, over which the profile's are laid. rdma_cm knows
RC and UD; there is no port space for UC.
"""

from __future__ import annotations

import contextlib
import ipaddress
import select
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

from rdmalab.errors import DeadlineExceeded, RdmalabError, UsageError
from rdmalab.rdma import gid as gids
from rdmalab.rdma.endpoint import (
    MTU_CODES,
    Endpoint,
    EndpointAddress,
    QpAddress,
    VerbsError,
    with_new_fd,
)
from rdmalab.rdma.exchange import VERSION
from rdmalab.rdma.gid import GidRule
from rdmalab.rdma.model import gid_text
from rdmalab.rdma.sysfs import DeviceFiles

T = TypeVar("T")

DEFAULT_PORT = 18516

# A connect request over RDMA_PS_TCP holds 56 bytes of private data, hence no JSON: magic,
# major and minor version, GID, MTU code, service, QP number, PSN, rkey, buffer, length.
_PRIVATE = struct.Struct("!2sBB16sBBIIIQQ")
_MAGIC = b"rl"
_SERVICES = ("RC", "UD")
_REJECT_BYTES = 136  # a reject over either port space holds as much


class CmConnection:
    """A connected endpoint's rdma_cm identifiers; ``remote`` describes the other end.

    Close it before the endpoint; use it as a context manager.
    """

    def __init__(self, remote: EndpointAddress, undo: contextlib.ExitStack) -> None:
        self.remote = remote
        self._undo = undo

    def __enter__(self) -> CmConnection:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._undo.close()


class _Channel:
    """An rdma_cm event channel whose waits have a deadline."""

    def __init__(self, undo: contextlib.ExitStack) -> None:
        from pyverbs.cmid import CMEventChannel

        self.events, self._fd = _cm(
            "create_event_channel", lambda: with_new_fd(CMEventChannel, "/dev/infiniband/rdma_cm")
        )
        undo.callback(self.events.close)

    def expect(self, wanted: int, deadline: float) -> Any:
        """The next event, which has to be ``wanted``; the caller acknowledges it."""
        from pyverbs.cmid import CMEvent

        left = max(0.0, deadline - time.monotonic())
        if not select.select([self._fd], [], [], left)[0]:
            raise DeadlineExceeded("rdma_cm: no event from the peer", todo="is the other end up?")
        event = _cm("get_cm_event", lambda: CMEvent(self.events))
        if event.event_type != wanted:
            seen = event.event_str()
            event.ack_cm_event()
            raise RdmalabError(
                "rdma_cm: the connection was not made",
                seen=seen,
                todo="check that the other end listens, with the same service and port",
            )
        return event

    def passed(self, wanted: int, deadline: float) -> None:
        self.expect(wanted, deadline).ack_cm_event()


def listen(endpoint: Endpoint, port: int = DEFAULT_PORT, *, seconds: float) -> CmConnection:
    """Waits at the endpoint's own address for one peer and connects it."""
    import pyverbs.cm_enums as ce
    from pyverbs.cmid import CMID, AddrInfo

    space = _port_space(endpoint)
    deadline = time.monotonic() + seconds
    with contextlib.ExitStack() as undo:
        channel = _Channel(undo)
        listener = _cm("create_id", lambda: CMID(creator=channel.events, port_space=space))
        undo.callback(listener.close)
        here = _cm(
            "getaddrinfo",
            lambda: AddrInfo(
                src=str(endpoint.gid.address),
                src_service=str(port),
                port_space=space,
                flags=ce.RAI_PASSIVE,
            ),
        )
        undo.callback(here.close)
        _cm(f"bind to {endpoint.gid.address} port {port}", lambda: listener.bind_addr(here))
        _same_device(listener, endpoint)
        _cm(f"listen on port {port}", lambda: listener.listen(1))
        event = channel.expect(ce.RDMA_CM_EVENT_CONNECT_REQUEST, deadline)
        private = event.private_data
        peer = _cm("take the request", lambda: CMID(creator=event, listen_id=listener))
        undo.callback(peer.close)
        event.ack_cm_event()
        try:
            remote = unpack(private)
            endpoint.agree(remote)
            remote = _to_rts(endpoint, peer, remote)
        except RdmalabError as error:
            reason = str(error).encode("ascii", "replace")[:_REJECT_BYTES]
            with contextlib.suppress(RdmalabError):
                _cm("reject", lambda: peer.reject(reason))
            raise
        _cm("accept", lambda: peer.accept(_parameters(endpoint)))
        if endpoint.profile.service == "RC":
            channel.passed(ce.RDMA_CM_EVENT_ESTABLISHED, deadline)
            undo.callback(_disconnect, peer)
        return CmConnection(remote, undo.pop_all())


def connect(
    endpoint: Endpoint, address: str, port: int = DEFAULT_PORT, *, seconds: float
) -> CmConnection:
    """Connects to the peer that listens at ``address``; a refusal is tried again until the
    deadline, since either end may be started first."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return _connect_once(endpoint, address, port, deadline)
        except _RefusedError as refused:
            if time.monotonic() + 0.2 > deadline:
                raise RdmalabError(
                    f"rdma_cm: no peer at {address} port {port}",
                    seen=f"{refused} for {seconds:g} s",
                ) from None
            time.sleep(0.2)


class _RefusedError(Exception):
    """Nobody listens there yet."""


def _connect_once(endpoint: Endpoint, address: str, port: int, deadline: float) -> CmConnection:
    import pyverbs.cm_enums as ce
    from pyverbs.cmid import CMID, AddrInfo, UDParam

    space = _port_space(endpoint)
    reliable = endpoint.profile.service == "RC"
    with contextlib.ExitStack() as undo:
        channel = _Channel(undo)
        cmid = _cm("create_id", lambda: CMID(creator=channel.events, port_space=space))
        undo.callback(cmid.close)
        there = _cm(
            "getaddrinfo",
            lambda: AddrInfo(
                src=str(endpoint.gid.address),
                dst=_numeric(address),
                dst_service=str(port),
                port_space=space,
            ),
        )
        undo.callback(there.close)
        left = max(1, int((deadline - time.monotonic()) * 1000))
        _cm(f"resolve {address}", lambda: cmid.resolve_addr(there, left))
        channel.passed(ce.RDMA_CM_EVENT_ADDR_RESOLVED, deadline)
        _same_device(cmid, endpoint)
        _cm(f"resolve the route to {address}", lambda: cmid.resolve_route(left))
        channel.passed(ce.RDMA_CM_EVENT_ROUTE_RESOLVED, deadline)
        _cm(f"connect to {address}", lambda: cmid.connect(_parameters(endpoint)))
        wanted = ce.RDMA_CM_EVENT_CONNECT_RESPONSE if reliable else ce.RDMA_CM_EVENT_ESTABLISHED
        event = _first_answer(channel, wanted, deadline)
        try:
            remote = unpack(event.private_data)
            if not reliable:
                given = UDParam(event)
                qp = QpAddress(given.qp_num, 0, given.qkey)
                remote = replace(remote, qps=(qp,))
        finally:
            event.ack_cm_event()
        endpoint.agree(remote)
        remote = _to_rts(endpoint, cmid, remote)
        if reliable:
            _cm("establish", cmid.establish)
            undo.callback(_disconnect, cmid)
        return CmConnection(remote, undo.pop_all())


def _first_answer(channel: _Channel, wanted: int, deadline: float) -> Any:
    """The answer to a request. Rejected without a reason means that nobody listens there."""
    import pyverbs.cm_enums as ce
    from pyverbs.cmid import CMEvent

    left = max(0.0, deadline - time.monotonic())
    if not select.select([channel._fd], [], [], left)[0]:
        raise DeadlineExceeded("rdma_cm: the peer did not answer", todo="is the other end up?")
    event = _cm("get_cm_event", lambda: CMEvent(channel.events))
    if event.event_type == wanted:
        return event
    kind, text = event.event_type, event.event_str()
    reason = ""
    if kind == ce.RDMA_CM_EVENT_REJECTED:
        reason = event.private_data.rstrip(b"\0").decode("ascii", "replace")
    event.ack_cm_event()
    if reason:
        raise RdmalabError("rdma_cm: the peer refused", seen=reason)
    if kind in (ce.RDMA_CM_EVENT_REJECTED, ce.RDMA_CM_EVENT_UNREACHABLE):
        raise _RefusedError(text)
    raise RdmalabError("rdma_cm: the connection was not made", seen=text)


def _to_rts(endpoint: Endpoint, cmid: Any, remote: EndpointAddress) -> EndpointAddress:
    """INIT, RTR and RTS with what rdma_cm agreed on, and the profile over it. Returns
    ``remote`` with the queue key that rdma_cm gives both ends of a UD pair."""
    import pyverbs.enums as e
    from pyverbs.qp import QPAttr

    profile, qp = endpoint.profile, endpoint.qps[0]
    attr, mask = _cm("init_qp_attr INIT", lambda: cmid.init_qp_attr(e.IBV_QPS_INIT))
    if profile.service == "UD":
        endpoint.modify(qp, attr, mask, "INIT")
        endpoint.add_handle(endpoint.handle_attr(remote.gid))
        endpoint.modify(qp, QPAttr(qp_state=e.IBV_QPS_RTR), e.IBV_QP_STATE, "RTR")
        endpoint.to_rts(0)
        return replace(remote, qps=(replace(remote.qps[0], qkey=attr.qkey),))
    attr.qp_access_flags = endpoint.qp_access()
    endpoint.modify(qp, attr, mask, "INIT")

    attr, mask = _cm("init_qp_attr RTR", lambda: cmid.init_qp_attr(e.IBV_QPS_RTR))
    # Which GID rdma_cm took is its own choice (by its default RoCE mode): hold it to ours.
    files = DeviceFiles(endpoint.device)
    chosen = gids.check(
        files.gids(profile.port),
        attr.ah_attr.sgid_index,
        GidRule(profile.gid_type, profile.gid_family, endpoint.gid.address),
        where=f"{endpoint.device} port {profile.port} (chosen by rdma_cm)",
    )
    handle = endpoint.handle_attr(attr.ah_attr.dgid)
    handle.sgid_index = chosen.index
    attr.ah_attr = handle
    attr.path_mtu = MTU_CODES[endpoint.path_mtu]
    attr.max_dest_rd_atomic = profile.max_dest_rd_atomic
    attr.min_rnr_timer = profile.rnr_timer
    mask |= e.IBV_QP_MAX_DEST_RD_ATOMIC | e.IBV_QP_MIN_RNR_TIMER
    endpoint.modify(qp, attr, mask, f"RTR towards QP {attr.dest_qp_num} of {remote.gid}")

    attr, mask = _cm("init_qp_attr RTS", lambda: cmid.init_qp_attr(e.IBV_QPS_RTS))
    attr.timeout = profile.timeout
    attr.retry_cnt = profile.retry_count
    attr.rnr_retry = profile.rnr_retry
    attr.max_rd_atomic = profile.max_rd_atomic
    mask |= e.IBV_QP_TIMEOUT | e.IBV_QP_RETRY_CNT | e.IBV_QP_RNR_RETRY | e.IBV_QP_MAX_QP_RD_ATOMIC
    endpoint.modify(qp, attr, mask, "RTS")
    return remote


def _parameters(endpoint: Endpoint) -> Any:
    from pyverbs.cmid import ConnParam

    profile = endpoint.profile
    data = pack(endpoint.local)
    parameters = ConnParam(
        resources=profile.max_dest_rd_atomic,
        depth=profile.max_rd_atomic,
        flow_control=0,
        retry=profile.retry_count,
        rnr_retry=profile.rnr_retry,
        srq=0,
        qp_num=endpoint.qps[0].qp_num,
        data_len=len(data),
    )
    parameters.set_private_data(data)
    return parameters


def pack(local: EndpointAddress) -> bytes:
    """An end of one queue pair as private data: its service is RC or UD."""
    qp = local.qps[0]
    return _PRIVATE.pack(
        _MAGIC,
        VERSION.major,
        VERSION.minor,
        ipaddress.IPv6Address(local.gid).packed,
        MTU_CODES[local.mtu],
        _SERVICES.index(local.service),
        qp.qp_num,
        qp.psn,
        local.rkey,
        local.buffer,
        local.length,
    )


def unpack(data: bytes) -> EndpointAddress:
    """What a peer's private data says (rdma_cm pads it with zeros); ``RdmalabError`` for
    what is no description and for another major version."""
    if len(data) < _PRIVATE.size or data[:2] != _MAGIC:
        raise RdmalabError(
            "rdma_cm: the peer sent no description of its end", seen=data[:16].hex(" ") or "nothing"
        )
    _, major, minor, gid, mtu, service, number, psn, rkey, buffer, length = _PRIVATE.unpack_from(
        data
    )
    if major != VERSION.major:
        raise RdmalabError(
            f"the peer speaks version {major}.{minor} of the exchange, we speak {VERSION}",
            todo="use one version of rdmalab on both nodes",
        )
    mtus = {code: value for value, code in MTU_CODES.items()}
    if mtu not in mtus or service >= len(_SERVICES):
        raise RdmalabError("rdma_cm: the peer's description is damaged", seen=data[:56].hex(" "))
    return EndpointAddress(
        service=_SERVICES[service],
        gid=gid_text(gid),
        mtu=mtus[mtu],
        buffer=buffer,
        length=length,
        rkey=rkey,
        qps=(QpAddress(number, psn, 0),),
    )


def _port_space(endpoint: Endpoint) -> int:
    import pyverbs.cm_enums as ce

    service = endpoint.profile.service
    if service not in _SERVICES:
        raise UsageError(
            f"rdma_cm has no port space for {service}", todo="use RC or UD, or exchange over TCP"
        )
    if len(endpoint.qps) != 1:
        raise UsageError(f"rdma_cm connects one queue pair, not {len(endpoint.qps)}")
    return int(ce.RDMA_PS_TCP if service == "RC" else ce.RDMA_PS_UDP)


def _same_device(cmid: Any, endpoint: Endpoint) -> None:
    if cmid.dev_name != endpoint.device or cmid.port_num != endpoint.profile.port:
        raise RdmalabError(
            f"rdma_cm routes over {cmid.dev_name} port {cmid.port_num}",
            seen=f"the endpoint is on {endpoint.device} port {endpoint.profile.port}",
            todo="name the address of that device's netdev",
        )


def _numeric(address: str) -> str:
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        raise UsageError(f"{address!r} is no IP address") from None


def _disconnect(cmid: Any) -> None:
    # The other end may have hung up first.
    with contextlib.suppress(RdmalabError):
        _cm("disconnect", cmid.disconnect)


def _cm(what: str, call: Callable[[], T]) -> T:
    from pyverbs.pyverbs_error import PyverbsError

    try:
        return call()
    except PyverbsError as error:
        raise VerbsError(f"rdma_cm refuses to {what}", seen=str(error)) from error
