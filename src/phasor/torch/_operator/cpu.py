"""The operators on the CPU: one pass over memory, in C++ (see ``csrc``).

The extension reads tensors through DLPack, so it is built without torch's headers and serves every
torch that offers that interface. Where it is missing, as in the wheel for every system, this
backend refuses every tensor, and a warning says so at the first rotation.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from phasor.angles import turn_limbs
from phasor.errors import DISTRIBUTION, BackendError, PositionError, TensorError
from phasor.pairings import Pairing, by_pairing
from phasor.rope import Rope
from phasor.torch._operator import angles
from phasor.torch._operator.arguments import Layout, Rows, Turn
from phasor.torch._operator.in_place import check_writable
from phasor.torch._operator.internals import cached_constant, count_writes, warn_of_absence
from phasor.torch._operator.text import compute_dtype, mixes_axes, read_rope

_CPU = torch.device("cpu")  # for one token, reading the name would cost as much as the kernel
_MAX_HEAD_DIM = 4096  # the cos and sin of a token are on the stack of the thread that needs them


def _load_extension() -> tuple[Any, str]:
    """The extension and "", or None and the reason why it cannot be used."""
    exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    try:
        native: Any = import_module("phasor._native")
        if exchange is not None:
            native.connect(exchange, TensorError, PositionError, torch.get_num_threads)
            return native, ""
        reason = f"torch {torch.__version__} lacks the DLPack exchange interface; update it"
    except ImportError as error:
        # pip's cache may hold a wheel that it built without a compiler
        reason = (
            f"its kernel cannot be loaded ({error}); with GCC or Clang installed, this builds it: "
            "pip install --force-reinstall --no-deps --no-cache-dir "
            f"--no-binary {DISTRIBUTION} {DISTRIBUTION}"
        )
    return None, reason


@cached_constant
def absence() -> str:
    """Why the extension cannot be used; "" if it can."""
    return warn_of_absence("CPU", _absence_reason)


if TYPE_CHECKING:  # as _native.pyi declares
    from phasor import _native

    _absence_reason: str = ""
else:
    _native, _absence_reason = _load_extension()


def _choose_path() -> int:
    """Index of the instruction set to run: the best this machine has, or ``PHASOR_CPU``'s."""
    if _absence_reason:
        return 0
    available = _native.paths()
    name = os.environ.get("PHASOR_CPU")
    if name is None:
        return list(available.values()).index(True)
    if not available.get(name):
        names = ", ".join(path for path, is_here in available.items() if is_here)
        raise BackendError(f"PHASOR_CPU must be one of {names} on this machine, got {name!r}")
    return list(available).index(name)


_path_index = _choose_path()


def paths() -> tuple[str, ...]:
    """Instruction sets that this machine has, best first; none without the extension."""
    if _absence_reason:
        return ()
    return tuple(name for name, is_available in _native.paths().items() if is_available)


def unsupported_reason(device: torch.device, width: int) -> str:
    """Why this backend cannot rotate heads of this width on this device; "" if it can."""
    if device.type != "cpu":
        return f"it needs a tensor in the CPU's memory, got one on {device}"
    if width > _MAX_HEAD_DIM:
        return f"its heads are at most {_MAX_HEAD_DIM} wide, got {width}"
    return absence()


def cos_sin(positions: Tensor, text: str, gain: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cos and sin ``[..., seq, num_pairs]`` times the gain, as views of one tensor."""
    packed = None if positions.is_floating_point() else _pack(text)
    if packed is None:
        return angles.cos_sin(positions, text, gain, dtype)
    rows = _make_rows(packed, _readable(positions), gain, dtype, raises=True)
    assert rows is not None  # the kernel raises an error instead of refusing
    return rows


def try_rows(positions: Tensor, text: str, gain: float, dtype: torch.dtype) -> Rows | None:
    """`cos_sin` of integers that may not fit the Rope; None if the kernel refuses them."""
    if _absence_reason or (packed := _pack(text)) is None:
        return None
    new_rows = _make_rows(packed, positions, gain, dtype, raises=False)
    if new_rows is None:
        return None
    rows = Rows(*new_rows, packed.layout, packed.head_dim, "cpu", are_plain=True)
    rows.plan = packed.plan_of_rows
    return rows


def _make_rows(
    packed: _Packed, positions: Tensor, gain: float, dtype: torch.dtype, *, raises: bool
) -> tuple[Tensor, Tensor] | None:
    tokens = positions.shape if packed.n_axes == 1 else positions.shape[:-1]
    # a single number has no dimension of tokens
    rows = torch.empty((*tokens, 2, packed.num_pairs), dtype=dtype, device=_CPU)
    plan, path = packed.plan, _path_index
    if not _native.rotate(plan, positions, None, False, gain, path, raises, None, (rows,)):
        return None
    # [..., seq, 2, num_pairs] -> [..., seq, num_pairs] twice
    cos, sin = rows.unbind(-2)
    return cos, sin


def try_turn(xs: Sequence[Tensor], rows: Rows, outs: Sequence[Tensor]) -> bool:
    """Rotate ``xs`` into ``outs`` in one pass; False if the kernel refuses them."""
    plan = rows.plan or _prepare(xs, rows)
    if plan is None:
        return False
    cos, sin, path = rows.cos, rows.sin, _path_index
    return _native.rotate(plan, cos, sin, rows.transposed, 1.0, path, False, xs, outs)


def try_turn_at(
    xs: Sequence[Tensor],
    positions: Tensor,
    text: str,
    transposed: bool,
    gain: float,
    outs: Sequence[Tensor],
) -> bool:
    """Rotate ``xs`` at integer positions in one pass; False if the kernel refuses them."""
    if _absence_reason or (packed := _pack(text)) is None:
        return False
    plan, path = packed.plan, _path_index
    return _native.rotate(plan, positions, None, transposed, gain, path, False, xs, outs)


def run_into(turn: Turn, outs: Sequence[Tensor]) -> None:
    """The operator's kernel: rotate ``xs`` into ``outs``; in place, both are the same sequence.

    A query and a key take one pass, or one each if the extension cannot tell whether they overlap.
    """
    xs, in_place = turn.xs, outs is turn.xs
    if in_place and len(xs) == 2 and not _native.apart(*xs):
        check_writable(xs)  # raise all errors before the first write
        for x in xs:
            single = [x]
            run_into(turn._replace(xs=single), single)
        return
    dtype = compute_dtype(xs[0].dtype)
    cos, sin = (row.to(dtype).contiguous() for row in (turn.cos, turn.sin))
    layout = turn.pairing, turn.pairing_out, turn.rotary_start
    plan = _plan_of_layout(*layout, xs[0].shape[-1], cos.shape[-1])
    options = turn.transposed, 1.0, _path_index, True
    _native.rotate(plan, cos, sin, *options, xs, outs)
    if in_place:
        count_writes(xs)


def _readable(positions: Tensor) -> Tensor:
    """Integers in a dtype that the extension reads."""
    return positions if positions.dtype in (torch.int64, torch.int32) else positions.long()


class _Packed(NamedTuple):
    """A Rope as the extension reads it, and the shape of its cos and sin."""

    plan: bytes  # for calls with positions
    plan_of_rows: bytes  # for calls with cos and sin
    layout: Layout
    head_dim: int
    n_axes: int
    num_pairs: int


@lru_cache(maxsize=64)
def _pack(text: str) -> _Packed | None:
    """What calls need from a Rope, computed once; None with `Mixed` axes."""
    if mixes_axes(text):
        return None
    rope = read_rope(text)
    layout = Layout(rope.pairing, rope.output_pairing, rope.rotary_start)
    pairs = _pair_layout(*layout, rope.num_pairs)
    plan = _native.plan(rope.head_dim, *pairs, *_packed_turns(rope))
    plan_of_rows = _plan_of_layout(*layout, rope.head_dim, rope.num_pairs)
    return _Packed(plan, plan_of_rows, layout, rope.head_dim, rope.axes.n_axes, rope.num_pairs)


def _prepare(xs: Sequence[Tensor], rows: Rows) -> bytes | None:
    """The plan for given cos and sin; kept in ``rows`` if these are for one width of heads only."""
    if _absence_reason or xs[0].dim() == 0:
        return None
    width, pairs = rows.head_dim or xs[0].shape[-1], rows.cos.shape[-1]
    if rows.layout.rotary_start + 2 * pairs > width:
        return None
    plan = _plan_of_layout(*rows.layout, width, pairs)
    if rows.head_dim is not None:
        rows.plan = plan
    return plan


@lru_cache(maxsize=64)
def _plan_of_layout(
    pairing: Pairing, pairing_out: Pairing, rotary_start: int, head_dim: int, pairs: int
) -> bytes:
    """The plan for calls with cos and sin of ``pairs`` pairs, which must fit in a head."""
    return _native.plan(head_dim, *_pair_layout(pairing, pairing_out, rotary_start, pairs))


def _packed_turns(rope: Rope) -> tuple[int, bytes, bytes]:
    """The number of axes, and for every pair its turns per position and its axis."""
    axis_of_pair = np.array(rope.axes.axis_of_pair(rope.num_pairs), dtype=np.int32)
    return rope.axes.n_axes, turn_limbs(rope).tobytes(), axis_of_pair.tobytes()


def _pair_layout(
    pairing: Pairing, pairing_out: Pairing, start: int, pairs: int
) -> tuple[int, int, bool, bool]:
    """First rotated coordinate, number of pairs, and whether input and output use halves."""
    from_half, to_half = (
        by_pairing(p, half=True, interleaved=False) for p in (pairing, pairing_out)
    )
    return start, pairs, from_half, to_half
