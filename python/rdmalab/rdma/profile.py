# SPDX-License-Identifier: Apache-2.0
"""Queue pair profiles: TOML files whose every key has a type and a range."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from rdmalab.errors import UsageError
from rdmalab.rdma.gid import FAMILIES
from rdmalab.rdma.model import IB_OR_ROCE_V1, ROCE_V2

MTUS = (256, 512, 1024, 2048, 4096)
ACTIVE_MTU = 0  # the value of ``Profile.path_mtu`` for "active"

_BUILT_IN = Path(__file__).parent / "profiles"


class _RefusedError(Exception):
    """A value that is not allowed; the text is what would be."""


def _integer(low: int, high: int) -> Callable[[object], int]:
    def parse(value: object) -> int:
        # bool is an int to Python, but "inline = true" is a mistake in a profile.
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise _RefusedError(f"an integer from {low} to {high}")
        return value

    return parse


def _one_of(*allowed: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise _RefusedError("one of " + ", ".join(f'"{name}"' for name in allowed))
        return value

    return parse


def _mtu(value: object) -> int:
    if value == "active":
        return ACTIVE_MTU
    if not isinstance(value, int) or isinstance(value, bool) or value not in MTUS:
        raise _RefusedError('"active" or one of ' + ", ".join(str(mtu) for mtu in MTUS))
    return value


def _key(parse: Callable[[object], Any], default: Any, name: str = "") -> Any:
    return field(default=default, metadata={"parse": parse, "name": name})


@dataclass(frozen=True)
class Profile:
    """Every attribute of a queue pair that is the user's to choose.

    The ranges are the InfiniBand specification's (``timeout``, ``rnr_timer``: 5 bits;
    retries: 3 bits; flow label: 20 bits), not one device's; a device's own limits are
    checked when a queue pair is made on it.
    """

    service: str = _key(_one_of("RC", "UC", "UD"), "RC")
    path_mtu: int = _key(_mtu, ACTIVE_MTU)  # bytes; ACTIVE_MTU: the smaller port's
    timeout: int = _key(_integer(0, 31), 18)  # 4.096 us * 2^timeout; 0: wait for ever
    retry_count: int = _key(_integer(0, 7), 7)
    rnr_retry: int = _key(_integer(0, 7), 6)  # 7: for ever
    rnr_timer: int = _key(_integer(0, 31), 26)  # code of the IBA's table 45; 26: 81.92 ms
    send_depth: int = _key(_integer(1, 65536), 128)  # work requests
    recv_depth: int = _key(_integer(1, 65536), 512)
    max_sge: int = _key(_integer(1, 256), 1)
    inline: int = _key(_integer(0, 4096), 0)  # bytes
    max_rd_atomic: int = _key(_integer(0, 255), 16)  # reads and atomics we start
    max_dest_rd_atomic: int = _key(_integer(0, 255), 16)  # reads and atomics we serve
    traffic_class: int = _key(_integer(0, 255), 0)
    flow_label: int = _key(_integer(0, 0xFFFFF), 0)
    hop_limit: int = _key(_integer(1, 255), 64)
    service_level: int = _key(_integer(0, 15), 0)
    port: int = _key(_integer(1, 255), 1)
    pkey_index: int = _key(_integer(0, 65535), 0)
    cq_mode: str = _key(_one_of("event", "poll"), "event")
    gid_type: str = _key(_one_of(IB_OR_ROCE_V1, ROCE_V2), ROCE_V2, "gid.type")
    gid_family: str = _key(_one_of(*FAMILIES), "any", "gid.family")


def load(name: str) -> Profile:
    """The profile in a file, or the built-in one of that name (``"default"``).

    A name with a slash or ending in ``.toml`` is a path. Raises ``UsageError``: one line
    with file, key, value and what is allowed.
    """
    path = Path(name) if "/" in name or name.endswith(".toml") else _BUILT_IN / f"{name}.toml"
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError as error:
        built_in = ", ".join(sorted(p.stem for p in _BUILT_IN.glob("*.toml")))
        raise UsageError(
            f"no profile {name}", seen=f"{path} does not exist", todo=f"built in: {built_in}"
        ) from error
    except OSError as error:
        raise UsageError(f"cannot read profile {path}", seen=error.strerror or "") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"profile {path} is not UTF-8", seen=str(error)) from error
    return parse(text, path=str(path))


def parse(text: str, *, path: str) -> Profile:
    """The profile written in ``text``; keys left out keep their defaults. ``path`` names it
    in errors."""
    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"profile {path} is not TOML", seen=str(error)) from error
    return _from_keys(_flat(table, path), path)


def override(profile: Profile, settings: Mapping[str, object]) -> Profile:
    """``profile`` with some keys replaced, checked as a file's are."""
    keys = {f.metadata["name"] or f.name: getattr(profile, f.name) for f in fields(Profile)}
    if keys["path_mtu"] == ACTIVE_MTU:
        keys["path_mtu"] = "active"
    return _from_keys({**keys, **settings}, "settings")


def _flat(table: Mapping[str, Any], path: str) -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat.update({f"{key}.{inner}": v for inner, v in value.items()})
        elif key == "gid":
            raise UsageError(f"profile {path}: gid = {value!r}", todo="[gid] is a table")
        else:
            flat[key] = value
    return flat


def _from_keys(keys: Mapping[str, object], path: str) -> Profile:
    known = {f.metadata["name"] or f.name: f for f in fields(Profile)}
    values: dict[str, Any] = {}
    for key, value in keys.items():
        if key not in known:
            raise UsageError(
                f"profile {path}: unknown key {key}",
                seen=f"value {_shown(value)}",
                todo="keys: " + ", ".join(known),
            )
        try:
            values[known[key].name] = known[key].metadata["parse"](value)
        except _RefusedError as refused:
            raise UsageError(
                f"profile {path}: {key} = {_shown(value)} is not allowed",
                todo=f"allowed: {refused}",
            ) from None
    return Profile(**values)


def _shown(value: object) -> str:
    text = f'"{value}"' if isinstance(value, str) else str(value)
    text = text.encode("unicode_escape").decode("ascii")
    return text if len(text) <= 60 else text[:57] + "..."
