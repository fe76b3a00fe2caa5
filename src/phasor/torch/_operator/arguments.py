"""Checks of the public functions' arguments, before anything is read or written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from phasor._checks import LAYOUTS, axes_hint, boolean, broadcasts, number, other_layout, short_repr
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


def tokens_first(
    xs: Sequence[Tensor], heads_first: bool, names: Sequence[str] | None = None
) -> Sequence[Tensor]:
    """Views ``[..., seq, heads, head_dim]`` of ``xs``, which are ``xs`` unless heads come first."""
    if heads_first is False:
        return xs
    boolean("heads_first", heads_first)
    refuse_tracing()
    for name, x in zip(names or names_of(xs), xs, strict=True):
        _check_floating(name, x, heads_first)
    # [..., heads, seq, head_dim] -> [..., seq, heads, head_dim]
    return [x.transpose(-3, -2) for x in xs]


def checked_positions(
    positions: Any, xs: Sequence[Tensor], rope: Rope, heads_first: bool = False
) -> Tensor:
    """``positions`` as a tensor that fits ``xs`` and ``rope``, or an error that says why not.

    ``xs`` are as `tokens_first` returns them; ``heads_first`` is the caller's layout, for messages.
    """
    refuse_tracing()
    if not isinstance(cast(object, rope), Rope) or isinstance(rope.scaling, Rule):
        check_rope(rope)
    for name, x in zip(names_of(xs), xs, strict=True):
        check_heads(name, x, rope, heads_first)
    _check_shared_tokens(xs, heads_first)
    positions = checked_coordinates(positions, xs[0].device, rope)
    tokens = positions.shape[:-1] if rope.axes.n_axes > 1 else positions.shape
    if not broadcasts(tokens, xs[0].shape[:-2]):
        raise PositionError(
            f"positions must be a scalar or broadcast to the leading dimensions "
            f"{_describe_tokens(xs[0], heads_first)}, got {list(tokens)}"
            f"{_layout_hint(tokens, xs[0], heads_first)}"
        )
    return positions


def checked_coordinates(positions: Any, device: torch.device, rope: Rope) -> Tensor:
    """``positions`` as a tensor on ``device`` with a coordinate for each axis of ``rope``."""
    positions = _check_position_tensor(positions, device)
    n_axes = rope.axes.n_axes
    if n_axes > 1 and (positions.dim() == 0 or positions.shape[-1] != n_axes):
        raise PositionError(
            f"positions must end in one coordinate per axis ({n_axes}) for "
            f"{type(rope.axes).__name__} axes, got shape {list(positions.shape)}; "
            f"{axes_hint(positions.shape, n_axes)}"
        )
    return positions


def checked_cos_sin(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    pairing: str,
    pairing_out: str | None,
    rotary_start: int,
    heads_first: bool,
) -> str:
    """The operator's text for cos and sin that fit ``x``, or an error that says why not."""
    refuse_tracing()
    _check_floating("x", x, heads_first)
    output_pairing = pairing if pairing_out is None else pairing_out
    for name, values in (("cos", cos), ("sin", sin)):
        check_is_tensor(name, values)
        if values.dtype not in DTYPES or values.dim() == 0:
            raise TensorError(
                f"{name} must be a real floating tensor [..., seq, num_pairs], "
                f"got {values.dtype} of shape {list(values.shape)}"
            )
        if values.device != x.device:
            raise TensorError(
                f"{name} must be on the device of x ({x.device}), got {values.device}"
            )
    for name, value in (("pairing", pairing), ("pairing_out", output_pairing)):
        checked_pairing(name, value)
    if cos.shape != sin.shape:
        raise TensorError(
            f"sin must have the shape of cos {list(cos.shape)}, got {list(sin.shape)}"
        )
    if type(rotary_start) is not int:
        raise SpecError(f"rotary_start must be a whole number >= 0, got {rotary_start!r}")
    if rotary_start < 0 or rotary_start + 2 * cos.shape[-1] > x.shape[-1]:
        raise TensorError(
            f"cos must hold one entry per pair: rotary_start + 2 * num_pairs is at most head_dim "
            f"({x.shape[-1]}), got {rotary_start} + 2 * {cos.shape[-1]}; "
            "of a full-width table take the first half"
        )
    tokens = cos.shape[:-1]
    if cos.dim() == x.dim():  # by head
        if not broadcasts(tokens, x.shape[:-1]):
            raise TensorError(
                "cos and sin of as many dimensions as x must broadcast to its tokens and heads "
                f"{list(x.shape[:-1])}, got {list(tokens)}"
            )
    elif not broadcasts(tokens, x.shape[:-2]):
        raise TensorError(
            "cos and sin must broadcast to the leading dimensions "
            f"{_describe_tokens(x, heads_first)}, got {list(tokens)}"
            f"{_layout_hint(tokens, x, heads_first)}"
        )
    return layout_text(pairing, output_pairing, rotary_start)


def checked_options(inverse: Any, gain: Any) -> tuple[bool, float]:
    """``inverse`` and ``gain`` as the operator takes them; neither records a gradient."""
    return boolean("inverse", inverse), number("gain", gain)


def check_rope(rope: Any, name: str = "rope") -> None:
    """Refuse anything but a Rope whose law is known."""
    if not isinstance(rope, Rope):
        raise SpecError(f"{name} must be a phasor.Rope, got {type(rope).__name__}{rope_hint(rope)}")
    rope.law()  # which says that a rule has to pick its law first


def check_counts_tokens(rope: Rope) -> None:
    """Refuse to count positions for a Rope of several axes."""
    if rope.axes.n_axes > 1:
        raise PositionError(
            f"positions must be given for a Rope of {rope.axes.n_axes} axes, got None; "
            "phasor.positions.grid makes those of images and videos, multimodal those of text with "
            "images in it, every_axis those of text"
        )


def check_is_tensor(name: str, x: Any) -> None:
    """Refuse anything but a dense, strided tensor."""
    if not isinstance(x, Tensor):
        hint = "; rotate takes one tensor alone" if x is None and name in ("q", "k") else ""
        raise TensorError(f"{name} must be a torch.Tensor, got {type(x).__name__}{hint}")
    if x.is_nested or x.layout != torch.strided:
        kind = "a nested tensor" if x.is_nested else str(x.layout)
        raise TensorError(f"{name} must be a dense tensor, got {kind}; pad it, or .to_dense() it")


def check_heads(name: str, x: Any, rope: Rope, heads_first: bool = False) -> None:
    """Refuse a tensor that ``rope`` does not rotate."""
    _check_floating(name, x, heads_first)
    if x.shape[-1] != rope.head_dim:
        callers_x = x.transpose(-3, -2) if heads_first else x
        raise TensorError(
            f"{name} must end in head_dim ({rope.head_dim}), got shape {list(callers_x.shape)}"
        )


def names_of(xs: Sequence[Tensor]) -> tuple[str, ...]:
    """The names that the public functions give their tensors."""
    return ("x",) if len(xs) == 1 else ("q", "k")


def _check_floating(name: str, x: Any, heads_first: bool) -> None:
    check_is_tensor(name, x)
    if x.dtype not in DTYPES:
        raise TensorError(f"{name} must be float64, float32, bfloat16 or float16, got {x.dtype}")
    if x.dim() < 3:
        raise TensorError(f"{name} must be {LAYOUTS[heads_first]}, got shape {list(x.shape)}")


def _check_shared_tokens(xs: Sequence[Tensor], heads_first: bool) -> None:
    q, k = xs[0], xs[-1]
    if q.shape[:-2] != k.shape[:-2]:
        swapped = [(*x.shape[:-3], x.shape[-2]) for x in xs]
        hint = other_layout("q and k are", heads_first) if swapped[0] == swapped[1] else ""
        raise TensorError(
            f"q and k must share their tokens [..., seq], got {list(q.shape[:-2])} and "
            f"{list(k.shape[:-2])}; rotate them one by one{hint}"
        )
    if q.device != k.device:
        raise TensorError(f"q and k must be on one device, got {q.device} and {k.device}")


def _describe_tokens(x: Tensor, heads_first: bool) -> str:
    return f"{list(x.shape[:-2])} of x {LAYOUTS[heads_first]}"


def _layout_hint(tokens: Sequence[int], x: Tensor, heads_first: bool) -> str:
    """A hint at the other layout of ``x`` if ``tokens`` would fit that; else ""."""
    swapped = (*x.shape[:-3], x.shape[-2])
    return other_layout("x is", heads_first) if broadcasts(tokens, swapped) else ""


def _check_position_tensor(positions: Any, device: torch.device) -> Tensor:
    if not isinstance(positions, Tensor):
        positions = _make_tensor(positions, device)
    if positions.is_nested or positions.layout != torch.strided:
        raise PositionError("positions must be a dense tensor, got one that is not strided")
    if positions.dtype not in _POSITION_DTYPES:
        reason = _REFUSED_DTYPES.get(
            positions.dtype, "a position is a real number that int64 or float64 holds"
        )
        raise PositionError(
            f"positions must be integers, float32 or float64, got {positions.dtype}: {reason}"
        )
    if positions.device != device:
        raise PositionError(
            f"positions must be on the device of the tensors ({device}), got {positions.device}"
        )
    if positions.requires_grad or forward_ad.unpack_dual(positions).tangent is not None:
        raise PositionError(
            "positions must not require a gradient, for none is computed; "
            "rotate_by differentiates with respect to cos and sin"
        )
    # torch has few operations for these two
    return positions.long() if positions.dtype in (torch.uint16, torch.uint32) else positions


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
