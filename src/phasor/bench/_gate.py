"""What a contender must come near to before it is timed: the truth, in float64 and on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phasor.angles import cos_sin
from phasor.bench._case import EPSILON, Case, Contender
from phasor.pairings import Pairing
from phasor.rope import Rope

_NEAR = 2**15
_ROUNDING = 2.0**-9  # of a number to bfloat16
#: Largest error of a contender that is timed, as a part of the pair's length. Float32 angles are
#: off by 2**-23 of themselves, and most cases stand below position 2**15; rows and products rounded
#: to bfloat16 add three roundings to each of two coordinates.
TOLERANCE = {"float32": 2.0**-8, "bfloat16": 2.0**-8 + 3 * 2**0.5 * _ROUNDING}
_CHECKED = 256  # tokens of a sequence that the gate looks at, first and last among them


def tolerance(case: Case, contender: Contender) -> float:
    """`TOLERANCE`, with the float32 angles of what stands farther out, and a norm's roundings."""
    furthest = int(case.positions().max())
    allowed = TOLERANCE[case.dtype] + max(0, furthest - _NEAR) * 2.0**-23
    if not contender.norm or case.dtype != "bfloat16":
        return allowed
    # the normalised numbers and their products with the weights are rounded as well; a gradient is
    # compared with the root mean square of its head, of which a coordinate may be four times
    return allowed + (16 if case.backward else 4 * 2**0.5) * _ROUNDING


def worst(
    contender: Contender,
    case: Case,
    positions: Tensor,
    given: Sequence[Tensor],
    came: Sequence[Tensor],
) -> float:
    """Largest `error` of new query and key, then of their gradients, at tokens spread evenly.

    Args:
        contender: Whose results came.
        case: What was asked.
        positions: Of its tokens.
        given: Query and key, and the gradients of the results if there are any.
        came: New query and key, and their gradients if there are any; what follows is not looked
            at.
    """
    tokens = torch.linspace(0, case.seq - 1, min(case.seq, _CHECKED)).long()
    places = positions if case.seq == 1 else positions[tokens.to(positions.device)]
    rope = case.rope(contender.pairing, contender.pairing_out)
    found = 0.0
    for i, (x, y) in enumerate(zip(given, came, strict=False)):
        y = y.transpose(1, 2) if contender.heads_first else y
        if y.shape != x.shape or y.dtype != x.dtype:
            return float("inf")
        here = tokens.to(x.device)
        x, y = x[:, here], y[:, here]
        if not contender.norm:
            found = max(found, error(x, y, places, rope, inverse=i >= 2))
            continue
        before, weight = given[i % 2][:, here], case.weights()[i % 2]
        if i < 2:
            found = max(found, error(_normalised(x, weight), y, places, rope, inverse=False))
        else:
            found = max(found, _norm_gradient_error(before, weight, x, y, places, rope))
    return found


def error(given: Tensor, came: Tensor, places: Tensor, rope: Rope, *, inverse: bool) -> float:
    """Largest distance of ``came`` from ``given`` rotated in float64, in lengths of the pair.

    Infinite where a coordinate outside the rotated slice changed, or a result is not finite.
    """
    untouched = slice(rope.rotary_dim, None)
    if not torch.equal(given[..., untouched], came[..., untouched]):
        return float("inf")
    turns = _turns(places, rope, inverse=inverse)
    before, after = rope.pairing, rope.output_pairing
    if inverse:
        before, after = after, before
    z = _pairs(given[..., : rope.rotary_dim], before)
    w = _pairs(came[..., : rope.rotary_dim], after)
    off = np.abs(w - z * turns) / np.maximum(np.abs(z), np.finfo(np.float32).tiny)
    return float(off.max()) if np.isfinite(off).all() else float("inf")


def _norm_gradient_error(
    x: Tensor, weight: Tensor, grad: Tensor, came: Tensor, places: Tensor, rope: Rope
) -> float:
    """Distance of ``came`` from the gradient of a norm and a rotation, in root mean squares of it.

    Of ``y = R(w n)`` with ``n = x / rms(x)`` the gradient is ``(v - n mean(v n)) / rms(x)``, where
    ``v = w R^-1 grad`` (Zhang & Sennrich 1910.07467, section 4).
    """
    back = _pairs(grad, rope.output_pairing) * _turns(places, rope, inverse=True)
    v = _joined(back, rope.pairing) * _wide(weight)
    size = np.sqrt((_wide(x) ** 2).mean(-1, keepdims=True) + EPSILON)
    n = _wide(x) / size
    right = (v - n * (v * n).mean(-1, keepdims=True)) / size
    off = np.abs(_wide(came) - right) / np.sqrt((right**2).mean(-1, keepdims=True))
    return float(off.max()) if np.isfinite(off).all() else float("inf")


def _normalised(x: Tensor, weight: Tensor) -> Tensor:
    wide = _wide(x)
    size = np.sqrt((wide**2).mean(-1, keepdims=True) + EPSILON)
    return torch.from_numpy(wide / size * _wide(weight))


def _turns(places: Tensor, rope: Rope, *, inverse: bool) -> NDArray[np.complex128]:
    cos, sin = cos_sin(rope, places.cpu().numpy())
    return (cos - 1j * sin if inverse else cos + 1j * sin)[..., None, :]


def _pairs(x: Tensor, pairing: Pairing) -> NDArray[np.complex128]:
    wide = _wide(x)
    half = wide.shape[-1] // 2
    match pairing:
        case "half":
            return wide[..., :half] + 1j * wide[..., half:]
        case "interleaved":
            return wide[..., ::2] + 1j * wide[..., 1::2]
        case _:
            assert_never(pairing)


def _joined(z: NDArray[np.complex128], pairing: Pairing) -> NDArray[np.float64]:
    match pairing:
        case "half":
            return np.concatenate([z.real, z.imag], -1)
        case "interleaved":
            return np.stack([z.real, z.imag], -1).reshape(*z.shape[:-1], -1)
        case _:
            assert_never(pairing)


def _wide(x: Tensor) -> NDArray[np.float64]:
    return x.detach().double().cpu().numpy()
