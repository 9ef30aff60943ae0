# SPDX-License-Identifier: Apache-2.0
"""The machine the lab runs on: what it has, what it lacks, and where its packages come from."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rdmalab.errors import HostError

#: command -> the Debian package that brings it
_COMMANDS = {
    "mmdebstrap": "mmdebstrap",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "unshare": "util-linux",
    "apt-get": "apt",
}
#: those that map a user's subordinate ids, which nobody but root can do without
_UNPRIVILEGED = {"newuidmap": "uidmap", "newgidmap": "uidmap"}
#: Ubuntu and others name their suites alike ("noble-updates"): only Debian's are taken
_SUITES = {
    "buster", "bullseye", "bookworm", "trixie", "forky", "duke", "sid",
    "oldoldstable", "oldstable", "stable", "testing", "unstable",
}  # fmt: skip


@dataclass(frozen=True)
class Source:
    """A Debian archive as the host's apt knows it: its address and one of its suites."""

    uri: str
    suite: str


@dataclass(frozen=True)
class Mirrors:
    archive: str
    security: str


@dataclass(frozen=True)
class Check:
    """One line of ``rdmalab host check``."""

    name: str
    ok: bool
    seen: str
    todo: str = ""


def is_debian() -> bool:
    """True on Debian itself (ID=debian in os-release)."""
    try:
        text = Path("/etc/os-release").read_text()
    except OSError:
        return False
    return "ID=debian" in text.splitlines()


def missing_packages() -> list[str]:
    """The Debian packages that bring the commands this host lacks, sorted."""
    needed = _COMMANDS if os.geteuid() == 0 else {**_COMMANDS, **_UNPRIVILEGED}
    return sorted({pkg for cmd, pkg in needed.items() if shutil.which(cmd) is None})


def ensure_packages(say: Callable[[str], None]) -> None:
    """Install the host packages that are missing. Raises HostError, which names them, when
    not root, not on Debian, or when apt fails."""
    missing = missing_packages()
    if not missing:
        return
    command = f"apt-get install -y --no-install-recommends {' '.join(missing)}"
    if os.geteuid() != 0 or not is_debian():
        raise HostError(
            "this host lacks " + ", ".join(missing),
            todo=f"install them (on Debian, as root: {command})",
        )
    say(f"installing on this host: {', '.join(missing)}")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    log = ""
    for argv in (["apt-get", "update", "-q"], command.split()):
        done = subprocess.run(argv, env=env, text=True, capture_output=True, check=False)
        log = (done.stderr or done.stdout).strip()
        if done.returncode:
            last = log.splitlines()[-1] if log else f"status {done.returncode}"
            raise HostError("apt could not install " + ", ".join(missing), seen=last, todo=command)


def parse_targets(text: str) -> list[Source]:
    """Parse ``apt-get indextargets --format '$(REPO_URI) $(RELEASE)'``."""
    found = []
    for line in text.splitlines():
        fields = line.split()
        if len(fields) == 2:
            source = Source(uri=fields[0].rstrip("/"), suite=fields[1])
            if source not in found:
                found.append(source)
    return found


def choose_mirrors(sources: list[Source]) -> Mirrors:
    """The archive and its security archive among the host's sources.

    A Debian archive is one that serves ``-updates`` of a Debian suite or, failing that,
    the suite itself; third parties serve neither by these names. Without a security
    archive the same host's ``debian-security`` beside ``debian`` is taken.
    Raises HostError where the host has no Debian archive.
    """

    def serving(suffix: str) -> list[str]:
        return [s.uri for s in sources if s.suite in {suite + suffix for suite in _SUITES}]

    security, updates, plain = serving("-security"), serving("-updates"), serving("")
    archive = (updates or plain or [""])[0]
    if not archive:
        raise HostError(
            "no Debian archive in this host's apt sources",
            todo="add one to /etc/apt/sources.list",
        )
    if not security:
        security = [archive.removesuffix("/debian") + "/debian-security"]
    return Mirrors(archive=archive, security=security[0])


def mirrors() -> Mirrors:
    """What the host's own apt configuration names. Raises HostError."""
    try:
        done = subprocess.run(
            ["apt-get", "indextargets", "--no-release-info", "--format", "$(REPO_URI) $(RELEASE)",
             "Created-By: Packages"],
            text=True, capture_output=True, check=False,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise HostError("this host has no apt-get", todo="install apt") from error
    if done.returncode:
        raise HostError(
            "apt cannot list this host's package sources",
            seen=(done.stderr.strip().splitlines() or ["no message"])[-1],
            todo="mend /etc/apt",
        )
    return choose_mirrors(parse_targets(done.stdout))


def free_bytes(path: Path) -> int:
    """Free space of the file system that holds ``path`` or will hold it."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def _cache_check(cache: Path) -> Check:
    """Whether ``cache`` can be made and written. What is made for it is removed again."""
    made: list[Path] = []
    try:
        absent = [path for path in (cache, *cache.parents) if not path.exists()]
        for path in reversed(absent):
            path.mkdir()
            made.append(path)
        with tempfile.TemporaryFile(dir=cache):
            pass
    except OSError as error:
        todo = "set RDMALAB_CACHE to a folder that can be written"
        return Check("cache", False, f"{cache}: {error.strerror or error}", todo)
    finally:
        for path in reversed(made):
            with contextlib.suppress(OSError):
                path.rmdir()
    return Check("cache", True, str(cache))


def checks(cache: Path) -> list[Check]:
    """What ``rdmalab host check`` prints: each need, whether it is met, and what to do."""
    from rdmalab.lab.accel import hardware_virtualisation

    found = []
    missing = missing_packages()
    found.append(
        Check(
            "commands",
            not missing,
            "all there" if not missing else "lacking " + ", ".join(missing),
            "" if not missing else f"apt-get install -y {' '.join(missing)}",
        )
    )
    root = os.geteuid() == 0
    subids = Path("/etc/subuid").is_file()
    found.append(
        Check("privilege", root or subids, "root" if root else "user namespace", "run as root")
    )
    try:
        mirrors()
        found.append(Check("package sources", True, "taken from apt"))
    except HostError as error:
        found.append(Check("package sources", False, error.what, error.todo))
    found.append(_cache_check(cache))
    try:
        free = free_bytes(cache) / 2**30
        seen = f"{free:.0f} GiB free"
    except OSError as error:
        free, seen = 0.0, f"{error.filename or cache}: {error.strerror}"
    found.append(Check("disk", free >= 12, seen, "free 12 GiB, or set RDMALAB_CACHE"))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    found.append(Check("memory", memory >= 3.5, f"{memory:.0f} GiB", "a pair of guests needs 4"))
    hw = hardware_virtualisation()
    found.append(
        Check("accelerator", True, "KVM may be tried" if hw else "TCG (no vmx or svm flag)")
    )
    return found
