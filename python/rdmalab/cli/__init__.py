# SPDX-License-Identifier: Apache-2.0
"""The command line. Each module here is one group of commands and holds no logic."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from rdmalab import __version__
from rdmalab.errors import HostError, RdmalabError

#: command -> module and attribute; a module is imported when its command is used, which
#: keeps `rdmalab --help` and shell completion quick
_COMMANDS = {
    "up": ("lab", "up"),
    "down": ("lab", "down"),
    "status": ("lab", "status"),
    "ssh": ("lab", "ssh"),
    "run": ("lab", "run"),
    "logs": ("lab", "logs"),
    "setup": ("build", "setup"),
    "kernel": ("build", "kernel"),
    "modules": ("build", "modules"),
    "update": ("build", "update"),
    "host": ("build", "host"),
    "vm-test": ("vmtest", "vm_test"),
    "rdma": ("rdma", "rdma"),
    "bench": ("bench", "bench"),
    "probe": ("probe", "probe"),
    "report": ("report", "report"),
}
_INTERRUPTED = 130


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, attribute = _COMMANDS[cmd_name]
        found: Any = getattr(importlib.import_module(f"rdmalab.cli.{module}"), attribute)
        assert isinstance(found, click.Command)
        return found


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
Examples:
  rdmalab up && rdmalab run node0 -- rdma link && rdmalab down
  rdmalab bench latency --from node0 --to node1 --transport rxe --sizes 64,4096
  eval "$(_RDMALAB_COMPLETE=bash_source rdmalab)"      (completion, bash)

Exit status: 0 done, 1 a finding or failed test, 2 wrong use, 3 the lab was lost,
4 the host lacks something, 130 interrupted.""",
)
@click.version_option(__version__, prog_name="rdmalab")
def rdmalab() -> None:
    """A lab for RDMA and kernel-offload drivers: guests joined by virtual links on one
    machine, measured with proof of what carried the bytes."""


def _os_error(error: OSError) -> str:
    """One line of what the system refused, with the paths it concerns."""
    paths = [str(path) for path in (error.filename, error.filename2) if path is not None]
    place = " -> ".join(paths) + ": " if paths else ""
    return " ".join((place + (error.strerror or str(error))).split())


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command line and exit with the status of the design. An error is one line on
    stderr."""
    try:
        status = rdmalab.main(args=argv, prog_name="rdmalab", standalone_mode=False)
    except RdmalabError as error:
        click.echo(f"rdmalab: {error}", err=True)
        sys.exit(error.exit_status)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(2)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)  # of a UsageError
        place = f"{context.command_path}: " if context is not None else ""
        click.echo(f"rdmalab: {place}{error.format_message()} (see --help)", err=True)
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort):
        click.echo("rdmalab: interrupted", err=True)
        sys.exit(_INTERRUPTED)
    except BrokenPipeError:
        # The reader of our stdout went away (`rdmalab … | head`): nothing to say.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        click.echo(f"rdmalab: {_os_error(error)}", err=True)
        sys.exit(HostError.exit_status)
    sys.exit(status if isinstance(status, int) else 0)
