"""Whole models, patched against unpatched: ``python bench/models.py``, in about three minutes.

Writes ``bench/results/models.md``: prefill and decode of three published shapes with random
weights, how much of that time is rotation, and what the rotation of one layer needs at 32k tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from rich.progress import Progress
from torch import Tensor, nn

from phasor.torch.transformers import patch
from phasor.torch.transformers._forms import substitute
from phasor.torch.transformers._methods import original, rotations, with_methods

THREADS, LAYERS, PROMPT, STEPS, LONG = 2, 2, 512, 4, 32_768
ROUNDS = {"prefill": 4, "decode": 9, "prefill, compiled": 5}
RESULT = Path(__file__).with_name("results") / "models.md"
# the allocator and OpenMP read these when the process starts; as in run.py
ENVIRONMENT = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "OMP_NUM_THREADS": str(THREADS),
    "PHASOR_BENCH": "1",
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
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
Timed = dict[str, list[float]]


def built(name: str) -> nn.Module:
    """The first layers of a model, with random bfloat16 weights; the same ones every time."""
    kind, _, shape = SHAPES[name]
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=1024, num_hidden_layers=LAYERS, pad_token_id=0, **shape
    )
    torch.manual_seed(0)
    model_class = getattr(transformers, kind.replace("Text", "") + "TextModel" if "Text" in kind
                          else f"{kind}Model")  # fmt: skip
    model = model_class(config).eval()
    # as from_pretrained does it: weights in bfloat16, frequencies in float32
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model


def silently_patched(model: nn.Module) -> nn.Module:
    """The model, rotating with phasor."""
    with contextlib.redirect_stdout(io.StringIO()):
        patch(model)
    return model


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
        plain = original(module) or type(module)
        if "Rotary" in plain.__name__:
            module.forward = timed(module.forward)
        elif found := rotations(plain):
            is_patched = original(module) is not None
            stand_ins = {
                name: timed(substitute(function) if is_patched else function)
                for name, function in found.items()
            }
            module.__class__ = with_methods(plain, stand_ins, None)
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


def resident() -> int:
    """The peak of resident memory (Linux)."""
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@torch.no_grad()
def rise(name: str, *, patched: bool) -> int:
    """Bytes by which the rotation of one layer at 32k tokens raises this process's memory."""
    model: Any = built(name)
    layer = next(m for _, m in model.named_modules() if rotations(type(m)))
    function = rotations(type(layer))["apply_rotary_pos_emb"]
    if patched:
        silently_patched(model)
        function = substitute(function)
    shape = SHAPES[name][2]
    kind = "full_attention" if name.startswith("Gemma") else None

    def once(length: int) -> tuple[Tensor, ...]:
        q, k = (
            torch.ones(1, length, shape[heads], shape["head_dim"], dtype=torch.bfloat16)
            for heads in ("num_attention_heads", "num_key_value_heads")
        )
        places = torch.arange(length)[None]
        Path("/proc/self/clear_refs").write_text("5", "ascii")
        before = resident()
        rows = model.rotary_emb(q, places, *([kind] if kind else []))
        done = function(q.transpose(1, 2), k.transpose(1, 2), *rows)
        raised.append(resident() - before)
        return done

    raised: list[int] = []
    once(64)
    once(LONG)
    return raised[-1]


def fresh_rise(name: str, *, patched: bool) -> int:
    """`rise` in a process of its own, with the system's malloc."""
    usual = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    program = [sys.executable, __file__, "--rise", name, *(["--patched"] if patched else [])]
    return int(subprocess.run(program, capture_output=True, check=True, env=usual).stdout)


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
        f"Measured {datetime.now(UTC):%Y-%m-%d %H:%M} UTC on {torch.get_num_threads()} threads of "
        f"{platform.machine()}, torch {torch.__version__}, transformers {transformers.__version__},"
        f" phasor {version('phasor')}, load average before {load:.1f}. Shapes of the published "
        f"models with random bfloat16 weights, {LAYERS} layers of each and no output layer; "
        f"{PROMPT} tokens of prompt, decode is the mean of {STEPS} tokens after it. Medians of up "
        "to 9 rounds in which both are called in turn. The last column scales what the layers "
        "measured here save in rotation to all layers of the model. Rotation is timed inside other "
        "runs of the same models; its shares are of those runs, so of a model without its output "
        "layer."
    )
    rows: list[str] = []
    with Progress(transient=True) as bar:
        cases = [(name, way) for way in WAYS for name in SHAPES]
        task = bar.add_task("whole models", total=len(cases) + len(SHAPES))
        for name, way in cases:
            bar.update(task, description=f"{name}, {way}")
            rows.append(case(name, way))
            bar.advance(task)
        yield "\n".join([HEAD, *rows])
        memory = []
        for name in SHAPES:
            before, after = (fresh_rise(name, patched=which) / 2**20 for which in (False, True))
            memory.append(f"| {name} | {before:.0f} | {after:.0f} |")
            bar.advance(task)
    yield (
        f"### One layer's rotation at {LONG} tokens\n\nThe peak of resident memory above what the "
        "process held with query and key made, in a process of its own: cosines and sines, "
        "temporaries, and the rotated query and key themselves. Attention at this length does not "
        "fit into this machine's minutes, so the model around it is not run."
    )
    lines = ["| shape | transformers, MiB | phasor, MiB |", "| --- | ---: | ---: |"]
    yield "\n".join([*lines, *memory])


def main() -> None:
    """Run everything, or one peak of memory in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rise", choices=SHAPES)
    parser.add_argument("--patched", action="store_true")
    wanted = parser.parse_args()
    if wanted.rise:
        print(rise(wanted.rise, patched=wanted.patched))
        return
    if os.environ.get("PHASOR_BENCH") != "1":
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ENVIRONMENT})
    torch.set_num_threads(THREADS)
    page = "\n\n".join(report()) + "\n"
    RESULT.write_text(page, "utf-8")
    print(page)


if __name__ == "__main__":
    main()
