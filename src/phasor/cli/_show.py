"""``phasor show`` and ``phasor presets``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from phasor.cli._common import (
    MODEL,
    at_option,
    read,
    reading_options,
    say,
    say_json,
    token_counts,
)
from phasor.describe import as_plain
from phasor.presets import preset_names


@click.command()
@click.argument("model", type=MODEL)
@click.option("--json", "as_json", is_flag=True, help="Everything, as JSON.")
@click.option("--pairs", is_flag=True, help="All pairs, not a selection.")
@click.option(
    "--context", type=token_counts, metavar="TOKENS", help="Count turns over this length."
)
@at_option
@reading_options
def show(
    model: str,
    as_json: bool,
    pairs: bool,
    context: int | None,
    seq_len: int | None,
    reading: Mapping[str, Any],
) -> None:
    """Say which rotation MODEL means, in words and as a table of pairs."""
    ropes = read(model, reading)
    length = context or ropes.context
    if as_json:
        say_json(as_plain(ropes, seq_len or length, length))
        return
    from phasor.terminal._ropes import print_model

    print_model(ropes, seq_len or length, length, every_pair=pairs)


@click.command()
def presets() -> None:
    """List the presets."""
    for name in preset_names():
        say(name)
