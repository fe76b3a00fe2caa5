"""What a user feels: whole models, patched against unpatched.

Prefill, decode and a training step of a small Llama with random weights, eager and compiled.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from device import THREADS
from report import Section
from timing import Spread, Times, interleave

from phasor.torch.live import patch

PROMPT, STEPS = 512, 8
QUICK = ("decode, bfloat16, *",)
#: Fewest and most rounds of a run.
ROUNDS = 5, 25
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
quartiles of the rounds.
<!-- --8<-- [end:verdict] -->"""
_NOTE = f"""\
`LlamaForCausalLM` with random weights, {LLAMA["num_hidden_layers"]} layers of width
{LLAMA["hidden_size"]}: prefill of {PROMPT} tokens, decode of one token after them with a cache (the
mean of {STEPS}; a `StaticCache` where compiled), and forward, loss, backward and AdamW on 1 ×
{PROMPT} tokens. Both are called in turn, in {ROUNDS[0]} to {ROUNDS[1]} rounds; the ratio is the
median over rounds with its quartiles. Compiled is `torch.compile(model, dynamic=False)`."""


def prepared(model: Any, dtype: torch.dtype, patched: bool) -> Any:
    """``model`` as from_pretrained leaves it: weights in ``dtype``, frequencies in float32."""
    for parameter in model.eval().parameters():
        parameter.data = parameter.data.to(dtype)
    if patched:
        with contextlib.redirect_stdout(io.StringIO()):
            patch(model)
    return model


def llama(kind: str, dtype: str) -> Any:
    """The Llama of the times: ``"plain"`` or ``"ours"``."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(pad_token_id=0, **LLAMA))
    return prepared(model, getattr(torch, dtype), kind == "ours")


def make_run(model: Any, run: str, *, compiled: bool) -> Callable[[], object]:
    """A call of ``model``: a prompt, a few tokens one at a time after it, or a training step."""
    ids = torch.arange(PROMPT)[None] * 61 % 32_000
    function = torch.compile(model, dynamic=False) if compiled else model
    if run == "prefill":
        return torch.no_grad()(lambda: function(ids, use_cache=False, logits_to_keep=1))
    if run == "training":
        optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4, fused=True)

        def train() -> None:
            function(ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return train
    cache = transformers.DynamicCache()
    if compiled:
        cache = transformers.StaticCache(config=model.config, max_cache_len=PROMPT + STEPS)
    with torch.no_grad():
        model(ids, None, None, cache, use_cache=True)
    token = torch.tensor([[5]])

    @torch.no_grad()
    def decode() -> None:
        for _ in range(STEPS):
            function(token, None, None, cache, use_cache=True)
        # back to the end of the prompt
        if compiled:
            for layer in cache.layers:
                layer.cumulative_length.fill_(PROMPT)
        else:
            cache.crop(-STEPS)

    return decode


def time_run(run: str, dtype: str, compiled: bool, seconds: float) -> dict[str, Any]:
    """Unpatched and patched in turn."""
    kinds = "plain", "ours"
    calls = {kind: make_run(llama(kind, dtype), run, compiled=compiled) for kind in kinds}
    return {"seconds": interleave(calls, seconds=2 * seconds, rounds=ROUNDS)}


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


def sections(results: Mapping[str, Any], device: str) -> Iterator[Section]:
    """What came out in plain words; times and ratios."""
    rows: dict[str, dict[str, str]] = {}
    ratios: list[Spread] = []
    for name, plain in results.items():
        times, calls = Times(plain["seconds"]), STEPS if name.startswith("decode") else 1
        theirs_ms, ours_ms = (
            f"{1e3 / calls * times.median(kind):.4g}" for kind in ("plain", "ours")
        )
        ratios.append(times.ratio("ours", "plain"))
        rows[name] = {
            "transformers, ms": theirs_ms, "phasor, ms": ours_ms,
            "phasor / transformers": str(ratios[-1]),
        }  # fmt: skip
    faster, slower = sum(r.high < 1 for r in ratios), sum(r.low > 1 for r in ratios)
    verdict = _VERDICT.format(
        threads=THREADS, faster=faster, slower=slower, runs=len(rows),
        rest=len(rows) - faster - slower,
    )  # fmt: skip
    yield Section("", verdict, rows, _NOTE, corner="run")
