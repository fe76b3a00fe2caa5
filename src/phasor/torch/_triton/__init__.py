"""The operator on a GPU: one launch for a query and a key, in Triton.

Nothing waits for the device, and after a first call, which compiles and fills the tables, a call
can be captured in a graph. How few kernels are compiled is said in `_triton.plan`.
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
from phasor.spec import Rope
from phasor.torch._internals import unheard
from phasor.torch._layout import constant, count_axes
from phasor.torch._rows import rows
from phasor.torch._triton.plan import Plan, key_of, plan_of
from phasor.torch._written import apart, check_alone, check_rows

_PLANS: dict[tuple[Any, ...], Plan | None] = {}
_MOST_PLANS = 256


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
    # autograd counts writes, and does not see these
    torch.autograd.graph.increment_version([x for x in xs if not x.is_inference()])


def quick(
    xs: Sequence[Tensor], positions: Any, rope: Rope, inverse: bool, gain: float, backend: str
) -> list[Tensor] | None:
    """`rotate` past checks and dispatcher, where the same has been launched before; else None."""
    if not _ordinary(xs, positions, rope, backend):
        return None
    outs = [torch.empty_like(x) for x in xs]
    return outs if _launched_again(xs, outs, positions, rope, inverse, gain) else None


def quick_(
    xs: Sequence[Tensor], positions: Any, rope: Rope, inverse: bool, gain: float, backend: str
) -> bool:
    """`rotate_` past checks and dispatcher, as `quick`; false where nothing was done."""
    if not _ordinary(xs, positions, rope, backend) or (len(xs) == 2 and xs[0] is xs[1]):
        return False
    if not _launched_again(xs, xs, positions, rope, inverse, gain):
        return False
    torch.autograd.graph.increment_version([x for x in xs if not x.is_inference()])
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
            check_alone(xs)
            apart(*xs).check(*[x.data_ptr() for x in xs])
        for x, out in zip(xs, outs, strict=True):
            alone = [x]
            _turn(alone, alone if outs is xs else [out], angles, rope, inverse, gain)
        return
    if len(angles) == 1 and angles[0].is_floating_point():
        kind = torch.float64 if xs[0].dtype == torch.float64 else torch.float32
        angles = rows(angles, rope, kind, DIGITS)
    elif len(angles) == 1 and angles[0].dtype not in (torch.int64, torch.int32):
        angles = [angles[0].long()]
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
    if key not in _PLANS:
        if outs is xs:
            check_alone(xs)
        if len(_PLANS) >= _MOST_PLANS:
            _PLANS.clear()
        _PLANS[key] = plan_of(tensors, angles, rope, inverse, gain, len(xs) == 2, outs is not xs)
    plan = _PLANS[key]
    if plan is not None:
        plan.launch(tensors, angles)
        return
    if outs is xs and len(xs) == 2:
        apart(*xs).check(*[x.data_ptr() for x in xs])
    # a launch for every index of the first dimension, where tokens lie too unevenly for one
    lead = xs[0].shape[:-2]
    last = 1 if len(angles) == 2 or count_axes(rope) > 1 else 0
    angles = [a.expand(*lead, *a.shape[a.dim() - last :]) for a in angles]
    for i in range(lead[0]):
        turned = [x[i] for x in xs]
        kept = turned if outs is xs else [out[i] for out in outs]
        _launch(turned, kept, [a[i] for a in angles], rope, inverse, gain)


def _ordinary(xs: Sequence[Tensor], positions: Any, rope: Any, backend: str) -> bool:
    """Whether something was launched before, and nobody listens to what happens to these."""
    return (
        not torch.compiler.is_compiling()
        and bool(_PLANS)
        and unheard(xs)
        and (backend == "triton" or (backend == "auto" and xs[0].is_cuda))
        and type(positions) is Tensor
        and type(rope) is Rope
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
