"""How far the peak of resident memory rises at 32k tokens in models of three published shapes.

In the rotation of one layer and in the whole model around it, patched and unpatched (Linux).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from device import alone, peak_rise
from models import APPLY, LLAMA3, prepared, rotating_methods, transformers
from report import Section

LAYERS, LONG = 2, 32_768
QUICK = ("rotation of Llama*",)
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
_NOTE = f"""\
Shapes of the published models with random bfloat16 weights, {LAYERS} layers of
each and no output layer. How far the peak of resident memory rises at {LONG} tokens, in a process
of its own for every number.

One layer's rotation, from query and key on: cosines and sines, temporaries, and the rotated query
and key themselves."""
_NOTES = {"rotation": _NOTE, "model": "The whole model, without a cache:"}


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
    rotate = rotating_methods(model)[0][1].__globals__[APPLY]
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
    """One rotation and the model of each shape."""
    pairs = [(what, name) for what in _NOTES for name in SHAPES]
    return {f"{what} of {name}": partial(rises, what, name) for what, name in pairs}


def sections(found: Mapping[str, Any], device: str) -> Iterator[Section]:
    """A table for rotations and one for models."""
    for what, note in _NOTES.items():
        rows = [
            [name, *(f"{rise / 2**20:.0f}" for rise in found[f"{what} of {name}"])]
            for name in SHAPES
            if f"{what} of {name}" in found
        ]
        yield Section("", note, ("shape", "transformers, MiB", "phasor, MiB"), rows)
