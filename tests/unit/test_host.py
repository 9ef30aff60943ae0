# SPDX-License-Identifier: Apache-2.0
"""The host's package sources and accelerators."""

from __future__ import annotations

from pathlib import Path

import pytest

from rdmalab.errors import HostError, UsageError
from rdmalab.lab import accel, host


def targets(*lines: str) -> list[host.Source]:
    return host.parse_targets("\n".join(lines))


def test_the_debian_archive_is_found_among_third_parties() -> None:
    found = host.choose_mirrors(
        targets(
            "https://vendor.example/apt cloud-bookworm",
            "https://vendor.example/node nodistro",
            "http://mirror.example/debian/ bookworm",
            "http://mirror.example/debian/ bookworm-updates",
            "http://mirror.example/debian-security/ bookworm-security",
        )
    )
    assert found == host.Mirrors(
        "http://mirror.example/debian", "http://mirror.example/debian-security"
    )


def test_security_is_taken_from_the_same_mirror_where_it_is_not_named() -> None:
    found = host.choose_mirrors(targets("http://mirror.example/debian trixie"))
    assert found.security == "http://mirror.example/debian-security"


def test_a_host_without_an_archive_is_said_to_lack_one() -> None:
    with pytest.raises(HostError) as caught:
        host.choose_mirrors(targets("https://vendor.example/apt cloud"))
    assert caught.value.exit_status == 4


def test_missing_packages_are_named_with_the_command_that_installs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shutil.which", lambda command: None)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(HostError, match=r"apt-get install .*mmdebstrap") as caught:
        host.ensure_packages(lambda line: None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "has"), [("fpu vmx de", True), ("svm", True), ("fpu hypervisor", False)]
)
def test_hardware_virtualisation_is_read_from_the_flags(
    tmp_path: Path, flags: str, has: bool
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nmodel name\t: vmx svm\nflags\t\t: {flags}\n")
    assert accel.hardware_virtualisation(cpuinfo) is has


def test_kvm_is_not_taken_for_its_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accel, "hardware_virtualisation", lambda: False)
    chosen = accel.choose("auto", ["/nonexistent"], {})
    assert chosen.name == "tcg"
    assert "vmx" in chosen.reason


def test_a_kvm_whose_probe_guest_hangs_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hanging = tmp_path / "qemu"
    hanging.write_text("#!/bin/sh\nexec sleep 60\n")
    hanging.chmod(0o755)
    monkeypatch.setattr(accel, "hardware_virtualisation", lambda: True)
    monkeypatch.setattr(accel, "_PROBE_SECONDS", 0.2)
    monkeypatch.setattr("os.access", lambda path, mode: True)
    chosen = accel.choose("auto", [str(hanging)], {})
    assert chosen.name == "tcg"
    assert "hung" in chosen.reason


def test_an_accelerator_can_be_forced_and_an_unknown_one_is_refused() -> None:
    assert accel.choose("kvm", [], {}) == accel.Accelerator("kvm", "forced by --accel")
    with pytest.raises(UsageError, match="hvf"):
        accel.choose("hvf", [], {})


def test_an_unknown_accelerator_is_refused_with_nothing_built() -> None:
    accel.check("auto")
    with pytest.raises(UsageError, match="choose one of auto, tcg, kvm"):
        accel.check("hvf")


def test_suites_of_ubuntu_are_not_taken_for_debians() -> None:
    ubuntu = ["http://u.example/ubuntu noble-updates", "http://u.example/ubuntu noble-security"]
    with pytest.raises(HostError, match="no Debian archive"):
        host.choose_mirrors(targets(*ubuntu))
    found = host.choose_mirrors(targets(*ubuntu, "http://d.example/debian trixie-updates"))
    assert found == host.Mirrors("http://d.example/debian", "http://d.example/debian-security")


def test_a_host_without_apt_lacks_its_package_sources(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = {check.name: check for check in host.checks(tmp_path)}
    assert not found["package sources"].ok
    assert "apt-get" in found["package sources"].seen


@pytest.mark.parametrize(("user", "lacking"), [(0, []), (1000, ["uidmap"])])
def test_whoever_is_not_root_needs_what_maps_user_ids(
    user: int, lacking: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: user)
    monkeypatch.setattr("shutil.which", lambda cmd: None if cmd == "newuidmap" else f"/bin/{cmd}")
    assert host.missing_packages() == lacking


def test_the_cache_is_tried_and_not_left_behind(tmp_path: Path) -> None:
    check = host._cache_check(tmp_path / "a" / "cache")
    assert check.ok
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["/proc/none", "{}/file", "{}/file/below"])
def test_a_cache_that_cannot_be_is_lacking(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    cache = Path(path.format(tmp_path))
    monkeypatch.setattr(host, "mirrors", lambda: None)
    found = {check.name: check for check in host.checks(cache)}
    assert not found["cache"].ok
    assert str(cache) in found["cache"].seen
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
