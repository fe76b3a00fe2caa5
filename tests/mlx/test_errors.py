"""What MLX's functions refuse, they refuse in the words of torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch

import phasor.torch
from phasor import Rope
from phasor.errors import PhasorError, PositionError, SpecError, TensorError
from phasor.mlx import RotaryEmbedding, Rotation, rotate, rotate_qk

from ..rotation_cases import RULE, THREE

HALF = Rope(head_dim=8, pairing="half")
SHARED: dict[str, tuple[tuple[int, ...], Any, Any, dict[str, Any]]] = {
    "a rule": ((2, 1, 8), 0, RULE, {}),
    "a model": ((2, 1, 8), 0, phasor.preset("llama-3-8b"), {}),
    "no rope": ((2, 1, 8), 0, "llama", {}),
    "another width": ((2, 1, 6), 0, HALF, {}),
    "no heads": ((2, 8), 0, HALF, {}),
    "tokens that do not fit": ((2, 3, 1, 8), [0, 1], HALF, {}),
    "tokens of the other layout": ((3, 2, 8), [0, 1], HALF, {}),
    "heads that come first": ((3, 2, 8), [0, 1, 2], HALF, {"heads_first": True}),
    "missing axes": ((2, 1, 8), [0, 1], THREE, {}),
    "axes first": ((2, 1, 8), [[0, 1]] * 3, THREE, {}),
    "an inverse that is none": ((2, 1, 8), 0, HALF, {"inverse": 1}),
    "a layout that is none": ((2, 1, 8), 0, HALF, {"heads_first": "yes"}),
    "a gain that is none": ((2, 1, 8), 0, HALF, {"gain": "1"}),
    "a gain without end": ((2, 1, 8), 0, HALF, {"gain": float("inf")}),
}


def said(call: Callable[[], object]) -> tuple[type, str]:
    """The error of a call, and its words."""
    with pytest.raises(PhasorError) as caught:
        call()
    return type(caught.value), str(caught.value)


@pytest.mark.parametrize("name", SHARED)
def test_what_both_refuse_they_refuse_alike(name: str) -> None:
    """Ropes, shapes, positions and options."""
    shape, places, rope, options = SHARED[name]
    places = np.array(places)
    for turn, of_torch in ((rotate, phasor.torch.rotate), (rotate_qk, phasor.torch.rotate_qk)):
        count = 1 if turn is rotate else 2
        ours = said(lambda: turn(*[mx.zeros(shape)] * count, places, rope, **options))  # noqa: B023
        theirs = said(lambda: of_torch(*[torch.zeros(shape)] * count, places, rope, **options))  # noqa: B023
        assert ours == theirs


def test_a_query_and_a_key_share_their_tokens() -> None:
    """The advice is to rotate them one by one."""
    q, k = mx.zeros((2, 3, 8)), mx.zeros((5, 3, 8))
    with pytest.raises(
        TensorError, match=r"q and k must share their tokens.*pass heads_first=True"
    ):
        rotate_qk(q, k, 0, HALF)


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (np.zeros((2, 1, 8), np.float32), r"x must be an mlx\.core\.array, got ndarray"),
        (
            mx.zeros((2, 1, 8), mx.int32),
            "x must be float32, bfloat16 or float16, got mlx.core.int32",
        ),
        (mx.zeros((2, 1, 8), mx.float64), "or float16, got mlx.core.float64"),
    ],
)
def test_what_is_rotated_is_an_array_of_mlx(x: Any, text: str) -> None:
    """No other array is converted, and float64 is not computed."""
    with pytest.raises(TensorError, match=text):
        rotate(x, 0, HALF)
    with pytest.raises(TensorError, match=text):
        RotaryEmbedding(HALF)(x)


@pytest.mark.parametrize(
    ("positions", "text"),
    [
        (2**63, r"must be below 2\*\*63"),
        (-(2**63) - 1, "some are not integers or floats of at most 64 bits"),
        (np.array([2**63], np.uint64), r"must be below 2\*\*63"),
        (mx.array(np.array([2**63], np.uint64)), "it holds numbers above int64; cast to int64"),
        ([True, False], "this is a mask"),
        (mx.array([True, False]), "this is a mask"),
        (mx.array([1.0, 2.0], mx.bfloat16), "bfloat16 cannot tell 256 from 257"),
        (np.array([1.0, 2.0], np.float16), "float16 cannot tell 2048 from 2049"),
        (mx.array([1j]), "a position is a real number"),
        ("1", "must be integers, float32 or float64"),
    ],
)
def test_positions_that_would_be_cut_are_refused(positions: Any, text: str) -> None:
    """Before MLX converts them; by all functions alike."""
    for call in (lambda: rotate(mx.zeros((2, 1, 8)), positions, HALF),
                 lambda: Rotation.at(positions, HALF)):  # fmt: skip
        with pytest.raises(PositionError, match=text):
            call()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"offset": 1.5}, PositionError, "offset must be a whole number"),
        ({"offset": 2**63 - 1}, PositionError, "offset must be a whole number"),
        (
            {"offset": mx.array(1.5)},
            PositionError,
            "offset must be .*got mlx.core.float32; pass frac",
        ),
        ({"offset": mx.array([1, 2, 3])}, PositionError, "positions must broadcast"),
        ({"offset": 3, "positions": [0, 1]}, PositionError, "exclude each other"),
    ],
)
def test_the_module_refuses_offsets(
    options: dict[str, Any], error: type[PhasorError], text: str
) -> None:
    """Those that are no whole numbers, leave int64, or are beside positions."""
    with pytest.raises(error, match=text):
        RotaryEmbedding(HALF)(mx.zeros((2, 4, 2, 8)), **options)


def test_the_module_refuses_what_it_cannot_count() -> None:
    """A rule, several axes without positions, and a gain that is no number."""
    with pytest.raises(SpecError, match=r"rope\.at\(seq_len\)"):
        RotaryEmbedding(RULE)
    with pytest.raises(SpecError, match="gain must be"):
        RotaryEmbedding(HALF, gain="1")  # pyright: ignore[reportArgumentType]
    with pytest.raises(PositionError, match="positions must be given for a Rope of 3 axes"):
        RotaryEmbedding(THREE)(mx.zeros((1, 2, 8)))
