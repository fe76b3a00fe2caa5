"""What the public verbs take, checked before anything is read or written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from phasor._checks import number, shown
from phasor.errors import PositionError, SpecError, TensorError
from phasor.pairings import PAIRINGS
from phasor.rope import Rope
from phasor.scaling import Rule
from phasor.torch._internals import unheard
from phasor.torch._layout import layout_text
from phasor.torch._torchscript import refuse_tracing

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_POSITIONS = {
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.uint16, torch.uint32, torch.float64, torch.float32),
}
_WHY_NOT = {
    torch.uint64: "those from 2**63 on are not int64; cast with .long()",
    torch.bool: "a bool is a mask; phasor.positions.padded makes positions of one",
    torch.bfloat16: "bfloat16 cannot tell 256 from 257",
    torch.float16: "float16 cannot tell 2048 from 2049",
}


def is_plain(xs: Sequence[Any], positions: Any, rope: Any, inverse: Any, gain: Any) -> bool:
    """Whether a kernel may take these as they are: nobody listens, and nothing is converted.

    Shapes, dtypes and memory are the kernel's own to check.
    """
    return (
        unheard(xs)
        and type(positions) is Tensor
        and not positions.is_neg()
        and type(rope) is Rope
        and (type(gain) is float or type(gain) is int)
        and -math.inf < gain < math.inf
        and type(inverse) is bool
    )


def checked_positions(positions: Any, xs: Sequence[Tensor], rope: Rope) -> Tensor:
    """``positions`` as a tensor that fits ``xs`` and ``rope``, or an error that says why not."""
    refuse_tracing()
    if not isinstance(cast(object, rope), Rope) or isinstance(rope.scaling, Rule):
        check_rope(rope)
    for name, x in zip(names_of(xs), xs, strict=True):
        check_heads(name, x, rope)
    _check_shared_tokens(xs)
    given = _as_tensor(positions, xs[0].device)
    n_axes = rope.axes.n_axes
    if n_axes > 1 and (given.dim() == 0 or given.shape[-1] != n_axes):
        raise PositionError(
            f"positions must end in one coordinate per axis ({n_axes}) for "
            f"{type(rope.axes).__name__} axes, got shape {list(given.shape)}; "
            "phasor.positions.every_axis repeats text positions"
        )
    tokens = given.shape[:-1] if n_axes > 1 else given.shape
    if not _broadcasts(tokens, xs[0].shape[:-2]):
        raise PositionError(
            f"positions must be a scalar or broadcast to the leading dimensions "
            f"{list(xs[0].shape[:-2])} of x [..., seq, heads, head_dim], got {list(tokens)}"
        )
    return given


def checked_rows(
    x: Tensor, cos: Tensor, sin: Tensor, pairing: str, pairing_out: str | None, rotary_start: int
) -> str:
    """The operator's text for rows that fit ``x``, or an error that says why not."""
    refuse_tracing()
    _check_kind("x", x)
    out = pairing if pairing_out is None else pairing_out
    for name, row in (("cos", cos), ("sin", sin)):
        check_is_tensor(name, row)
        if row.dtype not in DTYPES or row.dim() == 0:
            raise TensorError(
                f"{name} must be a real floating tensor [..., seq, num_pairs], "
                f"got {row.dtype} of shape {list(row.shape)}"
            )
        if row.device != x.device:
            raise TensorError(f"{name} must be on the device of x ({x.device}), got {row.device}")
    for name, value in (("pairing", pairing), ("pairing_out", out)):
        if value not in PAIRINGS:
            known = " or ".join(map(repr, PAIRINGS))
            raise SpecError(f"{name} must be {known}, got {value!r}")
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
    if not _broadcasts(cos.shape[:-1], x.shape[:-2]):
        raise TensorError(
            f"cos and sin must broadcast to the leading dimensions {list(x.shape[:-2])} of x "
            f"[..., seq, heads, head_dim], got {list(cos.shape[:-1])}"
        )
    return layout_text(pairing, out, rotary_start)


def checked_options(inverse: Any, gain: Any) -> tuple[bool, float]:
    """``inverse`` and ``gain`` as the operator takes them; neither records a gradient."""
    if type(inverse) is not bool:
        raise SpecError(f"inverse must be True or False, got {shown(inverse)}")
    return inverse, number("gain", gain)


def check_rope(rope: Any, name: str = "rope") -> None:
    """Refuse anything but a Rope whose law is known."""
    if not isinstance(rope, Rope):
        raise SpecError(f"{name} must be a phasor.Rope, got {type(rope).__name__}")
    rope.law()  # which says that a rule has to pick its law first


def check_is_tensor(name: str, x: Any) -> None:
    """Refuse anything but a tensor with memory to walk over."""
    if not isinstance(x, Tensor):
        raise TensorError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.is_nested or x.layout != torch.strided:
        kind = "a nested tensor" if x.is_nested else str(x.layout)
        raise TensorError(f"{name} must be a dense tensor, got {kind}; pad it, or .to_dense() it")


def check_heads(name: str, x: Any, rope: Rope) -> None:
    """Refuse a tensor that ``rope`` does not rotate."""
    _check_kind(name, x)
    if x.shape[-1] != rope.head_dim:
        raise TensorError(
            f"{name} must end in head_dim ({rope.head_dim}), got shape {list(x.shape)}"
        )


def names_of(xs: Sequence[Tensor]) -> tuple[str, ...]:
    """What the verbs call their tensors."""
    return ("x",) if len(xs) == 1 else ("q", "k")


def _check_kind(name: str, x: Any) -> None:
    check_is_tensor(name, x)
    if x.dtype not in DTYPES:
        raise TensorError(f"{name} must be float64, float32, bfloat16 or float16, got {x.dtype}")
    if x.dim() < 3:
        raise TensorError(f"{name} must be [..., seq, heads, head_dim], got shape {list(x.shape)}")


def _check_shared_tokens(xs: Sequence[Tensor]) -> None:
    first, last = xs[0], xs[-1]
    if first.shape[:-2] != last.shape[:-2]:
        raise TensorError(
            f"q and k must share their tokens [..., seq], got {list(first.shape[:-2])} and "
            f"{list(last.shape[:-2])}; rotate them one by one"
        )
    if first.device != last.device:
        raise TensorError(f"q and k must be on one device, got {first.device} and {last.device}")


def _as_tensor(positions: Any, device: torch.device) -> Tensor:
    given = positions if isinstance(positions, Tensor) else _from_python(positions, device)
    if given.is_nested or given.layout != torch.strided:
        raise PositionError("positions must be a dense tensor, got one that is not strided")
    if given.dtype not in _POSITIONS:
        why = _WHY_NOT.get(given.dtype, "a position is a real number that int64 or float64 holds")
        raise PositionError(
            f"positions must be integers, float32 or float64, got {given.dtype}: {why}"
        )
    if given.device != device:
        raise PositionError(
            f"positions must be on the device of the tensors ({device}), got {given.device}"
        )
    if given.requires_grad or forward_ad.unpack_dual(given).tangent is not None:
        raise PositionError(
            "positions must not require a gradient, for none is computed; "
            "rotate_by differentiates with respect to cos and sin"
        )
    # torch computes little with these two
    return given.long() if given.dtype in (torch.uint16, torch.uint32) else given


def _from_python(positions: Any, device: torch.device) -> Tensor:
    """Numbers, lists and arrays as a tensor of their own precision: a float is a float64."""
    if type(positions) is int or type(positions) is float:
        kind = torch.int64 if type(positions) is int else torch.float64
        try:
            return torch.tensor(positions, dtype=kind, device=device)
        except (OverflowError, RuntimeError, ValueError) as error:
            raise PositionError(
                f"positions must fit 64 bits, got {shown(positions)}: {error}"
            ) from None
    try:
        array = np.asarray(positions)
        # torch reads neither foreign byte order, nor negative strides, nor read-only memory
        native = array.astype(array.dtype.newbyteorder("="), order="C")
        return torch.from_numpy(native).to(device)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise PositionError(f"positions must be an array of numbers: {error}") from None


def _broadcasts(tokens: Sequence[int], lead: Sequence[int]) -> bool:
    if len(tokens) > len(lead):
        return False
    pairs = zip(reversed(tokens), reversed(lead), strict=False)
    # in this order: where a length is unknown, whether it is 1 is not asked
    return all(t == n or t == 1 for t, n in pairs)
