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
