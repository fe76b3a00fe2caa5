"""The config of a Llama as Meta's ``params.json`` and as transformers' ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phasor._checks import short_repr
from phasor.errors import CheckpointError, ConfigError
from phasor.files.configs import load
from phasor.files.configs.source import JsonObject, read_source, require
from phasor.files.configs.writing import rope_parameters
from phasor.rope import Rope
from phasor.scaling import Llama3

_KNOWN_PARAMS = {
    "dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "vocab_size",
    "multiple_of", "ffn_dim_multiplier", "norm_eps", "rope_theta", "use_scaled_rope",
    "rope_scaling_factor", "rope_high_freq_factor", "max_seq_len", "max_batch_size",
}  # fmt: skip
_SCALED_CONTEXT = 131_072  # of every release with use_scaled_rope: Llama 3.1, 3.2 and 3.3


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama:
    """The facts about a Llama that both programs' configs have."""

    rope: Rope
    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    norm_eps: float
    context: int | None
    tied_embeddings: bool = False
    notes: tuple[str, ...] = ()


def read_params(path: Path) -> Llama:
    """Read Meta's ``params.json``."""
    config = _read_config_file(path)
    if unknown := sorted(k for k, v in config.values.items() if k not in _KNOWN_PARAMS and v):
        raise ConfigError(
            f"{path} must be of a plain Llama 2 or 3, and {', '.join(unknown)} says otherwise; "
            "experts, images, adapters and quantised weights are not converted"
        )
    ropes = load(path)
    rope = replace(ropes.ropes[0], pairing="half")
    num_heads = require(config, "n_heads", ropes.num_heads)
    scaled = isinstance(rope.scaling, Llama3)
    return Llama(
        rope=rope,
        num_layers=len(ropes),
        embed_dim=require(config, "dim", config.whole("dim")),
        num_heads=num_heads,
        num_kv_heads=ropes.num_kv_heads or num_heads,
        norm_eps=config.number("norm_eps", above=0) or 1e-5,  # the default of Meta's code
        context=ropes.context or (_SCALED_CONTEXT if scaled else None),
        notes=ropes.notes,
    )


def config_json(model: Llama, sizes: Mapping[str, int]) -> tuple[dict[str, Any], list[str]]:
    """The ``config.json`` of transformers 5."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": sizes["vocab"],
        "hidden_size": model.embed_dim,
        "intermediate_size": sizes["hidden"],
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.rope.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        # the class's own, 1 and 2, would be wrong for Llama 3
        "bos_token_id": None,
        "eos_token_id": None,
        "rope_parameters": rope_parameters(model.rope, model.context or 1),
    }
    notes = ["config.json is for transformers 5; add the tokenizer's bos and eos ids."]
    if model.context is None:
        notes.append("params.json does not say the context: add max_position_embeddings.")
    else:
        config["max_position_embeddings"] = model.context
    return config, notes


def read_config(path: Path) -> Llama:
    """Read the ``config.json`` of a Llama; refuse what ``params.json`` cannot say."""
    config = _read_config_file(path)
    if config.text("model_type") != "llama":
        config.refuse("model_type", "llama, the one that Meta's code computes")
    if config.text("hidden_act") not in (None, "silu"):
        config.refuse("hidden_act", "silu, the one that Meta's code computes")
    ropes = load(path)
    rope = ropes.ropes[0]
    num_heads = require(config, "num_attention_heads", ropes.num_heads)
    embed_dim = require(config, "hidden_size", config.whole("hidden_size"))
    if rope.head_dim * num_heads != embed_dim:
        raise ConfigError(
            "hidden_size must be num_attention_heads times head_dim, as in Meta's code, got "
            f"{embed_dim} and {num_heads} times {rope.head_dim}"
        )
    law = rope.scaling
    if rope.rotary_dim != rope.head_dim or not (
        law is None
        or (
            isinstance(law, Llama3)
            and (law.low_freq_factor, law.original_max_positions) == (1, 8192)
        )
    ):
        raise ConfigError(
            "params.json can only say whole heads without scaling, or with Llama 3's from 8192 "
            f"positions and a low_freq_factor of 1, got {short_repr(law)} on {rope.rotary_dim} of "
            f"{rope.head_dim} coordinates"
        )
    return Llama(
        rope=rope,
        num_layers=len(ropes),
        embed_dim=embed_dim,
        num_heads=num_heads,
        num_kv_heads=ropes.num_kv_heads or num_heads,
        norm_eps=config.number("rms_norm_eps", above=0) or 1e-6,  # the default of transformers
        context=ropes.context,
        tied_embeddings=config.flag("tie_word_embeddings") or False,
        notes=ropes.notes,
    )


def params_json(model: Llama, sizes: Mapping[str, int]) -> tuple[dict[str, Any], list[str]]:
    """Meta's ``params.json``."""
    # Meta's code: hidden = int(ffn_dim_multiplier * int(8 dim / 3)), rounded up to multiple_of.
    # Half a unit more than the quotient, so that no rounding reaches the next integer.
    multiplier = (sizes["hidden"] + 0.5) / int(2 * (4 * model.embed_dim) / 3)
    law = model.rope.scaling
    params: dict[str, Any] = {
        "dim": model.embed_dim,
        "n_layers": model.num_layers,
        "n_heads": model.num_heads,
        "n_kv_heads": model.num_kv_heads,
        "vocab_size": sizes["vocab"],
        "ffn_dim_multiplier": multiplier,
        "multiple_of": 1,
        "norm_eps": model.norm_eps,
        "rope_theta": model.rope.base,
        "use_scaled_rope": law is not None,
    }
    notes: list[str] = []
    if model.tied_embeddings:
        notes.append("output.weight is a copy of tok_embeddings.weight: the source ties them.")
    if isinstance(law, Llama3):
        params["rope_scaling_factor"] = law.factor
        params["rope_high_freq_factor"] = law.high_freq_factor
        if (law.factor, law.high_freq_factor) != (8, 4):
            notes.append(
                "Meta's code for Llama 3 (llama-models 0.3) scales by 8 with a high_freq_factor of "
                f"4 whatever params.json says; this model needs {law.factor:g} and "
                f"{law.high_freq_factor:g} there."
            )
    return params, notes


def _read_config_file(path: Path) -> JsonObject:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; without it the sizes of the model are unknown")
    return read_source(path)
