"""Axes with a base and a law of their own, against formulas written out for each axis."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import mpmath
import numpy as np
import pytest
from mpmath import mpf

from phasor import Rope, preset
from phasor.angles import cos_sin
from phasor.axes import Alternating, Axial, InterleavedSections, Sectioned
from phasor.describe import construction, sentences
from phasor.errors import SpecError
from phasor.layers import summarize
from phasor.scaling import NTK, DynamicNTK, Linear, PerPair, Yarn

TWICE = NTK(factor=2.0)
ISSUE = Axial((8, 12, 12), base=(256.0, 1e4, 1e4), scaling=(None, TWICE, TWICE))


def powers(base: float, count: int, pairs: range | None = None) -> list[mpf]:
    """``base ** (-k / count)`` for the pairs, by mpmath."""
    return [mpf(base) ** (-mpf(k) / count) for k in pairs or range(count)]


@mpmath.workdps(60)
def test_each_axis_of_axial_has_its_own_base_and_law() -> None:
    """The base that NTK raises, written out; the frequency is its power over the axis alone."""
    rope = Rope(head_dim=64, pairing="interleaved", axes=ISSUE)
    raised = mpf(10_000) * mpf(2) ** (mpf(24) / 22)
    expected = [*powers(256, 8), *powers(raised, 12), *powers(raised, 12)]
    assert rope.inv_freq.tolist() == [float(f) for f in expected]


@mpmath.workdps(60)
@pytest.mark.parametrize("kind", [Sectioned, InterleavedSections, Alternating])
def test_an_axis_of_one_shared_run_takes_its_pairs_from_its_own_spectrum(kind: Any) -> None:
    """Its law sees all pairs of the head, as in a model that scales one axis of M-RoPE."""
    axes = kind((8, 12, 12), base=(1e6, 1e4, 1e4), scaling=(TWICE, None, Linear(factor=4.0)))
    raised = mpf(10) ** 6 * mpf(2) ** (mpf(64) / 62)
    by_axis = powers(raised, 32), powers(1e4, 32), [f / 4 for f in powers(1e4, 32)]
    expected = [float(by_axis[axis][k]) for k, axis in enumerate(axes.axis_of_pair(32))]
    assert Rope(head_dim=64, pairing="half", axes=axes).inv_freq.tolist() == expected


def test_cosmos_rotates_as_in_its_own_class() -> None:
    """`CosmosRotaryPosEmbed`: 10000 times a factor to the power d / (d - 2), for each axis."""
    axes = Axial((22, 21, 21), scaling=(TWICE, None, None))
    time, rows = 10_000 * 2 ** (44 / 42), 10_000.0
    widths = (44, time), (42, rows), (42, rows)
    expected = [1 / base ** (2 * j / width) for width, base in widths for j in range(width // 2)]
    np.testing.assert_allclose(
        Rope(head_dim=128, pairing="half", axes=axes).inv_freq, expected, rtol=4e-15, atol=0
    )


def test_the_ropes_own_base_is_that_of_axes_with_laws_alone() -> None:
    """And the Rope's own law is that of axes with bases alone, a rule too."""
    of_laws = Rope(
        head_dim=64, pairing="half", base=100.0, axes=Axial((16, 16), scaling=(None, TWICE))
    )
    assert of_laws.inv_freq[:16].tolist() == [float(f) for f in powers(100, 16)]
    rule = DynamicNTK(factor=2.0, original_max_positions=64)
    of_bases = Rope(
        head_dim=64, pairing="half", scaling=rule, axes=Axial((16, 16), base=(100.0, 1e4))
    )
    assert of_bases.at(64).inv_freq[:16].tolist() == of_laws.inv_freq[:16].tolist()
    raised = 1e4 * 3 ** (32 / 30)
    np.testing.assert_allclose(
        of_bases.at(128).inv_freq[16:], raised ** (-np.arange(16) / 16), rtol=4e-15, atol=0
    )


def test_one_base_or_law_for_all_axes_is_the_ropes() -> None:
    """So that equal ropes are equal, have one hash and one JSON."""
    together = Rope(head_dim=64, pairing="half", base=1e4, scaling=TWICE, axes=Axial((16, 16)))
    apart = Rope(
        head_dim=64,
        pairing="half",
        axes=Axial((16, 16), base=(1e4, 1e4), scaling=(TWICE, TWICE)),
    )
    assert apart == together
    assert hash(apart) == hash(together)
    assert apart.axes == Axial((16, 16))
    unscaled = Rope(head_dim=64, pairing="half", axes=Axial((16, 16), scaling=(None, None)))
    assert unscaled == Rope(head_dim=64, pairing="half", axes=Axial((16, 16)))


def test_they_are_values_and_survive_json_copies_and_pickles() -> None:
    """Lists become tuples, whole numbers floats."""
    rope = Rope(head_dim=64, pairing="interleaved", axes=ISSUE)
    assert Axial([8, 12, 12], base=[256, 10_000, 10_000], scaling=[None, TWICE, TWICE]) == ISSUE
    for other in (
        Rope.from_json(rope.to_json()),
        Rope.from_dict(rope.to_dict()),
        copy.deepcopy(rope),
        pickle.loads(pickle.dumps(rope)),
        eval(construction(rope), {"phasor": __import__("phasor")}),
    ):
        assert other == rope
        assert hash(other) == hash(rope)
    assert rope.to_dict()["axes"] == {
        "layout": "axial",
        "sections": [8, 12, 12],
        "base": [256.0, 1e4, 1e4],
        "scaling": [None, {"law": "ntk", "factor": 2.0}, {"law": "ntk", "factor": 2.0}],
    }
    plain = Rope(head_dim=64, pairing="half", axes=Axial((16, 16))).to_dict()
    assert plain["axes"] == {"layout": "axial", "sections": [16, 16]}


def test_a_repr_names_what_is_given() -> None:
    """Of axes without a base or law of their own only the sections."""
    assert repr(Sectioned((1, 2, 1))) == "Sectioned(sections=(1, 2, 1))"
    assert eval(repr(ISSUE), {"Axial": Axial, "NTK": NTK}) == ISSUE


def test_descriptions_name_the_axes() -> None:
    """In sentences, and on the line of a model's kinds."""
    rope = Rope(head_dim=64, pairing="interleaved", axes=ISSUE)
    lines = sentences(rope, None)
    assert "Frequencies are powers of base 256 on axis 0 and base 10000 on axes 1-2." in lines
    assert "Scaling is none on axis 0 and NTK (factor 2) on axes 1-2." in lines
    assert summarize(rope) == (
        "interleaved pairs, 64 coordinates, bases 256, 10000, 10000, laws none, NTK (factor 2), "
        "NTK (factor 2), Axial axes of 8, 12, 12 pairs"
    )


def test_the_angles_of_a_token_follow_each_axis() -> None:
    """A step along one axis turns its pairs by its own frequencies, far away too."""
    rope = Rope(head_dim=64, pairing="interleaved", axes=ISSUE)
    position = [2**40, -3, 2**55 + 1]
    places = np.repeat(np.array(position, dtype=object), (8, 12, 12))
    with mpmath.workdps(60):
        raised = mpf(10_000) * mpf(2) ** (mpf(24) / 22)
        f = [*powers(256, 8), *powers(raised, 12), *powers(raised, 12)]
        angles = [mpf(int(p)) * one for p, one in zip(places, f, strict=True)]
        expected = [float(mpmath.cos(angle)) for angle in angles]
    np.testing.assert_allclose(cos_sin(position, rope)[0], expected, rtol=0, atol=3e-16)


YARN = Yarn(factor=4.0, original_max_positions=64)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (
            lambda: Axial((8, 12, 12), base=256.0),
            "base of the axes must have an entry for each of 3 axes, such as (256.0, 1e4, 1e4) for "
            "three, got 256.0; pass a single one to the Rope, as its base",
        ),
        (
            lambda: Axial((8, 12, 12), scaling=(TWICE, TWICE)),
            "scaling of the axes must have an entry for each of 3 axes, such as (None, "
            "NTK(factor=2.0), NTK(factor=2.0)) for three, got (NTK(factor=2.0), NTK(factor=2.0)); "
            "pass a single one to the Rope, as its scaling",
        ),
        (
            lambda: Sectioned((8, 24), base=(None, 1e4)),
            "base[0] must be a finite number > 1, got None",
        ),
        (
            lambda: Sectioned((8, 24), scaling=("ntk", None)),
            "scaling[0] of the axes must be a law of phasor.scaling (such as NTK(factor=2.0)), or "
            "None for an unscaled axis, got 'ntk'",
        ),
        (
            lambda: Axial(
                (8, 24), scaling=(None, DynamicNTK(factor=2.0, original_max_positions=64))
            ),
            "scaling[1] of the axes must be a law, got the rule DynamicNTK: a rule picks its law "
            "by the number of tokens, not by the size of an axis; pick the law with its .at(n)",
        ),
        (
            lambda: Axial((8, 24), scaling=(None, YARN)),
            "scaling[1] of the axes must not change the logits, but Yarn multiplies cos and sin by "
            "1.13863: a rotation has one factor for all axes; write attention_factor=1.0 here, and "
            "give gain=1.13863 to the rotation",
        ),
        (
            lambda: Axial(
                (8, 24), scaling=(None, replace(YARN, attention_factor=1.0, mscale_all_dim=1.0))
            ),
            "scaling[1] of the axes must not change the logits, but Yarn multiplies the softmax "
            "scale by 1.29648: write mscale_all_dim=0.0 here, and multiply the scale yourself",
        ),
        (
            lambda: Rope(head_dim=64, pairing="half", base=1e4, axes=ISSUE),
            "base of the axes replaces the Rope's base, but both are given: drop one of them; for "
            "a Rope that has base already, dataclasses.replace(rope, base=None, axes=...)",
        ),
        (
            lambda: Rope(head_dim=64, pairing="half", base=(256.0, 1e4), axes=Axial((16, 16))),
            "base of a Rope is for all axes, got (256.0, 10000.0); give one for each axis to the "
            "axes: phasor.axes.Axial(sections, base=...)",
        ),
        (
            lambda: replace(preset("flux.1-dev")[0], scaling=(None, TWICE, TWICE)),
            "scaling of a Rope is for all axes, got (None, NTK(factor=2.0), NTK(factor=2.0)); give "
            "one for each axis to the axes: phasor.axes.Axial(sections, scaling=...)",
        ),
        (
            lambda: Rope(
                head_dim=64,
                pairing="half",
                scaling=TWICE,
                axes=Axial((16, 16), scaling=(None, TWICE)),
            ),
            "scaling of the axes replaces the Rope's scaling, but both are given: drop one of "
            "them; for a Rope that has scaling already, dataclasses.replace(rope, scaling=None, "
            "axes=...)",
        ),
        (
            lambda: Rope(
                head_dim=8,
                pairing="half",
                explicit_inv_freq=(1.0,) * 4,
                axes=Axial((2, 2), base=(1e4, 100.0)),
            ),
            "base of the axes replaces the Rope's explicit_inv_freq, but both are given: drop one "
            "of them; for a Rope that has explicit_inv_freq already, dataclasses.replace(rope, "
            "explicit_inv_freq=None, axes=...)",
        ),
        (
            lambda: (
                Rope(
                    head_dim=8,
                    pairing="half",
                    axes=Axial((2, 2), scaling=(None, PerPair(factors=(2.0,) * 4))),
                ).inv_freq
            ),
            "scaling[1] of the axes: factors must hold one number per pair (2), got 4",
        ),
        (
            lambda: Rope.from_dict(
                preset("flux.1-dev")[0].to_dict()
                | {"axes": {"layout": "axial", "sections": [16, 48], "scaling": [None, {}]}}
            ),
            'axes.scaling[1] must be an object with the key "law", got {}',
        ),
    ],
)
def test_what_means_nothing_is_refused_with_the_way_out(build: Any, text: str) -> None:
    """The axis is named, and what to write instead."""
    with pytest.raises(SpecError) as caught:
        build()
    assert str(caught.value) == text
