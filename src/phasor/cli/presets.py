"""``phasor presets``."""

from __future__ import annotations

import click

from phasor.cli.output import Screen, print_json
from phasor.errors import SpecError
from phasor.files.presets import preset, preset_names
from phasor.layers import summarize


@click.command(epilog="Example: phasor presets llama 8b")
@click.argument("words", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print only the names, as JSON.")
def presets(words: tuple[str, ...], as_json: bool) -> None:
    """List the presets with all WORDS in their names.

    Each comes with its rope and context.
    """
    names = [name for name in preset_names() if all(word.lower() in name for word in words)]
    if as_json:
        print_json(names)
        return
    if not names:
        raise SpecError(
            f"no preset has {' and '.join(words)} in its name; `phasor presets` lists all"
        )
    screen, width = Screen(), max(map(len, names))
    for name in names:
        ropes = preset(name)
        context = f", {ropes.context} tokens" if ropes.context else ""
        screen.print_line(
            (f"{name:{width}}", "bold"), f"  {'; '.join(map(summarize, ropes.ropes))}{context}"
        )
