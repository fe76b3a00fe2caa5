"""The operator on the CPU: one pass over memory, in C++ (see ``csrc``).

The extension reads tensors through DLPack, so it is built without torch's headers and serves every
torch that offers that interface. Where it is missing, as in the wheel for every system, this
backend does not serve, and a warning says so at the first rotation.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from phasor.errors import DISTRIBUTION, BackendError, PositionError, TensorError
from phasor.pairings import by_pairing
from phasor.rope import Rope
from phasor.torch import _tables
from phasor.torch._arguments import is_plain
from phasor.torch._internals import count_writes, counted_writes
from phasor.torch._layout import constant, count_axes, read_layout, read_rope
from phasor.torch._rows import reach, rows
from phasor.torch._written import check_writable

_WIDEST = 4096  # a row lives on the stack of the thread that builds it


def _connected() -> tuple[Any, str]:
    """The extension and no complaint, or None and what is missing."""
    exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    try:
        native: Any = import_module("phasor._native")
        if exchange is not None:
            native.connect(exchange, TensorError, PositionError, torch.get_num_threads)
            return native, ""
        missing = f"torch {torch.__version__} lacks the DLPack exchange interface; update it"
    except ImportError as error:
        # pip would take a wheel that it built before there was a compiler from its cache
        missing = (
            f"its kernel cannot be loaded ({error}); with GCC or Clang installed, this builds it: "
            "pip install --force-reinstall --no-deps --no-cache-dir "
            f"--no-binary {DISTRIBUTION} {DISTRIBUTION}"
        )
    return None, missing


@constant
def _missing() -> str:
    """What keeps the extension away, said once as a warning too; nothing where it serves."""
    if _reason:
        warnings.warn(
            f"phasor rotates with plain torch operations on this CPU: {_reason}",
            RuntimeWarning,
            stacklevel=2,
        )
    return _reason


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


_native, _reason = _connected()
_running = 0 if _native is None else _path(_native)


def paths() -> tuple[str, ...]:
    """Instruction sets of which this machine runs one, best first; none without the extension."""
    return () if _native is None else tuple(name for name, there in _native.paths() if there)


def refusal(x: Tensor) -> str:
    """Why this backend cannot rotate ``x``; nothing if it can."""
    if x.device.type != "cpu":
        return f"it needs a tensor in the CPU's memory, got one on {x.device}"
    if x.shape[-1] > _WIDEST:
        return f"its heads are at most {_WIDEST} wide, got {x.shape[-1]}"
    return _missing()


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
    count_writes(xs)


def quick(
    xs: Sequence[Tensor], positions: Any, rope: Rope, inverse: bool, gain: float, backend: str
) -> list[Tensor] | None:
    """`rotate` past the dispatcher; None where anything is out of the ordinary.

    For one token the dispatcher costs ten times the rotation. It is left out only where nothing
    listens to it; what is refused here, for whatever reason, takes the long way and is explained.
    """
    if not _ordinary(xs, positions, rope, inverse, gain, backend):
        return None
    outs = [torch.empty_like(x) for x in xs]
    return outs if _swept(xs, outs, positions, rope, inverse, gain) else None


def quick_(
    xs: Sequence[Tensor], positions: Any, rope: Rope, inverse: bool, gain: float, backend: str
) -> bool:
    """`rotate_` past the dispatcher, as `quick`; false where nothing was done."""
    if not _ordinary(xs, positions, rope, inverse, gain, backend):
        return False
    counted = counted_writes(xs)
    if counted is None or not _swept(xs, xs, positions, rope, inverse, gain):
        return False
    torch.autograd.graph.increment_version(counted)
    return True


def _ordinary(
    xs: Sequence[Tensor], positions: Any, rope: Any, inverse: Any, gain: Any, backend: str
) -> bool:
    """Whether these are in memory, and nobody listens to what happens to them."""
    return (
        _native is not None
        and backend in ("auto", "cpu")
        and is_plain(xs, positions, rope, inverse, gain)
        and xs[0].is_cpu
    )


def _swept(
    xs: Sequence[Tensor],
    outs: Sequence[Tensor],
    positions: Tensor,
    rope: Rope,
    inverse: bool,
    gain: float,
) -> bool:
    plan, tables, axes = _prepared(rope.to_json(), xs[0].dtype)
    operands = (xs[0], outs[0]) if len(xs) == 1 else (xs[0], outs[0], xs[1], outs[1])
    done: bool = _native.rotate(
        *(plan, tables.reaching(positions), axes),
        *(positions, None, inverse, gain, _running, False, *operands),
    )
    return done


@lru_cache(maxsize=64)
def _prepared(rope: str, dtype: torch.dtype) -> tuple[bytes, _tables.GrowingTables, Tensor]:
    """A Rope's plan, digit tables and axes, for tensors of ``dtype``."""
    read = read_rope(rope)
    here = torch.device("cpu")
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    plan = _plan(rope, read.head_dim, read.num_pairs)
    return plan, _tables.growing_tables(rope, kind), _tables.axis_of_pair(rope, here)


def _sweep(
    xs: Sequence[Tensor],
    outs: Sequence[Tensor],
    angles: Sequence[Tensor],
    rope: str,
    inverse: bool,
    gain: float,
) -> None:
    """One call for tensors of one dtype, which share every row; else one for each.

    One for each, too, where memory is so interwoven that the extension cannot tell it apart.
    """
    written = outs is xs and len(xs) == 2
    if xs[0].dtype != xs[-1].dtype or (written and not _native.apart(*xs)):
        if written:
            check_writable(xs)  # every refusal comes before the first write
        for x, out in zip(xs, outs, strict=True):
            _sweep([x], [out], angles, rope, inverse, gain)
        return
    operands = [tensor for pair in zip(xs, outs, strict=True) for tensor in pair]
    if len(angles) == 1 and not angles[0].is_floating_point():
        narrow = angles[0].dtype not in (torch.int64, torch.int32)
        positions = angles[0].long() if narrow else angles[0]
        plan, tables, axes = _prepared(rope, xs[0].dtype)
        prepared = plan, tables.reaching(positions), axes
        if _native.rotate(*prepared, positions, None, inverse, gain, _running, False, *operands):
            return
    # given rows, fractions of positions, or positions that the digits do not reach
    kind = torch.float64 if xs[0].dtype == torch.float64 else torch.float32
    cos, sin = (row.contiguous() for row in rows(angles, rope, kind, reach(angles)))
    plan = _plan(rope, xs[0].shape[-1], cos.shape[-1])
    _native.rotate(plan, None, None, cos, sin, inverse, gain, _running, True, *operands)


@constant
def _plan(rope: str, head_dim: int, pairs: int) -> bytes:
    """What the extension needs to know of a Rope, packed once."""
    layout = read_layout(rope)
    axes = count_axes(rope) if '"head_dim"' in rope else 1
    halves = (
        by_pairing(pairing, half=True, interleaved=False)
        for pairing in (layout.pairing, layout.pairing_out)
    )
    return _native.plan(head_dim, layout.rotary_start, pairs, axes, *halves)
