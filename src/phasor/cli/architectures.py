"""``phasor identify transformers:NAME`` and ``--list``: architectures, by what their classes do."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from phasor.cli.common import Screen, print_json, progress_bar, require_torch
from phasor.configs.sources import language_models, read_source
from phasor.describe import original_context, ranges, sentences, static_rope
from phasor.errors import ConfigError
from phasor.rope import Rope
from phasor.scaling import Rule

if TYPE_CHECKING:
    # a table can be printed without torch, and is made with it
    from phasor.torch.hf.verdicts import KindVerdict, Verdict

_PREFIX = "transformers:"


def is_architecture(text: str) -> bool:
    """Whether ``text`` names an architecture of transformers, by class or by model type."""
    # a dotted module has the colon later: transformers.models.llama...:function
    return text.startswith(_PREFIX)


def judge_architecture(text: str, config: str | None, *, as_json: bool) -> None:
    """Print whether phasor is right about an architecture; exit with status 1 if it is not."""
    require_torch("a recorded model")
    from phasor.torch.hf.architectures import model_class
    from phasor.torch.hf.verdicts import verdict

    name = text.removeprefix(_PREFIX)
    given_config = None if config is None else text_config(config)
    model_type = model_class(name).config_class.model_type
    if given_config is not None and given_config.get("model_type") not in (None, model_type):
        raise ConfigError(
            f"{config} describes a {given_config['model_type']!r}, not {name!r}; give "
            f"{_PREFIX}{given_config['model_type']}"
        )
    result = verdict(name, given_config)
    if as_json:
        print_json(result.as_plain())
    else:
        print_verdict(result)
    sys.exit(0 if result.right else 1)


def judge_all_architectures(*, as_json: bool) -> None:
    """Print the table of all architectures; exit with status 1 if phasor is wrong about one."""
    require_torch("the table of architectures")
    from phasor.torch.hf.architectures import installed_model_types, not_built
    from phasor.torch.hf.verdicts import Verdict, verdict

    verdicts: list[Verdict] = []
    with progress_bar("Recording transformers") as progress:
        names = installed_model_types()
        for index, name in enumerate(names):
            progress(index, len(names))
            try:
                verdicts.append(verdict(name))
            except ConfigError as error:
                verdicts.append(Verdict(model_type=name, not_built=str(error)))
    verdicts += [Verdict(model_type=name, not_built=why) for name, why in not_built().items()]
    if as_json:
        print_json([each.as_plain() for each in verdicts])
    else:
        print_verdicts(verdicts)
    sys.exit(0 if all(each.right or each.not_built for each in verdicts) else 1)


def text_config(path: str) -> Mapping[str, Any]:
    """The config of the language model in a config file, which may lie inside a larger one."""
    return language_models(read_source(path))[-1].values


def print_verdict(verdict: Verdict) -> None:
    """Print the ropes of one architecture, and how well they reproduce what its class does."""
    screen = Screen()
    screen.print_line((str(verdict.class_name), "bold"), f" ({verdict.model_type})")
    screen.print_line(
        f"A tiny random model turned {verdict.tokens} tokens, up to position {verdict.farthest}, "
        "with its own code."
    )
    for kind in verdict.kinds:
        screen.print_line()
        screen.print_line((kind.kind, "bold cyan"), f" (layers {ranges(list(kind.layers))})")
        rope = _stated_rope(kind)
        if rope is None:
            screen.print_line("  Nothing is turned.")
        else:
            for sentence in _rope_sentences(rope, verdict.farthest + 1):
                screen.print_line(f"  {sentence}")
        if kind.place is not None:
            start, width = kind.place
            screen.print_line(
                f"  The model cuts them out of heads of {width}, from coordinate {start} on."
            )
        if kind.error is not None and kind.error <= 1:
            screen.print_line(
                "  phasor.load reproduces every query and key as exactly as float32 angles allow."
            )
        for wrong in kind.wrong:
            screen.print_line(f"  Wrong: {wrong}.", style="bold red")
        if kind.wrong and kind.found is not None:
            screen.print_line("  What the class does instead:")
            for line in str(kind.found).split("\n"):
                screen.print_line(f"  {line}")
    if verdict.beside:
        screen.print_line()
        screen.print_line("Turned beside attention's own queries and keys:")
        for beside in verdict.beside:
            screen.print_line(f"  {beside}")
    remarks = [(f"Note: {note}", "") for note in verdict.notes]
    remarks += [(f"Wrong: {wrong}", "bold red") for wrong in verdict.wrong]
    remarks.append(("right", "bold green") if verdict.right else ("wrong", "bold red"))
    for text, style in remarks:
        screen.print_line()
        screen.print_line(text, style=style)


def print_verdicts(verdicts: Sequence[Verdict]) -> None:
    """Print a line for each kind of layer of each architecture, and what could not be built."""
    screen = Screen()
    for verdict in verdicts:
        for kind in verdict.kinds:
            rope = _stated_rope(kind)
            facts = ["nothing turned"] if rope is None else _facts(rope, kind.place)
            facts += [] if kind.error is None else [f"error {kind.error:.2g}"]
            screen.print_line(
                (verdict.model_type, "bold"),
                f" ({verdict.class_name}), {len(kind.layers)} {kind.kind}: {', '.join(facts)}",
                style="bold red" if verdict.wrong or kind.wrong else "",
            )
    for verdict in verdicts:
        for wrong in (*verdict.wrong, *(f"{k.kind}: {w}" for k in verdict.kinds for w in k.wrong)):
            screen.print_line(f"{verdict.model_type}: {wrong}", style="red")
        for note in verdict.notes:
            screen.print_line(f"{verdict.model_type}: {note}")
    not_built = [verdict for verdict in verdicts if verdict.not_built is not None]
    if not_built:
        screen.print_line()
        screen.print_line("Not built:")
        for verdict in not_built:
            screen.print_line(f"  {verdict.model_type}: {verdict.not_built}")
    counts = Counter(verdict.right for verdict in verdicts if verdict.not_built is None)
    screen.print_line()
    screen.print_line(
        f"{counts.total()} architectures: {counts[True]} right, {counts[False]} wrong; "
        f"{len(not_built)} not built."
    )
    screen.print_line(
        "error: of the rope that phasor.load reads, on recorded cosines and sines, as a share of "
        "what float32 angles allow; right is at most 1."
    )


def _facts(rope: Rope, place: tuple[int, int] | None) -> list[str]:
    """Pairs, slice, base, law and axes of a rope, in short."""
    changed = "" if rope.output_pairing == rope.pairing else f" to {rope.output_pairing}"
    start, width = rope.rotary_start, rope.head_dim
    if place is not None and rope.rotary_dim == width:
        start, width = place
    return [
        rope.pairing + changed + (" backwards" if rope.direction < 0 else ""),
        f"{start}:{start + rope.rotary_dim} of {width}",
        "explicit" if rope.base is None else f"base {rope.base:.15g}",
        *([] if rope.scaling is None else [type(rope.scaling).__name__]),
        *([] if rope.axes.n_axes == 1 else [f"{type(rope.axes).__name__} {rope.axes.n_axes}"]),
    ]


def _stated_rope(kind: KindVerdict) -> Rope | None:
    """The rope that phasor states: the config's, or the class's where no config has one."""
    if kind.loaded is not None or kind.found is None:
        return kind.loaded
    return kind.found.rope


def _rope_sentences(rope: Rope, tokens: int) -> list[str]:
    """Sentences on the rope; on a rule's, within the original context and at ``tokens``."""
    short = sentences(static_rope(rope, None), None)
    if not isinstance(rope.scaling, Rule):
        return short
    context, long = original_context(rope), sentences(rope.at(tokens), None)
    return [
        f"The rule {type(rope.scaling).__name__} picks the law from the length.",
        *short,
        *(f"Beyond {context} tokens: {sentence}" for sentence in long if sentence not in short),
    ]
