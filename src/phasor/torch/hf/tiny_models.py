"""A tiny random model of any architecture: few layers, small widths, heads as wide as ever."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sized
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike

import torch
from phasor._checks import shown
from phasor.errors import ConfigError
from phasor.torch.hf.architectures import architecture, attempting
from torch import Tensor

# a model that holds more was not made small
_MOST_NUMBERS = 60_000_000
# more than any model has, of whatever
_MOST_PARTS = 100_000
_COUNTS = re.compile(r"(num|n)_(?!positions|ctx)\w+")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads")
HIDDEN = ("hidden_size", "n_embd", "d_model")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
# what says how one layer is unlike the next; the other lists of a layer each are only cut
_TELLS_LAYERS_APART = ("layer_types", "layers_block_type", "no_rope_layers", "layer_rope_theta")
_SMALL: Mapping[str, int] = {
    r"vocab_size\w*": 128,
    r"\w*intermediate_size\w*|\w*ffn_hidden_size|n_inner|ffn_dim": 64,
    r"n_routed_experts|num_(local_)?experts|moe_num_experts": 4,
    r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k_experts": 2,
    r"n_group|topk_group|n_shared_experts|num_shared_experts": 1,
    r"\w*lora_rank": 32,
    r"hidden_size_per_layer_input": 16,
    r"sliding_window": 64,
    r"num_kv_shared_layers": 0,
}
_TOKENS: Mapping[str, int] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

_HEADS_OF_128 = {"head_dim": 128}
_MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [8, 12, 12],
          "partial_rotary_factor": 0.5}  # fmt: skip
#: What published models of a type say, and the defaults of its class leave open or make unusable.
STATED: Mapping[str, Mapping[str, Any]] = {
    "chameleon": {"vocabulary_map": {"<image>": 8711, "IMGIMGAZ": 4}},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
    },
    "deepseek_ocr2_text": {
        "num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 6,
    },
    "deepseek_v2": {"num_experts_per_tok": 6},
    "diffusion_gemma_text": {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "position_embedding_type": "rotary"},
    "glm4_moe": _HEADS_OF_128,
    "glm4v_moe_text": {**_HEADS_OF_128, "rope_parameters": _MROPE},
    "glm4v_text": {"rope_parameters": _MROPE},
    "glm_image_text": {"rope_parameters": _MROPE},
    "granitemoehybrid": {
        "num_hidden_layers": 2, "layer_types": ["mamba", "attention"],
        "position_embedding_type": "rope",
    },
    "hunyuan_v1_dense": _HEADS_OF_128,
    "hunyuan_v1_moe": _HEADS_OF_128,
    "hunyuan_vl_text": {
        **_HEADS_OF_128,
        "rope_parameters": {
            "rope_type": "dynamic", "rope_theta": 10_000.0, "alpha": 1000.0, "factor": 1.0,
            "mrope_section": [16, 16, 16, 16],
        },
    },
    "minimax_m3_vl_text": {
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 5_000_000.0, "partial_rotary_factor": 0.5,
        },
    },
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "ministral": _HEADS_OF_128,
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256,
        "indexer_budget": 64, "indexer_compress_ratio": 4,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
        },
    },
    "qwen3_omni_moe_text": _HEADS_OF_128,
    "step3p5": {"sliding_window": 512},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "zamba2": {"use_mem_rope": True},
}  # fmt: skip
#: Sizes that hang together with those that are cut.
CUT: Mapping[str, Mapping[str, Any]] = {
    "bailing_hybrid": {"num_expert_group": 1},
    "bamba": {"mamba_n_heads": 16, "mamba_d_head": 64, "num_hidden_layers": 2,
              "attn_layer_indices": [1]},
    "deepseek_v4": {"hidden_size": 256, "o_groups": 2},
    "dots3_note_text": {"hidden_size": 256},
    "granitemoehybrid": {"mamba_n_heads": 16, "mamba_d_head": 64},
    "hrm_text": {"num_hidden_layers": 2, "num_layers_per_stack": None},
    "longcat_flash": {"zero_expert_num": 4},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "zamba2": {"mamba_headdim": 80, "hybrid_layer_ids": [1], "attention_hidden_size": 640,
               "attention_head_dim": 160},
}  # fmt: skip
#: Models that refuse the positions that their signatures take, or number tokens whatever is given.
OWN_POSITIONS = frozenset({"csm_depth_decoder_model", "dia_encoder", "roformer"})
#: Models that are also given the embedding of a time.
TIMED = frozenset({"voxtral_realtime_text"})
#: Models that are asked about equal coordinates only, and why.
EQUAL_COORDINATES: Mapping[str, str] = {
    "hunyuan_vl_text": "For unequal coordinates transformers 5.23 turns the two members of a pair "
    "by different axes, which is no rotation; only equal coordinates, those of text, are compared.",
    "neomme": "Images give rows to even pairs and columns to odd ones, which no key of the config "
    "says and the Rope leaves out; only equal coordinates, those of text, are compared.",
}


def tiny_config(model_type: str, config: Mapping[str, Any] | None = None) -> Any:
    """The config of a small model that rotates as one of ``model_type`` does.

    It keeps the first layer of every kind, two at least, the width of a head, and all that is said
    about the rotation; hidden width, vocabulary and experts are small.

    Args:
        model_type: A model type, or the name of a model class.
        config: What a ``config.json`` of that type says; the class's defaults if None.

    Returns:
        An instance of the architecture's config class, with eager attention.

    Raises:
        BackendError: If transformers is not installed.
        ConfigError: If the class refuses the config.
    """
    one = architecture(model_type)
    kind = one.model_class.config_class
    given = STATED.get(one.model_type, {}) if config is None else config
    for key, value in given.items():
        if isinstance(value, int) and value > _MOST_PARTS and _COUNTS.fullmatch(key):
            raise ConfigError(f"{key} must be at most {_MOST_PARTS}, got {shown(value)}")
    with attempting(f"no config of {one.class_name} can be built"):
        whole = kind.from_dict(dict(given)).to_dict()
        cut = CUT.get(one.model_type, {})
        small = kind.from_dict({**whole, **small_values(whole), **cut})
        small._attn_implementation = "eager"
    return small


def tiny_model(model_type: str, config: Mapping[str, Any] | None = None, *, seed: int = 0) -> Any:
    """A small random model of an architecture: float32, on the CPU, made without a download.

    Attention is eager, so that everything is called from Python; the rest is as in `tiny_config`.

    Args:
        model_type: A model type, or the name of a model class.
        config: What a ``config.json`` of that type says; the class's defaults if None.
        seed: Of the weights; the global generator is left as it was.

    Returns:
        The model, in evaluation mode.

    Raises:
        BackendError: If transformers is not installed.
        ConfigError: If no tiny model can be built.
    """
    small = tiny_config(model_type, config)
    one = architecture(model_type)
    with attempting(f"no tiny {one.class_name} can be built"):
        with torch.device("meta"):
            planned = one.model_class(small)
        size = sum(x.numel() for x in (*planned.parameters(), *planned.buffers()))
        if size > _MOST_NUMBERS:
            raise ConfigError(f"{one.class_name} holds {size:,} numbers even when made small")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return one.model_class(small).eval()


def tiny_inputs(model: Any, positions: ArrayLike, *, seed: int = 0) -> dict[str, Tensor]:
    """Keyword arguments for a forward pass of a tiny model: one row of random tokens.

    Args:
        model: Of `tiny_model`.
        positions: Where the tokens stand, ``[seq]``, or ``[seq, axes]`` for a
            multimodal rope. A model that counts its own positions is given none; these must then be
            0, 1, 2, ...
        seed: Of the tokens.

    Raises:
        ConfigError: If the model counts its own positions and others are asked for.
    """
    at = np.asarray(positions)
    count = len(at)
    words = min(100, model.config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(seed)
    inputs = {"input_ids": torch.randint(3, words, (1, count), generator=generator)}
    if model.config.model_type in TIMED:
        inputs["t_cond"] = torch.zeros(1, 1, model.config.hidden_size)
    if counts_itself(model):
        if not np.array_equal(at, np.arange(count)):
            raise ConfigError(
                f"{type(model).__name__} counts its own positions, so positions must be 0, 1, 2, "
                f"..., got {shown(at.tolist())}"
            )
    else:
        # [seq] -> [1, seq], and [seq, axes] -> [axes, 1, seq]
        ids = torch.from_numpy(at.astype(np.int64)).T[..., None, :]
        inputs["position_ids"] = ids
    return inputs


def position_axes(model: Any) -> int:
    """How many coordinates a model's positions have: 1, or those of its multimodal rope."""
    for module in model.modules():
        sections = getattr(module, "mrope_section", None)
        if isinstance(sections, dict):
            sections = next(iter(cast("dict[str, Any]", sections).values()), None)
        if sections is not None:
            return len(sections)
    return 1


def counts_itself(model: Any) -> bool:
    """Whether a model takes no positions and numbers its tokens from 0."""
    parameters = inspect.signature(model.forward).parameters
    takes = "position_ids" in parameters or any(
        one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()
    )
    return not takes or model.config.model_type in OWN_POSITIONS


# ---- a config cut down ----


def kept_layers(config: Mapping[str, Any]) -> list[int]:
    """The layers to keep: the first of every kind, and two at least."""
    count = next((config[key] for key in LAYERS if config.get(key)), 2)
    apart = [config[key] for key in _TELLS_LAYERS_APART if _is_per_layer(config.get(key), count)]
    first: dict[tuple[Any, ...], int] = {}
    for i in range(count):
        first.setdefault(tuple(one[i] for one in apart), i)
    kept = sorted(first.values())
    return kept if len(kept) > 1 else list(range(min(count, 2)))


def _is_per_layer(value: Any, count: int) -> bool:
    return isinstance(value, (list, tuple)) and len(cast(Sized, value)) == count


def small_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """What to change in a config, so that its model is small and its rotation as before."""
    kept = kept_layers(config)
    count = next((config[key] for key in LAYERS if config.get(key)), 2)
    heads = next((config[key] for key in HEADS if config.get(key)), 4)
    hidden = next((config[key] for key in HIDDEN if config.get(key)), 64 * heads)
    width = config.get("head_dim") or hidden // heads
    changed: dict[str, Any] = {}
    for key, value in config.items():
        if key in LAYERS:
            changed[key] = len(kept)
        elif key in HEADS:
            changed[key] = 4
        elif key in HIDDEN:
            changed[key] = 4 * width
        elif key in KEY_HEADS and value:
            changed[key] = 4 if value == heads else min(value, 2)
        elif key in _TOKENS:
            changed[key] = _TOKENS[key]
        elif key == "per_layer_config" and value:
            changed[key] = _renumbered(value, kept)
        elif isinstance(value, Mapping) and any(inner in value for inner in HIDDEN):
            # a model that this one holds beside
            held = cast("Mapping[str, Any]", value)
            changed[key] = {**held, **small_values(held)}
        else:
            small = _smaller(key, value)
            if _is_per_layer(small, count):
                small = [small[i] for i in kept]
            if small != value:
                changed[key] = small
    return changed


def _smaller(key: str, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_smaller(key, one) for one in cast(Iterable[Any], value)]
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    most = next((most for name, most in _SMALL.items() if re.fullmatch(name, key)), value)
    return min(value, most)


def _renumbered(apart: Mapping[Any, Any], kept: list[int]) -> dict[str, Any]:
    """What single layers say, by their new numbers."""
    said = {int(layer): what for layer, what in apart.items()}
    return {f"{new:02d}": said[old] for new, old in enumerate(kept) if old in said}
