# SPDX-License-Identifier: Apache-2.0
"""What a user meets when something is wrong with a lab: one line, a status, nothing left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from rdmalab.lab.lab import take_down
from rdmalab.lab.paths import Paths

RDMALAB = str(Path(sys.executable).with_name("rdmalab"))
NAME = "fault"


def rdmalab(*words: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [RDMALAB, *words], text=True, capture_output=True, timeout=timeout, check=False
    )


def start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [RDMALAB, *words], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
        # A shell that runs us in the background has SIGINT ignored, which is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def the_line(said: str) -> str:
    """The one line of an error."""
    (line,) = [line for line in said.splitlines() if line.startswith("rdmalab: ")]
    return line


def processes() -> list[int]:
    """QEMUs and supervisors of the lab ``NAME``: those whose folder it is."""
    folder = str(Paths.find().labs / NAME)
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0")
            if (entry / "cwd").readlink() == Path(folder) and (
                "rdmalab.lab.supervisor" in words or any("qemu-system" in w for w in words)
            ):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def await_none(seconds: float = 10) -> None:
    until = time.monotonic() + seconds
    while processes():
        assert time.monotonic() < until, "processes of the lab are left"
        time.sleep(0.05)


def await_qemu(seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while len(processes()) < 2:
        assert time.monotonic() < until, "no QEMU was started"
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def no_lab() -> Iterator[None]:
    take_down(Paths.find(), NAME)
    yield
    take_down(Paths.find(), NAME)
    assert processes() == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kernel", "vista"], "no kernel is called 'vista'; choose one of lts, stock"),
        (["--topology", "moebius"], "no topology is called 'moebius'"),
        (["--topology", "/nonexistent.toml"], "/nonexistent.toml cannot be read"),
        (["--mode", "slow"], "no mode is called 'slow'"),
        (["--accel", "hvf"], "no accelerator is called 'hvf'"),
        (["--vcpus", "many"], "'many' is not a valid integer"),
    ],
)
def test_a_wrong_word_ends_with_2_and_boots_nothing(words: list[str], said: str) -> None:
    done = rdmalab("up", "--name", NAME, *words)
    assert done.returncode == 2, done.stderr
    assert said in the_line(done.stderr)
    assert done.stdout == ""
    assert processes() == []


def test_a_node_or_a_lab_that_is_not_there_is_named() -> None:
    done = rdmalab("status", "--name", NAME)
    assert done.returncode == 2
    assert f"lab {NAME} is not up" in the_line(done.stderr)
    done = rdmalab("run", "--name", NAME, "node0", "--", "true")
    assert done.returncode == 2


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = rdmalab("up", "--name", NAME, "--topology", "solo", "--ssh-port", str(port))
    assert done.returncode == 2, done.stderr
    assert f"TCP port {port} of 127.0.0.1 is taken" in the_line(done.stderr)
    await_none()


def test_ctrl_c_while_booting_leaves_nothing() -> None:
    up = start("up", "--name", NAME, "--topology", "solo")
    await_qemu()
    os.killpg(up.pid, signal.SIGINT)
    said = up.communicate(timeout=30)[1]
    assert up.returncode == 130
    assert the_line(said) == "rdmalab: interrupted"
    await_none()


def test_a_killed_up_leaves_nothing() -> None:
    up = start("up", "--name", NAME, "--topology", "solo")
    await_qemu()
    up.kill()
    up.communicate()
    await_none()


def test_a_killed_supervisor_takes_its_qemus_along_and_is_said_to_be_gone() -> None:
    done = rdmalab("up", "--name", NAME, "--topology", "solo", "--json")
    assert done.returncode == 0, done.stderr
    qemu = json.loads(done.stdout)["nodes"]["node0"]["pid"]
    (supervisor,) = set(processes()) - {qemu}
    os.kill(supervisor, signal.SIGKILL)
    await_none()
    done = rdmalab("run", "--name", NAME, "node0", "--", "true")
    assert done.returncode == 2
    assert "is not up" in the_line(done.stderr)
    assert rdmalab("down", "--name", NAME).returncode == 0


def test_a_command_passes_its_status_and_ctrl_c_ends_it_on_the_node() -> None:
    done = rdmalab("up", "--name", NAME, "--topology", "solo")
    assert done.returncode == 0, done.stderr
    done = rdmalab("run", "--name", NAME, "node0", "--", "sh", "-c", "echo out; exit 7")
    assert (done.returncode, done.stdout) == (7, "out\n")
    command = start("run", "--name", NAME, "node0", "--", "sleep", "4711")
    look = ("run", "--name", NAME, "node0", "--", "pgrep", "-fx", "sleep 4711")
    until = time.monotonic() + 60
    while rdmalab(*look).returncode != 0:
        assert time.monotonic() < until, "the command did not start"
    os.killpg(command.pid, signal.SIGINT)
    command.communicate(timeout=30)
    assert command.returncode == 130
    until = time.monotonic() + 30
    while rdmalab(*look).returncode == 0:
        assert time.monotonic() < until, "the command goes on"
    up = rdmalab("up", "--name", NAME)
    assert up.returncode == 2
    assert f"lab {NAME} is up already" in the_line(up.stderr)


def test_a_node_whose_qemu_is_killed_is_lost_with_3() -> None:
    done = rdmalab("up", "--name", NAME, "--topology", "solo", "--json")
    assert done.returncode == 0, done.stderr
    os.kill(json.loads(done.stdout)["nodes"]["node0"]["pid"], signal.SIGKILL)
    done = rdmalab("run", "--name", NAME, "node0", "--", "true")
    assert done.returncode == 3, done.stderr
    assert "node0" in the_line(done.stderr)
    status = json.loads(rdmalab("status", "--name", NAME, "--json").stdout)
    assert status["nodes"]["node0"]["state"] == "lost"


def test_a_panic_under_a_command_is_a_failure_by_name_and_not_a_lost_lab() -> None:
    done = rdmalab("up", "--name", NAME, "--topology", "solo")
    assert done.returncode == 0, done.stderr
    oops = "insmod /run/rdmalab/modules/faultpoint.ko && echo 1 >/sys/kernel/debug/faultpoint/oops"
    done = rdmalab("run", "--name", NAME, "node0", "--", "sh", "-c", oops)
    assert done.returncode == 1, done.stderr
    assert "node0: the guest panicked" in the_line(done.stderr)
    status = json.loads(rdmalab("status", "--name", NAME, "--json").stdout)
    assert status["nodes"]["node0"]["state"] == "panicked"
    done = rdmalab("run", "--name", NAME, "node0", "--", "true")
    assert done.returncode == 1
    assert "panicked" in the_line(done.stderr)
    assert "Kernel panic" in rdmalab("logs", "--name", NAME, "node0").stdout


def test_the_status_keeps_its_schema() -> None:
    done = rdmalab("up", "--name", NAME, "--topology", "pair", "--json")
    assert done.returncode == 0, done.stderr
    schema = json.loads((Path(__file__).parents[2] / "docs/schemas/status.schema.json").read_text())
    jsonschema.validate(json.loads(done.stdout), schema)
    jsonschema.validate(json.loads(rdmalab("status", "--name", NAME, "--json").stdout), schema)
