"""The operator on the CPU: one pass over memory, in C++ (see ``csrc``).

The extension reads tensors through DLPack, so it is built without torch's headers and serves every
torch that offers that interface. Where it is missing, as in the wheel for every system, this
backend refuses every tensor, and a warning says so at the first rotation.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phasor.angles import turn_limbs
from phasor.errors import DISTRIBUTION, BackendError, PositionError, TensorError
from phasor.pairings import by_pairing
from phasor.torch._operator.angles import check_has_angles, cos_sin
from phasor.torch._operator.arguments import Call, Unchecked
from phasor.torch._operator.in_place import check_writable
from phasor.torch._operator.internals import cached_constant, count_writes, warn_of_absence
from phasor.torch._operator.text import compute_dtype, mixes_axes, read_layout, read_rope

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
def _report_absence() -> str:
    """Why the extension cannot be used; "" if it can."""
    return warn_of_absence("CPU", _absence_reason)


def _choose_path(native: Any) -> int:
    """Index of the instruction set to run: the best this machine has, or ``PHASOR_CPU``'s."""
    available = native.paths()  # a bool for each name
    name = os.environ.get("PHASOR_CPU")
    if name is None:
        return list(available.values()).index(True)
    if not available.get(name):
        names = ", ".join(path for path, is_here in available.items() if is_here)
        raise BackendError(f"PHASOR_CPU must be one of {names} on this machine, got {name!r}")
    return list(available).index(name)


_native, _absence_reason = _load_extension()
_path_index = 0 if _native is None else _choose_path(_native)


def paths() -> tuple[str, ...]:
    """Instruction sets that this machine has, best first; none without the extension."""
    if _native is None:
        return ()
    return tuple(name for name, is_available in _native.paths().items() if is_available)


def unsupported_reason(x: Tensor) -> str:
    """Why this backend cannot rotate ``x``; nothing if it can."""
    if x.device.type != "cpu":
        return f"it needs a tensor in the CPU's memory, got one on {x.device}"
    if x.shape[-1] > _MAX_HEAD_DIM:
        return f"its heads are at most {_MAX_HEAD_DIM} wide, got {x.shape[-1]}"
    return _report_absence()


def try_kernel(arguments: Unchecked, outs: Sequence[Tensor], raises: bool = False) -> bool:
    """One pass by integer positions; where the kernel refuses, an error or False."""
    xs, source, text, inverse, gain, _ = arguments
    if _native is None or (plan := _prepare_plan(text)) is None:
        return False
    operands = (xs[0], outs[0]) if len(xs) == 1 else (xs[0], outs[0], xs[1], outs[1])
    return _native.rotate(plan, source[0], None, inverse, gain, _path_index, raises, *operands)


def run_into(call: Call, outs: Sequence[Tensor]) -> None:
    """The operator's kernel: from ``xs`` to ``outs``, which are ``xs`` in place.

    One pass for both, or one for each if the extension cannot tell whether they overlap in memory.
    """
    xs, source, text, inverse, gain, _ = call
    in_place = outs is xs
    if in_place and len(xs) == 2 and not _native.apart(*xs):
        check_writable(xs)  # every error comes before the first write
        for x in xs:
            run_into(call._replace(xs=[x]), [x])
    elif len(source) == 1 and not source[0].is_floating_point() and not mixes_axes(text):
        is_read = source[0].dtype in (torch.int64, torch.int32)
        positions = source[0] if is_read else source[0].long()
        try_kernel(call._replace(source=[positions]), outs, raises=True)
    else:
        # given cos and sin, or positions between the integers or on axes that mix
        dtype = compute_dtype(xs[0].dtype)
        if len(source) == 1:
            check_has_angles(source[0])
            source = cos_sin(source[0], text, dtype)
        cos, sin = (row.to(dtype).contiguous() for row in source)
        plan = _prepare_plan_of_rows(text, xs[0].shape[-1], cos.shape[-1])
        operands = (tensor for both in zip(xs, outs, strict=True) for tensor in both)
        _native.rotate(plan, cos, sin, inverse, gain, _path_index, True, *operands)
    if in_place:
        count_writes(xs)


@lru_cache(maxsize=64)
def _prepare_plan(text: str) -> bytes | None:
    """What the extension needs of a Rope, packed into bytes once; None where axes mix."""
    if mixes_axes(text):
        return None
    value = read_rope(text)
    axis_of_pair = np.array(value.axes.axis_of_pair(value.num_pairs), dtype=np.int32)
    turns = value.axes.n_axes, turn_limbs(value).tobytes(), axis_of_pair.tobytes()
    return _native.plan(value.head_dim, *_pair_layout(text, value.num_pairs), *turns)


@cached_constant
def _prepare_plan_of_rows(text: str, head_dim: int, pairs: int) -> bytes:
    """The same where cos and sin of so many pairs are given."""
    return _native.plan(head_dim, *_pair_layout(text, pairs))


def _pair_layout(text: str, pairs: int) -> tuple[int, int, bool, bool]:
    """Where a head's pairs begin, their number, and whether they are halves, read and written."""
    *pairings, start = read_layout(text, False)
    from_half, to_half = (by_pairing(p, half=True, interleaved=False) for p in pairings)
    return start, pairs, from_half, to_half
