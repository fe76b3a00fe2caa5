"""The operator in plain torch operations: every device, every dtype, every transformation.

It is the definition that the other backends are checked against. ``torch.func``, double
differentiation and compilers that are given ``backend="eager"`` run through it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from phasor.pairings import Pairing, by_pairing
from phasor.torch._operator.angles import check_has_angles, cos_sin
from phasor.torch._operator.arguments import Call
from phasor.torch._operator.in_place import check_writable
from phasor.torch._operator.internals import below_autograd, in_transform
from phasor.torch._operator.text import Layout, compute_dtype, read_layout


def unsupported_reason(x: Tensor) -> str:
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


def rotate_into(call: Call, outs: Sequence[Tensor]) -> None:
    """The operator's kernel: from ``xs`` to ``outs``, which are ``xs`` in place."""
    if outs is call.xs:
        check_writable(outs)
    if len(call.source) == 1:
        check_has_angles(call.source[0])
    layout = layout_of(call.text, call.inverse)
    with below_autograd():
        for (x, cos, sin), out in zip(_iterate_with_cos_sin(call), outs, strict=True):
            _rotate_tensor_into(x, out, cos, sin, layout)


def _rotate_tensor_into(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> None:
    start, end = layout.rotary_start, layout.rotary_start + 2 * cos.shape[-1]
    before, after = x, out
    if end - start < x.shape[-1]:
        if out is not x:
            out[..., :start] = x[..., :start]
            out[..., end:] = x[..., end:]
        before, after = x[..., start:end], out[..., start:end]
    # a cast of the whole head is cheaper than operations on two dtypes
    # [..., seq, heads, rotary_dim] -> [..., seq, heads, 2, num_pairs]
    pairs = _split_pairs(before.to(cos.dtype), layout.pairing)
    after = _split_pairs(after, layout.pairing_out)
    # what is rotated in place is read until the last product
    aside = out is x or x.dtype != cos.dtype
    rotated = torch.mul(pairs, cos.unsqueeze(-2), out=None if aside else after)
    (x0, x1), (y0, y1) = pairs.unbind(-2), rotated.unbind(-2)
    # addcmul rounds one product and fuses the other, as the kernels do
    y0.addcmul_(x1, sin, value=-1)
    y1.addcmul_(x0, sin)
    if aside:
        after.copy_(rotated)


def _split_pairs(x: Tensor, pairing: Pairing) -> Tensor:
    """``[..., rotary_dim]`` as a view ``[..., 2, num_pairs]``."""
    if by_pairing(pairing, half=True, interleaved=False):
        return x.view(*x.shape[:-1], 2, x.shape[-1] // 2)
    return x.view(*x.shape[:-1], x.shape[-1] // 2, 2).transpose(-1, -2)


def rotate_without_writes(call: Call) -> list[Tensor]:
    """New tensors without writing to one or reading a value, as transformations require."""
    layout = layout_of(call.text, call.inverse)
    return [rotate_by(x, cos, sin, layout) for x, cos, sin in _iterate_with_cos_sin(call)]


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


def layout_of(text: str, inverse: bool) -> Layout:
    """The layout that the operator's text describes, of the rotation or its inverse."""
    layout = read_layout(text)
    return layout.inverse() if inverse else layout


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Both coordinates of every rotated pair, ``[..., seq, heads, num_pairs]``, as wide as cos."""
    first, second = layout.slices(layout.pairing, cos.shape[-1])
    # [..., seq, heads, head_dim] -> twice [..., seq, heads, num_pairs]
    x0, x1 = x[..., first].to(cos.dtype), x[..., second].to(cos.dtype)
    # addcmul rounds one product and fuses the other, as the kernels do
    return torch.addcmul(x0 * cos, x1, sin, value=-1), torch.addcmul(x1 * cos, x0, sin)


def _iterate_with_cos_sin(call: Call) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Each tensor with its cos and sin ``[..., seq, 1, num_pairs]`` in the dtype it is computed in.

    They are made once for tensors that are computed in the same dtype.
    """
    xs, source, text, inverse, gain, _ = call
    by_dtype: dict[torch.dtype, tuple[Tensor, Tensor]] = {}
    for x in xs:
        dtype = compute_dtype(x.dtype)
        if dtype not in by_dtype:
            if len(source) == 2:
                cos, sin = source[0].to(dtype), source[1].to(dtype)
            else:
                cos, sin = cos_sin(source[0], text, dtype)
            if gain != 1.0:
                cos, sin = cos * gain, sin * gain
            # [..., seq, num_pairs] -> [..., seq, 1, num_pairs], to broadcast over heads
            by_dtype[dtype] = cos.unsqueeze(-2), (-sin if inverse else sin).unsqueeze(-2)
        yield x, *by_dtype[dtype]
