# SPDX-License-Identifier: Apache-2.0
"""The distribution's own rdma-core tests on a node's SoftRoCE device."""

from __future__ import annotations

import ipaddress
import warnings
from pathlib import Path

import pytest

from rdmalab.lab.node import Node
from rdmalab.rdma import core_known

_KNOWN = Path(__file__).parents[1] / "data/rdma_core_known.toml"
_SECONDS = 900.0  # of all of them, about 160 on an idle host
_LIMIT = 60.0  # of each; the longest takes 7


@pytest.mark.deadline(_SECONDS + 60)
def test_rdma_core(node0: Node, record_testsuite_property: object) -> None:
    assert callable(record_testsuite_property)
    end = next(end for end in node0.links.values() if end.kind == "roce")
    node0.python("rdmalab.rdma", ["setup", "--netdev", end.netdev])
    result = node0.python(
        "rdmalab.rdma.core_tests",
        [
            "--device",
            f"rxe_{end.netdev}",
            "--address",
            str(ipaddress.ip_interface(end.ipv4).ip),
            "--limit",
            str(_LIMIT),
        ],
        timeout=_SECONDS,
    )
    report = core_known.parse(result.stdout)
    judgement = core_known.judge(report, core_known.load(_KNOWN))
    counts = ", ".join(f"{report.count(kind)} {kind}" for kind in ("passed", "failed", "skipped"))
    record_testsuite_property("rdma-core", f"{counts} on {report.kernel}")
    print(f"rdma-core on {report.device}, kernel {report.kernel}: {counts}")
    for test in report.tests:
        if test.outcome != "passed":
            print(f"{test.outcome}: {test.test}: {test.reason}")
    print(*core_known.lines(judgement), sep="\n")
    if judgement.gone:
        warnings.warn("\n".join(core_known.lines(judgement)), stacklevel=1)
    assert not judgement.unknown, "\n".join(core_known.lines(judgement))
    assert not judgement.missing
