"""``phasor report``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from phasor.cli.options import context_option, read_model, takes_models, tokens_option
from phasor.cli.output import Screen, progress_bar, require_modules, resolve_output, write_file


@click.command(epilog="Example: phasor report llama-3-8b -o llama.html --to 128k")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    metavar="PAGE",
    help="The HTML file to write; an existing one is replaced.",
)
@tokens_option("--to", "Longest context on the page; by default eight times the context.", least=3)
@context_option
@takes_models("model")
def report(
    model: str, output: Path, to: int | None, context: int | None, **load_options: Any
) -> None:
    """Write one HTML page about MODEL, with charts.

    The page needs no network.
    """
    require_modules("the report", "charts", "altair", "jinja2", "vl_convert")
    from phasor.charts import report as write_report

    file, ropes = resolve_output(output), read_model(model, **load_options)
    with progress_bar("writing the report") as progress:
        write_file(file, write_report(ropes, context=context, to=to, progress=progress))
    Screen().print_line(f"{output}: {file.stat().st_size / 1e6:.1f} MB")
