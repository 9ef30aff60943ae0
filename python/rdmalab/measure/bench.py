# SPDX-License-Identifier: Apache-2.0
"""Measures between two nodes: drives one process on each, alternates our tool with
perftest, and keeps a number only with its proof."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rdmalab import errors
from rdmalab.errors import DeadlineExceeded, NodeLost, RdmalabError, UsageError
from rdmalab.measure import perftest as reports
from rdmalab.measure.measurement import Measurement, Point
from rdmalab.measure.node import loops
from rdmalab.measure.node import perftest as tools
from rdmalab.measure.node.counters import Snapshot
from rdmalab.measure.node.request import INITIATOR, TARGET, Claim, Request, describe
from rdmalab.measure.proof import PERFTEST_CONTROL, Work, judge, kind_of, work_of
from rdmalab.probe.histogram import Histogram

DRIVER = "rdmalab.measure.node"
BASE_PORT = 18600
IDLE_S = 10.0
START_S = 120.0  # for Python to start and ship under emulation
_ENDING_S = 5.0
_SLOWEST = 1 << 20  # bytes per second below which a measurement is given up

#: Half a round trip is what perftest and everybody else quote for these.
_HALVED = ("send", "write", "write_imm")


class Lines(Protocol):
    def readline(self, timeout: float | None = None) -> str | None: ...


class Input(Protocol):
    def write(self, text: str, /) -> Any: ...
    def flush(self) -> Any: ...


class Process(Protocol):
    """What is used of lab.process.Process."""

    @property
    def stdin(self) -> Input: ...
    @property
    def stdout(self) -> Lines: ...
    def poll(self) -> int | None: ...
    def stop(self) -> None: ...
    def stderr(self) -> str: ...


class LinkEnd(Protocol):
    @property
    def link(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def netdev(self) -> str: ...
    @property
    def ipv4(self) -> str: ...
    @property
    def peer(self) -> str: ...


class Node(Protocol):
    """What is used of lab.node.Node."""

    @property
    def name(self) -> str: ...
    @property
    def links(self) -> Mapping[str, Any]: ...
    def popen_python(self, module: str, args: Sequence[str] = ()) -> Any: ...


class Probes(Protocol):
    """Probes on both nodes: ``start`` attaches, ``stop`` detaches and gives the histograms."""

    def covers(self, transport: str) -> bool: ...
    def start(self) -> None: ...
    def stop(self) -> Sequence[Histogram]: ...


Progress = Callable[[str], None]

#: the tool's name of our own measurement while eBPF probes are on the driver
PROBED = "probed"


@dataclass(frozen=True)
class Setting:
    """Where it is measured: what every row carries."""

    accelerator: str  # tcg | kvm | hardware
    vcpus: int
    kernel: str


@dataclass(frozen=True)
class Route:
    """Which addresses and devices a measurement uses, and the link that its proof is taken
    from; the initiator's first.

    ``addresses`` are the ends' IP addresses, ``netdevs`` the link's, ``devices`` the RDMA
    devices to open ("": the ones on the netdevs). The proof never follows ``devices`` and
    ``addresses``: work that went another way than over the link is found out.
    """

    link: str
    addresses: tuple[str, str]
    netdevs: tuple[str, str]
    devices: tuple[str, str] = ("", "")
    setup: bool = False  # whether a missing SoftRoCE device may be made

    def claim(self, end: int, transport: str) -> Claim:
        return Claim(transport, "", self.netdevs[end])


def route_between(from_: Node, to: Node, link: str = "", *, setup: bool = False) -> Route:
    """The route over ``link``, or over the only link that joins the two.

    Raises UsageError where there is no such link or several.
    """
    between = {name: end for name, end in from_.links.items() if end.peer == to.name}
    if from_.name == to.name:
        raise UsageError(f"--from and --to are both {to.name}", todo="name two nodes")
    if not between:
        raise UsageError(
            f"no link joins {from_.name} and {to.name}",
            seen=f"links of {from_.name}: {', '.join(from_.links) or 'none'}",
        )
    if link and link not in between:
        raise UsageError(
            f"link {link} does not join {from_.name} and {to.name}",
            todo=f"links that do: {', '.join(between)}",
        )
    if not link and len(between) > 1:
        raise UsageError(
            f"several links join {from_.name} and {to.name}",
            todo=f"name one with --link: {', '.join(between)}",
        )
    name = link or next(iter(between))
    ours, theirs = between[name], to.links[name]
    return Route(
        link=name,
        addresses=(_address(ours), _address(theirs)),
        netdevs=(ours.netdev, theirs.netdev),
        setup=setup,
    )


def _address(end: LinkEnd) -> str:
    return end.ipv4.partition("/")[0]


@dataclass
class _Round:
    """What both ends said of one request."""

    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    samples: dict[str, list[int]] = field(default_factory=dict)
    failures: dict[str, dict[str, Any]] = field(default_factory=dict)


class Pair:
    """The two driver processes. Use it as a context manager: both are ended at its end,
    whatever ended it."""

    def __init__(self, from_: Node, to: Node, route: Route, *, factor: float = 1.0) -> None:
        self.nodes = (from_, to)
        self.route = route
        self._factor = factor
        self._number = 0
        # Not one fixed port: a run that was killed a moment ago may hold it yet.
        self._port = BASE_PORT + 2 * random.randrange(200)
        self._stack = contextlib.ExitStack()
        self._processes: dict[str, Any] = {}

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def run(self, tool: str, point: Point, profile: Mapping[str, Any] | None = None) -> _Round:
        """One request to both ends; raises the error of the end that failed first by its
        own fault."""
        self._start()
        self._number += 1
        total = total_seconds(point) * self._factor
        for end, role in enumerate((INITIATOR, TARGET)):
            request = Request(
                number=self._number,
                tool=tool,
                role=role,
                node=self.nodes[end].name,
                point=point,
                device=self.route.devices[end],
                address=self.route.addresses[end],
                peer=self.route.addresses[1 - end],
                port=self._port,
                claim=self.route.claim(end, point.transport),
                profile=dict(profile or {}),
                idle_s=IDLE_S * self._factor,
                total_s=total,
                setup=self.route.setup,
            )
            self._write(role, json.dumps(request.to_json()))
        try:
            found = self._collect(point, total + 4 * START_S * self._factor)
        except BaseException:
            self._stop()
            raise
        if found.failures:
            # Its state is unknown; the next point starts afresh.
            self._stop()
            raise self._failure(tool, point, found)
        return found

    def _start(self) -> None:
        if self._processes:
            return
        try:
            for role, node in zip((INITIATOR, TARGET), self.nodes, strict=True):
                process = node.popen_python(DRIVER)
                self._stack.callback(process.stop)
                self._processes[role] = process
            until = time.monotonic() + START_S * self._factor
            for role in (INITIATOR, TARGET):
                self._read(role, until, "start of the driver")
        except BaseException:
            self._stop()
            raise

    def _stop(self) -> None:
        self._processes = {}
        self._stack.close()

    def _write(self, role: str, line: str) -> None:
        try:
            self._processes[role].stdin.write(line + "\n")
            self._processes[role].stdin.flush()
        except OSError as error:
            raise self._ended(role, "a wait for work") from error

    def _read(self, role: str, until: float, what: str) -> dict[str, Any]:
        """The next line of one end; TimeoutError when there is none yet."""
        node = self._node(role)
        line = self._processes[role].stdout.readline(max(0.05, until - time.monotonic()))
        if line is None:
            raise self._ended(role, what)
        try:
            message = json.loads(line)
        except ValueError:
            raise RdmalabError(
                "the driver printed what is no answer", node=node, seen=line[:120]
            ) from None
        if not isinstance(message, dict):
            raise RdmalabError("the driver printed what is no answer", node=node, seen=line[:120])
        return message

    def _collect(self, point: Point, seconds: float) -> _Round:
        """Both ends' answers, in whichever order they come. Once one end has failed the
        other has a moment to say why, and is not waited for longer."""
        found = _Round()
        until = time.monotonic() + seconds
        waiting = [INITIATOR, TARGET]
        while waiting:
            for role in tuple(waiting):
                try:
                    message = self._read(role, time.monotonic() + 0.2, "a measurement")
                except TimeoutError:
                    continue
                except NodeLost:
                    raise
                except RdmalabError as error:
                    # The process ended; what the other one saw is only a consequence.
                    raise error from None
                if message.get("number") != self._number:
                    continue
                if "samples_ns" in message:
                    found.samples.setdefault(role, []).extend(message["samples_ns"])
                    continue
                waiting.remove(role)
                if "error" in message:
                    found.failures[role] = message
                    until = min(until, time.monotonic() + IDLE_S * self._factor)
                else:
                    found.answers[role] = message["answer"]
            if waiting and time.monotonic() > until:
                if found.failures:
                    return found
                raise DeadlineExceeded(
                    f"no answer for {describe(point)}",
                    node=" and ".join(self._node(role) for role in waiting),
                    seen=f"deadline {seconds:.0f} s",
                    todo="see the node's console",
                )
        return found

    def _failure(self, tool: str, point: Point, found: _Round) -> RdmalabError:
        """The error of the end at fault: not the one that only saw its peer fail."""
        consequences = ("PeerError", "ExchangeError")
        role, message = min(
            found.failures.items(), key=lambda item: item[1].get("kind") in consequences
        )
        kind = getattr(errors, str(message.get("kind")), RdmalabError)
        error = kind(
            f"{tool} {describe(point)} failed", node=self._node(role), seen=str(message["error"])
        )
        assert isinstance(error, RdmalabError)
        error.exit_status = int(message.get("exit_status", 1))
        return error

    def _ended(self, role: str, what: str) -> RdmalabError:
        process = self._processes[role]
        # Its pipes close a moment before it can be waited for.
        until = time.monotonic() + _ENDING_S
        while (status := process.poll()) is None and time.monotonic() < until:
            time.sleep(0.05)
        said = process.stderr().strip().splitlines()
        return RdmalabError(
            f"the measuring process ended during {what}",
            node=self._node(role),
            seen=f"status {status}" + (f": {said[-1][:200]}" if said else ""),
        )

    def _node(self, role: str) -> str:
        return self.nodes[0 if role == INITIATOR else 1].name


def run(
    from_: Node,
    to: Node,
    points: Sequence[Point],
    *,
    setting: Setting,
    route: Route | None = None,
    alternations: int = 1,
    perftest: bool = False,
    probes: Probes | None = None,
    profile: Mapping[str, Any] | None = None,
    factor: float = 1.0,
    progress: Progress = lambda line: None,
    done: list[Measurement] | None = None,
) -> list[Measurement]:
    """All points in turn, ``alternations`` times, our tool and (where asked, and where it
    can) perftest in turn for each.

    With ``probes`` each RDMA point is measured once more with them on, as the tool
    "probed": what they cost stays out of the other numbers and is seen beside them.

    A point that nothing can measure is refused (UsageError) before anything is started. A
    measurement without proof is returned with its reason and without numbers. ``factor``
    stretches deadlines on a slow machine. ``done`` is the list to add to and return, for who
    wants what was measured before a failure. Raises RdmalabError (one line) when a point
    fails; nothing of ours is left running on the nodes then, nor after Ctrl-C.
    """
    for point in points:
        loops.refuse(point)
        kind_of(point.transport)
    if alternations < 1:
        raise UsageError(f"{alternations} rounds", todo="ask for one at least")
    where = route or route_between(from_, to)
    done = [] if done is None else done
    with Pair(from_, to, where, factor=factor) as pair:
        plans = []
        for point in points:
            plan = ["rdmalab"]
            if perftest and (why := tools.supports(point)):
                progress(f"{describe(point)}: without perftest: {why}")
            elif perftest:
                plan.append("perftest")
            if probes is not None and probes.covers(point.transport):
                plan.append(PROBED)
            plans.append((point, plan))
        for turn in range(alternations):
            # Rounds are outermost, so that transports alternate as tools do; who goes first
            # changes, so that a drift within a round favours neither.
            for point, plan in plans:
                for tool in plan if turn % 2 == 0 else plan[::-1]:
                    progress(f"{describe(point)}: {tool}, round {turn + 1} of {alternations}")
                    with _probing(probes if tool == PROBED else None) as gathered:
                        found = pair.run("rdmalab" if tool == PROBED else tool, point, profile)
                    one = measurement(
                        tool, point, where.link, (from_.name, to.name), setting, found
                    )
                    done.append(replace(one, histograms=tuple(gathered)))
                    if one.proof.verdict != "proven":
                        progress(f"{describe(point)}: refused: {one.proof.reason}")
    return done


@contextlib.contextmanager
def _probing(probes: Probes | None) -> Iterator[list[Histogram]]:
    gathered: list[Histogram] = []
    if probes is None:
        yield gathered
        return
    probes.start()
    try:
        yield gathered
    except BaseException:
        # What went wrong matters more than what the probes say of it.
        with contextlib.suppress(RdmalabError):
            probes.stop()
        raise
    gathered.extend(probes.stop())


def measurement(
    tool: str,
    point: Point,
    link: str,
    nodes: tuple[str, str],
    setting: Setting,
    found: _Round,
) -> Measurement:
    """What the two answers come to: numbers with their proof, or a refusal without."""
    ours, theirs = found.answers[INITIATOR], found.answers[TARGET]
    deltas = (Snapshot.from_json(ours["deltas"]), Snapshot.from_json(theirs["deltas"]))
    mtu = int(ours["mtu"]), int(theirs["mtu"])
    if tool == "perftest":
        work = _perftest_work(point, mtu)
        proof = judge(point, nodes, work, deltas, allowance=PERFTEST_CONTROL)
    else:
        sent, answered = (int(end["outcome"]["tx_messages"]) for end in (ours, theirs))
        proof = judge(point, nodes, work_of(point, mtu, sent, answered), deltas)
    plain = Measurement(
        tool=tool,
        point=point,
        link=link,
        nodes=nodes,
        accelerator=setting.accelerator,
        vcpus=setting.vcpus,
        kernel=setting.kernel,
        proof=proof,
        seconds=float(ours["seconds"]),
    )
    if proof.verdict != "proven":
        return plain
    if tool == "perftest":
        report = reports.parse(str(ours["output"]), point)
        return replace(plain, given_us=report.given_us, mib_s=report.mib_s)
    if point.kind == "latency":
        divisor = 2000.0 if point.op in _HALVED else 1000.0
        return replace(
            plain, samples_us=tuple(ns / divisor for ns in found.samples.get(INITIATOR, ()))
        )
    ends = [end["outcome"] for end in (ours, theirs) if int(end["outcome"]["bytes"])]
    carried = sum(int(end["bytes"]) for end in ends)
    slowest = max(int(end["elapsed_ns"]) for end in ends)
    return replace(plain, mib_s=carried / (1 << 20) / (slowest / 1e9))


def _perftest_work(point: Point, mtu: tuple[int, int]) -> Work:
    both = (
        point.direction == "two-way"
        if point.kind == "bandwidth"
        else point.op in ("send", "write", "write_imm")
    )
    sent = point.iterations * point.qps
    return work_of(point, mtu, sent, sent if both else 0)


def total_seconds(point: Point) -> float:
    """The deadline of one measurement on the reference machine: generous, since a hang ends
    at its idle deadline long before."""
    messages = (point.iterations + point.warmup) * point.qps
    return 120.0 + messages * (0.02 + 2 * point.size / _SLOWEST)
