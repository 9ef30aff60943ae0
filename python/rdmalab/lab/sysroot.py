# SPDX-License-Identifier: Apache-2.0
"""The sysroot: one Debian root that holds QEMU, the compilers, the kernels' headers and all
that guests run.

It is built in stages in a folder of its own and renamed when it is whole. A stage that was
killed is taken up again: the base is made anew, a package stage goes on where dpkg stands.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rdmalab.errors import CommandFailed, HostError, UsageError
from rdmalab.lab import host
from rdmalab.lab.child import die_with_parent, last_line
from rdmalab.lab.lockfile import Lock, LockedKernel
from rdmalab.lab.paths import Paths
from rdmalab.lab.progress import Progress, Step

_STAMP = ".rdmalab.json"
_BASE = ".rdmalab-base"
_NEEDED_BYTES = 5 * 2**30
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_INSTALL = (
    "apt-get", "install", "-y", "-q", "--no-install-recommends", "--fix-broken",
    "--allow-downgrades",
)  # fmt: skip
#: what is raised when this changes: the layout of the sysroot as the code below makes it
_LAYOUT = 1


@dataclass(frozen=True)
class KernelSpec:
    """Where a kernel tier comes from (vm/packages.toml)."""

    tier: str
    suite: str
    metapackage: str
    headers: str


@dataclass(frozen=True)
class Packages:
    """vm/packages.toml, checked."""

    suite: str
    backports: str
    packages: tuple[str, ...]
    backports_packages: tuple[str, ...]
    locked: tuple[str, ...]
    kernels: dict[str, KernelSpec]
    digest: str

    @classmethod
    def read(cls, path: Path) -> Packages:
        try:
            text = path.read_text()
            data: dict[str, Any] = tomllib.loads(text)
            kernels = {t: KernelSpec(tier=t, **k) for t, k in data["kernels"].items()}
            return cls(
                suite=data["suite"],
                backports=data["backports"],
                packages=tuple(data["packages"]),
                backports_packages=tuple(data["backports_packages"]),
                locked=tuple(data["locked"]),
                kernels=kernels,
                digest=hashlib.sha256(f"{_LAYOUT}\n{text}".encode()).hexdigest()[:16],
            )
        except (OSError, KeyError, TypeError, tomllib.TOMLDecodeError) as error:
            raise UsageError(f"{path} cannot be used", seen=str(error)) from error


def parse_madison(text: str) -> list[tuple[str, str]]:
    """``apt-cache madison`` as (version, suite) pairs, newest first as apt gives them."""
    found = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split("|")]
        if len(parts) == 3 and parts[2].endswith("Packages"):
            suite = parts[2].split()[1].split("/")[0]
            found.append((parts[1], suite))
    return found


def source_package(show: str, name: str) -> str:
    """The source package that ``apt-cache show`` names for the package ``name``: the
    package's own name where it names none."""
    match = re.search(r"^Source: *(\S+)", show, re.MULTILINE)
    return match.group(1) if match else name


def preferences(backports: str, packages: Mapping[str, str], sources: Mapping[str, str]) -> str:
    """apt preferences: the locked versions (``packages``) of all binaries of their source
    packages (``sources``, by package), then QEMU's and the kernels' sources from backports.

    Binaries of one source depend on each other at their exact version, so that one alone
    cannot be held back. A version pin of a source matches those of its binaries that have
    this version, whatever the source's own version is (gcc 4:14.2.0-1 is of gcc-defaults
    1.220). Of several records apt takes the first that matches, so the locked ones lead.
    """
    blocks = []
    for name, version in packages.items():
        for wanted in (name, f"src:{sources[name]}"):
            blocks.append(f"Package: {wanted}\nPin: version {version}\nPin-Priority: 1001\n")
    blocks.append(
        "Package: src:qemu src:seabios src:linux src:linux-base src:ipxe\n"
        f"Pin: release n={backports}\nPin-Priority: 600\n"
    )
    return "\n".join(blocks)


def image_package(show: str) -> str:
    """The versioned image package a metapackage's ``apt-cache show`` depends on."""
    match = re.search(r"\blinux-image-(\d[^ ,(]*)", show)
    if match is None:
        raise HostError("the kernel metapackage names no kernel", seen=show[:80])
    return "linux-image-" + match.group(1)


class Sysroot:
    """The root at ``paths.sysroot``. ``ensure`` first; then ``run`` and ``host_command``."""

    def __init__(self, paths: Paths, root: Path | None = None) -> None:
        self.paths = paths
        self.root = root or paths.sysroot
        self.packages = Packages.read(paths.vm / "packages.toml")

    # -- running things ----------------------------------------------------------------

    def _namespace(self) -> list[str]:
        argv = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private"]
        if os.geteuid() != 0:
            argv += ["--map-root-user", "--map-auto"]
        return argv

    def run(
        self,
        argv: Sequence[str],
        *,
        binds: Mapping[Path, str] | None = None,
        cwd: str = "/",
        env: Mapping[str, str] | None = None,
        check: bool = True,
        input: str | None = None,
        timeout: float | None = None,
        status: Step | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run ``argv`` in the sysroot, in mount and pid namespaces of its own, so that
        nothing is left mounted or running when it ends or we are killed.

        ``binds`` maps host folders to absolute paths inside (made where absent). With
        ``status`` the command's file descriptor 9 carries apt's progress
        (APT::Status-Fd). stdout and stderr are one text. Raises CommandFailed with the
        last line said, HostError where the disk is full.
        """
        script = ["set -e", 'root="$1"; shift', 'mount -t proc proc "$root/proc"']
        for device in _DEVICES:
            script.append(f'[ -e "$root/dev/{device}" ] || : >"$root/dev/{device}"')
            script.append(f'mount --bind /dev/{device} "$root/dev/{device}"')
        arguments: list[str] = []
        for index, (source, target) in enumerate((binds or {}).items()):
            script.append(f'mkdir -p "$root/${{{2 * index + 2}}}"')
            script.append(f'mount --bind "${{{2 * index + 1}}}" "$root/${{{2 * index + 2}}}"')
            arguments += [str(source), target]
        script.append(f"shift {len(arguments)}")
        script.append('exec chroot "$root" "$@"')
        environment = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
            "LC_ALL": "C.UTF-8",
            "DEBIAN_FRONTEND": "noninteractive",
            **{k: v for k, v in os.environ.items() if k.lower().endswith("_proxy")},
            **(env or {}),
        }
        inside = ["env", "-C", cwd, *argv]
        command = [*self._namespace(), "sh", "-c", "; ".join(script), "sysroot", str(self.root)]
        return self._spawn(
            [*command, *arguments, *inside], argv, environment, check, input, timeout, status
        )

    def _spawn(
        self,
        command: Sequence[str],
        shown: Sequence[str],
        environment: Mapping[str, str],
        check: bool,
        input: str | None,
        timeout: float | None,
        status: Step | None,
    ) -> subprocess.CompletedProcess[str]:
        reader, writer = os.pipe() if status else (-1, -1)
        arm = die_with_parent()

        def prepare() -> None:
            arm()
            if writer >= 0:
                os.dup2(writer, 9)

        # Output goes to a file: a pipe would fill while apt's progress is being read.
        with tempfile.TemporaryFile("w+", errors="replace") as said:
            with subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.PIPE if input is not None else subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                text=True,
                preexec_fn=prepare,
                close_fds=writer < 0,
            ) as child:
                try:
                    if status is not None:
                        os.close(writer)
                        _follow_apt(reader, status)
                    child.communicate(input, timeout)
                except BaseException:
                    child.kill()
                    raise
            said.seek(0)
            output = said.read()
        done = subprocess.CompletedProcess(list(shown), child.returncode, output, "")
        if check and done.returncode:
            if "No space left on device" in output or os.strerror(errno.ENOSPC) in output:
                raise HostError(
                    f"the disk that holds {self.paths.cache} is full",
                    seen=f"while running {shown[0]}",
                    todo="free space or set RDMALAB_CACHE, then run the same command again",
                )
            raise CommandFailed(
                f"{shown[0]} in the sysroot ended with status {done.returncode}",
                seen=_telling_line(output),
            )
        return done

    def host_command(self, program: str) -> list[str]:
        """Argv that starts a program of the sysroot on the host, outside any chroot, with
        the sysroot's own loader and libraries. ``program`` is "qemu-system-x86_64"."""
        root = self.root
        return [
            str(root / "lib64/ld-linux-x86-64.so.2"),
            "--library-path",
            f"{root}/usr/lib/x86_64-linux-gnu",
            str(root / "usr/bin" / program),
        ]

    def qemu(self) -> list[str]:
        """Argv of QEMU on the host, up to its options."""
        share = self.root / "usr/share"
        return [
            *self.host_command("qemu-system-x86_64"),
            "-L", str(share / "seabios"), "-L", str(share / "qemu"),
        ]  # fmt: skip

    def qemu_env(self) -> dict[str, str]:
        """QEMU's environment: its modules (accelerators are modules) are the sysroot's."""
        modules = self.root / "usr/lib/x86_64-linux-gnu/qemu"
        return {**os.environ, "QEMU_MODULE_DIR": str(modules)}

    # -- building ------------------------------------------------------------------------

    def stamp(self) -> dict[str, Any] | None:
        """What the sysroot was built from, or None where it is absent."""
        try:
            data: dict[str, Any] = json.loads((self.root / _STAMP).read_text())
        except (OSError, ValueError):
            return None
        return data

    def lock(self) -> Lock:
        """The versions in the sysroot. Raises HostError where it is not built."""
        stamp = self.stamp()
        if stamp is None:
            raise HostError("the sysroot is not built", todo="run `make setup`")
        return Lock(
            packages=dict(stamp["packages"]),
            kernels={t: LockedKernel(**k) for t, k in stamp["kernels"].items()},
        )

    @property
    def key(self) -> str:
        """Changes when the sysroot's content may have: part of every derived thing's key."""
        stamp = self.stamp() or {}
        return hashlib.sha256(json.dumps(stamp, sort_keys=True).encode()).hexdigest()[:16]

    @contextlib.contextmanager
    def _exclusive(self, progress: Progress) -> Iterator[None]:
        """One set-up of a cache at a time; a killed one frees the lock."""
        try:
            self.paths.cache.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HostError(
                f"the cache {self.paths.cache} cannot be made",
                seen=error.strerror or str(error),
                todo="set RDMALAB_CACHE to a folder that can be written",
            ) from error
        with (self.paths.cache / ".setup-lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                progress.say("waiting for another set-up of this cache")
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def is_current(self) -> bool:
        stamp = self.stamp()
        return stamp is not None and stamp["digest"] == self.packages.digest

    def ensure(self, progress: Progress) -> None:
        """Build the sysroot where it is absent or older than vm/packages.toml, and write
        the lock file where it is absent.

        Raises HostError for what the host lacks."""
        if not self.is_current():
            host.ensure_packages(progress.say)
            with self._exclusive(progress):
                if not self.is_current():
                    self._build(progress, Lock.read(self.paths.lock))
        if not self.paths.lock.exists():  # we were killed before it was written
            self.lock().write(self.paths.lock)

    def update(self, progress: Progress) -> list[str]:
        """Look for newer versions than the lock's and rebuild where there are any.
        Returns "package: old -> new" lines."""
        host.ensure_packages(progress.say)
        with self._exclusive(progress):
            if self.is_current():
                with progress.step("package lists"):
                    self.run(["apt-get", "update", "-q"])
                newest = self._resolve(Lock(), progress)
                old = self.lock()
                if newest == old:
                    return []
            else:
                old = Lock.read(self.paths.lock)
            self._build(progress, Lock())
            new = self.lock()
        changes = [
            f"{name}: {old.packages.get(name, 'none')} -> {version}"
            for name, version in new.packages.items()
            if old.packages.get(name) != version
        ]
        none = LockedKernel("none", "none")
        changes += [
            f"kernel {tier}: {old.kernels.get(tier, none).release} -> {kernel.release}"
            for tier, kernel in new.kernels.items()
            if old.kernels.get(tier, none) != kernel
        ]
        return changes

    def _build(self, progress: Progress, lock: Lock) -> None:
        free = host.free_bytes(self.paths.cache)
        if free < _NEEDED_BYTES:
            raise HostError(
                f"{self.paths.cache} has {free / 2**30:.1f} GiB free, and the sysroot needs "
                f"{_NEEDED_BYTES / 2**30:.0f} GiB",
                todo="free space or set RDMALAB_CACHE",
            )
        mirrors = host.mirrors()
        partial = Sysroot(self.paths, self.paths.cache / "sysroot.partial")
        if not (partial.root / _BASE).exists():
            partial.remove()
            with progress.step(f"sysroot: Debian {self.packages.suite}"):
                partial._bootstrap(mirrors)
        with progress.step("sysroot: package lists"):
            partial.run(["dpkg", "--configure", "-a"])
            partial.run(["apt-get", "update", "-q"])
        resolved = partial._choose(lock, progress)
        for title, names in partial._groups(resolved).items():
            with progress.step(title) as step:
                partial.install(names, step)
        partial._seal(resolved)
        old = Sysroot(self.paths, self.paths.cache / "sysroot.old")
        old.remove()
        if self.root.exists():
            self.root.rename(old.root)
        partial.root.rename(self.root)
        old.remove()
        self.lock().write(self.paths.lock)

    def remove(self) -> None:
        """Delete the root, as whoever owns its files."""
        if not self.root.exists():
            return
        argv = ["rm", "-rf", "--one-file-system", str(self.root)]
        if os.geteuid() != 0:
            argv = ["unshare", "--map-root-user", "--map-auto", *argv]
        subprocess.run(argv, check=True, capture_output=True)

    def _bootstrap(self, mirrors: host.Mirrors) -> None:
        suite = self.packages.suite
        lines = [
            f"deb {mirrors.archive} {suite} main",
            f"deb {mirrors.archive} {suite}-updates main",
            f"deb {mirrors.security} {suite}-security main",
            f"deb {mirrors.archive} {self.packages.backports} main",
        ]
        lines += [line.replace("deb ", "deb-src ", 1) for line in lines]
        mode = "root" if os.geteuid() == 0 else "unshare"
        command = ["mmdebstrap", f"--mode={mode}", "--variant=apt", "--format=directory"]
        command += ["--include=ca-certificates", "--skip=cleanup/apt/lists"]
        command += [suite, str(self.root), *lines]
        if mode == "root":
            # A pid namespace, so that nothing of it lives on when we are killed.
            command = [
                "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", *command
            ]  # fmt: skip
        self._spawn(command, ["mmdebstrap"], os.environ, True, None, None, None)
        # Documentation and locales are read by nobody here; the tests of rdma-core lie
        # in its documentation.
        config = self.root / "etc/dpkg/dpkg.cfg.d/rdmalab"
        config.write_text(
            "path-exclude=/usr/share/man/*\npath-exclude=/usr/share/locale/*\n"
            "path-exclude=/usr/share/doc/*\npath-include=/usr/share/doc/rdma-core/*\n"
            "path-include=/usr/share/doc/*/copyright\nforce-unsafe-io\n"
        )
        # Nothing may start services in here.
        policy = self.root / "usr/sbin/policy-rc.d"
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
        (self.root / _BASE).write_text("")

    def _kernel(
        self, spec: KernelSpec, wanted: LockedKernel | None, progress: Progress
    ) -> LockedKernel:
        suites = {spec.suite, f"{spec.suite}-updates", f"{spec.suite}-security"}
        table = parse_madison(self.run(["apt-cache", "madison", spec.metapackage]).stdout)
        versions = [version for version, suite in table if suite in suites]
        if not versions:
            raise HostError(
                f"the mirror has no {spec.metapackage} in {spec.suite}",
                seen=f"it has {', '.join(sorted({s for _, s in table})) or 'none'}",
            )
        if wanted is not None:
            image = f"linux-image-{wanted.release}"
            held = parse_madison(self.run(["apt-cache", "madison", image]).stdout)
            if wanted.version in [version for version, _ in held]:
                return wanted
            progress.say(
                f"kernel {spec.tier}: the mirror no longer has {wanted.release} "
                f"({wanted.version}); taking the newest"
            )
        show = self.run(["apt-cache", "show", f"{spec.metapackage}={versions[0]}"]).stdout
        return LockedKernel(image_package(show).removeprefix("linux-image-"), versions[0])

    def _resolve(self, lock: Lock, progress: Progress) -> Lock:
        """The version of each locked package: the lock's where the mirror has it, else the
        newest of the suite it comes from."""
        names = self.packages.locked
        chosen = {}
        for name in names:
            table = parse_madison(self.run(["apt-cache", "madison", name]).stdout)
            wide = name in self.packages.backports_packages
            versions = [v for v, s in table if wide or s != self.packages.backports]
            if not versions:
                raise HostError(f"the mirror has no package {name}")
            wanted = lock.packages.get(name)
            if wanted in [v for v, _ in table]:
                assert wanted is not None
                chosen[name] = wanted
                continue
            if wanted is not None:
                progress.say(f"{name}: the mirror no longer has {wanted}; taking {versions[0]}")
            chosen[name] = versions[0]
        kernels = {
            tier: self._kernel(spec, lock.kernels.get(tier), progress)
            for tier, spec in self.packages.kernels.items()
        }
        return Lock(packages=chosen, kernels=kernels)

    def _pin(self, resolved: Lock) -> None:
        """Have apt take the resolved versions before all others. (It takes the newest of
        suites that stand at one priority.)"""
        sources = {}
        for name, version in resolved.packages.items():
            show = self.run(["apt-cache", "show", f"{name}={version}"]).stdout
            sources[name] = source_package(show, name)
        text = preferences(self.packages.backports, resolved.packages, sources)
        (self.root / "etc/apt/preferences.d/rdmalab").write_text(text)

    def _groups(self, resolved: Lock) -> dict[str, tuple[str, ...]]:
        """What is installed, in this order, by the title it is shown with."""
        return {
            "sysroot: packages": self.packages.packages,
            "sysroot: QEMU": self.packages.backports_packages,
            "sysroot: kernel headers": tuple(
                f"linux-headers-{kernel.release}" for kernel in resolved.kernels.values()
            ),
        }

    def _choose(self, lock: Lock, progress: Progress) -> Lock:
        """Resolve with ``lock`` and pin what that gives; without it where apt cannot install
        the versions it names together (a mirror keeps some of them and not others)."""
        resolved = self._resolve(lock, progress)
        self._pin(resolved)
        if lock != Lock():
            names = [name for group in self._groups(resolved).values() for name in group]
            try:
                self.run([*_INSTALL, "--simulate", *names])
            except CommandFailed as error:
                progress.say(
                    f"the locked versions cannot be installed together ({error.seen}); "
                    "taking the newest"
                )
                resolved = self._resolve(Lock(), progress)
                self._pin(resolved)
        return resolved

    def install(self, names: Sequence[str], step: Step) -> None:
        """apt-get install, with progress; goes on after having been killed."""
        self.run(
            [*_INSTALL, "-o", "APT::Status-Fd=9", "-o", "DPkg::Use-Pty=0", *names],
            status=step,
        )

    def _seal(self, resolved: Lock) -> None:
        self.run(["apt-get", "clean"])
        # Units and generated identities of this root must not be shared by guests.
        for name in ("etc/machine-id", "var/lib/dbus/machine-id"):
            (self.root / name).unlink(missing_ok=True)
        for key in (self.root / "etc/ssh").glob("ssh_host_*"):
            key.unlink()
        query = self.run(["dpkg-query", "-W", "-f", "${Package} ${Version}\n"]).stdout
        versions = dict(line.split() for line in query.splitlines())
        stamp = {
            "digest": self.packages.digest,
            "packages": {name: versions[name] for name in resolved.packages},
            "kernels": {t: vars(k) for t, k in resolved.kernels.items()},
        }
        (self.root / _STAMP).write_text(json.dumps(stamp, indent=2, sort_keys=True) + "\n")


def _telling_line(output: str) -> str:
    """The line of a failed command that tells most: apt's first E:, else the last one."""
    for line in output.splitlines():
        if line.startswith(("E: ", "error: ")) or ": error: " in line or " error: " in line:
            return line.strip()
    return last_line(output)


def _follow_apt(reader: int, step: Step) -> None:
    """Feed ``step`` from apt's status lines ("dlstatus:1:20.3:Retrieving file 1 of 5") until
    the command closes the pipe. Downloads count for the first half."""
    with os.fdopen(reader, errors="replace") as lines:
        for line in lines:
            parts = line.split(":", 3)
            if len(parts) < 4 or parts[0] not in ("dlstatus", "pmstatus"):
                continue
            try:
                percent = float(parts[2])
            except ValueError:
                continue
            share = percent / 200 + (0.5 if parts[0] == "pmstatus" else 0.0)
            step.update(min(share, 1.0), parts[3].strip())
