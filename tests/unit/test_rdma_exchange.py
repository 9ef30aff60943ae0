# SPDX-License-Identifier: Apache-2.0
"""Whatever a peer does, there is a message or one clear error within the deadline."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmalab.errors import UsageError
from rdmalab.rdma import exchange
from rdmalab.rdma.exchange import Channel, ExchangeError, Listener, Version

_DEADLINE = 0.4
_SLACK = 1.0  # what a busy machine may add

_HELLO = exchange.encode({"kind": "hello", "node": "peer"})


@contextlib.contextmanager
def _peer(behave: Callable[[socket.socket], object]) -> Iterator[int]:
    """A peer that accepts one connection and then behaves so; the port it listens on."""
    server = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        with contextlib.suppress(OSError):
            connection, _ = server.accept()
            with connection:
                behave(connection)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield server.getsockname()[1]
    finally:
        server.close()
        thread.join(5)
        assert not thread.is_alive()


def _wait_for_end(connection: socket.socket) -> None:
    """Reads until the other end closes."""
    connection.settimeout(5)
    with contextlib.suppress(OSError):
        while connection.recv(65536):
            pass


def _sends(data: bytes) -> Callable[[socket.socket], object]:
    def behave(connection: socket.socket) -> None:
        connection.sendall(data)
        _wait_for_end(connection)

    return behave


def _drips(connection: socket.socket) -> None:
    for byte in _HELLO:
        connection.sendall(bytes([byte]))
        time.sleep(0.1)


def _header(length: int, magic: bytes = exchange.MAGIC, major: int = 1) -> bytes:
    return struct.pack("!8sHHI", magic, major, 0, length)


@pytest.mark.parametrize(
    ("behave", "line"),
    [
        pytest.param(_wait_for_end, r"sent no whole message: nothing in 0\.4 s", id="nothing"),
        pytest.param(
            _sends(_HELLO[:20]), r"sent no whole message: 4 of \d+ bytes in 0\.4 s", id="half"
        ),
        pytest.param(
            _sends(_HELLO[:7]), r"no whole message: 7 of 16 bytes in 0\.4 s", id="half a header"
        ),
        pytest.param(_drips, r"no whole message: \d+ of 16 bytes in 0\.4 s", id="slow drip"),
        pytest.param(
            _sends(b"SSH-2.0-OpenSSH_10.0\r\n"),
            "does not speak this protocol: first bytes 53 53 48 2d.*check the port",
            id="another protocol",
        ),
        pytest.param(_sends(bytes(64)), "does not speak this protocol", id="zeros"),
        pytest.param(_sends(_header(65537)), "too long: 65537 bytes, at most 65536", id="too long"),
        pytest.param(_sends(_header(2**32 - 1)), "too long: 4294967295 bytes", id="far too long"),
        pytest.param(
            _sends(_header(2, major=2) + b"{}"),
            "the peer speaks version 2.0 of the exchange, we speak 1.0",
            id="another version",
        ),
        pytest.param(_sends(_header(4) + b"nope"), "is not JSON", id="no JSON"),
        pytest.param(_sends(_header(2) + b"\xff\xff"), "is not JSON", id="no UTF-8"),
        pytest.param(_sends(_header(60000) + b"[" * 60000), "is not JSON", id="deep"),
        pytest.param(_sends(_header(3) + b"NaN"), "is not JSON", id="not a number"),
        pytest.param(_sends(_header(2) + b"[]"), "not a JSON object: a list", id="a list"),
        pytest.param(_sends(exchange.encode({"kind": "bye"})), "sent no hello", id="no hello"),
        pytest.param(
            _sends(exchange.encode({"kind": "hello", "node": "a\nb"})),
            "sent no hello",
            id="a name with a line feed",
        ),
        pytest.param(
            lambda connection: None,
            "(closed the connection|connection to the peer broke)",
            id="closes",
        ),
        pytest.param(
            lambda connection: connection.sendall(_HELLO[:20]),
            "(closed the connection: 4 of|connection to the peer broke)",
            id="closes half way",
        ),
    ],
)
def test_bad_peer_ends_in_one_line_in_time(
    behave: Callable[[socket.socket], object], line: str
) -> None:
    with _peer(behave) as port:
        start = time.monotonic()
        with pytest.raises(ExchangeError, match=line) as caught:
            exchange.connect("127.0.0.1", port, "here", _DEADLINE)
        assert time.monotonic() - start < _DEADLINE + _SLACK
    assert "\n" not in str(caught.value)
    assert "127.0.0.1" in str(caught.value)


def test_peer_that_reads_nothing_ends_in_time() -> None:
    stop = threading.Event()

    def behave(connection: socket.socket) -> None:
        connection.sendall(_HELLO)
        stop.wait(10)

    with _peer(behave) as port:
        channel = exchange.connect("127.0.0.1", port, "here", _DEADLINE)
        start = time.monotonic()

        def fill() -> None:
            while time.monotonic() - start < 5:
                channel.send({"filler": "x" * 60000})

        with channel, pytest.raises(ExchangeError, match=r"took no message: deadline 0\.4 s"):
            fill()
        assert time.monotonic() - start < 5
        stop.set()


def test_both_ends_of_different_versions_name_both() -> None:
    lines: list[str] = []

    def serve(listener: Listener) -> None:
        with pytest.raises(ExchangeError) as caught:
            listener.accept("old", 5, Version(1, 3))
        lines.append(str(caught.value))

    with Listener("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=serve, args=[listener])
        thread.start()
        with pytest.raises(ExchangeError) as caught:
            exchange.connect("127.0.0.1", listener.port, "new", 5, Version(2, 0))
        thread.join(10)
    assert "speaks version 1.3 of the exchange, we speak 2.0" in str(caught.value)
    assert len(lines) == 1
    assert "speaks version 2.0 of the exchange, we speak 1.3" in lines[0]


def test_a_newer_minor_version_is_understood() -> None:
    with _pair(Version(1, 0), Version(1, 7)) as (here, there):
        here.send({"a": 1})
        assert there.receive() == {"a": 1}


def test_ends_learn_names_exchange_and_meet() -> None:
    with _pair() as (here, there):
        assert (here.peer, there.peer) == ("there", "here")
        both: dict[str, Any] = {}
        thread = threading.Thread(
            target=lambda: (
                both.update(there=there.exchange({"from": "there"})),
                there.barrier("ready"),
            )
        )
        thread.start()
        both["here"] = here.exchange({"from": "here", "text": "ü" * 9000})
        here.barrier("ready")
        thread.join(5)
        assert both["here"] == {"from": "there"}
        assert both["there"] == {"from": "here", "text": "ü" * 9000}


def test_barriers_of_different_names_are_an_error() -> None:
    with _pair() as (here, there):
        there.send({"kind": "barrier", "name": "done"})
        with pytest.raises(ExchangeError, match=r'not at barrier ready: it sent .*"done"'):
            here.barrier("ready")


def test_too_long_a_message_is_not_sent() -> None:
    with pytest.raises(ExchangeError, match="too long to send: 65547 bytes, at most 65536"):
        exchange.encode({"text": "x" * 65536})


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    start = time.monotonic()
    with pytest.raises(ExchangeError, match=f"no peer at 127.0.0.1 port {port}: .*refused"):
        exchange.connect("127.0.0.1", port, "here", _DEADLINE)
    assert _DEADLINE - 0.1 < time.monotonic() - start < _DEADLINE + _SLACK


def test_the_listener_may_come_second() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    peers: list[str] = []

    def later() -> None:
        time.sleep(0.3)
        with Listener("127.0.0.1", port) as listener, listener.accept("late", 5) as channel:
            peers.append(channel.peer)

    thread = threading.Thread(target=later)
    thread.start()
    with exchange.connect("127.0.0.1", port, "early", 5) as channel:
        assert channel.peer == "late"
    thread.join(5)
    assert peers == ["early"]


def test_nobody_connects() -> None:
    with Listener("::1", 0) as listener:
        start = time.monotonic()
        with pytest.raises(ExchangeError, match=f"no peer connected to port {listener.port}"):
            listener.accept("here", _DEADLINE)
        assert time.monotonic() - start < _DEADLINE + _SLACK


def test_a_taken_port_is_named() -> None:
    with (
        Listener("127.0.0.1", 0) as first,
        pytest.raises(ExchangeError, match=f"cannot listen on 127.0.0.1 port {first.port}: .*use"),
    ):
        Listener("127.0.0.1", first.port)


@pytest.mark.parametrize(("address", "port"), [("node1", 1), ("", 1), ("10.0.0.1", 65536)])
def test_bad_address_is_wrong_use(address: str, port: int) -> None:
    with pytest.raises(UsageError):
        exchange.connect(address, port, "here", 1)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_an_error(data: bytes) -> None:
    with contextlib.suppress(ExchangeError):
        assert isinstance(exchange.decode(data), dict)


@given(st.binary(max_size=200))
def test_any_body_after_a_good_header_is_a_message_or_an_error(body: bytes) -> None:
    with contextlib.suppress(ExchangeError):
        assert isinstance(exchange.decode(_header(len(body)) + body), dict)


@given(st.text(alphabet='{}[]",:0123456789.eE+-truefalsnNaIity\\u \ud800', max_size=60))
def test_almost_json_is_a_message_or_an_error(text: str) -> None:
    body = text.encode("utf-8", "surrogatepass")
    with contextlib.suppress(ExchangeError):
        assert isinstance(exchange.decode(_header(len(body)) + body), dict)


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=6,
)


@given(st.dictionaries(st.text(), _JSON, max_size=4))
def test_messages_arrive_as_they_were(message: dict[str, Any]) -> None:
    try:
        data = exchange.encode(message)
    except ExchangeError:
        return
    assert exchange.decode(data) == json.loads(json.dumps(message))


@contextlib.contextmanager
def _pair(
    ours: Version = exchange.VERSION, theirs: Version = exchange.VERSION
) -> Iterator[tuple[Channel, Channel]]:
    accepted: list[Channel] = []
    with Listener("127.0.0.1", 0) as listener:
        thread = threading.Thread(
            target=lambda: accepted.append(listener.accept("there", 5, theirs))
        )
        thread.start()
        with exchange.connect("127.0.0.1", listener.port, "here", 5, ours) as here:
            thread.join(5)
            with accepted[0] as there:
                yield here, there
