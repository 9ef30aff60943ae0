# SPDX-License-Identifier: Apache-2.0
"""Splats in console texts as kernels print them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmalab.errors import UsageError
from rdmalab.lab.console import KINDS, ConsoleFile, Scanner, Splat, clean, read_allowed, unexpected

DATA = Path(__file__).parent.parent / "data" / "console"
ALLOW_LIST = Path(__file__).parent.parent.parent / "vm" / "splats.toml"

EXPECTED = {
    "warning-6.12": [("WARNING", "WARNING at faultpoint_main.c:42 faultpoint_warn")],
    "warning-7.3": [("WARNING", "WARNING at raise.c:42 faultpoint_warn")],
    "oops-panic": [
        ("Oops", "kernel NULL pointer dereference in faultpoint_oops"),
        ("panic", "Kernel panic: Fatal exception"),
    ],
    "bug": [("BUG", "kernel BUG at rxe_pool.c:120")],
    "kasan": [("KASAN", "KASAN: slab-use-after-free in rxe_completer")],
    "lockdep": [
        ("lockdep", "lockdep: possible circular locking dependency detected"),
        ("RCU usage", "suspicious RCU usage"),
    ],
    "stalls": [
        ("hung task", "hung task rdma"),
        ("RCU stall", "rcu_preempt detected stalls in faultpoint_hang"),
        ("soft lockup", "soft lockup in sh in faultpoint_hang"),
    ],
    "various": [
        (
            "sleeping function",
            "sleeping function called from invalid context at mutex.c:591",
        ),
        ("kmemleak", "kmemleak: 3 new suspected memory leaks"),
        (
            "refcount",
            "refcount_t: underflow; use-after-free at refcount.c:28 refcount_warn_saturate",
        ),
        ("list corruption", "list_add corruption at list_debug.c:31"),
        ("page allocation failure", "page allocation failure in ib_write_bw, order 9"),
        ("UBSAN", "UBSAN: array-index-out-of-bounds at gve_rx.c:412"),
        ("reference leak", "unregister_netdevice: waiting for roce0 to become free"),
        ("Oops", "Oops: general protection fault in rxe_mr_cleanup"),
        ("out of memory", "out of memory: python3 killed"),
        ("scheduling while atomic", "scheduling while atomic: sh"),
        ("slab corruption", "slab corruption in kmalloc-64: Right Redzone overwritten"),
    ],
    "quiet": [],
    # As a guest of ours wrote it: stopped at each panic, and booted again.
    "stopped-7.3": [
        ("WARNING", "WARNING at raise.c:16 faultpoint_warn"),
        ("Oops", "kernel NULL pointer dereference in faultpoint_oops"),
        ("panic", "Kernel panic: Fatal exception"),
        ("panic", "Kernel panic: NMI: Not continuing in delay_tsc"),
    ],
}


def _text(name: str) -> bytes:
    return (DATA / f"{name}.txt").read_bytes()


def _scan(data: bytes, pieces: int = 0) -> list[Splat]:
    scanner = Scanner("node0")
    if not pieces:
        return scanner.feed(data) + scanner.finish()
    found = []
    for start in range(0, len(data), pieces):
        found += scanner.feed(data[start : start + pieces])
    return found + scanner.finish()


def test_every_file_is_expected() -> None:
    assert {path.stem for path in DATA.glob("*.txt")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("pieces", [0, 1, 7, 100])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r\r\n"])
def test_splats_are_found_and_named(name: str, pieces: int, newline: bytes) -> None:
    found = _scan(_text(name).replace(b"\n", newline), pieces)
    assert [(splat.kind, splat.title) for splat in found] == EXPECTED[name]
    for splat in found:
        assert splat.kind in KINDS
        assert splat.complete or (name.startswith("stopped") and splat.kind == "panic")
        assert "\n" not in splat.title


def test_the_whole_splat_is_kept_without_time_stamps() -> None:
    [splat] = _scan(_text("warning-6.12"))
    lines = splat.text.splitlines()
    assert lines[0] == "------------[ cut here ]------------"
    assert lines[1] == "faultpoint: warning raised on request"
    assert lines[-1] == "---[ end trace 0000000000000000 ]---"
    assert " full_proxy_write+0x5a/0xa0" in lines
    assert "all is well again" not in splat.text


def test_offset_is_where_the_splat_starts() -> None:
    data = _text("warning-7.3")
    [splat] = _scan(b"first line\n" + data)
    assert splat.offset == len(b"first line\n")


def test_a_console_that_stops_in_a_splat_gives_what_is_there() -> None:
    data = _text("oops-panic")
    cut = data[: data.index(b"Call Trace")]
    [splat] = _scan(cut)
    assert splat.title == "kernel NULL pointer dereference in faultpoint_oops"
    assert not splat.complete


def test_a_splat_in_a_splat_is_a_second_one() -> None:
    data = _text("warning-6.12")
    middle = data.index(b"[   14.212001] Call Trace")
    found = _scan(data[:middle] + _text("bug"))
    assert [splat.kind for splat in found] == ["WARNING", "BUG"]
    assert [splat.complete for splat in found] == [False, True]


def test_a_panic_ends_where_the_next_boot_starts() -> None:
    data = _text("oops-panic")
    stopped = data[: data.index(b"[   20.114001] ---[ end Kernel panic")]
    found = _scan(stopped + _text("quiet") * 9 + _text("bug"))
    assert [splat.kind for splat in found] == ["Oops", "panic", "BUG"]
    assert found[1].text.count("\n") < 5


def test_noise_without_a_newline_is_bounded() -> None:
    scanner = Scanner()
    for _ in range(100):
        assert scanner.feed(b"\0\xff" * 5000) == []
    assert len(scanner._partial) < 1 << 17


def test_a_splat_without_end_is_bounded() -> None:
    text = _text("warning-7.3").replace(b"---[ end trace", b"no end") + b"noise\n" * 10000
    [splat] = _scan(text)
    assert not splat.complete
    assert splat.text.count("\n") < 500


@pytest.mark.parametrize(
    ("raw", "wanted"),
    [
        (b"[    0.000000] plain", "plain"),
        (b"<4>[   12.345678][    C0] Oops: x\r", "Oops: x"),
        (b"[12345.123456][T12345] x", "x"),
        (b"\x1b[0;1;31mred\x1b[0m", "red"),
        (b"login: \r[    1.000000] x", "x"),
        (b"bad \xff byte", "bad \ufffd byte"),
        (b"[ BUG: held lock ]", "[ BUG: held lock ]"),
    ],
)
def test_clean(raw: bytes, wanted: str) -> None:
    assert clean(raw) == wanted


@given(st.binary(max_size=400), st.integers(1, 50))
@settings(max_examples=200, deadline=None)
def test_any_bytes_in_any_pieces_give_the_same(data: bytes, pieces: int) -> None:
    data = data + b"\n" + _text("kasan") + data
    assert _scan(data, pieces) == _scan(data)


class TestConsoleFile:
    def test_it_follows_a_growing_file(self, tmp_path: Path) -> None:
        path = tmp_path / "console-node0.log"
        console = ConsoleFile("node0", path)
        assert console.poll() == []
        data = _text("warning-7.3")
        path.write_bytes(data[:200])
        assert console.poll() == []
        assert console.open
        with path.open("ab") as file:
            file.write(data[200:])
        [splat] = console.poll()
        assert (splat.node, splat.complete) == ("node0", True)
        assert console.poll() == console.finish() == []

    def test_it_starts_where_it_is_told(self, tmp_path: Path) -> None:
        path = tmp_path / "console"
        path.write_bytes(_text("bug") + _text("kasan"))
        [splat] = ConsoleFile("n", path, len(_text("bug"))).finish()
        assert splat.kind == "KASAN"
        assert splat.offset > len(_text("bug"))

    def test_a_file_that_starts_anew_is_read_anew(self, tmp_path: Path) -> None:
        path = tmp_path / "console"
        path.write_bytes(b"x\n" * 5000)
        console = ConsoleFile("n", path)
        console.poll()
        path.write_bytes(_text("bug"))
        assert [splat.kind for splat in console.poll()] == ["BUG"]

    def test_tail(self, tmp_path: Path) -> None:
        path = tmp_path / "console"
        assert ConsoleFile("n", path).tail() == ""
        path.write_bytes(b"".join(b"%d\r\n" % n for n in range(1000)))
        assert ConsoleFile("n", path).tail(3) == "997\n998\n999"


class TestAllowList:
    def test_the_repositorys_own_is_valid(self) -> None:
        read_allowed(ALLOW_LIST)

    def test_an_entry_allows_its_splat_alone(self, tmp_path: Path) -> None:
        path = tmp_path / "splats.toml"
        path.write_text(
            '[[splat]]\nmatch = "at raise\\\\.c:42"\nkind = "WARNING"\n'
            'reason = "known"\nremove = "when fixed"\n'
        )
        allowed = read_allowed(path)
        splats = _scan(_text("warning-7.3") + _text("bug"))
        assert [splat.kind for splat in unexpected(splats, allowed)] == ["BUG"]

    @pytest.mark.parametrize(
        ("text", "wanted"),
        [
            ('[[splat]]\nmatch = "x"\nremove = "y"', "splat 1 has no reason"),
            ('[[splat]]\nmatch = "x"\nreason = " "\nremove = "y"', "splat 1 has no reason"),
            ('[[splat]]\nmatch = "x"\nreason = "y"', "splat 1 has no remove"),
            ('[[splat]]\nreason = "x"\nremove = "y"', "splat 1 has no match"),
            ('[[splat]]\nmatch = "("\nreason = "x"\nremove = "y"', "no regular expression"),
            ('[[splat]]\nmatch = "x"\nreason = "x"\nremove = "y"\nwhy = 1', "unknown keys: why"),
            ('[[splat]]\nmatch = "x"\nreason = "x"\nremove = "y"\nkind = "Bug"', "no such kind"),
            ("splat = 1", "only [[splat]]"),
            ("[other]", "only [[splat]]"),
            ("splat = [", "no allow-list"),
        ],
    )
    def test_a_bad_list_is_refused(self, tmp_path: Path, text: str, wanted: str) -> None:
        path = tmp_path / "splats.toml"
        path.write_text(text)
        with pytest.raises(UsageError, match=re.escape(wanted)) as caught:
            read_allowed(path)
        assert str(path) in str(caught.value)

    def test_a_missing_list_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="no allow-list"):
            read_allowed(tmp_path / "none.toml")
