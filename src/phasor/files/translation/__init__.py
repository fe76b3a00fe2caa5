"""Settings and code with which other programs rotate like a rope, or the reason for none.

A file for each target, or for a few that share code; `TARGETS` lists them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from phasor._checks import did_you_mean, find_name, short_repr, whole
from phasor.describe import to_plain
from phasor.errors import SpecError
from phasor.files.presets import preset, preset_names
from phasor.files.translation import (
    config_dialects,
    config_files,
    ggml,
    kernels,
    libraries,
    megatron,
    tensorrt_llm,
    yaml_settings,
)
from phasor.files.translation.target import (
    ProgramSettings,
    RefusalError,
    Target,
    TranslationError,
    softmax_note,
    with_simplest_law,
)
from phasor.layers import LayerRopes, one_layer
from phasor.rope import Rope
from phasor.scaling import Rule

__all__ = ["TARGETS", "ProgramSettings", "Target", "Translation", "TranslationError", "translate"]

TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        config_dialects.EXLLAMAV3,
        kernels.FLASH_ATTN,
        kernels.FLASHINFER,
        ggml.GGUF,
        kernels.LIGER,
        ggml.LLAMA_CPP,
        yaml_settings.LITGPT,
        yaml_settings.MAXTEXT,
        megatron.TARGET,
        config_files.META,
        libraries.MLX,
        config_dialects.MLX_LM,
        kernels.ONNX,
        libraries.ROTARY_EMBEDDING_TORCH,
        config_files.SGLANG,
        tensorrt_llm.TENSORRT_LLM,
        libraries.TORCHTUNE,
        kernels.TRANSFORMER_ENGINE,
        config_files.TRANSFORMERS,
        config_files.VLLM,
    )
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Translation:
    """A model's rotation in the words of another program."""

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
        """Python code that sets each variable that the part's code reads."""
        if not part.as_variables:
            return []
        imports = ["import phasor"] if "rope" in part.settings else []
        lines = [f"{name} = {self._literal(value)}" for name, value in part.settings.items()]
        return imports + lines

    def _literal(self, value: Any) -> str:
        if isinstance(value, Rope):
            known = preset(self.model).kinds.items() if self.model in preset_names() else ()
            for kind, rope in known:
                if rope == value:
                    return f"phasor.preset({self.model!r}).kinds[{kind!r}]"
            return f"phasor.Rope.from_json({value.to_json()!r})"
        if isinstance(value, np.ndarray):
            numbers: list[float] = value.tolist()
            shown = [repr(x) if math.isfinite(x) else f'float("{x}")' for x in numbers]
            return f"[{', '.join(shown)}]"
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
    """What ``target`` has to be given so that it performs this rotation.

    Args:
        ropes: A rope, or those of a model.
        target: One of `TARGETS`, in any capitals and punctuation.
        context: Tokens, for targets that keep tables or state a length; unless given the model's
            own, or ``seq_len`` if that is larger.
        seq_len: Length of the sequences, where a rule has to pick its law.

    Returns:
        ``parts``, one for each different rope or one for the model: ``settings`` by the target's
        own names, ``code`` that gives them, ``notes`` on what else has to be done, and ``ropes``,
        what the target then performs, by kind of layer. A target whose pairing is the other one
        needs reordered weights, which a note says; the part's rope is in the target's pairing.

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
        hint = did_you_mean(target, TARGETS) or "`phasor translate` lists them all"
        raise SpecError(f"target must be a known program, got {short_repr(target)}; {hint}")
    chosen = TARGETS[name]
    if isinstance(ropes, Rope):
        ropes = one_layer(ropes)
    if not ropes.ropes:
        raise TranslationError(f"{ropes.name} has no rotation in any layer: give {name} none")
    if seq_len is not None:
        ropes = _change_ropes(ropes, lambda rope: rope.at(seq_len))
    length = _find_context(chosen, ropes, context, seq_len)
    try:
        # without a context, refusals count radians at position 1
        parts = _write_parts(chosen, ropes, length or 2)
    except RefusalError as refusal:
        advice = _advise(chosen.alternative, ropes, length or 2)
        raise refusal.with_nearest(advice, _expressible_ropes(chosen, refusal)) from None
    return Translation(model=ropes.name, target=chosen, context=length, parts=parts)


def _advise(alternative: str, ropes: LayerRopes, context: int) -> str:
    """The beginning of a refusal where another target of the program can express the ropes."""
    if not alternative:
        return ""
    try:
        _write_parts(TARGETS[alternative], ropes, context)
    except TranslationError:
        return ""
    return f"say --to {alternative}: "


def _find_context(
    target: Target, ropes: LayerRopes, context: int | None, seq_len: int | None
) -> int | None:
    """The context that is given, or the largest that is known; None if it is not needed."""
    if context is not None:
        return whole("context", context, least=2)
    known = [length for length in (ropes.context, seq_len) if length is not None]
    if known:
        return max(2, *known)
    needs = target.needs_context
    if any(needs(rope) if callable(needs) else needs for rope in ropes.ropes):
        raise SpecError(
            f"context must be given for {target.name}: {ropes.name} does not say how many tokens "
            "it has"
        )
    return None


def _write_parts(target: Target, ropes: LayerRopes, context: int) -> tuple[ProgramSettings, ...]:
    """The parts that the target is given, with all notes."""
    for rope in ropes.ropes:
        target.check(rope, context)
    adapted = {rope: _adapt(target, rope) for rope in ropes.ropes}
    notes = {kind: adapted[rope][1] for kind, rope in ropes.kinds.items() if rope is not None}
    parts: list[ProgramSettings] = []
    for part in target.write(_change_ropes(ropes, lambda rope: adapted[rope][0]), context):
        rope_notes = dict.fromkeys(note for kind in part.ropes for note in notes[kind])
        parts.append(replace(part, notes=(*part.notes, *rope_notes)))
    for kind, factor in ropes.query_factors.items():  # those that do not rotate have no part
        does = target.query_factor(factor)
        done = "has code for such models that does so" if does else "leaves that to you"
        note = f"Queries of {kind} layers are multiplied by {factor}; {target.name} {done}."
        parts[0] = replace(parts[0], notes=(*parts[0].notes, note))
    return tuple(parts)


def _expressible_ropes(target: Target, refusal: RefusalError, depth: int = 2) -> Iterator[Rope]:
    """The candidates that the target can express, and those of its refusals of the others."""
    for rope in refusal.candidates:
        try:
            _write_parts(target, one_layer(rope), refusal.context)
        except RefusalError as inner_refusal:
            if depth:
                yield from _expressible_ropes(target, inner_refusal, depth - 1)
        except TranslationError:
            pass
        else:
            yield rope


def _change_ropes(ropes: LayerRopes, change: Callable[[Rope], Rope]) -> LayerRopes:
    kinds = {kind: None if rope is None else change(rope) for kind, rope in ropes.kinds.items()}
    return replace(ropes, kinds=kinds)


def _adapt(target: Target, rope: Rope) -> tuple[Rope, tuple[str, ...]]:
    """The rope in the law and the pairing that the target reads, and notes for the user."""
    notes: list[str] = []
    rope = with_simplest_law(rope)
    pairings = target.pairings(rope) if callable(target.pairings) else target.pairings
    if rope.pairing not in pairings:
        rope, note = target.reorder(rope, *pairings)
        notes.append(note)
    if rope.pairing_out is not None and not target.other_pairs_out:
        notes.append(
            f"The model writes {rope.pairing_out} pairs, {target.name} {rope.pairing} ones: "
            "attention scores are the same, coordinates of cached keys are in another order."
        )
        rope = replace(rope, pairing_out=None)
    if not target.softmax and not isinstance(rope.scaling, Rule) and rope.softmax_factor != 1:
        notes.append(softmax_note(rope.softmax_factor))
    return rope, tuple(notes)
