"""Which coordinate drives which pair, against the layouts of published models."""

from __future__ import annotations

import importlib
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasor import PositionError, Rope, diff
from phasor.angles import cos_sin
from phasor.axes import (
    AXES,
    Alternating,
    Axes,
    Axial,
    InterleavedSections,
    Mixed,
    OneAxis,
    Sectioned,
)
from phasor.errors import SpecError

from . import oracle, strategies


def letters(axes: Axes, pairs: int) -> str:
    """The layout spelled out: T, H, W for axes 0, 1, 2."""
    return "".join("THW"[axis] for axis in axes.axis_of_pair(pairs))


@pytest.mark.parametrize(
    ("axes", "pairs", "spelled"),
    [
        pytest.param(OneAxis(), 64, "T" * 64, id="text"),
        pytest.param(
            Sectioned((16, 24, 24)), 64, "T" * 16 + "H" * 24 + "W" * 24, id="qwen2-vl-sectioned"
        ),
        pytest.param(
            InterleavedSections((24, 20, 20)), 64, "THW" * 20 + "TTTT", id="qwen3-vl-interleaved"
        ),
        pytest.param(
            InterleavedSections((11, 11, 10)),
            32,
            "THW" * 10 + "TH",
            id="qwen3.5-interleaved-partial",
        ),
        pytest.param(Alternating((20, 22, 22)), 64, "HW" * 22 + "T" * 20, id="ernie-4.5-vl"),
        pytest.param(Alternating((16, 24, 24)), 64, "HW" * 24 + "T" * 16, id="videorope"),
        pytest.param(Axial((8, 28, 28)), 64, "T" * 8 + "H" * 28 + "W" * 28, id="flux-axial"),
        pytest.param(Sectioned((0, 2, 2)), 4, "HHWW", id="an-axis-without-pairs"),
        pytest.param(InterleavedSections((2, 2)), 4, "THTH", id="two-axes-interleaved"),
    ],
)
def test_each_pair_follows_its_published_axis(axes: Axes, pairs: int, spelled: str) -> None:
    """As printed by their models, pair by pair."""
    assert letters(axes, pairs) == spelled
    assert oracle.axis_of_pair(axes, pairs) == ["THW".index(letter) for letter in spelled]


@given(st.data())
def test_any_layout_is_the_one_dealt_out_by_hand(data: st.DataObject) -> None:
    """Against an independent loop, and every section gets its count."""
    pairs = data.draw(st.integers(1, 40))
    axes = data.draw(strategies.axes(pairs).filter(lambda axes: not isinstance(axes, Mixed)))
    drawn = list(axes.axis_of_pair(pairs))
    assert drawn == oracle.axis_of_pair(axes, pairs)
    sections = getattr(axes, "sections", (pairs,))
    assert [drawn.count(axis) for axis in range(axes.n_axes)] == list(sections)


def test_a_pair_turns_by_the_coordinate_of_its_axis() -> None:
    """Only the pairs of an axis feel its coordinate, and each pair keeps its own frequency."""
    rope = Rope(head_dim=16, pairing="half", base=100.0, axes=InterleavedSections((3, 3, 2)))
    step = 100.0 ** (-np.arange(8) / 8)
    for axis, letter in enumerate("THW"):
        position = [0, 0, 0]
        position[axis] = 5
        cos, sin = cos_sin(position, rope)
        mine = np.array(list("THWTHWTH")) == letter
        np.testing.assert_allclose(cos, np.where(mine, np.cos(5 * step), 1), rtol=0, atol=2e-15)
        np.testing.assert_allclose(sin, np.where(mine, np.sin(5 * step), 0), rtol=0, atol=2e-15)


TEXT_COMPATIBLE = [
    Sectioned((16, 24, 24)),
    InterleavedSections((24, 20, 20)),
    Alternating((20, 22, 22)),
    Sectioned((40, 24)),
]


@pytest.mark.parametrize("axes", TEXT_COMPATIBLE, ids=repr)
@pytest.mark.parametrize("kind", ["integers", "floats"])
def test_equal_coordinates_are_text_to_the_last_bit(axes: Axes, kind: str) -> None:
    """A multimodal rope at t = h = w is exactly the rope of one axis."""
    rng = np.random.default_rng(1)
    text = np.concatenate(([0, 1, -1, 2**62, -(2**63)], rng.integers(-(2**63), 2**63 - 1, 50)))
    if kind == "floats":
        text = rng.uniform(-1e6, 1e6, 50)
    one = Rope(head_dim=128, pairing="half", base=5e5)
    several = Rope(head_dim=128, pairing="half", base=5e5, axes=axes)
    coordinates = np.repeat(text[:, None], axes.n_axes, axis=1)
    for got, expected in zip(cos_sin(coordinates, several), cos_sin(text, one), strict=True):
        assert got.tobytes() == expected.tobytes()


def test_axial_sections_each_have_a_whole_spectrum() -> None:
    """FLUX: axes_dim [16, 56, 56] restarts at 1 for every axis, over its own width."""
    rope = Rope(head_dim=128, pairing="interleaved", axes=Axial((8, 28, 28)))
    expected = [10000.0 ** (-2 * j / width) for width in (16, 56, 56) for j in range(width // 2)]
    np.testing.assert_allclose(rope.inv_freq, expected, rtol=4e-15, atol=0)
    assert rope.axes.spectra(64) == (8, 28, 28)


EXAMPLE = (
    "sections must be a pair count for each axis, such as {}((16, 24, 24)) where a head has 64 "
    "pairs, got {}"
)
ALTERNATING = "sections must be (time, height, width) with height equal to width, got "


@pytest.mark.parametrize("layout", [one for one in AXES.values() if one is not OneAxis])
def test_the_example_in_the_error_of_a_layout_is_one(layout: Any) -> None:
    """It can be copied: three axes for the 64 pairs of a head of 128."""
    with pytest.raises(SpecError) as caught:
        layout(2)
    (example,) = re.findall(r"such as (.*) where", str(caught.value))
    made = eval(example, {layout.__name__: layout})
    assert Rope(head_dim=128, pairing="half", axes=made).axes.n_axes == 3


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: Sectioned("16"), EXAMPLE.format("Sectioned", "'16'")),
        (lambda: Axial(64), EXAMPLE.format("Axial", "64")),
        (
            lambda: InterleavedSections([64]),
            "sections must name at least two axes, got [64]; one axis is OneAxis(), the default",
        ),
        (lambda: Sectioned((1, -1)), "sections[1] must be a whole number >= 0, got -1"),
        (lambda: Sectioned((1, 1.5)), "sections[1] must be a whole number >= 0, got 1.5"),
        (lambda: Alternating((1, 2, 3)), ALTERNATING + "[1, 2, 3]"),
        (lambda: Alternating((2, 2)), ALTERNATING + "[2, 2]"),
    ],
)
def test_sections_that_mean_nothing_are_refused(build: Any, text: str) -> None:
    """At construction, with the entry that is wrong."""
    with pytest.raises(SpecError) as caught:
        build()
    assert str(caught.value) == text


@pytest.mark.parametrize("kind", [Sectioned, Axial, Alternating])
def test_sections_must_add_up_to_the_pairs(kind: Any) -> None:
    """A section in coordinates instead of pairs is the usual slip."""
    text = (
        r"^sections \[4, 2, 2\] must add up to the number of pairs \(rotary_dim / 2 = 16\), got 8$"
    )
    with pytest.raises(SpecError, match=text):
        Rope(head_dim=32, pairing="half", axes=kind((4, 2, 2)))
    with pytest.raises(SpecError, match=text):
        kind((4, 2, 2)).spectra(16) if kind is Axial else kind((4, 2, 2)).axis_of_pair(16)


@pytest.mark.parametrize(
    ("sections", "spelled"),
    [
        ((16, 24, 24), "THW" * 21 + "T"),
        ((16, 16, 16), "THW" * 16 + "T" * 16),
        ((4, 6, 2), "THW" * 2 + "THT" * 4 + "T" * 46),
        ((0, 99, 3), "THW" * 3 + "THT" * 18 + "T"),
    ],
    ids=str,
)
def test_sections_dealt_out_in_turn_need_not_add_up(sections: Any, spelled: str) -> None:
    """As in Qwen3-VL: height and width take their turns while they may and there are pairs, time
    has the rest.
    """
    assert letters(InterleavedSections(sections), 64) == spelled


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize(
    "sections",
    [(24, 20, 20), (16, 24, 24), (16, 16, 16), (4, 6, 2), (1, 31, 32), (0, 99, 3)],
    ids=str,
)
def test_transformers_deals_them_out_alike(family: str, sections: tuple[int, ...]) -> None:
    """Its own function, given the number of the axis instead of every angle."""
    torch = importlib.import_module("torch")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    kind = next(
        found for name, found in vars(module).items()
        if name.endswith("TextRotaryEmbedding")
    )  # fmt: skip
    for pairs in (8, 32, 64, 127):
        axis = torch.arange(3.0).reshape(3, 1, 1, 1).expand(3, 1, 1, pairs)
        embedding = SimpleNamespace(mrope_section=sections)
        theirs = kind.recomposition_frequencies(embedding, axis.clone())[0, 0, :pairs]
        assert theirs.tolist() == list(InterleavedSections(sections).axis_of_pair(pairs))


def test_sections_that_do_the_same_do_not_differ() -> None:
    """However they are said, `diff` finds no field and no pair apart."""
    one, two = (
        Rope(head_dim=128, pairing="half", axes=InterleavedSections(sections))
        for sections in ((16, 24, 24), (22, 21, 21))
    )
    assert not diff(one, two)
    assert diff(one, Rope(head_dim=128, pairing="half", axes=InterleavedSections((24, 20, 20))))


@pytest.mark.parametrize("positions", [5, [0, 1, 2, 3], np.zeros((7, 2), int)], ids=str)
def test_positions_without_an_axis_dimension_are_refused(positions: Any) -> None:
    """Text positions are not spread over the axes behind a caller's back."""
    rope = Rope(head_dim=16, pairing="half", axes=Sectioned((4, 2, 2)))
    with pytest.raises(PositionError) as caught:
        cos_sin(positions, rope)
    assert str(caught.value) == (
        "positions must end in one coordinate per axis (3) for Sectioned axes, got shape "
        f"{list(np.shape(positions))}; phasor.positions.every_axis repeats text positions"
    )


def test_layouts_are_values() -> None:
    """Equal sections make equal, hashable layouts, from lists and tuples alike."""
    assert Sectioned([1, 2, 1]) == Sectioned((1, 2, 1))
    assert len({Sectioned((1, 2, 1)), Sectioned([1, 2, 1]), InterleavedSections((1, 2, 1))}) == 2
