# SPDX-License-Identifier: Apache-2.0
"""Counters of one end, read from a tree that looks like /sys, and from real sockets."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from rdmalab.measure.node import counters
from rdmalab.measure.node.request import Claim

CLAIM = Claim("rxe", "rxe_roce0", "roce0")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, "sys/class/net/roce0/statistics", tx_packets=10, rx_packets=20,
          tx_bytes=1000, rx_bytes=2000)  # fmt: skip
    write(tmp_path, "sys/class/infiniband/rxe_roce0/ports/1/hw_counters", sent_pkts=7,
          rcvd_pkts=8, lifespan=10)  # fmt: skip
    return tmp_path


def write(root: Path, folder: str, **values: object) -> None:
    (root / folder).mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (root / folder / name).write_text(f"{value}\n")


@pytest.fixture
def control() -> socket.socket:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        server.accept()
    return near


def test_deltas_are_what_moved_between_two_snapshots(root: Path, control: socket.socket) -> None:
    before = counters.take(CLAIM, control, root=root)
    write(root, "sys/class/net/roce0/statistics", tx_packets=110, rx_packets=320, tx_bytes=9000)
    write(root, "sys/class/infiniband/rxe_roce0/ports/1/hw_counters", sent_pkts=107)
    deltas = counters.take(CLAIM, control, root=root).since(before)
    assert (deltas.link_sent, deltas.link_received, deltas.link_sent_bytes) == (100, 300, 8000)
    assert deltas.rdma == {"sent_pkts": 100, "rcvd_pkts": 0}


def test_a_counter_that_is_not_there_is_none_and_never_zero(
    root: Path, control: socket.socket
) -> None:
    (root / "sys/class/net/roce0/statistics/tx_packets").unlink()
    write(root, "sys/class/infiniband/rxe_roce0/ports/1/hw_counters", rcvd_pkts="N/A (no PMA)")
    before = counters.take(CLAIM, control, root=root)
    deltas = counters.take(CLAIM, control, root=root).since(before)
    assert deltas.link_sent is None
    assert deltas.rdma["rcvd_pkts"] is None
    assert deltas.tcp_sent is None


def test_a_device_that_is_not_there_has_no_counters(root: Path, control: socket.socket) -> None:
    found = counters.take(Claim("rxe", "rxe_other", "roce0"), control, root=root)
    assert found.rdma == {}


def test_a_counter_that_appears_in_between_gives_no_delta(
    root: Path, control: socket.socket
) -> None:
    before = counters.take(CLAIM, control, root=root)
    write(root, "sys/class/infiniband/rxe_roce0/ports/1/hw_counters", sent_bytes=5000)
    assert counters.take(CLAIM, control, root=root).since(before).rdma["sent_bytes"] is None


def test_a_snapshot_survives_the_way_to_the_host(root: Path, control: socket.socket) -> None:
    found = counters.take(CLAIM, control, root=root)
    assert counters.Snapshot.from_json(found.to_json()) == found


def test_segments_of_a_connection_are_the_kernel_s_own_count() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    with near, far:
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        out, _ = counters.segments(near)
        _, into = counters.segments(far)
        for _ in range(10):
            near.send(b"x")
            far.recv(1)
        assert counters.segments(near)[0] - out == 10
        assert counters.segments(far)[1] - into >= 10
        # Loopback has an MTU of 65536, any other network a smaller one.
        assert 500 < counters.send_mss(near) <= 65536
