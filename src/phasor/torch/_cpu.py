"""The operator on the CPU: one pass over memory, in C++ (see ``csrc``).

The extension reads tensors through DLPack, so it is built without torch's headers and serves every
torch that offers that interface. Where it could not be built, this backend does not serve, and a
warning says so once.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from phasor.angles import DIGITS
from phasor.errors import BackendError, PositionError, TensorError
from phasor.torch import _tables
from phasor.torch._layout import constant, count_axes, read_layout, read_rope
from phasor.torch._rows import TOO_FAR, reach, rows


def _connected() -> tuple[Any, str]:
    """The extension and no complaint, or None and what is missing."""
    try:
        native: Any = import_module("phasor._native")
    except ImportError as error:
        missing = f"its extension was not built ({error}); install phasor where a C++ compiler is"
        warnings.warn(
            f"phasor rotates with plain torch operations on this CPU: {missing}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None, missing
    exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if exchange is None:
        return None, f"torch {torch.__version__} lacks the DLPack exchange interface; update it"
    native.connect(exchange, TensorError, PositionError)
    return native, ""


def _path(native: Any) -> int:
    """Index of the instruction set to run: the best this machine has, or ``PHASOR_CPU``'s."""
    known = dict(native.paths())
    wanted = os.environ.get("PHASOR_CPU")
    if wanted is None:
        return list(known.values()).index(True)
    if not known.get(wanted):
        here = ", ".join(name for name, there in known.items() if there)
        raise BackendError(f"PHASOR_CPU must be one of {here} on this machine, got {wanted!r}")
    return list(known).index(wanted)


_native, _missing = _connected()
_running = 0 if _native is None else _path(_native)


def paths() -> tuple[str, ...]:
    """Instruction sets of which this machine runs one, best first; none without the extension."""
    return () if _native is None else tuple(name for name, there in _native.paths() if there)


def refusal(x: Tensor) -> str:
    """Why this backend cannot rotate ``x``; nothing if it can."""
    if x.device.type != "cpu":
        return f"it needs a tensor in the CPU's memory, got one on {x.device}"
    return _missing


def rotate(
    xs: Sequence[Tensor], angles: Sequence[Tensor], rope: str, inverse: bool, gain: float
) -> list[Tensor]:
    """New tensors with the strides of ``xs``; the operator's out-of-place kernel."""
    outs = [torch.empty_like(x) for x in xs]
    _sweep(xs, outs, angles, rope, inverse, gain)
    return outs


def rotate_(
    xs: Sequence[Tensor], angles: Sequence[Tensor], rope: str, inverse: bool, gain: float
) -> None:
    """The operator's in-place kernel: only the rotated slice is written."""
    _sweep(xs, xs, angles, rope, inverse, gain)
    torch.autograd.graph.increment_version([x for x in xs if not x.is_inference()])


def _sweep(
    xs: Sequence[Tensor],
    outs: Sequence[Tensor],
    angles: Sequence[Tensor],
    rope: str,
    inverse: bool,
    gain: float,
) -> None:
    """One call for tensors of one dtype, which share every row; else one for each."""
    if xs[0].dtype != xs[-1].dtype:
        for x, out in zip(xs, outs, strict=True):
            _sweep([x], [out], angles, rope, inverse, gain)
        return
    kind = torch.float64 if xs[0].dtype == torch.float64 else torch.float32
    positions = angles[0] if len(angles) == 1 else None
    operands = [tensor for pair in zip(xs, outs, strict=True) for tensor in pair]
    digits = DIGITS if positions is None else reach(angles)
    if positions is None or positions.is_floating_point() or digits == TOO_FAR:
        # a row is read from end to end
        cos, sin = (row.contiguous() for row in rows(angles, rope, kind, digits))
        plan = _plan(rope, xs[0].shape[-1], cos.shape[-1])
        _native.rotate(plan, None, None, cos, sin, inverse, gain, _running, *operands)
        return
    if positions.dtype not in (torch.int64, torch.int32):
        positions = positions.long()
    plan = _plan(rope, xs[0].shape[-1], read_rope(rope).num_pairs)
    tables = _tables.digit_tables(rope, positions.device, kind)
    axes = _tables.axis_of_pair(rope, positions.device)
    _native.rotate(plan, tables, axes, positions, None, inverse, gain, _running, *operands)


@constant
def _plan(rope: str, head_dim: int, pairs: int) -> bytes:
    """What the extension needs to know of a Rope, packed once."""
    layout = read_layout(rope)
    axes = count_axes(rope) if '"head_dim"' in rope else 1
    halves = layout.pairing == "half", layout.pairing_out == "half"
    return _native.plan(head_dim, layout.rotary_start, pairs, axes, *halves)
