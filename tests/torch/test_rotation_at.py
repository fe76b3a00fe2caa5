"""`Rotation.at`: cos and sin within the bound at every position, whoever computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor, vmap
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from phasor import PositionError, Rope, SpecError
from phasor.axes import Sectioned
from phasor.scaling import DynamicNTK
from phasor.torch import Rotation
from phasor.torch._operator import angles as _angles
from phasor.torch._operator import cpu
from phasor.torch.kv_cache import retune_

from .. import oracle, strategies
from ..oracle import exact_rows
from .torch_arrays import assert_rotated, normal, row_error

DTYPES = [torch.float32, torch.float64]
HALF = Rope(head_dim=16, pairing="half", base=500_000.0)
# the ends of int64 and of 32 bits, multiples of 2**32, and what no size of digit divides
FAR = torch.tensor(
    [0, -1, 2**31 - 1, 2**31, -(2**31), 2**32, -3 * 2**32, 2**63 - 1, -(2**63), -(2**62) + 12_345]
)


def assert_rows(rows: tuple[Tensor, Tensor], positions: Any, rope: Rope) -> None:
    """Both are within the bound of 60 digits."""
    expected = exact_rows(rope, positions)
    error = row_error(rows[0].dtype, positions)
    for made, true in zip(rows, (expected.real, expected.imag), strict=True):
        assert np.abs(made.double().numpy() - true).max() <= error


def cos_sin(
    positions: Any, rope: Rope, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Those of a rotation."""
    rotation = Rotation.at(positions, rope, gain=1.0, dtype=dtype)
    return rotation.cos, rotation.sin


def by_vmap(positions: Tensor, rope: Rope, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Token by token, without looking at one."""
    return vmap(lambda p: cos_sin(p, rope, dtype=dtype))(positions)


def by_aot_eager(positions: Tensor, rope: Rope, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As a graph."""
    torch._dynamo.reset()
    compiled = torch.compile(cos_sin, fullgraph=True, backend="aot_eager")
    return compiled(positions, rope, dtype=dtype)


def by_export(positions: Tensor, rope: Rope, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As a program."""

    class Rows(torch.nn.Module):
        """The function as a module."""

        def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
            """Cos and sin."""
            return cos_sin(positions, rope, dtype=dtype)

    return torch.export.export(Rows(), (positions,)).module()(positions)


def by_fx(positions: Tensor, rope: Rope, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Traced with tensors that have no values."""
    traced = make_fx(lambda p: cos_sin(p, rope, dtype=dtype), tracing_mode="fake")(positions)
    return traced(positions)


WAYS: dict[str, Callable[..., Any]] = {
    "at once": lambda positions, rope, dtype: cos_sin(positions, rope, dtype=dtype),
    "vmap": by_vmap,
    "aot_eager": by_aot_eager,
    "export": by_export,
    "make_fx": by_fx,
}


COMPILED = [pytest.param(way, marks=pytest.mark.compile) for way in ("aot_eager", "export")]


@pytest.mark.parametrize("way", ["at once", "vmap", "make_fx", *COMPILED])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_exact_to_the_ends_of_int64(way: str, dtype: torch.dtype) -> None:
    """Both ways, on one axis and on several."""
    for rope in (HALF, Rope(head_dim=16, pairing="half", direction=-1, base=77.0)):
        assert_rows(WAYS[way](FAR, rope, dtype), FAR, rope)
    video = Rope(head_dim=16, pairing="half", axes=Sectioned((4, 2, 2)))
    places = torch.stack((FAR, FAR.flip(0), -FAR), -1)
    assert_rows(WAYS[way](places, video, dtype), places, video)


@pytest.mark.parametrize("way", ["at once", "vmap", "make_fx"])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_floats_are_those_of_their_numbers(
    dtype: torch.dtype, kind: torch.dtype, way: str
) -> None:
    """Ties, traces, and floats beside the end of int64."""
    last = torch.nextafter(torch.tensor(2.0**63, dtype=kind), torch.tensor(0.0, dtype=kind))
    floats = torch.tensor([0.5, -0.5, 1.5, 1e-30, 1e9 + 0.25, 0.3, -(2.0**62)], dtype=kind)
    places = torch.cat((floats, last[None], -last[None]))
    assert_rows(WAYS[way](places, HALF, dtype), places, HALF)


@given(strategies.placed_ropes())
def test_rows_of_any_rope_are_exact_at_any_int64(placed: tuple[Rope, Any]) -> None:
    """Every law, layout, slice and direction."""
    rope, position = placed
    true = oracle.rows(rope, [position])
    for dtype in DTYPES:
        made = cos_sin(torch.tensor([position]), rope, dtype=dtype)
        for row, expected in zip(made, true, strict=True):
            assert np.abs(row.double().numpy() - expected).max() <= row_error(dtype, [position])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_depends_on_its_position_alone(dtype: torch.dtype) -> None:
    """Bit for bit, whoever is in the batch, and in which integers."""
    together = torch.stack(cos_sin(FAR, HALF, dtype=dtype), -1)
    for place, row in zip(FAR.tolist(), together, strict=True):
        assert torch.equal(torch.stack(cos_sin(place, HALF, dtype=dtype), -1), row)
    few = torch.arange(-100, 100)
    for kind in (torch.int32, torch.int16, torch.int8):
        pairs = zip(cos_sin(few.to(kind), HALF), cos_sin(few, HALF), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
def test_given_rows_rotate_like_positions(dtype: torch.dtype) -> None:
    """Within the same bound, and in any backend."""
    x = normal(2, len(FAR), 3, 16, dtype=dtype)
    width = torch.float64 if dtype == torch.float64 else torch.float32
    cos, sin = cos_sin(FAR, HALF, dtype=width)
    for backend in ("eager", *(["cpu"] if cpu.paths() else [])):
        y = Rotation(cos, sin, pairing="half")(x, backend=backend)
        assert_rotated(y, x, FAR.expand(2, -1), HALF)


def test_rows_are_made_of_numbers_and_arrays_too() -> None:
    """On torch's default device; a scalar is one row."""
    cos, sin = cos_sin([[1, 2, 3]], HALF)
    assert cos.shape == sin.shape == (1, 3, 8)
    assert cos.dtype == torch.float32
    assert cos_sin(np.float64(0.5), HALF, dtype=torch.float64)[0].shape == (8,)
    with torch.device("meta"):
        assert cos_sin([1, 2], HALF)[0].is_meta


REFUSED: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "a rule": (SpecError, r"use rope\.at\(seq_len\)$", lambda: cos_sin(
        [1], Rope(head_dim=4, pairing="half",
                  scaling=DynamicNTK(factor=2.0, original_max_positions=8)))),
    "no rope": (SpecError, "rope must be a phasor.Rope, got int", lambda: cos_sin([1], 7)),
    "16 bits": (SpecError, "dtype must be torch.float32 or torch.float64, got torch.bfloat16",
                lambda: cos_sin([1], HALF, dtype=torch.bfloat16)),
    "bools": (PositionError, "positions must be integers", lambda: cos_sin([True], HALF)),
    "NaN": (PositionError, "positions must be finite and below 2\\*\\*63, got nan",
            lambda: cos_sin([0.5, float("nan")], HALF)),
    "beyond": (PositionError, "got 9.22", lambda: cos_sin(2.0**63, HALF)),
    "no axes": (PositionError, "one coordinate per axis", lambda: cos_sin(
        [1, 2], Rope(head_dim=4, pairing="half", axes=Sectioned((1, 1))).__class__(
            head_dim=6, pairing="half", axes=Sectioned((1, 1, 1))))),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_rows_is_refused(what: str) -> None:
    """By name, with what came."""
    kind, text, call = REFUSED[what]
    with pytest.raises(kind, match=text):
        call()


def test_floats_without_an_angle_are_nan_where_nobody_can_look() -> None:
    """Inside a transformation; their neighbours are right."""
    places = torch.tensor([torch.nan, 2.0**63, -torch.inf, 7.5], dtype=torch.float64)
    rows = by_vmap(places, HALF, torch.float32)
    for row in rows:
        assert row.isnan().all(-1).tolist() == [True, True, True, False]
    assert_rows((rows[0][3:], rows[1][3:]), places[3:], HALF)


def test_rows_of_tensors_without_values_have_their_shape() -> None:
    """Under a fake mode, and constants made there are seen by nobody else."""
    rope = Rope(head_dim=16, pairing="half", base=31_415.0)
    with FakeTensorMode():
        cos, _ = cos_sin(torch.arange(5), rope)
    assert cos.shape == (5, 8)
    assert_rows(cos_sin(FAR, rope), FAR, rope)


@pytest.mark.parametrize("way", ["fake", *COMPILED])
def test_keys_are_retuned_in_graphs(way: str) -> None:
    """Compiled and exported with the numbers of the eager call; no value is asked for."""
    old, new = HALF, Rope(head_dim=16, pairing="half", base=10_000.0)
    keys = normal(1, len(FAR), 2, 16)
    expected = retune_(keys.clone(), FAR, old, new)

    class Retuned(torch.nn.Module):
        """The verb on a copy, as a module."""

        def forward(self, keys: Tensor, positions: Tensor) -> Tensor:
            """Keys for other frequencies."""
            return retune_(keys.clone(), positions, old, new)

    if way == "fake":
        with FakeTensorMode() as mode:
            made = Retuned()(mode.from_tensor(keys), mode.from_tensor(FAR))
        assert made.shape == keys.shape
        return
    if way == "export":
        run = torch.export.export(Retuned(), (keys, FAR)).module()
    else:
        torch._dynamo.reset()
        run = torch.compile(Retuned(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(keys, FAR), expected, rtol=0, atol=1e-6)


def test_a_ropes_constants_are_few_bytes() -> None:
    """At most 64 a pair, whatever is rotated, so that a rule may make a Rope for every length."""
    where = torch.device("cpu"), torch.int64, HALF.to_json()
    held = _angles._words_and_axis(*where)
    assert sum(row.nbytes for row in held) <= 64 * HALF.num_pairs
