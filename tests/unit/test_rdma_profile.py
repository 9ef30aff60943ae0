# SPDX-License-Identifier: Apache-2.0
"""A profile is what it says or one line says why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from rdmalab.errors import UsageError
from rdmalab.rdma import profile


def test_default_file_says_what_the_code_defaults_to() -> None:
    assert profile.load("default") == profile.Profile()


def test_default_is_patient_but_not_for_ever() -> None:
    default = profile.load("default")
    assert (default.timeout, default.retry_count) == (18, 7)
    assert default.rnr_retry < 7


def test_keys_are_taken_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'service = "UD"\npath_mtu = 1024\ntraffic_class = 104\nflow_label = 0xABCDE\n'
        'cq_mode = "poll"\n[gid]\nfamily = "ipv6"\ntype = "IB/RoCE v1"\n'
    )
    got = profile.load(str(path))
    assert (got.service, got.path_mtu, got.traffic_class) == ("UD", 1024, 104)
    assert (got.flow_label, got.cq_mode) == (0xABCDE, "poll")
    assert (got.gid_family, got.gid_type) == ("ipv6", "IB/RoCE v1")


@pytest.mark.parametrize(
    ("text", "key", "value", "allowed"),
    [
        ("timeout = 32", "timeout", "32", "an integer from 0 to 31"),
        ("timeout = -1", "timeout", "-1", "an integer from 0 to 31"),
        ('timeout = "18"', "timeout", '"18"', "an integer from 0 to 31"),
        ("retry_count = 8", "retry_count", "8", "an integer from 0 to 7"),
        ("inline = true", "inline", "True", "an integer from 0 to 4096"),
        ("inline = 1.5", "inline", "1.5", "an integer from 0 to 4096"),
        ('service = "rc"', "service", '"rc"', '"RC", "UC", "UD"'),
        ("service = 1", "service", "1", '"RC", "UC", "UD"'),
        ("path_mtu = 1500", "path_mtu", "1500", "256, 512, 1024, 2048, 4096"),
        ("path_mtu = true", "path_mtu", "True", '"active" or one of'),
        ("flow_label = 0x100000", "flow_label", "1048576", "an integer from 0 to 1048575"),
        ("traffic_class = 256", "traffic_class", "256", "an integer from 0 to 255"),
        ('gid.type = "RoCE v3"', "gid.type", '"RoCE v3"', '"IB/RoCE v1", "RoCE v2"'),
        ('gid.family = "ipx"', "gid.family", '"ipx"', '"any", "ipv4", "ipv6"'),
        ("timeout = [18]", "timeout", "[18]", "an integer from 0 to 31"),
    ],
)
def test_bad_value_is_refused(
    tmp_path: Path, text: str, key: str, value: str, allowed: str
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        profile.load(str(path))
    line = str(caught.value)
    assert "\n" not in line
    for part in (str(path), key, value, allowed):
        assert part in line


@pytest.mark.parametrize(
    "text", ["gid_index = 1", "[gid]\nindex = 1", "[qp]\ntimeout = 1", "gid = 3", "Timeout = 1"]
)
def test_unknown_key_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"bad\.toml: (unknown key \S+: value \d+|gid = 3)"):
        profile.load(str(path))


def test_what_is_no_toml_or_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("timeout 18")
    with pytest.raises(UsageError, match="not TOML"):
        profile.load(str(path))
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not UTF-8"):
        profile.load(str(path))
    with pytest.raises(UsageError, match="cannot read"):
        profile.load(str(tmp_path) + "/")


def test_missing_profile_names_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"no profile nosuch.*built in: default"):
        profile.load("nosuch")


def test_override_checks_and_keeps_the_rest() -> None:
    base = profile.parse("timeout = 20", path="x")
    changed = profile.override(base, {"service": "UC", "gid.family": "ipv4"})
    assert (changed.timeout, changed.service, changed.gid_family) == (20, "UC", "ipv4")
    assert changed.path_mtu == profile.ACTIVE_MTU
    with pytest.raises(UsageError, match="rnr_retry = 9"):
        profile.override(base, {"rnr_retry": 9})
