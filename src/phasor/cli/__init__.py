"""The command line: ``phasor show``, ``diff``, ``extend``, ``identify``, and the rest."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import click

from phasor.cli._convert import convert
from phasor.cli._diff import diff
from phasor.cli._extend import extend, report
from phasor.cli._identify import identify
from phasor.cli._show import presets, show
from phasor.cli._try import bench, demo
from phasor.errors import PhasorError


def run() -> None:
    """The program: exit code 0, 1 for "they differ" or "it fell short", 2 for bad input."""
    try:
        sys.exit(main.main(prog_name="phasor", standalone_mode=False))
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        _refuse(error.format_message())
    except PhasorError as error:
        _refuse(str(error))
    except BrokenPipeError:
        # the reader of a pipe has gone
        _let_go()
        sys.exit(1)
    except OSError as error:
        _let_go()
        where = f"{error.filename}: " if error.filename else ""
        _refuse(where + (error.strerror or str(error)))


def _let_go() -> None:
    """Write nowhere: Python would complain again when it flushes at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refuse(message: str) -> NoReturn:
    click.echo("phasor: " + " ".join(message.split()), err=True)
    sys.exit(2)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="phasor")
def main() -> None:
    """Rotary position embeddings (RoPE): what a model's is, and where two differ.

    A MODEL is the name of a preset (`phasor presets` lists them), or the path of a config.json,
    params.json, or a folder that holds one.
    """


for command in (show, diff, identify, convert, extend, report, presets, demo, bench):
    main.add_command(command)
