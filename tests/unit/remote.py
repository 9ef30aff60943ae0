# SPDX-License-Identifier: Apache-2.0
"""A far end for the tests of Node: a real sshd where there is one, and a stand-in for ssh
that runs the command here, in a session of its own as sshd does."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rdmalab.lab.ssh import Endpoint

_FAKE_SSH = """\
#!{python}
import os, pathlib, subprocess, sys, threading
if pathlib.Path({down!r}).exists():
    print("ssh: connect to host 192.0.2.1 port 22: Connection refused", file=sys.stderr)
    sys.exit(255)
pipe = subprocess.PIPE
shell = ["sh", "-c", sys.argv[-1]]
far = subprocess.Popen(shell, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
def pump(source, sink, close):
    try:
        while data := os.read(source.fileno(), 65536):
            sink.write(data)
            sink.flush()
    except OSError:
        pass
    if close:
        sink.close()
near = sys.stdin.buffer
threading.Thread(target=pump, args=(near, far.stdin, True), daemon=True).start()
outputs = [(far.stdout, sys.stdout.buffer, False), (far.stderr, sys.stderr.buffer, False)]
threads = [threading.Thread(target=pump, args=each) for each in outputs]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
status = far.wait()
sys.stdout.flush()
# ssh says 255 to a death by signal; and no interpreter shutdown waits for stdin.
os._exit(255 if status < 0 else status)
"""


class FakeSsh:
    """``down`` makes every new connection fail."""

    def __init__(self, directory: Path) -> None:
        self._down = directory / "down"
        self.program = directory / "fake-ssh"
        self.program.write_text(_FAKE_SSH.format(python=sys.executable, down=str(self._down)))
        self.program.chmod(0o755)
        self.endpoint = Endpoint("192.0.2.1")

    def down(self) -> None:
        self._down.touch()

    def up(self) -> None:
        self._down.unlink()


def find_sshd() -> str | None:
    path = os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin"
    return shutil.which("sshd", path=path)


@contextmanager
def sshd(program: str, directory: Path) -> Iterator[Endpoint]:
    """A real sshd on a port of the loopback, for this user with a key made for it."""
    for name in ("host", "login"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / name)], check=True
        )
    keys = directory / "authorized_keys"
    keys.write_bytes((directory / "login.pub").read_bytes())
    keys.chmod(0o600)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = {
        "Port": port,
        "ListenAddress": "127.0.0.1",
        "HostKey": directory / "host",
        "AuthorizedKeysFile": keys,
        "StrictModes": "no",
        "UsePAM": "no",
        "PidFile": "none",
    }
    arguments = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    server = subprocess.Popen([program, "-D", "-e", "-f", "/dev/null", *arguments], stderr=-3)
    try:
        until = time.monotonic() + 10
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert server.poll() is None, "sshd ended"
                assert time.monotonic() < until, "sshd does not listen"
                time.sleep(0.05)
        public = (directory / "host.pub").read_text()
        (directory / "known_hosts").write_text(f"[127.0.0.1]:{port} {public}")
        yield Endpoint(
            "127.0.0.1",
            port,
            os.environ.get("USER") or "root",
            directory / "login",
            directory / "known_hosts",
        )
    finally:
        server.terminate()
        server.wait()
