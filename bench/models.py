"""Whole models, patched against unpatched: ``python bench/models.py``, in about three minutes.

Writes ``bench/results/models.md``: prefill and decode of three published shapes with random
weights, and how much of that time is rotation.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from model_shapes import LAYERS, SHAPES, THREADS, built, circumstances, silently_patched
from rich.progress import Progress
from torch import nn

from phasor.torch.hf.functions import substitute
from phasor.torch.hf.methods import original_class, rotations_of, subclass_calling

PROMPT, STEPS = 512, 4
ROUNDS = {"prefill": 4, "decode": 9, "prefill, compiled": 5}
RESULT = Path(__file__).with_name("results") / "models.md"
# the allocator and OpenMP read these when the process starts; as in run.py
ENVIRONMENT = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "OMP_NUM_THREADS": str(THREADS),
    "PHASOR_BENCH": "1",
}
Timed = dict[str, list[float]]


@torch.no_grad()
def prefill(model: Any) -> Callable[[], object]:
    """All tokens of a prompt."""
    ids = torch.arange(PROMPT)[None] % 1000
    return torch.no_grad()(lambda: model(ids, use_cache=False))


@torch.no_grad()
def decode(model: Any) -> Callable[[], object]:
    """A few tokens, one at a time, after that prompt."""
    ids = torch.arange(PROMPT)[None] % 1000
    cache = model(ids, use_cache=True).past_key_values
    one = torch.tensor([[5]])

    @torch.no_grad()
    def steps() -> None:
        for _ in range(STEPS):
            model(one, past_key_values=cache, use_cache=True)

    return steps


WAYS: dict[str, Callable[[Any], Callable[[], object]]] = {
    "prefill": prefill,
    "decode": decode,
    "prefill, compiled": lambda model: prefill(torch.compile(model, dynamic=False)),
}


def seconds(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of a call, all taken in turn after one call each to warm up."""
    taken: Timed = {name: [] for name in contenders}
    for call in contenders.values():
        call()
    for _ in range(rounds):
        for name, call in contenders.items():
            start = time.perf_counter()
            call()
            taken[name].append(time.perf_counter() - start)
    return {name: median(some) for name, some in taken.items()}


def watched(model: nn.Module, spent: list[float]) -> nn.Module:
    """The model, noting every second that its embeddings and its rotations take."""

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent.append(time.perf_counter() - start)

        return call

    for _, module in list(model.named_modules()):
        plain = original_class(module) or type(module)
        if "Rotary" in plain.__name__:
            module.forward = timed(module.forward)
        elif found := rotations_of(plain):
            is_patched = original_class(module) is not None
            stand_ins = {
                name: timed(substitute(function) if is_patched else function)
                for name, function in found.items()
            }
            module.__class__ = subclass_calling(plain, stand_ins, None)
    return model


def rotating(name: str, way: str, *, patched: bool, rounds: int) -> tuple[float, float]:
    """Median seconds of a call that go into rotation, and their median share of the call."""
    spent: list[float] = []
    model = built(name)
    if patched:
        silently_patched(model)
    call = WAYS[way](watched(model, spent))
    taken: list[tuple[float, float]] = []
    for _ in range(rounds + 1):
        spent.clear()
        start = time.perf_counter()
        call()
        taken.append((sum(spent), time.perf_counter() - start))
    return median(one for one, _ in taken[1:]), median(one / all_ for one, all_ in taken[1:])


def case(name: str, way: str) -> str:
    """One row: times, their ratio, the share of rotation, and all of the model's layers."""
    plain, ours = built(name), silently_patched(built(name))
    total = seconds({"plain": WAYS[way](plain), "ours": WAYS[way](ours)}, ROUNDS[way])
    calls = STEPS if way == "decode" else 1
    times = {which: 1e3 * took / calls for which, took in total.items()}
    cells = [name, way, f"{times['plain']:.4g}", f"{times['ours']:.4g}"]
    cells.append(f"{times['plain'] / times['ours']:.3f}")
    if "compiled" in way:
        return "| " + " | ".join([*cells, "–", "–", "–"]) + " |"
    spent: dict[str, float] = {}
    for which in total:
        took, share = rotating(name, way, patched=which == "ours", rounds=ROUNDS[way])
        spent[which] = 1e3 * took / calls
        cells.append(f"{spent[which]:.3g} ({share:.1%})")
    saved = (spent["plain"] - spent["ours"]) * SHAPES[name][1] / LAYERS
    return "| " + " | ".join([*cells, f"{saved:.3g}"]) + " |"


HEAD = """\
| shape | run | transformers, ms | phasor, ms | ratio | rotation before, ms | after, ms | saved, whole model, ms |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"""  # noqa: E501


def report() -> Iterator[str]:
    """The page, piece by piece; a bar on the terminal shows how far it is."""
    load = os.getloadavg()[0]
    yield (
        f"{circumstances()}; load average before {load:.1f}. "
        f"{PROMPT} tokens of prompt, decode is the mean of {STEPS} tokens after it. Medians of up "
        "to 9 rounds in which both are called in turn. The last column scales what the layers "
        "measured here save in rotation to all layers of the model. Rotation is timed inside other "
        "runs of the same models; its shares are of those runs, so of a model without its output "
        "layer."
    )
    rows: list[str] = []
    with Progress(transient=True) as bar:
        cases = [(name, way) for way in WAYS for name in SHAPES]
        task = bar.add_task("whole models", total=len(cases))
        for name, way in cases:
            bar.update(task, description=f"{name}, {way}")
            rows.append(case(name, way))
            bar.advance(task)
        yield "\n".join([HEAD, *rows])


def main() -> None:
    """Measure, and write the page."""
    if os.environ.get("PHASOR_BENCH") != "1":
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ENVIRONMENT})
    torch.set_num_threads(THREADS)
    page = "\n\n".join(report()) + "\n"
    RESULT.write_text(page, "utf-8")
    print(page)


if __name__ == "__main__":
    main()
