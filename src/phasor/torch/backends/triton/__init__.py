"""The operator on a GPU: one launch for a query and a key, in Triton.

Nothing waits for the device, and after a first call, which compiles and fills the tables, a call
can be captured in a graph. How few kernels are compiled is said in `backends.triton.plan`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from phasor.rope import Rope
from phasor.torch._arguments import is_plain
from phasor.torch._internals import count_writes, counted_writes
from phasor.torch._layout import constant
from phasor.torch._written import check_alone, check_rows, check_writable
from phasor.torch.backends.triton.plan import Plan, kept, key_of, plan_of
from phasor.torch.backends.triton.tiles import of_each, settled

_PLANS: dict[tuple[Any, ...], Plan | None] = {}


def refusal(x: Tensor) -> str:
    """Why this backend cannot rotate ``x``; nothing if it can."""
    kind = x.device.type
    if kind == "cuda" or (kind == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        return _missing()
    return f"it needs a tensor on a GPU, got one on {x.device}"


def rotate(
    xs: Sequence[Tensor], angles: Sequence[Tensor], rope: str, inverse: bool, gain: float
) -> list[Tensor]:
    """New tensors with the strides of ``xs``; the operator's out-of-place kernel."""
    outs = [torch.empty_like(x) for x in xs]
    _turn(xs, outs, angles, rope, inverse, gain)
    return outs


def rotate_(
    xs: Sequence[Tensor], angles: Sequence[Tensor], rope: str, inverse: bool, gain: float
) -> None:
    """The operator's in-place kernel: only the rotated slice is written."""
    _turn(xs, xs, angles, rope, inverse, gain)
    count_writes(xs)


def quick(
    xs: Sequence[Tensor], positions: Any, rope: Rope, inverse: bool, gain: float, backend: str
) -> list[Tensor] | None:
    """`rotate` past checks and dispatcher, where the same has been launched before; else None."""
    if not _ordinary(xs, positions, rope, inverse, gain, backend):
        return None
    outs = [torch.empty_like(x) for x in xs]
    return outs if _launched_again(xs, outs, positions, rope, inverse, gain) else None


def quick_(
    xs: Sequence[Tensor], positions: Any, rope: Rope, inverse: bool, gain: float, backend: str
) -> bool:
    """`rotate_` past checks and dispatcher, as `quick`; false where nothing was done."""
    if not _ordinary(xs, positions, rope, inverse, gain, backend):
        return False
    counted = None if len(xs) == 2 and xs[0] is xs[1] else counted_writes(xs)
    if counted is None or not _launched_again(xs, xs, positions, rope, inverse, gain):
        return False
    torch.autograd.graph.increment_version(counted)
    return True


@constant
def _missing() -> str:
    """What keeps Triton away, said once as a warning too."""
    try:
        import_module("triton")
    except ImportError as error:
        missing = f"triton cannot be imported ({error}); install it beside torch"
        warnings.warn(
            f"phasor rotates with plain torch operations on this GPU: {missing}",
            RuntimeWarning,
            stacklevel=2,
        )
        return missing
    return ""


def _turn(
    xs: Sequence[Tensor],
    outs: Sequence[Tensor],
    angles: Sequence[Tensor],
    rope: str,
    inverse: bool,
    gain: float,
) -> None:
    """One launch for tensors of one dtype, which share every row; else one for each."""
    device = xs[0].device
    if outs is xs and len(angles) == 2:
        check_rows(xs, angles)
    if xs[0].dtype != xs[-1].dtype:
        if outs is xs:
            # every refusal comes before the first write
            check_writable(xs)
        for x, out in zip(xs, outs, strict=True):
            alone = [x]
            _turn(alone, alone if outs is xs else [out], angles, rope, inverse, gain)
        return
    angles = settled(angles, rope, xs[0].dtype)
    if device.type == "cpu" or device.index == torch.cuda.current_device():
        _launch(xs, outs, angles, rope, inverse, gain)
    else:
        with torch.cuda.device(device):
            _launch(xs, outs, angles, rope, inverse, gain)


def _launch(
    xs: Sequence[Tensor],
    outs: Sequence[Tensor],
    angles: Sequence[Tensor],
    rope: str,
    inverse: bool,
    gain: float,
) -> None:
    tensors = (xs[0], xs[-1], outs[0], outs[-1])
    key = key_of(tensors, angles, rope, inverse, gain, len(xs) == 2, outs is not xs)

    def made() -> Plan | None:
        if outs is xs:
            check_alone(xs)
        return plan_of(tensors, angles, rope, inverse, gain, len(xs) == 2, outs is not xs)

    plan = kept(_PLANS, key, made)
    if plan is not None:
        plan.launch(tensors, angles)
        return
    if outs is xs:
        check_writable(xs)
    # a launch for every index of the first dimension, where tokens lie too unevenly for one
    lead = xs[0].shape[:-2]
    angles = of_each(angles, rope, lead)
    for i in range(lead[0]):
        turned = [x[i] for x in xs]
        into = turned if outs is xs else [out[i] for out in outs]
        _launch(turned, into, [a[i] for a in angles], rope, inverse, gain)


def _ordinary(
    xs: Sequence[Tensor], positions: Any, rope: Any, inverse: Any, gain: Any, backend: str
) -> bool:
    """Whether something was launched before, and nobody listens to what happens to these."""
    return (
        not torch.compiler.is_compiling()
        and bool(_PLANS)
        and is_plain(xs, positions, rope, inverse, gain)
        and (backend == "triton" or (backend == "auto" and xs[0].is_cuda))
    )


def _launched_again(
    xs: Sequence[Tensor],
    outs: Sequence[Tensor],
    positions: Tensor,
    rope: Rope,
    inverse: bool,
    gain: float,
) -> bool:
    """Whether there was a plan, whose making all checks came before."""
    tensors, angles = (xs[0], xs[-1], outs[0], outs[-1]), (positions,)
    new = outs is not xs
    plan = _PLANS.get(key_of(tensors, angles, rope.to_json(), inverse, gain, len(xs) == 2, new))
    if plan is None or (xs[0].is_cuda and xs[0].device.index != torch.cuda.current_device()):
        return False
    plan.launch(tensors, angles)
    return True
