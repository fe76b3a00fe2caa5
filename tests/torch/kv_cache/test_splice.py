"""Keys that close a gap or make room are the keys of their tokens, numbered anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from phasor import Rope
from phasor.torch import rotate
from phasor.torch.splice import evict, insert

from ..torch_oracle import ROW_ERROR_64, excess_by, normal
from .turned_keys import LAYOUTS, turns


def assert_fresh(keys: Tensor, raw: Tensor, at: Any, rope: Rope) -> None:
    """Float64 keys are ``raw`` rotated to ``at``, up to two rotations."""
    at = torch.as_tensor(at).expand(*raw.shape[:-2], *([] if rope.axes.n_axes == 1 else [-1]))
    error = 8 * (ROW_ERROR_64 + 4 * 2**-52)
    pairing = (rope.pairing, rope.output_pairing)
    worst = excess_by(keys, raw, turns(rope, at), pairing, rope.rotary_start, error=error)
    assert worst <= 1


@pytest.mark.parametrize("name", ["half", "written in another pairing", "a slice", "clockwise"])
@pytest.mark.parametrize(("start", "stop"), [(0, 3), (2, 5), (5, 9), (4, 4), (0, 9)])
def test_later_keys_close_the_gap(name: str, start: int, stop: int) -> None:
    """Keys are those of the tokens that stay, numbered anew; values are their own."""
    rope = LAYOUTS[name]
    raw, v = normal(2, 9, 3, 8, dtype=torch.float64), normal(2, 9, 3, 5, seed=1)
    given_keys = rotate(raw, torch.arange(9), rope)
    before = given_keys.clone(), v.clone()
    keys, values = evict(given_keys, v, start, stop, rope)
    stay = [i for i in range(9) if not start <= i < stop]
    assert_fresh(keys, raw[:, stay], torch.arange(len(stay)), rope)
    assert torch.equal(values, v[:, stay])
    assert torch.equal(given_keys, before[0])
    assert torch.equal(v, before[1])


@pytest.mark.parametrize("at", [0, 2, 6])
def test_later_keys_make_room(at: int) -> None:
    """What is put in was encoded from position 0; at the end, two caches are merged."""
    rope = LAYOUTS["written in another pairing"]
    raw, v = normal(2, 9, 3, 8, dtype=torch.float64), normal(2, 9, 3, 5, seed=1)
    old, new = [*range(at), *range(at + 3, 9)], list(range(at, at + 3))
    keys, values = insert(
        rotate(raw[:, old], torch.arange(6), rope), v[:, old], at,
        rotate(raw[:, new], torch.arange(3), rope), v[:, new], rope,
    )  # fmt: skip
    assert_fresh(keys, raw, torch.arange(9), rope)
    assert torch.equal(values, v)


def test_several_axes_close_the_gap_that_is_named() -> None:
    """An image of 2 x 2 cells took two positions, not four."""
    rope = LAYOUTS["sectioned"]
    raw = normal(8, 2, 8, dtype=torch.float64)
    image = [[2, 2, 2], [2, 2, 3], [2, 3, 2], [2, 3, 3]]
    at = torch.tensor([[0] * 3, [1] * 3, *image, [4] * 3, [5] * 3])
    keys, _ = evict(rotate(raw, at, rope), raw, 2, 6, rope, gap=[2, 2, 2])
    assert_fresh(keys, raw[[0, 1, 6, 7]], [[i] * 3 for i in range(4)], rope)


def test_several_axes_make_the_room_that_is_named() -> None:
    """The image again, put back."""
    rope = LAYOUTS["sectioned"]
    raw = normal(6, 2, 8, dtype=torch.float64)
    image = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1]])
    text, middle = torch.tensor([[0] * 3, [1] * 3]), raw[1:5]
    held = rotate(raw[[0, 5]], text, rope)
    seen = rotate(middle, image, rope)
    keys, _ = insert(
        held, raw[[0, 5]], 1, seen, middle, rope, offset=(1, 1, 1), gap=(2, 2, 2)
    )  # fmt: skip
    assert_fresh(keys, raw, torch.cat([text[:1], image + 1, text[1:] + 2]), rope)


def test_keys_that_nothing_rotates_are_cut_alone() -> None:
    """Of a layer without positions."""
    raw = normal(5, 2, 8)
    keys, values = evict(raw, raw, 1, 3, None)
    assert torch.equal(keys, raw[[0, 3, 4]])
    again, _ = insert(keys, values, 1, raw[1:3], raw[1:3], None)
    assert torch.equal(again, raw)
