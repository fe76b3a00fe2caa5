"""Check the arguments of the public functions and convert them to the operators' arguments.

All errors about arguments are raised here, before anything is written. The code that receives a
`Turn` does not check it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from phasor import _tensors
from phasor._checks import boolean, short_repr, unmasked
from phasor.errors import PositionError
from phasor.pairings import Pairing
from phasor.torch._operator.internals import refuse_tracing

#: The dtypes that can be rotated, and the dtypes of positions.
DTYPES = tuple(getattr(torch, name) for name in _tensors.DTYPES)
POSITION_DTYPES = frozenset(getattr(torch, name) for name in _tensors.POSITION_DTYPES)


class Layout(NamedTuple):
    """Which coordinates form pairs, in the input and in the output."""

    pairing: Pairing
    pairing_out: Pairing
    rotary_start: int

    def transposed(self) -> Layout:
        """The layout of the transpose, which reads the pairs that the rotation writes."""
        return Layout(self.pairing_out, self.pairing, self.rotary_start)


class Turn(NamedTuple):
    """The checked arguments of the operator that turns tensors by cos and sin."""

    xs: Sequence[Tensor]  # [..., seq, heads, head_dim]: one tensor, or a query and its key
    cos: Tensor  # [..., seq, num_pairs]
    sin: Tensor
    pairing: Pairing
    pairing_out: Pairing
    rotary_start: int
    transposed: bool = False  # apply the transpose: negate sin and swap the two pairings
    backend: str = "auto"

    def layout(self) -> Layout:
        """Which pairs are read and written, whether transposed or not."""
        layout = Layout(self.pairing, self.pairing_out, self.rotary_start)
        return layout.transposed() if self.transposed else layout


class Rows:
    """Cos and sin of a Rotation for calls that bypass the dispatcher, with cached facts."""

    __slots__ = (
        "are_plain",
        "cos",
        "device_type",
        "factors",
        "head_dim",
        "layout",
        "plan",
        "sin",
        "transpose",
        "transposed",
    )

    def __init__(
        self,
        cos: Tensor,
        sin: Tensor,
        layout: Layout,
        head_dim: int | None,
        device_type: str,
        *,
        are_plain: bool,
        transposed: bool = False,
    ) -> None:
        self.cos, self.sin = cos, sin  # [..., seq, num_pairs]
        self.layout, self.head_dim = layout, head_dim
        self.device_type = device_type  # kept, because torch makes a new string every time
        self.are_plain = are_plain  # whether both are plain tensors, not subclasses or negated
        self.transposed = transposed  # as in a Turn
        self.plan: bytes | None = None  # the C++ kernel's plan, once it is known
        # the factors of plain operations, and the versions of cos and sin they were made from
        self.factors: tuple[tuple[int, int], tuple[Tensor, Tensor]] | None = None
        self.transpose: Rows | None = None

    def pairs(self) -> Layout:
        """Which pairs are read and written, whether transposed or not."""
        return self.layout.transposed() if self.transposed else self.layout

    def for_gradients(self) -> Rows:
        """The transpose, which rotates gradients."""
        if self.transpose is None:
            fields = self.cos, self.sin, self.layout, self.head_dim, self.device_type
            transposed = not self.transposed
            self.transpose = Rows(*fields, are_plain=self.are_plain, transposed=transposed)
        return self.transpose


class TurnAt(NamedTuple):
    """The checked arguments of both operators, for a rotation in a single call."""

    xs: Sequence[Tensor]
    positions: Tensor  # [..., seq], or [..., seq, n_axes]
    text: str  # the JSON of a Rope
    layout: Layout
    transposed: bool
    gain: float
    backend: str


def turn_of(
    xs: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    layout: Layout,
    head_dim: int | None,
    heads_first: bool,
    backend: str,
) -> Turn:
    """The arguments for rotating ``xs`` by cos and sin, checked.

    ``head_dim`` is the width of a head, if known. If cos and sin are by head, every head of ``xs``
    becomes a token with one head.
    """
    refuse_tracing()
    has_heads = ARRAYS.check_turn(xs, cos, layout.rotary_start, head_dim, heads_first)
    xs = tokens_first(xs, heads_first)
    if has_heads and cos.shape[-2] == 1:
        cos, sin = cos.squeeze(-2), sin.squeeze(-2)
    elif has_heads:
        # [..., seq, heads, head_dim] -> [..., seq, heads, 1, head_dim]
        xs = [x.unsqueeze(-2) for x in xs]
    return Turn(xs, cos, sin, *layout, False, backend)


def tokens_first(xs: Sequence[Tensor], heads_first: bool) -> Sequence[Tensor]:
    """``xs`` with tokens before heads: views if heads come first, else ``xs`` itself.

    Anything that is not a tensor with heads is returned unchanged; later checks refuse it.
    """
    if heads_first is False:
        return xs
    boolean("heads_first", heads_first)
    refuse_tracing()
    # [..., heads, seq, head_dim] -> [..., seq, heads, head_dim]
    return [x.transpose(-3, -2) if _is_dense(x) and x.dim() > 2 else x for x in xs]


def _is_dense(x: object) -> bool:
    return isinstance(x, Tensor) and not x.is_nested and x.layout == torch.strided


def _find_fault(x: Tensor) -> str:
    if _is_dense(x):
        return ""
    return f"{'a nested one' if x.is_nested else x.layout}; pad it, or .to_dense() it"


def _get_device(x: Tensor) -> torch.device:  # torch.compile cannot trace attrgetter("device")
    return x.device


def _stop_gradient(positions: Tensor) -> Tensor:
    if positions.requires_grad or forward_ad.unpack_dual(positions).tangent is not None:
        raise _tensors.position_gradient_error()
    # torch supports few operations on these two dtypes
    return positions.long() if positions.dtype in (torch.uint16, torch.uint32) else positions


def _read_host(positions: Any, device: torch.device) -> Tensor:
    """A tensor of numbers, lists or arrays, in their own precision: float64 for a Python float."""
    positions = _make_tensor(positions, device)
    _tensors.check_position_dtype(positions.dtype, POSITION_DTYPES)
    return _stop_gradient(positions)


def _make_tensor(positions: Any, device: torch.device) -> Tensor:
    is_number = type(positions) is int or type(positions) is float
    unmasked("positions", positions, PositionError)
    try:
        if is_number:
            dtype = torch.int64 if type(positions) is int else torch.float64
            return torch.tensor(positions, dtype=dtype, device=device)
        array = np.asarray(positions)
        # torch cannot read foreign byte orders, negative strides or read-only memory
        native = array.astype(array.dtype.newbyteorder("="), order="C")
        return torch.from_numpy(native).to(device)
    except torch.OutOfMemoryError:  # a RuntimeError, but not about positions
        raise
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        expected = (
            f"fit 64 bits, got {short_repr(positions)}" if is_number else "be an array of numbers"
        )
        raise PositionError(f"positions must {expected}: {error}") from None


#: What the checks require of tensors.
ARRAYS = _tensors.Arrays(
    kind=Tensor,
    name="a dense torch.Tensor",
    dtypes=DTYPES,
    position_dtypes=POSITION_DTYPES,
    stop_gradient=_stop_gradient,
    read_host=_read_host,
    find_fault=_find_fault,
    get_device=_get_device,
)
