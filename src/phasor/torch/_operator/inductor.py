"""The rule by which ``torch.compile`` keeps the operator or replaces it by operations to fuse.

Inductor fuses neighbouring plain operations into one loop, but cannot fuse a custom operator. So
the operator is replaced by plain operations if these were measured to be faster. This happens while
Inductor traces, after autograd has taken the operator's derivative. Other compilers and exporters
keep the operator, and so does a backend given by name.

Cos and sin are computed by the same formula as in every backend. Its int64 products overflow, which
is undefined behaviour in C++. The factors are read from memory: no compiler can tell which products
overflow, so they wrap around on every machine.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from phasor import angles as numpy_angles
from phasor.pairings import PAIRINGS, Pairing, by_pairing
from phasor.torch._operator import angles as _angles
from phasor.torch._operator import eager
from phasor.torch._operator.arguments import Layout, Turn

ALWAYS, NEVER = 0, sys.maxsize
_AUTO_PREFIX = "auto, rule "
_SOURCE_MODULES = sys.modules[__name__], eager, _angles, numpy_angles

_FLOATS = torch.float32, torch.bfloat16, torch.float16
#: The operator is kept from this number of elements on, counting all tensors of a call, for each
#: backend that it would run, pairing and dtype. Measured by ``bench/run.py compiled``. Combinations
#: that are not listed, such as Triton and float64, always keep the operator.
OPERATOR_FROM: dict[tuple[str, str, torch.dtype], int] = {
    **{("cpu", "half", dtype): NEVER for dtype in _FLOATS},
    ("cpu", "interleaved", torch.float32): 240_000,
    ("cpu", "interleaved", torch.bfloat16): 20_000,
    ("cpu", "interleaved", torch.float16): 20_000,
    # without the C++ kernel the operator runs the same operations, without fusion
    **{("eager", pairing, dtype): NEVER for pairing in PAIRINGS for dtype in _FLOATS},
}


def describe_rule() -> str:
    """A string that changes with the code and the rule that graphs are compiled with.

    Inside ``torch.compile`` the operator gets it instead of ``backend="auto"``, because torch looks
    up compiled graphs on disk by the arguments of operators, but ignores decompositions.
    """
    sources = b"".join(Path(str(module.__file__)).read_bytes() for module in _SOURCE_MODULES)
    return _AUTO_PREFIX + hashlib.sha256(sources + repr(OPERATOR_FROM).encode()).hexdigest()[:16]


def is_compiled_auto(backend: str) -> bool:
    """Whether the operator's argument is from `describe_rule`."""
    return str(backend).startswith(_AUTO_PREFIX)


def register(cos_sin: Any, turn: Any, resolve: Callable[..., str]) -> None:
    """Give Inductor the decompositions of both operators, which imports Inductor."""
    decomposition = cast(Any, import_module("torch._inductor.decomposition"))
    if turn in decomposition.decompositions:
        return

    def decompose_turn(*arguments: Any) -> Any:
        call = Turn(*arguments)
        if not is_compiled_auto(call.backend):
            return NotImplemented
        backend = resolve("auto", call.xs[0].device, call.xs[0].shape[-1])
        pairings = call.pairing, call.pairing_out
        return NotImplemented if keeps_operator(backend, call.xs, *pairings) else _run_fused(call)

    def decompose_cos_sin(
        positions: Tensor, text: str, gain: float, dtype: torch.dtype, backend: str
    ) -> Any:
        if not is_compiled_auto(backend) or not positions.is_cpu or dtype not in _FLOATS:
            return NotImplemented
        return eager.cos_sin(positions, text, gain, dtype)

    # Inductor must know how to call an operator that it keeps although it has a decomposition
    lowering = cast(Any, import_module("torch._inductor.lowering"))
    for operator, decompose in ((cos_sin, decompose_cos_sin), (turn, decompose_turn)):
        # the second table is a cached copy of the first
        for table in (decomposition.decompositions, decomposition.fast_random_decomps()):
            table[operator] = decompose
        lowering.make_fallback(
            operator,
            layout_constraint=lowering.constrain_to_fake_tensors,
            warn=False,
            override_decomp=True,
        )


def keeps_operator(
    backend: str, xs: Sequence[Tensor], pairing: Pairing, pairing_out: Pairing
) -> bool:
    """Whether Inductor gets the operator for these tensors, or its decomposition.

    For a dynamic size the value in the first compiled call decides, and no guard is added.
    """
    if not all(x.is_cpu for x in xs):
        return True
    # compiled code loops over each half; interleaved pairs need a slower loop with stride 2
    slower = by_pairing(pairing_out, half=pairing, interleaved="interleaved")
    limit = min(OPERATOR_FROM.get((backend, slower, x.dtype), ALWAYS) for x in xs)
    return sum(_size_hint(x.numel()) for x in xs) >= limit


def _size_hint(size: int | torch.SymInt) -> int:
    """A size; for a dynamic size its value in the call that is being compiled."""
    if type(size) is int:
        return size
    hint: int | None = cast(Any, size).node.hint  # None if the size depends on data
    return NEVER if hint is None else hint


def _run_fused(call: Turn) -> list[Tensor]:
    """The decomposition of the operator into operations that Inductor fuses well."""
    cos, sin = eager.rows_of_heads(call, torch.float32)
    layout = call.layout()
    turn, pair_dims = eager.turn_pairs, 1
    if layout.pairing == layout.pairing_out == "half":
        turn, pair_dims = _turn_halves, 2
        # twice [..., seq, 1, num_pairs] -> [..., seq, 1, 2, num_pairs]
        cos, sin = torch.stack((cos, cos), -2), torch.stack((-sin, sin), -2)
    # otherwise Inductor would compute cos and sin again for every head
    cos, sin = _materialize(cos), _materialize(sin)
    outs: list[Tensor] = []
    for x in call.xs:
        order = _memory_order(x)
        c, s = (_permute(table, order, pair_dims) for table in (cos, sin))
        y = turn(_permute(x, order, 1), c, s, layout)
        if call.transposed:
            # the gradient of a preceding norm sums this, and would otherwise read it in float32
            y = _materialize(y)
        outs.append(_permute(y, [order.index(dim) for dim in range(len(order))], 1))
    return outs


def _turn_halves(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """``x`` rotated in the half pairing, in a form that Inductor fuses with the next operation.

    ``cos`` and ``sin`` are ``[..., seq, 1, 2, num_pairs]``; sin is negated for the first half.
    """
    start, end = layout.rotary_start, layout.rotary_start + 2 * cos.shape[-1]
    # [..., rotary_dim] -> [..., 2, num_pairs]
    pairs = cast(Tensor, cast(Any, x[..., start:end].float()).unflatten(-1, (2, cos.shape[-1])))
    # addcmul rounds one product and fuses the other, as the kernels do
    rotated = torch.addcmul(pairs * cos, pairs.flip(-2), sin).flatten(-2).to(x.dtype)
    if cos.shape[-1] * 2 == x.shape[-1]:
        return rotated
    return torch.cat((x[..., :start], rotated, x[..., end:]), -1)


def _materialize(x: Tensor) -> Tensor:
    """Make Inductor write ``x`` to memory: it does not fuse through this view."""
    x = x.clone(memory_format=torch.contiguous_format)
    return x.as_strided(x.shape, x.stride())


def _memory_order(x: Tensor) -> list[int]:
    """The dimensions ``[..., seq, heads]`` of ``x``, sorted by descending stride."""
    strides = [_size_hint(stride) for stride in x.stride()[:-1]]
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def _permute(x: Tensor, order: Sequence[int], pair_dims: int) -> Tensor:
    """``x`` with its dimensions in ``order``, except the last ``pair_dims``.

    Missing leading dimensions are added with length 1.
    """
    x = x[(None,) * (len(order) + pair_dims - x.dim())]
    return x.permute(*order, *range(len(order), x.dim()))
