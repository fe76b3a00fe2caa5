"""The operator in plain torch operations: every device, every dtype, every transformation.

It is the definition that the other backends are checked against. ``torch.func``, double
differentiation and compilers that are given ``backend="eager"`` run through it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from phasor.pairings import by_pairing
from phasor.torch._operator.angles import check_has_angles, cos_sin
from phasor.torch._operator.in_place import check_writable
from phasor.torch._operator.internals import in_transform
from phasor.torch._operator.text import Layout, compute_dtype, read_layout


def refusal(x: Tensor) -> str:
    """Why this backend cannot rotate ``x``: it always can."""
    del x
    return ""


def needs_plain_ops(backend: str, tensors: Sequence[Tensor]) -> bool:
    """True under ``torch.func``, or when compiling with ``backend="eager"``.

    An operator would hide the operations that these transform or fuse. Sharded tensors are an
    exception for compilers: only the operator has a rule for them.
    """
    compiled = backend == "eager" and torch.compiler.is_compiling()
    # a DTensor is recognised by an attribute, because its class is slow to import
    return in_transform() or (compiled and not any(hasattr(t, "device_mesh") for t in tensors))


def rotate_into(
    xs: Sequence[Tensor],
    outs: Sequence[Tensor],
    angles: Sequence[Tensor],
    rope: str,
    inverse: bool,
    gain: float,
) -> None:
    """The operator's kernel: from ``xs`` to ``outs``, which are ``xs`` in place."""
    if outs is xs:
        check_writable(xs)
    if len(angles) == 1:
        check_has_angles(angles[0])
    layout = layout_of(rope, inverse)
    rotations = _iterate_with_cos_sin(xs, angles, rope, inverse, gain)
    for (x, cos, sin), out in zip(rotations, outs, strict=True):
        _rotate_tensor_into(x, out, cos, sin, layout)


def _rotate_tensor_into(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> None:
    num_pairs, start = cos.shape[-1], layout.rotary_start
    first, second = layout.slices(layout.pairing, num_pairs)
    y0, y1 = (out[..., each] for each in layout.slices(layout.pairing_out, num_pairs))
    if out is not x and 2 * num_pairs < x.shape[-1]:
        out[..., :start] = x[..., :start]
        out[..., start + 2 * num_pairs :] = x[..., start + 2 * num_pairs :]
    # a cast of the whole head is cheaper than operations on two dtypes
    x = x.to(cos.dtype)
    # [..., seq, heads, head_dim] -> twice [..., seq, heads, num_pairs]
    x0, x1 = x[..., first], x[..., second]
    r0, r1 = x0 * cos, x0 * sin
    # addcmul rounds one product and fuses the other, as the kernels do
    if x.dtype == out.dtype and (out is not x or layout.pairing == layout.pairing_out):
        torch.addcmul(r0, x1, sin, value=-1, out=y0)
        torch.addcmul(r1, x1, cos, out=y1)
    else:
        # both before the first write: in place, that may be to what the second reads
        r0.addcmul_(x1, sin, value=-1)
        r1.addcmul_(x1, cos)
        y0.copy_(r0)
        y1.copy_(r1)


def rotate_without_writes(
    xs: Sequence[Tensor], angles: Sequence[Tensor], rope: str, inverse: bool, gain: float
) -> list[Tensor]:
    """New tensors without writing to one or reading a value, as transformations require."""
    layout = layout_of(rope, inverse)
    return [
        rotate_by(x, cos, sin, layout)
        for x, cos, sin in _iterate_with_cos_sin(xs, angles, rope, inverse, gain)
    ]


def rotate_by(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """``x`` rotated by cos and sin ``[..., seq, 1, num_pairs]``, without writing to a tensor."""
    start, end = layout.rotary_start, layout.rotary_start + 2 * cos.shape[-1]
    pairs = [each.to(x.dtype) for each in _rotate_pairs(x, cos, sin, layout)]
    # twice [..., seq, heads, num_pairs] -> [..., seq, heads, rotary_dim]
    rotated = by_pairing(
        layout.pairing_out,
        half=pairs,
        interleaved=[torch.stack(pairs, -1).reshape(*x.shape[:-1], end - start)],
    )
    return torch.cat((x[..., :start], *rotated, x[..., end:]), -1)


def layout_of(rope: str, inverse: bool) -> Layout:
    """The layout that the operator's text describes, of the rotation or its inverse."""
    layout = read_layout(rope)
    return layout.inverse() if inverse else layout


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Both coordinates of every rotated pair, ``[..., seq, heads, num_pairs]``, as wide as cos."""
    first, second = layout.slices(layout.pairing, cos.shape[-1])
    # [..., seq, heads, head_dim] -> twice [..., seq, heads, num_pairs]
    x0, x1 = x[..., first].to(cos.dtype), x[..., second].to(cos.dtype)
    # addcmul rounds one product and fuses the other, as the kernels do
    return torch.addcmul(x0 * cos, x1, sin, value=-1), torch.addcmul(x0 * sin, x1, cos)


def _iterate_with_cos_sin(
    xs: Sequence[Tensor],
    angles: Sequence[Tensor],
    rope: str,
    inverse: bool,
    gain: float,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Each tensor with its cos and sin ``[..., seq, 1, num_pairs]`` in the dtype it is computed in.

    They are made once for tensors that are computed in the same dtype.
    """
    by_dtype: dict[torch.dtype, tuple[Tensor, Tensor]] = {}
    for x in xs:
        dtype = compute_dtype(x.dtype)
        if dtype not in by_dtype:
            if len(angles) == 2:
                cos, sin = angles[0].to(dtype), angles[1].to(dtype)
            else:
                cos, sin = cos_sin(angles[0], rope, dtype)
            if gain != 1.0:
                cos, sin = cos * gain, sin * gain
            # [..., seq, num_pairs] -> [..., seq, 1, num_pairs], to broadcast over heads
            by_dtype[dtype] = cos.unsqueeze(-2), (-sin if inverse else sin).unsqueeze(-2)
        yield x, *by_dtype[dtype]
