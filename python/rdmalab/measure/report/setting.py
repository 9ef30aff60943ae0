# SPDX-License-Identifier: Apache-2.0
"""Where measurements were taken: what every table and page says before its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rdmalab.measure.measurement import Measurement
from rdmalab.measure.report.text import NOTHING, counted

#: Said wherever guests were emulated.
TCG_NOTE = (
    "Guests were emulated (TCG): a time here is no speed. Only ratios within this run say anything."
)


@dataclass(frozen=True)
class Setting:
    """Accelerators, vCPU counts and kernels of a set of measurements, each once."""

    accelerators: tuple[str, ...]
    vcpus: tuple[int, ...]
    kernels: tuple[str, ...]

    @property
    def emulated(self) -> bool:
        return "tcg" in self.accelerators

    @property
    def accelerator_text(self) -> str:
        names = {"tcg": "TCG", "kvm": "KVM"}
        return _joined([names.get(one, one) for one in self.accelerators])

    @property
    def vcpus_text(self) -> str:
        if len(self.vcpus) == 1:
            return counted(self.vcpus[0], "vCPU")
        return f"{_joined([str(one) for one in self.vcpus])} vCPUs"

    @property
    def kernels_text(self) -> str:
        return _joined(self.kernels)

    @property
    def line(self) -> str:
        """``TCG, 1 vCPU a node, kernel 7.3.4+deb13-amd64``."""
        return f"{self.accelerator_text}, {self.vcpus_text} a node, kernel {self.kernels_text}"


def setting_of(measurements: Sequence[Measurement]) -> Setting:
    return Setting(
        accelerators=tuple(dict.fromkeys(one.accelerator for one in measurements)),
        vcpus=tuple(dict.fromkeys(one.vcpus for one in measurements)),
        kernels=tuple(dict.fromkeys(one.kernel for one in measurements)),
    )


def _joined(words: Sequence[str]) -> str:
    return " and ".join(words) or NOTHING
