# SPDX-License-Identifier: Apache-2.0
"""Guest instructions a round trip: from marks and kallsyms to a figure and its spread."""

from __future__ import annotations

import contextlib
import io
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
from click.testing import CliRunner
from rich.console import Console

from rdmalab.errors import NodeLost, RdmalabError, UsageError
from rdmalab.lab import lab as labs
from rdmalab.measure import bench
from rdmalab.measure import instructions as counting
from rdmalab.measure.counter import BEGIN, END, Counter, Delta, Mark
from rdmalab.measure.kallsyms import UNKNOWN, Function, Symbols
from rdmalab.measure.measurement import Counters, Measurement, Point, Proof
from rdmalab.measure.report.instructions import print_instructions

cli = import_module("rdmalab.cli.instructions")  # the package's attribute may be the command
command = cli.instructions
SCHEMAS = Path(__file__).parents[2] / "docs/schemas"

KALLSYMS = """\
ffffffff81000000 T _text
ffffffff81000100 t do_work
ffffffff810001f0 T __pfx_schedule
ffffffff81000200 T schedule
ffffffff81000200 t schedule_alias_of_a_longer_name
ffffffff81000300 t do_work.cold
ffffffff81000400 T asm_sysvec_apic_timer_interrupt
ffffffff81000500 D some_data
ffffffffc0001000 t rxe_completer\t[rdma_rxe]
"""
TIMER = 0xFFFFFFFF81000400
POINT = Point(op="send", size=64)


# -- kallsyms ------------------------------------------------------------------------------


def test_an_address_belongs_to_the_function_before_it() -> None:
    symbols = Symbols.parse(KALLSYMS)
    assert symbols.find(0xFFFFFFFF81000100) == Function("do_work")
    assert symbols.find(0xFFFFFFFF810001FF) == Function("do_work")
    assert symbols.find(0xFFFFFFFF81000200) == Function("schedule")
    assert symbols.find(0xFFFFFFFFC0001FFF) == Function("rxe_completer", "rdma_rxe")
    assert symbols.find(0xFFFFFFFF80FFFFFF) == UNKNOWN


def test_the_cold_part_is_of_its_function_but_no_call_of_it() -> None:
    symbols = Symbols.parse(KALLSYMS)
    assert symbols.find(0xFFFFFFFF81000310) == Function("do_work")
    assert symbols.entered(0xFFFFFFFF81000300) is None
    assert symbols.entered(0xFFFFFFFF81000100) == Function("do_work")
    assert symbols.entered(0xFFFFFFFF81000101) is None


def test_padding_and_data_are_no_functions() -> None:
    symbols = Symbols.parse(KALLSYMS)
    names = {
        symbols.find(address).name for address in range(0xFFFFFFFF81000000, 0xFFFFFFFF81000600)
    }
    assert not {"__pfx_schedule", "some_data"} & names


def test_hidden_addresses_are_said_with_what_to_do() -> None:
    hidden = "0000000000000000 T _text\n0000000000000000 t do_work\n"
    with pytest.raises(RdmalabError, match=r"node1.*hides its addresses.*kptr_restrict"):
        Symbols.parse(hidden, "node1")
    with pytest.raises(RdmalabError, match="no functions"):
        Symbols.parse("", "node1")


# -- the counter's socket ----------------------------------------------------------------------


class FakePlugin:
    """Serves one answer a connection, as the plugin does."""

    def __init__(self, path: Path, answers: Mapping[str, str]) -> None:
        self.asked: list[str] = []
        self._answers = dict(answers)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with client:
                line = client.makefile().readline().strip()
                self.asked.append(line)
                client.sendall(self._answers.get(line, "").encode())

    def close(self) -> None:
        with contextlib.suppress(OSError):  # closed before
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[FakePlugin]:
    serving = FakePlugin(
        tmp_path / "insn-node0.sock",
        {
            "hello": "ok instructions 2 vcpus 1 blocks 5\n",
            "mark": "ok 3\n",
            "marks": "mark 0 host ns 5 kernel 10 user 20\n"
            "mark 1 guest:1 ns 6 kernel 30 user 40\nok 2\n",
            "delta 0 1": "user 20\nkernel ffffffff81000100 12 4\n"
            "kernel ffffffff81000200 8 0\nok 2\n",
            "reset": "error something\n",
        },
    )
    yield serving
    serving.close()


def test_speaks_to_the_plugin(plugin: FakePlugin, tmp_path: Path) -> None:
    counter = Counter("node0", tmp_path / "insn-node0.sock")
    assert counter.hello() == 1
    assert counter.mark() == 3
    marks = counter.marks()
    assert marks == [Mark(0, None, 5, 10, 20), Mark(1, 1, 6, 30, 40)]
    delta = counter.delta(*marks)
    assert delta.user == 20
    assert delta.kernel == {0xFFFFFFFF81000100: 12, 0xFFFFFFFF81000200: 8}
    assert delta.entries == {0xFFFFFFFF81000100: 3}
    assert delta.ns == 1


def test_a_refusal_is_one_line(plugin: FakePlugin, tmp_path: Path) -> None:
    with pytest.raises(RdmalabError, match=r"node0: .*refused reset: something"):
        Counter("node0", tmp_path / "insn-node0.sock").reset()


def test_a_qemu_that_ends_meanwhile_is_lost(plugin: FakePlugin, tmp_path: Path) -> None:
    counter = Counter("node0", tmp_path / "insn-node0.sock")
    with pytest.raises(NodeLost, match="ended while"):
        counter._ask("unknown")
    plugin.close()
    with pytest.raises(NodeLost, match="does not answer"):
        counter.mark()


def test_a_lab_without_counter_says_how_to_boot_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="up --instructions"):
        Counter("node0", tmp_path / "insn-node0.sock").hello()


def test_a_counter_of_another_version_is_refused(tmp_path: Path) -> None:
    serving = FakePlugin(tmp_path / "s", {"hello": "ok instructions 99 vcpus 1\n"})
    with pytest.raises(RdmalabError, match="another version"):
        Counter("node0", tmp_path / "s").hello()
    serving.close()


# -- marks ---------------------------------------------------------------------------------


def mark(number: int, guest: int | None) -> Mark:
    return Mark(number, guest, number, 0, 0)


def test_the_loops_own_marks_are_taken() -> None:
    marks = [mark(0, None), mark(1, BEGIN), mark(2, END), mark(3, None)]
    begin, end, bracket = counting.bracket_of(marks)
    assert (begin.number, end.number, bracket) == (1, 2, "loop")


@pytest.mark.parametrize(
    "guest", [[], [BEGIN], [END], [END, BEGIN], [BEGIN, END, BEGIN, END], [7, 8]]
)
def test_where_they_are_not_both_there_once_ours_are(guest: list[int]) -> None:
    marks = [mark(0, None), *(mark(i + 1, id_) for i, id_ in enumerate(guest)), mark(9, None)]
    begin, end, bracket = counting.bracket_of(marks)
    assert (begin.number, end.number, bracket) == (0, 9, "run")


# -- the slope ---------------------------------------------------------------------------------


def sample(
    trips: int, *, timers: int = 0, once: int = 100_000, bracket: str = "loop"
) -> counting.Sample:
    """A run that costs ``once``, and each trip 30 in do_work (6 of them cold), 10 in
    rxe_completer (called twice) and 5 in user space; a timer interrupt costs 400."""
    kernel = {
        0xFFFFFFFF81000100: 20 * trips + once,
        0xFFFFFFFF81000140: 4 * trips,
        0xFFFFFFFF81000300: 6 * trips,
        0xFFFFFFFFC0001000: 10 * trips,
        TIMER: 4 * timers,
        TIMER + 0x20: 396 * timers,
    }
    entries = {
        0xFFFFFFFF81000100: trips + 7,
        0xFFFFFFFFC0001000: 2 * trips,
        TIMER: timers,
    }
    return counting.Sample(trips, bracket, Delta(5 * trips + 1000, kernel, 2000 * trips, entries))


def combined(
    rounds: list[tuple[counting.Sample, counting.Sample]], cost: int = 400
) -> counting.Instructions:
    idle = Delta(0, {0xFFFFFFFF81000200: 500}, 1_000_000)
    kernel = {TIMER: 4 * 20, TIMER + 0x20: (cost - 4) * 20}
    spin = Delta(10**6, kernel, 10**6, {TIMER: 20})
    burst = Delta(10**6, {**kernel, 0xFFFFFFFF81000100: 10**6}, 10**6, {TIMER: 20})
    stalled = Delta(0, {}, 10**6)
    names = ("node0", "node1")
    ends = tuple(Counters(name, 1000, 1000, 0, 0) for name in names)
    assert len(ends) == 2
    proof = Proof("rxe", (500, 500), (ends[0], ends[1]), "proven", "100 % at both ends")
    return counting.combine(
        POINT,
        "roce0",
        (100, 300),
        dict.fromkeys(names, rounds),
        {name: Symbols.parse(KALLSYMS) for name in names},
        {name: counting.Background((idle,), (spin, burst, stalled, spin)) for name in names},
        Measurement("rdmalab", POINT, "roce0", ("node0", "node1"), "tcg", 1, "7.3", proof),
        bench.Setting("tcg", 1, "7.3"),
    )


def test_what_a_run_costs_once_cancels() -> None:
    result = combined([(sample(100, once=10**9), sample(300, once=10**9))])
    assert result.total.median == 2 * (30 + 10 + 5)
    assert result.kernel.median == 2 * 40
    assert result.user.median == 2 * 5
    by_name = {cost.function.name: cost for cost in result.functions}
    assert by_name["do_work"].all.median == 2 * 30
    assert by_name["do_work"].nodes == {"node0": 30, "node1": 30}
    assert by_name["rxe_completer"].function.module == "rdma_rxe"
    assert result.us.median == pytest.approx(2.0)


def test_calls_are_entries_and_not_blocks() -> None:
    result = combined([(sample(100), sample(300))])
    by_name = {cost.function.name: cost for cost in result.functions}
    assert by_name["do_work"].calls == 2
    assert by_name["rxe_completer"].calls == 4
    assert by_name["(user space)"].calls is None


def test_calls_are_unknown_where_an_entry_was_translated_in_several_sizes() -> None:
    low, high = sample(100), sample(300)
    entries = {a: n for a, n in high.delta.entries.items() if a != 0xFFFFFFFF81000100}
    odd = counting.Sample(300, "loop", Delta(high.delta.user, high.delta.kernel, 1, entries))
    by_name = {cost.function.name: cost for cost in combined([(low, odd)]).functions}
    assert by_name["do_work"].calls is None


def test_timer_interrupts_of_a_busy_host_are_taken_out_of_the_total_without_them() -> None:
    quiet = (sample(100), sample(300))
    busy = (sample(100, timers=50), sample(300, timers=650))
    result = combined([quiet, busy])
    assert result.nodes[0].timer.rounds == (0, 3)
    assert result.nodes[0].timer_cost == 400
    assert result.total.rounds == (90, 90 + 2 * 3 * 400)
    assert result.without_timer.rounds == (90, 90)
    assert result.without_timer.spread_percent == 0


def test_spread_is_the_range_in_per_cent_of_the_median() -> None:
    figure = counting.Figure((98.0, 100.0, 103.0))
    assert (figure.median, figure.low, figure.high) == (100, 98, 103)
    assert figure.spread_percent == 5
    assert counting.Figure((0.0, 0.0)).spread_percent is None


def test_functions_are_in_order_of_cost_and_add_up() -> None:
    result = combined([(sample(100, timers=10), sample(300, timers=30))])
    costs = [cost.all.median for cost in result.functions]
    assert costs == sorted(costs, reverse=True)
    assert sum(costs) == pytest.approx(result.total.median)


def test_an_idle_node_is_said_for_the_time_of_a_round_trip() -> None:
    result = combined([(sample(100), sample(300))])
    # 500 instructions a millisecond, 2 us a round trip
    assert result.nodes[0].idle == pytest.approx(1.0)


def test_a_node_counted_from_request_to_answer_is_marked() -> None:
    result = combined([(sample(100), sample(300)), (sample(100, bracket="run"), sample(300))])
    assert {node.bracket for node in result.nodes} == {"run"}


@pytest.mark.parametrize("counts", [(0, 10), (10, 10), (20, 10)])
def test_counts_that_give_no_slope_are_refused(counts: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match="the smaller one first"):
        counting.refuse(POINT, counts, 3)


def test_bandwidth_has_no_round_trips() -> None:
    with pytest.raises(UsageError, match="latency"):
        counting.refuse(Point(op="send", size=64, kind="bandwidth"), (1, 2), 3)


# -- what is printed -----------------------------------------------------------------------------


def test_json_is_as_documented() -> None:
    result = combined([(sample(100, timers=3), sample(300, timers=11)), (sample(100), sample(300))])
    document = json.loads(json.dumps({"rows": [counting.to_row(result)]}, allow_nan=False))
    schema = json.loads((SCHEMAS / "instructions.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(document)
    row = document["rows"][0]
    assert row["kernel"] == "7.3"
    assert row["total"]["rounds"][1] == 90
    assert row["functions"][0]["function"] == "do_work"


def test_the_table_fits_80_columns_and_names_setting_and_spread() -> None:
    result = combined([(sample(100, timers=3), sample(300, timers=11)), (sample(100), sample(300))])
    out = io.StringIO()
    print_instructions(Console(file=out, width=80), result, top=2)
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for expected in ("tcg, 1 vCPU, 7.3", "do_work", "[rdma_rxe]", "others)", "total without timer"):
        assert expected in text


@pytest.mark.parametrize("counts", ["500", "a,b", "1,2,3", ""])
def test_the_command_refuses_counts_that_are_not_two_numbers(counts: str) -> None:
    done = CliRunner().invoke(command, ["--from", "a", "--to", "b", "--counts", counts])
    assert done.exit_code == 2
    assert "500,1500" in done.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--op", "nonsense"], "nonsense"),
        (["--mode", "busy"], "busy"),
        (["--transport", "siw"], "siw"),
        (["--op", "write"], "there is no event to wait for"),
        (["--transport", "tcp", "--op", "read"], "TCP has send only"),
        (["--rounds", "0"], "0 rounds"),
    ],
)
def test_wrong_words_are_refused_before_a_lab_is_booted(
    monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.setattr(cli, "_lab", lambda *_: pytest.fail("a lab was asked for"))
    done = CliRunner().invoke(command, ["--from", "a", "--to", "b", *words])
    assert isinstance(done.exception, UsageError | SystemExit)
    assert said in f"{done.output} {done.exception}"


def attached(monkeypatch: pytest.MonkeyPatch, *, counting: bool) -> None:
    plan = SimpleNamespace(instructions=counting)
    lab = SimpleNamespace(plan=plan, tier="stock", kernel="7.3.4")
    monkeypatch.setattr(cli.labs, "names", lambda _: ["instructions"])
    monkeypatch.setattr(cli.labs.Lab, "attach", lambda _: lab)


def test_a_lab_that_counts_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    attached(monkeypatch, counting=False)
    with pytest.raises(UsageError, match="counts no instructions"):
        cli._lab(contextlib.ExitStack(), "instructions", None)


def test_another_kernel_than_the_lab_s_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    attached(monkeypatch, counting=True)
    with pytest.raises(UsageError, match="has not kernel lts: it runs stock"):
        cli._lab(contextlib.ExitStack(), "instructions", "lts")
    for kernel in (None, "stock", "7.3.4"):
        assert cli._lab(contextlib.ExitStack(), "instructions", kernel).tier == "stock"


def test_the_counting_lab_is_not_the_default_one() -> None:
    (name,) = (option.default for option in command.params if option.name == "name")
    assert name == "instructions" != labs.DEFAULT_NAME
