"""The operators in plain torch operations, for every device, dtype and transformation.

This backend is the definition that the others are tested against. It also runs under
``torch.func``, in second derivatives, and in compiled code with ``backend="eager"``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from phasor.pairings import Pairing, by_pairing, slices
from phasor.torch._operator.angles import cos_sin as cos_sin
from phasor.torch._operator.arguments import DTYPES, Layout, Rows, Turn
from phasor.torch._operator.in_place import check_writable
from phasor.torch._operator.internals import (
    below_autograd,
    copy_all,
    in_transform,
    is_exporting,
)
from phasor.torch._operator.text import compute_dtype

#: Number of elements rotated at a time, so that the float32 intermediates stay in the cache.
_IN_CACHE = 2**18

#: Up to this number of elements, calls into torch cost more than copies.
_FEW = 2**14


def unsupported_reason(device: torch.device, width: int) -> str:
    """Always "", because this backend rotates heads of any width on any device."""
    del device, width
    return ""


def needs_plain_ops(backend: str, tensors: Sequence[Tensor]) -> bool:
    """True under ``torch.func``, or when compiling with ``backend="eager"``.

    These transform or fuse single operations, which an operator would hide. Sharded tensors keep
    the operator even when compiled, because only the operator has a rule for them.
    """
    compiled = backend == "eager" and torch.compiler.is_compiling()
    # a DTensor is recognised by an attribute, because its class is slow to import
    return in_transform() or (compiled and not any(hasattr(t, "device_mesh") for t in tensors))


def try_turn(xs: Sequence[Tensor], rows: Rows, outs: Sequence[Tensor]) -> bool:
    """`run_into` for CPU tensors with a row of cos and sin for each token; False for others."""
    if outs is xs or not _fit(xs, rows):
        return False
    with below_autograd():
        _write_all(xs, outs, *_shared_factors(rows), rows.pairs())
    return True


def run_into(turn: Turn, outs: Sequence[Tensor]) -> None:
    """The operator's kernel: rotate ``xs`` into ``outs``; in place, both are the same sequence."""
    if outs is turn.xs:
        check_writable(outs)
    with below_autograd():
        dtype, layout = compute_dtype(turn.xs[0].dtype), turn.layout()
        cos, sin = turn.cos.to(dtype), turn.sin.to(dtype)
        factors = _factors(cos, sin, layout.pairing, turn.transposed)
        _write_all(turn.xs, outs, *factors, layout)


def run_without_writes(turn: Turn) -> list[Tensor]:
    """Rotate without writing to a tensor or reading a value, as transformations require."""
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
        # other programs that run the graph have no addcmul
        y0, y1 = x0 * cos - x1 * sin, x1 * cos + x0 * sin
    else:
        # addcmul rounds one product and fuses the other, as the kernels do; -sin instead of
        # value=-1, because the forward derivative of that crashes under AOTAutograd
        y0, y1 = torch.addcmul(x0 * cos, x1, -sin), torch.addcmul(x1 * cos, x0, sin)
    pairs = [y0.to(x.dtype), y1.to(x.dtype)]
    # twice [..., seq, heads, num_pairs] -> [..., seq, heads, rotary_dim]
    rotated = by_pairing(
        layout.pairing_out,
        half=pairs,
        interleaved=[torch.stack(pairs, -1).reshape(*x.shape[:-1], 2 * num_pairs)],
    )
    return torch.cat((x[..., :start], *rotated, x[..., start + 2 * num_pairs :]), -1)


def _fit(xs: Sequence[Tensor], rows: Rows) -> bool:
    """Whether each tensor has exactly the tokens of the rows, and computes in their dtype."""
    cos, width, tokens = rows.cos, rows.head_dim, rows.cos.shape[:-1]
    dtype, first_token_dim = xs[0].dtype, -2 - len(tokens)
    if not cos.is_cpu or dtype not in DTYPES or cos.dtype != compute_dtype(dtype):
        return False
    width = width or max(xs[0].shape[-1], rows.layout.rotary_start + 2 * cos.shape[-1])
    for x in xs:
        is_dense = x.is_cpu and x.layout is torch.strided and not x.is_nested
        if not is_dense or x.dtype is not dtype or x.shape[-1] != width:
            return False
        # rows by head and broadcast rows go through the checks instead
        if x.shape[first_token_dim:-2] != tokens:
            return False
    return True


def _shared_factors(rows: Rows) -> tuple[Tensor, Tensor]:
    """The `_factors` of rows, cached for all layers until cos or sin is written to."""
    cos, sin = rows.cos, rows.sin
    key = cos, sin, rows.pairs().pairing, rows.transposed
    # no version counter notices writes to inference tensors, or to a parameter's data
    if rows.head_dim is None or cos.is_inference():
        return _factors(*key)
    versions = cos._version, sin._version
    if rows.factors is None or rows.factors[0] != versions:
        rows.factors = versions, _factors(*key)
    return rows.factors[1]


def _factors(
    cos: Tensor, sin: Tensor, pairing: Pairing, transposed: bool = False
) -> tuple[Tensor, Tensor]:
    """Two factors per coordinate: on itself, and on its partner; ``[..., seq, 1, rotary_dim]``."""
    negative = -sin
    sines = (sin, negative) if transposed else (negative, sin)
    # [..., seq, num_pairs] -> [..., seq, 1, rotary_dim]
    if by_pairing(pairing, half=True, interleaved=False):
        wide = torch.cat((cos, cos), -1), torch.cat(sines, -1)
    else:
        wide = (
            torch.stack((cos, cos), -1).flatten(-2),
            torch.stack(sines, -1).flatten(-2),
        )
    return wide[0].unsqueeze(-2), wide[1].unsqueeze(-2)


def _write_all(
    xs: Sequence[Tensor], outs: Sequence[Tensor], cos: Tensor, sines: Tensor, layout: Layout
) -> None:
    """Rotate the slices of ``xs`` by `_factors` into ``outs``; copy the other coordinates."""
    before, after = list(xs), list(outs)
    start, end = layout.rotary_start, layout.rotary_start + cos.shape[-1]
    if end - start < xs[0].shape[-1]:
        if outs is not xs:
            for x, out in zip(xs, outs, strict=True):
                out[..., :start] = x[..., :start]
                out[..., end:] = x[..., end:]
        # [..., seq, heads, head_dim] -> [..., seq, heads, rotary_dim]
        before, after = ([x[..., start:end] for x in tensors] for tensors in (xs, outs))
    first, last = before[0], before[-1]
    # for few elements, one copy costs less than separate calls; 16-bit ones are copied anyway
    most = _FEW if first.dtype is cos.dtype else _IN_CACHE
    if first is not last and first.numel() <= most and first.shape[:-2] == last.shape[:-2]:
        heads = [x.shape[-2] for x in before]
        rotated = _rotate(_join(before, heads, cos.dtype), cos, sines, layout.pairing)
        _write_rotated(rotated.split_with_sizes(heads, -2), after, layout)
        return
    for x, out in zip(before, after, strict=True):
        _write_slice(x, out, cos, sines, layout, outs is xs)


def _join(xs: Sequence[Tensor], heads: Sequence[int], dtype: torch.dtype) -> Tensor:
    """All heads of a query and a key in one tensor, cast to ``dtype`` if it has many elements."""
    if xs[0].numel() <= _FEW:
        return torch.cat(tuple(xs), -2)
    # casting while joining saves a copy in the original dtype
    *tokens, _, width = xs[0].shape
    joined = xs[0].new_empty((*tokens, sum(heads), width), dtype=dtype)
    copy_all(joined.split_with_sizes(list(heads), -2), xs)
    return joined


def _write_slice(
    x: Tensor, out: Tensor, cos: Tensor, sines: Tensor, layout: Layout, in_place: bool
) -> None:
    """Rotate a slice ``[..., seq, heads, rotary_dim]``, a number of tokens at a time."""
    # in place, the input is read until the last product, so results cannot be written directly
    as_it_is = not in_place and x.dtype is cos.dtype and layout.pairing == layout.pairing_out
    whole, seq = (x, out, cos, sines), x.shape[-3]
    chunks: Iterable[tuple[Tensor, ...]] = [whole]
    tokens = max(seq * _IN_CACHE // max(x.numel(), 1), 1)
    if tokens < seq and cos.shape[-3:-2] == (seq,):
        chunks = zip(*(torch.split(t, tokens, -3) for t in whole), strict=True)
    for x_chunk, out_chunk, cos_chunk, sines_chunk in chunks:
        into = out_chunk if as_it_is else None
        rotated = _rotate(x_chunk, cos_chunk, sines_chunk, layout.pairing, out=into)
        if not as_it_is:
            _write_rotated([rotated], [out_chunk], layout)


def _rotate(
    x: Tensor, cos: Tensor, sines: Tensor, pairing: Pairing, out: Tensor | None = None
) -> Tensor:
    """Slices rotated in the dtype of cos, still in the pairing of the input."""
    # a cast is cheaper than operations on two dtypes
    wide = x.to(cos.dtype)
    rotated = torch.mul(wide, cos, out=out)
    if x.numel() <= _FEW:
        return rotated.addcmul_(_exchange(wide, pairing), sines)
    # for many elements, two operations on half of the coordinates are cheaper than a copy with the
    # coordinates exchanged
    (x0, x1), (y0, y1), (sine0, sine1) = (_halves(t, pairing) for t in (wide, rotated, sines))
    y0.addcmul_(x1, sine0)
    y1.addcmul_(x0, sine1)
    return rotated


def _write_rotated(rotated: Sequence[Tensor], outs: Sequence[Tensor], layout: Layout) -> None:
    """Round the rotated slices and write them to ``outs`` in the pairing of the output."""
    if layout.pairing != layout.pairing_out:
        rotated = [half for y in rotated for half in _halves(y, layout.pairing)]
        outs = [half for out in outs for half in _halves(out, layout.pairing_out)]
    copy_all(outs, rotated)


def _exchange(x: Tensor, pairing: Pairing) -> Tensor:
    """``x`` with the two coordinates of each pair exchanged."""
    num_pairs = x.shape[-1] // 2
    if by_pairing(pairing, half=True, interleaved=False):
        return x.roll(num_pairs, -1)
    return torch.unflatten(x, -1, (num_pairs, 2)).flip(-1).flatten(-2)


def _halves(x: Tensor, pairing: Pairing) -> Sequence[Tensor]:
    """Views ``[..., num_pairs]`` of the first coordinates of all pairs, and of the second."""
    if by_pairing(pairing, half=True, interleaved=False):
        return x.chunk(2, -1)
    return x[..., ::2], x[..., 1::2]
