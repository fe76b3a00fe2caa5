"""What doors say of defects beside their names, which are asked for in test_matrix.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from phasor import Rope, diff, identify, preset, verify
from phasor import numpy as core
from phasor.axes import Axial, Sectioned
from phasor.identification.report import NAMES
from phasor.scaling import DynamicNTK, Yarn

from .defects import (
    BASE,
    BESIDE,
    DEFECTS,
    MEANT,
    PLAIN,
    STEPS,
    WIDTH,
    planted,
    rotate,
    rotate_halves,
)


def right(name):
    """The function that the one with a defect was meant to be."""
    rope = MEANT.get(name, PLAIN)
    return lambda x, positions: core.rotate(x, positions, rope).astype(x.dtype)


@pytest.mark.parametrize("name", DEFECTS)
def test_two_functions_differ_by_the_same_name_whichever_comes_first(name):
    """And the sentence says which of the two it is about; a function agrees with itself."""
    for which in ("second", "first"):
        both = (right(name), planted(name))[:: 1 if which == "second" else -1]
        found = diff(*both, head_dim=WIDTH, context=4096)
        names = {cause.name for cause in found.causes}
        assert names == {name} | BESIDE.get(name, set()) - {"table-end-nan"}, str(found)
        assert {cause.sentence.split(":")[0] for cause in found.causes} == {f"The {which}"}
    assert diff(planted(name), planted(name), head_dim=WIDTH, context=4096) is None


def test_two_functions_with_a_defect_each_have_both_said_of_the_right_one():
    """What both do is no difference."""

    def late_by(offset, inner):
        return lambda x, positions: inner(x, positions + offset)

    late = late_by(1, lambda x, positions: rotate(x, positions, gain=1.25))
    found = diff(late, DEFECTS["clamped"], head_dim=WIDTH, context=4096)
    assert [(one.name, one.sentence.split(":")[0]) for one in found.causes] == [
        ("offset", "The first"), ("clamped", "The second"), ("factor", "The second"),
    ]  # fmt: skip
    assert "The second: Factor: 1 instead of 1.25." in str(found)
    both = [late_by(1, DEFECTS["clamped"]), late_by(1, DEFECTS["wrapped"])]
    names = [one.name for one in diff(*both, head_dim=WIDTH, context=4096).causes]
    assert names == ["clamped", "wrapped", "negative-wraps"]


@pytest.mark.parametrize("offset", [1, -1, 3])
@pytest.mark.parametrize("name", ["clamped", "table-end-identity", "table-end-zeros"])
def test_an_offset_does_not_hide_how_a_table_ends(name, offset):
    """Its last row is that of another position."""
    found = identify(lambda x, p: DEFECTS[name](x, p + offset), WIDTH)
    assert found.names() == {"offset", name}
    assert (found.position_offset, found.table_end) == (offset, 1000 - offset)


def test_two_mistakes_of_members_are_both_named_at_every_door():
    """Rows for interleaved pairs on halves, and a product that is added instead of subtracted."""

    def mixed(x, positions):
        angles = np.repeat(positions[..., None] * STEPS, 2, axis=-1)[:, :, None]
        first, second = np.split(x, 2, axis=-1)
        y = x * np.cos(angles) + np.concatenate([second, first], axis=-1) * np.sin(angles)
        return y.astype(x.dtype)

    names = {"one-sign", "interleaved-rows-on-halves"}
    assert identify(mixed, WIDTH).names() == names
    assert {cause.name for cause in diff(PLAIN, mixed, context=4096).causes} == names
    at = np.arange(300)
    x = np.random.default_rng(0).standard_normal((1, 300, 2, WIDTH)).astype(np.float32)
    (side,) = verify(PLAIN, {"positions": at, "q": x, "q_rotated": mixed(x, at[None])}).sides
    assert {change.name for change in side.changes} == names


def test_the_ropes_factor_is_compared_where_a_function_is():
    """Cos and sin of YaRN are to have it."""
    rope = replace(PLAIN, scaling=Yarn(factor=4.0, original_max_positions=4096))

    def scaled(gain):
        return lambda x, positions: rotate(x, positions, rope.inv_freq, gain)

    assert diff(rope, scaled(rope.attention_factor), context=4096) is None
    found = diff(rope, scaled(1.0), context=4096)
    assert ([cause.name for cause in found.causes], found.position) == (["factor-missing"], 0)


@pytest.mark.slow
def test_a_base_is_named_beside_inputs_that_are_written():
    """Which explains no turn."""

    def overwriting(x, positions):
        x[...] = rotate(x, positions, STEPS * np.linspace(1, 0.7, WIDTH // 2))
        return x

    names = [cause.name for cause in diff(PLAIN, overwriting, context=4096).causes]
    assert names == ["frequencies", "inputs-written"]


def test_the_rotation_without_a_defect_agrees_at_every_door():
    """Exact angles are no difference from phasor's own."""
    assert identify(rotate, WIDTH).names() == set()
    assert diff(PLAIN, rotate, context=4096) is None


def test_a_rounding_within_a_tolerance_that_was_given_is_an_agreement():
    """Without one it is a difference, though no two positions part."""

    def in_float32(x, positions):
        angles = np.float32(positions)[..., None] * np.float32(PLAIN.inv_freq)
        return rotate_halves(x, angles)

    found = diff(PLAIN, in_float32, context=4096)
    assert [cause.name for cause in found.causes] == ["angles-in-float32"]
    assert (found.position, found.size) == (None, None)
    assert "They agree wherever they were compared, positions 0 to 4095." in str(found)
    assert diff(PLAIN, in_float32, context=4096, tolerance=1e-3) is None


def test_a_mistake_that_the_rope_has_too_is_no_difference():
    """Clockwise pairs of a clockwise rope, and exponents over the head that are meant."""
    backwards = Rope(head_dim=WIDTH, pairing="half", base=BASE, direction=-1)
    assert diff(backwards, DEFECTS["direction"], context=4096) is None
    f = tuple((BASE ** (-(np.arange(WIDTH // 2) + 1) / (WIDTH // 2))).tolist())
    meant = Rope(head_dim=WIDTH, pairing="half", explicit_inv_freq=f)
    assert diff(meant, DEFECTS["index-from-one"], context=4096) is None


def test_every_defect_has_a_name_of_the_one_vocabulary():
    """A name of a dtype stands for all."""
    known = {name for names in NAMES.values() for name in names}
    generic = {name.rpartition("-in-")[0] for name in known if name.endswith("{dtype}")}
    assert all(name in known or name.rpartition("-in-")[0] in generic for name in DEFECTS)


@pytest.mark.slow
def test_a_table_that_ends_is_named_beside_a_law_that_is_missing():
    """Far beyond the positions that are looked at first, with float32 angles."""
    positions = np.arange(9000)
    x = np.random.default_rng(1).standard_normal((1, 9000, 1, 128)).astype(np.float32)
    f = (5e5 ** (-np.arange(64) / 64)).astype(np.float32)
    angles = np.float32(np.minimum(positions, 8191))[:, None] * f
    y = rotate_halves(x, angles[None])
    arrays = {"positions": positions, "q": x, "q_rotated": y}
    for name, expected in (
        ("llama-3.1-8b", ["clamped", "law-missing"]),
        ("llama-3-8b", ["clamped"]),
    ):
        found = verify(preset(name), arrays, dims="bshd")
        assert [change.name for change in found.sides[0].changes] == expected
        assert [one.name for one in found.sides[0].roundings] == ["angles-in-float32"]
        assert "from 8192 on every position is turned as 8191" in str(found)


@pytest.mark.parametrize("offset", [0, 3, -20])
@pytest.mark.parametrize("factor", [0.5, 2 / 3, 2.0])
@pytest.mark.parametrize("axes", [Sectioned((4, 6, 6)), Axial((4, 6, 6))])
def test_an_axis_that_is_scaled_is_named_at_every_door(axes, factor, offset):
    """Half positions of time, as of frames that are merged in pairs; a fraction has no decimals."""
    names = [*["offset"] * (offset != 0), "axis-scaled"]
    rope = Rope(head_dim=WIDTH, pairing="half", base=BASE, axes=axes)
    of_pair = np.array(axes.axis_of_pair(WIDTH // 2))
    f = rope.inv_freq * np.where(of_pair == 0, factor, 1.0)

    def turned(x, positions):
        return rotate_halves(x, (positions + offset)[..., of_pair] * f)

    found = identify(turned, WIDTH, n_axes=3)
    assert ([finding.name for finding in found.findings], found.base) == (names, BASE)
    assert f"Positions on axis 0 are multiplied by {factor:.15g}." in str(found)
    assert [cause.name for cause in diff(rope, turned, context=4096).causes] == names
    grid = np.array(
        [(20 + t, 20 + i, 20 + j) for t in range(6) for i in range(7) for j in range(8)]
    )
    x = np.random.default_rng(0).standard_normal((1, len(grid), 2, WIDTH)).astype(np.float32)
    y = np.float32(turned(x, grid[None]))
    (side,) = verify(rope, {"positions": grid, "q": x, "q_rotated": y}, dims="bshd").sides
    assert [change.name for change in side.changes] == names


@pytest.mark.parametrize("off", [-1, 1])
def test_a_length_one_token_off_is_named_by_verify(off):
    """Where the rope says the rule, and the recording its length."""
    rope = Rope(
        head_dim=WIDTH, pairing="half", base=BASE,
        scaling=DynamicNTK(factor=4.0, original_max_positions=512),
    )  # fmt: skip
    positions = np.arange(1200)
    x = np.random.default_rng(0).standard_normal((1, 1200, 2, WIDTH)).astype(np.float32)
    factor = 4.0 * (1200 + off) / 512 - 3.0
    base = BASE * factor ** (WIDTH / (WIDTH - 2))
    y = rotate(x, positions[None], base ** (-2 * np.arange(WIDTH // 2) / WIDTH))
    arrays = {"positions": positions, "q": x, "q_rotated": np.float32(y)}
    (side,) = verify(rope, arrays, dims="bshd").sides
    assert [change.name for change in side.changes] == ["length-off-by-one"]


def test_the_bar_of_verify_moves_with_the_numbers_that_are_looked_at():
    """Within a side, and to its end."""
    x = np.zeros((1, 30_000, 1, WIDTH), np.float32) + 1
    y = np.float32(rotate(x, np.arange(30_000)[None]))
    seen = []
    arrays = {"positions": np.arange(30_000), "q": x, "q_rotated": y}
    verify(PLAIN, arrays, progress=lambda done, total: seen.append((done, total)))
    assert len(seen) > 3
    assert seen == sorted(seen)
    assert seen[-1] == (x.size + y.size, x.size + y.size)


ODD_BELOW_0 = {
    "wrapped": (lambda p: p % 1000, {"wrapped", "negative-wraps"}),
    "negative-clamped": (lambda p: np.maximum(p, 0), {"negative-clamped"}),
}


@pytest.mark.parametrize("offset", [-2, -1, 1])
@pytest.mark.parametrize("name", ODD_BELOW_0)
def test_an_offset_is_one_offset_and_one_end_of_the_table_at_every_door(name, offset):
    """Positions below the offset are looked up at the other end, and nothing turns backwards."""
    rows, names = ODD_BELOW_0[name]

    def late(x, positions):
        return rotate(x, rows(positions + offset))

    found, compared = identify(late, WIDTH), diff(PLAIN, late, context=4096)
    assert (found.names(), found.position_offset) == ({"offset"} | names, offset)
    assert {cause.name for cause in compared.causes} == {"offset"} | names
    if offset > 0 and name != "wrapped":
        return  # no position of a recording is below 0
    at = np.arange(2100)
    x = np.random.default_rng(0).standard_normal((1, 2100, 2, WIDTH)).astype(np.float32)
    arrays = {"positions": at, "q": x, "q_rotated": np.float32(late(x, at[None]))}
    (side,) = verify(PLAIN, arrays, dims="bshd").sides
    assert [change.name for change in side.changes] == ["offset", name]
    for text in (str(found), str(compared), str(side)) if name == "wrapped" else ():
        assert f"Up to position {999 - offset} it turns; from {1000 - offset} on" in text
