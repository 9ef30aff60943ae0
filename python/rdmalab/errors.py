# SPDX-License-Identifier: Apache-2.0
"""What can go wrong, and the exit status each kind ends with.

Every error is one line: what failed, on which node, what was seen, what to do.
"""

from __future__ import annotations


class RdmalabError(Exception):
    """A finding or a failed step: exit status 1.

    ``str(error)`` is the one line that is printed; it holds no newline.
    """

    exit_status = 1

    def __init__(self, what: str, *, node: str = "", seen: str = "", todo: str = "") -> None:
        self.what = what
        self.node = node
        self.seen = seen
        self.todo = todo
        line = f"{node}: {what}" if node else what
        if seen:
            line += f": {seen}"
        if todo:
            line += f"; {todo}"
        super().__init__(" ".join(line.split()))


class UsageError(RdmalabError):
    """Wrong use: a bad argument, topology, profile or name: exit status 2."""

    exit_status = 2


class NodeLost(RdmalabError):
    """QEMU or the host died for a reason outside the guest, or a node's ssh is gone:
    exit status 3. It is neither a failure of what ran nor a pass."""

    exit_status = 3


class HostError(RdmalabError):
    """The host lacks something, which the line names with the command that installs it:
    exit status 4."""

    exit_status = 4


class DeadlineExceeded(RdmalabError):
    """A step ran past its deadline; the line names the deadline in seconds: exit status 1."""


class CommandFailed(RdmalabError):
    """A command on a node or in the sysroot ended with a status that was not asked for."""
