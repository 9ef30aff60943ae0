# SPDX-License-Identifier: Apache-2.0
"""What a module file says of itself, and what is refused before insmod."""

from __future__ import annotations

import contextlib
import struct
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmalab.errors import CommandFailed, HostError, RdmalabError, UsageError
from rdmalab.lab import module
from rdmalab.lab.node import Result

STOCK = "7.3.4+deb13-amd64"
LTS = "6.12.118+deb13-amd64"


def elf(sections: Mapping[str, bytes]) -> bytes:
    """A relocatable ELF64 file with these sections, as a linker lays them out."""
    names, offsets = b"\0", {}
    for name in [*sections, ".shstrtab"]:
        offsets[name] = len(names)
        names += name.encode() + b"\0"
    contents = {**sections, ".shstrtab": names}
    body, headers = b"", [bytes(64)]
    for name, data in contents.items():
        header = (offsets[name], 1, 0, 0, 64 + len(body), len(data), 0, 0, 1, 0)
        headers.append(struct.pack("<IIQQQQIIQQ", *header))
        body += data
    table = 64 + len(body)
    count = len(headers)
    start = b"\x7fELF\x02\x01\x01" + bytes(9)
    start += struct.pack("<HHIQQQIHHHHHH", 1, 62, 1, 0, 0, table, 0, 64, 0, 0, 64, count, count - 1)
    return start + body + b"".join(headers)


def ko(
    release: str, name: str = "faultpoint", depends: str = "", build_id: str = "ab" * 20
) -> bytes:
    words = {
        "license": "GPL",
        "depends": depends,
        "name": name,
        "vermagic": f"{release} SMP preempt mod_unload modversions ",
    }
    info = b"".join(f"{key}={value}\0".encode() for key, value in words.items())
    raw = bytes.fromhex(build_id)
    note = struct.pack("<III", 4, len(raw), 3) + b"GNU\0" + raw
    return elf({".text": b"\x90" * 7, ".modinfo": info, ".note.gnu.build-id": note})


class FakeNode:
    """Answers like a node whose kernel is ``release``; keeps what was asked of it."""

    name = "node0"

    def __init__(self, release: str, loaded: Mapping[str, str] | None = None) -> None:
        self.release = release
        self.loaded = dict(loaded or {})
        self.asked: list[tuple[str, ...]] = []
        self.sent: dict[str, Path] = {}

    def run(self, argv: Sequence[str], **_: Any) -> Result:
        self.asked.append(tuple(argv))
        status, out, err = 0, "", ""
        if argv[0] == "uname":
            out = self.release + "\n"
        elif argv[0] == "sh":
            name = argv[2].split("/sys/module/")[1].split("/")[0]
            if name in self.loaded:
                raw = bytes.fromhex(self.loaded[name])
                out = (struct.pack("<III", 4, len(raw), 3) + b"GNU\0" + raw).hex(" ")
            else:
                status = 3
        elif argv[0] == "insmod":
            info = module.read(self.sent[argv[1]])
            if info.release != self.release:
                status, err = 1, "insmod: ERROR: could not insert module: Invalid module format"
            else:
                self.loaded[info.name] = info.build_id
        return Result(tuple(argv), status, out, err, 0.0)

    def put(self, local: Path, remote: str, mode: int = 0o644) -> None:
        self.sent[remote] = local

    def commands(self, name: str) -> list[tuple[str, ...]]:
        return [argv for argv in self.asked if argv[0] == name]


def put(modules: Path, release: str, name: str = "faultpoint", **words: str) -> Path:
    path = modules / release / f"{name}.ko"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(ko(release, name, **words))
    return path


def test_reads_what_modinfo_says(tmp_path: Path) -> None:
    path = put(tmp_path, STOCK, "usb4_rdma", depends="ib_core,thunderbolt")
    info = module.read(path)
    assert info.name == "usb4_rdma"
    assert info.vermagic == f"{STOCK} SMP preempt mod_unload modversions"
    assert info.release == STOCK
    assert info.depends == ("ib_core", "thunderbolt")
    assert info.build_id == "ab" * 20


def test_a_module_of_another_kernel_is_refused_before_insmod(tmp_path: Path) -> None:
    path = put(tmp_path, LTS)
    node = FakeNode(STOCK)
    with pytest.raises(module.ModuleMismatch) as caught:
        module.load_file(node, path)
    line = str(caught.value)
    assert STOCK in line
    assert LTS in line
    assert "node0" in line
    assert "\n" not in line
    assert node.commands("insmod") == []


def test_a_module_not_built_for_the_running_kernel_is_named(tmp_path: Path) -> None:
    put(tmp_path, LTS)
    node = FakeNode(STOCK)
    with pytest.raises(
        UsageError, match=r"not built for the running kernel 7\.3\.4.*built for: 6\.12"
    ):
        module.load(node, "faultpoint", tmp_path)
    assert node.commands("insmod") == []


def test_a_wrong_module_in_the_right_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / STOCK).mkdir()
    (tmp_path / STOCK / "faultpoint.ko").write_bytes(ko(LTS))
    with pytest.raises(module.ModuleMismatch):
        module.load(FakeNode(STOCK), "faultpoint", tmp_path)


def test_loads_what_fits_with_its_parameters(tmp_path: Path) -> None:
    put(tmp_path, STOCK)
    node = FakeNode(STOCK)
    module.load(node, "faultpoint", tmp_path, ["debug=1"])
    assert node.commands("insmod") == [("insmod", "/run/rdmalab/modules/faultpoint.ko", "debug=1")]


def test_loads_what_a_module_needs_first(tmp_path: Path) -> None:
    put(tmp_path, STOCK, "knod_core", depends="dmabuf_helpers")
    put(tmp_path, STOCK, "knod_gpu", depends="knod_core")
    node = FakeNode(STOCK)
    module.load(node, "knod_gpu", tmp_path)
    order = [argv[1].rsplit("/", 1)[-1] for argv in node.asked if argv[0] in ("modprobe", "insmod")]
    assert order == ["dmabuf_helpers", "knod_core.ko", "knod_gpu.ko"]


def test_loading_twice_does_nothing(tmp_path: Path) -> None:
    put(tmp_path, STOCK)
    node = FakeNode(STOCK, {"faultpoint": "ab" * 20})
    module.load(node, "faultpoint", tmp_path)
    assert node.commands("insmod") == []


def test_another_build_that_is_loaded_is_said(tmp_path: Path) -> None:
    put(tmp_path, STOCK)
    node = FakeNode(STOCK, {"faultpoint": "cd" * 20})
    with pytest.raises(RdmalabError, match="another build of faultpoint is loaded"):
        module.load(node, "faultpoint", tmp_path)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a little-endian ELF64"),
        (b"\x7fELF\x01\x01" + bytes(100), "not a little-endian ELF64"),
        (elf({".text": b"\0"}), r"no \.modinfo"),
        (elf({".modinfo": b"license=GPL\0name=x\0"}), "no vermagic"),
        (ko(STOCK)[:200], ""),
    ],
)
def test_what_is_no_module_is_refused(tmp_path: Path, data: bytes, reason: str) -> None:
    path = tmp_path / "x.ko"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=f"x.ko is no kernel module.*{reason}"):
        module.read(path)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*absent\.ko"):
        module.read(tmp_path / "absent.ko")


@given(position=st.integers(min_value=0), value=st.integers(0, 255))
def test_a_damaged_file_is_refused_or_read_never_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: int
) -> None:
    data = bytearray(ko(STOCK))
    data[position % len(data)] = value
    path = tmp_path_factory.getbasetemp() / "damaged.ko"
    path.write_bytes(data)
    with contextlib.suppress(UsageError):
        assert module.read(path).name


class FakeSysroot:
    """A sysroot whose make puts a module into the folder that is bound, or fails."""

    def __init__(self, tmp_path: Path) -> None:
        self.root = tmp_path / "sysroot"
        self.key = "k1"
        self.paths = SimpleNamespace(
            repo=tmp_path / "repo", cache=tmp_path / "cache", modules=tmp_path / "cache/modules"
        )
        self.output, self.status, self.builds = "", 0, 0
        self.release = STOCK
        headers = self.root / "usr/src" / f"linux-headers-{STOCK}"
        headers.mkdir(parents=True)
        (headers / ".config").write_text("CONFIG_X=y\n")
        (headers / "Module.symvers").write_text("")
        kernel = self.paths.repo / "kernel"
        (kernel / "faultpoint").mkdir(parents=True)
        (kernel / "Kbuild").write_text("obj-m += faultpoint/\n")
        (kernel / "faultpoint/main.c").write_text("int x;\n")
        (kernel / "faultpoint/main.o").write_text("left by hand")

    def run(
        self, argv: Sequence[str], *, binds: Mapping[Path, str], **_: Any
    ) -> subprocess.CompletedProcess[str]:
        self.builds += 1
        (source,) = binds
        self.seen = sorted(str(p.relative_to(source)) for p in source.rglob("*") if p.is_file())
        self.argv = argv
        if not self.status:
            (source / "faultpoint/faultpoint.ko").write_bytes(ko(self.release))
        return subprocess.CompletedProcess(list(argv), self.status, self.output, "")


def build(sysroot: FakeSysroot) -> list[Path]:
    from rdmalab.lab.progress import Progress

    return module.build(sysroot, STOCK, Progress())  # type: ignore[arg-type]


def test_builds_once_and_again_when_a_source_changes(tmp_path: Path) -> None:
    sysroot = FakeSysroot(tmp_path)
    first = build(sysroot)
    assert [path.name for path in first] == ["faultpoint.ko"]
    assert module.read(first[0]).release == STOCK
    build(sysroot)
    assert sysroot.builds == 1
    (sysroot.paths.repo / "kernel/faultpoint/main.c").write_text("int y;\n")
    build(sysroot)
    assert sysroot.builds == 2


def test_builds_again_when_headers_or_compiler_change_or_a_module_is_gone(tmp_path: Path) -> None:
    sysroot = FakeSysroot(tmp_path)
    build(sysroot)
    (sysroot.root / "usr/src" / f"linux-headers-{STOCK}" / ".config").write_text("CONFIG_X=n\n")
    build(sysroot)
    sysroot.key = "k2"
    built = build(sysroot)
    built[0].unlink()
    build(sysroot)
    assert sysroot.builds == 4


def test_sources_stay_as_they_are_and_leftovers_are_not_built_from(tmp_path: Path) -> None:
    sysroot = FakeSysroot(tmp_path)
    build(sysroot)
    assert sysroot.seen == ["Kbuild", "faultpoint/main.c"]
    left = sorted(p.name for p in (sysroot.paths.repo / "kernel/faultpoint").iterdir())
    assert left == ["main.c", "main.o"]


def test_a_failed_build_names_the_finding_and_keeps_the_modules_of_before(tmp_path: Path) -> None:
    sysroot = FakeSysroot(tmp_path)
    (before,) = build(sysroot)
    (sysroot.paths.repo / "kernel/faultpoint/main.c").write_text("int broken\n")
    sysroot.status = 2
    sysroot.output = (
        "  CC [M]  faultpoint/main.o\nfaultpoint/main.c:1:1: error: expected ';'\nmake: ***\n"
    )
    with pytest.raises(CommandFailed, match=r"main\.c:1:1: error: expected ';'.*read ") as caught:
        build(sysroot)
    assert before.is_file()
    log = Path(str(caught.value).split("read ")[-1])
    assert "expected ';'" in log.read_text()


def test_a_warning_fails_the_build_though_make_ends_well(tmp_path: Path) -> None:
    sysroot = FakeSysroot(tmp_path)
    sysroot.output = "WARNING: modpost: missing MODULE_DESCRIPTION() in faultpoint.o\n"
    with pytest.raises(CommandFailed, match="missing MODULE_DESCRIPTION"):
        build(sysroot)


def test_a_full_disk_is_the_hosts(tmp_path: Path) -> None:
    sysroot = FakeSysroot(tmp_path)
    sysroot.status, sysroot.output = 2, "ld: final close failed: No space left on device\n"
    with pytest.raises(HostError, match="is full"):
        build(sysroot)


def test_a_kernel_without_headers_is_the_hosts(tmp_path: Path) -> None:
    from rdmalab.lab.progress import Progress

    with pytest.raises(HostError, match=r"no headers of kernel 9\.9"):
        module.build(FakeSysroot(tmp_path), "9.9", Progress())  # type: ignore[arg-type]


def test_what_was_built_for_another_kernel_than_asked_is_refused(tmp_path: Path) -> None:
    sysroot = FakeSysroot(tmp_path)
    sysroot.release = LTS
    with pytest.raises(module.ModuleMismatch):
        build(sysroot)
