"""Settings and code with which other programs rotate like a rope, or the reason why they cannot.

Each target, or a few that share code, has a file; `TARGETS` lists the targets of all files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from phasor._checks import did_you_mean, find_name, short_repr, whole
from phasor.describe import to_plain
from phasor.errors import ConfigError, SpecError
from phasor.files.dialects import (
    exllamav3,
    litgpt,
    maxtext,
    megatron,
    mlx_lm,
    params_json,
    sglang,
    tensorrt_llm,
    transformers,
    vllm,
)
from phasor.files.dialects.blocks import yarn_reach
from phasor.files.dialects.target import (
    ProgramSettings,
    RefusalError,
    Target,
    TranslationError,
    change_ropes,
    rotating,
    set_pairing,
    simplify_law,
)
from phasor.files.presets import preset, preset_names
from phasor.files.translation import (
    ggml,
    kernels,
    libraries,
)
from phasor.layers import LayerRopes, one_layer
from phasor.rope import Rope, real_inv_freq, with_listed_frequencies
from phasor.scaling import LongRope, Rule, Yarn

__all__ = ["TARGETS", "ProgramSettings", "Target", "Translation", "TranslationError", "translate"]

_FILES = (
    exllamav3,
    ggml,
    kernels,
    libraries,
    litgpt,
    maxtext,
    megatron,
    mlx_lm,
    params_json,
    sglang,
    tensorrt_llm,
    transformers,
    vllm,
)
_FOUND = (value for file in _FILES for value in vars(file).values() if isinstance(value, Target))
TARGETS: Mapping[str, Target] = {
    target.name: target for target in sorted(_FOUND, key=lambda target: target.name)
}

#: Other names that people use for a target, or for programs that read its settings.
_ALSO_CALLED: Mapping[str, tuple[str, ...]] = {
    "gguf": ("ollama", "lmstudio", "lm studio", "koboldcpp", "gpt4all", "jan"),
    "llama.cpp": ("llama server", "llama cli"),
    "megatron": ("megatron lm", "nemo"),
    "meta": ("llama models",),
    "tensorrt-llm": ("trt llm", "trtllm"),
    "transformers": ("hf", "huggingface", "hugging face", "peft", "trl", "unsloth", "axolotl"),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Translation:
    """A model's rotation as settings of another program."""

    model: str  # the model's name
    target: Target
    context: int | None  # in tokens, if the settings contain a length; None if not known or needed
    parts: tuple[ProgramSettings, ...]  # one for each rope, or one for the model

    def as_plain(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return {
            "model": self.model,
            "target": self.target.name,
            "source": self.target.source,
            "checked": self.target.checked,
            "context": self.context,
            "parts": to_plain(self.parts),
        }

    def variables(self, part: ProgramSettings) -> list[str]:
        """Lines of Python that set the variables that the part's code reads."""
        if not part.as_variables:
            return []
        imports = ["import phasor"] if "rope" in part.settings else []
        lines = [f"{name} = {self._literal(value)}" for name, value in part.settings.items()]
        return imports + lines

    def _literal(self, value: Any) -> str:
        if isinstance(value, Rope):
            preset_kinds = preset(self.model).kinds.items() if self.model in preset_names() else ()
            for kind, rope in preset_kinds:
                if rope == value:
                    return f"phasor.preset({self.model!r}).kinds[{kind!r}]"
            return f"phasor.Rope.from_json({value.to_json()!r})"
        if isinstance(value, np.ndarray):
            numbers: list[float] = value.tolist()
            texts = [repr(x) if math.isfinite(x) else f'float("{x}")' for x in numbers]
            return f"[{', '.join(texts)}]"
        return repr(value)

    def __repr__(self) -> str:
        return f"Translation({self.model!r} for {self.target.name!r}, {len(self.parts)} parts)"

    def __str__(self) -> str:
        lines = [f"{self.model} for {self.target.name}: {self.target.program}"]
        for part in self.parts:
            lines += ["", f"{', '.join(part.ropes)} layers:", *self.variables(part), part.code]
            lines += [f"# {note}" for note in part.notes]
        return "\n".join(lines)


def translate(
    ropes: Rope | LayerRopes, target: str, *, context: int | None = None, seq_len: int | None = None
) -> Translation:
    """The settings with which ``target`` performs this rotation.

    Args:
        ropes: A rope, or those of a model.
        target: One of `TARGETS`, in any capitals and punctuation.
        context: Tokens, for targets that keep tables or state a length; unless given the model's
            own, or ``seq_len`` if that is larger. A note names a context beyond the model's.
        seq_len: Length of the sequences, where a rule has to pick its law.

    Returns:
        ``parts``, one for each different rope or one for the model: ``settings`` by the target's
        own names, ``code`` that gives them, ``notes`` on what else has to be done, and ``ropes``,
        what the target then performs, by kind of layer. If the target has the other pairing, a
        note says that weights have to be reordered; the part's rope is in the target's pairing.

    Raises:
        TranslationError: If the target cannot express it; with the nearest that it can, and how
            far that is off.

    >>> from phasor.scaling import Linear
    >>> rope = Rope(head_dim=64, pairing="half", scaling=Linear(factor=4.0))
    >>> (part,) = translate(rope, "mlx", context=8192).parts
    >>> part.settings
    {'dims': 64, 'traditional': False, 'base': 10000.0, 'scale': 0.25}
    >>> print(part.code)
    import mlx.core as mx
    <BLANKLINE>
    # x [batch, heads, seq, head_dim]; offset is the position of the first token
    mx.fast.rope(x, dims, traditional=traditional, base=base,
                 scale=scale, offset=offset)
    """
    name = find_name(target, TARGETS)
    if name is None:
        also_called = [
            target_name for target_name, names in _ALSO_CALLED.items() if find_name(target, names)
        ]
        hint = did_you_mean(target, TARGETS) or "`phasor translate` lists them all"
        if also_called:
            hint = f"did you mean {also_called[0]!r}?"
        raise SpecError(f"target must be a known program, got {short_repr(target)}; {hint}")
    chosen = TARGETS[name]
    if isinstance(ropes, Rope):
        ropes = one_layer(ropes)
    if not ropes.ropes:
        because = "no layer has one"
        feature = f"the rotation of {ropes.name}"
        raise chosen.lacks("no rotation", feature, because, way_out=f"give {name} none")
    design_length = _design_length(ropes)
    if seq_len is not None:
        ropes = change_ropes(ropes, lambda rope: rope.at(seq_len))
    lengths = [length for length in (ropes.context, seq_len) if length is not None]
    length = max(2, *lengths) if lengths else None
    if context is not None:
        length = whole("context", context, least=2)
    try:
        # without a context, refusals count radians at position 1
        parts = _write_parts(chosen, ropes, length or 2)
    except RefusalError as refusal:
        raise _add_nearest(chosen, ropes, refusal, length or 2) from None
    if length is None and _depends_on_context(chosen, ropes, parts):
        raise SpecError(
            f"context must be given for {name}: {ropes.name} does not say how many tokens it has"
        )
    if design_length is not None and length is not None and length > design_length:
        note = (
            f"{length} tokens are more than the {design_length} that {ropes.name} is for, and "
            f"nothing here scales its rotation to them: first phasor extend MODEL --to {length} "
            f"--law LAW --write FOLDER, then phasor translate FOLDER --to {name}."
        )
        parts = (replace(parts[0], notes=(note, *parts[0].notes)), *parts[1:])
    return Translation(model=ropes.name, target=chosen, context=length, parts=parts)


def _design_length(ropes: LayerRopes) -> int | None:
    """The model's context; None if it is unknown, or if a rule scales to any length."""
    laws = [rope.scaling for rope in ropes.ropes]
    if ropes.context is None:
        return None
    if any(isinstance(law, Rule) and not isinstance(law, LongRope) for law in laws):
        return None
    reaches = [yarn_reach(law) or 0 for law in laws if isinstance(law, Yarn)]
    return max([ropes.context, *reaches])


def _depends_on_context(
    target: Target, ropes: LayerRopes, short: tuple[ProgramSettings, ...]
) -> bool:
    """Whether settings or code for a long context differ from ``short``, for the shortest one."""

    def printed(parts: tuple[ProgramSettings, ...]) -> list[Any]:
        return [(to_plain(part.settings), part.code) for part in parts]

    try:
        return printed(short) != printed(_write_parts(target, ropes, 2**40))
    except TranslationError:
        return True


def _write_parts(target: Target, ropes: LayerRopes, context: int) -> tuple[ProgramSettings, ...]:
    """The parts of the translation, with all their notes."""
    for rope in ropes.ropes:
        target.check(rope)
    model = _adapt(target, ropes)
    paired = model
    if not target.other_pairs_out:
        paired = change_ropes(model, _drop_output_pairing)
    originals, adapted = rotating(ropes), rotating(model)
    parts: list[ProgramSettings] = []
    for part in _write_settings(target, paired, context):
        performed, notes = part.ropes or rotating(paired), list(part.notes)
        for kind, rope in performed.items():
            notes += _notes(target, originals[kind], adapted[kind], rope)
        parts.append(replace(part, ropes=performed, notes=tuple(dict.fromkeys(notes))))
    extra_notes: list[str] = []
    unrotated = [kind for kind, rope in ropes.kinds.items() if rope is None]
    if unrotated and target.leaves_layers:
        extra_notes.append(
            f"{target.leaves_layers} has to leave {' and '.join(unrotated)} layers as they are."
        )
    if target.write_rope is not None:
        outer_names = dict.fromkeys(
            rotation.name for rotation in ropes.auxiliary_ropes if rotation.rope not in ropes.ropes
        )
        extra_notes += (
            f"The {name} has a rotation of its own, which is not written here."
            for name in outer_names
        )
    for kind, factor in ropes.query_factors.items():  # layers that do not rotate have no part
        applies = target.query_factor(factor, model.kinds[kind])
        ending = "has code for such models that does so" if applies else "leaves that to you"
        extra_notes.append(
            f"Queries of {kind} layers are multiplied by {factor}; {target.name} {ending}."
        )
    parts[0] = replace(parts[0], notes=(*parts[0].notes, *extra_notes))
    return tuple(parts)


def _write_settings(target: Target, ropes: LayerRopes, context: int) -> Iterator[ProgramSettings]:
    try:
        if target.write is not None:
            yield target.write(ropes, context)
        if target.write_rope is not None:
            for rope in ropes.ropes:
                kinds = {kind: rope for kind, kind_rope in ropes.kinds.items() if kind_rope == rope}
                part = target.write_rope(rope, context)
                yield replace(part, ropes=kinds, as_variables=True)
    except TranslationError:
        raise
    except ConfigError as error:
        raise target.lacks(error.reason, "it", str(error)) from None


def _adapt(target: Target, ropes: LayerRopes) -> LayerRopes:
    """The ropes with laws and pairings that the target has."""
    simple = change_ropes(ropes, simplify_law)
    if target.write is not None:
        # no program's file has a base or a law for each axis; some have lists of frequencies
        simple = change_ropes(simple, with_listed_frequencies)
    for rope in simple.ropes:
        if (pairing := target.only_pairs(rope)) is not None:
            # for all kinds, as the weights of all are reordered
            return change_ropes(simple, partial(set_pairing, pairing=pairing))
    return simple


def _drop_output_pairing(rope: Rope) -> Rope:
    """The rope with its input pairing for the output too."""
    return rope if rope.pairing_out is None else replace(rope, pairing_out=None)


def _notes(target: Target, original: Rope, model: Rope, rope: Rope) -> Iterator[str]:
    """Notes for the user if ``rope`` replaces ``original``, which was adapted to ``model``."""
    if rope.rotary_start and target.write_rope is not None:
        yield (
            f"x is the slice of a head from coordinate {rope.rotary_start} on; the coordinates "
            "before it stay as they are."
        )
    softmax_note = target.softmax_note
    if target.class_decides:
        its_class = f"The class for the model in {target.name} must"
        writes = f" and write {rope.pairing_out} pairs" if rope.pairing_out else ""
        yield f"{its_class} rotate {rope.pairing} pairs{writes}: {target.class_decides}."
        if rope.rotary_start:
            yield f"{its_class} rotate from coordinate {rope.rotary_start} on."
        softmax_note = (
            f"{its_class} multiply its softmax scale by {{factor!r}}: the classes of DeepSeek "
            "models do that themselves."
        )
    if rope.pairing != original.pairing:
        yield (
            f"{target.name} turns {rope.pairing} pairs: reorder the weights first "
            f"(phasor convert FOLDER OUT --to {rope.pairing})."
        )
    model_pairing = model.output_pairing if rope.pairing == model.pairing else rope.pairing
    if rope.output_pairing != model_pairing:
        yield (
            f"The model writes {model_pairing} pairs, {target.name} {rope.output_pairing} ones: "
            "attention scores are the same, coordinates of cached keys are in another order."
        )
    if not isinstance(rope.scaling, Rule) and rope.softmax_factor != 1 and softmax_note:
        yield softmax_note.format(factor=rope.softmax_factor)


def _add_nearest(
    target: Target, ropes: LayerRopes, refusal: RefusalError, context: int
) -> TranslationError:
    """The refusal as users see it, with the nearest rope that the target can express."""
    sentence, facts = str(refusal), {**refusal.facts}
    refused, length = refusal.rope, refusal.context or context
    if "base" in refusal.reason and ropes != change_ropes(ropes, with_listed_frequencies):
        facts["axes"] = "each axis has its own base or law"
        sentence = f"{sentence} ({facts['axes']})"
    if target.alternative:
        with suppress(TranslationError):
            _write_parts(TARGETS[target.alternative], ropes, context)
            sentence = f"{sentence} (use --to {target.alternative})"
    expressible = _expressible_ropes(target, refusal, context)
    distances = {rope: _angle_difference(refused, rope, length) for rope in expressible}
    if not distances:
        sentence = f"{sentence}, and nothing that it can is near"
        return TranslationError(sentence, refusal.reason, facts)
    nearest, radians = min(distances.items(), key=lambda item: item[1])
    error = f"off by up to {radians:.3g} radians at position {length - 1}"
    if radians == 0 and nearest.at(length).logit_factor == refused.at(length).logit_factor:
        error = "exact where a token's coordinates are equal, as in text"
    differing = ", ".join(
        f"{name}={short_repr(getattr(nearest, name))}"
        for name in ("base", "scaling", "axes", "direction")
        if getattr(refused, name) != getattr(nearest, name)
    )
    sentence = f"{sentence}; the nearest that it can is {error}: {differing}"
    return TranslationError(sentence, refusal.reason, facts, nearest=nearest, radians=radians)


def _expressible_ropes(target: Target, refusal: RefusalError, context: int) -> Iterator[Rope]:
    """The candidates that the target can express, and those that refusals of candidates suggest."""
    refusals, checked = [refusal], set[tuple[Rope, int]]()
    for _ in range(3):
        inner_refusals: list[RefusalError] = []
        for outer_refusal in refusals:
            length = outer_refusal.context or context
            new = [rope for rope in outer_refusal.candidates if (rope, length) not in checked]
            checked |= {(rope, length) for rope in new}
            for rope in new:
                try:
                    _write_parts(target, one_layer(rope), length)
                except RefusalError as inner_refusal:
                    inner_refusals.append(inner_refusal)
                except TranslationError:
                    pass
                else:
                    yield rope
        refusals = inner_refusals


def _angle_difference(a: Rope, b: Rope, context: int) -> float:
    """The largest difference of a pair's angle at the last position, whole turns included.

    Positions have the same coordinate on all axes, and a rule stands for its law at that length.
    The result is infinite if the numbers of pairs differ.
    """
    a, b = a.at(context), b.at(context)
    if a.num_pairs != b.num_pairs:
        return math.inf
    # exact: float64 frequencies times a million positions would show their rounding
    frequencies = zip(real_inv_freq(a), real_inv_freq(b), strict=True)
    largest = max(abs(a.direction * f - b.direction * g) for f, g in frequencies)
    return float((context - 1) * largest)
