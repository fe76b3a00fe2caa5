"""Rotations that no Rope describes: xPos, and angles that are summed over the tokens."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from phasor._checks import number, whole
from phasor.errors import SpecError, TensorError
from phasor.rope import Rope
from phasor.torch._operator.arguments import ARRAYS
from phasor.torch.rotation import Rotation, check_dtype

_TURN = 2 * math.pi
_GAMMA = 0.4  # the number in the paper and in both implementations


def xpos(
    positions: Any,
    rope: Rope,
    *,
    origin: float = 0,
    scale_base: float = 512.0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Rotation, Rotation]:
    """The rotations of queries and of keys in xPos, which also stretch (2212.10554, eq. 17).

    A query at position ``m`` is multiplied by ``zeta_k ** ((m - origin) / scale_base)`` in pair
    ``k``, a key at ``n`` by ``zeta_k ** ((origin - n) / scale_base)``, with ``zeta_k = (2k /
    rotary_dim + 0.4) / 1.4``. So scores fade with the distance ``m - n``, whatever ``origin`` is.
    They grow for keys after the query: mask these.

    Keys and queries that meet need the same ``origin``. A key's factor overflows in float32 and
    bfloat16 36,261 tokens after it, a query's as many before it, and in float16 after 4,533; scores
    are then infinite or NaN. A query's factor far after it becomes 0. For longer sequences, see
    "Rotate and stretch" on the page "A rotation of your own": each segment of keys is an origin.

    Args:
        positions: As for `Rotation.at`.
        rope: A Rope with one axis. Its attention factor is on both rotations.
        origin: The position where both factors are 1.
        scale_base: Tokens over which pair ``k`` fades by ``zeta_k``; 512 in the paper.
        dtype: float32, or float64 to rotate tensors that are float64.

    Returns:
        The rotation of queries, and the rotation of keys. Multiplied in float64, rounded once.

    Raises:
        PositionError: As for `phasor.torch.rotate`.
        SpecError: If ``rope`` has several axes, its scaling is a rule, or ``scale_base`` is not
            above 0.

    >>> import torch
    >>> from phasor import Rope
    >>> rope = Rope(head_dim=64, pairing="half")
    >>> of_q, of_k = xpos(torch.arange(5), rope)
    >>> q, k = torch.randn(5, 8, 64), torch.randn(5, 2, 64)
    >>> rotated_q, rotated_k = of_q(q), of_k(k)
    """
    origin = number("origin", origin)
    scale_base = number("scale_base", scale_base, above=0)
    exact = Rotation.at(positions, rope, dtype=torch.float64)
    check_dtype(dtype)
    if rope.axes.n_axes > 1:
        raise SpecError(f"rope must have one axis for xPos, got {rope.axes.n_axes}")
    pair = torch.arange(rope.num_pairs, dtype=torch.float64, device=exact.cos.device)
    zeta = (pair / rope.num_pairs + _GAMMA) / (1 + _GAMMA)
    # [..., seq, 1]
    tokens = ARRAYS.read_positions(positions, rope, exact.cos.device).double().unsqueeze(-1)
    exponent = (tokens - origin) / scale_base

    def stretched(factor: Tensor) -> Rotation:  # [..., seq, num_pairs]
        cos, sin = (exact.cos * factor).to(dtype), (exact.sin * factor).to(dtype)
        return Rotation.of_rope(cos, sin, rope)

    return stretched(zeta**exponent), stretched(zeta**-exponent)


def wrapped_cumsum(steps: Tensor, dim: int, *, start: Tensor | None = None) -> Tensor:
    """Angles that are sums of steps along the sequence, without drift: ``cumsum`` modulo a turn.

    For rotations whose steps depend on the input: CARoPE (2507.23083), Selective RoPE (2511.17388),
    Mamba-3 (2603.15569). Multiply steps by frequencies before the sum, because it is wrapped.

    Steps are turned into whole multiples of 2**-64 of a turn, whose int64 sum overflows at whole
    turns and is otherwise exact. With steps of up to ``s`` radians, an angle after ``n`` tokens is
    within ``n * s * 2**-51`` of the real sum, so within 2e-9 after a million steps of up to pi. A
    float32 sum is off by more than 1e-2 there.

    Args:
        steps: Radians that each token adds, its own angle included: any floating dtype, any shape,
            such as ``[..., seq, heads, num_pairs]``. Gradients reach it.
        dim: The dimension of the sequence.
        start: Angles of the token before the first one, without ``dim``: to go on decoding, the
            last angles so far, ``angles.select(dim, -1)``. Gradients reach it.

    Returns:
        Angles from -pi to pi, float64, in the shape of ``steps``: for `Rotation.from_angles`. NaN
        from a step that is not finite on.

    Raises:
        TensorError: If ``steps`` is not a tensor of floats, or ``start`` does not fit it.
        SpecError: If ``dim`` is not one of its dimensions.

    >>> import torch
    >>> steps = torch.full((1_000_000, 1), 3.0)
    >>> wrapped_cumsum(steps, 0)[-1]  # 3,000,000 radians
    tensor([-1.0727], dtype=torch.float64)
    """
    ARRAYS.check_array("steps", steps, "[..., seq, num_pairs]", 1)
    whole("dim", dim, least=-steps.dim(), most=steps.dim() - 1)
    terms = steps.double()
    if start is not None:
        ARRAYS.check_array("start", start, "[..., num_pairs]", 0)
        ARRAYS.check_device("start", start, steps.device)
        expected = [*steps.select(dim, 0).shape] if steps.shape[dim] else None
        if expected is not None and [*start.shape] != expected:
            raise TensorError(
                f"start must have the shape of steps without its dimension {dim} ({expected}), got "
                f"{list(start.shape)}"
            )
        terms = torch.cat((start.double().unsqueeze(dim), terms), dim)
    plain = terms.cumsum(dim)  # carries the gradient, and NaN
    turns = terms.detach() / _TURN
    # at most half a turn each, so that only the sum may overflow int64, at two whole turns
    counts = ((turns - turns.round()) * 2.0**63).long()
    # doubled, the sum overflows at one turn: [-2**63, 2**63) is half a turn to either side
    sums = counts.cumsum(dim) * 2
    wrapped = sums.double() * (_TURN / 2.0**64)
    angles = wrapped + (plain - plain.detach())
    return angles if start is None else angles.narrow(dim, 1, steps.shape[dim])
