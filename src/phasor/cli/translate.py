"""``phasor translate``."""

from __future__ import annotations

from typing import Any, NamedTuple

import click

from phasor.cli.options import read_model, seq_len_option, takes_models, tokens_option
from phasor.cli.output import Screen, print_json
from phasor.files.translation import TARGETS, Translation, TranslationError
from phasor.files.translation import translate as translate_ropes
from phasor.layers import LayerRopes
from phasor.scaling import Rule

_CONTEXT = 4096  # if a model has no context

_PROOF = {
    "run": "phasor's tests run its own code",
    "engine": "checked once against its own code; phasor's tests use a re-implementation",
    "description": "checked against its documentation, not proved",
}


def _complete(_context: object, _parameter: object, begun: str) -> list[str]:
    return [name for name in TARGETS if name.startswith(begun)]


@click.command(epilog="Example: phasor translate llama-3.1-8b --to gguf")
@click.option(
    "--to",
    "target",
    metavar="PROGRAM",
    help="The program to write settings for.",
    shell_complete=_complete,
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with all numbers.")
@tokens_option("--context", "Number of tokens in the program's tables.", least=2)
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
    """Print another program's settings for MODEL's rotation.

    Without --to it lists the programs that can rotate as MODEL does, and why the others cannot.
    Without MODEL it lists all programs.
    """
    if model is None and target is None:
        print_targets(as_json=as_json)
        return
    if model is None:
        raise click.UsageError("--to needs a MODEL.")
    ropes = read_model(model, **load_options)
    if target is None:
        print_answers(ropes, context=context, seq_len=seq_len, as_json=as_json)
        return
    translation = translate_ropes(ropes, target, context=context, seq_len=seq_len)
    if as_json:
        print_json(translation.as_plain())
    else:
        print_translation(translation)


class Answer(NamedTuple):
    """Whether a program can perform a model's rotation."""

    can: bool
    is_reordered: bool = False  # whether weights have to be reordered to its pairing first
    at_length: int | None = (
        None  # the settings hold for this length only, because the program has no rule
    )
    reason: str = ""  # why it cannot
    radians: float | None = None  # error of the closest settings at the last position

    def as_text(self) -> str:
        """The answer in a few words, without the reason for a no."""
        if not self.can:
            return "no"
        at_length = f"at one length (--seq-len {self.at_length})" if self.at_length else ""
        reordered = "after reordering the weights" if self.is_reordered else ""
        return ", ".join(filter(None, ("yes", at_length, reordered)))


def answer(
    ropes: LayerRopes, target: str, *, context: int | None = None, seq_len: int | None = None
) -> Answer:
    """The result of `translate` for one program; a missing rule does not count as a refusal."""
    context = context or ropes.context or _CONTEXT
    rules = [rope.scaling for rope in ropes.ropes if isinstance(rope.scaling, Rule)]
    if seq_len is None and not all(isinstance(rule, TARGETS[target].rules) for rule in rules):
        seq_len = context
    try:
        translation = translate_ropes(ropes, target, context=context, seq_len=seq_len)
    except TranslationError as error:
        reason = ": ".join(map(str, error.facts.values()))
        return Answer(can=False, reason=reason, radians=error.radians)
    is_reordered = any(
        performed.pairing != model.pairing
        for part in translation.parts
        for kind, performed in part.ropes.items()
        if (model := ropes.kinds[kind]) is not None
    )
    return Answer(can=True, is_reordered=is_reordered, at_length=seq_len)


def print_answers(
    ropes: LayerRopes, *, context: int | None, seq_len: int | None, as_json: bool
) -> None:
    """Print for each program whether it can perform a model's rotation."""
    answers = {
        name: answer(ropes, name, context=context, seq_len=seq_len) for name in sorted(TARGETS)
    }
    if as_json:
        print_json(
            {
                name: {
                    "can": result.can,
                    "reordered": result.is_reordered,
                    "at_length": result.at_length,
                    "reason": result.reason or None,
                    "radians": result.radians,
                }
                for name, result in answers.items()
            }
        )
        return
    screen = Screen()
    screen.print_line((ropes.name, "bold"), ": --to PROGRAM prints the settings")
    able: dict[str, list[str]] = {}
    for name, result in answers.items():
        if result.can:
            able.setdefault(result.as_text(), []).append(name)
    for text, names in able.items():
        screen.print_line((f"{text}: ", "bold"), ", ".join(names))
    refused = {name: result for name, result in answers.items() if not result.can}
    if refused:
        screen.print_line(("no:", "bold"))
    for name, result in refused.items():
        error = result.radians
        closest = f" (the closest is off by {error:.3g} radians)" if error else ""
        screen.print_line((f"  {name}", "bold"), f": {result.reason}{closest}")


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
    """Print the settings for the program, one block per part of the model."""
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
