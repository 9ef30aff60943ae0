# SPDX-License-Identifier: Apache-2.0
"""rdmalab setup, kernel, modules, update, host: what is built before a lab is up."""

from __future__ import annotations

import click

from rdmalab.lab import host as hosts
from rdmalab.lab import image, module
from rdmalab.lab import kernel as kernels
from rdmalab.lab.paths import Paths
from rdmalab.lab.progress import Progress
from rdmalab.lab.sysroot import Sysroot

_kernel_option = click.option(
    "--kernel", "tier", default="stock", show_default=True, help="stock or lts."
)


def _ready(tier: str, progress: Progress) -> tuple[Sysroot, kernels.Kernel]:
    sysroot = Sysroot(Paths.find())
    kernels.check_tier(sysroot, tier)
    sysroot.ensure(progress)
    return sysroot, kernels.ensure(sysroot, tier, progress)


@click.command(epilog="\b\nExample:\n  rdmalab setup --kernel lts")
@_kernel_option
def setup(tier: str) -> None:
    """Build the sysroot, fetch a kernel, make the guests' images and our modules."""
    progress = Progress()
    sysroot, kernel = _ready(tier, progress)
    image.root_image(sysroot, progress)
    image.modules_image(sysroot, kernel, progress)
    lock = sysroot.lock()
    for name, version in sorted(lock.packages.items()):
        click.echo(f"{name} {version}")
    click.echo(f"kernel {tier} {kernel.release} ({kernel.version})")


@click.command(epilog="\b\nExample:\n  rdmalab kernel --kernel lts")
@_kernel_option
def kernel(tier: str) -> None:
    """Fetch and unpack a kernel."""
    _, found = _ready(tier, Progress())
    click.echo(f"{found.release} {found.vmlinux}")


@click.command(epilog="\b\nExample:\n  rdmalab modules --kernel lts")
@_kernel_option
@click.option("--style", is_flag=True, help="Run checkpatch --strict and sparse as well.")
def modules(tier: str, style: bool) -> None:
    """Build everything under kernel/, W=1 and with warnings as errors."""
    progress = Progress()
    sysroot, kernel = _ready(tier, progress)
    for path in module.build(sysroot, kernel.release, progress):
        click.echo(path)
    if style:
        module.style(sysroot, kernel.release, progress)


@click.command(epilog="\b\nExample:\n  rdmalab update")
def update() -> None:
    """Look for newer packages and kernels than the lock file's."""
    changes = Sysroot(Paths.find()).update(Progress())
    for line in changes:
        click.echo(line)
    if not changes:
        click.echo("all versions are the newest")


@click.group(epilog="\b\nExample:\n  rdmalab host check")
def host() -> None:
    """The machine that the lab runs on."""


@host.command(epilog="\b\nExample:\n  rdmalab host check")
def check() -> int:
    """Say what the host has and lacks; exit status 4 where it lacks something."""
    found = hosts.checks(Paths.find().cache)
    for each in found:
        mark = "ok" if each.ok else "LACKING"
        todo = "" if each.ok or not each.todo else f"; {each.todo}"
        click.echo(f"{each.name:16} {mark:8} {each.seen}{todo}")
    return 0 if all(each.ok for each in found) else 4
