# SPDX-License-Identifier: Apache-2.0
"""The node's side: ``python3 -m rdmalab.probe run|list``.

``run`` compiles, attaches, prints the line ``ready`` and then answers a line of its input
with one line of output:

=========  ===========================================================
``clear``     all counts to 0: ``cleared``
``snapshot``  ``{"histograms": [...]}``: counts since start or clear
``detach``    off the functions, counts kept: ``detached``
``attach``    back on them: ``attached``
=========  ===========================================================

It ends at an empty line, at the end of its input, and with its parent; then it prints the
last snapshot. One process serves many measurements, as compiling takes seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import platform
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import IO, Any

from rdmalab.errors import RdmalabError, UsageError
from rdmalab.probe import facts as node_facts
from rdmalab.probe import plan as planning
from rdmalab.probe.catalogue import PROBES, Probe, select
from rdmalab.probe.histogram import Histogram
from rdmalab.probe.loader import Loader, check_root, describe
from rdmalab.probe.text import render

_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    """The end of the input tells of a lost ssh session; this also covers a parent that was
    killed while something else holds the input open."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit(1)


@contextlib.contextmanager
def _own_stdout() -> Iterator[IO[str]]:
    """Our stdout for ourselves: bcc's library prints its complaints there, which then go to
    stderr."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w") as sink:
        os.dup2(2, 1)
        yield sink


def _dump(histograms: Sequence[Histogram]) -> str:
    return json.dumps({"histograms": [h.to_json() for h in histograms]})


def serve(loader: Loader, source: IO[str], sink: IO[str], *, as_json: bool = True) -> int:
    """Answers the lines of ``source`` until it ends or an empty line comes; exit status."""

    def say(line: str) -> None:
        sink.write(line + "\n")
        sink.flush()

    def report() -> str:
        histograms = loader.snapshot()
        return _dump(histograms) if as_json else render(histograms)

    loader.attach()
    say("ready")
    for line in iter(source.readline, ""):
        command = line.strip()
        if not command:
            break
        if command == "clear":
            loader.clear()
            say("cleared")
        elif command == "snapshot":
            say(report())
        elif command == "detach":
            loader.detach()
            say("detached")
        elif command == "attach":
            loader.attach()
            say("attached")
        else:
            raise UsageError(
                f"no command {command!r}", todo="there are: clear, snapshot, detach, attach"
            )
    loader.detach()
    say(report())
    return 0


def listing(probes: Sequence[Probe], by_name: bool = False) -> dict[str, Any]:
    """What each probe measures, where it would sit on this node, and what is missing."""
    facts = node_facts.gather()
    plan = planning.make(probes, facts, by_name=by_name)
    return {
        "kernel": platform.release(),
        "probes": [
            describe_probe(probe)
            | {
                "attach": [describe(a) for a in plan.attaches if probe.name in a.probes],
                "missing": [
                    {"key": m.key, "reason": m.reason}
                    for m in plan.missing
                    if m.probe == probe.name
                ],
            }
            for probe in probes
        ],
    }


def describe_probe(probe: Probe) -> dict[str, Any]:
    """The catalogue's entry of a probe as JSON."""
    return {
        "name": probe.name,
        "unit": probe.unit,
        "measures": probe.measures,
        "start": probe.start,
        "end": probe.end,
        "split": probe.split,
    }


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="rdmalab.probe", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    for action in ("run", "list"):
        sub = actions.add_parser(action)
        sub.add_argument("--probes", default="", help=f"comma separated: {', '.join(PROBES)}")
        sub.add_argument("--json", action="store_true")
        sub.add_argument("--node", default=platform.node(), help="the name in the histograms")
        sub.add_argument(
            "--attach", choices=("auto", "name"), default="auto", help="name: kprobes, never BTF"
        )
    return parser.parse_args(argv)


def _run(options: argparse.Namespace) -> int:
    probes = select(name for name in options.probes.split(",") if name)
    by_name = options.attach == "name"
    if options.action == "list":
        found = listing(probes, by_name)
        if options.json:
            print(json.dumps(found))
        else:
            for probe in found["probes"]:
                print(f"{probe['name']} ({probe['unit']}): {probe['measures']}")
                for line in probe["attach"]:
                    print(f"  {line}")
                for missing in probe["missing"]:
                    print(f"  missing {missing['key']}: {missing['reason']}")
        return 0
    check_root()
    _end_with_parent()
    plan = planning.make(probes, node_facts.gather(), by_name=by_name)
    with _own_stdout() as sink, Loader(plan, options.node) as loader:
        return serve(loader, sys.stdin, sink, as_json=options.json)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 failed, 2 wrong use, 4 the node lacks something."""
    try:
        return _run(_arguments(argv))
    except RdmalabError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    except BrokenPipeError:
        # The reader is gone, and with it anyone who could be told; keep the interpreter from
        # a second failure when it flushes at exit.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
