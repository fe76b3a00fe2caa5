"""The operators in plain torch operations: every device, every dtype, every transformation.

It is the definition that the other backends are checked against. ``torch.func``, double
differentiation and compilers that are given ``backend="eager"`` run through it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phasor.pairings import Pairing, by_pairing, slices
from phasor.torch._operator.angles import cos_sin as cos_sin
from phasor.torch._operator.arguments import Layout, Turn
from phasor.torch._operator.in_place import check_writable
from phasor.torch._operator.internals import below_autograd, in_transform, is_exporting
from phasor.torch._operator.text import compute_dtype


def unsupported_reason(device: torch.device, width: int) -> str:
    """Why this backend cannot rotate heads so wide on that device: it always can."""
    del device, width
    return ""


def needs_plain_ops(backend: str, tensors: Sequence[Tensor]) -> bool:
    """True under ``torch.func``, or when compiling with ``backend="eager"``.

    An operator would hide the operations that these transform or fuse. Sharded tensors are an
    exception for compilers: only the operator has a rule for them.
    """
    compiled = backend == "eager" and torch.compiler.is_compiling()
    # a DTensor is recognised by an attribute, because its class is slow to import
    return in_transform() or (compiled and not any(hasattr(t, "device_mesh") for t in tensors))


def run_into(turn: Turn, outs: Sequence[Tensor]) -> None:
    """The operator's kernel: from ``xs`` to ``outs``, which are ``xs`` in place."""
    if outs is turn.xs:
        check_writable(outs)
    with below_autograd():
        cos, sin = rows_of_heads(turn, compute_dtype(turn.xs[0].dtype))
        for x, out in zip(turn.xs, outs, strict=True):
            _write_turned(x, out, cos, sin, turn.layout())


def run_without_writes(turn: Turn) -> list[Tensor]:
    """New tensors without writing to one or reading a value, as transformations require."""
    dtypes = [compute_dtype(x.dtype) for x in turn.xs]
    rows = {dtype: rows_of_heads(turn, dtype) for dtype in dict.fromkeys(dtypes)}
    layout = turn.layout()
    return [turn_pairs(x, *rows[d], layout) for x, d in zip(turn.xs, dtypes, strict=True)]


def rows_of_heads(turn: Turn, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cos and sin ``[..., seq, 1, num_pairs]`` of ``dtype``, to broadcast over heads."""
    cos, sin = turn.cos.to(dtype), turn.sin.to(dtype)
    return cos.unsqueeze(-2), (-sin if turn.transposed else sin).unsqueeze(-2)


def turn_pairs(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """``x`` rotated by `rows_of_heads`, without writing to a tensor."""
    num_pairs, start = cos.shape[-1], layout.rotary_start
    first, second = slices(layout.pairing, num_pairs, start)
    # [..., seq, heads, head_dim] -> twice [..., seq, heads, num_pairs]
    x0, x1 = x[..., first].to(cos.dtype), x[..., second].to(cos.dtype)
    if is_exporting():
        # what other programs run has no addcmul
        y0, y1 = x0 * cos - x1 * sin, x1 * cos + x0 * sin
    else:
        # addcmul rounds one product and fuses the other, as the kernels do; -sin stands for
        # value=-1, whose forward derivative ends the process under AOTAutograd
        y0, y1 = torch.addcmul(x0 * cos, x1, -sin), torch.addcmul(x1 * cos, x0, sin)
    pairs = [y0.to(x.dtype), y1.to(x.dtype)]
    # twice [..., seq, heads, num_pairs] -> [..., seq, heads, rotary_dim]
    rotated = by_pairing(
        layout.pairing_out,
        half=pairs,
        interleaved=[torch.stack(pairs, -1).reshape(*x.shape[:-1], 2 * num_pairs)],
    )
    return torch.cat((x[..., :start], *rotated, x[..., start + 2 * num_pairs :]), -1)


def _write_turned(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> None:
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
    y0.addcmul_(x1, sin, value=-1)
    y1.addcmul_(x0, sin)
    if aside:
        after.copy_(rotated)


def _split_pairs(x: Tensor, pairing: Pairing) -> Tensor:
    """``[..., rotary_dim]`` as a view ``[..., 2, num_pairs]``."""
    if by_pairing(pairing, half=True, interleaved=False):
        return x.view(*x.shape[:-1], 2, x.shape[-1] // 2)
    return x.view(*x.shape[:-1], x.shape[-1] // 2, 2).transpose(-1, -2)
