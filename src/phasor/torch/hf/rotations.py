"""The rotation functions of transformers: the geometry of each, measured, and what replaces it.

In a patched model rows of cos and sin are made once a forward pass for all layers, half as wide as
the model's own. They travel through its code in an opaque object, to those replacements.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phasor.errors import TensorError
from phasor.pairings import PAIRINGS, Pairing
from phasor.rope import Rope
from phasor.scaling import Rule
from phasor.torch._operator import ops
from phasor.torch._operator.angles import cos_sin, positions_of_pairs
from phasor.torch._operator.arguments import Call
from phasor.torch._operator.internals import cached_constant
from phasor.torch._operator.text import compute_dtype, layout_text, read_rope

#: Parameters for cosines and sines as complex numbers.
COMPLEX_ROWS = ("freqs_cis", "freqs_ci")
ROWS = ("cos", "sin", *COMPLEX_ROWS)
_OPTIONS = ("position_ids", "unsqueeze_dim")
# of the heads that measure a function: rotated pairs, and further coordinates
_PAIRS, _SPARE = 4, 6
# a head rotates as one, or in halves by a coordinate each, as in the tower of Gemma 4
_SUBHEADS = (1, 2)
_TOLERANCE = 1e-6
# what a function reads, what it writes, and which way it turns where these are one
_PAIRINGS_AND_DIRECTIONS: list[tuple[Pairing, Pairing, int]] = [
    (source, target, direction)
    for source, target in itertools.product(PAIRINGS, PAIRINGS)
    for direction in ((1, -1) if source == target else (1,))
]
#: How a function takes cosines and sines: once per pair ("half"), with a copy after them ("twice"),
#: each twice in a row ("repeated"), or as complex numbers ("complex").
RowWidth = Literal["twice", "repeated", "half", "complex"]
RotatedSlice = Literal["start", "end", "exact"]


class RotationSignature(NamedTuple):
    """The geometry of one foreign rotation function, as it was measured."""

    pairing: Pairing
    pairing_out: Pairing
    direction: int  # -1 where positive angles turn clockwise
    slice: RotatedSlice  # of a head wider than the rotation; "exact" where it takes no such head
    width: RowWidth
    heads_first: bool  # whether tensors are [..., heads, seq, head_dim] by default
    subheads: int = 1  # equal parts of a head, each rotated as a head of its own


def parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function, by name."""
    # the kernels package turns a function into a module
    called = function.forward if isinstance(function, torch.nn.Module) else function
    return inspect.signature(called).parameters


def tensor_parameters(function: Any) -> tuple[str, ...]:
    """The parameters of a rotation function that it rotates: all but its rows and options."""
    return tuple(name for name in parameters(function) if name not in (*ROWS, *_OPTIONS))


@lru_cache(maxsize=256)
def measure_signature(function: Any, batched: bool = True) -> RotationSignature | None:
    """The geometry with which `rotate_deferred` does what a function does to random tensors."""
    rows = {*parameters(function)} & {*ROWS}
    takes_rows = rows == {"cos", "sin"} or len(rows) == 1
    if not takes_rows or len(tensor_parameters(function)) not in (1, 2):
        return None
    widths: tuple[RowWidth, ...] = ("twice", "repeated", "half") if len(rows) == 2 else ("complex",)
    shape = (1, 3, _PAIRS) if batched else (3, _PAIRS)  # of cosines, [..., seq, pairs]
    generator = torch.Generator().manual_seed(0)
    with torch.device("cpu"), torch.no_grad():
        phases = torch.rand(shape, generator=generator) * 6
        deferred = DeferredCosSin(phases.cos(), phases.sin())
        for subheads, width, heads_first in itertools.product(_SUBHEADS, widths, (True, False)):
            # a wider head shows which slice is rotated, if the function takes one
            for spare in (_SPARE, 0) if subheads == 1 else (0,):
                # [..., seq, heads, head_dim]
                x = torch.randn(*shape[:-1], 2, 2 * _PAIRS + spare, generator=generator)
                x = x.transpose(-3, -2) if heads_first else x
                try:
                    y = call_rotation(function, x, _make_rows(phases, width, subheads))
                except (RuntimeError, ValueError, IndexError, TypeError):
                    continue  # the function does not take these shapes
                places: tuple[RotatedSlice, ...] = ("start", "end") if spare else ("exact",)
                for pairings, place in itertools.product(_PAIRINGS_AND_DIRECTIONS, places):
                    found = RotationSignature(*pairings, place, width, heads_first, subheads)
                    (expected,) = rotate_deferred([x], deferred, found)
                    is_same = y.shape == x.shape and torch.allclose(expected, y, 0, _TOLERANCE)
                    if is_same:
                        return found
    return None


def call_rotation(function: Any, x: Tensor, rows: Any) -> Tensor:
    """``x`` rotated by ``function``, with rows ``(cos, sin)`` or complex numbers."""
    cos, sin = (rows, rows) if isinstance(rows, Tensor) else rows
    by_name = {"cos": cos, "sin": sin} | dict.fromkeys(COMPLEX_ROWS, cos)
    # those of Gemma 4's tower only say by their last size how many subheads there are
    by_name["position_ids"] = torch.zeros(*cos.shape[:-1], _SUBHEADS[-1])
    needed = {name for name, it in parameters(function).items() if it.default is it.empty}
    # a copy for each parameter, because a function may write into its arguments
    names = [name for name in parameters(function) if name in needed or name not in _OPTIONS]
    y = function(*(by_name[name] if name in by_name else x.clone() for name in names))
    return cast(Tensor, y[0] if isinstance(y, tuple) else y)


def _make_rows(phases: Tensor, width: RowWidth, subheads: int) -> Any:
    phases = split_last(phases, subheads)
    cos, sin = phases.cos(), phases.sin()
    match width:
        case "twice":
            return tuple(torch.cat((row, row), -1).flatten(-2) for row in (cos, sin))
        case "repeated":
            return tuple(row.repeat_interleave(2, -1).flatten(-2) for row in (cos, sin))
        case "half":
            return cos.flatten(-2), sin.flatten(-2)
        case "complex":
            return torch.complex(cos, sin).flatten(-2)


def split_last(x: Tensor, count: int) -> Tensor:
    """``[..., n] -> [..., count, n / count]``."""
    return x.reshape(*x.shape[:-1], count, -1)


class PositionFormat(NamedTuple):
    """How a foreign module takes the positions of tokens, mostly as ``position_ids``."""

    n_axes: int = 1
    axes_last: bool = False  # of several axes: [..., seq, axes], and not [axes, batch, seq]
    batched: bool = True  # whether positions have a batch, [batch, seq]
    axis_order: tuple[int, ...] = ()  # the coordinate of each axis of the Rope, if out of order
    fixed_positions: tuple[tuple[int, ...], ...] = ()  # of all tokens, where it takes none
    is_complex: bool = False  # whether one complex number stands for a cosine and its sine

    def position_ids(self, grid: NDArray[np.int64]) -> NDArray[np.int64]:
        """Positions ``[axes, seq]`` as the module takes them."""
        if self.axis_order:
            grid = grid[np.argsort(self.axis_order)]
        if self.axes_last:
            return grid.T[None] if self.batched else grid.T
        return grid if len(grid) == 1 else grid[:, None]

    def positions(self, position_ids: Tensor) -> Tensor:
        """The module's positions as a Rope takes them, ``[..., seq]`` or ``[..., seq, axes]``."""
        positions = position_ids
        if self.n_axes > 1 and not self.axes_last:
            # [axes, batch, seq] -> [batch, seq, axes]
            positions = (positions[None] if positions.dim() == 2 else positions).movedim(0, -1)
            if positions.shape[-1] == 1:  # one coordinate stands for all
                positions = positions.expand(*positions.shape[:-1], self.n_axes)
        return positions[..., list(self.axis_order)] if self.axis_order else positions


_PLAIN_FORMAT = PositionFormat()


@dataclass(frozen=True)
class RopeOfKind:
    """How one kind of layer rotates."""

    # Objects that a module holds: a compiler can follow their methods, but not those of one that a
    # text describes.
    rope: Rope  # counter-clockwise
    position_format: PositionFormat = _PLAIN_FORMAT


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
    positions, text = kind.position_format.positions(position_ids), kind.rope.to_json()
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
        raise TensorError(f"rotated tensors must end in {rotary_dim} coordinates, got {head_dim}")
    start = spare if signature.slice == "end" else 0
    text = layout_text(signature.pairing, signature.pairing_out, start)
    angles = [rows.cos, rows.sin]
    if signature.subheads > 1:
        # each part of a head is a token with rows of its own:
        # [..., seq, heads, head_dim] -> [..., seq, subheads, heads, head_dim / subheads]
        xs = [split_last(x, signature.subheads).transpose(-3, -2) for x in xs]
        # [..., seq, num_pairs] -> [..., seq, subheads, num_pairs / subheads]
        angles = [split_last(row, signature.subheads) for row in angles]
    ys = ops.apply(Call(xs, angles, text, inverse))
    if signature.subheads > 1:
        # [..., seq, subheads, heads, head_dim / subheads] -> [..., seq, heads, head_dim]
        ys = [y.transpose(-3, -2).flatten(-2) for y in ys]
    return [y.transpose(-3, -2) if heads_first else y for y in ys]


def substitute(function: Any) -> Callable[..., Any]:
    """The replacement of ``function``, for `DeferredCosSin`."""
    # for rows [batch, seq, num_pairs] and [seq, num_pairs], which most functions take alike
    batched, unbatched = measure_signature(function), measure_signature(function, False)
    if batched is None and unbatched is None:
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
        rank = rows.cos.dim()
        signature = (batched or unbatched) if rank > 2 else (unbatched or batched)
        assert signature is not None
        if unsqueeze_dim is not None:
            # of cosines [..., seq, width]: heads go before the tokens, or after them
            axis = unsqueeze_dim % (rank + 1)
            if axis not in (rank - 2, rank - 1):
                raise TensorError(
                    f"unsqueeze_dim must be {rank - 2} or {rank - 1} in a patched model, "
                    f"got {unsqueeze_dim}"
                )
            signature = signature._replace(heads_first=axis == rank - 2)
        # a key may be None, where only queries are rotated
        xs = [values[name] for name in tensors if values[name] is not None]
        ys = rotate_deferred(xs, rows, signature)
        return ys[0] if len(tensors) == 1 else (ys[0], ys[1] if len(ys) > 1 else None)

    return rotation
