"""Under ``torch.compile``: the operator, or its decomposition that inductor fuses.

``python bench/compiled.py`` measures both in the same run: in a layer's work between projections
and attention (QK norm, rotation, and the key's place in a cache), forward alone and with backward,
and in a whole layer of attention. The rule in `phasor.torch._inductor` should choose the faster of
the two each time. ``definition`` is ``backend="eager"``, plain operations as dynamo sees them.
Writes ``bench/results/compiled.md``; words after the command pick steps. A GPU is used where there
is one.
"""

from __future__ import annotations

import contextlib
import platform
import statistics
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from report import table
from timing import Call, interleave, spread
from torch import Tensor

from phasor import Rope
from phasor.torch import RotaryAttention, _inductor, chosen_backend, rotate_qk

RESULT = Path(__file__).with_name("results") / "compiled.md"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS = 32, 8
#: Each with the batch and the length; training is forward and backward.
STEPS = {
    "decode": [(1, 1), (32, 1)],
    "prefill": [(1, 64), (1, 512), (1, 4096)],
    "train": [(1, 512), (2, 2048)],
    "train a layer": [(1, 512), (2, 2048)],
}
BACKENDS = {"operator": "auto", "decomposition": "auto", "definition": "eager"}
WAYS = {"operator": _inductor.ALWAYS, "decomposition": _inductor.NEVER}


@contextlib.contextmanager
def rule(limit: int | None) -> Iterator[None]:
    """Inside, the operator is kept from ``limit`` elements on, whatever was measured."""
    measured = dict(_inductor.OPERATOR_FROM)
    if limit is not None:
        keys = [*measured, ("triton", "half", torch.bfloat16), ("triton", "half", torch.float32),
                ("triton", "interleaved", torch.bfloat16),
                ("triton", "interleaved", torch.float32)]  # fmt: skip
        _inductor.OPERATOR_FROM.update(dict.fromkeys(keys, limit))
    yield
    _inductor.OPERATOR_FROM.clear()
    _inductor.OPERATOR_FROM.update(measured)


def forward(rope: Rope, dtype: torch.dtype, batch: int, seq: int, way: str) -> Callable[..., Any]:
    """Norms, rotation and cache write of new tensors."""
    q, k = (torch.randn(batch, seq, n, 128, dtype=dtype, device=DEVICE) for n in HEADS)
    weight = torch.ones(128, dtype=dtype, device=DEVICE)
    cache = torch.zeros(batch, seq + 8, HEADS[1], 128, dtype=dtype, device=DEVICE)
    positions = torch.arange(seq, device=DEVICE) + 1000

    @torch.compile(fullgraph=True, dynamic=False)
    def step(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (torch.nn.functional.rms_norm(x, (128,), weight, 1e-6) for x in (q, k))
        q, k = rotate_qk(q, k, positions, rope, backend=BACKENDS[way])
        cache[:, 4 : 4 + seq] = k
        return q, cache

    return torch.no_grad()(lambda: step(q, k))


def train(rope: Rope, dtype: torch.dtype, batch: int, seq: int, way: str) -> Callable[..., Any]:
    """Norms, rotation and a gate, forward and backward."""
    q, k = (
        torch.randn(batch, seq, n, 128, dtype=dtype, device=DEVICE, requires_grad=True)
        for n in HEADS
    )
    grads = [torch.randn_like(x) for x in (q, k)]
    weight = torch.ones(128, dtype=dtype, device=DEVICE, requires_grad=True)
    positions = torch.arange(seq, device=DEVICE)

    @torch.compile(fullgraph=True, dynamic=False)
    def step(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (torch.nn.functional.rms_norm(x, (128,), weight, 1e-6) for x in (q, k))
        q, k = rotate_qk(q, k, positions, rope, backend=BACKENDS[way])
        return q * 2, k * 2

    return lambda: torch.autograd.grad(step(q, k), (q, k, weight), grads)


def train_layer(
    rope: Rope, dtype: torch.dtype, batch: int, seq: int, way: str
) -> Callable[..., Any]:
    """A layer of attention 1,024 wide with its projections, forward and backward."""
    module = RotaryAttention(rope, 1024, num_heads=8, num_kv_heads=2).to(DEVICE, dtype)
    x = torch.randn(batch, seq, 1024, dtype=dtype, device=DEVICE)
    grad = torch.randn_like(x)
    parameters = list(module.parameters())

    @torch.compile(fullgraph=True, dynamic=False)
    def step(x: Tensor) -> Tensor:
        assert way in BACKENDS  # so that each way has a graph of its own
        return module(x)

    return lambda: torch.autograd.grad(step(x), parameters, grad)


def make(step: str, way: str, *case: Any) -> tuple[Call, Any]:
    """A call of the compiled step on tensors of its own, and what it returns."""
    torch.manual_seed(0)
    maker = {"train": train, "train a layer": train_layer}.get(step, forward)
    with rule(WAYS.get(way)):
        run = maker(*case, way)
        made = run()  # which compiles

    def call() -> None:
        run()
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    return call, made


def measure(step: str, rope: Rope, dtype: torch.dtype, batch: int, seq: int) -> tuple[str, ...]:
    """One row: what the rule chooses, and the ratios."""
    torch._dynamo.reset()
    ways = [*WAYS] if step == "train a layer" else [*WAYS, "definition"]
    made = {way: make(step, way, rope, dtype, batch, seq) for way in ways}
    for way in ways[1:]:
        # inductor may keep products in float32 that the norm's own tensor would have rounded
        for one, other in zip(made["operator"][1], made[way][1], strict=True):
            wrong = (one.float() - other.float()).abs().max() / one.float().abs().max()
            assert wrong < 3e-2, (step, way, wrong)
    times = interleave(
        {way: call for way, (call, _) in made.items()}, seconds=2.5, warm=False, rounds=(9, 400)
    )
    heads = [torch.empty(batch, seq, n, 128, dtype=dtype, device=DEVICE)
             for n in ((8, 2) if step == "train a layer" else HEADS)]  # fmt: skip
    kept = chosen_backend(*heads, compiled_for=rope) != "inductor"
    chosen = "operator" if kept else "decomposition"
    best = min(WAYS, key=lambda way: statistics.median(times[way]))
    ratios = [(chosen, best), ("operator", "decomposition")]
    if "definition" in ways:
        ratios.append((chosen, "definition"))
    shown = [
        str(spread([a / b for a, b in zip(times[x], times[y], strict=True)])) if x != y else "1"
        for x, y in ratios
    ]
    return (f"{step}, {batch} x {seq}", rope.pairing, str(dtype).removeprefix("torch."), chosen,
            *shown, *[""] * (3 - len(shown)))  # fmt: skip


def main() -> None:
    """Measure, compare what both made, and write the table."""
    picked = sys.argv[1:]
    rows: list[tuple[str, ...]] = []
    for step, shapes in STEPS.items():
        for pairing in ("half", "interleaved"):
            for dtype in (torch.bfloat16, torch.float32):
                for shape in shapes:
                    words = step, pairing, str(dtype).removeprefix("torch."), str(shape[1])
                    if picked and not set(picked) <= set(words):
                        continue
                    rope = Rope(head_dim=128, pairing=pairing, base=500_000.0)
                    rows.append(measure(step, rope, dtype, *shape))
                    print(*rows[-1], sep="  ", flush=True)
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else f"CPU, {platform.machine()}"
    backend = chosen_backend(torch.empty(1, 1, 1, 128, device=DEVICE))
    head = (
        f"Measured {datetime.now(UTC):%Y-%m-%d %H:%M} UTC on {device} with "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}; the operator runs the "
        f"{backend!r} implementation. Times divided by times of the same run: below 1, the "
        f"first is faster. {HEADS[0]} query heads, {HEADS[1]} key heads, 128 wide, new outputs; "
        "the layer has 8 and 2 and is 1,024 wide.\n\n"
    )
    columns = ("step, batch x length", "pairing", "dtype", "chosen", "chosen / better of both",
               "operator / decomposition", 'chosen / `backend="eager"`')  # fmt: skip
    if not picked:
        RESULT.write_text(head + table(columns, rows) + "\n", "utf-8")


if __name__ == "__main__":
    main()
