# SPDX-License-Identifier: Apache-2.0
"""perftest: its command lines, and its output as it was printed on guests (tests/data)."""

from __future__ import annotations

import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rdmalab.errors import HostError, RdmalabError, UsageError
from rdmalab.measure import perftest as reports
from rdmalab.measure.measurement import Point
from rdmalab.measure.node import perftest

DATA = Path(__file__).parents[1] / "data/perftest"
SEND = Point("send", 4096, iterations=200)


def output(name: str) -> str:
    return (DATA / f"{name}.txt").read_text()


def command(point: Point, peer: str = "") -> str:
    words = perftest.command(
        point, device="rxe_roce0", gid_index=1, mtu=4096, port=18601, inline=0, peer=peer
    )
    return " ".join(words)


def test_latency_columns_are_found_by_their_titles() -> None:
    report = reports.parse(output("send_lat-event"), SEND)
    assert (report.size, report.iterations, report.mib_s) == (4096, 200, None)
    assert report.given_us == {
        "min": 594.03,
        "max": 45150.70,
        "p50": 1961.51,
        "mean": 3875.60,
        "stdev": 5364.18,
        "p99": 38215.76,
        "p999": 45150.70,
    }


def test_bandwidth_is_the_average_and_not_the_peak() -> None:
    report = reports.parse(output("send_bw-poll"), replace(SEND, kind="bandwidth"))
    assert (report.mib_s, report.given_us) == (1.68, {})


@pytest.mark.parametrize("path", sorted(DATA.glob("*.txt")), ids=lambda path: str(path.stem))
def test_every_kept_output_has_its_result(path: Path) -> None:
    kind = "latency" if "_lat" in path.stem else "bandwidth"
    size = 8 if "atomic" in path.stem else 4096
    report = reports.parse(path.read_text(), Point("send", size, kind=kind))
    assert report.iterations == (800 if "4qps" in path.stem else 200)
    if kind == "latency":
        assert 0 < report.given_us["min"] <= report.given_us["p50"] <= report.given_us["p999"]
    else:
        assert report.mib_s is not None
        assert report.mib_s > 0


def test_a_column_more_in_a_newer_version_moves_nothing() -> None:
    text = output("send_lat-event").replace("t_max[usec]", "t_new[usec]   t_max[usec]")
    text = text.replace("45150.70      1961.51", "7.77   45150.70      1961.51")
    assert reports.parse(text, SEND).given_us["max"] == 45150.70


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "printed no result: nothing"),
        ("Couldn't connect to 10.77.0.2:18601\n", "no result: Couldn't connect"),
        (output("send_lat-event").rpartition(" 4096    200")[0], "no result"),
        (output("send_lat-event").replace(" 4096    200", " 64    200"), "no result"),
        (output("send_lat-event").replace("usec]", "cycles]"), r"no t_min in usec"),
        (output("send_lat-event").replace("1961.51", "")[:-200] + "\n", "short|no result"),
    ],
)
def test_a_text_without_a_result_is_an_error_of_one_line(text: str, why: str) -> None:
    with pytest.raises(RdmalabError, match=why) as error:
        reports.parse(text, SEND)
    assert "\n" not in str(error.value)


def test_gigabits_are_not_taken_for_mebibytes() -> None:
    text = output("send_bw-poll").replace("MiB/sec]", "Gb/sec]")
    with pytest.raises(RdmalabError, match="no BW average in MiB/sec"):
        reports.parse(text, replace(SEND, kind="bandwidth"))


def test_command_lines_of_both_ends() -> None:
    ours = "-d rxe_roce0 -x 1 -m 4096 -p 18601 -F -n 200"
    assert command(SEND) == f"ib_send_lat {ours} -I 0 -s 4096 -c RC -u 18 -e"
    assert command(replace(SEND, mode="poll"), "10.77.0.2").endswith("-u 18 10.77.0.2")
    read = replace(SEND, op="read", kind="bandwidth", mode="poll", qps=4, direction="two-way")
    assert command(read) == f"ib_read_bw {ours} -s 4096 -c RC -u 18 -q 4 -N -b"
    swap = replace(SEND, op="cmp_swap", size=8)
    assert command(swap) == f"ib_atomic_lat {ours} -A CMP_AND_SWAP -u 18 -e"
    # Only a reliable connection has a timeout.
    assert "-u" not in command(replace(SEND, service="UD")).split()


@pytest.mark.parametrize(
    ("point", "why"),
    [
        (replace(SEND, op="write"), r"refuses events for write"),
        (replace(SEND, op="write_imm", kind="bandwidth"), r"refuses events for write_imm"),
        (replace(SEND, transport="tcp"), "RDMA only"),
        (replace(SEND, op="read", service="UC"), "not defined for UC"),
        (replace(SEND, op="write_imm", service="UD", mode="poll"), "not defined for UD"),
        (replace(SEND, iterations=4), "5 iterations"),
    ],
)
def test_what_perftest_cannot_measure_is_said_before_it_runs(point: Point, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        command(point)


def test_a_failed_program_s_own_words_are_in_the_error() -> None:
    script = "print('---'); print('Couldn\\'t listen'); print('  '); raise SystemExit(3)"
    with (
        perftest.Run([sys.executable, "-c", script], 1) as run,
        pytest.raises(RdmalabError, match="exit status 3: Couldn't listen"),
    ):
        run.finish(20.0, lambda: False)


def test_a_program_that_hangs_is_ended_at_its_deadline_or_when_the_peer_is_gone() -> None:
    argv = [sys.executable, "-c", "import time; time.sleep(60)"]
    start = time.monotonic()
    with (
        perftest.Run(argv, 1) as run,
        pytest.raises(RdmalabError, match=r"did not end: deadline 0\.1 s"),
    ):
        run.finish(0.1, lambda: False)
    with (
        perftest.Run(argv, 1) as run,
        pytest.raises(RdmalabError, match="the other end is gone"),
    ):
        run.finish(50.0, lambda: True)
    assert time.monotonic() - start < 20


def test_a_server_is_waited_for_until_it_listens_or_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert not perftest.listens(port)
    script = f"import socket, time; s = socket.create_server(('', {port})); time.sleep(60)"
    with perftest.Run([sys.executable, "-c", script], port) as run:
        run.wait_listening(20.0)
        assert perftest.listens(port)
    with (
        perftest.Run([sys.executable, "-c", "raise SystemExit('in use')"], port) as run,
        pytest.raises(RdmalabError, match="exit status 1: in use"),
    ):
        run.wait_listening(20.0)


def test_a_missing_program_says_what_installs_it() -> None:
    with pytest.raises(HostError, match="no ib_nothing here; install it"):
        perftest.Run(["ib_nothing"], 1)
