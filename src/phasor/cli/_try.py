"""``phasor demo`` and ``phasor bench``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from phasor.cli._common import need, need_torch, output_file
from phasor.errors import SpecError


@click.command()
def demo() -> None:
    """Read a real model's configuration, rotate its queries and keys, and prove the result."""
    need_torch("the demo")
    from phasor.cli.demo import run

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
    if save is not None:
        # before a minute of measuring, not after
        need("a picture", "figures", "matplotlib")
        from matplotlib.figure import Figure

        known = Figure().canvas.get_supported_filetypes()
        if output_file(save).suffix[1:].lower() not in known:
            raise SpecError(f"{save} must end with one of {', '.join(f'.{end}' for end in known)}")
    from phasor.bench import run

    run(save)
