"""What the public functions are given, made into the operator's arguments; nothing is written yet.

A fault is found here, once and in one wording. All below trusts a `Call`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from phasor._checks import (
    LAYOUTS,
    ErrorType,
    axes_hint,
    boolean,
    broadcasts,
    number,
    other_layout,
    short_repr,
    whole,
)
from phasor.errors import PositionError, SpecError, TensorError
from phasor.layers import rope_hint
from phasor.pairings import checked_pairing
from phasor.rope import Rope
from phasor.scaling import Rule
from phasor.torch._operator.internals import refuse_tracing
from phasor.torch._operator.text import layout_text

#: The dtypes that are rotated.
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_POSITION_DTYPES = {
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.uint16, torch.uint32, torch.float64, torch.float32),
}
_REFUSED_DTYPES = {
    torch.uint64: "those from 2**63 on are not int64; cast with .long()",
    torch.bool: "a bool is a mask; phasor.positions.padded makes positions of one",
    torch.bfloat16: "bfloat16 cannot tell 256 from 257",
    torch.float16: "float16 cannot tell 2048 from 2049",
}


class Call(NamedTuple):
    """The operator's arguments, checked."""

    xs: Sequence[Tensor]  # [..., seq, heads, head_dim]: one, or a query and a key of its tokens
    source: list[Tensor]  # [positions], or [cos, sin]
    text: str  # one of `_operator.text`
    inverse: bool
    gain: float
    backend: str


def call_by_positions(
    xs: Sequence[Tensor],
    positions: Any,
    rope: Rope,
    inverse: bool,
    gain: float,
    heads_first: bool,
    backend: str,
) -> Call:
    """The rotation of ``xs``, which are as `tokens_first` returns them."""
    check_rope(rope)
    positions = fit_positions(positions, xs, rope, heads_first)
    options = boolean("inverse", inverse), number("gain", gain), backend
    return Call(xs, [positions], rope.to_json(), *options)


def call_by_rows(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    pairing: str,
    pairing_out: str | None,
    rotary_start: int,
    inverse: bool,
    heads_first: bool,
    backend: str,
) -> Call:
    """The rotation of ``x`` by cos and sin. By head, a head is a token with one head."""
    refuse_tracing()
    (x,) = tokens_first([x], heads_first)
    _check_floating("x", x, LAYOUTS[heads_first], 3)
    for name, row in (("cos", cos), ("sin", sin)):
        _check_floating(name, row, "[..., seq, num_pairs]", 1)
        check_device(name, row, x.device)
    pairing = checked_pairing("pairing", pairing)
    pairing_out = pairing if pairing_out is None else checked_pairing("pairing_out", pairing_out)
    start = whole("rotary_start", rotary_start, least=0)
    if cos.shape != sin.shape:
        raise TensorError(
            f"sin must have the shape of cos {list(cos.shape)}, got {list(sin.shape)}"
        )
    if start + 2 * cos.shape[-1] > x.shape[-1]:
        raise TensorError(
            f"cos must hold one entry per pair: rotary_start + 2 * num_pairs is at most head_dim "
            f"({x.shape[-1]}), got {start} + 2 * {cos.shape[-1]}; of a full-width table take the "
            "first half"
        )
    by_head = cos.dim() >= x.dim()
    misfit = _misfit(cos.shape[:-1], x, x.dim() - (1 if by_head else 2), heads_first)
    if misfit:
        raise TensorError(f"cos and sin{' by head' if by_head else ''} {misfit}")
    if by_head and cos.shape[-2] == 1:
        cos, sin = cos.squeeze(-2), sin.squeeze(-2)
    elif by_head:
        # [..., seq, heads, head_dim] -> [..., seq, heads, 1, head_dim]
        x = x.unsqueeze(-2)
    text = layout_text(pairing, pairing_out, start)
    return Call([x], [cos, sin], text, boolean("inverse", inverse), 1.0, backend)


def tokens_first(xs: Sequence[Tensor], heads_first: bool) -> Sequence[Tensor]:
    """Views ``[..., seq, heads, head_dim]`` of ``xs``, which are ``xs`` unless heads come first.

    What is no tensor of heads stays as it is, to be refused by who checks it.
    """
    if heads_first is False:
        return xs
    boolean("heads_first", heads_first)
    refuse_tracing()
    # [..., heads, seq, head_dim] -> [..., seq, heads, head_dim]
    return [x.transpose(-3, -2) if _is_dense(x) and x.dim() > 2 else x for x in xs]


def fit_positions(
    positions: Any,
    xs: Sequence[Tensor],
    rope: Rope,
    heads_first: bool = False,
    names: Sequence[str] | None = None,
) -> Tensor:
    """``positions`` as a tensor that fits ``xs``, and these fit ``rope`` and one another.

    ``xs`` are as `tokens_first` returns them; the caller's layout and names are for messages.
    """
    refuse_tracing()
    for name, x in zip(names or names_of(xs), xs, strict=True):
        check_heads(name, x, rope, heads_first)
        check_device(name, x, xs[0].device)
    if xs[0].shape[:-2] != xs[-1].shape[:-2]:
        swapped = [x.transpose(-3, -2).shape[:-2] for x in xs]
        hint = other_layout("q and k are", heads_first) if swapped[0] == swapped[1] else ""
        raise TensorError(
            f"q and k must share their tokens [..., seq], got {list(xs[0].shape[:-2])} and "
            f"{list(xs[1].shape[:-2])}; rotate them one by one{hint}"
        )
    positions = read_positions(positions, xs[0].device, rope)
    shape = positions.shape[:-1] if rope.axes.n_axes > 1 else positions.shape
    misfit = _misfit(shape, xs[0], xs[0].dim() - 2, heads_first)
    if misfit:
        raise PositionError(f"positions {misfit}")
    return positions


def read_positions(positions: Any, device: torch.device, rope: Rope) -> Tensor:
    """``positions`` as a tensor on ``device`` with a coordinate for each axis of ``rope``."""
    if not isinstance(positions, Tensor):
        positions = _make_tensor(positions, device)
    check_is_tensor("positions", positions, PositionError)
    if positions.dtype not in _POSITION_DTYPES:
        reason = _REFUSED_DTYPES.get(
            positions.dtype, "a position is a real number that int64 or float64 holds"
        )
        raise PositionError(
            f"positions must be integers, float32 or float64, got {positions.dtype}: {reason}"
        )
    check_device("positions", positions, device, PositionError)
    if positions.requires_grad or forward_ad.unpack_dual(positions).tangent is not None:
        raise PositionError(
            "positions must not require a gradient, for none is computed; "
            "rotate_by differentiates with respect to cos and sin"
        )
    n_axes = rope.axes.n_axes
    if n_axes > 1 and (positions.dim() == 0 or positions.shape[-1] != n_axes):
        raise PositionError(
            f"positions must end in one coordinate per axis ({n_axes}) for "
            f"{type(rope.axes).__name__} axes, got shape {list(positions.shape)}; "
            f"{axes_hint(positions.shape, n_axes)}"
        )
    # torch has few operations for these two
    return positions.long() if positions.dtype in (torch.uint16, torch.uint32) else positions


def check_rope(rope: Any, name: str = "rope") -> None:
    """Refuse anything but a Rope whose law is known."""
    if not isinstance(rope, Rope):
        raise SpecError(f"{name} must be a phasor.Rope, got {type(rope).__name__}{rope_hint(rope)}")
    if isinstance(rope.scaling, Rule):
        rope.law()  # which says that the rule has to pick it first


def check_counts_tokens(rope: Rope) -> None:
    """Refuse to count positions for a Rope of several axes."""
    if rope.axes.n_axes > 1:
        raise PositionError(
            f"positions must be given for a Rope of {rope.axes.n_axes} axes, got None; "
            "phasor.positions.grid makes those of images and videos, multimodal those of text with "
            "images in it, every_axis those of text"
        )


def check_is_tensor(name: str, x: Any, error: ErrorType = TensorError) -> None:
    """Refuse anything but a dense, strided tensor."""
    if not _is_dense(x):
        got = type(x).__name__
        if isinstance(x, Tensor):
            got = f"{'a nested one' if x.is_nested else x.layout}; pad it, or .to_dense() it"
        elif x is None and name in ("q", "k"):
            got += "; rotate takes one tensor alone"
        raise error(f"{name} must be a dense torch.Tensor, got {got}")


def check_heads(name: str, x: Any, rope: Rope, heads_first: bool = False) -> None:
    """Refuse a tensor that ``rope`` does not rotate."""
    _check_floating(name, x, LAYOUTS[heads_first], 3)
    if x.shape[-1] != rope.head_dim:
        raise TensorError(f"{name} must end in head_dim ({rope.head_dim}), got {x.shape[-1]}")


def check_device(
    name: str, x: Tensor, device: torch.device, error: ErrorType = TensorError
) -> None:
    """Refuse a tensor that is not where the others are."""
    if x.device != device:
        raise error(f"{name} must be on the device of the tensors ({device}), got {x.device}")


def names_of(xs: Sequence[Tensor]) -> tuple[str, ...]:
    """The names that the public functions give their tensors."""
    return ("x",) if len(xs) == 1 else ("q", "k")


def _is_dense(x: object) -> bool:
    return isinstance(x, Tensor) and not x.is_nested and x.layout == torch.strided


def _check_floating(name: str, x: Any, shape: str, least_dims: int) -> None:
    check_is_tensor(name, x)
    if x.dtype not in DTYPES:
        raise TensorError(f"{name} must be float64, float32, bfloat16 or float16, got {x.dtype}")
    if x.dim() < least_dims:
        raise TensorError(f"{name} must be {shape}, got shape {list(x.shape)}")


def _misfit(shape: Sequence[int], x: Tensor, dims: int, heads_first: bool) -> str:
    """Why ``shape`` does not broadcast to the first ``dims`` dimensions of ``x``; else ""."""
    if broadcasts(shape, x.shape[:dims]):
        return ""
    fits_other = broadcasts(shape, x.transpose(-3, -2).shape[:dims])
    return (
        f"must broadcast to the leading dimensions {list(x.shape[:dims])} of x "
        f"{LAYOUTS[heads_first]}, got {list(shape)}"
        f"{other_layout('x is', heads_first) if fits_other else ''}"
    )


def _make_tensor(positions: Any, device: torch.device) -> Tensor:
    """Numbers, lists and arrays as a tensor of their own precision: a float is a float64."""
    if type(positions) is int or type(positions) is float:
        dtype = torch.int64 if type(positions) is int else torch.float64
        try:
            return torch.tensor(positions, dtype=dtype, device=device)
        except (OverflowError, RuntimeError, ValueError) as error:
            raise PositionError(
                f"positions must fit 64 bits, got {short_repr(positions)}: {error}"
            ) from None
    try:
        array = np.asarray(positions)
        # torch reads neither foreign byte order, nor negative strides, nor read-only memory
        native = array.astype(array.dtype.newbyteorder("="), order="C")
        return torch.from_numpy(native).to(device)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise PositionError(f"positions must be an array of numbers: {error}") from None
