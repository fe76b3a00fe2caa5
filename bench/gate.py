"""What a contender must come near to before it is timed: the truth, in float64 and on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from cases import Case
from numpy.typing import NDArray
from torch import Tensor

from phasor.angles import cos_sin
from phasor.pairings import Pairing, slices
from phasor.rope import Rope

_NEAR = 2**15
_ROUNDING = 2.0**-9  # of a number to bfloat16
#: Largest error of a contender that is timed, as a part of the pair's length. Float32 angles are
#: off by 2**-23 of themselves, and most cases stand below position 2**15; rows and products rounded
#: to bfloat16 add three roundings to each of two coordinates.
TOLERANCE = {"float32": 2.0**-8, "bfloat16": 2.0**-8 + 3 * 2**0.5 * _ROUNDING}
_CHECKED = 256  # tokens of a sequence that the gate looks at, first and last among them


def tolerance(case: Case) -> float:
    """`TOLERANCE`, with the float32 angles of positions farther out."""
    furthest = int(case.positions().max())
    return TOLERANCE[case.dtype] + max(0, furthest - _NEAR) * 2.0**-23


def worst_error(
    case: Case, rope: Rope, positions: Tensor, inputs: Sequence[Tensor], results: Sequence[Tensor]
) -> float:
    """Largest error of new query and key, then of their gradients, at tokens spread evenly.

    Args:
        case: What was asked.
        rope: What was to be applied.
        positions: Of the tokens.
        inputs: Query and key, and the gradients of the results if there are any.
        results: New query and key, and their gradients if there are any; what follows is not
            looked at.
    """
    tokens = torch.linspace(0, case.seq - 1, min(case.seq, _CHECKED)).long().to(positions.device)
    checked = positions if case.seq == 1 else positions[tokens]
    found = 0.0
    for i, (x, y) in enumerate(zip(inputs, results, strict=False)):
        if y.shape != x.shape or y.dtype != x.dtype:
            return float("inf")
        error = rotation_error(x[:, tokens], y[:, tokens], checked, rope, inverse=i >= 2)
        found = max(found, error)
    return found


def rotation_error(x: Tensor, y: Tensor, positions: Tensor, rope: Rope, *, inverse: bool) -> float:
    """Largest distance of ``y`` from ``x`` rotated in float64, in lengths of the pair.

    Infinite where a coordinate outside the rotated slice changed, or a result is not finite.
    """
    if not torch.equal(x[..., rope.rotary_dim :], y[..., rope.rotary_dim :]):
        return float("inf")
    cos, sin = cos_sin(rope, positions.cpu().numpy())
    turns = (cos + (-1j if inverse else 1j) * sin)[..., None, :]
    pairings = rope.pairing, rope.output_pairing
    before, after = pairings[::-1] if inverse else pairings
    z, w = _complex(x[..., : rope.rotary_dim], before), _complex(y[..., : rope.rotary_dim], after)
    off = np.abs(w - z * turns) / np.maximum(np.abs(z), np.finfo(np.float32).tiny)
    return float(off.max()) if np.isfinite(off).all() else float("inf")


def _complex(x: Tensor, pairing: Pairing) -> NDArray[np.complex128]:
    first, second = slices(pairing, x.shape[-1] // 2)
    numbers = x.detach().double().cpu().numpy()
    return numbers[..., first] + 1j * numbers[..., second]
