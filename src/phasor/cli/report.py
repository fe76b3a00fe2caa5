"""``phasor report``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from phasor.cli.common import (
    MODEL,
    need,
    output_file,
    progress_bar,
    read,
    reading_options,
    say,
    trained_option,
)
from phasor.errors import SpecError


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
    type=click.IntRange(3),
    metavar="TOKENS",
    help="Longest context to look at; eight times the context unless given.",
)
@trained_option
@reading_options
def report(
    model: str, output: Path, to: int | None, context: int | None, reading: Mapping[str, Any]
) -> None:
    """Write all that can be said about MODEL's rope as one HTML page that needs no network."""
    need("the report", "charts", "altair", "jinja2", "vl_convert")
    from phasor.report import report as written

    file, ropes = output_file(output), read(model, reading)
    with progress_bar("writing the report") as progress:
        _replace_file(file, written(ropes, context=context, to=to, progress=progress))
    say(f"{output}: {file.stat().st_size / 1e6:.1f} MB")


def _replace_file(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("x", encoding="utf-8", errors="xmlcharrefreplace") as stream:
            stream.write(text)
        part.replace(path)
    except OSError as error:
        raise SpecError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)
