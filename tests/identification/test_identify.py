"""How functions are called, what the report holds, and what it admits not to know."""

from __future__ import annotations

import json

import numpy as np
import pytest

from phasor import BackendError, Rope, SpecError, TensorError
from phasor.axes import Sectioned
from phasor.identification import diff, identify
from phasor.numpy import matrix, rotate
from phasor.scaling import NTK

ROPE = Rope(head_dim=16, pairing="half", base=500.0)


def reference(x, positions):
    """Tokens before heads."""
    return rotate(x, positions, ROPE)


def heads_first(x, positions):
    """Heads before tokens."""
    return rotate(x.swapaxes(1, 2), positions, ROPE).swapaxes(1, 2)


def rows(positions):
    """Full-width cos and sin of `ROPE`."""
    angles = np.tile(positions[..., None] * 500.0 ** (-np.arange(8) / 8), 2)
    return np.cos(angles), np.sin(angles)


def by_rows(x, cos, sin):
    """Heads before tokens."""
    first, second = np.split(x, 2, axis=-1)
    return x * cos[:, None] + np.concatenate([-second, first], -1) * sin[:, None]


class Module:
    """Positions by keyword only."""

    def forward(self, x, *, at):
        """Turn."""
        return reference(x, at)

    def __call__(self, *args, **kwargs):
        """As torch's modules do it."""
        return self.forward(*args, **kwargs)


WAYS = {
    "bshd": (reference, {}, "bshd"),
    "bhsd": (heads_first, {}, "bhsd"),
    "shd": (lambda x, p: rotate(_rank(x, 3), _rank(p, 1), ROPE), {}, "shd"),
    "hsd": (lambda x, p: rotate(_rank(x, 3).swapaxes(0, 1), _rank(p, 1), ROPE).swapaxes(0, 1), {},
            "hsd"),
    "sd": (lambda x, p: rotate(_rank(x, 2)[:, None], _rank(p, 1), ROPE)[:, 0], {}, "sd"),
    "q and k": (lambda q, k, p: (reference(q, p), reference(k, p)), {}, "bshd"),
    "no positions": (lambda x: reference(x, np.arange(x.shape[1])), {}, "bshd"),
    "no positions, no heads": (
        lambda x: rotate(_rank(x, 2)[:, None], np.arange(len(x)), ROPE)[:, 0], {}, "sd"),
    "a method": (Module().forward, {}, "bshd"),
    "a module": (Module(), {}, "bshd"),
    "rows": (by_rows, {"table": rows}, "bhsd"),
    "rows for both": (
        lambda q, k, cos, sin: (by_rows(q, cos, sin), by_rows(k, cos, sin)),
        {"table": rows},
        "bhsd",
    ),
    "rows as one": (lambda x, both: by_rows(x, *both), {"table": lambda x, p: rows(p)}, "bhsd"),
    "an offset": (
        lambda x, first: reference(x, first + np.arange(x.shape[1])),
        {"takes": "x offset"},
        "bshd",
    ),
    "positions first": (
        lambda p, q, k: (reference(q, p), reference(k, p)),
        {"takes": "positions q k"},
        "bshd",
    ),
}  # fmt: skip


def _rank(array, rank):
    if array.ndim != rank:
        raise ValueError(f"rank {rank} wanted")
    return array


@pytest.mark.parametrize("way", WAYS)
def test_a_function_is_called_as_it_wants(way):
    """Whatever it takes and in whatever order, the rope is the same."""
    function, options, dims = WAYS[way]
    found = identify(function, 16, dtype="float64", **options)
    assert found.rope == ROPE
    assert f" {dims} " in found.called
    assert found.names() <= {"table-end-raises"}


@pytest.mark.parametrize("dims", ["bshd", "bhsd"])
def test_the_dims_may_be_stated(dims):
    """And a wrong one is refused, with what was tried."""
    function = reference if dims == "bshd" else heads_first
    assert identify(function, 16, dims=dims, dtype="float64").rope == ROPE
    with pytest.raises(TensorError, match="no way to call function"):
        identify(function, 16, dims="bhsd" if dims == "bshd" else "bshd")


def test_any_order_of_coordinates_is_mapped():
    """Pairs that are neither halves nor interleaved are listed."""
    order = np.random.default_rng(5).permutation(16)

    def shuffled(x, positions):
        y = np.empty_like(x)
        y[..., order] = reference(x[..., order], positions)
        return y

    found = identify(shuffled, 16, dtype="float64")
    hidden = {frozenset((int(order[k]), int(order[k + 8]))) for k in range(8)}
    assert {frozenset(pair.read) for pair in found.pairs} == hidden
    assert (found.pairing, found.rope) == (None, None)


def test_a_map_of_more_than_pairs_is_said_to_be_one():
    """And how many coordinates it mixes."""
    rng = np.random.default_rng(0)
    q, _ = np.linalg.qr(rng.standard_normal((16, 16)))
    found = identify(lambda x, p: reference(x @ q, p), 16, dtype="float64")
    assert found.rope is None
    assert "mixes 16 coordinates" in str(found)


def test_what_does_nothing_has_no_pairs():
    """The identity is linear and turns nothing."""
    found = identify(lambda x, p: x + 0 * p[..., None, None], 16)
    assert (found.linear, found.rope) == (True, None)
    assert "nothing turns" in str(found)


def test_the_factor_of_a_law_is_measured():
    """And belongs beside the Rope."""
    found = identify(lambda x, p: 1.25 * reference(x, p), 16, dtype="float64")
    assert found.attention_factor == 1.25
    assert not found.keeps_norms
    assert found.error < 1e-12


def test_frequencies_carry_their_uncertainty():
    """What bfloat16 hides is within it."""
    import torch

    def rounded(x, positions):
        turned = rotate(x.double().numpy(), positions.numpy(), ROPE)
        return torch.from_numpy(turned).to(x.dtype)

    found = identify(rounded, 16, dtype="bfloat16")
    for k, pair in enumerate(found.pairs):
        assert abs(pair.inv_freq - 500.0 ** (-k / 8)) <= pair.uncertainty


def test_faster_than_half_a_turn_is_admitted():
    """Whole positions cannot tell 4 radians from 4 - 2 pi, and the report says so."""
    fast = Rope(head_dim=4, pairing="half", explicit_inv_freq=(4.0, 0.5))
    found = identify(lambda x, p: rotate(x, p, fast), 4, dtype="float64")
    assert found.names() == {"beyond-half-a-turn"}
    np.testing.assert_allclose(matrix(9, found.rope), matrix(9, fast), rtol=0, atol=1e-12)


def test_laws_that_say_the_same_are_all_named():
    """NTK-aware scaling is another base, and the other way round."""
    stretched = Rope(head_dim=64, pairing="half", base=10_000.0 * 57 ** (32 / 31))
    found = identify(lambda x, p: rotate(x, p, stretched), 64, dtype="float64")
    assert found.law == NTK(factor=57.0)
    (other,) = found.alternatives
    assert float(other.removeprefix("base ")) == pytest.approx(stretched.base, rel=1e-9)
    assert "same frequencies" in str(found)


def test_a_report_prints_as_its_note():
    """A few lines, however many pairs there are."""
    found = identify(lambda x, p: reference(x, p), 16, dtype="float64")
    assert "in 8 pairs (i, i + 8)" in str(found)
    assert len(str(found).splitlines()) < 10


def test_the_short_form_shows_slice_direction_and_axes():
    """Where they are not plain: different ropes look different in what is printed first."""
    sections = Sectioned((2, 3, 3))
    hidden = Rope(
        head_dim=20, pairing="half", rotary_start=4, rotary_dim=16, direction=-1, axes=sections
    )
    found = identify(lambda x, p: rotate(x, p, hidden), 20, dtype="float64", n_axes=3)
    assert "half pairs, 16 of 20 coordinates from 4 on, base 10000" in repr(found)
    assert "Sectioned axes of 2, 3, 3 pairs, clockwise" in repr(found)


def test_the_report_is_json():
    """All of it, findings by name, the Rope as it describes itself."""
    found = identify(lambda x, p: reference(x, np.minimum(p, 99)), 16)
    plain = json.loads(json.dumps(found.as_plain()))
    assert plain["table_end"] == 100
    assert plain["findings"][0]["name"] == "clamped"
    assert Rope.from_dict(plain["rope"]) == found.rope
    assert len(plain["pairs"]) == 8


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"takes": "y positions"}, SpecError, "takes must list"),
        ({"takes": "x cos sin"}, SpecError, "table"),
        ({"arrays": "cupy"}, SpecError, "arrays must be one of"),
        ({"dtype": "int8"}, SpecError, "dtype must be one of"),
        ({"dtype": "bfloat16", "arrays": "numpy"}, BackendError, "NumPy has no bfloat16"),
        ({"dims": "dshb"}, SpecError, "dims must be one of"),
        ({"n_axes": 0}, SpecError, "n_axes"),
    ],
)
def test_arguments_out_of_bounds_are_refused(options, error, says):
    """Naming the argument."""
    with pytest.raises(error, match=says):
        identify(reference, 16, **options)


@pytest.mark.parametrize(
    ("arrays", "says"),
    [("torch", r"pip install 'phasor-rope\[torch\]'"), ("jax", "pip install jax")],
)
def test_arrays_of_a_missing_library_name_what_installs_it(monkeypatch, arrays, says):
    """Phasor's extra where there is one."""

    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr("phasor.identification.calling.import_module", missing)
    with pytest.raises(BackendError, match=f"needs {arrays}, which is not installed: {says}"):
        identify(lambda x, positions: x, 16, arrays=arrays)


def test_a_function_that_always_raises_is_quoted():
    """Its own words are in the message."""

    def broken(x, positions):
        raise RuntimeError("out of coffee")

    with pytest.raises(TensorError, match="out of coffee"):
        identify(broken, 16)


@pytest.mark.slow
def test_two_rotations_part_where_one_is_off():
    """First position, pair, size, and what it does to a score."""
    other = Rope(head_dim=16, pairing="half", base=501.0)
    found = diff(ROPE, lambda x, p: rotate(x, p, other), tolerance=0.01)
    steps = [(500.0 ** (-k / 8), 501.0 ** (-k / 8)) for k in range(8)]
    apart = {
        p: max((2 * abs(np.sin(p * (a - b) / 2)), k) for k, (a, b) in enumerate(steps))
        for p in range(1, 200)
    }
    first = min(p for p, (size, _) in apart.items() if size > 0.01)
    assert (found.position, found.pair) == (first, apart[first][1])
    assert found.size == pytest.approx(apart[first][0], abs=1e-6)
    assert found.score == pytest.approx(found.size, abs=1e-6)


def test_rotations_that_agree_do_not_part():
    """Also when the Rope stands second."""
    assert diff(reference, ROPE, dtype="float64", tolerance=1e-9) is None


def test_a_refused_position_parts_them():
    """A table's end is where two functions stop agreeing."""
    table = np.arange(100)
    found = diff(ROPE, lambda x, p: reference(x, table[p]))
    assert found.position == 100
    assert "IndexError" in found.refused
    assert (found.size, found.score) == (None, None)


def test_what_is_not_finite_parts_them_by_no_number():
    """A table that ends in NaN: JSON has no number for how far that is."""

    def ending(x, positions):
        return np.where((positions < 100)[..., None, None], reference(x, positions), np.nan)

    found = diff(ROPE, ending)
    assert (found.position, found.size, found.score) == (100, None, None)
    plain = identify(lambda x, p: ending(x, np.where(p == 1023, 100, p % 100)), 16).as_plain()
    assert json.dumps(plain, allow_nan=False)


def test_heads_of_different_width_cannot_be_compared():
    """And the widths are named."""
    with pytest.raises(SpecError, match="the model's, 16, got 32"):
        diff(ROPE, reference, head_dim=32)
