"""Under ``torch.compile``: the operator, or its decomposition that inductor fuses.

Both are measured in the same run: in a layer's work between projections and attention (QK norm,
rotation, and the key's place in a cache), forward alone and with backward, and in a whole layer of
attention. The rule in `phasor.torch._operator.inductor` should choose the faster of the two each
time. ``definition`` is ``backend="eager"``, plain operations as dynamo sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from report import Section
from timing import Times, interleave
from torch import Tensor

from phasor import Rope
from phasor.pairings import PAIRINGS
from phasor.torch import RotaryAttention, chosen_backend, rotate_qk
from phasor.torch._operator.inductor import ALWAYS, NEVER, OPERATOR_FROM

HEADS, LAYER_HEADS = (32, 8), (8, 2)
LAYER = "train a layer"
#: Each with the batch and the length; training is forward and backward.
STEPS = {
    "decode": [(1, 1), (32, 1)],
    "prefill": [(1, 64), (1, 512), (1, 4096)],
    "train": [(1, 512), (2, 2048)],
    LAYER: [(1, 512), (2, 2048)],
}
QUICK = ("decode, 1 x 1, *", "train a layer, 1 x 512, half, f*")
OPERATOR, DECOMPOSITION, DEFINITION = "operator", "decomposition", "definition"
#: The backend, and the number of elements from which the operator is kept; None for the rule.
WAYS = {OPERATOR: ("auto", ALWAYS), DECOMPOSITION: ("auto", NEVER), DEFINITION: ("eager", None)}
_NOTE = """\
The operator runs the {backend!r} implementation. Times divided by times of the same run: below 1,
the first is faster. {heads[0]} query heads, {heads[1]} key heads, 128 wide, new outputs; the layer
has {layer[0]} and {layer[1]} and is 1,024 wide."""


def compiled(
    step: str, rope: Rope, dtype: torch.dtype, batch: int, seq: int, way: str
) -> Callable[[], Any]:
    """A call of the step on tensors of its own: the same whatever the way."""
    torch.manual_seed(0)
    trains = step.startswith("train")
    if step == LAYER:
        module = RotaryAttention(rope, 1024, num_heads=LAYER_HEADS[0], num_kv_heads=LAYER_HEADS[1])
        inputs = [torch.randn(batch, seq, 1024, dtype=dtype)]
        leaves = list(module.to(dtype).parameters())
    else:
        inputs = [torch.randn(batch, seq, n, 128, dtype=dtype, requires_grad=trains) for n in HEADS]
        weight = torch.ones(128, dtype=dtype, requires_grad=trains)
        leaves = [*inputs, weight]
    cache = torch.zeros(batch, seq + 8, HEADS[1], 128, dtype=dtype)
    positions = torch.arange(seq) + 1000

    @torch.compile(fullgraph=True, dynamic=False)
    def run(*xs: Tensor) -> tuple[Tensor, ...]:
        backend = WAYS[way][0]  # read here, so that each way has a graph of its own
        if step == LAYER:
            return (module(*xs),)
        q, k = (torch.nn.functional.rms_norm(x, (128,), weight, 1e-6) for x in xs)
        q, k = rotate_qk(q, k, positions, rope, backend=backend)
        if trains:
            return q * 2, k * 2
        cache[:, 4 : 4 + seq] = k
        return q, cache

    if not trains:
        return torch.no_grad()(lambda: run(*inputs))
    grads = [torch.randn_like(x) for x in inputs]
    return lambda: torch.autograd.grad(run(*inputs), leaves, grads)


def time_ways(
    step: str, rope: Rope, dtype: torch.dtype, batch: int, seq: int, seconds: float
) -> dict[str, Any]:
    """What the rule chooses, and the times of each way, whose results are alike."""
    calls: dict[str, Callable[[], Any]] = {}
    outputs: dict[str, Any] = {}
    for way, (_, limit) in WAYS.items():
        if step == LAYER and way == DEFINITION:
            continue
        limits = {} if limit is None else dict.fromkeys(OPERATOR_FROM, limit)
        with patch.dict(OPERATOR_FROM, limits):
            calls[way] = compiled(step, rope, dtype, batch, seq, way)
            outputs[way] = calls[way]()  # which compiles
        # inductor may keep products in float32 that the norm's own tensor would have rounded
        for reference, result in zip(outputs[OPERATOR], outputs[way], strict=True):
            error = (reference.float() - result.float()).abs().max() / reference.float().abs().max()
            assert error < 3e-2, (step, way, error)
    heads = [torch.empty(batch, seq, n, 128, dtype=dtype)
             for n in (LAYER_HEADS if step == LAYER else HEADS)]  # fmt: skip
    is_kept = chosen_backend(*heads, compiled_for=rope) != "inductor"
    times = interleave(calls, seconds=seconds, rounds=(9, 400))
    return {"chosen": OPERATOR if is_kept else DECOMPOSITION, "seconds": times}


def steps(device: Any, seconds: float) -> dict[str, Callable[[], Any]]:
    """Every step in both pairings and dtypes."""
    return {
        f"{step}, {batch} x {seq}, {pairing}, {dtype}": partial(
            time_ways, step, Rope(head_dim=128, pairing=pairing, base=500_000.0),
            getattr(torch, dtype), batch, seq, seconds * 0.625,
        )
        for step, shapes in STEPS.items()
        for pairing in PAIRINGS
        for dtype in ("bfloat16", "float32")
        for batch, seq in shapes
    }  # fmt: skip


def sections(results: Mapping[str, Any], device: str) -> Iterator[Section]:
    """What was chosen, and the ratios."""
    rows: dict[str, dict[str, str]] = {}
    for name, plain in results.items():
        times, chosen = Times(plain["seconds"]), plain["chosen"]
        best = min((OPERATOR, DECOMPOSITION), key=times.median)
        ratios = {
            "chosen / better of both": (chosen, best),
            "operator / decomposition": (OPERATOR, DECOMPOSITION),
            'chosen / `backend="eager"`': (chosen, DEFINITION),
        }
        rows[name] = {"chosen": chosen} | {
            title: str(times.ratio(x, y)) if x != y else "1"
            for title, (x, y) in ratios.items()
            if y in times
        }
    backend = chosen_backend(torch.empty(1, 1, 1, 128))
    note = _NOTE.format(backend=backend, heads=HEADS, layer=LAYER_HEADS)
    yield Section("", note, rows, corner="step, batch x length, pairing, dtype")
