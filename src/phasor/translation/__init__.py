"""What other programs have to be given so that they rotate like a rope, or a reason why not.

A file for each target; `TARGETS` lists them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from phasor._checks import choice, whole
from phasor.errors import SpecError
from phasor.layers import LayerRopes
from phasor.rope import Rope
from phasor.scaling import Rule
from phasor.translation import flash_attn, mlx, transformers
from phasor.translation.target import Part, Target, TranslationError

__all__ = ["TARGETS", "Part", "Target", "Translation", "TranslationError", "translate"]

TARGETS: Mapping[str, Target] = {
    target.name: target for target in (transformers.TARGET, mlx.TARGET, flash_attn.TARGET)
}


@dataclass(frozen=True, kw_only=True)
class Translation:
    """A model's rotation in the words of another program.

    Attributes:
        model: The model's name.
        target: The program.
        context: Tokens that the settings are for, where they contain a length.
        parts: What to give: for each rope, or once for the model.
    """

    model: str
    target: Target
    context: int
    parts: tuple[Part, ...]

    def as_plain(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return {
            "model": self.model,
            "target": self.target.name,
            "source": self.target.source,
            "checked": self.target.checked,
            "context": self.context,
            "parts": [part.as_plain() for part in self.parts],
        }

    def __repr__(self) -> str:
        return f"Translation({self.model!r} for {self.target.name!r}, {len(self.parts)} parts)"

    def __str__(self) -> str:
        lines = [f"{self.model} for {self.target.name}: {self.target.program}"]
        for part in self.parts:
            lines += ["", f"{', '.join(part.ropes)} layers:", part.code]
            lines += [f"# {note}" for note in part.notes]
        return "\n".join(lines)


def translate(
    ropes: Rope | LayerRopes, target: str, *, context: int | None = None, at: int | None = None
) -> Translation:
    """What ``target`` has to be given so that it performs this rotation.

    Args:
        ropes: A rope, or those of a model.
        target: One of `TARGETS`.
        context: Tokens, for targets that keep tables or state a length; the model's own unless
            given.
        at: Length of the sequences, where a rule has to pick its law.

    Returns:
        One part for each different rope, or one for the model, with the settings as data and as
        they are written. A target whose pairing is the other one needs reordered weights, which a
        note says; the part's rope is in the target's pairing.

    Raises:
        TranslationError: If the target cannot express it; with the nearest that it can, and how
            far that is off.
        SpecError: For an unknown target, or if no context is known.

    >>> from phasor.scaling import Linear
    >>> rope = Rope(head_dim=64, pairing="half", scaling=Linear(factor=4.0))
    >>> print(translate(rope, "mlx", context=8192).parts[0].code)
    mx.fast.rope(x, 64, traditional=False, base=10000.0, scale=0.25, offset=offset)
    """
    chosen = TARGETS[choice("target", target, tuple(TARGETS))]
    if isinstance(ropes, Rope):
        ropes = LayerRopes(name="rope", layer_kinds=("rope",), kinds={"rope": ropes})
    if context is None and ropes.context is None:
        raise SpecError("context must be given: this rope does not say how many tokens it is for")
    length = whole("context", ropes.context if context is None else context, least=2)
    if not ropes.ropes:
        raise TranslationError(f"{ropes.name} has no rotation in any layer: give {target} none")
    notes: dict[str, tuple[str, ...]] = {}
    kinds: dict[str, Rope | None] = dict.fromkeys(ropes.kinds)
    for kind, rope in ropes.kinds.items():
        if rope is not None:
            static = rope.at(at) if at is not None else rope
            chosen.check(static, length)
            kinds[kind], notes[kind] = _as_read(chosen, static)
    parts = tuple(
        replace(part, notes=part.notes + _merged(notes[kind] for kind in part.ropes))
        for part in chosen.write(replace(ropes, kinds=kinds), length)
    )
    return Translation(model=ropes.name, target=chosen, context=length, parts=parts)


def _merged(notes: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(chain.from_iterable(notes)))


def _as_read(target: Target, rope: Rope) -> tuple[Rope, tuple[str, ...]]:
    """The rope in a pairing that the target turns, and what that and the rest asks of the user."""
    notes: list[str] = []
    if rope.pairing not in target.pairings:
        (pairing,) = target.pairings
        notes.append(
            f"{target.name} turns {pairing} pairs: reorder the weights first "
            f"(phasor convert FOLDER OUT --to {pairing})."
        )
        rope = replace(rope, pairing=pairing, pairing_out=None)
    if rope.pairing_out is not None:
        notes.append(
            f"The model writes {rope.pairing_out} pairs and {target.name} keeps {rope.pairing}: "
            "scores are the same, cached keys are in another order."
        )
        rope = replace(rope, pairing_out=None)
    if not target.softmax and not isinstance(rope.scaling, Rule) and rope.softmax_factor != 1:
        notes.append(
            f"The model multiplies its softmax scale by {rope.softmax_factor!r}: do that besides."
        )
    return rope, tuple(notes)
