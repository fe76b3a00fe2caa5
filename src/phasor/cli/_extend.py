"""``phasor extend`` and ``phasor report``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from phasor.cli._common import (
    MODEL,
    need,
    output_file,
    read,
    reading_options,
    say,
    say_json,
)
from phasor.errors import SpecError

_trained = click.option(
    "--context",
    type=click.IntRange(2),
    metavar="TOKENS",
    help="Tokens of the training; the model's own context unless given.",
)


@click.command()
@click.argument("model", type=MODEL)
@click.option("--to", type=click.IntRange(3), required=True, metavar="TOKENS", help="Wanted.")
@click.option("--law", metavar="NAME", help="Write this law's block, not the recommended one's.")
@click.option("--kind", metavar="NAME", help="Layers to extend, where a model has several kinds.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@_trained
@reading_options
def extend(
    model: str,
    to: int,
    law: str | None,
    kind: str | None,
    as_json: bool,
    context: int | None,
    reading: Mapping[str, Any],
) -> None:
    """Compare the laws that take MODEL to a longer context, and write the config's block."""
    from phasor.extending import plan
    from phasor.terminal._extending import print_plan, waiting

    ropes = read(model, reading)
    with waiting("comparing the laws"):
        planned = plan(ropes, kind, context, to)
    if as_json:
        say_json(planned.as_plain(law))
    else:
        print_plan(planned, law)


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
@_trained
@reading_options
def report(
    model: str, output: Path, to: int | None, context: int | None, reading: Mapping[str, Any]
) -> None:
    """Write all that can be said about MODEL's rope as one HTML page that needs no network."""
    need("the report", "report", "altair", "jinja2", "vl_convert")
    from phasor.report import report as written
    from phasor.terminal._extending import progress_bar

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
