"""The models that are measured: published shapes, random weights, the first layers of each."""

from __future__ import annotations

import contextlib
import io
import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from torch import nn

from phasor.torch.hf import patch

THREADS, LAYERS = 2, 2
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


def circumstances() -> str:
    """When, where and with what."""
    return (
        f"Measured {datetime.now(UTC):%Y-%m-%d %H:%M} UTC on {torch.get_num_threads()} threads of "
        f"{platform.machine()}, torch {torch.__version__}, transformers {transformers.__version__},"
        f" phasor {version('phasor')}. Shapes of the published models with random bfloat16 "
        f"weights, {LAYERS} layers of each and no output layer"
    )
