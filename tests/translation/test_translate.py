"""What `phasor.translate` writes, given to each program and compared with the exact rotation."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import numpy as np
import pytest

import phasor
from phasor import LayerRopes, Rope
from phasor.axes import InterleavedSections, Sectioned
from phasor.scaling import (
    NTK,
    DynamicNTK,
    Linear,
    Llama3,
    LongRope,
    NTKFixed,
    NTKMixed,
    NTKOld,
    PartNTK,
    PerPair,
    Proportional,
    Yarn,
    YarnPaper,
)
from phasor.translation import TARGETS, Translation, TranslationError, translate

from .. import oracle
from .programs import PROGRAMS, Job

UNIT = 2.0**-24  # half a unit in the last place of float32
CONTEXT = 4096  # where a model has none
LONGEST = 4096  # of the tables that the programs are given here


def ropes_of_presets() -> dict[str, str]:
    """The first preset with each set of ropes, by its name."""
    seen: dict[object, str] = {}
    for name in phasor.preset_names():
        seen.setdefault(frozenset(phasor.preset(name).kinds.items()), name)
    return {name: name for name in seen.values()}


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


@pytest.mark.parametrize("name", ropes_of_presets())
@pytest.mark.parametrize("target", sorted(set(TARGETS) & set(PROGRAMS)))
def test_a_program_given_this_turns_as_the_model_does(name: str, target: str) -> None:
    """Or the reason why it cannot is true of the model."""
    assert_turns(phasor.preset(name), target)


LLAMA = Rope(head_dim=128, pairing="half", base=500_000.0)
YARN = Yarn(factor=4.0, original_max_positions=1024)
OTHERS = {
    "a fraction of a position": replace(LLAMA, scaling=Linear(factor=2.5)),
    "part of a head": replace(LLAMA, rotary_dim=48, scaling=Linear(factor=2.0)),
    "ntk old": replace(LLAMA, scaling=NTKOld(factor=3.0)),
    "ntk fixed": replace(LLAMA, scaling=NTKFixed(factor=4.0)),
    "ntk fixed, interleaved": replace(LLAMA, pairing="interleaved", scaling=NTKFixed(factor=4.0)),
    "ntk mixed": replace(LLAMA, scaling=NTKMixed(factor=4.0)),
    "part ntk": replace(LLAMA, scaling=PartNTK(factor=4.0, original_max_positions=2048)),
    "yarn of the paper": replace(LLAMA, scaling=YarnPaper(factor=4.0, original_max_positions=1024)),
    "yarn, interleaved": replace(LLAMA, pairing="interleaved", scaling=YARN),
    "yarn of a part": replace(LLAMA, rotary_dim=64, scaling=YARN),
    "ntk old, interleaved": replace(LLAMA, pairing="interleaved", scaling=NTKOld(factor=3.0)),
    "yarn with a factor": replace(LLAMA, scaling=replace(YARN, attention_factor=1.25)),
    "yarn with two factors": replace(
        LLAMA, scaling=replace(YARN, attention_factor=1.25, mscale_all_dim=0.5)
    ),
    "yarn with another factor": replace(LLAMA, scaling=replace(YARN, mscale=0.5)),
    "yarn with a softmax factor": replace(
        LLAMA, scaling=replace(YARN, mscale=0.0, mscale_all_dim=1.0)
    ),
    "yarn without a factor": replace(LLAMA, scaling=replace(YARN, mscale=0.0)),
    "yarn of less": replace(LLAMA, scaling=replace(YARN, original_max_positions=512)),
    "yarn of less, interleaved": replace(
        LLAMA, pairing="interleaved", scaling=replace(YARN, original_max_positions=512)
    ),
    "a step": replace(
        LLAMA,
        scaling=Llama3(
            factor=8.0, low_freq_factor=2.0, high_freq_factor=2.0, original_max_positions=8192
        ),
    ),
    "divisors": replace(
        LLAMA, scaling=PerPair(factors=tuple(np.linspace(1, 9, 64)), attention_factor=1.5)
    ),
    "divisors, interleaved": replace(
        LLAMA, pairing="interleaved", scaling=PerPair(factors=tuple(np.linspace(1, 9, 64)))
    ),
    "some stand still": replace(LLAMA, scaling=Proportional(fraction=0.25, factor=2.0)),
    "in the middle": replace(LLAMA, rotary_start=32, rotary_dim=64, scaling=YARN),
    "explicit": Rope(head_dim=8, pairing="half", explicit_inv_freq=(1.0, 0.3, 0.2, 0.1)),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("target", sorted(set(TARGETS) & set(PROGRAMS)))
def test_laws_of_no_preset_are_performed_or_refused(name: str, target: str) -> None:
    """One rope for all layers."""
    rope = OTHERS[name]
    assert_turns(LayerRopes(name=name, layer_kinds=("rope",), kinds={"rope": rope}), target)


@pytest.mark.parametrize("target", ["sglang", "transformers", "vllm"])
def test_a_kind_of_layer_without_a_rope_has_an_empty_block(target: str) -> None:
    """Where each kind has a block of its own."""
    kinds = {"full": LLAMA, "sliding": replace(LLAMA, base=10_000.0), "none": None}
    ropes = LayerRopes(name="toy", layer_kinds=tuple(kinds), kinds=kinds)
    assert_turns(ropes, target)
    settings = translate(ropes, target, context=CONTEXT).parts[0].settings
    assert settings.get("override", settings)["rope_parameters"]["none"] is None


WITH_AXES = {
    "sections": replace(LLAMA, axes=Sectioned((16, 24, 24))),
    "sections of interleaved pairs": replace(
        LLAMA, pairing="interleaved", axes=Sectioned((16, 24, 24))
    ),
    "sections and yarn": replace(LLAMA, axes=Sectioned((16, 24, 24)), scaling=YARN),
    "sections and linear": replace(LLAMA, axes=Sectioned((16, 24, 24)), scaling=Linear(factor=2.0)),
    "dealt out": replace(LLAMA, axes=InterleavedSections((24, 20, 20))),
    "dealt out of too many": replace(LLAMA, axes=InterleavedSections((40, 20, 20))),
    "dealt out beyond the last": replace(LLAMA, axes=InterleavedSections((0, 30, 30))),
    "dealt out to part": replace(LLAMA, rotary_dim=64, axes=InterleavedSections((11, 11, 10))),
}


@pytest.mark.parametrize("name", WITH_AXES)
@pytest.mark.parametrize("target", ["megatron", "sglang", "vllm"])
def test_each_axis_drives_its_pairs(name: str, target: str) -> None:
    """Tokens of an image, whose coordinates differ."""
    rope = WITH_AXES[name]
    ropes = LayerRopes(name=name, layer_kinds=("rope",), kinds={"rope": rope})
    reason, translated = refused(ropes, target, LONGEST)
    if translated is None:
        assert reason_is_true(ropes, reason), reason
        return
    x = np.random.default_rng(0).standard_normal((4, rope.head_dim)).astype(np.float32)
    places = np.array([[0, 7, 7, 4000], [0, 1, 2, 300], [0, 5, 3, 20]])
    part = translated.parts[0]
    job = Job(ropes, part, "rope", reordered(x, rope, part.ropes["rope"]), 0, places)
    turned = PROGRAMS[target](job)
    for token, place in enumerate(places.T.tolist()):
        check_token(turned[token], x[token], tuple(place), rope, part.ropes["rope"])


def reason_is_true(ropes: LayerRopes, said: str) -> bool:
    """Whether what the program is said to lack is something that the model has."""
    beyond_blocks = (NTKMixed, PartNTK, PerPair, YarnPaper)
    bases = [raised_base(rope) for rope in ropes.ropes if rope.base is not None]
    facts = {
        "axes": any(rope.axes.n_axes > 1 for rope in ropes.ropes),
        "clockwise": any(rope.direction < 0 for rope in ropes.ropes),
        "in its code": ropes.in_config.fixed,
        "picks one by the length": any(hasattr(rope.scaling, "at") for rope in ropes.ropes),
        "neighbours at once": any(not fits_a_vector(rope) for rope in ropes.ropes),
        "ropes: translate one": len(ropes.ropes) > 1,
        "no whole number": any(base != int(base) for base in bases),
        "other numbers than its code has": any(not megatrons_law(rope) for rope in ropes.ropes),
        "stand still beside": any(
            isinstance(rope.scaling, Proportional) and 0 in oracle.frequencies(rope)
            for rope in ropes.ropes
        ),
        "for interleaved pairs": any(
            rope.pairing == "interleaved" and isinstance(rope.scaling, beyond_blocks)
            for rope in ropes.ropes
        ),
        "megatron cannot express the law": any(
            isinstance(rope.scaling, (*beyond_blocks, NTKFixed, Proportional))
            for rope in ropes.ropes
        ),
        "from coordinate": any(rope.rotary_start for rope in ropes.ropes),
        "without a base": any(rope.base is None for rope in ropes.ropes),
        "where its table ends": any(
            isinstance(rope.scaling, Yarn)
            and rope.scaling.factor * rope.scaling.original_max_positions < LONGEST
            for rope in ropes.ropes
        ),
        "YaRN of": any(isinstance(rope.scaling, Yarn) for rope in ropes.ropes)
        and any(rope.rotary_dim < rope.head_dim for rope in ropes.ropes),
    }
    return any(fact and word in said for word, fact in facts.items())


def raised_base(rope: Rope) -> float:
    """The base with what NTK-aware scaling makes of it."""
    assert rope.base is not None
    factor = rope.scaling.factor if isinstance(rope.scaling, NTK) else 1.0
    return rope.base * factor ** (rope.num_pairs / (rope.num_pairs - 1))


def fits_a_vector(rope: Rope) -> bool:
    """Whether 16 bytes of 16-bit numbers lie in one half of the pairs, and 32 for odd widths."""
    usual = rope.head_dim in (64, 128, 256)
    together = rope.num_pairs if rope.pairing == "half" else rope.rotary_dim
    return together % (8 if usual else 16) == 0 and rope.head_dim % 8 == 0


def megatrons_law(rope: Rope) -> bool:
    """Whether the law has the numbers that Megatron-LM has in its code."""
    law = rope.scaling
    if isinstance(law, Llama3):
        numbers = law.low_freq_factor, law.high_freq_factor, law.original_max_positions
        return numbers == (1.0, 4.0, 8192)
    if isinstance(law, Linear):
        return law.factor.is_integer()
    if isinstance(law, Yarn):
        return (law.beta_fast, law.beta_slow, law.original_max_positions) == (32.0, 1.0, 4096)
    return law is None
