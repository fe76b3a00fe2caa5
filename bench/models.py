"""What a user feels: whole models, patched against unpatched.

Prefill, decode and a training step of a small Llama with random weights, eager and compiled, and
how much of that is rotation.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FunctionType
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from device import THREADS
from report import Section
from timing import Spread, Times, interleave

from phasor.torch.hf import patch

PROMPT, STEPS = 512, 8
QUICK = ("decode, bfloat16, *",)
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
than to one. Of a compiled call it is the median of what is gone in a model that leaves rotation
out, called in the same rounds, and – where a quartile is below nothing."""
_TITLES = (
    *("run", "transformers, ms", "phasor, ms", "phasor / transformers", "rotation before", "after"),
)


def prepared(model: Any, dtype: torch.dtype, patched: bool) -> Any:
    """``model`` as from_pretrained leaves it: weights in ``dtype``, frequencies in float32."""
    for parameter in model.eval().parameters():
        parameter.data = parameter.data.to(dtype)
    if patched:
        with contextlib.redirect_stdout(io.StringIO()):
            patch(model)
    return model


def rotating_methods(model: Any) -> list[tuple[Any, FunctionType]]:
    """The layers that rotate, each with its method; what it calls is among the method's globals."""
    found = [(module, inspect.unwrap(type(module).forward)) for module in model.modules()]
    return [(module, method) for module, method in found if APPLY in method.__code__.co_names]


def replace_rotation(model: Any, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let every layer rotate by what ``make`` makes of its rotation function."""
    for module, method in rotating_methods(model):
        scope = {**method.__globals__, APPLY: make(method.__globals__[APPLY])}
        scope.pop("__name__", None)  # by which a compiler would look globals up in the module
        cls, defaults = type(module), method.__defaults__
        replaced = FunctionType(method.__code__, scope, APPLY, defaults, method.__closure__)
        module.__class__ = type(cls.__name__, (cls,), {"forward": replaced})


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


def rotation_share(which: str, run: str, dtype: str) -> float:
    """The part of an eager call that rotation takes, forward and backward, by torch's profiler."""

    def marked(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.profiler.record_function(ROTATION)(function)

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


def time_run(run: str, dtype: str, compiled: bool, seconds: float) -> dict[str, Any]:
    """Unpatched and patched in turn; compiled also without rotation, for nothing else tells."""
    both = "plain", "ours"
    models = (*both, "without") if compiled else both
    calls = {which: run_of(llama(which, dtype), run, compiled=compiled) for which in models}
    times = interleave(calls, seconds=2 * seconds, rounds=ROUNDS)
    if not compiled:
        return {"seconds": times, "shares": [rotation_share(one, run, dtype) for one in both]}
    # what is left without rotation; the part is unknown where quartiles say it may be none
    left = [times.ratio("without", which) for which in both]
    return {"seconds": times, "shares": [1 - r.median if r.high < 1 else None for r in left]}


def steps(device: Any, seconds: float) -> dict[str, Callable[[], Any]]:
    """Every run, eager and compiled."""
    return {
        f"{run}, {dtype}, {'compiled' if compiled else 'eager'}": partial(
            time_run, run, dtype, compiled, seconds
        )
        for run in ("prefill", "decode", "training")
        for dtype in ("bfloat16", "float32")
        for compiled in (False, True)
    }


def sections(found: Mapping[str, Any], device: str) -> Iterator[Section]:
    """What came out in plain words; times, their ratio, and the parts that rotation takes."""
    rows: list[list[str]] = []
    ratios: list[Spread] = []
    for name, plain in found.items():
        times, calls = Times(plain["seconds"]), STEPS if name.startswith("decode") else 1
        ratios.append(times.ratio("ours", "plain"))
        taken = [f"{1e3 / calls * times.median(which):.4g}" for which in ("plain", "ours")]
        shares = ("–" if share is None else f"{share:.1%}" for share in plain["shares"])
        rows.append([name, *taken, str(ratios[-1]), *shares])
    eager = [plain["shares"] for name, plain in found.items() if name.endswith("eager")]
    parts = [f"{min(some):.1%} to {max(some):.1%}" for some in zip(*eager, strict=True)]
    before, after = parts or ("an unknown part", "an unknown part")
    faster, slower = sum(r.high < 1 for r in ratios), sum(r.low > 1 for r in ratios)
    verdict = _VERDICT.format(
        threads=THREADS, faster=faster, slower=slower, runs=len(rows), before=before, after=after,
        rest=len(rows) - faster - slower,
    )  # fmt: skip
    yield Section("", verdict, _TITLES, rows, _NOTE)
