"""torchtune: the class of rotary embeddings that has the law, and its arguments."""

from __future__ import annotations

from typing import Any, NamedTuple

from phasor.files.translation.target import (
    ProgramSettings,
    Target,
    keyword_lines,
    ntk_as_base,
    per_rope,
    plain_candidates,
)
from phasor.pairings import Pairing
from phasor.rope import Rope
from phasor.scaling import Law, Linear, Llama3, Rule


class _Class(NamedTuple):
    """A class of torchtune: its module, its name, and the only pairing that it rotates."""

    module: str
    name: str
    pairing: Pairing


_PLAIN = _Class("torchtune.modules", "RotaryPositionalEmbeddings", "interleaved")
_PLAIN_HALF = _Class("torchtune.models.phi3", "Phi3RotaryPositionalEmbeddings", "half")
_LLAMA3 = _Class("torchtune.models.llama3_1", "Llama3ScaledRoPE", "interleaved")


def _llama3_arguments(law: Law | Rule | None) -> dict[str, float] | None:
    """The arguments of ``Llama3ScaledRoPE`` for a law; None if it cannot express it."""
    if isinstance(law, Llama3):
        return {
            "scale_factor": law.factor,
            "low_freq_factor": law.low_freq_factor,
            "high_freq_factor": law.high_freq_factor,
            "old_context_len": law.original_max_positions,
        }
    if isinstance(law, Linear):
        # it divides the pairs with wavelengths above old_context_len / low_freq_factor: with 1
        # these are all, as no wavelength is below 2π
        bounds = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "old_context_len": 1}
        return {"scale_factor": law.factor, **bounds}
    return None


def _pairings(rope: Rope) -> tuple[Pairing, ...]:
    return (
        ("interleaved",)
        if _llama3_arguments(ntk_as_base(rope).scaling)
        else ("half", "interleaved")
    )


def _write(rope: Rope, context: int) -> ProgramSettings:
    rope = ntk_as_base(rope)
    scaling = _llama3_arguments(rope.scaling)
    if rope.base is None or (rope.scaling is not None and scaling is None):
        law = f"the law {type(rope.scaling).__name__}"
        feature = "explicit frequencies" if rope.base is None else law
        TARGET.refuse(feature, rope, context, plain_candidates(rope))
    settings: dict[str, Any] = {"dim": rope.rotary_dim, "max_seq_len": context, "base": rope.base}
    if scaling is None:
        chosen = _PLAIN if rope.pairing == _PLAIN.pairing else _PLAIN_HALF
    else:
        chosen = _LLAMA3
        settings |= scaling
    return ProgramSettings(
        settings,
        f"from {chosen.module} import {chosen.name}\n\n"
        f"rotary = {chosen.name}(\n{keyword_lines(settings)})\n"
        "# x [batch, seq, heads, head_dim]; positions [batch, seq]\n"
        "rotary(x, input_pos=positions)",
    )


TARGET = Target(
    name="torchtune",
    program="the class and arguments of attention's pos_embeddings",
    source="https://meta-pytorch.org/torchtune/0.6/api_ref_modules.html",
    checked="run",
    write=per_rope(_write),
    pairings=_pairings,
    partial=False,
)
