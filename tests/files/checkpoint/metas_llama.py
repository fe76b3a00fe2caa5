"""Meta's Llama in NumPy and float64, after llama-models' ``llama3/model.py``; and its files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

Weights = dict[str, np.ndarray]

PARAMS: dict[str, Any] = {
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "vocab_size": 20,
    "ffn_dim_multiplier": 1.3,
    "multiple_of": 8,
    "norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "use_scaled_rope": True,
    "rope_scaling_factor": 8.0,
}
#: The axis on which Meta's code for Llama 3 divides a weight, by the end of its module's name.
DIVIDED = {"wq": 0, "wk": 0, "wv": 0, "w1": 0, "w3": 0, "output": 0, "wo": 1, "w2": 1}
DIVIDED["tok_embeddings"] = 0


def hidden_size(params: dict[str, Any]) -> int:
    """The width of FeedForward."""
    hidden = int(2 * (4 * params["dim"]) / 3)
    hidden = int(params["ffn_dim_multiplier"] * hidden)
    multiple = params["multiple_of"]
    return multiple * ((hidden + multiple - 1) // multiple)


def random_weights(params: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights in float32 by Meta's names, as torch.save would write them."""
    rng = np.random.default_rng(seed)
    dim, hidden, vocab = params["dim"], hidden_size(params), params["vocab_size"]
    keys = dim // params["n_heads"] * params["n_kv_heads"]

    def random(*shape: int) -> torch.Tensor:
        values = rng.standard_normal(shape) * (0.3 if len(shape) > 1 else 1.0)
        return torch.from_numpy(values.astype(np.float32))

    weights = {"tok_embeddings.weight": random(vocab, dim)}
    for layer in range(params["n_layers"]):
        shapes = {"attention.wq": (dim, dim), "attention.wk": (keys, dim)}
        shapes |= {"attention.wv": (keys, dim), "attention.wo": (dim, dim)}
        shapes |= {"feed_forward.w1": (hidden, dim), "feed_forward.w3": (hidden, dim)}
        shapes |= {"feed_forward.w2": (dim, hidden), "attention_norm": (dim,), "ffn_norm": (dim,)}
        for name, shape in shapes.items():
            weights[f"layers.{layer}.{name}.weight"] = random(*shape)
    return weights | {"norm.weight": random(dim), "output.weight": random(vocab, dim)}


def save_meta(
    folder: Path,
    params: dict[str, Any],
    weights: dict[str, torch.Tensor],
    ranks: int = 1,
    **divided: int,
) -> Path:
    """Meta's folder: each rank's part in a file of its own."""
    folder.mkdir()
    (folder / "params.json").write_text(json.dumps(params))
    for rank in range(ranks):
        part = {"rope.freqs": torch.ones(4)}
        for name, weight in weights.items():
            axis = (DIVIDED | divided).get(name.split(".")[-2])
            piece = weight if axis is None else weight.chunk(ranks, axis)[rank]
            part[name] = piece.clone()
        torch.save(part, folder / f"consolidated.{rank:02}.pth")
    return folder


def scaled(step: np.ndarray, factor: float) -> np.ndarray:
    """Meta's apply_scaling, with its constants."""
    wavelength = 2 * np.pi / step
    smooth = (8192 / wavelength - 1) / (4 - 1)
    middle = (1 - smooth) * step / factor + smooth * step
    slow = np.where(wavelength > 8192, step / factor, middle)
    return np.where(wavelength < 8192 / 4, step, slow)


def turns(params: dict[str, Any], positions: Sequence[int]) -> np.ndarray:
    """The angles that a Llama rotates pairs by, ``[positions, pairs]``."""
    width = params["head_dim"] if "head_dim" in params else params["dim"] // params["n_heads"]
    step = params["rope_theta"] ** (-np.arange(0, width, 2) / width)
    if params.get("use_scaled_rope"):
        step = scaled(step, params["rope_scaling_factor"])
    return np.outer(positions, step)


def forward(
    weights: Weights,
    params: dict[str, Any],
    tokens: Sequence[int],
    angles: np.ndarray,
    rounding: Callable[[np.ndarray], np.ndarray] = lambda x: x,
) -> np.ndarray:
    """Meta's Transformer.forward: logits of every token.

    ``rounding`` is done to what transformers computes in float32 in any model: the norms before
    their weights, and the softmax.
    """
    heads, key_heads = params["n_heads"], params["n_kv_heads"]
    width, count = 2 * angles.shape[1], len(tokens)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        size = np.sqrt((x**2).mean(-1, keepdims=True) + params["norm_eps"])
        return rounding(x / size) * weights[f"{name}.weight"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)

    def rotated(x: np.ndarray) -> np.ndarray:
        turned = (x[:, 0::2] + 1j * x[:, 1::2]) * np.exp(1j * angles)
        return np.stack((turned.real, turned.imag), -1).reshape(x.shape)

    x = weights["tok_embeddings.weight"][list(tokens)].astype(float)
    for layer in range(params["n_layers"]):
        name = f"layers.{layer}"
        y = norm(x, f"{name}.attention_norm")
        q, k, v = (linear(y, f"{name}.attention.w{c}") for c in "qkv")
        mixed = []
        for head in range(heads):
            mine = slice(head * width, head * width + width)
            of_group = head // (heads // key_heads) * width
            theirs = slice(of_group, of_group + width)
            scores = rotated(q[:, mine]) @ rotated(k[:, theirs]).T / np.sqrt(width)
            scores[np.triu_indices(count, 1)] = -np.inf
            share = np.exp(scores - scores.max(-1, keepdims=True))
            mixed.append(rounding(share / share.sum(-1, keepdims=True)) @ v[:, theirs])
        x = x + linear(np.concatenate(mixed, -1), f"{name}.attention.wo")
        y = norm(x, f"{name}.ffn_norm")
        gate = linear(y, f"{name}.feed_forward.w1")
        up = linear(y, f"{name}.feed_forward.w3")
        x = x + linear(gate / (1 + np.exp(-gate)) * up, f"{name}.feed_forward.w2")
    return linear(norm(x, "norm"), "output")
