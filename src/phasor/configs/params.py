"""Configs for the code of Mistral, Meta (``params.json``) and DeepSeek (its inference code).

All three store weights in interleaved pairs and rotate them in place.
"""

from __future__ import annotations

from collections.abc import Mapping

from phasor.configs.block import Block, head_width, renamed_keys, required, single_value
from phasor.configs.layer_kinds import MOST_LAYERS
from phasor.configs.unread_keys import check_unread_keys
from phasor.errors import ConfigError
from phasor.layers import LayerRopes
from phasor.rope import WIDEST, Rope
from phasor.scaling import Yarn

# defaults of DeepSeek-V3's inference/model.py
_DEEPSEEK: Mapping[str, float] = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "max_seq_len": 16384,
    "mscale": 1.0,
    "original_seq_len": 4096,
    "rope_factor": 40.0,
    "rope_theta": 10000.0,
}


def load_params(config: Block, *, strict: bool) -> LayerRopes:
    """The rope of each layer, the same for all."""
    if config.flag("use_scaled_rope"):
        raise ConfigError(
            f"{config.name('use_scaled_rope')} is true, but the numbers of the scaling stand in "
            "Meta's code and differ from model to model; load the model's config.json instead"
        )
    heads = required(config, "n_heads", config.whole("n_heads"))
    layers = required(config, "n_layers", config.whole("n_layers", most=MOST_LAYERS))
    head_dim = _head_dim(config, heads)
    base = config.number("rope_theta", above=1)
    if base is None:
        raise ConfigError(
            f"{config.name('rope_theta')} is absent, and programs that read params.json fill it in "
            "differently (10000 and 1000000); add it"
        )
    yarn = config.block("yarn")
    with renamed_keys(config, {"rotary_dim": "head_dim", "head_dim": "head_dim"}):
        rope = Rope(
            head_dim=head_dim,
            pairing="interleaved",
            base=base,
            scaling=None if yarn is None else _yarn(yarn, latent=config.has("qk_rope_head_dim")),
        )
    blocks = () if yarn is None else (yarn,)
    notes = check_unread_keys(config, blocks, (rope,), "of a params.json", strict=strict)
    lengths = ("max_position_embeddings", "max_seq_len", "model_max_length")
    context = single_value((config.name(key), config.whole(key)) for key in lengths)
    return LayerRopes(
        name="params.json",
        layer_kinds=("rope",) * layers,
        kinds={"rope": rope},
        context=context,
        query_heads=heads,
        # latent attention rotates one key for all heads
        key_heads=1 if config.has("qk_rope_head_dim") else config.whole("n_kv_heads"),
        notes=tuple(notes),
    )


def load_deepseek(config: Block, *, strict: bool) -> LayerRopes:
    """The rope of each layer, the same for all; of the ``qk_rope_head_dim`` slice of a head."""
    notes: list[str] = []

    def number_or_default(key: str, above: float) -> float:
        value = config.number(key, above=above)
        if value is not None:
            return value
        default = _DEEPSEEK[key]
        notes.append(f"The file has no {key}; {default:g} is the default of DeepSeek's own code.")
        return default

    layers = required(config, "n_layers", config.whole("n_layers", most=MOST_LAYERS))
    key = "qk_rope_head_dim"
    head_dim = required(config, key, config.whole(key, least=2, most=WIDEST))
    longest = config.whole("max_seq_len") or int(number_or_default("max_seq_len", 0))
    original = config.whole("original_seq_len") or int(number_or_default("original_seq_len", 0))
    mscale = number_or_default("mscale", 0)
    names = {"rotary_dim": key, "beta_fast": "beta_fast", "beta_slow": "beta_slow"}
    with renamed_keys(config, names):
        law = Yarn(
            factor=number_or_default("rope_factor", 0),
            original_max_positions=original,
            beta_fast=number_or_default("beta_fast", 0),
            beta_slow=number_or_default("beta_slow", 0),
            # cos and sin stay as they are; the softmax scale takes m(mscale) squared
            mscale=mscale,
            mscale_all_dim=mscale,
        )
        rope = Rope(
            head_dim=head_dim,
            pairing="interleaved",
            base=number_or_default("rope_theta", 1),
            # their code leaves frequencies and softmax alone up to the original length
            scaling=law if longest > original else None,
        )
    notes += check_unread_keys(config, (), (rope,), "of DeepSeek's inference", strict=strict)
    return LayerRopes(
        name="deepseek",
        layer_kinds=("rope",) * layers,
        kinds={"rope": rope},
        context=longest,
        query_heads=config.whole("n_heads"),
        key_heads=1,  # latent attention rotates one key for all heads
        notes=tuple(notes),
    )


def _head_dim(config: Block, heads: int) -> int:
    for key in ("qk_rope_head_dim", "head_dim"):
        head_dim = config.whole(key, least=2, most=WIDEST)
        if head_dim is not None:
            return head_dim
    width = required(config, "dim", config.whole("dim"))
    return head_width(config, "head_dim", "dim / n_heads", width, heads)


def _yarn(block: Block, *, latent: bool) -> Yarn:
    """Mistral's yarn block: ``beta`` is YaRN's fast end, ``alpha`` its slow one."""
    applied = required(block, "apply_scale", block.flag("apply_scale"))
    if applied and latent:
        block.refuse("apply_scale", "false, as Mistral's own latent-attention models have it")
    original = block.whole("original_max_position_embeddings")
    fast = required(block, "beta", block.number("beta", above=0))
    slow = required(block, "alpha", block.number("alpha", above=0))
    factor = required(block, "factor", block.number("factor", above=0))
    with renamed_keys(block, {"beta_fast": "beta", "beta_slow": "alpha"}):
        return Yarn(
            factor=factor,
            original_max_positions=required(block, "original_max_position_embeddings", original),
            beta_fast=fast,
            beta_slow=slow,
            attention_factor=None if applied else 1.0,
        )
