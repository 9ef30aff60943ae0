# SPDX-License-Identifier: Apache-2.0
"""Where the headers of the running kernel are, said in the way bcc understands."""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from pathlib import Path

from rdmalab.errors import HostError

_ARCHITECTURES = {"x86_64": "x86", "aarch64": "arm64"}
_TELLTALE = "include/linux/kconfig.h"
_GENERATED = (
    "arch/{}/include",
    "arch/{}/include/generated/uapi",
    "arch/{}/include/generated",
    "include",
    "include/uapi",
    "include/generated/uapi",
)


@dataclass(frozen=True)
class Headers:
    """``environment`` and ``cflags`` for bcc; both empty where it finds them by itself."""

    environment: dict[str, str]
    cflags: tuple[str, ...]


def find(release: str = "", root: Path = Path("/")) -> Headers:
    """The headers of kernel ``release`` (that which runs, by default) under ``root``.

    Debian splits them into a common tree and a built one, and bcc knows of the common one
    only through /lib/modules/RELEASE/source, which a kernel put in by hand need not have; the
    built tree's Makefile names it too. HostError where there are none.
    """
    release = release or platform.release()
    modules = root / "lib/modules" / release
    build = modules / "build"
    if (build / _TELLTALE).is_file() or (modules / "source" / _TELLTALE).is_file():
        return Headers({}, ())
    try:
        makefile = (build / "Makefile").read_text()
    except OSError:
        makefile = ""
    for name in re.findall(r"^include /(\S+)/Makefile$", makefile, re.MULTILINE):
        if (root / name / _TELLTALE).is_file():
            arch = _ARCHITECTURES.get(platform.machine(), platform.machine())
            return Headers(
                {"BCC_KERNEL_SOURCE": str(root / name)},
                tuple(f"-I{build / path.format(arch)}" for path in _GENERATED),
            )
    if (root / "sys/kernel/kheaders.tar.xz").exists():
        return Headers({}, ())
    raise HostError(
        f"no headers of kernel {release}, which bcc compiles against",
        todo=f"apt-get install linux-headers-{release}",
    )
