# SPDX-License-Identifier: Apache-2.0
"""``python3 -m rdmalab.rdma``: what the harness runs on a node."""

from __future__ import annotations

import argparse
import ipaddress
import json
import platform
import sys
import tomllib
from collections.abc import Sequence

from rdmalab.errors import RdmalabError, UsageError
from rdmalab.rdma import check, cm, exchange, inventory, profile, softroce
from rdmalab.rdma.model import Device, IpAddress


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; data on stdout, one line of error on stderr; the exit status is the
    error's."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except RdmalabError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _show(arguments: argparse.Namespace) -> None:
    found = inventory.devices()
    if arguments.device:
        found = [device for device in found if device.name == arguments.device]
        if not found:
            raise RdmalabError(f"no RDMA device {arguments.device}")
    if arguments.json:
        _print(inventory.to_json(found))
    else:
        print("\n".join(_text(device) for device in found) or "no RDMA device", flush=True)


def _setup(arguments: argparse.Namespace) -> None:
    made = softroce.setup(arguments.netdev, arguments.name, seconds=arguments.seconds)
    _print({"device": made.device, "netdev": made.netdev, "created": made.created})


def _teardown(arguments: argparse.Namespace) -> None:
    removed = softroce.teardown(arguments.name, arguments.netdev, seconds=arguments.seconds)
    _print({"removed": list(removed)})


def _check(arguments: argparse.Namespace) -> None:
    chosen = profile.override(profile.load(arguments.profile), _settings(arguments.set))
    default_port = cm.DEFAULT_PORT if arguments.via == "cm" else exchange.DEFAULT_PORT
    plan = check.Plan(
        node=arguments.node or platform.node(),
        profile=chosen,
        via=arguments.via,
        port=arguments.port or default_port,
        size=arguments.size,
        messages=arguments.messages,
        qp_count=arguments.qps,
        seconds=arguments.seconds,
        device=arguments.device,
        gid_index=arguments.gid_index,
    )
    if arguments.listen:
        _print(check.serve(plan, arguments.listen))
    else:
        _print(check.call(plan, arguments.connect))


def _settings(texts: Sequence[str]) -> dict[str, object]:
    """``key=value`` with TOML values; a bare word is a string."""
    settings: dict[str, object] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set {text}", todo="write key=value")
        try:
            settings[key] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            settings[key] = value
    return settings


def _text(device: Device) -> str:
    lines = [f"{device.name}: {device.driver}, {device.node_type}, GUID {device.node_guid}"]
    for port in device.ports:
        mtu = port.active_mtu or "unknown"
        lines.append(
            f"  port {port.number}: {port.state}, {port.link_layer}, "
            f"netdev {port.netdev or 'none'}, MTU {mtu}"
        )
        lines += [f"    GID {gid.index}: {gid.type}, {gid.address}" for gid in port.gids]
    return "\n".join(lines)


def _print(data: object) -> None:
    print(json.dumps(data, indent=2), flush=True)


def _address(text: str) -> IpAddress:
    try:
        return ipaddress.ip_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive integer")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rdmalab.rdma", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    show = commands.add_parser("show", help="the devices of this node")
    show.add_argument("--json", action="store_true", help="docs/schemas/rdma-show.schema.json")
    show.add_argument("--device", help="only this one")
    show.set_defaults(run=_show)

    setup = commands.add_parser("setup", help="SoftRoCE on a netdev")
    setup.add_argument("--netdev", required=True)
    setup.add_argument("--name", help="of the device; rxe_NETDEV if not given")
    setup.add_argument("--seconds", type=float, default=20.0, help="deadline until it is ready")
    setup.set_defaults(run=_setup)

    teardown = commands.add_parser("teardown", help="deletes SoftRoCE devices (all by default)")
    teardown.add_argument("--name")
    teardown.add_argument("--netdev")
    teardown.add_argument("--seconds", type=float, default=20.0, help="deadline until gone")
    teardown.set_defaults(run=_teardown)

    talk = commands.add_parser("check", help="messages there and back, every byte compared")
    end = talk.add_mutually_exclusive_group(required=True)
    end.add_argument("--listen", type=_address, metavar="OWN_ADDRESS")
    end.add_argument("--connect", type=_address, metavar="PEER_ADDRESS")
    talk.add_argument("--via", choices=("tcp", "cm"), default="tcp")
    talk.add_argument("--profile", default="default", help="a built-in name or a TOML file")
    talk.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    talk.add_argument("--port", type=_positive, default=0)
    talk.add_argument("--size", type=_positive, default=4096, help="bytes of a message")
    talk.add_argument("--messages", type=_positive, default=10)
    talk.add_argument("--qps", type=_positive, default=1)
    talk.add_argument("--seconds", type=float, default=30.0, help="deadline of each step")
    talk.add_argument("--node", help="this node's name; the host name if not given")
    talk.add_argument("--device", help="the one that has the address, if not given")
    talk.add_argument("--gid-index", type=int, help="an entry to use, if its type is right")
    talk.set_defaults(run=_check)
    return parser


if __name__ == "__main__":
    sys.exit(main())
