"""DeepSeek: the ``config.json`` of its own inference code, for V2 to V4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from phasor.files.configs.facts import NO_FACTS, Architecture, read_table, table
from phasor.files.configs.layer_pattern import rule_kinds
from phasor.files.configs.ropes import layer_ropes, read_auxiliary_ropes
from phasor.files.configs.source import JsonObject, is_huggingface, renamed_keys
from phasor.layers import ConfigLocation, LayerRopes
from phasor.rope import Rope
from phasor.scaling import Yarn


@lru_cache(maxsize=1)
def _facts() -> Mapping[str, Any]:
    return read_table("deepseek.toml", "phasor.files.dialects")


def read(top: JsonObject) -> LayerRopes | None:
    """The rope of each layer: of the head in V4, else only of its ``qk_rope_head_dim`` slice."""
    marks = _facts()["marks"]  # keys of DeepSeek's inference code
    if is_huggingface(top) or not any(all(map(top.has, keys)) for keys in marks):
        return None
    config = JsonObject(top.values, names=_facts()["names"], strict=top.strict)
    is_v4 = config.has("rope_head_dim")
    defaults = _facts()["v4" if is_v4 else "v3"]

    def number_or_default(key: str, above: float = 0) -> float:
        value, source = config.number(key, above=above), "the default of DeepSeek's own code"
        return config.or_default(key, value, defaults.get(key), source)

    layers = config.layers()
    key = "rope_head_dim" if is_v4 else "qk_rope_head_dim"
    width = config.require(key, config.width(key))
    lengths = ("max_seq_len", "original_seq_len")
    longest, original = (config.whole(k) or int(number_or_default(k)) for k in lengths)
    # cos and sin stay as they are; V3's softmax scale takes m(mscale) squared
    keys = ("attention_factor",) if is_v4 else ("mscale", "mscale_all_dim")
    temperature = dict.fromkeys(keys, 1.0 if is_v4 else number_or_default("mscale"))
    with renamed_keys(config, rotary_dim=key):
        law = Yarn(
            factor=number_or_default("rope_factor"),
            original_max_positions=original,
            beta_fast=number_or_default("beta_fast"),
            beta_slow=number_or_default("beta_slow"),
            **temperature,
        )
        rope = Rope(head_dim=width, pairing="interleaved", base=number_or_default("rope_theta", 1))
        # their code leaves frequencies and softmax alone up to the original length
        kinds = {"rope": replace(rope, scaling=law if longest > original else None)}
        layer_kinds, facts = ("rope",) * layers, NO_FACTS
        if config.has("index_head_dim"):
            facts = table().huggingface["deepseek_v32"]
        if is_v4:
            facts = table().huggingface["deepseek_v4"]
            layer_kinds = rule_kinds(config, facts.layers, layers)
            head_dim = config.require("head_dim", config.width("head_dim", least=width))
            main = replace(rope, head_dim=head_dim, rotary_dim=width, rotary_start=head_dim - width)
            base = number_or_default("compress_rope_theta", 1)
            ropes = {"main": main, "compress": replace(main, base=base, scaling=law)}
            kinds = {kind: ropes[facts.labels[kind]] for kind in dict.fromkeys(layer_kinds)}
            config.notes.append(str(facts.note))
    return layer_ropes(
        config,
        kinds,
        layer_kinds,
        "DeepSeek's inference config",
        facts=Architecture(latent=True),
        name="deepseek",
        context=longest,
        auxiliary_ropes=read_auxiliary_ropes(config, facts, layer_kinds, kinds),
        in_config=ConfigLocation(labels=facts.labels),
    )
