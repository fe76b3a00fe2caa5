"""Configs of DeepSeek's inference repositories, which rotate interleaved pairs in place."""

from __future__ import annotations

import re

from phasor._checks import shown
from phasor.configs._layers import MOST_LAYERS
from phasor.configs._model import renamed, required
from phasor.configs._reading import Block
from phasor.configs._table import table
from phasor.configs._width import WIDEST
from phasor.errors import ConfigError
from phasor.layers import LayerRopes
from phasor.scaling import Yarn
from phasor.spec import Rope

_ABOUT_ROPE = re.compile("rope|rotary|yarn|mscale|beta_|original_seq")


def load_deepseek(config: Block) -> LayerRopes:
    """The rope of each layer, the same for all; of the ``qk_rope_head_dim`` slice of a head."""
    notes: list[str] = []

    def filled(key: str, above: float) -> float:
        given = config.number(key, above=above)
        if given is not None:
            return given
        default = table().deepseek[key]
        notes.append(f"The file has no {key}; {default:g} is the default of DeepSeek's own code.")
        return default

    layers = required(config, "n_layers", config.whole("n_layers", most=MOST_LAYERS))
    key = "qk_rope_head_dim"
    head_dim = required(config, key, config.whole(key, least=2, most=WIDEST))
    longest = config.whole("max_seq_len") or int(filled("max_seq_len", 0))
    original = config.whole("original_seq_len") or int(filled("original_seq_len", 0))
    mscale = filled("mscale", 0)
    names = {"rotary_dim": key, "beta_fast": "beta_fast", "beta_slow": "beta_slow"}
    with renamed(config, names):
        law = Yarn(
            factor=filled("rope_factor", 0),
            original_max_positions=original,
            beta_fast=filled("beta_fast", 0),
            beta_slow=filled("beta_slow", 0),
            # cos and sin stay as they are; the softmax scale takes m(mscale) squared
            mscale=mscale,
            mscale_all_dim=mscale,
        )
        rope = Rope(
            head_dim=head_dim,
            pairing="interleaved",
            base=filled("rope_theta", 1),
            # their code leaves frequencies and softmax alone up to the original length
            scaling=law if longest > original else None,
        )
    for stray in config.not_asked():
        if _ABOUT_ROPE.search(stray):
            raise ConfigError(
                f"{config.name(stray)} is not a key that phasor understands in a DeepSeek "
                f"inference config, got {shown(config.values[stray])}; remove it if nothing "
                "depends on it"
            )
    return LayerRopes(
        name="deepseek",
        layer_kinds=("rope",) * layers,
        kinds={"rope": rope},
        context=longest,
        query_heads=config.whole("n_heads"),
        key_heads=1,  # latent attention rotates one key for all heads
        notes=tuple(notes),
    )
