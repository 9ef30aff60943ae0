# SPDX-License-Identifier: Apache-2.0
"""The modules under kernel/: built against a kernel's headers in the sysroot, and loaded on
nodes that run that kernel and no other."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import struct
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rdmalab.errors import CommandFailed, HostError, RdmalabError, UsageError
from rdmalab.lab.node import Result
from rdmalab.lab.progress import Progress
from rdmalab.lab.sysroot import Sysroot

#: where a node has its modules
REMOTE = "/run/rdmalab/modules"
_STAMP = ".built.json"
_BUILD_SECONDS = 1800.0
#: what a build leaves in a source folder that somebody built in by hand
_ARTEFACTS = re.compile(r"\..*|.*\.(o|ko|mod|mod\.c|a|symvers|order|orig|rej)")
_FINDING = re.compile(r"(?:^|[\s:])(?:fatal error|error|warning|ERROR|WARNING|CHECK):")


class ModuleMismatch(RdmalabError):
    """A module that was built for another kernel than the one that runs."""


class Target(Protocol):
    """What loading needs of a rdmalab.lab.node.Node."""

    name: str

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float = ...,
        check: bool = ...,
        input: str | None = ...,
    ) -> Result: ...

    def put(self, local: Path, remote: str, mode: int = ...) -> None: ...


# -- building ------------------------------------------------------------------------------


def sources(kernel: Path) -> list[Path]:
    """The files of kernel/ that are built from, sorted: not what builds left there, and not
    the patches, which are for a kernel's own source."""
    found = []
    for folder, names, files in os.walk(kernel):
        names[:] = sorted(n for n in names if n != "patches" and not n.startswith("."))
        found += [Path(folder) / name for name in files if not _ARTEFACTS.fullmatch(name)]
    return sorted(found)


def key(sysroot: Sysroot, release: str) -> str:
    """Changes with the sources, the headers and the compiler. Raises HostError where the
    sysroot has no headers of ``release``."""
    headers = sysroot.root / "usr/src" / f"linux-headers-{release}"
    digest = hashlib.sha256(f"{release} {sysroot.key}\n".encode())
    try:
        for name in (".config", "Module.symvers"):
            digest.update((headers / name).read_bytes())
    except OSError as error:
        raise HostError(
            f"the sysroot has no headers of kernel {release}",
            seen=str(error),
            todo="run `make setup`",
        ) from error
    kernel = sysroot.paths.repo / "kernel"
    for path in sources(kernel):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(kernel)} {len(data)}\n".encode() + data)
    return digest.hexdigest()


def build(sysroot: Sysroot, release: str, progress: Progress) -> list[Path]:
    """Build everything under kernel/ for ``release``, W=1 and with warnings as errors; the
    modules, sorted, in ``paths.modules/<release>/``.

    Nothing happens where they are newer than their sources; the sources are copied, so that
    nothing is left in them; the folder is replaced as a whole or not at all. Raises
    CommandFailed with the first finding and the name of the log, HostError.
    """
    out = sysroot.paths.modules / release
    out.parent.mkdir(parents=True, exist_ok=True)
    wanted = key(sysroot, release)
    with (out.parent / f".lock-{release}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        built = _built(out, wanted)
        if built is not None:
            return built
        with (
            progress.step(f"modules for {release}"),
            tempfile.TemporaryDirectory(prefix=f".{release}-", dir=out.parent) as folder,
        ):
            work = Path(folder)
            _make(sysroot, release, work)
            fresh = work / "out"
            fresh.mkdir()
            for path in (work / "source").rglob("*.ko"):
                check(path, release)
                path.rename(fresh / path.name)
            stamp = {"key": wanted, "modules": sorted(p.name for p in fresh.iterdir())}
            (fresh / _STAMP).write_text(json.dumps(stamp, indent=1) + "\n")
            if out.exists():
                out.rename(work / "old")
            fresh.rename(out)
    return _built(out, wanted) or []


def _built(out: Path, wanted: str) -> list[Path] | None:
    try:
        stamp = json.loads((out / _STAMP).read_text())
        modules = [out / name for name in stamp["modules"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if stamp["key"] != wanted or not all(path.is_file() for path in modules):
        return None
    return modules


def _make(
    sysroot: Sysroot,
    release: str,
    work: Path,
    goal: str = "modules",
    binds: Mapping[Path, str] | None = None,
    variables: Sequence[str] = (),
) -> None:
    kernel = sysroot.paths.repo / "kernel"
    source = work / "source"
    for path in sources(kernel):
        copy = source / path.relative_to(kernel)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    done = sysroot.run(
        [
            "make",
            f"-j{os.cpu_count() or 1}",
            f"KDIR=/usr/src/linux-headers-{release}",
            *variables,
            goal,
        ],
        binds={source: "/mnt/kernel", **(binds or {})},
        cwd="/mnt/kernel",
        check=False,
        timeout=_BUILD_SECONDS,
    )
    findings = [line for line in done.stdout.splitlines() if _FINDING.search(line)]
    if not done.returncode and not findings:
        return
    if "No space left on device" in done.stdout:
        raise HostError(
            f"the disk that holds {sysroot.paths.cache} is full",
            seen=f"while building modules for {release}",
            todo="free space or set RDMALAB_CACHE, then run the same command again",
        )
    log = sysroot.paths.modules / f"{release}.log"
    log.write_text(done.stdout)
    last = done.stdout.strip().splitlines()[-1:] or ["it said nothing"]
    raise CommandFailed(
        f"make {goal} for {release} failed (status {done.returncode})",
        seen=(findings or last)[0].strip(),
        todo=f"read {log}",
    )


def style(sysroot: Sysroot, release: str, progress: Progress) -> None:
    """checkpatch --strict and sparse over everything under kernel/. Raises CommandFailed with
    the first finding."""
    sysroot.paths.modules.mkdir(parents=True, exist_ok=True)
    scripts = _checkpatch(sysroot, release, progress)
    with (
        progress.step(f"kernel style ({release})"),
        tempfile.TemporaryDirectory(prefix=".style-", dir=sysroot.paths.modules) as folder,
    ):
        _make(
            sysroot,
            release,
            Path(folder),
            "style",
            {scripts: "/mnt/checkpatch"},
            ["CHECKPATCH=/mnt/checkpatch/checkpatch.pl"],
        )


def _checkpatch(sysroot: Sysroot, release: str, progress: Progress) -> Path:
    """The folder with the kernel's checkpatch.pl, which only the source package has: fetched
    once, and of its 160 MB three files are kept."""
    version = ".".join(release.split(".")[:2])
    folder = sysroot.paths.cache / "checkpatch" / version
    if (folder / "checkpatch.pl").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    package = f"linux-source-{version}"
    # Each file has its end in the tar well before the archive's, and tar stops there.
    script = (
        f"apt-get download -q -o APT::Sandbox::User=root {package}"
        f" && dpkg-deb --fsys-tarfile {package}_*.deb | tar -xO ./usr/src/{package}.tar.xz"
        f" | tar -xJ --strip-components=2 --occurrence=1 {package}/scripts/checkpatch.pl"
        f" {package}/scripts/spelling.txt {package}/scripts/const_structs.checkpatch;"
        " rm -f *.deb; test -s checkpatch.pl"
    )
    with (
        progress.step(f"checkpatch of {package}"),
        tempfile.TemporaryDirectory(prefix=".new-", dir=folder.parent) as new,
    ):
        sysroot.run(["sh", "-c", script], binds={Path(new): "/mnt/new"}, cwd="/mnt/new")
        Path(new).chmod(0o755)
        Path(new).rename(folder)
        Path(new).mkdir()  # what the context manager removes
    return folder


# -- what a module says of itself -----------------------------------------------------------


@dataclass(frozen=True)
class ModuleInfo:
    """``vermagic`` is "RELEASE SMP preempt mod_unload ...", ``depends`` are the names of the
    modules that come first, ``build_id`` is hexadecimal, empty where there is none."""

    name: str
    vermagic: str
    depends: tuple[str, ...]
    build_id: str

    @property
    def release(self) -> str:
        return self.vermagic.split(" ", 1)[0]


def read(ko: Path) -> ModuleInfo:
    """What is in a module's sections .modinfo and .note.gnu.build-id. Raises UsageError for
    what is no module of a 64-bit kernel."""
    try:
        sections = _sections(ko.read_bytes())
        words: dict[str, str] = {}
        for entry in sections[".modinfo"].split(b"\0"):
            if entry:
                word, _, value = entry.decode().partition("=")
                words.setdefault(word, value)
        name, vermagic = words["name"], words["vermagic"].strip()
        if not name or not vermagic:
            raise ValueError("its name or its vermagic is empty")
        return ModuleInfo(
            name=name,
            vermagic=vermagic,
            depends=tuple(n for n in words.get("depends", "").split(",") if n),
            build_id=_build_id(sections.get(".note.gnu.build-id", b"")),
        )
    except OSError as error:
        raise UsageError(f"cannot read {ko}", seen=error.strerror or str(error)) from error
    except (ValueError, KeyError, IndexError, struct.error) as error:
        seen = f"no {error.args[0]}" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"{ko} is no kernel module", seen=seen) from error


def _sections(data: bytes) -> dict[str, bytes]:
    """Section contents by name of a little-endian ELF64 file (elf(5))."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a little-endian ELF64 file")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]

    def content(header: tuple[int, ...]) -> bytes:
        if header[1] == 8:  # SHT_NOBITS
            return b""
        offset, length = header[4], header[5]
        if offset + length > len(data):
            raise ValueError("a section ends past the end of the file")
        return data[offset : offset + length]

    names = content(headers[names_index])
    return {
        names[header[0] : names.index(b"\0", header[0])].decode(): content(header)
        for header in headers
    }


def _build_id(note: bytes) -> str:
    if len(note) < 12:
        return ""
    name_size, size = struct.unpack_from("<II", note)
    start = 12 + (name_size + 3) // 4 * 4
    return note[start : start + size].hex()


def check(ko: Path, release: str, node: str = "") -> ModuleInfo:
    """Refuse a module that was not built for ``release``, naming both: raises ModuleMismatch.

    The kernel would refuse it too, with "invalid module format" and the reason in a log.
    """
    info = read(ko)
    if info.release != release:
        raise ModuleMismatch(
            f"{ko.name} was built for kernel {info.release}, and the running kernel is {release}",
            node=node,
            todo="run `make modules` with the KERNEL that runs",
        )
    return info


# -- loading --------------------------------------------------------------------------------


def load(node: Target, name: str, modules: Path, parameters: Sequence[str] = ()) -> ModuleInfo:
    """Load our module ``name`` on a node, and first the modules that it needs.

    ``modules`` is the folder that ``build`` fills, with a folder for each release. Raises
    UsageError where the module is not built for the node's kernel, ModuleMismatch,
    CommandFailed with the kernel's own reason.
    """
    release = node.run(["uname", "-r"]).stdout.strip()
    ko = modules / release / f"{name}.ko"
    if not ko.is_file():
        others = sorted(path.parent.name for path in modules.glob(f"*/{name}.ko"))
        raise UsageError(
            f"{name}.ko is not built for the running kernel {release}",
            node=node.name,
            seen=f"built for: {', '.join(others) or 'none'}",
            todo="run `make modules` with the KERNEL that runs",
        )
    return load_file(node, ko, parameters, release=release)


def load_file(
    node: Target, ko: Path, parameters: Sequence[str] = (), *, release: str = ""
) -> ModuleInfo:
    """Load the module in file ``ko`` (local). Does nothing where just this build is loaded;
    raises RdmalabError where another build is."""
    info = check(ko, release or node.run(["uname", "-r"]).stdout.strip(), node.name)
    loaded = _loaded(node, info.name)
    if loaded is not None:
        if loaded == info.build_id:
            return info
        raise RdmalabError(
            f"another build of {info.name} is loaded",
            node=node.name,
            seen=f"build id {loaded[:12] or 'none'}, not {info.build_id[:12]}",
            todo=f"unload it first (rmmod {info.name})",
        )
    for needed in info.depends:
        ours = ko.with_name(f"{needed}.ko")
        if ours.is_file():
            load_file(node, ours, release=info.release)
        else:
            node.run(["modprobe", needed])
    remote = f"{REMOTE}/{ko.name}"
    node.run(["mkdir", "-p", REMOTE])
    node.put(ko, remote)
    done = node.run(["insmod", remote, *parameters], check=False)
    if done.status:
        tail = node.run(["dmesg"], check=False).stdout.strip().splitlines()[-3:]
        about = [line for line in tail if info.name in line]
        raise CommandFailed(
            shlex.join(("insmod", remote, *parameters)),
            node=node.name,
            seen=f"{done.stderr.strip()} {about[-1] if about else ''}".strip(),
        )
    return info


def _loaded(node: Target, name: str) -> str | None:
    """The build id of the loaded module ``name``, None where it is not loaded."""
    folder = f"/sys/module/{name}"
    script = (
        f"[ -e {folder}/initstate ] || exit 3; od -An -v -tx1 {folder}/notes/.note.gnu.build-id"
    )
    done = node.run(["sh", "-c", script], check=False)
    if done.status == 3:
        return None
    return _build_id(bytes.fromhex(done.stdout)) if done.status == 0 else ""


def unload(node: Target, name: str) -> None:
    """Raises CommandFailed, for one in use with the kernel's reason."""
    node.run(["rmmod", name])
