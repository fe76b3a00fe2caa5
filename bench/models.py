"""Whole models, patched against unpatched: ``python bench/models.py`` and ``--memory``.

The first takes three minutes and writes ``bench/results/models.md``: prefill and decode of three
published shapes with random weights, and how much of that time is rotation. The second takes a
quarter of an hour (Linux) and writes ``model-memory.md``: how far the peak of resident memory rises
at 32k tokens, in the rotation of one layer and in the whole model around it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import platform
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from device import THREADS, peak_rise, restart_with_kept_memory
from facts import fresh
from report import table
from timing import interleave
from torch import nn

from phasor.torch.hf import patch
from phasor.torch.hf.carriers import substitute
from phasor.torch.hf.methods import original_class, rotations_of, subclass_calling

LAYERS, PROMPT, STEPS, LONG = 2, 512, 4, 32_768
ROUNDS = {"prefill": 4, "decode": 9, "prefill, compiled": 5}
RESULTS = Path(__file__).with_name("results")
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
#: The published shapes: class, layers of the whole model, and its config; the vocabulary is small.
SHAPES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "Llama-3.2-1B": ("Llama", 16, {
        "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "intermediate_size": 8192, "max_position_embeddings": 131_072, "rope_parameters": _LLAMA3,
    }),
    "Qwen3-0.6B": ("Qwen3", 28, {
        "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 3072, "max_position_embeddings": 40_960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    }),
    "Gemma-3-1B": ("Gemma3Text", 26, {
        "hidden_size": 1152, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
        "intermediate_size": 6912, "sliding_window": 512, "max_position_embeddings": 32_768,
        "layer_types": ["sliding_attention", "full_attention"],
    }),
}  # fmt: skip


def built(name: str, *, patched: bool) -> Any:
    """The first layers of a model, with random bfloat16 weights; the same ones every time."""
    kind, _, shape = SHAPES[name]
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=1024, num_hidden_layers=LAYERS, pad_token_id=0, **shape
    )
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, f"{kind}Model")(config).eval()
    # as from_pretrained does it: weights in bfloat16, frequencies in float32
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    if patched:
        with contextlib.redirect_stdout(io.StringIO()):
            patch(model)
    return model


def circumstances() -> str:
    """When, where and with what."""
    return (
        f"Measured {datetime.now(UTC):%Y-%m-%d %H:%M} UTC on {torch.get_num_threads()} threads of "
        f"{platform.machine()}, torch {torch.__version__}, transformers {transformers.__version__},"
        f" phasor {version('phasor')}. Shapes of the published models with random bfloat16 "
        f"weights, {LAYERS} layers of each and no output layer"
    )


def run_of(model: Any, way: str) -> Callable[[], object]:
    """A call of ``model``: all tokens of a prompt, or a few, one at a time, after that prompt."""
    ids = torch.arange(PROMPT)[None] % 1000
    if way != "decode":
        called = torch.compile(model, dynamic=False) if "compiled" in way else model
        return torch.no_grad()(lambda: called(ids, use_cache=False))
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    one = torch.tensor([[5]])

    @torch.no_grad()
    def steps() -> None:
        for _ in range(STEPS):
            model(one, past_key_values=cache, use_cache=True)

    return steps


def timed_rotations(model: Any, spent: list[float]) -> Any:
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


def rotating(name: str, way: str, *, patched: bool) -> tuple[float, float]:
    """Median seconds of a call that go into rotation, and their median share of the call."""
    spent: list[float] = []
    call = run_of(timed_rotations(built(name, patched=patched), spent), way)
    taken: list[tuple[float, float]] = []
    for _ in range(ROUNDS[way] + 1):
        spent.clear()
        start = time.perf_counter()
        call()
        taken.append((sum(spent), time.perf_counter() - start))
    return median(one for one, _ in taken[1:]), median(one / all_ for one, all_ in taken[1:])


def row(name: str, way: str) -> list[str]:
    """Times, their ratio, the share of rotation, and what all of the model's layers save."""
    calls = {
        which: run_of(built(name, patched=which == "ours"), way) for which in ("plain", "ours")
    }
    rounds = ROUNDS[way], ROUNDS[way]
    samples = interleave(calls, seconds=0.0, warm=False, rounds=rounds)
    per_call = 1e3 / (STEPS if way == "decode" else 1)
    times = {which: per_call * median(some) for which, some in samples.items()}
    cells = [name, way, *(f"{times[which]:.4g}" for which in times)]
    cells.append(f"{times['plain'] / times['ours']:.3f}")
    if "compiled" in way:
        return [*cells, "–", "–", "–"]
    rotation: dict[str, float] = {}
    for which in times:
        took, share = rotating(name, way, patched=which == "ours")
        rotation[which] = per_call * took
        cells.append(f"{rotation[which]:.3g} ({share:.1%})")
    saved = (rotation["plain"] - rotation["ours"]) * SHAPES[name][1] / LAYERS
    return [*cells, f"{saved:.3g}"]


def times_page() -> str:
    """Prefill and decode of every shape."""
    load = os.getloadavg()[0]
    rows: list[list[str]] = []
    for way in ROUNDS:
        for name in SHAPES:
            print(f"{name}, {way}", file=sys.stderr)
            rows.append(row(name, way))
    titles = ("shape", "run", "transformers, ms", "phasor, ms", "ratio", "rotation before, ms",
              "after, ms", "saved, whole model, ms")  # fmt: skip
    return (
        f"{circumstances()}; load average before {load:.1f}. {PROMPT} tokens of prompt, decode is "
        f"the mean of {STEPS} tokens after it. Medians of up to 9 rounds in which both are called "
        "in turn. The last column scales what the layers measured here save in rotation to all "
        "layers of the model. Rotation is timed inside other runs of the same models; its shares "
        f"are of those runs, so of a model without its output layer.\n\n{table(titles, rows)}\n"
    )


@torch.no_grad()
def memory_rise(what: str, name: str, *, patched: bool) -> int:
    """Bytes by which a prompt of 32k tokens raises the peak, in one rotation or a whole model."""
    model = built(name, patched=patched)
    shape = SHAPES[name][2]
    layer = next(m for _, m in model.named_modules() if rotations_of(original_class(m) or type(m)))
    function = rotations_of(original_class(layer) or type(layer))["apply_rotary_pos_emb"]
    rotate = substitute(function) if patched else function
    kind = ["full_attention"] if name.startswith("Gemma") else []

    def rise(length: int) -> int:
        positions = torch.arange(length)[None]
        if what == "model":
            return peak_rise(lambda: model(positions % 1000, use_cache=False))
        q, k = (
            torch.ones(1, length, shape[heads], shape["head_dim"], dtype=torch.bfloat16)
            for heads in ("num_attention_heads", "num_key_value_heads")
        )
        return peak_rise(
            lambda: rotate(
                q.transpose(1, 2), k.transpose(1, 2), *model.rotary_emb(q, positions, *kind)
            )
        )

    rise(64)  # for what is loaded once
    return rise(LONG)


def memory_page() -> str:
    """Peaks of memory, each in a process of its own."""
    tables: dict[str, str] = {}
    for what in ("rotation", "model"):
        rows: list[list[str]] = []
        for name in SHAPES:
            print(f"{what} of {name}", file=sys.stderr)
            rises = [
                fresh("models.py", "--rise", what, name, *extra) for extra in ([], ["--patched"])
            ]
            rows.append([name, *(f"{rise / 2**20:.0f}" for rise in rises)])
        tables[what] = table(("shape", "transformers, MiB", "phasor, MiB"), rows)
    return f"""\
{circumstances()}. How far the peak of resident memory rises at {LONG} tokens, in a process of its
own for every number.

One layer's rotation, from query and key on: cosines and sines, temporaries, and the rotated query
and key themselves.

{tables["rotation"]}

The whole model, without a cache:

{tables["model"]}
"""


def main() -> None:
    """Write one of the pages, or measure one peak for it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--rise", nargs=2, metavar=("WHAT", "SHAPE"), help=argparse.SUPPRESS)
    parser.add_argument("--patched", action="store_true", help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    torch.set_num_threads(THREADS)
    if wanted.rise:
        print(memory_rise(*wanted.rise, patched=wanted.patched))
        return
    page = memory_page() if wanted.memory else times_page()
    (RESULTS / ("model-memory.md" if wanted.memory else "models.md")).write_text(page, "utf-8")
    print(page)


if __name__ == "__main__":
    restart_with_kept_memory()
    main()
