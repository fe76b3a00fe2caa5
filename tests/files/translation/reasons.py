"""Reasons why a program cannot perform a rotation, held to facts of the ropes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from phasor import LayerRopes, Rope
from phasor.scaling import (
    NTK,
    Llama3,
    NTKFixed,
    NTKMixed,
    NTKOld,
    PartNTK,
    PerPair,
    Proportional,
    Rule,
    Yarn,
    YarnPaper,
)

from ... import oracle

CONTEXT = 4096  # where a model has none
LONGEST = 4096  # of the tables that the programs are given here


def resolved(ropes: LayerRopes) -> LayerRopes:
    """The laws that its rules pick at the end of its context."""
    length = ropes.context or CONTEXT
    kinds = {kind: rope and rope.at(length) for kind, rope in ropes.kinds.items()}
    return replace(ropes, kinds=kinds)


def reason_is_true(ropes: LayerRopes, said: str) -> bool:
    """Whether what the program is said to lack is something that the model has."""
    unrotated = [i for i, kind in enumerate(ropes.layer_kinds, 1) if ropes.kinds[kind] is None]
    beyond_blocks = (NTKMixed, PartNTK, PerPair, YarnPaper)
    bases = [raised_base(rope) for rope in ropes.ropes if rope.base is not None]
    frequencies = [f for rope in resolved(ropes).ropes for f in oracle.frequencies(rope)]
    facts = {
        "axes": any(rope.axes.n_axes > 1 for rope in ropes.ropes),
        "clockwise": any(rope.direction < 0 for rope in ropes.ropes),
        "in its code": ropes.in_config.ignores_scaling,
        "explicit frequencies": any(rope.explicit_inv_freq for rope in ropes.ropes),
        "stand still": min(frequencies) < 1e-300,
        "picks one by the length": any(hasattr(rope.scaling, "at") for rope in ropes.ropes),
        "different ropes": len(ropes.ropes) > 1,
        "rotated coordinates of": any(rope.rotary_dim < rope.head_dim for rope in ropes.ropes),
        "not every n-th": unrotated
        != list(range(len(ropes) + 1))[:: min(unrotated, default=1)][1:],
        "frequencies other than": any(other_frequencies(rope, said) for rope in ropes.ropes),
        "cannot express cos and sin multiplied": any(
            rope.attention_factor != 1 for rope in resolved(ropes).ropes
        ),
        "YaRN with cos and sin multiplied": any(unusual_yarn(r.scaling) for r in ropes.ropes),
        **dict.fromkeys(
            ("architectures of gpt-oss", "gpt-oss's class gives a list"),
            any(
                isinstance(rope.scaling, Yarn) and not rope.scaling.truncate for rope in ropes.ropes
            ),
        ),
        "heads of": any(rope.head_dim - rope.rotary_start > 256 for rope in ropes.ropes),
        "neighbours at once": any(not fits_a_vector(rope) for rope in ropes.ropes),
        "not a whole number": any(base != int(base) for base in bases),
        "stand still beside": any(
            isinstance(rope.scaling, Proportional) and 0 in oracle.frequencies(rope)
            for rope in ropes.ropes
        ),
        "for interleaved pairs": any(
            rope.pairing == "interleaved" and isinstance(rope.scaling, beyond_blocks)
            for rope in ropes.ropes
        ),
        "from coordinate": any(rope.rotary_start for rope in ropes.ropes),
        "without a base": any(rope.base is None for rope in ropes.ropes),
        "where its table ends": any(
            isinstance(rope.scaling, Yarn)
            and rope.scaling.factor * rope.scaling.original_max_positions < LONGEST
            for rope in ropes.ropes
        ),
        "with a factor below 1": max(frequencies) > 1,
        "rotates in every layer": bool(unrotated),
        "with these numbers": any(rope.scaling is not None for rope in ropes.ropes),
        "such a base here": any(base != int(base) for base in bases),
        "a part of the head": any(rope.rotary_dim < rope.head_dim for rope in ropes.ropes),
    }
    for rope in ropes.ropes:
        law = type(rope.scaling).__name__
        facts[f"the law {law}"] = True
        facts[f"block cannot say {law}"] = rope.rotary_dim < rope.head_dim
    return any(fact and word in said for word, fact in facts.items())


def other_frequencies(rope: Rope, named: str) -> bool:
    """Whether frequencies are neither powers of one base nor those of a law in ``named``."""
    law = rope.scaling
    if isinstance(law, Rule):
        return False
    if isinstance(law, Yarn) and law.truncate:
        return "YaRN" not in named or ramp_ends_before_it_begins(rope, law)
    # frequencies that are given, or any two of a law, may happen to be powers of some base
    if rope.base is None or raised_base(rope) <= 1 or (law and rope.num_pairs <= 2):
        return True
    if isinstance(law, Llama3) and (law.original_max_positions, law.low_freq_factor) == (8192, 1):
        return "Llama3" not in named
    found = np.array([float(f) for f in oracle.frequencies(rope)])
    divided = found[0] != 1 and "one factor" not in named
    if divided or not found.all():
        return True
    if len(found) == 1:
        return False
    ratio = found[1] / found[0]
    powers = found[0] * ratio ** np.arange(len(found))
    return ratio >= 1 or not np.allclose(found, powers, rtol=1e-10, atol=0)


def ramp_ends_before_it_begins(rope: Rope, law: Yarn) -> bool:
    """Whether the ramp of a narrow head is one that programs compute differently."""
    first, last = (
        oracle.index_of_turns(rope.num_pairs, rope.base, law.original_max_positions, turns)
        for turns in (law.beta_fast, law.beta_slow)
    )
    return max(math.floor(first), 0) > min(math.ceil(last), rope.rotary_dim - 1)


def unusual_yarn(law: object) -> bool:
    """Whether cos and sin are multiplied by another factor than the paper's."""
    if not isinstance(law, Yarn):
        return False
    factor, _ = law.temperature()
    return not math.isclose(factor, 0.1 * math.log(law.factor) + 1)


def raised_base(rope: Rope) -> float:
    """The base with what NTK laws make of it."""
    assert rope.base is not None
    law, pairs = rope.scaling, rope.num_pairs
    if isinstance(law, NTK):
        return rope.base * law.factor ** (pairs / (pairs - 1))
    return rope.base * law.factor if isinstance(law, (NTKOld, NTKFixed)) else rope.base


def fits_a_vector(rope: Rope) -> bool:
    """Whether 16 bytes of 16-bit numbers lie in one half of the pairs, and 32 for odd widths."""
    usual = rope.head_dim in (64, 128, 256)
    together = rope.num_pairs if rope.pairing == "half" else rope.rotary_dim
    return together % (8 if usual else 16) == 0 and rope.head_dim % 8 == 0
