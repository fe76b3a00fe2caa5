"""What a user feels: whole models, patched against unpatched.

Prefill, decode and a training step of a small Llama with random weights, eager and compiled, and
how much of that is rotation; and how far the peak of resident memory rises at 32k tokens in models
of three published shapes (Linux), in the rotation of one layer and in the whole model around it.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from device import THREADS, alone, peak_rise, progress
from report import table
from timing import Spread, interleave, spread
from torch import nn

from phasor.torch.hf import patch
from phasor.torch.hf.carriers import substitute
from phasor.torch.hf.methods import original_class, rotations_of, subclass_calling

LAYERS, PROMPT, STEPS, LONG = 2, 512, 8, 32_768
#: Fewest and most rounds of a run, and roughly how long it goes on.
ROUNDS, SECONDS = (5, 25), 8.0
# labels in the profile of an eager call, and how many calls are profiled
ROTATION, STEP, PROFILED = "the rotation", "the whole call", 4
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
#: The model of the times: 104 million parameters with its tied output layer.
LLAMA: dict[str, Any] = {
    "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 2048, "vocab_size": 32_000,
    "tie_word_embeddings": True, "max_position_embeddings": 131_072, "rope_parameters": _LLAMA3,
}  # fmt: skip
#: The published shapes of the memory: class and config; the vocabulary is small.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3.2-1B": ("Llama", {
        "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "intermediate_size": 8192, "max_position_embeddings": 131_072, "rope_parameters": _LLAMA3,
    }),
    "Qwen3-0.6B": ("Qwen3", {
        "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 3072, "max_position_embeddings": 40_960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    }),
    "Gemma-3-1B": ("Gemma3Text", {
        "hidden_size": 1152, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
        "intermediate_size": 6912, "sliding_window": 512, "max_position_embeddings": 32_768,
        "layer_types": ["sliding_attention", "full_attention"],
    }),
}  # fmt: skip


def built(name: str, *, patched: bool) -> Any:
    """The first layers of a published model, with random bfloat16 weights."""
    kind, shape = SHAPES[name]
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=1024, num_hidden_layers=LAYERS, pad_token_id=0, **shape
    )
    torch.manual_seed(0)
    return prepared(getattr(transformers, f"{kind}Model")(config), torch.bfloat16, patched)


def prepared(model: nn.Module, dtype: torch.dtype, patched: bool) -> Any:
    """``model`` as from_pretrained leaves it: weights in ``dtype``, frequencies in float32."""
    for parameter in model.eval().parameters():
        parameter.data = parameter.data.to(dtype)
    if patched:
        with contextlib.redirect_stdout(io.StringIO()):
            patch(model)
    return model


def llama(which: str, dtype: str) -> Any:
    """The Llama of the times: ``"plain"``, ``"ours"``, or ``"without"`` any rotation."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(pad_token_id=0, **LLAMA))
    model = prepared(model, getattr(torch, dtype), which == "ours")
    if which == "without":
        model.model.rotary_emb.forward = lambda x, position_ids: (x, x)
        replace_rotation(model, lambda function: lambda q, k, *_, **__: (q, k))
    return model


def run_of(model: Any, run: str, *, compiled: bool) -> Callable[[], object]:
    """A call of ``model``: a prompt, a few tokens one at a time after it, or a training step."""
    ids = torch.arange(PROMPT)[None] * 61 % 32_000
    called = torch.compile(model, dynamic=False) if compiled else model
    if run == "prefill":
        return torch.no_grad()(lambda: called(ids, use_cache=False, logits_to_keep=1))
    if run == "training":
        optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4, fused=True)

        def train() -> None:
            called(ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return train
    cache = transformers.DynamicCache()
    if compiled:
        cache = transformers.StaticCache(config=model.config, max_cache_len=PROMPT + STEPS)
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    one = torch.tensor([[5]])

    @torch.no_grad()
    def decode() -> None:
        for _ in range(STEPS):
            called(one, past_key_values=cache, use_cache=True)
        # back to the end of the prompt
        if compiled:
            for layer in cache.layers:
                layer.cumulative_length.fill_(PROMPT)
        else:
            cache.crop(-STEPS)

    return decode


def replace_rotation(model: Any, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let every layer rotate by what ``make`` makes of its rotation function."""
    for module in list(model.modules()):
        plain = original_class(module) or type(module)
        if found := rotations_of(plain):
            patched = original_class(module) is not None
            stand_ins = {
                name: make(substitute(function) if patched else function)
                for name, function in found.items()
            }
            module.__class__ = subclass_calling(plain, stand_ins, None)


def rotation_share(which: str, run: str, dtype: str) -> float:
    """The part of an eager call that rotation takes, forward and backward, by torch's profiler."""

    def marked(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with torch.profiler.record_function(ROTATION):
                return function(*args, **kwargs)

        return call

    model = llama(which, dtype)
    model.model.rotary_emb.forward = marked(model.model.rotary_emb.forward)
    replace_rotation(model, marked)
    call = run_of(model, run, compiled=False)
    spent: list[tuple[float, float]] = []
    for _ in range(PROFILED + 1):
        with torch.profiler.profile() as profile, torch.profiler.record_function(STEP):
            call()
        events = profile.events()
        rotations = [event for event in events if event.name == ROTATION]
        # a node of the backward pass has the number that its operation had
        numbers = {one.sequence_nr for event in rotations for one in operations_in(event)} - {-1}
        nodes = [event for event in events if event.name.startswith("autograd::engine::evaluate")]
        rotations += [event for event in nodes if event.sequence_nr in numbers]
        (step,) = (event for event in events if event.name == STEP)
        spent.append((step.cpu_time_total, sum(event.cpu_time_total for event in rotations)))
    # of the fastest call: the others were disturbed, which a few long operations show less
    whole, rotating = min(spent[1:])
    return rotating / whole


def operations_in(event: Any) -> Iterator[Any]:
    """All that an event of a profile called."""
    for child in event.cpu_children:
        yield child
        yield from operations_in(child)


class Row(NamedTuple):
    """A run: its times, patched / unpatched, and the part of each that rotation takes, if known."""

    name: str
    milliseconds: list[float]
    ratio: Spread
    shares: list[float | None]

    def cells(self) -> list[str]:
        """As a row of the table."""
        shares = ("–" if share is None else f"{share:.1%}" for share in self.shares)
        return [self.name, *(f"{x:.4g}" for x in self.milliseconds), str(self.ratio), *shares]


def measure(run: str, dtype: str, *, compiled: bool) -> Row:
    """Unpatched and patched in turn; compiled also without rotation, for nothing else tells."""
    name = progress(f"{run}, {dtype}, {'compiled' if compiled else 'eager'}")
    torch.compiler.reset()
    models = ("plain", "ours", "without") if compiled else ("plain", "ours")
    calls = {which: run_of(llama(which, dtype), run, compiled=compiled) for which in models}
    samples = interleave(calls, seconds=SECONDS, warm=False, rounds=ROUNDS)
    plain, ours, *bare = samples.values()
    if compiled:
        # in every round, what is gone without rotation; unknown where quartiles say it may be none
        gone = [
            spread([(a - b) / a for a, b in zip(some, bare[0], strict=True)])
            for some in (plain, ours)
        ]
        shares = [part.median if part.low > 0 else None for part in gone]
    else:
        shares = [rotation_share(which, run, dtype) for which in models]
    per_call = 1e3 / (STEPS if run == "decode" else 1)
    times = [per_call * median(some) for some in (plain, ours)]
    return Row(name, times, spread([b / a for a, b in zip(plain, ours, strict=True)]), shares)


def verdict(rows: Sequence[Row]) -> str:
    """What came out, in plain words."""
    faster, slower = sum(row.ratio.high < 1 for row in rows), sum(row.ratio.low > 1 for row in rows)
    before, after = (
        sorted(row.shares[i] or 0 for row in rows if row.name.endswith("eager")) for i in (0, 1)
    )
    return (
        f"A Llama of 104 million parameters was run patched and unpatched on {THREADS} threads of "
        "a CPU, in prefill, decode and training, eager and compiled, in bfloat16 and float32. "
        f"Patched it was faster in {faster} of {len(rows)} runs and slower in {slower}; in the "
        f"other {len(rows) - faster - slower} the difference is within the quartiles of the "
        f"rounds. Rotation takes {before[0]:.1%} to {before[-1]:.1%} of an eager call of "
        f"transformers, and {after[0]:.1%} to {after[-1]:.1%} of a patched one."
    )


def page() -> str:
    """Every run, eager and compiled."""
    rows = [
        measure(run, dtype, compiled=compiled)
        for run in ("prefill", "decode", "training")
        for dtype in ("bfloat16", "float32")
        for compiled in (False, True)
    ]
    titles = ("run", "transformers, ms", "phasor, ms", "phasor / transformers", "rotation before",
              "after")  # fmt: skip
    return f"""\
<!-- --8<-- [start:verdict] -->
{verdict(rows)}
<!-- --8<-- [end:verdict] -->

{table(titles, [row.cells() for row in rows])}

`LlamaForCausalLM` with random weights, {LLAMA["num_hidden_layers"]} layers of width
{LLAMA["hidden_size"]}: prefill of {PROMPT} tokens, decode of one token after them with a cache (the
mean of {STEPS}; a `StaticCache` where compiled), and forward, loss, backward and AdamW on 1 ×
{PROMPT} tokens. Both are called in turn, in {ROUNDS[0]} to {ROUNDS[1]} rounds; the ratio is the
median over rounds with its quartiles. Compiled is `torch.compile(model, dynamic=False)`. What part
of an eager call is rotation, with the embedding and the backward pass, is that of a profile by
`torch.profiler` of the fastest of {PROFILED} calls; a profile adds more to many small operations
than to one. Of a compiled call it is the median of what is gone in a model that leaves rotation
out, called in the same rounds, and – where a quartile is below nothing.
"""


@torch.no_grad()
def memory_rise(what: str, name: str, patched: bool) -> int:
    """Bytes by which a prompt of 32k tokens raises the peak, in one rotation or a whole model."""
    model = built(name, patched=patched)
    shape = SHAPES[name][1]
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
            progress(f"{what} of {name}")
            rises = [
                alone("models", "memory_rise", what, name, patched) for patched in (False, True)
            ]
            rows.append([name, *(f"{rise / 2**20:.0f}" for rise in rises)])
        tables[what] = table(("shape", "transformers, MiB", "phasor, MiB"), rows)
    return f"""\
Shapes of the published models with random bfloat16 weights, {LAYERS} layers of
each and no output layer. How far the peak of resident memory rises at {LONG} tokens, in a process
of its own for every number.

One layer's rotation, from query and key on: cosines and sines, temporaries, and the rotated query
and key themselves.

{tables["rotation"]}

The whole model, without a cache:

{tables["model"]}
"""
