# SPDX-License-Identifier: Apache-2.0
"""How a node is reached with OpenSSH: the endpoint and the options that it implies."""

from __future__ import annotations

import os
import stat
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rdmalab.errors import HostError

_SUN_PATH = 108  # sizeof(sockaddr_un.sun_path), NUL included
_SSH_SUFFIX = 17  # ssh binds "<path>.<16 random characters>" first, then renames it


@dataclass(frozen=True)
class Endpoint:
    """Where a node's sshd is. ``key`` or ``known_hosts`` None means OpenSSH's own default;
    ``host_key_alias`` is the name in known_hosts where that is not ``host`` and ``port``."""

    host: str
    port: int = 22
    user: str = "root"
    key: Path | None = None
    known_hosts: Path | None = None
    host_key_alias: str = ""

    def options(self) -> Iterator[tuple[str, str]]:
        """ssh_config keywords and values: no prompt, no agent, no key but the given one,
        and a host key that is known already."""
        yield "HostName", self.host
        yield "Port", str(self.port)
        yield "User", self.user
        if self.key is not None:
            yield "IdentityFile", _quoted(self.key)
            yield "IdentitiesOnly", "yes"
        if self.known_hosts is not None:
            yield "UserKnownHostsFile", _quoted(self.known_hosts)
            yield "GlobalKnownHostsFile", "/dev/null"
        if self.host_key_alias:
            yield "HostKeyAlias", self.host_key_alias
        yield "StrictHostKeyChecking", "yes"
        yield "BatchMode", "yes"
        yield "PreferredAuthentications", "publickey"
        yield "ClearAllForwardings", "yes"
        yield "UpdateHostKeys", "no"
        yield "LogLevel", "ERROR"


def _quoted(path: Path) -> str:
    # ssh expands % in these paths and splits UserKnownHostsFile at blanks.
    return '"' + str(path.absolute()).replace("%", "%%") + '"'


def config_text(endpoints: Mapping[str, Endpoint]) -> str:
    """An ssh_config for all nodes of a lab: ``ssh -F FILE node0`` then just works."""
    lines: list[str] = []
    for name, endpoint in sorted(endpoints.items()):
        lines.append(f"Host {name}")
        lines += [f"    {key} {value}" for key, value in endpoint.options()]
    return "\n".join(lines) + "\n"


def control_path() -> Path:
    """A fresh path for a control socket: in a directory of this user's alone, and short,
    since a socket's path must fit into 108 bytes with ssh's own suffix.

    Raises HostError if no such directory can be had.
    """
    for base in (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"):
        if not base:
            continue
        directory = Path(base) / f"rdmalab-{os.getuid()}"
        path = directory / uuid.uuid4().hex[:12]
        if len(os.fsencode(path)) + _SSH_SUFFIX >= _SUN_PATH or not _private(directory):
            continue
        return path
    raise HostError(
        "no directory for ssh's control sockets",
        seen="neither XDG_RUNTIME_DIR nor /tmp holds a short, private, writable one",
        todo="set XDG_RUNTIME_DIR to a directory of yours with a path below 60 bytes",
    )


def _private(directory: Path) -> bool:
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        status = directory.lstat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(status.st_mode)
        and status.st_uid == os.getuid()
        and status.st_mode & 0o077 == 0
        and os.access(directory, os.W_OK)
    )
