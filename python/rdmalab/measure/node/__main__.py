# SPDX-License-Identifier: Apache-2.0
"""``python3 -m rdmalab.measure.node``: requests on stdin, answers on stdout, a line each.

An answer is ``{"number": N, "answer": {...}}`` or ``{"number": N, "error": "one line",
"kind": "RdmalabError", "exit_status": 1}``. Samples come before it in lines of their own,
``{"number": N, "samples_ns": [...]}``, of at most 20,000 each. The first line is
``{"ready": true}``. It ends with stdin.
"""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import asdict
from typing import Any

from rdmalab.errors import RdmalabError, UsageError
from rdmalab.measure.node.driver import Driver
from rdmalab.measure.node.request import Request, describe

SAMPLES_A_LINE = 20_000  # a line stays below what a reader takes as one


def main() -> int:
    # While C runs, Python's handlers do not: let the kernel's default end us, and free
    # what we hold.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _say({"ready": True})
    driver = Driver()
    for line in sys.stdin:
        if line.strip():
            _serve(driver, line)
    return 0


def _serve(driver: Driver, line: str) -> None:
    number = 0
    try:
        request = _parse(line)
        number = request.number
        print(
            f"{request.role}: {request.tool} {describe(request.point)}",
            file=sys.stderr,
            flush=True,
        )
        answer = asdict(driver.run(request))
    except RdmalabError as error:
        _say(
            {
                "number": number,
                "error": str(error),
                "kind": type(error).__name__,
                "exit_status": error.exit_status,
            }
        )
        return
    except Exception as error:  # a defect of ours, which must not look like a lost node
        text = " ".join(f"{type(error).__name__}: {error}".split())
        _say({"number": number, "error": text, "kind": type(error).__name__, "exit_status": 1})
        return
    samples = answer["outcome"].pop("samples_ns") if answer["outcome"] else ()
    for start in range(0, len(samples), SAMPLES_A_LINE):
        _say({"number": number, "samples_ns": samples[start : start + SAMPLES_A_LINE]})
    _say({"number": number, "answer": answer})


def _parse(line: str) -> Request:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise UsageError("a request is a JSON object", seen=str(error)) from None
    if not isinstance(data, dict):
        raise UsageError("a request is a JSON object", seen=f"a {type(data).__name__}")
    return Request.from_json(data)


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message, separators=(",", ":")), flush=True)


if __name__ == "__main__":
    sys.exit(main())
