"""Under ``torch.compile``: the operator, or its decomposition that inductor fuses.

Both are measured in the same run: in a layer's work between projections and attention (QK norm,
rotation, and the key's place in a cache), forward alone and with backward, and in a whole layer of
attention. The rule in `phasor.torch._operator.inductor` should choose the faster of the two each
time.
``definition`` is ``backend="eager"``, plain operations as dynamo sees them. A GPU is used where
there is one.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from device import progress
from report import table
from timing import Call, interleave, spread
from torch import Tensor

from phasor import Rope
from phasor.torch import RotaryAttention, chosen_backend, rotate_qk
from phasor.torch._operator import inductor as _inductor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, LAYER_HEADS = (32, 8), (8, 2)
LAYER = "train a layer"
#: Each with the batch and the length; training is forward and backward.
STEPS = {
    "decode": [(1, 1), (32, 1)],
    "prefill": [(1, 64), (1, 512), (1, 4096)],
    "train": [(1, 512), (2, 2048)],
    LAYER: [(1, 512), (2, 2048)],
}
BACKENDS = {"operator": "auto", "decomposition": "auto", "definition": "eager"}
WAYS = {"operator": _inductor.ALWAYS, "decomposition": _inductor.NEVER}
_NOTE = """\
The operator runs the {backend!r} implementation. Times divided by times of the same run: below 1,
the first is faster. {heads[0]} query heads, {heads[1]} key heads, 128 wide, new outputs; the layer
has {layer[0]} and {layer[1]} and is 1,024 wide."""


@contextlib.contextmanager
def rule(limit: int | None) -> Iterator[None]:
    """Inside, the operator is kept from ``limit`` elements on, whatever was measured."""
    measured = dict(_inductor.OPERATOR_FROM)
    if limit is not None:
        on_gpu = [
            ("triton", pairing, dtype)
            for pairing in ("half", "interleaved")
            for dtype in (torch.bfloat16, torch.float32)
        ]
        _inductor.OPERATOR_FROM.update(dict.fromkeys([*measured, *on_gpu], limit))
    yield
    _inductor.OPERATOR_FROM.clear()
    _inductor.OPERATOR_FROM.update(measured)


def compiled(
    step: str, rope: Rope, dtype: torch.dtype, batch: int, seq: int, way: str
) -> Callable[[], Any]:
    """A call of the step on tensors of its own: the same whatever the way."""
    torch.manual_seed(0)
    trains, place = step.startswith("train"), {"dtype": dtype, "device": DEVICE}
    if step == LAYER:
        module = RotaryAttention(rope, 1024, num_heads=LAYER_HEADS[0], num_kv_heads=LAYER_HEADS[1])
        inputs = [torch.randn(batch, seq, 1024, **place)]
        leaves = list(module.to(**place).parameters())
    else:
        inputs = [torch.randn(batch, seq, n, 128, **place, requires_grad=trains) for n in HEADS]
        weight = torch.ones(128, **place, requires_grad=trains)
        leaves = [*inputs, weight]
    cache = torch.zeros(batch, seq + 8, HEADS[1], 128, **place)
    positions = torch.arange(seq, device=DEVICE) + 1000

    @torch.compile(fullgraph=True, dynamic=False)
    def run(*xs: Tensor) -> tuple[Tensor, ...]:
        backend = BACKENDS[way]  # read here, so that each way has a graph of its own
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


def make(way: str, *case: Any) -> tuple[Call, Any]:
    """A call of the compiled step, and what it returns."""
    with rule(WAYS.get(way)):
        run = compiled(*case, way)
        made = run()  # which compiles

    def call() -> None:
        run()
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    return call, made


def row(step: str, rope: Rope, dtype: torch.dtype, batch: int, seq: int) -> list[str]:
    """What the rule chooses, and the ratios."""
    torch._dynamo.reset()
    ways = [*WAYS] if step == LAYER else [*WAYS, "definition"]
    made = {way: make(way, step, rope, dtype, batch, seq) for way in ways}
    for way in ways[1:]:
        # inductor may keep products in float32 that the norm's own tensor would have rounded
        for one, other in zip(made["operator"][1], made[way][1], strict=True):
            wrong = (one.float() - other.float()).abs().max() / one.float().abs().max()
            assert wrong < 3e-2, (step, way, wrong)
    calls = {way: call for way, (call, _) in made.items()}
    times = interleave(calls, seconds=2.5, warm=False, rounds=(9, 400))
    heads = [torch.empty(batch, seq, n, 128, dtype=dtype, device=DEVICE)
             for n in (LAYER_HEADS if step == LAYER else HEADS)]  # fmt: skip
    kept = chosen_backend(*heads, compiled_for=rope) != "inductor"
    chosen = "operator" if kept else "decomposition"
    best = min(WAYS, key=lambda way: statistics.median(times[way]))
    ratios = [(chosen, best), ("operator", "decomposition"), (chosen, "definition")][: len(ways)]
    shown = [
        str(spread([a / b for a, b in zip(times[x], times[y], strict=True)])) if x != y else "1"
        for x, y in ratios
    ]
    return [f"{step}, {batch} x {seq}", rope.pairing, str(dtype).removeprefix("torch."), chosen,
            *shown, *[""] * (3 - len(shown))]  # fmt: skip


def page() -> str:
    """Every step in both pairings and dtypes."""
    rows = [
        row(progress(step), Rope(head_dim=128, pairing=pairing, base=500_000.0), dtype, *shape)
        for step, shapes in STEPS.items()
        for pairing in ("half", "interleaved")
        for dtype in (torch.bfloat16, torch.float32)
        for shape in shapes
    ]
    titles = ("step, batch x length", "pairing", "dtype", "chosen", "chosen / better of both",
              "operator / decomposition", 'chosen / `backend="eager"`')  # fmt: skip
    backend = chosen_backend(torch.empty(1, 1, 1, 128, device=DEVICE))
    note = _NOTE.format(backend=backend, heads=HEADS, layer=LAYER_HEADS)
    return f"{note}\n\n{table(titles, rows)}"
