# SPDX-License-Identifier: Apache-2.0
"""The out-of-band exchange: two ends tell each other about their queue pairs over TCP.

Wire format, all integers big-endian::

    0   8  magic    "rdmalab\\n"
    8   2  major    of the protocol's version
    10  2  minor
    12  4  length   of the body in bytes, at most 65536
    16  …  body     a JSON object in UTF-8

The first message either way is a hello, ``{"kind": "hello", "node": NAME}``. Ends whose
major versions differ refuse each other, naming both versions; that is why magic and version
sit at the front and never move. A newer minor version may add keys to bodies.

Each ``Channel`` has one deadline for a whole step (connecting, sending, receiving), not one
per read, so that a peer that drips a byte a second cannot hold it.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import select
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from rdmalab.errors import RdmalabError, UsageError

MAGIC = b"rdmalab\n"
MAX_BODY = 64 * 1024
DEFAULT_PORT = 18515

_HEADER = struct.Struct("!8sHHI")
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")


@dataclass(frozen=True, order=True)
class Version:
    """Of the protocol: ends with one ``major`` understand each other."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


VERSION = Version(1, 0)


class ExchangeError(RdmalabError):
    """The peer sent something that is no message, nothing in time, or went away."""


def encode(message: Mapping[str, Any], version: Version = VERSION) -> bytes:
    """One message as bytes. ``ExchangeError`` when its body is over ``MAX_BODY`` bytes."""
    body = json.dumps(message, separators=(",", ":"), allow_nan=False).encode("utf-8")
    if len(body) > MAX_BODY:
        raise ExchangeError(
            "a message is too long to send", seen=f"{len(body)} bytes, at most {MAX_BODY}"
        )
    return _HEADER.pack(MAGIC, version.major, version.minor, len(body)) + body


def decode_header(header: bytes, ours: Version = VERSION) -> int:
    """The length of the body that follows a header of 16 bytes.

    Raises ``ExchangeError`` for bytes that are no header, for another major version, and
    for a length over ``MAX_BODY``.
    """
    if len(header) != _HEADER.size:
        raise ExchangeError(
            "not a message", seen=f"{len(header)} bytes where a header of {_HEADER.size} belongs"
        )
    magic, major, minor, length = _HEADER.unpack(header)
    if magic != MAGIC:
        raise ExchangeError(
            "the peer does not speak this protocol",
            seen=f"first bytes {header[:8].hex(' ')}",
            todo="check the port number",
        )
    theirs = Version(major, minor)
    if theirs.major != ours.major:
        raise ExchangeError(
            f"the peer speaks version {theirs} of the exchange, we speak {ours}",
            todo="use one version of rdmalab on both nodes",
        )
    if length > MAX_BODY:
        raise ExchangeError(
            "the peer announces a message that is too long",
            seen=f"{length} bytes, at most {MAX_BODY}",
        )
    return int(length)


def decode_body(body: bytes) -> dict[str, Any]:
    """The JSON object in a body; ``ExchangeError`` for anything else."""
    try:
        message = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ExchangeError(
            "the peer's message is not JSON", seen=f"{type(error).__name__}: {error}"[:120]
        ) from None
    if not isinstance(message, dict):
        raise ExchangeError(
            "the peer's message is not a JSON object", seen=f"a {type(message).__name__}"
        )
    return message


def decode(data: bytes, ours: Version = VERSION) -> dict[str, Any]:
    """The message that ``data`` is, whole; ``ExchangeError`` for any other bytes."""
    length = decode_header(data[: _HEADER.size], ours)
    body = data[_HEADER.size :]
    if len(body) != length:
        raise ExchangeError("not a message", seen=f"a body of {len(body)} bytes, not {length}")
    return decode_body(body)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


class Channel:
    """A connection to the other end, after both hellos. Use it as a context manager.

    ``peer`` is the other node's name. Every call raises ``ExchangeError`` within
    ``seconds`` of its start.
    """

    def __init__(
        self, connection: socket.socket, node: str, seconds: float, version: Version = VERSION
    ) -> None:
        self._socket = connection
        self._seconds = seconds
        self._version = version
        self._where = _peer_name(connection)
        try:
            if not _NODE.fullmatch(node):
                raise UsageError(f"{node!r} is no node name", todo="letters, digits, . _ -")
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.send({"kind": "hello", "node": node})
            self.peer = self._hello()
        except BaseException:
            connection.close()
            raise

    def __enter__(self) -> Channel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def send(self, message: Mapping[str, Any], *, seconds: float | None = None) -> None:
        """Sends one message whole."""
        limit = self._seconds if seconds is None else seconds
        data = encode(message, self._version)
        try:
            # A socket's timeout bounds all of sendall, not each of its writes.
            self._socket.settimeout(limit)
            self._socket.sendall(data)
        except TimeoutError:
            raise self._error("the peer took no message", f"deadline {limit:g} s") from None
        except OSError as error:
            raise self._error("the connection to the peer broke", _why(error)) from None

    def receive(self, *, seconds: float | None = None) -> dict[str, Any]:
        """The next message, whole."""
        limit = self._seconds if seconds is None else seconds
        deadline = time.monotonic() + limit
        header = self._read(_HEADER.size, deadline, limit)
        try:
            return decode_body(self._read(decode_header(header, self._version), deadline, limit))
        except ExchangeError as error:
            if error.node:
                raise
            raise ExchangeError(
                error.what, node=self._where, seen=error.seen, todo=error.todo
            ) from None

    def exchange(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Sends ours, then reads theirs: both ends may do it at once, since a message is
        smaller than a socket's buffers."""
        self.send(message)
        return self.receive()

    def barrier(self, name: str, *, seconds: float | None = None) -> None:
        """Returns once both ends have come to the barrier ``name``."""
        self.send({"kind": "barrier", "name": name}, seconds=seconds)
        theirs = self.receive(seconds=seconds)
        if theirs.get("kind") != "barrier" or theirs.get("name") != name:
            raise self._error(
                f"the peer is not at barrier {name}", f"it sent {json.dumps(theirs)[:120]}"
            )

    def close(self) -> None:
        self._socket.close()

    def _hello(self) -> str:
        hello = self.receive()
        name = hello.get("node")
        if hello.get("kind") != "hello" or not isinstance(name, str) or not _NODE.fullmatch(name):
            raise self._error("the peer sent no hello", json.dumps(hello)[:120])
        return name

    def _read(self, count: int, deadline: float, limit: float) -> bytes:
        data = bytearray()
        while len(data) < count:
            left = deadline - time.monotonic()
            got = f"{len(data)} of {count} bytes" if data else "nothing"
            if left <= 0:
                raise self._error("the peer sent no whole message", f"{got} in {limit:g} s")
            try:
                self._socket.settimeout(left)
                chunk = self._socket.recv(count - len(data))
            except TimeoutError:
                continue
            except OSError as error:
                raise self._error("the connection to the peer broke", _why(error)) from None
            if not chunk:
                raise self._error("the peer closed the connection", f"{got} received")
            data += chunk
        return bytes(data)

    def _error(self, what: str, seen: str) -> ExchangeError:
        return ExchangeError(what, node=self._where, seen=seen)


class Listener:
    """A listening socket; ``port`` is the one it got. Use it as a context manager."""

    def __init__(self, address: str, port: int = DEFAULT_PORT) -> None:
        family, where = _resolve(address, port)
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(where)
            self._socket.listen(1)
        except OSError as error:
            self._socket.close()
            raise ExchangeError(
                f"cannot listen on {address} port {port}",
                seen=_why(error),
                todo="use another port or end what holds it",
            ) from None
        self.port = int(self._socket.getsockname()[1])

    def __enter__(self) -> Listener:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def accept(self, node: str, seconds: float, version: Version = VERSION) -> Channel:
        """The first peer to connect, after hellos. ``seconds`` bounds the wait for it, and
        then each step of the channel."""
        readable, _, _ = select.select([self._socket], [], [], seconds)
        if not readable:
            raise ExchangeError(
                f"no peer connected to port {self.port}", seen=f"deadline {seconds:g} s"
            )
        connection, _ = self._socket.accept()
        return Channel(connection, node, seconds, version)

    def close(self) -> None:
        self._socket.close()


def connect(
    address: str, port: int, node: str, seconds: float, version: Version = VERSION
) -> Channel:
    """A channel to the peer that listens at ``address``.

    A refused connection is tried again until the deadline: the two ends are started by
    different hands, and either may come first.
    """
    family, where = _resolve(address, port)
    deadline = time.monotonic() + seconds
    seen = ""
    while (left := deadline - time.monotonic()) > 0:
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.settimeout(left)
            connection.connect(where)
        except OSError as error:
            connection.close()
            seen = _why(error)
            time.sleep(max(0.0, min(0.1, deadline - time.monotonic())))
            continue
        except BaseException:
            connection.close()
            raise
        return Channel(connection, node, seconds, version)
    raise ExchangeError(
        f"no peer at {address} port {port}", seen=f"{seen} for {math.ceil(seconds * 10) / 10:g} s"
    )


def _resolve(address: str, port: int) -> tuple[int, Any]:
    if not 0 <= port <= 65535:
        raise UsageError(f"port {port} does not exist", todo="allowed: 0 to 65535")
    try:
        found = socket.getaddrinfo(
            address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )
    except (OSError, UnicodeError) as error:
        raise UsageError(f"{address!r} is no IP address", seen=str(error)) from None
    family, _, _, _, where = found[0]
    return family, where


def _peer_name(connection: socket.socket) -> str:
    with contextlib.suppress(OSError):
        host, port = connection.getpeername()[:2]
        return f"peer {host} port {port}"
    return "peer"


def _why(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
