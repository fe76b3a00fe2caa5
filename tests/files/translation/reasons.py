"""Reasons why a program cannot perform a rotation, held to facts of the ropes."""

from __future__ import annotations

import math
from dataclasses import replace

from phasor import LayerRopes, Rope
from phasor.scaling import NTK, NTKFixed, NTKOld, Yarn

CONTEXT = 4096  # where a model has none
LONGEST = 4096  # of the tables that the programs are given here


def resolved(ropes: LayerRopes) -> LayerRopes:
    """The laws that its rules pick at the end of its context."""
    length = ropes.context or CONTEXT
    kinds = {kind: rope and rope.at(length) for kind, rope in ropes.kinds.items()}
    return replace(ropes, kinds=kinds)


def assert_true(reason: str, ropes: LayerRopes) -> None:
    """What a program is said to lack is something that the model has."""
    facts = {
        "axes": any(rope.axes.n_axes > 1 for rope in ropes.ropes),
        "base": any(not has_whole_base(rope) for rope in ropes.ropes),
        "block_cannot": any(rope.rotary_dim < rope.head_dim for rope in ropes.ropes),
        "clockwise": any(rope.direction < 0 for rope in ropes.ropes),
        "fixed class": ropes.in_config.ignores_scaling,
        "gain": any(has_own_gain(rope) for rope in resolved(ropes).ropes),
        "law": any(rope.scaling is not None for rope in ropes.ropes),
        "part": any(rope.rotary_dim < rope.head_dim for rope in ropes.ropes),
        "pairs": any(rope.pairing == "interleaved" for rope in ropes.ropes),
        "ropes": len(ropes.ropes) > 1,
        "rule": any(hasattr(rope.scaling, "at") for rope in ropes.ropes),
        "start": any(rope.rotary_start for rope in ropes.ropes),
        "still layers": None in ropes.kinds.values(),
        "width": any(not fits_a_vector(rope) for rope in ropes.ropes),
    }
    lacking = reason.split(" and ")
    assert all(facts[one] for one in lacking), (reason, ropes)


def has_own_gain(rope: Rope) -> bool:
    """Whether cos and sin are multiplied by another factor than 1, or for YaRN than the paper's."""
    law = rope.scaling
    usual = 0.1 * math.log(law.factor) + 1 if isinstance(law, Yarn) else 1
    return not math.isclose(rope.attention_factor, usual)


def has_whole_base(rope: Rope) -> bool:
    """Whether the base, with what NTK laws make of it, is a whole number."""
    return rope.base is not None and raised_base(rope).is_integer()


def raised_base(rope: Rope) -> float:
    """The base with what NTK laws make of it."""
    assert rope.base is not None
    law, pairs = rope.scaling, rope.num_pairs
    if isinstance(law, NTK):
        return rope.base * law.factor ** (pairs / (pairs - 1))
    return rope.base * law.factor if isinstance(law, (NTKOld, NTKFixed)) else rope.base


def fits_a_vector(rope: Rope) -> bool:
    """Whether a head has at most 256 coordinates, whose pairs 16 bytes of 16-bit numbers divide.

    Of odd widths it is 32 bytes, and the numbers lie in one half of half pairs.
    """
    usual = rope.head_dim in (64, 128, 256)
    together = rope.num_pairs if rope.pairing == "half" else rope.rotary_dim
    in_vectors = together % (8 if usual else 16) == 0 and rope.head_dim % 8 == 0
    return in_vectors and rope.head_dim - rope.rotary_start <= 256
