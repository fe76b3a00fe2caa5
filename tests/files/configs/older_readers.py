"""What programs that know no ``rope_parameters`` make of a config.json.

`transformers_4` follows transformers 4.55.4: ``modeling_rope_utils.py`` and, for the two kinds of
layers of Gemma 3, ModernBERT and, in 4.57, OLMo 3, their ``modeling`` files. It looks at the keys
that those look at, and shares no code with phasor. `mlx_lm` runs the classes of mlx-lm.
"""

from __future__ import annotations

import functools
import math
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

#: What a class takes where the file has no such key.
DEFAULTS = {
    "gpt_neox": {"rope_theta": 1e4, "partial_rotary_factor": 0.25},
    "modernbert": {"global_rope_theta": 160_000.0, "local_rope_theta": 1e4},
    "gemma3_text": {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
    "olmo3": {"rope_theta": 5e5},
    "phi": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
#: The base and whether the law is for them, of the kinds of layers that a class tells apart.
KINDS = {
    "gemma3_text": {
        "full_attention": ("rope_theta", True),
        "sliding_attention": ("rope_local_base_freq", False),
    },
    "olmo3": {
        "full_attention": ("rope_theta", True),
        "sliding_attention": ("rope_theta", False),
    },
    "modernbert": {
        "full_attention": ("global_rope_theta", True),
        "sliding_attention": ("local_rope_theta", True),
    },
}
#: Keys that a class has for another.
NAMES = {"gpt_neox": {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}}


def transformers_4(file: dict[str, Any], kind: str = "") -> tuple[np.ndarray, float]:
    """Frequencies and attention factor of the layers of a kind."""
    model_type = file["model_type"]
    names = NAMES.get(model_type, {})
    config = {"rope_theta": 1e4, **DEFAULTS.get(model_type, {})}
    config |= {names.get(key, key): value for key, value in file.items() if value is not None}
    base_key, scaled = KINDS.get(model_type, {}).get(kind, ("rope_theta", True))
    base, law = config[base_key], config.get("rope_scaling") if scaled else None
    if model_type == "phi3" and law is not None:  # its configuration refuses any other
        assert law.keys() == {"type", "short_factor", "long_factor"}
    law = law or {"rope_type": "default"}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    dim = int(head_dim * config.get("partial_rotary_factor", 1.0))
    powers = base ** (np.arange(0, dim, 2) / dim)
    compute = {
        "default": _default, "linear": _linear, "dynamic": _dynamic, "yarn": _yarn,
        "longrope": _longrope, "llama3": _llama3,
    }[law.get("rope_type", law.get("type"))]  # fmt: skip
    return compute(config, law, base, dim, powers)


def _default(config, law, base, dim, powers):
    return 1 / powers, 1.0


def _linear(config, law, base, dim, powers):
    return 1 / powers / law["factor"], 1.0


def _dynamic(config, law, base, dim, powers):
    """At the length of max_position_embeddings, as when the model is made."""
    return 1 / powers, 1.0


def _yarn(config, law, base, dim, powers):
    factor, gain = law["factor"], law.get("attention_factor")
    original = config["max_position_embeddings"]
    if "original_max_position_embeddings" in law:
        original = law["original_max_position_embeddings"]
        factor = config["max_position_embeddings"] / original

    def mscale(strength):
        return 0.1 * strength * math.log(factor) + 1 if factor > 1 else 1.0

    if gain is None:
        one, all_dim = law.get("mscale"), law.get("mscale_all_dim")
        gain = mscale(one) / mscale(all_dim) if one and all_dim else mscale(1)

    def pair_of(turns):
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_of(law.get("beta_fast") or 32), pair_of(law.get("beta_slow") or 1)
    if law.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    return ramp / (factor * powers) + (1 - ramp) / powers, gain


def _longrope(config, law, base, dim, powers):
    """Those of a sequence longer than the original context."""
    factor, gain = law.get("factor"), law.get("attention_factor")
    original = config["max_position_embeddings"]
    if "original_max_position_embeddings" in config:
        original = config["original_max_position_embeddings"]
        factor = config["max_position_embeddings"] / original
    if gain is None:
        gain = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return 1 / (np.array(law["long_factor"]) * powers), gain


def _llama3(config, law, base, dim, powers):
    low, high = law["low_freq_factor"], law["high_freq_factor"]
    turns = law["original_max_position_embeddings"] / (2 * math.pi * powers)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return (kept + (1 - kept) / law["factor"]) / powers, 1.0


def mlx_lm(file: dict[str, Any], layer: int = 0) -> tuple[np.ndarray, float]:
    """Frequencies and attention factor of a layer, from what its rope does to unit vectors."""
    import mlx.core as mx

    module = _mlx_lm_class(file["model_type"])
    known = {key: value for key, value in file.items() if value is not None}
    args = module.ModelArgs.from_dict({**_SIZES, **known})
    # which has another name in OLMo 3's module
    attention = getattr(module, "Olmo3Attention", None) or module.Attention
    made = attention(args, layer) if "layer_idx" in _parameters(attention) else attention(args)
    width = file["hidden_size"] // file["num_attention_heads"]
    # the first of each half pair, at positions near enough to 0 to tell the slow ones apart
    turned = []
    for pair in range(width // 2):
        x = np.zeros((1, 1, 1, width), np.float32)
        x[..., pair] = 1
        turned.append(np.array(made.rope(mx.array(x), offset=1), np.float64)[0, 0, 0])
    cos = np.array([one[pair] for pair, one in enumerate(turned)])
    sin = np.array([one[pair + width // 2] for pair, one in enumerate(turned)])
    return np.arctan2(sin, cos), float(np.hypot(sin, cos).mean())


_SIZES = {"num_hidden_layers": 6, "intermediate_size": 8, "rms_norm_eps": 1e-6, "vocab_size": 8,
          "sliding_window": 8}  # fmt: skip


def _parameters(function: Any) -> set[str]:
    import inspect

    return {*inspect.signature(function).parameters}


@functools.cache
def _mlx_lm_class(model_type: str) -> ModuleType:
    """The module of a model type; the package itself would import transformers."""
    package = find_spec("mlx_lm")
    assert package is not None
    models = ModuleType("mlx_lm_models")
    models.__path__ = [str(Path(str(package.origin)).parent / "models")]
    sys.modules.setdefault("mlx_lm_models", models)
    return import_module(f"mlx_lm_models.{model_type}")
