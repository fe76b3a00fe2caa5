"""What `phasor.translate` writes, given to each program and compared with the exact rotation."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Set
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import phasor
from phasor import LayerRopes, Rope
from phasor.axes import InterleavedSections, Mixed, Sectioned
from phasor.files.translation import (
    TARGETS,
    ProgramSettings,
    Translation,
    TranslationError,
    translate,
)
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
    Resonance,
    Yarn,
    YarnPaper,
)

from ... import oracle
from ...each import each
from ...strategies import resolved_ropes
from ..refusals import refused
from .jobs import Job
from .programs import IMPORT_LARGE_LIBRARIES, PROGRAMS
from .reasons import CONTEXT, LONGEST, assert_true, resolved

UNIT = 2.0**-24  # half a unit in the last place of float32
# a law in each pairing, a part of a head, several axes, clockwise, a rule
EVERYDAY = ("llama-3.1-405b", "deepseek-r1", "phi-4-mini", "qwen2-vl-7b", "nanochat-d32")


@functools.cache
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


def assert_turns(ropes: LayerRopes, target: str, per_pair: int = 0) -> None:
    """``target`` turns as the model does, at the start of its context and further on.

    ``per_pair`` are the units by which an angle is off more than that of the pair before it.
    """
    context = min(ropes.context or CONTEXT, LONGEST)
    translated = translation_or_reason(ropes, target, context)
    if isinstance(translated, str):
        assert_true(translated, ropes)
        if translated == "rule":  # at one length it can, or says why not
            assert_turns(resolved(ropes), target, per_pair)
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
                still = standing_pairs(part)
                static = model.at(offset + len(x))  # a rule picks its law by the last token
                for token, position in enumerate(range(offset, offset + len(x))):
                    check_token(
                        turned[token], x[token], position, static, performed, still, per_pair
                    )


def standing_pairs(part: ProgramSettings) -> set[int]:
    """The pairs that a note says the program leaves as they are."""
    named = re.findall(r"pairs ([\d and]+) stand still", " ".join(part.notes))
    return {int(number) for pairs in named for number in pairs.split(" and ")}


def translation_or_reason(ropes: LayerRopes, target: str, context: int) -> Translation | str:
    """The translation, or the reason why there is none."""
    try:
        return translate(ropes, target, context=context)
    except TranslationError as error:
        return error.reason


@functools.cache
def places_of(rope: Rope, pairing: str) -> np.ndarray:
    """The two coordinates of each pair, ``[2, num_pairs]``."""
    return np.array([oracle.pair_of(rope, k, pairing) for k in range(rope.num_pairs)]).T


@functools.cache
def frequencies(rope: Rope) -> np.ndarray:
    """Radians per position of each pair, ``[num_pairs]``."""
    return np.array(oracle.frequencies(rope), dtype=float)


def reordered(x: np.ndarray, model: Rope, performed: Rope) -> np.ndarray:
    """``x`` with its pairs where the program reads them."""
    moved = x.copy()
    moved[:, places_of(model, performed.pairing)] = x[:, places_of(model, model.pairing)]
    return moved


def check_token(
    turned: np.ndarray,
    x: np.ndarray,
    position: int | tuple[int, ...],
    model: Rope,
    performed: Rope,
    still: Set[int] = frozenset(),
    per_pair: int = 0,
) -> None:
    """One token is where the model turns it to; what does not turn is as it was."""
    cos, sin = exact(model, position)
    turns, pairs = cos + 1j * sin, np.arange(model.num_pairs)
    turns[[*still]] = 1
    i, j = places_of(model, model.pairing)
    z = x[i].astype(np.float64) + 1j * x[j]
    gain, angles = model.attention_factor, np.max(position) * frequencies(model)
    room = gain * abs(z) * UNIT * (angles * (roundings(model) + per_pair * pairs) + 12)
    i, j = places_of(model, performed.output_pairing)
    right = abs(turned[i] + 1j * turned[j] - gain * z * turns) <= room
    assert right.all(), (position, pairs[~right])
    if performed.pairing == model.pairing:
        untouched = np.delete(np.arange(model.head_dim), [*i, *j])
        assert np.array_equal(turned[untouched], x[untouched].astype(np.float64))


#: The targets that are run or described.
EVERY_PROGRAM = sorted({*TARGETS} & {*PROGRAMS})


def every_day(*targets: str) -> list[Any]:
    """Parameters of these targets; the everyday tests run those that import fast."""
    large = [pytest.mark.programs]
    return [
        pytest.param(target, marks=large if target in IMPORT_LARGE_LIBRARIES else [])
        for target in targets
    ]


def cases() -> Iterator[Any]:
    """Each preset for each program; the everyday tests have a few for those that import fast."""
    for target in EVERY_PROGRAM:
        for name in ropes_of_presets():
            everyday = name in EVERYDAY and target not in IMPORT_LARGE_LIBRARIES
            marks = [] if everyday else [pytest.mark.programs]
            yield pytest.param(name, target, marks=marks, id=f"{target}-{name}")


@pytest.mark.parametrize(("name", "target"), list(cases()))
def test_a_program_given_this_turns_as_the_model_does(name: str, target: str) -> None:
    """Or the reason why it cannot is true of the model."""
    assert_turns(phasor.preset(name), target)


#: Numbers as learning leaves them, of both signs.
MIXED = Mixed(np.random.default_rng(0).standard_normal((2, 32)).tolist())


@pytest.mark.parametrize(
    "name", ["mixed", *(name for name in ropes_of_presets() if several_axes(name))]
)
@pytest.mark.parametrize(
    "target",
    every_day(
        *("flash-attn", "flashinfer", "rotary-embedding-torch", "transformer-engine"),
        *("liger", "onnx"),
    ),
)
def test_a_program_turns_each_pair_by_its_axis(name: str, target: str) -> None:
    """Tokens of pictures and videos, whose coordinates differ."""
    mixed = model_of(Rope(head_dim=64, pairing="half", axes=MIXED))
    ropes = mixed if name == "mixed" else phasor.preset(name)
    chance = np.random.default_rng(0)
    translated = translation_or_reason(ropes, target, CONTEXT)
    if isinstance(translated, str):
        assert "axes" not in translated
        assert_true(translated, ropes)
        return
    for part in translated.parts:
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
    "yarn with a factor that no length gives": replace(
        LLAMA, scaling=replace(YARN, factor=13.570063133536234, original_max_positions=39757)
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
    "positions multiplied": replace(PLAIN, scaling=Linear(factor=0.5)),
    "one pair": Rope(head_dim=2, pairing="half"),
    "backwards with a gain": replace(
        PLAIN, direction=-1, scaling=Yarn(factor=4.0, original_max_positions=16)
    ),
    "another base": replace(PLAIN, scaling=NTK(factor=4.0)),
    "a base below 1": replace(PLAIN, base=2.0, scaling=NTK(factor=0.25)),
    "explicit, one still": Rope(head_dim=6, pairing="half", explicit_inv_freq=(0.5, 2.0, 0.0)),
}


@pytest.mark.programs
@each("name", OTHERS)
@pytest.mark.parametrize("target", EVERY_PROGRAM)
def test_a_program_turns_as_a_rope_of_no_preset_does(name: str, target: str) -> None:
    """Or the reason why it cannot is true of it."""
    assert_turns(model_of(OTHERS[name]), target)


@given(resolved_ropes(), st.sampled_from(sorted({*EVERY_PROGRAM} - IMPORT_LARGE_LIBRARIES)))
@settings(max_examples=50)
def test_a_program_turns_as_any_rope_does(rope: Rope, target: str) -> None:
    """Of every law, axes and pairing; or the reason why it cannot is true of it."""
    assert_turns(model_of(rope), target)


@pytest.mark.programs
@pytest.mark.parametrize("target", EVERY_PROGRAM)
@given(resolved_ropes())
def test_every_program_turns_as_any_rope_does(target: str, rope: Rope) -> None:
    """The same, with those that import large libraries."""
    assert_turns(model_of(rope), target)


@pytest.mark.parametrize("target", ["sglang", "vllm"])
def test_a_law_that_a_config_says_by_another_name_is_refused_truly(target: str) -> None:
    """The resonance of one fast pair is a linear law with a factor below 1 in a config."""
    narrow = Rope(head_dim=2, pairing="interleaved", base=2.0, scaling=Resonance())
    with refused("law: its table of a linear law ends at position"):
        translate(model_of(narrow), target)
    assert_turns(model_of(narrow), target)


def model_of(rope: Rope) -> LayerRopes:
    """A model with one layer and a short context."""
    return LayerRopes(name="any", layer_kinds=("any",), kinds={"any": rope}, context=64)


@pytest.mark.parametrize(
    "target", every_day("exllamav3", "mlx-lm", "sglang", "transformers", "vllm")
)
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
@pytest.mark.parametrize(
    "target", every_day("exllamav3", "maxtext", "megatron", "sglang", "tensorrt-llm", "vllm")
)
def test_each_axis_drives_its_pairs(name: str, target: str) -> None:
    """Tokens of an image, whose coordinates differ."""
    rope = WITH_AXES[name]
    ropes = LayerRopes(name=name, layer_kinds=("rope",), kinds={"rope": rope})
    translated = translation_or_reason(ropes, target, LONGEST)
    if isinstance(translated, str):
        assert_true(translated, ropes)
        return
    x = np.random.default_rng(0).standard_normal((4, rope.head_dim)).astype(np.float32)
    places = np.array([[0, 7, 7, 4000], [0, 1, 2, 300], [0, 5, 3, 20]])
    part = translated.parts[0]
    job = Job(ropes, part, "rope", reordered(x, rope, part.ropes["rope"]), 0, places)
    turned = PROGRAMS[target](job)
    for token, place in enumerate(places.T.tolist()):
        check_token(turned[token], x[token], tuple(place), rope, part.ropes["rope"])


def test_a_context_beyond_the_models_is_named_with_the_way_to_one() -> None:
    """For every program, whether it takes a length or not; a rule scales to any length."""
    plain = phasor.preset("qwen2.5-7b-instruct")
    for name in ("llama.cpp", "vllm", "transformers", "liger"):
        (part, *_) = translate(plain, name, context=131072).parts
        assert part.notes[0].startswith("131072 tokens are more than the 32768 that qwen2.5")
        assert "phasor extend MODEL --to 131072 --law LAW --write FOLDER" in part.notes[0]
        assert part.notes[0].endswith(f"then phasor translate FOLDER --to {name}.")
        assert not any("more than" in note for note in translate(plain, name).parts[0].notes)
    (part,) = translate(plain, "transformers", seq_len=40_000).parts
    assert part.notes[0].startswith("40000 tokens are more than the 32768")
    extended = replace(plain[0], scaling=Yarn(factor=4.0, original_max_positions=32768))
    dynamic = replace(plain[0], scaling=DynamicNTK(factor=4.0, original_max_positions=32768))
    for rope in (extended, dynamic):
        model = replace(plain, kinds={"rope": rope})
        (part,) = translate(model, "transformers", context=131072).parts
        assert not any("more than" in note for note in part.notes)
