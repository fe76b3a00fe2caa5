"""``phasor translate``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
import numpy as np

from phasor.cli.common import (
    MODEL,
    Screen,
    at_option,
    read,
    reading_options,
    say_json,
    token_counts,
)
from phasor.layers import LayerRopes
from phasor.presets import preset_names
from phasor.rope import Rope
from phasor.translation import TARGETS, Translation
from phasor.translation import translate as to_target

_PROOF = {
    "run": "its own code is run with this in phasor's tests",
    "description": "checked against its documentation, and not run",
}


@click.command()
@click.argument("model", type=MODEL)
@click.option("--to", "target", type=click.Choice(sorted(TARGETS)), help="The program.")
@click.option("--json", "as_json", is_flag=True, help="As JSON, with every number.")
@click.option("--context", type=token_counts, metavar="TOKENS", help="Length of its tables.")
@at_option
@reading_options
def translate(
    model: str,
    target: str | None,
    as_json: bool,
    context: int | None,
    seq_len: int | None,
    reading: Mapping[str, Any],
) -> None:
    """Print what makes another program rotate like MODEL."""
    if target is None:
        print_targets()
        return
    ropes = read(model, reading)
    translated = to_target(ropes, target, context=context, at=seq_len)
    if as_json:
        say_json(translated.as_plain())
    else:
        print_translation(translated, ropes)


def print_targets() -> None:
    """The programs that there are, for a command without ``--to``."""
    screen = Screen()
    for name in sorted(TARGETS):
        target = TARGETS[name]
        screen.say((f"--to {name}", "bold"))
        screen.say(f"  {target.program}; {_PROOF[target.checked]}")


def print_translation(translated: Translation, ropes: LayerRopes) -> None:
    """What to give, part by part; long arrays by their ends, a preset's rope by its name."""
    screen, target = Screen(), translated.target
    screen.say((translated.model, "bold"), " for ", (target.name, "bold"), f": {target.program}")
    screen.say(f"{target.source}; {_PROOF[target.checked]}", style="dim")
    for part in translated.parts:
        screen.say()
        screen.say((", ".join(part.ropes), "bold cyan"), " layers")
        if part.as_variables:
            for name, value in part.settings.items():
                screen.say(f"{name} = {_short(value, ropes)}")
        screen.print(part.code, soft_wrap=True)
        for note in part.notes:
            screen.say(f"! {note}", style="yellow")


def _short(value: Any, ropes: LayerRopes) -> str:
    if isinstance(value, Rope):
        for kind, rope in ropes.kinds.items():
            if rope == value and ropes.name in preset_names():
                return f"phasor.preset({ropes.name!r}).kinds[{kind!r}]"
        return f"phasor.Rope.from_json({value.to_json()!r})"
    if isinstance(value, np.ndarray):
        ends = [f"{x:.9g}" for x in (value[0], value[1], value[-1])]
        return f"[{ends[0]}, {ends[1]}, … {ends[2]}]  # {value.size} numbers; --json has them all"
    return repr(value)
