# SPDX-License-Identifier: Apache-2.0
"""The guests' initial RAM file system."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmalab.errors import HostError
from rdmalab.lab.identity import Identity, Nic
from rdmalab.lab.initramfs import Archive, load_order, node_part


def read_newc(data: bytes) -> dict[str, tuple[int, bytes]]:
    """name -> (mode, content) of one archive."""
    found = {}
    at = 0
    while True:
        assert data[at : at + 6] == b"070701"
        fields = [int(data[at + 6 + 8 * i : at + 14 + 8 * i], 16) for i in range(13)]
        name = data[at + 110 : at + 110 + fields[11] - 1].decode()
        start = -(-(at + 110 + fields[11]) // 4) * 4
        content = data[start : start + fields[6]]
        at = -(-(start + fields[6]) // 4) * 4
        if name == "TRAILER!!!":
            return found
        found[name] = (fields[1], content)


@given(
    st.dictionaries(
        st.from_regex(r"[a-z]{1,8}(/[a-z]{1,8}){0,2}", fullmatch=True),
        st.binary(max_size=50),
        max_size=6,
    )
)
def test_what_goes_in_comes_out(files: dict[str, bytes]) -> None:
    names = {name for name in files if not any(o.startswith(name + "/") for o in files)}
    archive = Archive()
    for name in names:
        archive.file(name, files[name])
    data = archive.bytes()
    assert len(data) % 512 == 0
    found = read_newc(data)
    assert {n: c for n, (mode, c) in found.items() if mode & 0o100000} == {
        name: files[name] for name in names
    }
    for name in names:  # a directory comes before what is in it
        parent = name.rpartition("/")[0]
        if parent:
            assert list(found).index(parent) < list(found).index(name)


def test_equal_input_gives_equal_bytes_and_keys_are_private() -> None:
    nic = Nic("52:54:00:00:00:01", "roce0", ("10.77.0.1/24", "fd77::1/64"), 4200)
    identity = Identity("node0", "PRIVATE KEY", ("ssh-ed25519 AAAA",), (nic,))
    assert node_part(identity, {}) == node_part(identity, {})
    found = read_newc(node_part(identity, {}))
    assert found["rdmalab/net"][1] == b"52:54:00:00:00:01 roce0 4200 10.77.0.1/24 fd77::1/64\n"
    assert found["rdmalab/ssh/host_key"][0] & 0o777 == 0o600


def test_modules_load_after_what_they_need(tmp_path: Path) -> None:
    (tmp_path / "modules.dep").write_text(
        "kernel/a/top-one.ko: kernel/a/mid.ko kernel/a/low.ko\n"
        "kernel/a/mid.ko: kernel/a/low.ko\nkernel/a/low.ko:\n"
    )
    (tmp_path / "modules.builtin").write_text("kernel/b/built-in.ko\n")
    order = load_order(tmp_path, ["built_in", "top_one", "low"])
    assert order == ["kernel/a/low.ko", "kernel/a/mid.ko", "kernel/a/top-one.ko"]
    assert load_order(tmp_path, ["mid"], ["low", "absent"])[0] == "kernel/a/low.ko"
    with pytest.raises(HostError, match="no module absent"):
        load_order(tmp_path, ["absent"])
