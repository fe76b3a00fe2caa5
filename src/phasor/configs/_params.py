"""``params.json`` of Mistral and of Meta: both store their weights in interleaved pairs."""

from __future__ import annotations

import re

from phasor._checks import shown
from phasor.configs._layers import MOST_LAYERS
from phasor.configs._model import renamed, required
from phasor.configs._reading import Block
from phasor.configs._width import WIDEST
from phasor.errors import ConfigError
from phasor.layers import LayerRopes
from phasor.scaling import Yarn
from phasor.spec import Rope

_ABOUT_ROPE = re.compile("rope|rotary|yarn")


def load_params(config: Block) -> LayerRopes:
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
    with renamed(config, {"rotary_dim": "head_dim", "head_dim": "head_dim"}):
        rope = Rope(
            head_dim=head_dim,
            pairing="interleaved",
            base=base,
            scaling=None if yarn is None else _yarn(yarn, latent=config.has("qk_rope_head_dim")),
        )
    for key in config.not_asked():
        if _ABOUT_ROPE.search(key):
            raise ConfigError(
                f"{config.name(key)} is not a key that phasor understands in a params.json, "
                f"got {shown(config.values[key])}; remove it if nothing depends on it"
            )
    context = config.first(("max_position_embeddings", "max_seq_len", "model_max_length"), _whole)
    return LayerRopes(
        name="params.json",
        layer_kinds=("rope",) * layers,
        kinds={"rope": rope},
        context=context,
        query_heads=heads,
        # latent attention rotates one key for all heads
        key_heads=1 if config.has("qk_rope_head_dim") else config.whole("n_kv_heads"),
    )


def _whole(config: Block, key: str) -> int | None:
    return config.whole(key)


def _head_dim(config: Block, heads: int) -> int:
    rotated = config.whole("qk_rope_head_dim", least=2, most=WIDEST)
    if rotated is not None:
        return rotated
    given = config.whole("head_dim", least=2, most=WIDEST)
    if given is not None:
        return given
    width = required(config, "dim", config.whole("dim"))
    if width % heads or not 2 <= width // heads <= WIDEST:
        raise ConfigError(
            f"{config.name('head_dim')} is absent, and dim / n_heads ({width} / {heads}) must be "
            f"a whole number from 2 to {WIDEST}; add it"
        )
    return width // heads


def _yarn(block: Block, *, latent: bool) -> Yarn:
    """Mistral's yarn block: ``beta`` is YaRN's fast end, ``alpha`` its slow one."""
    applied = required(block, "apply_scale", block.flag("apply_scale"))
    if applied and latent:
        block.refuse("apply_scale", "false, as Mistral's own latent-attention models have it")
    original = block.whole("original_max_position_embeddings")
    fast = required(block, "beta", block.number("beta", above=0))
    slow = required(block, "alpha", block.number("alpha", above=0))
    factor = required(block, "factor", block.number("factor", above=0))
    for key in block.not_asked():
        raise ConfigError(
            f"{block.name(key)} is not a key that phasor understands in a yarn block, "
            f"got {shown(block.values[key])}; remove it if nothing depends on it"
        )
    with renamed(block, {"beta_fast": "beta", "beta_slow": "alpha"}):
        return Yarn(
            factor=factor,
            original_max_positions=required(block, "original_max_position_embeddings", original),
            beta_fast=fast,
            beta_slow=slow,
            attention_factor=None if applied else 1.0,
        )
