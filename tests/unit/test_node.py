# SPDX-License-Identifier: Apache-2.0
"""Node against a real sshd where the host has one, and always against a stand-in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from remote import FakeSsh, find_sshd, sshd

from rdmalab.errors import CommandFailed, DeadlineExceeded, HostError, NodeLost, UsageError
from rdmalab.lab.deadline import Deadlines
from rdmalab.lab.node import Node, NodePanicked
from rdmalab.lab.package import Package
from rdmalab.lab.process import Bounded
from rdmalab.lab.ssh import Endpoint, config_text


@pytest.fixture(scope="module", params=["stand-in", "sshd"])
def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Node]:
    directory = tmp_path_factory.mktemp(request.param)
    if request.param == "stand-in":
        fake = FakeSsh(directory)
        with Node("node0", fake.endpoint, ssh=[str(fake.program)]) as node:
            yield node
        return
    program = find_sshd()
    if program is None:
        pytest.skip("no sshd on this host: apt install openssh-server")
    with sshd(program, directory) as endpoint, Node("node0", endpoint) as node:
        yield node


@pytest.fixture
def node(shared: Node) -> Iterator[Node]:
    shared.deadlines = Deadlines()
    yield shared
    shared.resume()


@pytest.fixture
def fake(tmp_path: Path) -> FakeSsh:
    return FakeSsh(tmp_path)


def _processes(word: str) -> list[int]:
    """Ids of processes that have ``word`` as a word of their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if word.encode() in words:
                found.append(int(entry.name))
    return found


def _leash_pid(directory: str) -> int:
    """The shell on the far side whose argument is the leash's own key."""
    key = directory.rpartition("/")[2]
    [pid] = [pid for pid in _processes(key) if _processes("sh").count(pid)]
    return pid


def _marker() -> str:
    # A fraction: sleep takes it, and no other process has it.
    return f"1000.{uuid.uuid4().int % 10**12:012d}"


def _gone(word: str, seconds: float = 6.0) -> bool:
    until = time.monotonic() + seconds
    while _processes(word):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def _appears(word: str) -> None:
    until = time.monotonic() + 10
    while not _processes(word):
        assert time.monotonic() < until, f"{word} did not start"
        time.sleep(0.02)


class TestRun:
    @pytest.mark.parametrize(
        "arguments",
        [
            ["plain"],
            ["with space", "", "tab\there"],
            ["'single'", '"double"', "`back`", "$HOME", "$(id)", "\\", "\\n"],
            ["line\nbreak\n", "\n"],
            ["-n", "--", "-e", "-leading"],
            ["*", "?", "~", "#", "a;b", "a&b", "a|b", ">x", "!!"],
            ["ünïcödé ☃"],
        ],
    )
    def test_arguments_arrive_as_they_are(self, node: Node, arguments: list[str]) -> None:
        program = "import sys; print(ascii(sys.argv[1:]))"
        result = node.run(["python3", "-c", program, *arguments])
        assert result.stdout == ascii(arguments) + "\n"
        assert result.status == 0

    def test_programs_are_run_not_the_shells_builtins(self, node: Node) -> None:
        assert node.run(["printf", "%s", "a\\nb"]).stdout == "a\\nb"
        assert node.run(["echo", "a\\nb"]).stdout == "a\\nb\n"

    def test_input_reaches_the_command(self, node: Node) -> None:
        text = "first\nsecond ☃\n" * 20000
        assert node.run(["cat"], input=text).stdout == text

    def test_without_input_stdin_is_empty(self, node: Node) -> None:
        assert node.run(["cat"], timeout=5).stdout == ""

    def test_streams_are_apart(self, node: Node) -> None:
        result = node.run(["sh", "-c", "echo out; echo err >&2"])
        assert (result.stdout, result.stderr) == ("out\n", "err\n")

    def test_undecodable_output_is_replaced(self, node: Node) -> None:
        assert node.run(["printf", r"a\377b"]).stdout == "a\ufffdb"

    def test_a_failed_command_is_named_with_its_status_and_last_line(self, node: Node) -> None:
        with pytest.raises(CommandFailed) as caught:
            node.run(["sh", "-c", "echo first >&2; echo no such device >&2; exit 3"])
        line = str(caught.value)
        assert line.startswith("node0: ")
        assert "exit status 3" in line
        assert line.endswith("no such device")
        assert "\n" not in line

    def test_check_false_returns_the_status(self, node: Node) -> None:
        assert node.run(["sh", "-c", "exit 7"], check=False).status == 7

    def test_status_255_is_the_commands_own(self, node: Node) -> None:
        assert node.run(["sh", "-c", "exit 255"], check=False).status == 255

    def test_a_signal_is_no_lost_connection(self, node: Node) -> None:
        assert node.run(["sh", "-c", "kill -SEGV $$"], check=False).status == 128 + signal.SIGSEGV
        with pytest.raises(CommandFailed, match=r"ended by signal 9"):
            node.run(["sh", "-c", "kill -KILL $$"])

    def test_killing_the_whole_process_group_is_no_lost_connection(self, node: Node) -> None:
        assert node.run(["sh", "-c", "kill -KILL 0"], check=False).status == 137

    def test_a_missing_program_fails(self, node: Node) -> None:
        with pytest.raises(CommandFailed, match="status 127"):
            node.run(["no-such-program"])

    def test_a_string_is_refused(self, node: Node) -> None:
        with pytest.raises(TypeError):
            node.run("true")
        with pytest.raises(ValueError, match="NUL"):
            node.run(["echo", "a\0b"])

    def test_too_long_an_output_is_cut_in_the_middle(self, node: Node) -> None:
        result = node.run(["seq", "1000001", "3500000"])
        assert result.stdout.startswith("1000001\n")
        assert result.stdout.endswith("3500000\n")
        assert "bytes left out" in result.stdout
        assert len(result.stdout) < 17 << 20

    def test_threads_share_the_connection(self, node: Node) -> None:
        seen: dict[int, str] = {}

        def ask(number: int) -> None:
            seen[number] = node.run(["echo", str(number)]).stdout

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == {number: f"{number}\n" for number in range(6)}


class TestDeadline:
    def test_a_command_ends_at_its_timeout_on_both_sides(self, node: Node) -> None:
        marker = _marker()
        start = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"node0: sleep .* deadline of 0\.5 s"):
            node.run(["sleep", marker], timeout=0.5)
        assert time.monotonic() - start < 5
        assert _gone(marker)

    def test_one_that_ignores_term_is_killed(self, node: Node) -> None:
        marker = _marker()
        with pytest.raises(DeadlineExceeded):
            node.run(["sh", "-c", f"trap '' TERM; sleep {marker}; sleep {marker}"], timeout=0.5)
        assert _gone(marker)

    def test_the_tests_deadline_ends_a_command_with_a_longer_one(self, node: Node) -> None:
        marker = _marker()
        with (
            node.deadlines.layer("test", 0.5),
            pytest.raises(DeadlineExceeded, match="test deadline"),
        ):
            node.run(["sleep", marker], timeout=60)
        assert _gone(marker)

    def test_the_factor_stretches_a_timeout(self, node: Node) -> None:
        node.deadlines = Deadlines(factor=100)
        node.run(["sleep", "0.8"], timeout=0.3)


class TestLoss:
    def test_refused_connection_is_a_lost_node(self, fake: FakeSsh) -> None:
        fake.down()
        with Node("node1", fake.endpoint, ssh=[str(fake.program)]) as node:
            with pytest.raises(NodeLost, match=r"^node1: ssh to .*Connection refused"):
                node.run(["true"])
            fake.up()
            node.run(["true"])

    def test_a_deadline_that_passes_while_connecting_is_one(self, node: Node) -> None:
        passed = node.deadlines.make("test", 0.0)
        node.deadlines.push(passed)
        with (
            Node("node0", Endpoint("192.0.2.1"), deadlines=node.deadlines, ssh=["false"]) as lost,
            pytest.raises(DeadlineExceeded, match="not connected yet"),
        ):
            lost.run(["true"])

    def test_connection_that_dies_under_a_command(self, node: Node) -> None:
        marker = _marker()
        failure: list[BaseException] = []

        def wait() -> None:
            try:
                node.run(["sleep", marker], timeout=30)
            except NodeLost as error:
                failure.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        _appears(marker)
        leash = node._leash
        assert leash is not None
        os.kill(leash._master.pid, signal.SIGKILL)
        if node.endpoint.port == 22:
            # The stand-in's master does not carry the command: end that too.
            for pid in _processes(str(node._ssh[0])):
                os.kill(pid, signal.SIGKILL)
        thread.join(15)
        assert not thread.is_alive()
        assert failure
        assert "connection broke" in str(failure[0])
        assert _gone(marker)
        # And the next command has a connection again.
        assert node.run(["echo", "back"]).stdout == "back\n"

    def test_interrupt_ends_a_wait_at_once(self, node: Node) -> None:
        threading.Timer(0.5, node.interrupt, [NodePanicked("panic", node="node0")]).start()
        start = time.monotonic()
        with pytest.raises(NodePanicked):
            node.run(["sleep", _marker()], timeout=60)
        assert time.monotonic() - start < 5
        with pytest.raises(NodePanicked):
            node.run(["true"])
        node.resume()
        node.run(["true"])

    def test_a_node_answers_or_not(self, node: Node) -> None:
        assert node.answers()  # without a connection
        node.run(["true"])
        assert node.answers()
        leash = node._leash
        assert leash is not None
        # What a guest that hangs looks like from here: a connection that says nothing.
        group = _leash_pid(leash._directory)
        os.kill(group, signal.SIGSTOP)
        try:
            assert not node.answers(0.5)
        finally:
            os.kill(group, signal.SIGCONT)

    def test_no_ssh_on_the_host(self) -> None:
        with pytest.raises(HostError, match="apt install openssh-client"):
            Node("n", Endpoint("192.0.2.1"), ssh=["/no/such/ssh"]).run(["true"])

    def test_wait_ready_says_what_ssh_saw(self, fake: FakeSsh) -> None:
        fake.down()
        with (
            Node("node0", fake.endpoint, ssh=[str(fake.program)]) as node,
            pytest.raises(DeadlineExceeded, match="Connection refused"),
        ):
            node.wait_ready(1.0)

    def test_wait_ready_waits(self, fake: FakeSsh) -> None:
        fake.down()
        threading.Timer(0.7, fake.up).start()
        with Node("node0", fake.endpoint, ssh=[str(fake.program)]) as node:
            assert 0.5 < node.wait_ready(20.0) < 15

    def test_a_wrong_host_key_is_refused(self, node: Node, tmp_path: Path) -> None:
        if node.endpoint.known_hosts is None:
            pytest.skip("needs an sshd: the stand-in has no host key")
        empty = tmp_path / "known_hosts"
        empty.write_text("")
        with (
            Node("node0", replace(node.endpoint, known_hosts=empty)) as stranger,
            pytest.raises(NodeLost, match="Host key verification failed"),
        ):
            stranger.run(["true"])


class TestLeftovers:
    def test_stop_ends_both_sides(self, node: Node) -> None:
        marker = _marker()
        process = node.popen(["sh", "-c", f"sleep {marker} & sleep {marker}"])
        _appears(marker)
        assert process.poll() is None
        process.stop()
        assert _gone(marker, 1)
        process.stop()

    def test_close_ends_what_runs(self, node: Node) -> None:
        marker = _marker()
        node.popen(["sleep", marker])
        _appears(marker)
        node.close()
        assert _gone(marker)

    def test_a_killed_caller_leaves_nothing(self, node: Node) -> None:
        marker = _marker()
        program = (
            "import sys; from pathlib import Path\n"
            "from rdmalab.lab.node import Node, Endpoint\n"
            f"node = Node('node0', {_source(node.endpoint)}, ssh={node._ssh!r})\n"
            f"node.run(['sleep', '{marker}'])\n"
        )
        with subprocess.Popen([sys.executable, "-c", program]) as caller:
            _appears(marker)
            # Not the caller's own command line, and not its ssh's.
            assert any(pid != caller.pid for pid in _processes(marker))
            caller.kill()
        assert _gone(marker)

    def test_ctrl_c_leaves_nothing(self, node: Node) -> None:
        marker = _marker()
        threading.Timer(0.7, os.kill, [os.getpid(), signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            node.run(["sleep", marker])
        assert _gone(marker)

    def test_the_leash_leaves_no_directory(self, node: Node) -> None:
        node.run(["true"])
        assert node._leash is not None
        directory = Path(node._leash._directory)
        assert directory.is_dir()
        until = time.monotonic() + 5
        while list(directory.iterdir()):  # forgotten soon after the command's end
            assert time.monotonic() < until
            time.sleep(0.02)
        node.close()
        assert not directory.exists()
        assert not directory.with_name(directory.name + ".dead").exists()


def _source(endpoint: Endpoint) -> str:
    return repr(endpoint).replace("PosixPath", "Path")


class TestProcess:
    def test_lines_both_ways(self, node: Node) -> None:
        process = node.popen(["sh", "-c", 'while read -r line; do echo "got $line"; done'])
        process.stdin.write("one\n")
        assert process.stdout.readline(10) == "got one"
        process.stdin.write("two\nthree\n")
        process.stdin.close()
        assert list(process.stdout) == ["got two", "got three"]
        assert process.wait(10).status == 0

    def test_wait_gives_the_status_and_what_was_not_read(self, node: Node) -> None:
        process = node.popen(["sh", "-c", "echo a; echo b; echo e >&2; exit 4"])
        assert next(iter(process.stdout)) == "a"
        result = process.wait(10)
        assert (result.status, result.stdout, result.stderr) == (4, "b\n", "e\n")
        assert process.poll() == 4

    def test_wait_has_a_deadline_and_the_process_goes_on(self, node: Node) -> None:
        with node.popen(["sh", "-c", "read -r _; echo done"]) as process:
            with pytest.raises(DeadlineExceeded):
                process.wait(0.3)
            process.stdin.write("\n")
            assert process.wait(10).stdout == "done\n"

    def test_readline_times_out(self, node: Node) -> None:
        with node.popen(["sleep", _marker()]) as process, pytest.raises(TimeoutError):
            process.stdout.readline(0.2)

    def test_a_flood_that_nobody_reads_can_be_stopped(self, node: Node) -> None:
        marker = _marker()
        process = node.popen(["sh", "-c", "yes $0", marker])
        time.sleep(0.5)
        start = time.monotonic()
        process.stop()
        assert time.monotonic() - start < 2.5
        assert _gone(marker)


class TestFiles:
    @pytest.mark.parametrize("size", [0, 1, 3 << 20])
    def test_there_and_back(self, node: Node, tmp_path: Path, size: int) -> None:
        here, there, back = tmp_path / "here", tmp_path / "a 'b'\n-c", tmp_path / "back"
        here.write_bytes(os.urandom(size))
        node.put(here, str(there), 0o751)
        assert there.read_bytes() == here.read_bytes()
        assert there.stat().st_mode & 0o7777 == 0o751
        node.get(str(there), back)
        assert back.read_bytes() == here.read_bytes()
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
            {"here", there.name, "back"} | {path.name for path in tmp_path.glob("*ssh")}
        )

    def test_a_missing_directory_is_said_and_nothing_left(self, node: Node, tmp_path: Path) -> None:
        here = tmp_path / "here"
        here.write_text("x")
        with pytest.raises(CommandFailed, match=r"cannot write .*/none/file"):
            node.put(here, str(tmp_path / "none" / "file"))

    def test_a_directory_is_no_target(self, node: Node, tmp_path: Path) -> None:
        here, there = tmp_path / "here", tmp_path / "there"
        here.write_text("x")
        there.mkdir()
        with pytest.raises(CommandFailed, match="cannot write"):
            node.put(here, str(there))
        assert list(there.iterdir()) == []

    def test_get_of_a_missing_file_leaves_the_old_one(self, node: Node, tmp_path: Path) -> None:
        local = tmp_path / "local"
        local.write_text("old")
        with pytest.raises(CommandFailed, match="No such file"):
            node.get(str(tmp_path / "missing"), local)
        assert local.read_text() == "old"

    def test_put_of_a_missing_file_is_wrong_use(self, node: Node, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="cannot read"):
            node.put(tmp_path / "missing", "/tmp/x")


class TestPackage:
    def test_a_module_of_ours_runs_on_the_node(self, node: Node) -> None:
        result = node.python("rdmalab.measure.measurement")
        assert result.status == 0
        shown = node.run([*node._python("inspect", []), "rdmalab.errors", "--details"]).stdout
        assert "/python/" in shown  # the node's copy, not the one that the tests run from

    def test_it_is_shipped_once(self, node: Node) -> None:
        node.python("rdmalab.errors")
        first = node._shipped
        stamp = Path(first).stat().st_mtime_ns
        node.resume()
        node.python("rdmalab.errors")
        assert node._shipped == first
        assert Path(first).stat().st_mtime_ns == stamp

    def test_the_hash_is_of_the_content_alone(self, tmp_path: Path) -> None:
        packages = []
        for name in ("a", "b"):
            root = tmp_path / name
            (root / "rdma").mkdir(parents=True)
            (root / "__init__.py").write_text("x = 1\n")
            (root / "rdma" / "m.py").write_text("y = 2\n")
            (root / "rdma" / "notes.txt").write_text(name)
            (root / "cli").mkdir()
            (root / "cli" / "main.py").write_text(name)
            packages.append(Package.build(root))
        assert packages[0] == packages[1]
        (tmp_path / "b" / "rdma" / "m.py").write_text("y = 3\n")
        assert Package.build(tmp_path / "b").digest != packages[0].digest

    def test_shared_objects_are_part_of_it(self, tmp_path: Path) -> None:
        library = tmp_path / "loop.so"
        library.write_bytes(b"\x7fELF")
        with_library = Package.build(native=[library])
        assert with_library.digest != Package.build().digest
        assert b"rdmalab/_native/loop.so" in with_library.archive


@given(st.lists(st.binary(max_size=40), max_size=30), st.integers(2, 64))
@settings(max_examples=200, deadline=None)
def test_bounded_keeps_both_ends(chunks: list[bytes], limit: int) -> None:
    bounded = Bounded(limit)
    for chunk in chunks:
        bounded.add(chunk)
    whole = b"".join(chunks)
    half = limit // 2
    text = bounded.text()
    if len(whole) <= 2 * half:
        assert text == whole.decode(errors="replace")
    else:
        assert text.startswith(whole[:half].decode(errors="replace"))
        assert text.endswith(whole[-half:].decode(errors="replace"))
        assert f"{len(whole) - 2 * half} bytes left out" in text


def test_config_names_every_node(tmp_path: Path) -> None:
    text = config_text(
        {
            "node1": Endpoint("127.0.0.1", 2201, key=tmp_path / "a b", known_hosts=tmp_path / "%h"),
            "node0": Endpoint("::1", 2200, "me"),
        }
    )
    path = tmp_path / "config"
    path.write_text(text)
    for name, wanted in {
        "node0": ["hostname ::1", "port 2200", "user me", "stricthostkeychecking true"],
        "node1": [f"identityfile {tmp_path}/a b", "port 2201"],
    }.items():
        shown = subprocess.run(
            ["ssh", "-G", "-F", str(path), name], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        for line in wanted:
            assert line in shown
