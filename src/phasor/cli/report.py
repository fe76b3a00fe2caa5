"""``phasor report``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from phasor.cli.common import (
    MODEL,
    TokenCount,
    need,
    output_file,
    progress_bar,
    read,
    reading_options,
    say,
    trained_option,
    write_file,
)


@click.command()
@click.argument("model", type=MODEL)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    metavar="PAGE",
    help="The HTML file to write; one that is there is replaced.",
)
@click.option(
    "--to",
    type=TokenCount(3),
    metavar="TOKENS",
    help="Longest context to look at; eight times the context unless given.",
)
@trained_option
@reading_options
def report(
    model: str, output: Path, to: int | None, context: int | None, reading: Mapping[str, Any]
) -> None:
    """Write all of this about MODEL as one HTML page.

    The page needs no network.
    """
    need("the report", "charts", "altair", "jinja2", "vl_convert")
    from phasor.report import report as written

    file, ropes = output_file(output), read(model, reading)
    with progress_bar("writing the report") as progress:
        write_file(file, written(ropes, context=context, to=to, progress=progress))
    say(f"{output}: {file.stat().st_size / 1e6:.1f} MB")
