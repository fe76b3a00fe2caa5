"""What the public functions are given, made into the operators' arguments; nothing is written yet.

A fault is found here, once and in one wording. All below trusts a `Turn`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from phasor import _tensors
from phasor._checks import ErrorType, boolean, short_repr, unmasked
from phasor._tensors import LAYOUTS
from phasor.errors import PositionError, TensorError
from phasor.pairings import Pairing
from phasor.rope import Rope
from phasor.torch._operator.internals import refuse_tracing

#: The dtypes that are rotated, and those of positions.
DTYPES = tuple(getattr(torch, name) for name in _tensors.DTYPES)
POSITION_DTYPES = frozenset(getattr(torch, name) for name in _tensors.POSITION_DTYPES)


class Layout(NamedTuple):
    """Which coordinates are the pairs, on the way in and on the way out."""

    pairing: Pairing
    pairing_out: Pairing
    rotary_start: int

    def transposed(self) -> Layout:
        """That of the transpose, which reads what the rotation wrote."""
        return Layout(self.pairing_out, self.pairing, self.rotary_start)


class Turn(NamedTuple):
    """The arguments of the operator that turns tensors by cos and sin, checked."""

    xs: Sequence[Tensor]  # [..., seq, heads, head_dim]: one, or a query and a key of its tokens
    cos: Tensor  # [..., seq, num_pairs]
    sin: Tensor
    pairing: Pairing
    pairing_out: Pairing
    rotary_start: int
    transposed: bool = False  # the matrix's transpose: sin changes sign, and the pairings places
    backend: str = "auto"

    def layout(self) -> Layout:
        """The pairs that are read and written."""
        layout = Layout(self.pairing, self.pairing_out, self.rotary_start)
        return layout.transposed() if self.transposed else layout


class Rows:
    """Cos and sin of a Rotation for calls past the dispatcher, and what need not be asked again."""

    __slots__ = ("are_plain", "cos", "head_dim", "layout", "plan", "sin")

    def __init__(
        self, cos: Tensor, sin: Tensor, layout: Layout, head_dim: int | None, are_plain: bool
    ) -> None:
        self.cos, self.sin = cos, sin  # [..., seq, num_pairs]
        self.layout, self.head_dim = layout, head_dim
        self.are_plain = are_plain  # tensors of torch's own class, which hold what is in memory
        self.plan: bytes | None = None  # of the kernel in C++, which makes it in its first call


class TurnAt(NamedTuple):
    """The arguments of a rotation in one call, checked: those of both operators."""

    xs: Sequence[Tensor]
    positions: Tensor  # [..., seq], or [..., seq, n_axes]
    text: str  # of a Rope
    layout: Layout
    transposed: bool
    gain: float
    backend: str


def check_rows(cos: Any, sin: Any) -> None:
    """Refuse cos and sin that are no two tensors of floats of one shape on one device."""
    for name, row in (("cos", cos), ("sin", sin)):
        _check_floating(name, row, "[..., seq, num_pairs]", 1)
    check_device("sin", sin, cos.device)
    _tensors.check_same_shape(cos.shape, sin.shape)


def turn_of(
    xs: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    layout: Layout,
    head_dim: int | None,
    heads_first: bool,
    backend: str,
) -> Turn:
    """The turn of ``xs`` by cos and sin. By head, a head is a token with one head.

    ``xs`` are as `tokens_first` returns them; ``head_dim`` is their width, if it is known.
    """
    refuse_tracing()
    for name, x in zip(names_of(xs), xs, strict=True):
        _check_floating(name, x, LAYOUTS[heads_first], 3)
        if head_dim is not None:
            _tensors.check_width(name, x.shape, head_dim)
        check_device(name, x, xs[0].device)
    check_device("rotation", cos, xs[0].device)
    _tensors.check_shared_tokens(xs[0].shape, xs[-1].shape, heads_first)
    shapes = [x.shape for x in xs]
    start = layout.rotary_start
    by_head = [_tensors.check_rows(cos.shape, shape, start, heads_first) for shape in shapes]
    if by_head[0] and cos.shape[-2] == 1:
        cos, sin = cos.squeeze(-2), sin.squeeze(-2)
    elif by_head[0]:
        # [..., seq, heads, head_dim] -> [..., seq, heads, 1, head_dim]
        xs = [x.unsqueeze(-2) for x in xs]
    return Turn(xs, cos, sin, *layout, False, backend)


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
    _tensors.check_shared_tokens(xs[0].shape, xs[-1].shape, heads_first)
    positions = read_positions(positions, xs[0].device, rope)
    _tensors.check_placed(positions.shape, xs[0].shape, rope, heads_first)
    return positions


def read_positions(positions: Any, device: torch.device, rope: Rope) -> Tensor:
    """``positions`` as a tensor on ``device`` with a coordinate for each axis of ``rope``."""
    if not isinstance(positions, Tensor):
        positions = _make_tensor(positions, device)
    check_is_tensor("positions", positions, PositionError)
    _tensors.check_position_dtype(positions.dtype, POSITION_DTYPES)
    check_device("positions", positions, device, PositionError)
    if positions.requires_grad or forward_ad.unpack_dual(positions).tangent is not None:
        raise _tensors.position_gradient_error()
    _tensors.check_coordinates(positions.shape, rope)
    # torch has few operations for these two
    return positions.long() if positions.dtype in (torch.uint16, torch.uint32) else positions


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
    _tensors.check_width(name, x.shape, rope.head_dim)


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
    _tensors.check_floating(name, x.dtype, DTYPES, x.shape, shape, least_dims)


def _make_tensor(positions: Any, device: torch.device) -> Tensor:
    """Numbers, lists and arrays as a tensor of their own precision: a float is a float64."""
    is_number = type(positions) is int or type(positions) is float
    unmasked("positions", positions, PositionError)
    try:
        if is_number:
            dtype = torch.int64 if type(positions) is int else torch.float64
            return torch.tensor(positions, dtype=dtype, device=device)
        array = np.asarray(positions)
        # torch reads neither foreign byte order, nor negative strides, nor read-only memory
        native = array.astype(array.dtype.newbyteorder("="), order="C")
        return torch.from_numpy(native).to(device)
    except torch.OutOfMemoryError:  # a RuntimeError, but not about positions
        raise
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        expected = (
            f"fit 64 bits, got {short_repr(positions)}" if is_number else "be an array of numbers"
        )
        raise PositionError(f"positions must {expected}: {error}") from None
