"""What `phasor.translate` writes, given to each program and compared with the exact rotation."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import phasor
from phasor import LayerRopes, Rope
from phasor.scaling import NTK, DynamicNTK, Linear, LongRope, Yarn
from phasor.translation import TARGETS, Translation, TranslationError, translate

from .. import oracle
from ..strategies import resolved_ropes
from .programs import IMPORT_LARGE_LIBRARIES, PROGRAMS, Job

UNIT = 2.0**-24  # half a unit in the last place of float32
CONTEXT = 4096  # where a model has none
LONGEST = 4096  # of the tables that the programs are given here
# a law in each pairing, a part of a head, several axes, clockwise, a rule
EVERYDAY = ("llama-3.1-405b", "deepseek-r1", "phi-4-mini", "qwen2-vl-7b", "nanochat-d32")


def ropes_of_presets() -> dict[str, str]:
    """The first preset with each set of ropes, by its name."""
    seen: dict[object, str] = {}
    for name in phasor.preset_names():
        seen.setdefault(frozenset(phasor.preset(name).kinds.items()), name)
    return {name: name for name in seen.values()}


def several_axes(name: str) -> bool:
    """Whether a preset's tokens have several coordinates."""
    return any(rope.axes.n_axes > 1 for rope in phasor.preset(name).ropes)


def roundings(rope: Rope) -> float:
    """By how many units an angle may be off relatively that a program computes in float32.

    ``base ** -(k / n)``: the exponent is off by a unit, which its logarithm multiplies; the power
    and the laws' blends by four more, the product with the position by one.
    """
    return 2 * math.log(rope.base or 1e9) + 5


@functools.cache
def exact(rope: Rope, position: int | tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine of every pair; one coordinate is that of each axis."""
    alone = isinstance(position, int) and rope.axes.n_axes > 1
    at = [position] * rope.axes.n_axes if alone else position
    cos, sin = oracle.cos_sin(rope, at)
    return np.array(cos, dtype=float), np.array(sin, dtype=float)


def assert_turns(ropes: LayerRopes, target: str) -> None:
    """``target`` turns as the model does, at the start of its context and further on."""
    context = min(ropes.context or CONTEXT, LONGEST)
    reason, translated = refused(ropes, target, context)
    if translated is None:
        assert reason_is_true(ropes, reason), reason
        if "picks one by the length" in reason:  # at one length it can, or says why not
            assert_turns(resolved(ropes), target)
        return
    chance = np.random.default_rng(0)
    described = [kind for kind, rope in ropes.kinds.items() if rope is not None]
    assert [kind for part in translated.parts for kind in part.ropes] == described
    for part in translated.parts:
        for kind, performed in part.ropes.items():
            model = ropes.kinds[kind]
            assert model is not None
            x = chance.standard_normal((4, model.head_dim)).astype(np.float32)
            offsets = {0, context - len(x)}
            if isinstance(model.scaling, (DynamicNTK, LongRope)):
                offsets.add(model.scaling.original_max_positions)  # the rule picks another law
            for offset in offsets:
                job = Job(ropes, part, kind, reordered(x, model, performed), offset)
                turned = PROGRAMS[target](job)
                static = model.at(offset + len(x))  # a rule picks its law by the last token
                for token, position in enumerate(range(offset, offset + len(x))):
                    check_token(turned[token], x[token], position, static, performed)


def resolved(ropes: LayerRopes) -> LayerRopes:
    """The laws that its rules pick at the end of its context."""
    length = ropes.context or CONTEXT
    kinds = {kind: rope and rope.at(length) for kind, rope in ropes.kinds.items()}
    return replace(ropes, kinds=kinds)


def refused(ropes: LayerRopes, target: str, context: int) -> tuple[str, Translation | None]:
    """Why there is no translation; or none, and it."""
    try:
        return "", translate(ropes, target, context=context)
    except TranslationError as error:
        return str(error), None


def reordered(x: np.ndarray, model: Rope, performed: Rope) -> np.ndarray:
    """``x`` with its pairs where the program reads them."""
    moved = x.copy()
    for k in range(model.num_pairs):
        for source, to in zip(
            oracle.pair_of(model, k, model.pairing),
            oracle.pair_of(model, k, performed.pairing),
            strict=True,
        ):
            moved[:, to] = x[:, source]
    return moved


def check_token(
    turned: np.ndarray,
    x: np.ndarray,
    position: int | tuple[int, ...],
    model: Rope,
    performed: Rope,
) -> None:
    """One token is where the model turns it to; what does not turn is as it was."""
    cos, sin = exact(model, position)
    gain = model.attention_factor
    untouched = np.ones(model.head_dim, dtype=bool)
    for k in range(model.num_pairs):
        i, j = oracle.pair_of(model, k, model.pairing)
        z = complex(x[i], x[j])
        wanted = gain * z * complex(cos[k], sin[k])
        i, j = oracle.pair_of(model, k, performed.output_pairing)
        untouched[[i, j]] = False
        angle = np.max(position) * float(oracle.frequencies(model)[k])
        room = gain * abs(z) * UNIT * (angle * roundings(model) + 12)
        assert abs(complex(turned[i], turned[j]) - wanted) <= room, (position, k)
    if performed.pairing == model.pairing:
        assert np.array_equal(turned[untouched], x[untouched].astype(np.float64))


#: The targets that are run or described, for the everyday tests those that import fast.
EVERY_PROGRAM = [
    pytest.param(target, marks=[pytest.mark.programs] if target in IMPORT_LARGE_LIBRARIES else [])
    for target in sorted({*TARGETS} & {*PROGRAMS})
]


def cases() -> Iterator[Any]:
    """Each preset for each program; the everyday tests have a few for those that import fast."""
    for target in sorted({*TARGETS} & {*PROGRAMS}):
        for name in ropes_of_presets():
            everyday = name in EVERYDAY and target not in IMPORT_LARGE_LIBRARIES
            marks = [] if everyday else [pytest.mark.programs]
            yield pytest.param(name, target, marks=marks, id=f"{target}-{name}")


@pytest.mark.parametrize(("name", "target"), list(cases()))
def test_a_program_given_this_turns_as_the_model_does(name: str, target: str) -> None:
    """Or the reason why it cannot is true of the model."""
    assert_turns(phasor.preset(name), target)


@pytest.mark.parametrize("name", [name for name in ropes_of_presets() if several_axes(name)])
@pytest.mark.parametrize(
    "target", ["rotary-embedding-torch", pytest.param("liger", marks=pytest.mark.programs)]
)
def test_a_program_turns_each_pair_by_its_axis(name: str, target: str) -> None:
    """Tokens of pictures and videos, whose coordinates differ."""
    ropes = phasor.preset(name)
    chance = np.random.default_rng(0)
    for part in translate(ropes, target, context=CONTEXT).parts:
        for kind, performed in part.ropes.items():
            model = ropes.kinds[kind]
            assert model is not None
            x = chance.standard_normal((4, model.head_dim)).astype(np.float32)
            coordinates = chance.integers(0, CONTEXT, (model.axes.n_axes, len(x)))
            job = Job(ropes, part, kind, reordered(x, model, performed), 0, coordinates)
            turned = PROGRAMS[target](job)
            for token, position in enumerate(coordinates.T.tolist()):
                check_token(turned[token], x[token], tuple(position), model, performed)


PLAIN = Rope(head_dim=8, pairing="interleaved")
ODD = {
    "positions multiplied": replace(PLAIN, scaling=Linear(factor=0.5)),
    "one pair": Rope(head_dim=2, pairing="half"),
    "backwards with a gain": replace(
        PLAIN, direction=-1, scaling=Yarn(factor=4.0, original_max_positions=16)
    ),
    "another base": replace(PLAIN, scaling=NTK(factor=4.0)),
    "a base below 1": replace(PLAIN, base=2.0, scaling=NTK(factor=0.25)),
    "explicit": Rope(head_dim=6, pairing="half", explicit_inv_freq=(0.5, 2.0, 0.0)),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("target", EVERY_PROGRAM)
def test_a_program_turns_as_a_rope_of_no_preset_does(name: str, target: str) -> None:
    """Or the reason why it cannot is true of it."""
    assert_turns(model_of(ODD[name]), target)


@given(resolved_ropes(), st.sampled_from(sorted({*TARGETS} & {*PROGRAMS} - IMPORT_LARGE_LIBRARIES)))
@settings(max_examples=50)
def test_a_program_turns_as_any_rope_does(rope: Rope, target: str) -> None:
    """Of every law, layout and pairing; or the reason why it cannot is true of it."""
    assert_turns(model_of(rope), target)


@pytest.mark.programs
@pytest.mark.parametrize("target", EVERY_PROGRAM)
@given(resolved_ropes())
@settings(max_examples=100)
def test_every_program_turns_as_any_rope_does(target: str, rope: Rope) -> None:
    """The same, with those that import large libraries."""
    assert_turns(model_of(rope), target)


def model_of(rope: Rope) -> LayerRopes:
    """A model with one layer and a short context."""
    return LayerRopes(name="any", layer_kinds=("any",), kinds={"any": rope}, context=64)


def reason_is_true(ropes: LayerRopes, said: str) -> bool:
    """Whether what the program is said to lack is something that the model has."""
    frequencies = [f for rope in resolved(ropes).ropes for f in oracle.frequencies(rope)]
    facts = {
        "axes": any(rope.axes.n_axes > 1 for rope in ropes.ropes),
        "clockwise": any(rope.direction < 0 for rope in ropes.ropes),
        "in its code": ropes.in_config.fixed,
        "rotated coordinates of": any(rope.rotary_dim < rope.head_dim for rope in ropes.ropes),
        "explicit frequencies": any(rope.explicit_inv_freq for rope in ropes.ropes),
        "stand still": min(frequencies) < 1e-300,
        "picks one by the length": any(hasattr(rope.scaling, "at") for rope in ropes.ropes),
    }
    for rope in ropes.ropes:
        law = type(rope.scaling).__name__
        facts[f"the law {law}"] = True
        facts[f"block cannot say {law}"] = rope.rotary_dim < rope.head_dim
    return any(fact and word in said for word, fact in facts.items())
