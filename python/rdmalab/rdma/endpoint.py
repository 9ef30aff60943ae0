# SPDX-License-Identifier: Apache-2.0
"""One end of a connection: device, protection domain, queues, queue pairs and memory.

Every attribute of a queue pair is set here in the open, with the mask that goes with it;
what pyverbs would fill in by itself is not used.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from rdmalab.errors import DeadlineExceeded, RdmalabError, UsageError
from rdmalab.rdma import gid as gids
from rdmalab.rdma import native
from rdmalab.rdma.exchange import ExchangeError
from rdmalab.rdma.model import Gid, IpAddress, gid_address, gid_text
from rdmalab.rdma.profile import MTUS, Profile
from rdmalab.rdma.sysfs import DeviceFiles, device_names

T = TypeVar("T")

MTU_CODES = {256: 1, 512: 2, 1024: 3, 2048: 4, 4096: 5}
_MTU_OF_CODE = {code: mtu for mtu, code in MTU_CODES.items()}

# Any key will do between two ends that tell each other theirs; the top bit would make it a
# privileged one.
_QKEY = 0x11111111

GRH_BYTES = 40  # before the payload of every datagram received by a UD queue pair


class VerbsError(RdmalabError):
    """A verb was refused; the line names it, the device and the attributes."""


@dataclass(frozen=True)
class QpAddress:
    """What the peer must know of one queue pair."""

    qp_num: int
    psn: int
    qkey: int  # 0 but for UD


@dataclass(frozen=True)
class EndpointAddress:
    """What the peer must know of an end: sent over the exchange as JSON.

    ``mtu`` is the port's active MTU in bytes; ``buffer``, ``length`` and ``rkey`` are the
    registered memory for writes, reads and atomics.
    """

    service: str
    gid: str
    mtu: int
    buffer: int
    length: int
    rkey: int
    qps: tuple[QpAddress, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "endpoint",
            "service": self.service,
            "gid": self.gid,
            "mtu": self.mtu,
            "buffer": self.buffer,
            "length": self.length,
            "rkey": self.rkey,
            "qps": [[qp.qp_num, qp.psn, qp.qkey] for qp in self.qps],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> EndpointAddress:
        """Checks everything, since it comes from a peer; raises ``ExchangeError``."""
        try:
            if data["kind"] != "endpoint" or data["service"] not in ("RC", "UC", "UD"):
                raise ValueError(f"kind {data['kind']!r}, service {data['service']!r}")
            mtu = _unsigned(data["mtu"], 16)
            if mtu not in MTUS:
                raise ValueError(f"mtu {mtu}")
            if not isinstance(data["gid"], str):  # an integer would do for ipaddress
                raise ValueError(f"gid {data['gid']!r}")
            return cls(
                service=data["service"],
                gid=gid_text(data["gid"]),
                mtu=mtu,
                buffer=_unsigned(data["buffer"], 64),
                length=_unsigned(data["length"], 63),
                rkey=_unsigned(data["rkey"], 32),
                qps=tuple(
                    QpAddress(_unsigned(number, 24), _unsigned(psn, 24), _unsigned(qkey, 32))
                    for number, psn, qkey in data["qps"]
                ),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ExchangeError(
                "the peer described no endpoint", seen=f"{type(error).__name__}: {error}"[:120]
            ) from None


def _unsigned(value: object, bits: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << bits:
        raise ValueError(f"{value!r} is no unsigned {bits}-bit integer")
    return value


class NoDevice(RdmalabError):
    """Every device was looked at, and none is there."""


def device_on(netdev: str) -> str:
    """The RDMA device whose port is on ``netdev``; ``NoDevice`` when there is none."""
    for name in device_names():
        files = DeviceFiles(name)
        for port in files.ports():
            if any(gid.netdev == netdev for gid in files.gids(port)):
                return name
    raise NoDevice(
        f"no RDMA device on netdev {netdev}",
        seen=f"devices: {', '.join(device_names()) or 'none'}",
        todo="set SoftRoCE up there first",
    )


def device_with(address: IpAddress) -> str:
    """The RDMA device that has a GID of ``address``; ``RdmalabError`` when none has."""
    for name in device_names():
        files = DeviceFiles(name)
        for port in files.ports():
            if any(gid.address == address for gid in files.gids(port)):
                return name
    raise RdmalabError(
        f"no RDMA device has address {address}",
        seen=f"devices: {', '.join(device_names()) or 'none'}",
    )


class Endpoint:
    """Context, protection domain, completion queues, queue pairs and registered memory.

    Attributes are pyverbs objects: ``context``, ``pd``, ``send_cq`` and ``recv_cq`` (one
    object when made with ``separate_cqs=False``; in event mode each has a completion channel
    of its own, because pyverbs cannot take an event of one queue from a channel of two),
    ``qps``, ``mr`` (``mr.buf``, ``mr.lkey``, ``mr.rkey``). ``gid`` is the local GID,
    ``path_mtu`` the one in use in bytes (0 before ``connect``), ``handles`` the address
    handles of the remote queue pairs (UD only). ``close`` goes in reverse order; use it as a
    context manager.
    """

    def __init__(
        self,
        device: str,
        profile: Profile,
        *,
        address: IpAddress | None = None,
        gid_index: int | None = None,
        buffer_bytes: int = 4096,
        qp_count: int = 1,
        separate_cqs: bool = True,
    ) -> None:
        """Everything up to queue pairs in state RESET.

        The local GID is the one of the profile's type and family with ``address``, or
        ``gid_index`` if that entry is such a one. Raises ``GidError``, ``UsageError`` for
        what the device does not allow, ``VerbsError`` for a refused verb.
        """
        import pyverbs.enums as e
        from pyverbs.cq import CQ, CompChannel
        from pyverbs.device import Context
        from pyverbs.mr import MR
        from pyverbs.pd import PD

        self.device = device
        self.profile = profile
        self.path_mtu = 0
        self.handles: list[Any] = []
        self._undo = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            # First what needs no device, so that a wrong GID says so before anything else.
            self.gid = self._local_gid(address, gid_index)
            self.context = self._verb("open", lambda: Context(name=device))
            undo.callback(self.context.close)
            self._check_limits(qp_count, separate_cqs)
            self.pd = self._verb("alloc_pd", lambda: PD(self.context))
            undo.callback(self.pd.close)
            self._channels: dict[int, tuple[Any, int]] = {}

            def completion_queue(entries: int) -> Any:
                channel, descriptor = None, -1
                if profile.cq_mode == "event":
                    channel, descriptor = self._verb(
                        "create_comp_channel",
                        lambda: with_new_fd(
                            lambda: CompChannel(self.context), "anon_inode:[infinibandevent]"
                        ),
                    )
                    undo.callback(channel.close)
                cq = self._verb(
                    f"create_cq of {entries}", lambda: CQ(self.context, entries, None, channel, 0)
                )
                undo.callback(cq.close)
                if channel is not None:
                    self._channels[id(cq)] = channel, descriptor
                return cq

            sends, receives = profile.send_depth * qp_count, profile.recv_depth * qp_count
            self.send_cq = completion_queue(sends if separate_cqs else sends + receives)
            self.recv_cq = completion_queue(receives) if separate_cqs else self.send_cq
            access = (
                e.IBV_ACCESS_LOCAL_WRITE
                | e.IBV_ACCESS_REMOTE_WRITE
                | e.IBV_ACCESS_REMOTE_READ
                | e.IBV_ACCESS_REMOTE_ATOMIC
            )
            self.mr = self._verb(
                f"reg_mr of {buffer_bytes}", lambda: MR(self.pd, buffer_bytes, access)
            )
            undo.callback(self.mr.close)
            self.qps: list[Any] = []
            for _ in range(qp_count):
                qp = self._create_qp()
                undo.callback(qp.close)
                self.qps.append(qp)
            self._undo = undo.pop_all()
        self._buffer_bytes = buffer_bytes
        self._psns = [secrets.randbelow(1 << 24) for _ in self.qps]

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Frees everything in reverse order; a second call does nothing."""
        self._undo.close()

    @property
    def local(self) -> EndpointAddress:
        """What to send to the peer."""
        qkey = _QKEY if self.profile.service == "UD" else 0
        return EndpointAddress(
            service=self.profile.service,
            gid=self.gid.gid,
            mtu=self.active_mtu,
            buffer=self.mr.buf,
            length=self._buffer_bytes,
            rkey=self.mr.rkey,
            qps=tuple(
                QpAddress(qp.qp_num, psn, qkey)
                for qp, psn in zip(self.qps, self._psns, strict=True)
            ),
        )

    def qp_pointers(self) -> tuple[int, ...]:
        """``struct ibv_qp *`` of each queue pair; valid until ``close``."""
        return tuple(native.qp_pointer(qp, context=self.context, pd=self.pd) for qp in self.qps)

    def handle_pointers(self) -> tuple[int, ...]:
        """``struct ibv_ah *`` towards each remote queue pair (UD, after ``connect``)."""
        return tuple(native.ah_pointer(ah, context=self.context, pd=self.pd) for ah in self.handles)

    def connect(self, remote: EndpointAddress) -> None:
        """Takes every queue pair through INIT, RTR and RTS towards its remote one."""
        self.agree(remote)
        self.to_init()
        for index, peer in enumerate(remote.qps):
            self.to_rtr(index, peer, remote.gid)
            self.to_rts(index)

    def agree(self, remote: EndpointAddress) -> None:
        """Checks that the two ends fit and sets ``path_mtu``; raises ``RdmalabError`` naming
        both values where they do not."""
        if remote.service != self.profile.service:
            raise RdmalabError(
                f"the peer's queue pairs are {remote.service}, ours {self.profile.service}",
                todo="use one profile on both nodes",
            )
        if len(remote.qps) != len(self.qps):
            raise RdmalabError(
                f"the peer has {len(remote.qps)} queue pairs, we have {len(self.qps)}"
            )
        theirs, ours = gid_address(remote.gid), self.gid.address
        if theirs.version != ours.version:
            raise RdmalabError(
                f"the peer's GID is of {theirs}, ours of {ours}",
                todo="use one address family on both nodes",
            )
        smaller = min(remote.mtu, self.active_mtu)
        self.path_mtu = self.profile.path_mtu or smaller
        if self.path_mtu > smaller:
            raise UsageError(
                f"path_mtu {self.path_mtu} does not fit",
                seen=f"active MTU {self.active_mtu} here, {remote.mtu} at the peer",
                todo='use path_mtu = "active" or raise the MTU of both netdevs',
            )

    def to_init(self) -> None:
        """RESET to INIT, after which receives may be posted."""
        import pyverbs.enums as e
        from pyverbs.qp import QPAttr

        mask = e.IBV_QP_STATE | e.IBV_QP_PKEY_INDEX | e.IBV_QP_PORT
        for qp in self.qps:
            attr = QPAttr(qp_state=e.IBV_QPS_INIT, port_num=self.profile.port)
            attr.pkey_index = self.profile.pkey_index
            if self.profile.service == "UD":
                attr.qkey = _QKEY
                kind = e.IBV_QP_QKEY
            else:
                attr.qp_access_flags = self.qp_access()
                kind = e.IBV_QP_ACCESS_FLAGS
            self.modify(qp, attr, mask | kind, "INIT")

    def to_rtr(self, index: int, peer: QpAddress, gid: str) -> None:
        """INIT to RTR towards the peer's queue pair; for UD also its address handle."""
        import pyverbs.enums as e
        from pyverbs.qp import QPAttr

        profile = self.profile
        attr = QPAttr(qp_state=e.IBV_QPS_RTR)
        mask = e.IBV_QP_STATE
        if profile.service == "UD":
            self.add_handle(self.handle_attr(gid))
        else:
            attr.ah_attr = self.handle_attr(gid)
            attr.path_mtu = MTU_CODES[self.path_mtu]
            attr.dest_qp_num = peer.qp_num
            attr.rq_psn = peer.psn
            mask |= e.IBV_QP_AV | e.IBV_QP_PATH_MTU | e.IBV_QP_DEST_QPN | e.IBV_QP_RQ_PSN
        if profile.service == "RC":
            attr.max_dest_rd_atomic = profile.max_dest_rd_atomic
            attr.min_rnr_timer = profile.rnr_timer
            mask |= e.IBV_QP_MAX_DEST_RD_ATOMIC | e.IBV_QP_MIN_RNR_TIMER
        self.modify(self.qps[index], attr, mask, f"RTR towards QP {peer.qp_num} of {gid}")

    def to_rts(self, index: int) -> None:
        """RTR to RTS, after which sends may be posted."""
        import pyverbs.enums as e
        from pyverbs.qp import QPAttr

        profile = self.profile
        attr = QPAttr(qp_state=e.IBV_QPS_RTS)
        attr.sq_psn = self._psns[index]
        mask = e.IBV_QP_STATE | e.IBV_QP_SQ_PSN
        if profile.service == "RC":
            attr.timeout = profile.timeout
            attr.retry_cnt = profile.retry_count
            attr.rnr_retry = profile.rnr_retry
            attr.max_rd_atomic = profile.max_rd_atomic
            mask |= (
                e.IBV_QP_TIMEOUT
                | e.IBV_QP_RETRY_CNT
                | e.IBV_QP_RNR_RETRY
                | e.IBV_QP_MAX_QP_RD_ATOMIC
            )
        self.modify(self.qps[index], attr, mask, "RTS")

    def qp_access(self) -> int:
        """What a peer may do to our memory through a connected queue pair."""
        import pyverbs.enums as e

        access = e.IBV_ACCESS_REMOTE_WRITE
        if self.profile.service == "RC":
            access |= e.IBV_ACCESS_REMOTE_READ | e.IBV_ACCESS_REMOTE_ATOMIC
        return int(access)

    def handle_attr(self, gid: str) -> Any:
        """A ``pyverbs.addr.AHAttr`` from our GID to ``gid`` with the profile's traffic
        class, flow label, hop limit and service level."""
        from pyverbs.addr import GID, AHAttr, GlobalRoute

        route = GlobalRoute(
            dgid=GID(gid_text(gid)),
            sgid_index=self.gid.index,
            flow_label=self.profile.flow_label,
            hop_limit=self.profile.hop_limit,
            traffic_class=self.profile.traffic_class,
        )
        return AHAttr(
            is_global=1, gr=route, port_num=self.profile.port, sl=self.profile.service_level
        )

    def add_handle(self, attr: Any) -> None:
        """Makes the address handle of the next remote queue pair (UD)."""
        from pyverbs.addr import AH

        handle = self._verb("create_ah", lambda: AH(self.pd, attr=attr))
        self._undo.callback(handle.close)
        self.handles.append(handle)

    def modify(self, qp: Any, attr: Any, mask: int, what: str) -> None:
        """``ibv_modify_qp``; ``VerbsError`` names ``what`` it was for."""
        self._verb(f"modify_qp {qp.qp_num} to {what}", lambda: qp.modify(attr, mask))

    def completions(self, cq: Any, count: int, *, seconds: float) -> list[Any]:
        """The next ``count`` work completions of ``cq`` (``pyverbs.cq.WC``), all of status
        success.

        Sleeps on the completion channel in event mode, yields the CPU when polling. Raises
        ``VerbsError`` naming the first bad status, ``DeadlineExceeded`` after ``seconds``.
        """
        import pyverbs.enums as e

        deadline = time.monotonic() + seconds
        channel, descriptor = self._channels.get(id(cq), (None, -1))
        armed = False
        done: list[Any] = []
        while True:
            _, found = cq.poll(count - len(done))
            for completion in found:
                if completion.status != e.IBV_WC_SUCCESS:
                    raise VerbsError(
                        f"a work request on {self.device} failed",
                        seen=f"QP {completion.qp_num}: {_status_name(completion.status)}",
                    )
            done += found
            if len(done) == count:
                return done
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(
                    f"{len(done)} of {count} completions on {self.device}",
                    seen=f"deadline {seconds:g} s",
                )
            if channel is None:
                os.sched_yield()
            elif not armed:
                # Poll once more before sleeping: what came before the request for an event
                # raises none.
                cq.req_notify()
                armed = True
            elif select.select([descriptor], [], [], left)[0]:
                channel.get_cq_event(cq)
                cq.ack_events(1)
                armed = False

    @property
    def active_mtu(self) -> int:
        """Of our port, in bytes."""
        port = self._verb("query_port", lambda: self.context.query_port(self.profile.port))
        return _MTU_OF_CODE[port.active_mtu]

    def _local_gid(self, address: IpAddress | None, index: int | None) -> Gid:
        port = self.profile.port
        files = DeviceFiles(self.device)
        if self.device not in device_names():
            raise RdmalabError(
                f"no RDMA device {self.device}",
                seen=f"devices: {', '.join(device_names()) or 'none'}",
            )
        if port not in files.ports():
            raise UsageError(f"{self.device} has no port {port}")
        rule = gids.GidRule(self.profile.gid_type, self.profile.gid_family, address)
        table, where = files.gids(port), f"{self.device} port {port}"
        if index is not None:
            return gids.check(table, index, rule, where=where)
        return gids.resolve(table, rule, where=where)

    def _check_limits(self, qp_count: int, separate_cqs: bool) -> None:
        profile = self.profile
        limits = self._verb("query_device", self.context.query_device)
        sends, receives = profile.send_depth * qp_count, profile.recv_depth * qp_count
        entries = max(sends, receives) if separate_cqs else sends + receives
        for what, asked, allowed in (
            ("queue pairs", qp_count, limits.max_qp),
            ("send_depth", profile.send_depth, limits.max_qp_wr),
            ("recv_depth", profile.recv_depth, limits.max_qp_wr),
            ("completion queue entries (depth times queue pairs)", entries, limits.max_cqe),
            ("max_sge", profile.max_sge, limits.max_sge),
            ("max_rd_atomic", profile.max_rd_atomic, limits.max_qp_init_rd_atom),
            ("max_dest_rd_atomic", profile.max_dest_rd_atomic, limits.max_qp_rd_atom),
        ):
            if asked > allowed:
                raise UsageError(
                    f"{self.device} does not allow {what} = {asked}", todo=f"at most {allowed}"
                )

    def _create_qp(self) -> Any:
        import pyverbs.enums as e
        from pyverbs.qp import QP, QPCap, QPInitAttr

        profile = self.profile
        types = {"RC": e.IBV_QPT_RC, "UC": e.IBV_QPT_UC, "UD": e.IBV_QPT_UD}
        capacity = QPCap(
            max_send_wr=profile.send_depth,
            max_recv_wr=profile.recv_depth,
            max_send_sge=profile.max_sge,
            max_recv_sge=profile.max_sge,
            max_inline_data=profile.inline,
        )
        init = QPInitAttr(
            qp_type=types[profile.service],
            scq=self.send_cq,
            rcq=self.recv_cq,
            cap=capacity,
            sq_sig_all=0,
        )
        return self._verb(
            f"create_qp {profile.service} of {profile.send_depth} sends, {profile.recv_depth} "
            f"receives, {profile.max_sge} sge, {profile.inline} B inline",
            lambda: QP(self.pd, init),
        )

    def _verb(self, what: str, call: Callable[[], T]) -> T:
        from pyverbs.pyverbs_error import PyverbsError

        try:
            return call()
        except PyverbsError as error:
            raise VerbsError(f"{self.device} refuses {what}", seen=str(error)) from error


def _status_name(status: int) -> str:
    import pyverbs.enums as e

    # Opcodes are named IBV_WC_ as well, but only statuses end so.
    names = (name for name in dir(e) if name.startswith("IBV_WC_") and name.endswith("_ERR"))
    return next((name for name in names if getattr(e, name) == status), f"status {status}")


def with_new_fd(make: Callable[[], T], target: str) -> tuple[T, int]:
    """What ``make`` returns, and the file descriptor on ``target`` that it opened, which
    pyverbs keeps to itself and without which no wait has a deadline. No other thread may
    open the like meanwhile."""
    before = _open_files()
    made = make()
    new = [fd for fd, link in _open_files().items() if before.get(fd) != link and target in link]
    if len(new) != 1:
        raise RdmalabError(f"cannot find the descriptor of {target}", seen=f"new ones: {new}")
    return made, new[0]


def _open_files() -> dict[int, str]:
    found = {}
    for path in list(Path("/proc/self/fd").iterdir()):
        # The one that listed the folder is closed by now.
        with contextlib.suppress(OSError):
            found[int(path.name)] = str(path.readlink())
    return found
