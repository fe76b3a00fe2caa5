"""``phasor translate``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from phasor.cli.common import (
    MODEL,
    Screen,
    at_option,
    read,
    reading_options,
    say_json,
    token_counts,
)
from phasor.translation import TARGETS, Translation
from phasor.translation import translate as to_target

_PROOF = {
    "run": "its own code is run in phasor's tests",
    "description": "checked against its description, not proved",
}


@click.command()
@click.argument("model", type=MODEL, required=False)
@click.option(
    "--to",
    "target",
    type=click.Choice(sorted(TARGETS)),
    metavar="PROGRAM",
    help="The program; without it all are listed.",
)
@click.option("--json", "as_json", is_flag=True, help="As JSON, with every number.")
@click.option(
    "--context", type=token_counts, metavar="TOKENS", help="Tokens that its tables are for."
)
@at_option
@reading_options
def translate(
    model: str | None,
    target: str | None,
    as_json: bool,
    context: int | None,
    seq_len: int | None,
    reading: Mapping[str, Any],
) -> None:
    """Print what makes another program rotate like MODEL.

    Without --to it lists the programs.
    """
    if target is None:
        print_targets()
        return
    if model is None:
        raise click.UsageError("--to needs a MODEL.")
    translated = to_target(read(model, reading), target, context=context, at=seq_len)
    if as_json:
        say_json(translated.as_plain())
    else:
        print_translation(translated)


def print_targets() -> None:
    """The programs that there are, for a command without ``--to``."""
    screen = Screen()
    for name in sorted(TARGETS):
        target = TARGETS[name]
        screen.say((f"--to {name}", "bold"))
        screen.say(f"  {target.program}; {_PROOF[target.checked]}")


def print_translation(translated: Translation) -> None:
    """What to give, part by part."""
    screen, target = Screen(), translated.target
    screen.say((translated.model, "bold"), " for ", (target.name, "bold"), f": {target.program}")
    screen.say(f"{target.source}; {_PROOF[target.checked]}", style="dim")
    for part in translated.parts:
        screen.say()
        screen.say((", ".join(part.ropes), "bold cyan"), " layers")
        for line in translated.variables(part):
            screen.print(line, soft_wrap=True)
        screen.print(part.code, soft_wrap=True)
        for note in part.notes:
            screen.say(f"! {note}", style="yellow")
