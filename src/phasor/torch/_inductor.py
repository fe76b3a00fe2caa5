"""The rule by which ``torch.compile`` keeps the operator or replaces it by operations to fuse.

Inductor fuses neighbouring plain operations into one loop, but not an operator. So the operator is
replaced by plain operations where those were measured to be faster. That happens while Inductor
traces, after the operator's derivative was taken. Other compilers and exporters keep the operator,
and so does a named backend.

Cos and sin are computed from turns without the whole ones, as in `phasor.angles`. That takes
arithmetic on a few numbers for each pair, which Inductor vectorizes, unlike a look-up in digit
tables, and it is right at every int64 position.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from phasor import angles as numpy_angles
from phasor.angles import old_turn_words
from phasor.pairings import by_pairing
from phasor.rope import Rope
from phasor.torch._tables import Layout, count_axes, read_rope
from phasor.torch.backends import eager
from phasor.torch.backends.eager import layout_of, rotate_by

ALWAYS, NEVER = 0, sys.maxsize
_AUTO_PREFIX = "auto, rule "
_DIGIT_BITS = 21  # of a digit: its product with 32 bits has the 53 of a float64
_DIGIT_MASK = (1 << _DIGIT_BITS) - 1
_SOURCE_MODULES = sys.modules[__name__], eager, numpy_angles

#: The number of elements of all tensors together from which the operator is kept, by the backend
#: that it would run, the pairing and the dtype. Measured by ``bench/compiled.py``. Combinations
#: that are not listed, such as Triton and float64, keep the operator.
OPERATOR_FROM: dict[tuple[str, str, torch.dtype], int] = {
    ("cpu", "half", torch.float32): NEVER,
    ("cpu", "half", torch.bfloat16): NEVER,
    ("cpu", "half", torch.float16): NEVER,
    ("cpu", "interleaved", torch.float32): 240_000,
    ("cpu", "interleaved", torch.bfloat16): 20_000,
    ("cpu", "interleaved", torch.float16): 20_000,
    # without the kernel the operator is the same operations, one by one
    ("eager", "half", torch.float32): NEVER,
    ("eager", "half", torch.bfloat16): NEVER,
    ("eager", "half", torch.float16): NEVER,
    ("eager", "interleaved", torch.float32): NEVER,
    ("eager", "interleaved", torch.bfloat16): NEVER,
    ("eager", "interleaved", torch.float16): NEVER,
}


def describe_rule() -> str:
    """A text that names the code and the rule that graphs are compiled with.

    Inside ``torch.compile`` it is the operator's argument for ``backend="auto"``, because torch
    finds compiled graphs on disk by the arguments of operators and ignores decompositions.
    """
    sources = b"".join(Path(str(module.__file__)).read_bytes() for module in _SOURCE_MODULES)
    return _AUTO_PREFIX + hashlib.sha256(sources + repr(OPERATOR_FROM).encode()).hexdigest()[:16]


def is_compiled_auto(backend: str) -> bool:
    """Whether the operator's argument is from `describe_rule`."""
    return backend.startswith(_AUTO_PREFIX)


def register(operator: Any, resolve: Callable[[str, Tensor], str]) -> None:
    """Give Inductor the decomposition of ``operator``, which imports Inductor."""
    decomposition = cast(Any, import_module("torch._inductor.decomposition"))
    if operator in decomposition.decompositions:
        return

    def decompose(
        xs: list[Tensor], angles: list[Tensor], rope: str, inverse: bool, gain: float, backend: str
    ) -> Any:
        is_named = not is_compiled_auto(backend)
        if is_named or keeps_operator(resolve("auto", xs[0]), xs, angles, rope):
            return NotImplemented
        return _rotate(xs, angles, rope, inverse, gain)

    # the second is a copy of the first, made once
    for table in (decomposition.decompositions, decomposition.fast_random_decomps()):
        table[operator] = decompose
    # where Inductor keeps an operator with a decomposition, it has to know how to call it
    lowering = cast(Any, import_module("torch._inductor.lowering"))
    lowering.make_fallback(
        operator,
        layout_constraint=lowering.constrain_to_fake_tensors,
        warn=False,
        override_decomp=True,
    )


def keeps_operator(backend: str, xs: Sequence[Tensor], angles: Sequence[Tensor], rope: str) -> bool:
    """Whether Inductor is given the operator for these tensors, and not its decomposition.

    For a size that changes, the first one that is compiled for decides, and no guard is added.
    """
    are_fractions = len(angles) == 1 and angles[0].is_floating_point()
    if are_fractions or not all(x.is_cpu for x in xs):
        return True
    layout = layout_of(rope, False)
    # two halves are two loops over memory, pairs side by side are a loop over every other element
    pairing = by_pairing(layout.pairing_out, half=layout.pairing, interleaved="interleaved")
    limit = min(OPERATOR_FROM.get((backend, pairing, x.dtype), ALWAYS) for x in xs)
    return sum(_size_hint(x.numel()) for x in xs) >= limit


def _size_hint(size: int | torch.SymInt) -> int:
    """A length; for one that a compiler leaves open, its value in the call that is compiled for."""
    if type(size) is int:
        return size
    from torch.fx.experimental.symbolic_shapes import optimization_hint

    return optimization_hint(size, fallback=NEVER)


def _rotate(
    xs: Sequence[Tensor], angles: Sequence[Tensor], rope: str, inverse: bool, gain: float
) -> list[Tensor]:
    """The operator in operations that Inductor fuses well."""
    if len(angles) == 2:
        cos, sin = (each.float() for each in angles)
    else:
        cos, sin = _cos_sin(angles[0], rope)
    # [..., seq, num_pairs] -> [..., seq, 1, num_pairs], to broadcast over heads
    cos, sin = (cos * gain).unsqueeze(-2), (sin * (-gain if inverse else gain)).unsqueeze(-2)
    layout = layout_of(rope, inverse)
    rotate, own_dims = rotate_by, 1
    if layout.pairing == layout.pairing_out == "half":
        rotate, own_dims = _rotate_halves, 2
        # twice [..., seq, 1, num_pairs] -> [..., seq, 1, 2, num_pairs]
        cos, sin = torch.stack((cos, cos), -2), torch.stack((-sin, sin), -2)
    # Inductor would compute them again for every head
    cos, sin = _materialize(cos), _materialize(sin)
    outs: list[Tensor] = []
    for x in xs:
        order = _memory_order(x)
        c, s = (_permute(each, order, own_dims) for each in (cos, sin))
        y = rotate(_permute(x, order, 1), c, s, layout)
        if inverse:
            # a norm's gradient sums this one, and would otherwise read wider numbers
            y = _materialize(y)
        outs.append(_permute(y, [order.index(dim) for dim in range(len(order))], 1))
    return outs


def _cos_sin(positions: Tensor, text: str) -> tuple[Tensor, Tensor]:
    """Cos and sin ``[..., seq, num_pairs]`` in float32 of positions that are integers.

    A position is three digits in base 2**21. The product of a digit and the first 32 bits of a
    frequency in turns is exact in float64, and so is what remains without whole turns; integers
    would overflow, which C++ leaves undefined. Each sum of three moves the angle by 2**-50 at most,
    so cos and sin are within 2**-25 and 5e-15.
    """
    rope, device = read_rope(text), positions.device
    if count_axes(text) == 1:
        # [..., seq] -> [..., seq, 1]
        positions = positions.unsqueeze(-1)
    else:
        # [..., seq, n_axes] -> [..., seq, num_pairs]
        axes = torch.tensor(rope.axes.axis_of_pair(rope.num_pairs), device=device)
        positions = positions[..., axes]
    positions = positions.long()
    last_digit = positions >> (2 * _DIGIT_BITS)  # with the sign
    digits = positions & _DIGIT_MASK, (positions >> _DIGIT_BITS) & _DIGIT_MASK, last_digit
    turns: list[Tensor] = []
    rests: list[Tensor] = []
    for digit, (leading, trailing) in zip(digits, _turns_of_digits(rope), strict=True):
        value = digit.double()
        product = value * torch.tensor(leading, dtype=torch.float64, device=device)
        turns.append(product - product.round())
        rests.append(value * torch.tensor(trailing, dtype=torch.float64, device=device))
    # the small numbers first
    total = (rests[0] + rests[1] + rests[2]) + (turns[0] + turns[1] + turns[2])
    angles = total * (2 * math.pi)
    return angles.cos().float(), angles.sin().float() * rope.direction


def _turns_of_digits(rope: Rope) -> list[tuple[list[float], list[float]]]:
    """For each digit, the first 32 bits and the rest of every pair's turns without whole turns.

    They are the turns of the positions 1, 2**21 and 2**42.
    """
    high, low = (words.tolist() for words in old_turn_words(rope))
    parts: list[tuple[list[float], list[float]]] = []
    for digit in range(3):
        # in units of 2**-128
        turns = [
            (((a << 64) | b) << (_DIGIT_BITS * digit)) % (1 << 128)
            for a, b in zip(high, low, strict=True)
        ]
        leading = [(turn >> 96) * 2.0**-32 for turn in turns]
        parts.append((leading, [(turn % (1 << 96)) * 2.0**-128 for turn in turns]))
    return parts


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """``x`` rotated in the half pairing, whose result is fused with what follows.

    Args:
        x: ``[..., seq, heads, head_dim]``.
        cos: ``[..., seq, 1, 2, num_pairs]``.
        sin: The same shape, and negative for the first half.
        layout: Where the rotated slice begins.
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
    """``x``, which Inductor writes to memory, because it does not fuse through this view."""
    x = x.clone(memory_format=torch.contiguous_format)
    return x.as_strided(x.shape, x.stride())


def _memory_order(x: Tensor) -> list[int]:
    """The dimensions ``[..., seq, heads]`` of ``x`` from the largest stride down."""
    strides = [_size_hint(stride) for stride in x.stride()[:-1]]
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def _permute(x: Tensor, order: Sequence[int], own_dims: int) -> Tensor:
    """``x`` with its dimensions in ``order`` but for the last ``own_dims``, and ones in front."""
    x = x[(None,) * (len(order) + own_dims - x.dim())]
    return x.permute(*order, *range(len(order), x.dim()))
