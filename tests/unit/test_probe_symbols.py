# SPDX-License-Identifier: Apache-2.0
"""Which functions are found in the texts of real kernels, and what is said of the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from rdmalab.probe.catalogue import MODULE, ROLES, TASK_FUNCTIONS, WORK_FUNCTION
from rdmalab.probe.symbols import parse

DATA = Path(__file__).parents[1] / "data" / "probe"
KERNELS = ("6.12.118", "7.3.4")


@pytest.fixture(params=KERNELS)
def kallsyms(request: pytest.FixtureRequest) -> bytes:
    return (DATA / f"kallsyms-{request.param}").read_bytes()


def test_every_role_is_played_in_both_kernels(kallsyms: bytes) -> None:
    symbols = parse(kallsyms, MODULE)
    for role in ROLES.values():
        found = symbols.find(role.names)
        assert found.name == role.names[0], found.missing
        assert found.address


def test_work_and_task_functions(kallsyms: bytes) -> None:
    symbols = parse(kallsyms, MODULE)
    assert symbols.find(WORK_FUNCTION).name == "do_work"
    tasks = [name for name in TASK_FUNCTIONS if not symbols.find((name,)).missing]
    assert tasks == ["rxe_sender", "rxe_receiver", "rxe_requester", "rxe_completer"]


def test_neighbours_are_left_out(kallsyms: bytes) -> None:
    symbols = parse(kallsyms, MODULE)
    assert "queue_work_on" not in symbols.functions
    assert "rxe_link_ops" not in symbols.functions, "data is no function"
    assert "value_read" in parse(kallsyms, "ib_core").functions
    assert "value_read" not in symbols.functions


def test_old_name_is_taken_where_the_new_one_is_not() -> None:
    symbols = parse(b"ffffffffc0000010 t rxe_responder\t[rdma_rxe]\n", MODULE)
    assert symbols.find(ROLES["receive"].names).name == "rxe_responder"


def test_missing_function_is_named() -> None:
    symbols = parse(b"ffffffffc0000010 t rxe_rcv\t[rdma_rxe]\n", MODULE)
    assert symbols.find(("rxe_receiver", "rxe_responder")).missing == (
        "rdma_rxe has no rxe_receiver or rxe_responder"
    )


def test_function_changed_by_the_compiler_is_not_taken() -> None:
    symbols = parse(
        b"ffffffffc0000010 t rxe_rcv.isra.0\t[rdma_rxe]\n"
        b"ffffffffc0000020 t rxe_rcv.cold\t[rdma_rxe]\n",
        MODULE,
    )
    assert "rxe_rcv.isra.0" in symbols.find(("rxe_rcv",)).missing


def test_split_off_cold_part_is_no_changed_function() -> None:
    symbols = parse(b"ffffffffc0000020 t rxe_rcv.cold\t[rdma_rxe]\n", MODULE)
    assert symbols.find(("rxe_rcv",)).missing == "rdma_rxe has no rxe_rcv"


def test_two_functions_of_one_name_are_not_guessed_between() -> None:
    symbols = parse(
        b"ffffffffc0000010 t do_work\t[rdma_rxe]\nffffffffc0000020 t do_work\t[rdma_rxe]\n", MODULE
    )
    assert "several functions named do_work" in symbols.find(("do_work",)).missing


@pytest.mark.parametrize("text", [b"", b"ffffffff81000000 T queue_work_on\n"])
def test_module_that_is_not_loaded(text: bytes) -> None:
    assert parse(text, MODULE).find(("rxe_rcv",)).missing == "module rdma_rxe is not loaded"


def test_module_whose_name_is_part_of_another() -> None:
    symbols = parse(
        b"ffffffffc0000010 t one\t[rdma_rxe]\nffffffffc0000020 t two\t[rdma_rxe_more]\n"
        b"ffffffffc0000030 t three\t[rdma_rxe]\n",
        MODULE,
    )
    assert set(symbols.functions) == {"one", "three"}
