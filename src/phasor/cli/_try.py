"""``phasor demo`` and ``phasor bench``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from phasor.cli._common import need_torch


@click.command()
def demo() -> None:
    """Read a real model's configuration, rotate its queries and keys, and prove the result."""
    need_torch("the demo")
    from phasor.demo import run

    sys.exit(0 if run() else 1)


@click.command()
@click.option(
    "--save",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="PICTURE",
    help="Draw the result as well.",
)
def bench(save: Path | None) -> None:
    """Measure this machine for a minute: phasor against a copy and against plain torch."""
    need_torch("the benchmark")
    from phasor.bench import run

    run(save)
