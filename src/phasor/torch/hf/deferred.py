"""What stands for cosines and sines in a patched model, and what rotates by it.

Rows are made once a forward pass for all layers, half as wide as the model's own. They travel
through its code in an opaque object, to the replacements of its rotation functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from phasor.errors import TensorError
from phasor.rope import Rope
from phasor.scaling import Rule
from phasor.torch._operator import ops
from phasor.torch._operator.angles import cos_sin, positions_of_pairs
from phasor.torch._operator.internals import cached_constant
from phasor.torch._operator.text import compute_dtype, count_axes, layout_text, read_rope
from phasor.torch.hf.signatures import (
    COMPLEX_ROWS,
    RotationSignature,
    heads_come_first,
    join_heads,
    measure_signature,
    parameters,
    split_heads,
    split_last,
    tensor_parameters,
)


class PositionFormat(NamedTuple):
    """How a foreign module takes the positions of tokens, mostly as ``position_ids``."""

    axes_last: bool = False  # of several axes: [..., seq, axes], and not [axes, batch, seq]
    batched: bool = True  # whether positions have a batch, [batch, seq]
    axis_order: tuple[int, ...] = ()  # the coordinate of each axis of the Rope, if out of order
    fixed_positions: tuple[tuple[int, ...], ...] = ()  # of all tokens, where it takes none


_PLAIN_FORMAT = PositionFormat()


@dataclass(frozen=True)
class RopeOfKind:
    """How one kind of layer rotates."""

    # Objects that a module holds: a compiler can follow their methods, but not those of one that a
    # text describes.
    rope: Rope  # counter-clockwise
    position_format: PositionFormat = _PLAIN_FORMAT
    is_complex: bool = False  # whether the model's code has one complex number for cos and sin


class DeferredCosSin:
    """Stands where a model expects cosines, sines, or both; it can only be moved and negated."""

    # no dataclass, tuple or tensor: FSDP rounds what it finds in those to the parameters' dtype

    def __init__(self, cos: Tensor, sin: Tensor, inverse: bool = False) -> None:
        self.cos, self.sin = cos, sin  # [..., seq, num_pairs], with the gain
        self.inverse = inverse  # it undoes the rotation, as the negative of a sine does

    def __neg__(self) -> DeferredCosSin:
        return DeferredCosSin(self.cos, self.sin, not self.inverse)

    def to(self, *args: Any, **kwargs: Any) -> DeferredCosSin:
        """Move to another device; a change of dtype is ignored, for rows keep their own."""
        device = kwargs.get("device", args[0] if args else None)
        if isinstance(device, (str, int, torch.device)):
            return DeferredCosSin(self.cos.to(device), self.sin.to(device), self.inverse)
        return self

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"cos and sin of a patched model can only be moved, negated and rotated by: no {name}"
        )


def defer_cos_sin(kind: RopeOfKind, position_ids: Tensor, dtype: torch.dtype) -> DeferredCosSin:
    """What stands for the cosines of a model's ``position_ids``, for hidden states of ``dtype``."""
    positions, its_format, text = position_ids, kind.position_format, kind.rope.to_json()
    n_axes = count_axes(text)
    if n_axes > 1 and not its_format.axes_last:
        # [axes, batch, seq] -> [batch, seq, axes]
        positions = (positions[None] if positions.dim() == 2 else positions).movedim(0, -1)
        if positions.shape[-1] == 1:  # one coordinate stands for all
            positions = positions.expand(*positions.shape[:-1], n_axes)
    if its_format.axis_order:
        positions = positions[..., list(its_format.axis_order)]
    dtype = compute_dtype(dtype)
    with torch.no_grad():
        if isinstance(kind.rope.scaling, Rule):
            return DeferredCosSin(*_rule_rows(kind.rope, text, positions, dtype))
        cos, sin = cos_sin(positions, text, dtype)
        gain = _gain(text)
        return DeferredCosSin(cos * gain, sin * gain)


@cached_constant
def _gain(text: str) -> float:
    return read_rope(text).attention_factor


# ---- rows under a rule ----


def _rule_rows(
    rope: Rope, text: str, positions: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Rows ``[..., seq, num_pairs]`` of cos and sin, with gain, under ``rope.at(max + 1)``."""
    # by tensor operations alone, which a compiler can follow and no device waits for
    length = (positions.max() + 1).double()
    # numbers, not tensors: a compiler takes only one tensor as a constant from one function
    spectra = [length.new_tensor(spectrum) for spectrum in _plain_spectra(text)]
    scaled = [cast(Rule, rope.scaling).at_lengths(length, it, torch) for it in spectra]
    if scaled[0] is None:
        inv_freq, gain = _law_at(text, length)
    else:
        inv_freq, gain = torch.cat([first for first, _ in cast(Any, scaled)], -1), scaled[0][1]
    if rope.inv_freq_dtype == "float32":
        inv_freq = inv_freq.float().double()
    # frequencies that only the device knows are float64, which holds no fixed-point fraction
    angles = positions_of_pairs(positions, text).double() * inv_freq
    return (angles.cos() * gain).to(dtype), (angles.sin() * gain).to(dtype)


@cached_constant
def _plain_spectra(text: str) -> tuple[tuple[float, ...], ...]:
    """The frequencies of every spectrum before the rule."""
    rope = read_rope(text)
    widths = rope.axes.spectra(rope.num_pairs)
    plain = [Rope(head_dim=2 * n, pairing="half", base=rope.base) for n in widths]
    return tuple(tuple(spectrum.inv_freq.tolist()) for spectrum in plain)


def _read_law(text: str, length: Tensor) -> tuple[Tensor, float]:
    law = read_rope(text).at(max(1, math.ceil(length)))
    return length.new_tensor(law.inv_freq), law.attention_factor


# a rule without at_lengths needs the length as a number, which no graph holds
_law_at: Callable[[str, Tensor], tuple[Tensor, float]] = cast(Any, torch.compiler).disable(
    _read_law, reason="the rule has no at_lengths: its length is read"
)


# ---- the replacement of a rotation function ----


def rotate_deferred(
    xs: Sequence[Tensor], rows: DeferredCosSin, signature: RotationSignature
) -> list[Tensor]:
    """``xs`` rotated as a function of that signature does."""
    heads_first = signature.heads_first
    inverse = rows.inverse is (signature.direction > 0)
    if inverse and signature.pairing != signature.pairing_out:
        raise TensorError(
            "a negative sine must go to a function that writes the pairs it reads, got one that "
            f"reads {signature.pairing} and writes {signature.pairing_out} pairs"
        )
    # [..., heads, seq, head_dim] -> [..., seq, heads, head_dim], as the operator takes them
    xs = [x.transpose(-3, -2) if heads_first else x for x in xs]
    head_dim, rotary_dim = xs[0].shape[-1], 2 * rows.cos.shape[-1]
    spare = head_dim - rotary_dim
    if spare < 0 or (spare and signature.slice == "exact"):
        raise TensorError(
            f"the rotated tensors must end in {rotary_dim} coordinates, got {head_dim}"
        )
    start = spare if signature.slice == "end" else 0
    text = layout_text(signature.pairing, signature.pairing_out, start)
    angles = [rows.cos, rows.sin]
    if signature.subheads > 1:
        xs = [split_heads(x, signature.subheads) for x in xs]
        # [..., seq, num_pairs] -> [..., seq, subheads, num_pairs / subheads]
        angles = [split_last(row, signature.subheads) for row in angles]
    ys = ops.apply(xs, angles, text, inverse, 1.0, "auto")
    if signature.subheads > 1:
        ys = [join_heads(y) for y in ys]
    return [y.transpose(-3, -2) if heads_first else y for y in ys]


def substitute(function: Any) -> Callable[..., Any]:
    """The replacement of ``function``, for `DeferredCosSin`."""
    # by the rank of rows: [batch, seq, num_pairs] or [seq, num_pairs]
    signatures = {3: measure_signature(function), 2: measure_signature(function, False)}
    if not any(signatures.values()):
        raise TensorError(f"{function} must be a rotation that phasor understands")
    names, tensors = tuple(parameters(function)), tensor_parameters(function)
    # one object stands for cosines and sines, but only a sine may be negative
    row = next(name for name in ("sin", *COMPLEX_ROWS) if name in names)

    def rotation(*args: Any, **kwargs: Any) -> Any:
        values = {**dict(zip(names, args, strict=False)), **kwargs}
        rows, unsqueeze_dim = values[row], values.get("unsqueeze_dim")
        if not isinstance(rows, DeferredCosSin):
            raise TensorError(
                "cos and sin must come from a rotary embedding of the patched model, got "
                f"{type(rows).__name__}; unpatch the model before handing it cosines of your own"
            )
        signature = signatures[rows.cos.dim()]
        assert signature is not None, "a copy of every module that calls it has run"
        if unsqueeze_dim is not None:
            heads_first = heads_come_first(unsqueeze_dim, rows.cos.dim())
            signature = signature._replace(heads_first=heads_first)
        xs = [values[name] for name in tensors]
        # a key may be None, where only queries are rotated
        ys = rotate_deferred([x for x in xs if x is not None], rows, signature)
        return ys[0] if len(xs) == 1 else (ys[0], ys[1] if len(ys) > 1 else None)

    return rotation
