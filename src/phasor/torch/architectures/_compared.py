"""How far a rope is from what a model did to its vectors, in roundings of float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from phasor.numpy import pair_indices, rotate
from phasor.positions import every_axis
from phasor.rope import Rope
from phasor.torch.architectures._recording import Recorded

Positions = NDArray[np.int64]
_ROUNDING = 2.0**-24
# roundings to which `identify_samples` measures a factor on the result
_GAIN = 32


def compared(
    rope: Rope, seen: Sequence[Recorded], positions: Positions, measured: float | None = None
) -> tuple[float, list[str]]:
    """The worst error over the vectors as a share of what float32 explains, and what is wrong."""
    gain, extra = rope.attention_factor, 0
    # where the law has it the law says it more exactly
    if measured is not None and not np.isclose(gain, measured, rtol=_GAIN * _ROUNDING, atol=0):
        gain, extra = measured, _GAIN
    if positions.ndim == 1 and rope.axes.n_axes > 1:
        positions = every_axis(positions, rope.axes.n_axes)
    axes = 1 if positions.ndim == 1 else positions.shape[1]
    if rope.axes.n_axes != axes:
        return np.inf, [f"positions of {rope.axes.n_axes} axes, the model's have {axes}"]
    worst, why = 0.0, dict[str, None]()
    for one in seen:
        used, width = rope, one.before.shape[-1]
        if width != rope.head_dim:
            # the model cuts the slice out itself; where it stood was seen in attention
            if width != rope.rotary_dim:
                why[f"heads of {rope.head_dim}, and vectors of {width} were turned"] = None
                continue
            if one.slice_start not in (None, rope.rotary_start):
                why[f"a slice from {rope.rotary_start}, the model's from {one.slice_start}"] = None
            if one.head_dim not in (None, rope.head_dim):
                why[f"heads of {rope.head_dim}, the model's are of {one.head_dim}"] = None
            used = replace(rope, head_dim=width, rotary_start=0, rotary_dim=width)
        worst = max(worst, _share(used, one, positions, gain, extra))
    if worst > 1:
        why[f"off by {worst:.3g} times what float32 angles explain"] = None
    return worst, list(why)


def _share(rope: Rope, one: Recorded, positions: Positions, gain: float, extra: int) -> float:
    turned = slice(rope.rotary_start, rope.rotary_start + rope.rotary_dim)
    expected = rotate(one.before, positions, rope)
    expected[..., turned] *= gain
    off = expected - one.after
    first, second = pair_indices(rope, rope.output_pairing)
    was_first, was_second = pair_indices(rope, rope.pairing)
    lengths = np.hypot(one.before[..., was_first], one.before[..., was_second]) * gain
    share = np.hypot(off[..., first], off[..., second]) / np.maximum(
        lengths * (_allowed(rope, positions) + extra * _ROUNDING)[:, None], 1e-30
    )
    passed = np.delete(off, np.r_[turned], axis=-1)
    # a NaN is less than nothing, and right to nobody
    return np.inf if passed.any() or not np.isfinite(share).all() else float(share.max())


def _allowed(rope: Rope, positions: Positions) -> NDArray[np.float64]:
    """How far float32 may leave a turned unit vector from the truth, ``[seq, pairs]``.

    The logarithm of a frequency is the product of ln(base) and an exponent, and a rounding of that
    is a relative error of the frequency; some roundings more make the law, the angle and the sum.
    """
    pairs = np.arange(rope.num_pairs)
    roundings = np.log(rope.base or 1e4) * pairs / rope.num_pairs + 8
    far = positions if positions.ndim == 1 else positions.max(axis=1)
    return (far[:, None] * np.abs(rope.inv_freq) * roundings + 8) * _ROUNDING
