"""``phasor identify transformers:NAME`` and ``--list``: architectures, by what their classes do."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from phasor.cli.common import Screen, need_torch, progress_bar, say_json
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


def judge(text: str, config: str | None, *, as_json: bool) -> None:
    """Print what phasor says of one architecture; exit status 1 if its class does otherwise."""
    need_torch("a recorded model")
    from phasor.torch.hf.architectures import model_class
    from phasor.torch.hf.verdicts import verdict

    name = text.removeprefix(_PREFIX)
    stated = None if config is None else text_config(config)
    model_type = model_class(name).config_class.model_type
    if stated is not None and stated.get("model_type") not in (None, model_type):
        raise ConfigError(
            f"{config} describes a {stated['model_type']!r}, not {name!r}; give "
            f"{_PREFIX}{stated['model_type']}"
        )
    found = verdict(name, stated)
    if as_json:
        say_json(found.as_plain())
    else:
        print_verdict(found)
    sys.exit(0 if found.right else 1)


def judge_all(*, as_json: bool) -> None:
    """Print the table of all architectures; exit status 1 if any is wrong."""
    need_torch("the table of architectures")
    from phasor.torch.hf.architectures import installed_model_types, not_built
    from phasor.torch.hf.verdicts import Verdict, verdict

    found: list[Verdict] = []
    with progress_bar("Recording transformers") as progress:
        names = installed_model_types()
        for done, name in enumerate(names):
            progress(done, len(names))
            try:
                found.append(verdict(name))
            except ConfigError as error:
                found.append(Verdict(model_type=name, not_built=str(error)))
    found += [Verdict(model_type=name, not_built=why) for name, why in not_built().items()]
    if as_json:
        say_json([one.as_plain() for one in found])
    else:
        print_verdicts(found)
    sys.exit(0 if all(one.right or one.not_built for one in found) else 1)


def text_config(path: str) -> Mapping[str, Any]:
    """The config of the language model in a config file, which may lie inside a larger one."""
    return language_models(read_source(path))[-1].values


def print_verdict(verdict: Verdict) -> None:
    """One architecture in words: its ropes, and how what it does bears them out."""
    screen = Screen()
    screen.say((str(verdict.class_name), "bold"), f" ({verdict.model_type})")
    screen.say(
        f"A tiny random model turned {verdict.tokens} tokens, up to position {verdict.farthest}, "
        "with its own code."
    )
    for kind in verdict.kinds:
        screen.say()
        screen.say((kind.kind, "bold cyan"), f" (layers {ranges(list(kind.layers))})")
        rope = _rope(kind)
        if rope is None:
            screen.say("  Nothing is turned.")
        else:
            for sentence in _rope_sentences(rope, verdict.farthest + 1):
                screen.say(f"  {sentence}")
        if kind.place is not None:
            start, width = kind.place
            screen.say(
                f"  The model cuts them out of heads of {width}, from coordinate {start} on."
            )
        if kind.error is not None and kind.error <= 1:
            screen.say(
                "  phasor.load reproduces every query and key as exactly as float32 angles allow."
            )
        for wrong in kind.wrong:
            screen.say(f"  Wrong: {wrong}.", style="bold red")
        if kind.wrong and kind.found is not None:
            screen.say("  What the class does instead:")
            for line in str(kind.found).split("\n"):
                screen.say(f"  {line}")
    if verdict.beside:
        screen.say()
        screen.say("Turned beside attention's own queries and keys:")
        for beside in verdict.beside:
            screen.say(f"  {beside}")
    remarks = [(f"Note: {note}", "") for note in verdict.notes]
    remarks += [(f"Wrong: {wrong}", "bold red") for wrong in verdict.wrong]
    remarks.append(("right", "bold green") if verdict.right else ("wrong", "bold red"))
    for text, style in remarks:
        screen.say()
        screen.say(text, style=style)


def print_verdicts(verdicts: Sequence[Verdict]) -> None:
    """A line for each kind of layer of each architecture, and what could not be built."""
    screen = Screen()
    for one in verdicts:
        for kind in one.kinds:
            rope = _rope(kind)
            facts = ["nothing turned"] if rope is None else _facts(rope, kind.place)
            facts += [] if kind.error is None else [f"error {kind.error:.2g}"]
            screen.say(
                (one.model_type, "bold"),
                f" ({one.class_name}), {len(kind.layers)} {kind.kind}: {', '.join(facts)}",
                style="bold red" if one.wrong or kind.wrong else "",
            )
    for one in verdicts:
        for wrong in (*one.wrong, *(f"{k.kind}: {w}" for k in one.kinds for w in k.wrong)):
            screen.say(f"{one.model_type}: {wrong}", style="red")
        for note in one.notes:
            screen.say(f"{one.model_type}: {note}")
    absent = [one for one in verdicts if one.not_built is not None]
    if absent:
        screen.say()
        screen.say("Not built:")
        for one in absent:
            screen.say(f"  {one.model_type}: {one.not_built}")
    ran = Counter(one.right for one in verdicts if one.not_built is None)
    screen.say()
    screen.say(
        f"{ran.total()} architectures: {ran[True]} right, {ran[False]} wrong; "
        f"{len(absent)} not built."
    )
    screen.say(
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


def _rope(kind: KindVerdict) -> Rope | None:
    """What phasor says: from the config where it can, else from the class."""
    if kind.loaded is not None or kind.found is None:
        return kind.loaded
    return kind.found.rope


def _rope_sentences(rope: Rope, tokens: int) -> list[str]:
    """What the rope is; a rule's, within the original context and at a length beyond."""
    within = sentences(static_rope(rope, None), None)
    if not isinstance(rope.scaling, Rule):
        return within
    beyond = [one for one in sentences(rope.at(tokens), None) if one not in within]
    return [
        f"The rule {type(rope.scaling).__name__} picks the law from the length.",
        *within,
        *(f"Beyond {original_context(rope)} tokens: {one}" for one in beyond),
    ]
