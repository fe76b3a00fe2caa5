"""``phasor bench``."""

from __future__ import annotations

from pathlib import Path

import click

from phasor.cli.common import need, need_torch, output_file
from phasor.errors import SpecError


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
