"""``phasor translate``."""

from __future__ import annotations

from typing import Any

import click

from phasor.cli.options import read_model, seq_len_option, takes_models, tokens_option
from phasor.cli.output import Screen, print_json
from phasor.files.translation import TARGETS, Translation
from phasor.files.translation import translate as translate_ropes

_PROOF = {
    "run": "its own code is run in phasor's tests",
    "engine": "its own code was run once; phasor's tests run one written from its description",
    "description": "checked against its description, not proved",
}


def _complete(_context: object, _parameter: object, begun: str) -> list[str]:
    return [name for name in TARGETS if name.startswith(begun)]


@click.command(epilog="Example: phasor translate llama-3.1-8b --to gguf")
@click.option("--to", "target", metavar="PROGRAM", help="The program.", shell_complete=_complete)
@click.option("--json", "as_json", is_flag=True, help="As JSON, with every number.")
@tokens_option("--context", "Tokens that its tables are for.", least=2)
@seq_len_option
@takes_models("model", required=False)
def translate(
    model: str | None,
    target: str | None,
    as_json: bool,
    context: int | None,
    seq_len: int | None,
    **load_options: Any,
) -> None:
    """Print what makes another program rotate like MODEL.

    Without MODEL and --to it lists the programs.
    """
    if model is None and target is None:
        print_targets(as_json=as_json)
        return
    if model is None:
        raise click.UsageError("--to needs a MODEL.")
    if target is None:
        raise click.UsageError(
            f"{model} needs --to PROGRAM; `phasor translate` lists the programs."
        )
    ropes = read_model(model, **load_options)
    translation = translate_ropes(ropes, target, context=context, seq_len=seq_len)
    if as_json:
        print_json(translation.as_plain())
    else:
        print_translation(translation)


def print_targets(*, as_json: bool) -> None:
    """Print the known programs."""
    if as_json:
        names = ("name", "program", "source", "checked")
        print_json([{name: getattr(TARGETS[t], name) for name in names} for t in TARGETS])
        return
    screen = Screen()
    for name in TARGETS:
        target = TARGETS[name]
        screen.print_line((f"--to {name}", "bold"))
        screen.print_line(f"  {target.program}; {_PROOF[target.checked]}")


def print_translation(translation: Translation) -> None:
    """Print what the program has to be given, part by part."""
    screen, target = Screen(), translation.target
    title = (translation.model, "bold"), " for ", (target.name, "bold"), f": {target.program}"
    screen.print_line(*title)
    screen.print_line(f"{target.source}; {_PROOF[target.checked]}", style="dim")
    for part in translation.parts:
        screen.print_line()
        screen.print_line((", ".join(part.ropes), "bold cyan"), " layers")
        for line in translation.variables(part):
            screen.print(line, soft_wrap=True)
        screen.print(part.code, soft_wrap=True)
        for note in part.notes:
            screen.print_line(f"! {note}", style="yellow")
