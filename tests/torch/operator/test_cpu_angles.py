"""The CPU kernel's cos and sin: within the bound at every int64 position, and the same bits."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from phasor import Rope
from phasor.angles import COS_SIN_ERROR, COS_SIN_ERROR_FLOAT32, FLOAT32, FLOAT64, Polynomials
from phasor.axes import Axial, InterleavedSections
from phasor.torch import rotate
from phasor.torch._operator import cpu

from ...oracle import exact_rows
from ..torch_arrays import float64, run_on

# without a compiler there is nothing to test; CI has one
pytestmark = pytest.mark.skipif(
    not cpu.paths() and "CI" not in os.environ, reason="the kernel is not built"
)
HEADER = Path(__file__).resolve().parents[3] / "csrc" / "angles.h"
BOUNDS = {torch.float32: COS_SIN_ERROR_FLOAT32, torch.float64: COS_SIN_ERROR}
# where limbs, signs and quarter turns end
EDGES = [0, 1, -1, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**32, -3 * 2**32, 2**62, -(2**62),
         2**63 - 1, -(2**63), -(2**63) + 1]  # fmt: skip
ROPES = {
    "half": Rope(head_dim=76, pairing="half"),
    "backwards": Rope(head_dim=64, pairing="half", base=5e5, direction=-1),
    "nearly still": Rope(head_dim=32, pairing="half", base=1e30),
    "eighths of a turn": Rope(
        head_dim=8, pairing="half", explicit_inv_freq=(np.pi / 4, np.pi / 8, 3 * np.pi / 4, np.pi)
    ),
}


def some_positions(count: int) -> list[int]:
    """Of every size, half of them negative."""
    draw = random.Random(1)
    return [draw.choice((1, -1)) * draw.getrandbits(draw.randrange(1, 63)) for _ in range(count)]


def cos_sin(positions: list[int], rope: Rope, dtype: torch.dtype) -> np.ndarray:
    """``cos + i sin`` ``[P, num_pairs]``: the pair (1, 0), rotated."""
    first = torch.zeros(len(positions), 1, rope.head_dim, dtype=dtype)
    first[..., : rope.num_pairs] = 1
    turned = float64(rotate(first, torch.tensor(positions), rope, gain=1.0))[:, 0]
    return turned[:, : rope.num_pairs] + 1j * turned[:, rope.num_pairs :]


@pytest.mark.parametrize("dtype", ["float", "double"])
def test_coefficients_are_those_of_the_definition(dtype: str) -> None:
    """The header has the numbers of ``phasor.angles``, to the last bit."""
    source = HEADER.read_text("utf-8").split(f"struct Polynomials<{dtype}>")[1].split("\n};")[0]
    lists = re.findall(r"(cos|sin)\[\] = \{(.*?)\}", source, re.S)
    found = {
        name: [float.fromhex(n.strip(" \nf")) for n in text.split(",")] for name, text in lists
    }
    number = np.float32 if dtype == "float" else np.float64
    expected = FLOAT32 if dtype == "float" else FLOAT64
    assert found == {
        name: [float(number(c)) for c in values] for name, values in expected._asdict().items()
    }
    assert tuple(found) == Polynomials._fields


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", ROPES)
@pytest.mark.usefixtures("path")
def test_every_int64_position_is_within_the_bound(name: str, dtype: torch.dtype) -> None:
    """Of cos and of sin, at edges, at random, and along sequences anywhere."""
    rope, places = ROPES[name], EDGES + some_positions(40)
    for start, step in ((0, 1), (2**31 - 3, 1), (-5, 1), (-(2**31) + 40, -7), (2**40, 1)):
        places += [start + step * i for i in range(9)]
    off = cos_sin(places, rope, dtype) - exact_rows(rope, places)
    # float64's own rounding of the oracle
    bound = BOUNDS[dtype] + 2**-53
    assert max(np.abs(off.real).max(), np.abs(off.imag).max()) <= bound


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.usefixtures("path")
def test_bits_depend_on_the_position_alone(dtype: torch.dtype) -> None:
    """Equally distant positions share products, and have the bits that each has by itself."""
    rope = ROPES["half"]
    runs = [(0, 1, 200), (-3, 1, 7), (9, -1, 20), (7, 0, 4), (2**31 - 9, 1, 20), (123, 65_537, 40),
            (-(2**31) + 9, -3, 7), (2**31 - 1, -(2**32) + 1, 2), (2**33, 1, 5)]  # fmt: skip
    places = [start + step * i for start, step, count in runs for i in range(count)]
    together = cos_sin(places, rope, dtype)
    for i, position in enumerate(places):
        assert (cos_sin([position], rope, dtype)[0] == together[i]).all(), position
    mixed = random.Random(0).sample(range(len(places)), len(places))
    assert (cos_sin([places[i] for i in mixed], rope, dtype) == together[mixed]).all()


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("axes", [Axial((9, 9, 20)), InterleavedSections((14, 12, 12))], ids=repr)
@pytest.mark.usefixtures("path")
def test_a_pair_has_the_bits_of_its_axis(axes: Axial, dtype: torch.dtype) -> None:
    """Positions on several axes: each pair's angle is that of its own coordinate."""
    rope = Rope(head_dim=76, pairing="half", axes=axes)
    draw = some_positions(30 * 3)
    grid = [[time, row, column] for time in (0, 2**40) for row in (-1, 7) for column in range(9)]
    places = torch.tensor(grid + np.reshape(draw, (30, 3)).tolist())
    x = torch.ones(len(places), 1, 76, dtype=dtype)
    made = rotate(x, places, rope)
    for axis in range(3):
        alone = rotate(x, places[:, axis : axis + 1].expand(-1, 3), rope)
        pairs = [k for k, of_pair in enumerate(axes.axis_of_pair(38)) if of_pair == axis]
        both = pairs + [38 + k for k in pairs]
        assert torch.equal(made[..., both], alone[..., both])


@pytest.mark.parametrize("dtype", BOUNDS)
def test_instruction_sets_that_fuse_have_the_same_bits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At positions of every size, by themselves and in sequences."""
    places = EDGES + some_positions(60) + list(range(-90, 90))
    made: list[Tensor] = []
    for name in cpu.paths():
        if name != "portable":
            run_on(name, monkeypatch)
            made.append(torch.tensor(cos_sin(places, ROPES["half"], dtype)))
    assert all(torch.equal(one, made[0]) for one in made)
