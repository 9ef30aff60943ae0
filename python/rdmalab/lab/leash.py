# SPDX-License-Identifier: Apache-2.0
"""The persistent connection to a node, and what ends remote processes.

ssh leaves a remote command running when its local side dies. So the connection's master
session runs a small shell script on the node, the leash: every command is started with
its process group's number noted in a directory of the leash's, a line on the leash's
stdin ends one group, and the end of its stdin, which comes however the local side died
or the connection broke, ends them all.
"""

from __future__ import annotations

import queue
import shlex
import subprocess
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from rdmalab.errors import HostError, NodeLost
from rdmalab.lab.ssh import Endpoint, control_path

# sshd makes the command of a session without a terminal the leader of its own session
# and process group (do_exec_no_pty() in OpenSSH's session.c), so $$ below is a group.

_LEASH = r"""
trap '' HUP PIPE
umask 022
base=/run/rdmalab
mkdir -p "$base" 2>/dev/null
if ! [ -O "$base" ] || ! [ -w "$base" ]; then
    base=${XDG_RUNTIME_DIR:-/tmp}/rdmalab-$(id -u)
    mkdir -p "$base" 2>/dev/null
    if ! [ -O "$base" ] || [ -L "$base" ]; then
        echo "$base is no directory of this user's" >&2
        exit 1
    fi
fi
dir=$base/leash/$1
mkdir -p "$dir" || exit 1
end() {
    pid=
    { read -r pid <"$dir/$1"; } 2>/dev/null
    [ -n "$pid" ] && kill -s "$2" -- "-$pid" 2>/dev/null
}
all() {
    found=1
    for file in "$dir"/*; do
        case $file in *.stop|*.status) continue ;; esac
        end "${file##*/}" "$1" && found=0
    done
    return $found
}
echo "READY $base"
while read -r verb id signal; do
    case $verb in
    END) : >"$dir/$id.stop"; end "$id" "$signal" ;;
    FORGET) rm -f "$dir/$id" "$dir/$id.stop" "$dir/$id.status" ;;
    ASK)
        answer=absent
        [ -e "$dir/$id" ] && answer=started
        [ -e "$dir/$id.status" ] && answer=ended
        echo "$id $answer" ;;
    esac
done
# Renamed first: from here on no command can start, see the wrapper.
mv "$dir" "$dir.dead"
dir=$dir.dead
all TERM && sleep 1 && all KILL
rm -rf "$dir"
"""

# No "exec" of the command itself: ssh reports a death by signal as 255 like its own
# errors, the shell as 128 + signal. The subshell's exec takes programs from PATH, never
# the shell's builtins (dash's echo rewrites backslashes). A trap that is not '' is reset
# in the subshell: the command sees the default action.
_WRAPPER = r"""
dir=$1 id=$2
shift 2
trap : TERM INT HUP
{ echo $$ >"$dir/$id"; } 2>/dev/null && [ -d "$dir" ] && ! [ -e "$dir/$id.stop" ] || exit 255
PATH=$PATH:/usr/sbin:/sbin
(exec "$@")
status=$?
[ $status = 255 ] && : >"$dir/$id.status"
exit $status
"""


def remote_command(script: str, *arguments: str) -> str:
    """The one string that ssh passes to the user's (POSIX) login shell, every argument
    reaching the script as it is."""
    return "exec " + shlex.join(["sh", "-c", script, "rdmalab", *arguments])


class Leash:
    """One connection: made when constructed, gone when closed, lost or garbage.

    ``timeout`` is in seconds, from start to the node's first answer. Raises NodeLost.
    """

    def __init__(
        self, name: str, endpoint: Endpoint, *, ssh: Sequence[str] = ("ssh",), timeout: float = 30.0
    ) -> None:
        self._name = name
        self._path = control_path()
        identity = uuid.uuid4().hex
        self._common = [*ssh, "-F", "none", "-T", "-S", str(self._path)]
        for key, value in endpoint.options():
            self._common += ["-o", f"{key}={value}"]
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._answers: queue.Queue[str] = queue.Queue()
        self._ids = 0
        master = [
            *self._common,
            *("-o", "ControlMaster=yes", "-o", "ControlPersist=no"),
            *("-o", f"ConnectTimeout={max(1, round(timeout))}"),
            # A stalled guest is the deadlines' affair; this ends a connection whose other
            # end vanished without a word.
            *("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=8"),
            *("--", name, remote_command(_LEASH, identity)),
        ]
        # A session of its own: Ctrl-C goes to us, and we end the remote side in order.
        try:
            self._master = subprocess.Popen(
                master,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except FileNotFoundError as error:
            raise HostError(
                f"no {ssh[0]} on this host", todo="apt install openssh-client"
            ) from error
        self._errors: list[bytes] = []
        assert self._master.stdout is not None
        assert self._master.stderr is not None
        for read, pipe in (
            (self._listen, self._master.stdout),
            (self._note, self._master.stderr),
        ):
            threading.Thread(target=read, args=(pipe,), daemon=True).start()
        try:
            ready = self._await("READY", time.monotonic() + timeout)
        except BaseException:
            self.close()
            raise
        if ready is None:
            seen = self.last_error() or f"no answer within {timeout:g} s"
            self.close()
            raise NodeLost(
                f"ssh to {endpoint.user}@{endpoint.host} port {endpoint.port} failed",
                node=name,
                seen=seen,
                todo="see whether the node is up and its host key and login key are right",
            )
        self.base = ready
        self._directory = f"{ready}/leash/{identity}"

    @property
    def alive(self) -> bool:
        """Whether ssh still holds the connection (a hung node's may still be held)."""
        return self._master.poll() is None

    def command(self, argv: Sequence[str]) -> tuple[Lease, list[str]]:
        """A lease, and the local argv that runs ``argv`` on the node under it."""
        with self._lock:
            self._ids += 1
            identity = str(self._ids)
        remote = remote_command(_WRAPPER, self._directory, identity, *argv)
        local = [*self._common, "-o", "ControlMaster=no", "--", self._name, remote]
        return Lease(self, identity), local

    def last_error(self) -> str:
        """The last line that ssh itself wrote, or an empty string."""
        try:
            # ssh writes its reason right before it exits; give the reader a moment.
            self._master.wait(0.2)
            time.sleep(0.05)
        except subprocess.TimeoutExpired:
            pass
        text = b"".join(self._errors).decode(errors="replace").strip()
        return text.splitlines()[-1] if text else ""

    def close(self, timeout: float = 5.0) -> None:
        """End what still runs under the leash and the connection. Never raises."""
        if self._master.stdin is not None:
            with suppress(OSError):
                self._master.stdin.close()
        try:
            self._master.wait(timeout)
        except subprocess.TimeoutExpired:
            self._master.terminate()
            try:
                self._master.wait(2.0)
            except subprocess.TimeoutExpired:
                self._master.kill()
                self._master.wait()
        self._path.unlink(missing_ok=True)

    def drop(self) -> None:
        """Cut the connection without waiting for a node that does not answer."""
        self._master.kill()
        self.close(1.0)

    def ask(self, identity: str, timeout: float) -> str | None:
        """See ``Lease.fate``."""
        with self._asking:  # or one thread would drop the other's answer
            self.say(f"ASK {identity}")
            return self._await(identity, time.monotonic() + timeout)

    def say(self, line: str) -> None:
        """One line to the script on the node; lost with the connection."""
        assert self._master.stdin is not None
        with self._lock, suppress(OSError, ValueError):
            self._master.stdin.write(line.encode() + b"\n")
            self._master.stdin.flush()

    def _await(self, key: str, until: float) -> str | None:
        while True:
            try:
                line = self._answers.get(timeout=max(0.0, min(0.5, until - time.monotonic())))
            except queue.Empty:
                if time.monotonic() >= until or not self.alive:
                    return None
                continue
            if line == "":  # end of file
                self._answers.put("")
                return None
            word, _, rest = line.partition(" ")
            if word == key:
                return rest

    def _listen(self, pipe: IO[bytes]) -> None:
        for line in pipe:
            self._answers.put(line.decode(errors="replace").strip() or " ")
        self._answers.put("")

    def _note(self, pipe: IO[bytes]) -> None:
        for line in pipe:
            self._errors.append(line)
            del self._errors[:-20]


@dataclass(frozen=True)
class Lease:
    """One command under a leash."""

    leash: Leash
    identity: str

    def end(self, signal: str) -> None:
        """Send a signal ("TERM", "KILL") to the command's process group; a command that
        has not started yet never will."""
        self.leash.say(f"END {self.identity} {signal}")

    def forget(self) -> None:
        """The command has ended: its process group's number may mean another one soon."""
        self.leash.say(f"FORGET {self.identity}")

    def fate(self, timeout: float) -> str | None:
        """What became of a command whose ssh ended with 255: "ended" if that was its own
        status, "started" if it was killed together with its shell, "absent" if it never
        started, None if the connection is lost."""
        return self.leash.ask(self.identity, timeout)
