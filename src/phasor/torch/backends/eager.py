"""The operator in plain torch operations: every device, every dtype, every transformation.

It is the definition that the other backends are checked against, and what ``torch.func``, double
differentiation and compilers that are told ``backend="eager"`` run through.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from phasor.angles import DIGITS
from phasor.pairings import by_pairing
from phasor.torch._internals import in_transform
from phasor.torch._layout import Layout, read_layout
from phasor.torch._rows import reach, rows
from phasor.torch._written import check_writable


def refusal(x: Tensor) -> str:
    """Why this backend cannot rotate ``x``: it always can."""
    del x
    return ""


def is_followed(backend: str, tensors: Sequence[Tensor]) -> bool:
    """Whether somebody follows each step, and an operator would be in the way.

    ``torch.func`` always does; a compiler does where the caller names this backend to it, but for
    sharded tensors, which only the operator knows to lay out.
    """
    named = backend == "eager" and torch.compiler.is_compiling()
    # a DTensor, told by what only it has: its class is slow to import
    return in_transform() or (named and not any(hasattr(t, "device_mesh") for t in tensors))


def rotate(
    xs: Sequence[Tensor], angles: Sequence[Tensor], rope: str, inverse: bool, gain: float
) -> list[Tensor]:
    """New tensors with the strides of ``xs``; the operator's out-of-place kernel."""
    outs: list[Tensor] = []
    layout = _layout(rope, inverse)
    for x, cos, sin in _with_rows(xs, angles, rope, inverse, gain, reach(angles)):
        out = torch.empty_like(x)
        start, end = layout.rotary_start, layout.rotary_start + 2 * cos.shape[-1]
        out[..., :start] = x[..., :start]
        out[..., end:] = x[..., end:]
        _write(out, _turned(x, cos, sin, layout), layout)
        outs.append(out)
    return outs


def rotate_(
    xs: Sequence[Tensor], angles: Sequence[Tensor], rope: str, inverse: bool, gain: float
) -> None:
    """The operator's in-place kernel: only the rotated slice is written."""
    check_writable(xs)
    layout = _layout(rope, inverse)
    for x, cos, sin in _with_rows(xs, angles, rope, inverse, gain, reach(angles)):
        _write(x, _turned(x, cos, sin, layout), layout)


def composite(
    xs: Sequence[Tensor], angles: Sequence[Tensor], rope: str, inverse: bool, gain: float
) -> list[Tensor]:
    """The same values without a write or a look at the data, for those who follow each step."""
    outs: list[Tensor] = []
    layout = _layout(rope, inverse)
    for x, cos, sin in _with_rows(xs, angles, rope, inverse, gain, DIGITS):
        start, end = layout.rotary_start, layout.rotary_start + 2 * cos.shape[-1]
        # [N, 2] read row by row is interleaved, [2, N] is two halves
        side = by_pairing(layout.pairing_out, half=-2, interleaved=-1)
        turned = torch.stack(_turned(x, cos, sin, layout), side)
        turned = turned.reshape(*turned.shape[:-2], end - start).to(x.dtype)
        outs.append(torch.cat((x[..., :start], turned, x[..., end:]), -1))
    return outs


def _layout(rope: str, inverse: bool) -> Layout:
    layout = read_layout(rope)
    return layout.turned_round() if inverse else layout


def _turned(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Both coordinates of every pair after the turn, in the dtype of the rows: ``[..., N]``."""
    first, second = layout.slices(layout.pairing, cos.shape[-1])
    x0, x1 = x[..., first].to(cos.dtype), x[..., second].to(cos.dtype)
    return torch.addcmul(x0 * cos, x1, sin, value=-1), torch.addcmul(x0 * sin, x1, cos)


def _write(out: Tensor, turned: tuple[Tensor, Tensor], layout: Layout) -> None:
    places = layout.slices(layout.pairing_out, turned[0].shape[-1])
    for place, values in zip(places, turned, strict=True):
        out[..., place] = values


def _with_rows(
    xs: Sequence[Tensor],
    angles: Sequence[Tensor],
    rope: str,
    inverse: bool,
    gain: float,
    digits: int,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Each tensor with its cos and sin ``[..., S, 1, N]``, in the dtype it is computed in."""
    made: dict[torch.dtype, tuple[Tensor, Tensor]] = {}
    for x in xs:
        kind = torch.float64 if x.dtype == torch.float64 else torch.float32
        if kind not in made:
            cos, sin = rows(angles, rope, kind, digits)
            if gain != 1.0:
                cos, sin = cos * gain, sin * gain
            made[kind] = cos.unsqueeze(-2), (-sin if inverse else sin).unsqueeze(-2)
        yield x, *made[kind]
