"""What verify and diff name: every difference that there is, by its cause."""

from dataclasses import replace

import numpy as np
import pytest
from tests import oracle
from tests.verify.programs import OTHER, ROPE, names, rotate, rounded, stored, turn_as

from phasor import Rope, diff, verify
from phasor.axes import Axial
from phasor.identification import search
from phasor.scaling import DynamicNTK, Linear, Llama3, LongRope, Yarn


def test_diff_names_axes_that_a_function_exchanges():
    """Which positions of text, equal on all axes, do not show."""
    planes = Rope(head_dim=64, pairing="half", axes=Axial((16, 16)))

    def exchanged(x, positions):
        pairs = zip(np.asarray(x, np.float64), positions[:, ::-1].tolist(), strict=True)
        return np.float32(np.stack([oracle.turned(head, place, planes) for head, place in pairs]))

    found = diff(planes, exchanged)
    assert [cause.sentence for cause in found.causes] == [
        "Axes: coordinates (1, 0) are taken as (0, 1)."
    ]
    assert (found.position, found.axis) == (1, 0)
    assert "at position 1 on axis 0, 0 on the others" in str(found)


YARN = Rope(
    head_dim=64, pairing="interleaved", base=500_000.0,
    scaling=Yarn(factor=4.0, original_max_positions=4096),
)  # fmt: skip
BASE = Rope(head_dim=64, pairing="half", base=123_456.0)
LINEAR = Rope(
    head_dim=64, pairing="half", base=1e6, rotary_dim=24, scaling=Linear(factor=8.0)
)  # fmt: skip
CUT = np.concatenate([np.arange(40), np.arange(60)])
# a rope, what is done in its place, at which positions, with which factor; the names and a dtype
NAMED = {
    "an offset and a restart": (ROPE, ROPE, CUT + 1, 1, "offset restart", "float32"),
    "an offset, far away": (ROPE, ROPE, np.arange(100) + 1000, 1, "offset", "float32"),
    "a base that nobody uses": (ROPE, BASE, np.arange(100), 1, "base", "bfloat16"),
    "and from few numbers": (ROPE, BASE, np.arange(300), 1, "base", "float16"),
    "such a base and a restart": (ROPE, replace(ROPE, base=20_000.0), CUT, 1, "restart base",
                                  "float64"),
    "and where few tokens of few numbers tell it": (
        LINEAR, replace(LINEAR, base=7_777.0), np.concatenate([np.arange(11), np.arange(89)]), 1,
        "restart base", "float16"),
    "half of the head by another base": (
        OTHER, replace(OTHER, rotary_dim=32, base=123_456.0), np.arange(100), 1, "slice base",
        "float32"),
    "half of the head without its factor": (
        YARN, replace(YARN, rotary_dim=32), np.arange(100), 1.0, "slice factor-missing", "float64"),
}  # fmt: skip


# how the search for a number ends; that it is one is found in test_random.py every day
SEARCHED = {
    *("a base that nobody uses", "and from few numbers", "such a base and a restart"),
    *("half of the head by another base", "half of the head without its factor"),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(one, marks=[pytest.mark.slow] if one in SEARCHED else []) for one in NAMED],
)
def test_differences_are_named_all_of_them_and_by_their_causes(case):
    """And not by what follows from them."""
    rope, done, at, gain, expected, dtype = NAMED[case]
    places = np.arange(len(at))
    x = rounded(np.random.default_rng(3).standard_normal((len(at), 2, 64)), dtype)
    y = rotate(x, at, done, dtype, gain=gain)
    found = verify(
        rope, {"positions": places, "q": stored(x, dtype), "q_rotated": stored(y, dtype)}
    )
    assert names(found) == expected.split(), str(found)


@pytest.mark.parametrize("dtype", ["float64", "float16"])
@pytest.mark.parametrize(("offset", "names_of_it"), [(0, ["base"]), (2, ["offset", "base"])])
def test_a_base_that_nobody_uses_is_measured_on_several_axes(dtype, offset, names_of_it):
    """Of pairs that follow different coordinates."""
    planes = Rope(head_dim=64, pairing="half", axes=Axial((16, 16)))
    random = np.random.default_rng(3)
    places = random.integers(0, 30, (100, 2))
    x = rounded(random.standard_normal((100, 2, 64)), dtype)
    y = rotate(x, places + offset, replace(planes, base=54_300.0), dtype)
    arrays = {"positions": places, "q": stored(x, dtype), "q_rotated": stored(y, dtype)}
    found = verify(planes, arrays)
    (change,) = (one for one in found.sides[0].changes if one.name == "base")
    assert change.sentence == "Base: 54300 instead of 10000."
    assert names(found) == names_of_it


MISTAKES = {
    "pairing": (OTHER, 0), "offset": (ROPE, 1),
    "slice": (Rope(head_dim=64, pairing="half", base=10_000.0, rotary_dim=32), 0),
    "direction": (Rope(head_dim=64, pairing="half", base=10_000.0, direction=-1), 0),
    "base": (Rope(head_dim=64, pairing="half", base=500_000.0), 0),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_diff_names_what_a_function_does_otherwise(mistake):
    """Diff names what a function does otherwise."""
    found = diff(ROPE, turn_as(*MISTAKES[mistake]))
    assert [cause.name for cause in found.causes] == [mistake]
    assert found.lines()[0] == found.causes[0].sentence
    assert found.as_plain()["causes"]


def test_another_base_without_the_laws_factor_is_named_by_both() -> None:
    """Not as another parameter of the law."""
    meant = Rope(head_dim=32, pairing="half", scaling=Yarn(factor=4.0, original_max_positions=4096))
    positions = np.arange(64)
    q = np.random.default_rng(5).standard_normal((64, 2, 32))
    rotated = rotate(q, positions, replace(meant, base=20_000.0), "float64", gain=1.0)
    found = verify(meant, {"positions": positions, "q": q, "q_rotated": rotated})
    assert [change.name for change in found.sides[0].changes] == ["base", "factor-missing"]


PLAIN = replace(YARN, scaling=None)
FACTORS = {
    "the law is missing and its factor is not": (YARN, PLAIN, YARN.attention_factor, "law-missing"),
    "a law without its factor, where none is meant": (PLAIN, YARN, 1.0, "law"),
    "another factor of the law alone": (
        YARN, replace(YARN, scaling=replace(YARN.scaling, factor=8.0)), YARN.attention_factor,
        "law-parameter"),
    "a law is missing, and cos and sin have another factor": (
        YARN, PLAIN, 1.5, "law-missing factor"),
}  # fmt: skip


@pytest.mark.parametrize("case", FACTORS)
def test_a_factor_is_compared_with_the_one_that_was_meant(case):
    """Not with that of the law that was found."""
    meant, done, gain, expected = FACTORS[case]
    positions, x = np.arange(200), np.random.default_rng(0).standard_normal((200, 2, 64))
    y = rotate(x, positions, done, "float64", gain=gain)
    found = verify(meant, {"positions": positions, "q": x, "q_rotated": y})
    assert names(found) == expected.split(), str(found)
    assert "instead of 1.138629" in str(found) or "Factor" not in str(found)


@pytest.mark.slow
def test_vectors_of_float64_are_turned_by_float32_rows_in_transformers():
    """Its angles, cos and sin are float32 whatever vectors are; which hides no difference."""
    positions, x = np.arange(300) + 5000, np.random.default_rng(0).standard_normal((300, 2, 64))
    arrays = {"positions": positions, "q": x}
    for done, expected in ((ROPE, []), (BASE, ["base"])):
        frequencies = np.float32([float(f) for f in oracle.frequencies(done)])
        angles = np.float32(positions)[:, None] * frequencies
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        first, second = x[..., :32], x[..., 32:]
        y = np.concatenate([first * cos - second * sin, first * sin + second * cos], -1)
        assert names(verify(ROPE, arrays | {"q_rotated": y})) == expected


@pytest.mark.slow
def test_a_base_of_any_digits_is_found_in_float64_where_no_positions_are_neighbours():
    """As in float32."""
    positions, rope = np.arange(0, 70_000, 100), replace(ROPE, base=917_198.0)
    x = np.random.default_rng(0).standard_normal((700, 2, 64))
    y = rotate(x, positions, rope, "float64")
    found = verify(replace(ROPE, base=1e6), {"positions": positions, "q": x, "q_rotated": y})
    assert names(found) == ["base"]
    assert "Base: 917198 instead" in str(found)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_angles_that_alone_are_rounded_are_named(dtype):
    """Those of float32 may be rounded to either side of a tie."""
    positions, x = np.arange(3000), np.random.default_rng(0).standard_normal((3000, 2, 64))
    frequencies = np.float32([float(f) for f in oracle.frequencies(BASE)])
    angles = rounded(np.float32(positions)[:, None] * frequencies, dtype)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = np.float32(x[..., :32]), np.float32(x[..., 32:])
    y = np.concatenate([first * cos - second * sin, first * sin + second * cos], -1)
    found = verify(BASE, {"positions": positions, "q": np.float32(x), "q_rotated": np.float32(y)})
    assert [change.sentence for change in found.sides[0].changes] == [
        f"Angles are rounded to {dtype}."
    ]


def test_dynamic_ntk_by_the_table_of_vllm_is_another_length():
    """Which is as many times the original one as the factor says, whatever the prompt's is."""
    dynamic = replace(ROPE, scaling=DynamicNTK(factor=2.5, original_max_positions=1024))
    positions, x = np.arange(300), np.random.default_rng(0).standard_normal((300, 2, 64))
    y = rotate(x, positions, dynamic.at(2560), "float64")
    found = verify(dynamic, {"positions": positions, "q": x, "q_rotated": y})
    assert [change.sentence for change in found.sides[0].changes] == [
        "Length: its frequencies are chosen as for a length of 2560."
    ]


LLAMA = replace(BASE, scaling=Llama3(factor=8.0, original_max_positions=2048))
FACTORS_OF_LAWS = {
    "of a linear law": (BASE, replace(BASE, scaling=Linear(factor=3.0)), "Linear(factor=3.0) in"),
    "of the law": (LLAMA, replace(LLAMA, scaling=replace(LLAMA.scaling, factor=10.0)),
                   "Llama3 with factor 10 instead of 8."),
    "of a law with a factor of cos": (
        YARN, replace(YARN, scaling=replace(YARN.scaling, factor=2.5)),
        "Yarn with factor 2.5 instead of 4."),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", FACTORS_OF_LAWS)
def test_a_factor_that_nobody_uses_is_found_in_bfloat16(case):
    """As a base is."""
    meant, done, expected = FACTORS_OF_LAWS[case]
    positions = np.arange(3000)
    x = rounded(np.random.default_rng(0).standard_normal((3000, 2, 64)), "bfloat16")
    arrays = {"positions": positions, "q": stored(x, "bfloat16")}
    y = rotate(x, positions, done, "bfloat16")
    found = verify(meant, arrays | {"q_rotated": stored(y, "bfloat16")})
    assert len(names(found)) == 1
    assert f"Law: {expected}" in str(found)


@pytest.mark.slow
def test_of_lengths_that_all_fit_a_round_one_is_named():
    """Round in powers of two, as 40960 is and 40000 is not."""
    meant = Rope(
        head_dim=128, pairing="half", base=1e6,
        scaling=Yarn(factor=4.0, original_max_positions=32768),
    )  # fmt: skip
    done = replace(meant, scaling=replace(meant.scaling, original_max_positions=40960))
    positions, x = np.arange(600), np.random.default_rng(0).standard_normal((600, 2, 128))
    y = rotate(x, positions, done, "float64")
    found = verify(meant, {"positions": positions, "q": x, "q_rotated": y})
    assert "Law: Yarn with original_max_positions 40960 instead of 32768." in str(found)


def test_a_rule_that_is_not_applied_has_its_own_name():
    """Not that of the law that it chose."""
    lists = {"short_factors": (1.5,) * 32, "long_factors": (4.0,) * 32}
    meant = replace(ROPE, scaling=LongRope(original_max_positions=4096, factor=1.0, **lists))
    positions, x = np.arange(200), np.random.default_rng(0).standard_normal((200, 2, 64))
    for done in (ROPE, BASE, replace(ROPE, direction=-1)):
        y = rotate(x, positions, done, "float64")
        found = verify(meant, {"positions": positions, "q": x, "q_rotated": y})
        assert "Law: LongRope is not applied" in str(found)


def test_pairs_that_explain_all_are_found_before_other_frequencies_are_tried(monkeypatch):
    """Which takes longer, and would be one difference more."""
    monkeypatch.setattr(search, "other_ropes", None)
    meant = Rope(head_dim=128, pairing="half", rotary_dim=32)
    x = np.random.default_rng(0).standard_normal((100, 2, 128))
    done = replace(meant, rotary_dim=64, pairing="interleaved")
    y = rotate(x, np.arange(100), done, "float64")
    found = verify(meant, {"positions": np.arange(100), "q": x, "q_rotated": y})
    assert names(found) == ["pairing", "slice"]


@pytest.mark.parametrize(("factor", "name"), [(1.0, []), (2.0, ["twice"]), (1.37, ["frequencies"])])
def test_one_pair_is_told_what_can_be_told(factor, name):
    """Laws that need two pairs are none of it, and no head is narrower."""
    rope, positions = Rope(head_dim=2, pairing="half", base=10_000.0), np.arange(20)
    x = np.random.default_rng(0).standard_normal((20, 1, 2))
    y = rotate(x, factor * positions, rope, "float64")
    assert names(verify(rope, {"positions": positions, "q": x, "q_rotated": y})) == name
