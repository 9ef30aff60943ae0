# SPDX-License-Identifier: Apache-2.0
"""The plan for a node: the catalogue, the programs and the node's functions fit together."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

import rdmalab.probe
from rdmalab.errors import UsageError
from rdmalab.probe import plan as planning
from rdmalab.probe.btf import ModuleTypes, Structure
from rdmalab.probe.catalogue import MODULE, OPCODES, PROBES, ROLES, STAGES, select
from rdmalab.probe.facts import Facts
from rdmalab.probe.provider import PollFunction, locate
from rdmalab.probe.symbols import ModuleSymbols, parse

HERE = Path(rdmalab.probe.__file__).parent
DATA = Path(__file__).parents[1] / "data" / "probe"
ALL = tuple(PROBES.values())


def types_of(functions: frozenset[str]) -> ModuleTypes:
    """Every structure that a probe reads, members 8 bytes apart."""
    members: dict[str, dict[str, int]] = {}
    for probe in ALL:
        for _, path in probe.offsets:
            for each in path:
                structure, member = each.split(".")
                offsets = members.setdefault(structure, {})
                offsets.setdefault(member, 8 * (len(offsets) + 1))
    return ModuleTypes({n: Structure(256, o) for n, o in members.items()}, functions)


@pytest.fixture(params=["6.12.118", "7.3.4"])
def facts(request: pytest.FixtureRequest) -> Facts:
    kallsyms = (DATA / f"kallsyms-{request.param}").read_bytes()
    symbols = parse(kallsyms, MODULE)
    return Facts(
        symbols=symbols,
        types=types_of(frozenset(symbols.functions)),
        polls=(PollFunction("rxe0", "/usr/lib/libibverbs/librxe-rdmav34.so", 0x2CC0),),
        tracepoints=frozenset(
            match.decode() for match in re.findall(rb" __tracepoint_(\S+)\n", kallsyms)
        ),
    )


def handlers(source: str) -> set[str]:
    """The programs of a program file and the functions that other programs call: those that
    carry the probe's name, as its helpers do not."""
    text = (HERE / source).read_text()
    found = re.findall(
        r"^(?:static __always_inline void|int) (\w+)\((?:struct call \*call|struct \w+ \*ctx)",
        text,
        re.MULTILINE,
    )
    return {name for name in found if name.startswith(source.split(".")[0])}


@pytest.mark.parametrize("probe", ALL, ids=lambda p: p.name)
def test_program_file_defines_exactly_what_the_catalogue_attaches(probe: object) -> None:
    entry = PROBES[probe.name]  # type: ignore[attr-defined]
    wanted = {hook.handler for hook in entry.hooks} | {program for _, program in entry.tracepoints}
    if entry.uretprobe:
        wanted.add(entry.uretprobe)
    assert handlers(entry.source) == wanted


@pytest.mark.parametrize("probe", ALL, ids=lambda p: p.name)
def test_handlers_take_the_slots_that_they_are_told(probe: object) -> None:
    entry = PROBES[probe.name]  # type: ignore[attr-defined]
    text = (HERE / entry.source).read_text()
    for hook in entry.hooks:
        match = re.search(rf"{hook.handler}\(struct call \*call([^)]*)\)", text)
        assert match
        assert match[1].count("u32") == hook.slots
        assert hook.role in ROLES


@pytest.mark.parametrize("probe", ALL, ids=lambda p: p.name)
def test_programs_use_the_offsets_that_are_declared(probe: object) -> None:
    entry = PROBES[probe.name]  # type: ignore[attr-defined]
    text = (HERE / entry.source).read_text()
    declared = {constant for constant, _ in entry.offsets}
    used = set(re.findall(r"\bRXE_\w+", text)) - set(re.findall(r"#define (RXE_\w+)", text))
    assert used == declared


def test_no_program_file_is_without_its_entry() -> None:
    assert {path.name for path in HERE.glob("*.bcc.c")} == {probe.source for probe in ALL}


def test_everything_attaches_by_type_information(facts: Facts) -> None:
    plan = planning.make(ALL, facts)
    assert plan.missing == ()
    kinds = {attach.kind for attach in plan.attaches}
    assert kinds == {"fentry", "fexit", "tracepoint", "uretprobe"}
    assert {s.key for s in plan.slots if s.probe == "work_delay"} >= {"rxe_sender", "rxe_receiver"}


def test_two_probes_on_one_function_share_a_program(facts: Facts) -> None:
    plan = planning.make(ALL, facts)
    points = [(attach.kind, attach.target) for attach in plan.attaches]
    assert len(points) == len(set(points))
    (completer,) = [a for a in plan.attaches if (a.kind, a.target) == ("fentry", "rxe_completer")]
    assert set(completer.probes) == {"stage_time", "post_to_completion"}


def test_each_program_is_in_the_text_once(facts: Facts) -> None:
    for by_name in (False, True):
        plan = planning.make(ALL, facts, by_name=by_name)
        for attach in plan.attaches:
            assert len(re.findall(rf"^int {attach.program}\(", plan.text, re.MULTILINE)) == 1


def test_every_handler_that_is_called_is_defined_before(facts: Facts) -> None:
    text = planning.make(ALL, facts).text
    for probe in ALL:
        for name in handlers(probe.source):
            definition = re.search(rf"^(?:static __always_inline void|int) {name}\(", text, re.M)
            calls = [m.start() for m in re.finditer(rf"^\t{name}\(", text, re.M)]
            assert definition
            assert all(call > definition.start() for call in calls)


def test_slots_do_not_overlap(facts: Facts) -> None:
    plan = planning.make(ALL, facts)
    assert [slot.index for slot in plan.slots] == list(range(len(plan.slots)))
    assert f"#define SLOTS {len(plan.slots)}\n" in plan.text
    first = min(s.index for s in plan.slots if s.probe == "post_to_completion")
    assert [s.key for s in plan.slots[first : first + len(OPCODES)]] == list(OPCODES)


def test_by_name_uses_kprobes(facts: Facts) -> None:
    kinds = {a.kind for a in planning.make(select(["stage_time"]), facts, by_name=True).attaches}
    assert kinds == {"kprobe", "kretprobe"}


def test_without_type_information_stages_go_by_name_and_the_rest_says_why(facts: Facts) -> None:
    plan = planning.make(
        ALL, replace(facts, types=None, types_missing="the kernel has no /sys/kernel/btf/rdma_rxe")
    )
    missing = {m.probe: m.reason for m in plan.missing}
    assert set(missing) == {"post_to_completion", "work_delay"}
    assert "/sys/kernel/btf/rdma_rxe" in missing["work_delay"]
    assert any(a.kind == "kprobe" and a.target == "rxe_rcv" for a in plan.attaches)


def test_kprobes_that_would_outlive_the_process_are_refused(facts: Facts) -> None:
    plan = planning.make(
        select(["stage_time"]), replace(facts, types=None, types_missing="none", kprobes=False)
    )
    assert {m.key for m in plan.missing} == set(STAGES)
    assert plan.attaches == ()
    assert plan.text == ""


def test_one_missing_stage_leaves_the_others(facts: Facts) -> None:
    functions = {n: a for n, a in facts.symbols.functions.items() if n != "rxe_xmit_packet"}
    plan = planning.make(ALL, replace(facts, symbols=ModuleSymbols(MODULE, functions)))
    (missing,) = plan.missing
    assert (missing.probe, missing.key) == ("stage_time", "transmit")
    assert missing.reason == "rdma_rxe has no rxe_xmit_packet"


def test_a_probe_of_several_hooks_is_whole_or_missing(facts: Facts) -> None:
    functions = {n: a for n, a in facts.symbols.functions.items() if n != "rxe_cq_post"}
    plan = planning.make(
        select(["post_to_completion"]), replace(facts, symbols=ModuleSymbols(MODULE, functions))
    )
    assert [m.reason for m in plan.missing] == ["rdma_rxe has no rxe_cq_post"]
    assert plan.attaches == ()


def test_missing_structure_member_is_named(facts: Facts) -> None:
    assert facts.types is not None
    structures = dict(facts.types.structures)
    structures["rxe_queue"] = Structure(8, {})
    types = ModuleTypes(structures, facts.types.functions)
    plan = planning.make(select(["post_to_completion"]), replace(facts, types=types))
    assert [m.reason for m in plan.missing] == ["rdma_rxe has no rxe_queue.buf"]


def test_hidden_addresses_leave_the_work_queue_out(facts: Facts) -> None:
    hidden = ModuleSymbols(MODULE, dict.fromkeys(facts.symbols.functions, 0))
    plan = planning.make(select(["work_delay"]), replace(facts, symbols=hidden))
    assert [m.reason for m in plan.missing] == ["the kernel hides the addresses of its functions"]


def test_without_the_driver_everything_of_it_is_missing(facts: Facts) -> None:
    bare = Facts(ModuleSymbols(MODULE, {}), None, "none", (), "no RDMA device")
    plan = planning.make(ALL, bare)
    assert {m.probe for m in plan.missing} == set(PROBES)
    assert plan.text == ""


def test_unknown_probe_is_wrong_use() -> None:
    with pytest.raises(UsageError, match="no probe named nonsense; there are: post_to_completion"):
        select(["stage_time", "nonsense"])


def test_selection_is_once_each_in_the_order_of_the_catalogue() -> None:
    names = [p.name for p in select(["work_delay", "stage_time", "work_delay"])]
    assert names == ["stage_time", "work_delay"]
    assert [p.name for p in select([])] == list(PROBES)


MAPS = """\
55d0c0000000-55d0c0021000 rw-p 00000000 00:00 0                          [heap]
7f3ee5e00000-7f3ee5e02000 r--p 00000000 fe:00 131 /usr/lib/libibverbs/librxe-rdmav34.so
7f3ee5e02000-7f3ee5e05000 r-xp 00002000 fe:00 131 /usr/lib/libibverbs/librxe-rdmav34.so
7f3ee5e05000-7f3ee5e06000 r--p 00005000 fe:00 131 /usr/lib/libibverbs/librxe-rdmav34.so
7f3ee6000000-7f3ee6001000 rw-p 00000000 00:00 0
"""


def test_poll_function_is_located_in_its_library() -> None:
    place = locate(MAPS, 0x7F3EE5E02CC0)
    assert place == ("/usr/lib/libibverbs/librxe-rdmav34.so", 0x2CC0)
    assert PollFunction("rxe0", *place).library == "librxe"
    assert locate(MAPS, 0x7F3EE6000010) is None
    assert locate(MAPS, 0x55D0C0000010) is None
    assert locate(MAPS, 0) is None
