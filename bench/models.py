"""What a user feels: whole models, patched against unpatched.

Prefill, decode and a training step of a small Llama with random weights, eager and compiled, and
how much of that is rotation; and how far the peak of resident memory rises at 32k tokens in models
of three published shapes (Linux).
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from unittest import mock

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from device import THREADS, alone, peak_rise
from report import Section
from timing import Spread, Times, interleave

from phasor.torch.live import patch

PROMPT, STEPS = 512, 8
LAYERS, LONG = 2, 32_768
QUICK = ("decode, bfloat16, *", "rotation of Llama*")
#: Fewest and most rounds of a run.
ROUNDS = 5, 25
# labels in the profile of an eager call, and how many calls are profiled
ROTATION, STEP, PROFILED = "the rotation", "the whole call", 4
#: What the attention of every model here calls.
APPLY = "apply_rotary_pos_emb"
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
#: 104 million parameters with its tied output layer.
LLAMA: dict[str, Any] = {
    "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 2048, "vocab_size": 32_000,
    "tie_word_embeddings": True, "max_position_embeddings": 131_072, "rope_parameters": LLAMA3,
}  # fmt: skip
_KEYS = (
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"),
    "max_position_embeddings",
)
_QWEN3 = {"rope_type": "default", "rope_theta": 1_000_000.0}
_GEMMA3 = {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"]}
#: Class, sizes and what else there is of each; the vocabulary is small.
SHAPES: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "Llama-3.2-1B": ("Llama", (2048, 32, 8, 64, 8192, 131_072), {"rope_parameters": LLAMA3}),
    "Qwen3-0.6B": ("Qwen3", (1024, 16, 8, 128, 3072, 40_960), {"rope_parameters": _QWEN3}),
    "Gemma-3-1B": ("Gemma3Text", (1152, 4, 1, 256, 6912, 32_768), _GEMMA3),
}
_VERDICT = """\
<!-- --8<-- [start:verdict] -->
A Llama of 104 million parameters was run patched and unpatched on {threads} threads of a CPU, in
prefill, decode and training, eager and compiled, in bfloat16 and float32. Patched it was faster in
{faster} of {runs} runs and slower in {slower}; in the other {rest} the difference is within the
quartiles of the rounds. Rotation takes {before} of an eager call of transformers, and {after} of a
patched one.
<!-- --8<-- [end:verdict] -->"""
_NOTE = f"""\
`LlamaForCausalLM` with random weights, {LLAMA["num_hidden_layers"]} layers of width
{LLAMA["hidden_size"]}: prefill of {PROMPT} tokens, decode of one token after them with a cache (the
mean of {STEPS}; a `StaticCache` where compiled), and forward, loss, backward and AdamW on 1 ×
{PROMPT} tokens. Both are called in turn, in {ROUNDS[0]} to {ROUNDS[1]} rounds; the ratio is the
median over rounds with its quartiles. Compiled is `torch.compile(model, dynamic=False)`. What part
of an eager call is rotation, with the embedding and the backward pass, is that of a profile by
`torch.profiler` of the fastest of {PROFILED} calls; a profile adds more to many small operations
than to one."""


_MEMORY = f"""\
How far the peak of resident memory rises at {LONG} tokens, in a process of its own for every
number: shapes of published models with random bfloat16 weights, {LAYERS} layers of each and no
output layer, without a cache. One layer's rotation is counted from query and key on: cosines and
sines, temporaries, and the rotated query and key themselves."""


def prepared(model: Any, dtype: torch.dtype, patched: bool) -> Any:
    """``model`` as from_pretrained leaves it: weights in ``dtype``, frequencies in float32."""
    for parameter in model.eval().parameters():
        parameter.data = parameter.data.to(dtype)
    if patched:
        with contextlib.redirect_stdout(io.StringIO()):
            patch(model)
    return model


def rotation_scope(model: Any) -> dict[str, Any]:
    """The globals among which the layers of ``model`` find the function that rotates."""
    methods = [inspect.unwrap(type(module).forward) for module in model.modules()]
    found = [m.__globals__ for m in methods if APPLY in m.__code__.co_names]
    assert all(scope is found[0] for scope in found), "every layer is of one class"
    return found[0]


def llama(which: str, dtype: str) -> Any:
    """The Llama of the times: ``"plain"`` or ``"ours"``."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(pad_token_id=0, **LLAMA))
    return prepared(model, getattr(torch, dtype), which == "ours")


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


def rotation_share(which: str, run: str, dtype: str) -> float:
    """The part of an eager call that rotation takes, forward and backward, by torch's profiler."""

    def marked(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.profiler.record_function(ROTATION)(function)

    model = llama(which, dtype)
    model.model.rotary_emb.forward = marked(model.model.rotary_emb.forward)
    call, scope = run_of(model, run, compiled=False), rotation_scope(model)
    spent: list[tuple[float, float]] = []
    for _ in range(PROFILED + 1):
        with (
            mock.patch.dict(scope, {APPLY: marked(scope[APPLY])}),
            torch.profiler.profile() as profile,
            torch.profiler.record_function(STEP),
        ):
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


def time_run(run: str, dtype: str, compiled: bool, seconds: float) -> dict[str, Any]:
    """Unpatched and patched in turn; uncompiled also what part of each is rotation."""
    both = "plain", "ours"
    calls = {which: run_of(llama(which, dtype), run, compiled=compiled) for which in both}
    times = interleave(calls, seconds=2 * seconds, rounds=ROUNDS)
    shares = [] if compiled else [rotation_share(which, run, dtype) for which in both]
    return {"seconds": times, "shares": shares}


@torch.no_grad()
def memory_rise(what: str, name: str, patched: bool) -> int:
    """Bytes by which a prompt of 32k tokens raises the peak, in one rotation or a whole model."""
    kind, sizes, more = SHAPES[name]
    shape = dict(zip(_KEYS, sizes, strict=True))
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=1024, num_hidden_layers=LAYERS, pad_token_id=0, **shape, **more
    )
    torch.manual_seed(0)
    model = prepared(getattr(transformers, f"{kind}Model")(config), torch.bfloat16, patched)
    rotate = rotation_scope(model)[APPLY]
    of_layer = ["full_attention"] if name.startswith("Gemma") else []

    def rise(length: int) -> int:
        positions = torch.arange(length)[None]
        if what == "model":
            return peak_rise(lambda: model(positions % 1000, use_cache=False))
        q, k = (
            torch.ones(1, length, heads, shape["head_dim"], dtype=torch.bfloat16).transpose(1, 2)
            for heads in sizes[1:3]
        )
        return peak_rise(lambda: rotate(q, k, *model.rotary_emb(q, positions, *of_layer)))

    rise(64)  # for what is loaded once
    return rise(LONG)


def rises(what: str, name: str) -> list[int]:
    """Of both, each in a process of its own."""
    return [alone(memory_rise, what, name, patched) for patched in (False, True)]


def steps(device: Any, seconds: float) -> dict[str, Callable[[], Any]]:
    """Every run, eager and compiled; the memory of one rotation and of the model of each shape."""
    runs = {
        f"{run}, {dtype}, {'compiled' if compiled else 'eager'}": partial(
            time_run, run, dtype, compiled, seconds
        )
        for run in ("prefill", "decode", "training")
        for dtype in ("bfloat16", "float32")
        for compiled in (False, True)
    }
    pairs = [(what, name) for what in ("rotation", "model") for name in SHAPES]
    return runs | {f"{what} of {name}": partial(rises, what, name) for what, name in pairs}


def sections(found: Mapping[str, Any], device: str) -> Iterator[Section]:
    """What came out in plain words; times, ratios, and the parts that rotation takes; memory."""
    rows: dict[str, dict[str, str]] = {}
    memory: dict[str, dict[str, str]] = {}
    ratios: list[Spread] = []
    shares: list[list[float]] = []
    for name, plain in found.items():
        if isinstance(plain, list):  # bytes of a shape, unpatched and patched
            theirs, ours = (f"{rise / 2**20:.0f}" for rise in plain)
            memory[name] = {"transformers, MiB": theirs, "phasor, MiB": ours}
            continue
        times, calls = Times(plain["seconds"]), STEPS if name.startswith("decode") else 1
        theirs, ours = (f"{1e3 / calls * times.median(which):.4g}" for which in ("plain", "ours"))
        ratios.append(times.ratio("ours", "plain"))
        rows[name] = {
            "transformers, ms": theirs, "phasor, ms": ours,
            "phasor / transformers": str(ratios[-1]),
        }  # fmt: skip
        if plain["shares"]:
            shares.append(plain["shares"])
            before, after = (f"{share:.1%}" for share in plain["shares"])
            rows[name] |= {"rotation before": before, "after": after}
    parts = [f"{min(some):.1%} to {max(some):.1%}" for some in zip(*shares, strict=True)]
    before, after = parts or ("an unknown part", "an unknown part")
    faster, slower = sum(r.high < 1 for r in ratios), sum(r.low > 1 for r in ratios)
    verdict = _VERDICT.format(
        threads=THREADS, faster=faster, slower=slower, runs=len(rows), before=before, after=after,
        rest=len(rows) - faster - slower,
    )  # fmt: skip
    yield Section("", verdict, rows, _NOTE, corner="run")
    yield Section("Memory", "", memory, _MEMORY)
