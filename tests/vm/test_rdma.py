# SPDX-License-Identifier: Apache-2.0
"""RDMA on two nodes: devices shown, SoftRoCE made and gone, messages over every kind of
queue pair, and what goes wrong ending in one line."""

from __future__ import annotations

import ipaddress
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from rdmalab.lab.node import LinkEnd, Node
from rdmalab.rdma import inventory
from rdmalab.rdma.model import Device, gid_address

_SCHEMA = Path(__file__).parents[2] / "docs/schemas/rdma-show.schema.json"
_STEP = 20.0  # seconds that a step of a check may take on the reference machine


def _end(node: Node) -> LinkEnd:
    return next(end for end in node.links.values() if end.kind == "roce")


def _ipv4(node: Node) -> str:
    return str(ipaddress.ip_interface(_end(node).ipv4).ip)


def _ipv6(node: Node) -> str:
    return str(ipaddress.ip_interface(_end(node).ipv6).ip)


def _name(node: Node) -> str:
    return f"rxe_{_end(node).netdev}"


def _device(node: Node) -> Device:
    [found] = [device for device in inventory.show(node) if device.name == _name(node)]
    return found


def _setup(node: Node, *args: str) -> dict[str, Any]:
    done = node.python("rdmalab.rdma", ["setup", "--netdev", _end(node).netdev, *args])
    return dict(json.loads(done.stdout))


def _refusal(node: Node, args: Sequence[str], status: int) -> str:
    """The one line that a command on the node ends with."""
    result = node.python("rdmalab.rdma", args, check=False)
    assert result.status == status, result.stderr
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    return line


def _queue_pairs(node: Node) -> int:
    [row] = json.loads(node.run(["rdma", "-j", "resource", "show", _name(node)]).stdout)
    return int(row["qp"])


@pytest.fixture
def pair(node0: Node, node1: Node) -> tuple[Node, Node]:
    with ThreadPoolExecutor(2) as both:
        list(both.map(_setup, (node0, node1)))
    return node0, node1


def _talk(
    pair: tuple[Node, Node],
    common: Sequence[str] = (),
    *,
    address: str = "",
    listener: Sequence[str] = (),
    caller: Sequence[str] = (),
) -> tuple[tuple[int, str, str], tuple[int, str, str]]:
    """Both ends of a check: status, stdout and stderr of the listener and of the caller."""
    node0, node1 = pair
    address = address or _ipv4(node0)
    ending = ["--seconds", str(_STEP * node0.deadlines.factor), *common]
    with node0.popen_python(
        "rdmalab.rdma", ["check", "--listen", address, *ending, *listener]
    ) as server:
        client = node1.python(
            "rdmalab.rdma", ["check", "--connect", address, *ending, *caller], check=False
        )
        served = server.wait(3 * _STEP)
    return (
        (served.status, served.stdout, served.stderr),
        (client.status, client.stdout, client.stderr),
    )


def test_setup_and_teardown_are_idempotent(node0: Node) -> None:
    name, end = _name(node0), _end(node0)
    node0.python("rdmalab.rdma", ["teardown"])
    assert inventory.show(node0) == []
    assert _setup(node0) == {"device": name, "netdev": end.netdev, "created": True}
    assert _setup(node0) == {"device": name, "netdev": end.netdev, "created": False}
    done = node0.python("rdmalab.rdma", ["teardown", "--netdev", end.netdev])
    assert json.loads(done.stdout) == {"removed": [name]}
    done = node0.python("rdmalab.rdma", ["teardown", "--name", name])
    assert json.loads(done.stdout) == {"removed": []}
    assert node0.run(["rdma", "link"]).stdout == ""


def test_what_is_set_up_is_shown(pair: tuple[Node, Node]) -> None:
    for node in pair:
        text = node.python("rdmalab.rdma", ["show", "--json"]).stdout
        jsonschema.Draft202012Validator(json.loads(_SCHEMA.read_text())).validate(json.loads(text))
        device, end = _device(node), _end(node)
        assert (device.driver, device.node_type) == ("rxe", "CA")
        port = device.port(1)
        assert (port.state, port.netdev, port.link_layer) == ("ACTIVE", end.netdev, "Ethernet")
        # The largest RDMA MTU that fits the netdev's beside the headers.
        assert port.active_mtu == (4096 if end.mtu >= 4200 else 1024)
        shown = {(str(gid.address), gid.type, gid.netdev) for gid in port.gids}
        assert (_ipv4(node), "RoCE v2", end.netdev) in shown
        assert (_ipv6(node), "RoCE v2", end.netdev) in shown
        assert device.limits is not None
        assert device.limits.max_qp > 1000
        # The kernel's own queue pair for management.
        assert device.in_use.qp == 1
        assert port.hw_counters["sent_pkts"] is not None


def test_counters_and_text_follow_the_traffic(pair: tuple[Node, Node]) -> None:
    before = [_device(node).port(1).hw_counters for node in pair]
    served, called = _talk(pair, ["--size", "8192", "--messages", "5"])
    assert (served[0], called[0]) == (0, 0), served[2] + called[2]
    after = [_device(node).port(1).hw_counters for node in pair]
    for old, new in zip(before, after, strict=True):
        sent, received = old["sent_pkts"], old["rcvd_pkts"]
        now_sent, now_received = new["sent_pkts"], new["rcvd_pkts"]
        assert None not in (sent, received, now_sent, now_received)
        # 5 messages of 2 packets each way, and their acknowledgements.
        assert now_sent - sent >= 10  # type: ignore[operator]
        assert now_received - received >= 10  # type: ignore[operator]
    assert f"netdev {_end(pair[0]).netdev}" in pair[0].python("rdmalab.rdma", ["show"]).stdout


@pytest.mark.parametrize(
    ("service", "via", "family", "more"),
    [
        ("RC", "tcp", 4, []),
        ("RC", "tcp", 6, ["--set", "cq_mode=poll", "--qps", "3", "--size", "20000"]),
        ("UC", "tcp", 4, ["--set", "traffic_class=104", "--set", "hop_limit=3"]),
        ("UD", "tcp", 4, ["--set", "flow_label=4660", "--qps", "2"]),
        ("UD", "tcp", 6, ["--set", "cq_mode=poll"]),
        ("RC", "cm", 4, []),
        ("RC", "cm", 6, ["--set", "path_mtu=1024", "--set", "cq_mode=poll"]),
        ("UD", "cm", 4, []),
    ],
)
def test_messages_arrive_as_they_were(
    pair: tuple[Node, Node], service: str, via: str, family: int, more: list[str]
) -> None:
    common = ["--set", f"service={service}", "--via", via, "--messages", "8", *more]
    address = _ipv4(pair[0]) if family == 4 else _ipv6(pair[0])
    served, called = _talk(pair, common, address=address)
    assert (served[0], called[0]) == (0, 0), served[2] + called[2]
    here, there = json.loads(served[1]), json.loads(called[1])
    assert here["service"] == there["service"] == service
    assert (here["gid"]["address"], here["gid"]["type"]) == (address, "RoCE v2")
    assert gid_address(there["peer_gid"]) == ipaddress.ip_address(address)
    assert (here["qps"], there["qps"]) == (there["peer_qps"], here["peer_qps"])
    # Each queue pair's C structure was found, and each address handle's.
    assert here["qp_pointers"] == len(here["qps"])
    assert here["handle_pointers"] == (len(here["qps"]) if service == "UD" else 0)
    assert here["path_mtu"] == (1024 if "path_mtu=1024" in more else 4096)
    for node in pair:
        assert _queue_pairs(node) == 1, "queue pairs are left behind"


def test_traffic_class_is_on_the_wire(pair: tuple[Node, Node]) -> None:
    """What the profile says is in the IPv4 header that the other end sees."""
    _, node1 = pair
    netdev = _end(node1).netdev
    capture = ["tcpdump", "-i", netdev, "--immediate-mode", "-n", "-v", "-c", "4"]
    capture.append("udp dst port 4791 and inbound")
    with node1.popen(capture) as tcpdump:
        until = time.monotonic() + 120
        while "listening on" not in tcpdump.stderr():
            assert tcpdump.poll() is None, tcpdump.stderr()
            assert time.monotonic() < until
            time.sleep(0.1)
        served, called = _talk(pair, ["--set", "service=UC", "--set", "traffic_class=104"])
        assert (served[0], called[0]) == (0, 0), served[2] + called[2]
        seen = tcpdump.wait(_STEP).stdout
    assert seen.count("tos 0x68,") == 4, seen


def test_setup_refuses_in_one_line(pair: tuple[Node, Node]) -> None:
    node0, _ = pair
    netdev = _end(node0).netdev
    line = _refusal(node0, ["setup", "--netdev", "nosuch0"], 2)
    assert line.startswith("no netdev nosuch0: netdevs: ")
    assert netdev in line
    line = _refusal(node0, ["setup", "--netdev", netdev, "--name", "second"], 2)
    assert line == (
        f"{netdev} already carries SoftRoCE device {_name(node0)}; "
        "use that, or tear it down before making second"
    )
    line = _refusal(node0, ["setup", "--netdev", "lo", "--name", _name(node0)], 2)
    assert f"the name {_name(node0)} is taken: it is SoftRoCE on {netdev}, not lo" in line


def test_setup_waits_for_a_link_that_is_down_and_says_so(node0: Node) -> None:
    netdev = _end(node0).netdev
    node0.python("rdmalab.rdma", ["teardown"])
    node0.run(["ip", "link", "add", "down0", "type", "dummy"])
    try:
        line = _refusal(node0, ["setup", "--netdev", "down0", "--seconds", "1"], 1)
        assert "rxe_down0 on down0 is not ready: port 1 is DOWN after 1 s" in line
    finally:
        node0.python("rdmalab.rdma", ["teardown"])
        node0.run(["ip", "link", "delete", "down0"])
    assert netdev


@pytest.fixture
def no_module(node0: Node) -> Iterator[Node]:
    """A node whose kernel cannot load rdma_rxe."""
    node0.python("rdmalab.rdma", ["teardown"])
    node0.run(["modprobe", "-r", "rdma_rxe"])
    rule = "/etc/modprobe.d/rdmalab-test.conf"
    node0.run(["tee", rule], input="install rdma_rxe /bin/false\n")
    yield node0
    node0.run(["rm", rule])


def test_a_missing_module_is_named(no_module: Node) -> None:
    line = _refusal(no_module, ["setup", "--netdev", _end(no_module).netdev], 4)
    assert "cannot load module rdma_rxe" in line
    assert "; install the modules of that kernel" in line


def test_a_gid_of_the_wrong_type_is_refused(pair: tuple[Node, Node]) -> None:
    node0, _ = pair
    listen = ["check", "--listen", _ipv4(node0)]
    line = _refusal(node0, [*listen, "--set", "gid.type=IB/RoCE v1"], 1)
    assert line.startswith(f"{_name(node0)} port 1 has no IB/RoCE v1 GID of {_ipv4(node0)}: GID ")
    assert line.endswith(f"of {_ipv4(node0)} is of type RoCE v2")
    index = next(
        gid.index for gid in _device(node0).port(1).gids if str(gid.address) == _ipv6(node0)
    )
    line = _refusal(node0, [*listen, "--gid-index", str(index)], 1)
    assert line == (
        f"GID {index} of {_name(node0)} port 1 is refused: it is RoCE v2 of {_ipv6(node0)}, "
        f"not a RoCE v2 GID of {_ipv4(node0)}"
    )
    assert "entry is empty" in _refusal(node0, [*listen, "--gid-index", "900"], 1)


def test_ends_that_do_not_fit_say_so(pair: tuple[Node, Node]) -> None:
    served, called = _talk(pair, listener=["--set", "service=UC"])
    assert (served[0], called[0]) == (1, 1)
    assert "the peer's queue pairs are RC, ours UC" in served[2]
    assert "the peer's queue pairs are UC, ours RC" in called[2]


@pytest.mark.parametrize("text", ["timeout = 99", "gid_index = 1", "timeout 18"])
def test_an_invalid_profile_is_refused(pair: tuple[Node, Node], tmp_path: Path, text: str) -> None:
    node0, _ = pair
    (tmp_path / "bad.toml").write_text(text)
    node0.put(tmp_path / "bad.toml", "/run/bad.toml")
    listen = ["check", "--listen", _ipv4(node0), "--profile", "/run/bad.toml"]
    assert _refusal(node0, listen, 2).startswith("profile /run/bad.toml")


# A peer that speaks to the exchange's port what it should not: the client end, in plain
# Python, of whatever the test wants.
_PEER = """
import socket, sys, time
address, port, sends, seconds = sys.argv[1:]
until = time.monotonic() + 120
while True:
    try:
        peer = socket.create_connection((address, int(port)), 2)
        break
    except OSError:
        if time.monotonic() > until:
            raise
        time.sleep(0.1)
peer.sendall(bytes.fromhex(sends))
time.sleep(float(seconds))
"""


@pytest.mark.parametrize(
    ("sends", "line"),
    [
        ("5353482d322e302d780d0a0000000000", "does not speak this protocol: first bytes 53 53"),
        ("72646d616c61620a0002000700000002" + "7b7d", "speaks version 2.7 of the exchange, we sp"),
        ("72646d616c61620a00010000ffffffff", "too long: 4294967295 bytes, at most 65536"),
        ("72646d616c61620a0001000000000010" + "7b22", "no whole message: 2 of 16 bytes in 5 s"),
        ("", "the peer sent no whole message: nothing in 5 s"),
    ],
    ids=["garbage", "another version", "too long", "half a message", "nothing"],
)
def test_a_bad_peer_ends_in_one_line_in_time(
    pair: tuple[Node, Node], sends: str, line: str
) -> None:
    node0, node1 = pair
    argv = ["check", "--listen", _ipv4(node0), "--seconds", "5", "--port", "18600"]
    with (
        node1.popen(["python3", "-c", _PEER, _ipv4(node0), "18600", sends, "10"]),
    ):
        # The peer waits for the listener; the listener for the peer at most its 5 s.
        result = node0.python("rdmalab.rdma", argv, check=False, timeout=30.0)
    assert result.status == 1
    [only] = result.stderr.splitlines()
    assert line in only
    assert _ipv4(node1) in only
    assert _queue_pairs(node0) == 1


def test_nobody_at_the_other_end(pair: tuple[Node, Node]) -> None:
    node0, node1 = pair
    for via in ("tcp", "cm"):
        argv = ["check", "--connect", _ipv4(node0), "--via", via, "--seconds", "2"]
        assert f"no peer at {_ipv4(node0)} port" in _refusal(node1, argv, 1)


def test_a_taken_port_is_named(pair: tuple[Node, Node]) -> None:
    node0, _ = pair
    hold = (
        "import socket,sys; s = socket.create_server((sys.argv[1], 18601)); "
        "print('held', flush=True); sys.stdin.read()"
    )
    with node0.popen(["python3", "-c", hold, _ipv4(node0)]) as holder:
        assert next(iter(holder.stdout)).strip() == "held"
        argv = ["check", "--listen", _ipv4(node0), "--port", "18601"]
        line = _refusal(node0, argv, 1)
    assert line.startswith(f"cannot listen on {_ipv4(node0)} port 18601: Address already in use")
