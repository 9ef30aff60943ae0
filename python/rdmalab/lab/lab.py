# SPDX-License-Identifier: Apache-2.0
"""A lab: the nodes and links of a topology that are up."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from rdmalab.errors import (
    CommandFailed,
    DeadlineExceeded,
    HostError,
    NodeLost,
    RdmalabError,
    UsageError,
)
from rdmalab.lab import (
    accel,
    disk,
    image,
    initramfs,
    inventory,
    kernel,
    module,
    native,
    plugin,
    qemu,
    topology,
)
from rdmalab.lab.child import last_line, python
from rdmalab.lab.console import ConsoleFile
from rdmalab.lab.deadline import Deadlines, Layers, slow_factor
from rdmalab.lab.identity import Identity, Nic
from rdmalab.lab.node import Endpoint, LinkEnd, Node, NodePanicked
from rdmalab.lab.paths import Paths
from rdmalab.lab.plan import Plan, PlannedLink, PlannedNode
from rdmalab.lab.progress import Progress
from rdmalab.lab.run import LabFacts
from rdmalab.lab.supervisor import CONTROL
from rdmalab.lab.sysroot import Sysroot

MODES = ("fast", "full")
DEFAULT_NAME = "default"
_NAME = re.compile(r"[a-z][a-z0-9-]{0,30}")
_REQUEST_SECONDS = 60.0
CAPTURE_BYTES = 64 << 20
_BANNER_SECONDS = 0.5
_BANNER_PAUSE = 0.05
_READY_SECONDS = 10.0
_WATCH_PAUSE = 0.5
#: where a guest finds the modules of kernel/
GUEST_MODULES = "/run/rdmalab/modules"


@dataclass(frozen=True)
class LabSpec:
    """What is asked of ``up``. ``memory_mib`` of each node; ``ssh_port`` of the first node,
    the others follow, 0 for any free one."""

    name: str = DEFAULT_NAME
    topology: str = "pair"
    kernel: str = "stock"
    mode: str = "fast"
    accel: str = "auto"
    vcpus: int = 1
    memory_mib: int = 1024
    ssh_port: int = 0
    instructions: bool = False

    def __post_init__(self) -> None:
        _check_name(self.name)
        if self.mode not in MODES:
            raise UsageError(
                f"no mode is called {self.mode!r}", todo=f"choose one of {', '.join(MODES)}"
            )
        if not 1 <= self.vcpus <= 64:
            raise UsageError(f"{self.vcpus} vCPUs", todo="give 1 to 64")
        if not 256 <= self.memory_mib <= 1 << 20:
            raise UsageError(f"{self.memory_mib} MiB of memory", todo="give 256 or more")
        if self.ssh_port and not 1 <= self.ssh_port <= 65000:
            raise UsageError(f"port {self.ssh_port}", todo="give 1 to 65000")


@dataclass(frozen=True)
class Event:
    """A QMP event of a node's QEMU, or QEMU_EXIT {"status", "asked"} of ours. ``time`` in
    seconds since the epoch; ``seq`` counts from 1 on."""

    seq: int
    time: float
    node: str
    name: str
    data: dict[str, Any]


@dataclass(frozen=True)
class NodeStatus:
    state: str
    ssh_port: int
    pid: int
    started: float


class _Control:
    """The client's end of a supervisor's control socket. One request a connection."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _connect(self) -> socket.socket:
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(_REQUEST_SECONDS)
        # By way of a descriptor of the folder: its path may be longer than an address.
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            client.connect(f"/proc/self/fd/{folder}/{CONTROL}")
        except BaseException:
            client.close()
            raise
        finally:
            os.close(folder)
        return client

    def request(self, method: str, **params: Any) -> Any:
        """Raises NodeLost where no supervisor answers, CommandFailed with its refusal."""
        name = self._folder.name
        try:
            with self._connect() as client, client.makefile("rwb") as stream:
                line = json.dumps({"method": method, "params": params})
                stream.write(line.encode() + b"\n")
                stream.flush()
                answer = json.loads(stream.readline() or b"null")
        except (OSError, ValueError) as error:
            raise NodeLost(
                f"the supervisor of lab {name} does not answer",
                seen=str(error),
                todo=f"rdmalab down --name {name}, then up again",
            ) from error
        if answer is None:
            raise NodeLost(f"the supervisor of lab {name} ended in the middle of {method}")
        if "error" in answer:
            raise CommandFailed(f"lab {name} refused {method}", seen=answer["error"])
        return answer["result"]


def _lock_soon(descriptor: int) -> None:
    """Lock exclusively. Whoever looks whether a lab is up holds the lock for a moment."""
    for _ in range(100):
        with contextlib.suppress(OSError):
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(0.02)
    return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _check_name(name: str) -> str:
    """``name``, which becomes a folder's. Raises UsageError for what could be another's."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot name a lab", todo="use lower-case letters, digits and -")
    return name


def _alive(folder: Path) -> bool:
    """Whether a supervisor holds ``folder`` (it holds a lock there as long as it lives)."""
    try:
        with (folder / "lock").open("r") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return True
    except OSError:
        return False
    return False


def _end(folder: Path) -> None:
    """Tell a supervisor to end, and wait until it has. One that does not is killed, and the
    kernel takes its QEMUs along. Raises NodeLost where even that does not help."""
    with contextlib.suppress(RdmalabError):
        _Control(folder).request("down")
    for grace, signal_number in ((_REQUEST_SECONDS, signal.SIGKILL), (10.0, 0)):
        until = time.monotonic() + grace
        while _alive(folder):
            if time.monotonic() > until:
                break
            time.sleep(0.05)
        else:
            return
        pid = _supervisor_pid(folder)
        if pid and signal_number:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal_number)
    raise NodeLost(
        f"the supervisor of lab {folder.name} does not end", todo=f"end what holds {folder}/lock"
    )


def _supervisor_pid(folder: Path) -> int:
    """The process that holds ``folder``; 0 where the number is another's by now."""
    try:
        pid = int((folder / "supervisor.pid").read_text())
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except (OSError, ValueError):
        return 0
    return pid if "rdmalab.lab.supervisor" in words and str(folder) in words else 0


@contextlib.contextmanager
def _sole_up(labs: Path, name: str) -> Iterator[None]:
    """One ``up`` of a name at a time, from its first look to its end."""
    labs.mkdir(parents=True, exist_ok=True)
    with (labs / f".{name}.up").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(
                f"lab {name} is being booted by another command", todo="give --name another"
            ) from None
        yield


def _has_banner(port: int) -> bool:
    """Whether an sshd speaks behind QEMU's forwarded port. QEMU accepts at once and repeats
    its own SYN to a guest that is not there yet at ever longer intervals, so that one
    patient connection would sit out a boot; many short ones do not."""
    try:
        with socket.create_connection(("127.0.0.1", port), _BANNER_SECONDS) as client:
            return client.recv(4) == b"SSH-"
    except OSError:
        return False


class Lab:
    """A lab that is up. ``up`` boots one, ``attach`` finds one."""

    def __init__(self, paths: Paths, plan: Plan, folder: Path, shape: topology.Topology) -> None:
        self.name = plan.lab
        self.plan = plan
        self.folder = folder
        self.topology = shape
        self.tier = plan.tier
        self.kernel = plan.release
        self.accelerator = plan.accelerator
        self.vcpus = plan.vcpus
        self.mode = plan.mode
        self._paths = paths
        self._control = _Control(folder)
        self._leash: IO[bytes] | None = None
        self._supervisor: subprocess.Popen[bytes] | None = None
        self.deadlines = Deadlines(1.0)
        self.boot_seconds = 0.0
        self.nodes: dict[str, Node] = {}
        self._native: list[Path] = []
        self._began = 0.0

    # -- finding and making --------------------------------------------------------------

    @classmethod
    def up(cls, spec: LabSpec, progress: Progress | None = None, paths: Paths | None = None) -> Lab:
        """Build what is missing, boot the nodes, wait for ssh on all of them.

        The lab goes down with this process until ``keep`` is called. Raises UsageError,
        HostError, NodeLost, DeadlineExceeded; then nothing is left running.
        """
        paths = paths or Paths.find()
        progress = progress or Progress()
        shape = topology.read(paths.vm / "topologies", spec.topology)
        sysroot = Sysroot(paths)
        kernel.check_tier(sysroot, spec.kernel)
        accel.check(spec.accel)
        with _sole_up(paths.labs, spec.name):
            return cls._up(spec, shape, sysroot, progress)

    @classmethod
    def _up(
        cls, spec: LabSpec, shape: topology.Topology, sysroot: Sysroot, progress: Progress
    ) -> Lab:
        paths = sysroot.paths
        folder = paths.labs / spec.name
        if _alive(folder):
            raise UsageError(
                f"lab {spec.name} is up already",
                todo=f"rdmalab down --name {spec.name}, or give --name another",
            )
        sysroot.ensure(progress)
        chosen = kernel.ensure(sysroot, spec.kernel, progress)
        accelerator = accel.choose(spec.accel, sysroot.qemu(), sysroot.qemu_env())
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        plan = _prepare(spec, shape, sysroot, chosen, accelerator, folder, progress)
        plan.write(folder / "plan.json")
        # A copy: a file of the user's may change, or be named from another folder.
        shutil.copy(
            topology.file_of(paths.vm / "topologies", spec.topology), folder / f"{shape.name}.toml"
        )
        shared = native.ensure(sysroot, progress)
        lab = cls(paths, plan, folder, shape)
        title = f"boot {len(shape.nodes)} nodes ({spec.kernel}, {spec.mode}, {accelerator.name})"
        try:
            with progress.step(title):
                lab._start()
                lab._reach(shared)
                lab._await_ssh()
                lab._put_modules(lab.nodes)
        except BaseException:
            lab.down()
            raise
        lab._write_files()
        return lab

    @classmethod
    def attach(cls, name: str = DEFAULT_NAME, paths: Paths | None = None) -> Lab:
        """The lab ``name``. Raises UsageError where it is not up."""
        paths = paths or Paths.find()
        folder = paths.labs / _check_name(name)
        if not _alive(folder) or not (folder / "state.json").exists():
            up = names(paths)
            raise UsageError(
                f"lab {name} is not up",
                seen=f"up: {', '.join(up) or 'none'}",
                todo=f"rdmalab up --name {name}",
            )
        plan = Plan.read(folder / "plan.json")
        shape = topology.read(folder, plan.topology)
        lab = cls(paths, plan, folder, shape)
        state = json.loads((folder / "state.json").read_text())
        lab.boot_seconds = state["boot_seconds"]
        lab.deadlines = Deadlines(state["slow_factor"])
        lab._reach([Path(p) for p in state["native"]])
        return lab

    # -- what a lab can do -----------------------------------------------------------------

    @property
    def slow_factor(self) -> float:
        return self.deadlines.factor

    @property
    def _boot_deadline(self) -> float:
        """Seconds from QEMU's start to ssh on the reference machine; systemd takes longer."""
        return Layers().boot * (3 if self.mode == "full" or self.plan.instructions else 1)

    def facts(self) -> LabFacts:
        """What a run notes of the lab."""
        return LabFacts(
            name=self.name,
            tier=self.tier,
            kernel=self.kernel,
            accelerator=self.accelerator,
            vcpus=self.vcpus,
            mode=self.mode,
            topology=self.topology.name,
            slow_factor=self.slow_factor,
            nodes=tuple(self.nodes),
        )

    def versions(self) -> dict[str, str]:
        """The versions that were resolved, for a run to note."""
        lock = Sysroot(self._paths).lock()
        kernels = {f"kernel-{tier}": locked.version for tier, locked in lock.kernels.items()}
        return {**lock.packages, **kernels}

    def status(self) -> dict[str, NodeStatus]:
        """Each node's state: running, panicked, paused, off (it powered itself off), lost
        (its QEMU died) or down."""
        nodes = self._control.request("status")["nodes"]
        return {name: NodeStatus(**status) for name, status in nodes.items()}

    def events(self, since: int = 0) -> list[Event]:
        return [Event(**event) for event in self._control.request("events", since=since)]

    def nmi(self, node: str) -> None:
        """A non-maskable interrupt to all CPUs of the guest."""
        self._control.request("nmi", node=node)

    def set_link(self, node: str, link: str, up: bool) -> None:
        """Carrier of one end of a link."""
        self._control.request("set_link", node=node, link=link, up=up)

    def kill(self, node: str, number: int) -> None:
        """Send a signal to the node's QEMU."""
        self._control.request("kill", node=node, signal=number)

    def capture_start(
        self, node: str, link: str, path: Path, max_bytes: int = CAPTURE_BYTES
    ) -> str:
        """Capture the packets of one end of a link into a pcap file, outside the guest."""
        params = {"path": str(path.absolute()), "max_bytes": max_bytes}
        name: str = self._control.request("capture_start", node=node, link=link, **params)
        return name

    def capture_stop(self, capture: str) -> None:
        self._control.request("capture_stop", capture=capture)

    def restart(self, node: str) -> None:
        """End the node's QEMU if it runs and boot it anew; back when ssh answers."""
        held = self.nodes[node]
        held.drop()
        self._control.request("restart", node=node)
        if self.status()[node].ssh_port == held.endpoint.port:
            held.resume()  # whoever holds it may go on using it
        else:
            self._reach_one(node)
        self._await_node(node)
        self._put_modules([node])

    def watch(self) -> None:
        """From now on a guest's panic or the end of a QEMU ends at once, by name, whatever
        waits for that node. Without, ssh would notice after minutes, and could not tell one
        from the other."""
        states = self.status()
        since = max((event.seq for event in self.events()), default=0)
        for name, status in states.items():
            if status.state == "panicked":
                self._panicked(name)
            elif status.state in ("lost", "off"):
                self.nodes[name].interrupt(NodeLost("its QEMU has ended", node=name))
        threading.Thread(target=self._follow, args=(since,), daemon=True).start()

    def _follow(self, since: int) -> None:
        while True:
            try:
                events = self.events(since)
            except RdmalabError as error:
                for node in self.nodes.values():
                    node.interrupt(error)
                return
            for event in events:
                since = event.seq
                if event.name == "GUEST_PANICKED":
                    self._panicked(event.node)
                elif event.name == "QEMU_EXIT" and not event.data["asked"]:
                    status = f"status {event.data['status']}"
                    self.nodes[event.node].interrupt(
                        NodeLost("its QEMU ended", node=event.node, seen=status)
                    )
            time.sleep(_WATCH_PAUSE)

    def _panicked(self, name: str) -> None:
        console = ConsoleFile(name, self.folder / f"console-{name}.log")
        titles = [splat.title for splat in console.finish()]
        seen = titles[-1] if titles else ""
        self.nodes[name].interrupt(
            NodePanicked("the guest panicked", node=name, seen=seen, todo=f"read {console.path}")
        )

    def keep(self) -> None:
        """Let the lab outlive this process."""
        if self._leash is not None:
            with contextlib.suppress(OSError):
                self._leash.write(b"keep\n")
                self._leash.flush()
                self._leash.close()
            self._leash = None

    def down(self) -> None:
        """End all nodes and what holds them. Disks and keys go; the consoles stay for whoever
        wants to know what happened, until the name is used again. Never raises for what is
        gone already."""
        for node in self.nodes.values():
            node.drop()
        leash, self._leash = self._leash, None
        if leash is not None:
            with contextlib.suppress(OSError):
                leash.close()
        _end(self.folder)
        if self._supervisor is not None:
            self._supervisor.kill()
            self._supervisor.wait()
            self._supervisor = None
        for pattern in ("*.qcow2", "initrd-*", "id_*", "host-key-*", "state.json"):
            for path in self.folder.glob(pattern):
                path.unlink(missing_ok=True)
        for path in self.folder.glob("*.credentials"):
            shutil.rmtree(path, ignore_errors=True)

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.down()

    # -- parts of up -------------------------------------------------------------------------

    def _start(self) -> None:
        self._began = time.monotonic()
        # The lock is the supervisor's for as long as it lives: the descriptor is inherited.
        lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock_soon(lock)
            with (self.folder / "supervisor.log").open("w") as log:
                self._supervisor = subprocess.Popen(
                    [*python(), "rdmalab.lab.supervisor", str(self.folder)],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(lock,),
                    start_new_session=True,
                )
        finally:
            os.close(lock)
        (self.folder / "supervisor.pid").write_text(f"{self._supervisor.pid}\n")
        self._leash = self._supervisor.stdin
        started = self.folder / "started"
        while not started.exists() or not (text := started.read_text()):
            if self._supervisor.poll() is not None and not started.exists():
                log_text = (self.folder / "supervisor.log").read_text()
                raise NodeLost(f"the supervisor of lab {self.name} ended", seen=last_line(log_text))
            if time.monotonic() - self._began > _REQUEST_SECONDS:
                raise DeadlineExceeded(f"QEMU did not start within {_REQUEST_SECONDS:.0f} s")
            time.sleep(0.02)
        if text.startswith("failed "):
            seen = text.removeprefix("failed ").strip()
            if "is taken" in seen:
                raise UsageError(
                    f"lab {self.name} could not start", seen=seen,
                    todo="give --ssh-port another, or none",
                )  # fmt: skip
            if "No space left" in seen or "Cannot allocate memory" in seen:
                raise HostError(f"lab {self.name} could not start", seen=seen)
            raise NodeLost(f"lab {self.name} could not start", seen=seen)

    def _reach_one(self, name: str) -> None:
        port = self.status()[name].ssh_port
        planned = next(node for node in self.plan.nodes if node.name == name)
        endpoint = Endpoint(
            host="127.0.0.1",
            port=port,
            user="root",
            key=self.folder / "id_ed25519",
            known_hosts=self.folder / "known_hosts",
            host_key_alias=name,
        )
        ends = {link.link: LinkEnd(**asdict(link)) for link in planned.links}
        self.nodes[name] = Node(name, endpoint, ends, deadlines=self.deadlines, native=self._native)

    def _reach(self, shared: list[Path]) -> None:
        self._native = shared
        for node in self.plan.nodes:
            self._reach_one(node.name)

    def _await_ssh(self) -> None:
        pool = ThreadPoolExecutor(len(self.nodes))
        try:
            for done in as_completed([pool.submit(self._await_node, n) for n in self.nodes]):
                done.result()
        except BaseException:
            # Whoever still waits need not: the lab goes down now.
            for node in self.nodes.values():
                node.interrupt(NodeLost("the lab goes down", node=node.name))
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        self.boot_seconds = time.monotonic() - self._began
        if self.mode == "fast":
            self.deadlines.factor = slow_factor(self.boot_seconds)

    def _await_node(self, name: str) -> None:
        """Wait for ssh on a node that boots. A guest that panics or powers off, or a QEMU
        that ends meanwhile, is said at once."""
        own = self.deadlines.make("boot", self._boot_deadline)
        node = self.nodes[name]
        while True:
            state = self.status()[name].state
            console = self.folder / f"console-{name}.log"
            tail = last_line(console.read_text(errors="replace")) if console.exists() else ""
            if state == "panicked":
                raise NodePanicked(
                    "the guest panicked while booting", node=name, seen=tail,
                    todo=f"read {console}",
                )  # fmt: skip
            if state in ("lost", "off"):
                raise NodeLost("its QEMU ended while booting", node=name, seen=tail)
            try:
                time.sleep(node.pause("booting", own, _BANNER_PAUSE))
                if _has_banner(node.endpoint.port):
                    node.wait_ready(_READY_SECONDS)
                    return
            except DeadlineExceeded as error:
                if self.deadlines.passed(own) is not None:
                    seen = f"{error.seen}; its console ends with: {tail}"
                    raise own.error("no sshd after boot", node=name, seen=seen) from error

    def _write_files(self) -> None:
        state = {
            "boot_seconds": self.boot_seconds,
            "slow_factor": self.slow_factor,
            "native": [str(path) for path in self._native],
        }
        inventory.write(self.folder / "inventory.yaml", self.nodes)
        (self.folder / "state.json").write_text(json.dumps(state, indent=1) + "\n")

    def _put_modules(self, names: Iterable[str]) -> None:
        """Our modules, where a full node would not have them from its initial RAM disk."""
        if self.mode != "full":
            return
        for node in map(self.nodes.__getitem__, names):
            node.run(["mkdir", "-p", GUEST_MODULES])
            for path in map(Path, self.plan.modules):
                node.put(path, f"{GUEST_MODULES}/{path.name}")


def names(paths: Paths) -> list[str]:
    """The labs that are up."""
    if not paths.labs.is_dir():
        return []
    return sorted(folder.name for folder in paths.labs.iterdir() if _alive(folder))


def console(paths: Paths, name: str, node: str) -> Path:
    """The console of ``node``; it is there until `down`, whether or not the lab is up still.
    Raises UsageError."""
    folder = paths.labs / _check_name(name)
    found = {path.stem.removeprefix("console-"): path for path in folder.glob("console-*.log")}
    if node not in found:
        raise UsageError(
            f"lab {name} has no console of {node!r}",
            seen=f"it has {', '.join(sorted(found)) or 'none'}",
            todo=f"rdmalab up --name {name}" if not found else "",
        )
    return found[node]


def take_down(paths: Paths, name: str) -> bool:
    """End lab ``name`` whatever its state; False where it was not up. What was left by one
    that was killed is removed too."""
    folder = paths.labs / _check_name(name)
    was_up = _alive(folder)
    if was_up:
        _end(folder)
    shutil.rmtree(folder, ignore_errors=True)
    return was_up


def _keygen(path: Path, comment: str) -> str:
    done = subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)],
        capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode:
        raise HostError("ssh-keygen failed", seen=last_line(done.stderr))
    return path.with_suffix(".pub").read_text()


def _identity(
    spec: LabSpec, shape: topology.Topology, node: str, host_key: str, client_key: str
) -> Identity:
    """Names, keys and addresses of ``node``. In full mode the management interface has a
    default route and a name server, for what is installed there."""
    name = qemu.MANAGEMENT_NETDEV
    nics = [Nic(qemu.mac(node, name), name, (qemu.MANAGEMENT_ADDRESS,), 1500, qemu.GATEWAY)]
    hosts = []
    for link in shape.links_of(node):
        found = qemu.addresses(shape, link, node)
        nics.append(Nic(qemu.mac(node, link.name), link.name, found, link.mtu))
        peer = link.nodes[1] if link.nodes[0] == node else link.nodes[0]
        hosts.append(f"{qemu.addresses(shape, link, peer)[0].split('/')[0]} {peer}-{link.name}")
    return Identity(node, host_key, (client_key.strip(),), tuple(nics), tuple(hosts))


def _ends(shape: topology.Topology, node: str) -> Iterator[PlannedLink]:
    for link in shape.links_of(node):
        peer = link.nodes[1] if link.nodes[0] == node else link.nodes[0]
        ipv4, ipv6 = qemu.addresses(shape, link, node)
        yield PlannedLink(
            link=link.name,
            kind=link.kind,
            netdev=link.name,
            mac=qemu.mac(node, link.name),
            ipv4=ipv4,
            ipv6=ipv6,
            mtu=link.mtu,
            peer=peer,
        )


@dataclass(frozen=True)
class _FastBoot:
    """What fast nodes share."""

    vmlinux: Path
    shared: Path
    root: Path
    modules: Path
    built: dict[str, Path]
    cmdline: str

    @classmethod
    def prepare(
        cls,
        spec: LabSpec,
        sysroot: Sysroot,
        chosen: kernel.Kernel,
        built: dict[str, Path],
        folder: Path,
        progress: Progress,
    ) -> _FastBoot:
        shared = folder / "initrd-shared"
        shared.write_bytes(initramfs.base(sysroot, chosen, sysroot.paths.vm / "guest"))
        return cls(
            chosen.vmlinux,
            shared,
            image.root_image(sysroot, progress),
            image.modules_image(sysroot, chosen, progress),
            built,
            "nokaslr" if spec.instructions else "",
        )

    def arguments(self, folder: Path, identity: Identity) -> tuple[str, ...]:
        initrd = folder / f"initrd-{identity.hostname}"
        initramfs.write(self.shared, identity, self.built, initrd)
        return qemu.fast_boot(self.vmlinux, initrd, self.root, self.modules, self.cmdline)


@dataclass(frozen=True)
class _FullBoot:
    """What full nodes share."""

    sysroot: Sysroot
    base: Path

    def arguments(self, folder: Path, identity: Identity) -> tuple[str, ...]:
        overlay = folder / f"disk-{identity.hostname}.qcow2"
        disk.create_overlay(self.sysroot, self.base, overlay)
        return tuple(disk.qemu_args(self.base, overlay, identity))


def _prepare(
    spec: LabSpec,
    shape: topology.Topology,
    sysroot: Sysroot,
    chosen: kernel.Kernel,
    accelerator: accel.Accelerator,
    folder: Path,
    progress: Progress,
) -> Plan:
    """Keys, images, initial RAM file systems or disks, and command lines of all nodes."""
    paths = sysroot.paths
    built = {path.name: path for path in module.build(sysroot, chosen.release, progress)}
    boot: _FastBoot | _FullBoot
    if spec.mode == "fast":
        boot = _FastBoot.prepare(spec, sysroot, chosen, built, folder, progress)
    else:
        base = disk.build_base(
            sysroot, chosen.release, spec.kernel, paths.images, paths.vm / "full", progress
        )
        boot = _FullBoot(sysroot, base)
    counter = plugin.ensure(sysroot, progress) if spec.instructions else None
    client_key = _keygen(folder / "id_ed25519", f"rdmalab lab {spec.name}")
    known = []
    planned = []
    for index, name in enumerate(shape.nodes):
        key = folder / f"host-key-{name}"
        known.append(f"{name} {' '.join(_keygen(key, name).split()[:2])}\n")
        identity = _identity(spec, shape, name, key.read_text(), client_key)
        guest = qemu.Guest(
            name=name,
            vcpus=spec.vcpus,
            memory_mib=spec.memory_mib,
            boot=boot.arguments(folder, identity),
            links=tuple(shape.links_of(name)),
            plugin=counter,
        )
        argv = qemu.command(sysroot.qemu(), guest, accelerator)
        port = spec.ssh_port + index if spec.ssh_port else 0
        planned.append(PlannedNode(name, tuple(argv), port, tuple(_ends(shape, name))))
    (folder / "known_hosts").write_text("".join(known))
    env = {"QEMU_MODULE_DIR": sysroot.qemu_env()["QEMU_MODULE_DIR"]}
    return Plan(
        lab=spec.name,
        topology=shape.name,
        tier=spec.kernel,
        release=chosen.release,
        mode=spec.mode,
        accelerator=accelerator.name,
        accelerator_reason=accelerator.reason,
        vcpus=spec.vcpus,
        memory_mib=spec.memory_mib,
        instructions=spec.instructions,
        env=env,
        modules=tuple(str(path) for path in built.values()),
        nodes=tuple(planned),
    )
