"""Configs of diffusers, of Mistral's, Meta's and DeepSeek's own code, and of the first MLX.

``transformer/config.json`` of diffusers is read by its ``_class_name``. A ``params.json`` rotates
interleaved pairs in place, but for MLX programs with ``rope_traditional: false``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from phasor.axes import Axial, OneAxis
from phasor.errors import ConfigError
from phasor.files.configs import rope_blocks
from phasor.files.configs.facts import NO_FACTS, Architecture, architectures, read_table, table
from phasor.files.configs.layer_pattern import LayerPattern, rule_kinds
from phasor.files.configs.ropes import layer_ropes, ropes_beside
from phasor.files.configs.source import (
    MOST_LAYERS,
    JsonObject,
    is_huggingface,
    renamed_keys,
    single_value,
)
from phasor.files.configs.unread_keys import meanings
from phasor.layers import ConfigLocation, LayerRopes
from phasor.pairings import Pairing
from phasor.rope import Rope
from phasor.scaling import Law, Llama3, Yarn

# params.json, and DeepSeek's inference config.

_LATENT = Architecture(latent=True)


@lru_cache(maxsize=1)
def _params() -> Mapping[str, Any]:
    return read_table("params.toml")


def _is_params(config: JsonObject) -> bool:
    """Whether a file has the keys of Mistral's and Meta's code, as those of the first MLX do."""
    marks = _params()["params"]
    if not all(map(config.has, marks["sizes"])):
        return False
    single_value((config.name(key), config.values.get(key)) for key in ("dim", "hidden_size"))
    if any(map(config.has, ["hidden_size", *marks["foreign"]])):
        # beside an equal hidden_size, transformers' keys count
        return False
    if config.has("model_type"):
        return config.text("model_type") in marks["mlx"]
    return any(map(config.has, marks["own"]))


def load_params(top: JsonObject) -> LayerRopes | None:
    """The rope of each layer, the same for all but Llama 4's layers without one."""
    if not _is_params(top):
        return None
    config = JsonObject(top.values, names=_params()["names"], strict=top.strict)
    layers, latent = config.layers(), config.has("qk_rope_head_dim")
    head_dim = config.width("qk_rope_head_dim") or config.head_dim()
    base, yarn = _base(config), config.object("yarn")
    law: Law | None = _read_llama3(config, layers) if config.flag("use_scaled_rope") else None
    if yarn is not None:
        if law is not None:
            config.refuse("use_scaled_rope", "false beside yarn, which scales as well")
        law = _read_yarn(yarn, latent=latent)
    pairing = "half" if config.flag("rope_traditional") is False else "interleaved"
    with renamed_keys(config, rotary_dim="head_dim"):
        rope = Rope(head_dim=head_dim, pairing=pairing, base=base, scaling=law)
    interval = config.whole("nope_layer_interval")
    in_order = LayerPattern.every(interval or 0, layers).kinds("nope", "rope")
    kinds = {"rope": rope, "nope": None} if "nope" in in_order else {"rope": rope}
    query_factor = _params()["llama4" if "nope" in kinds else "mistral"]["query_factor"]
    lengths = ("max_position_embeddings", "max_seq_len", "model_max_length")
    return layer_ropes(
        config,
        kinds,
        in_order,
        "Mistral's or Meta's params.json",
        facts=_LATENT if latent else NO_FACTS,
        blocks=() if yarn is None else (yarn,),
        name=config.text("model_type") or "params.json",
        context=single_value((config.name(key), config.whole(key)) for key in lengths),
        query_factors=rope_blocks.query_factors(query_factor, config, kinds),
    )


def load_deepseek(top: JsonObject) -> LayerRopes | None:
    """The rope of each layer: in V4 of a head, else of its ``qk_rope_head_dim`` slice alone."""
    marks = _params()["deepseek"]["marks"]  # keys of DeepSeek's inference code
    if is_huggingface(top) or not any(all(map(top.has, keys)) for keys in marks):
        return None
    config = JsonObject(top.values, names=_params()["names"], strict=top.strict)
    is_v4 = config.has("rope_head_dim")
    defaults = _params()["deepseek_v4" if is_v4 else "deepseek"]

    def number_or_default(key: str, above: float = 0) -> float:
        value, whose = config.number(key, above=above), "the default of DeepSeek's own code"
        return config.or_default(key, value, defaults.get(key), whose)

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
        in_order, facts = ("rope",) * layers, NO_FACTS
        if config.has("index_head_dim"):
            facts = table().huggingface["deepseek_v32"]
        if is_v4:
            facts = table().huggingface["deepseek_v4"]
            in_order = rule_kinds(config, facts.layers, layers)
            head_dim = config.require("head_dim", config.width("head_dim", least=width))
            main = replace(rope, head_dim=head_dim, rotary_dim=width, rotary_start=head_dim - width)
            base = number_or_default("compress_rope_theta", 1)
            ropes = {"main": main, "compress": replace(main, base=base, scaling=law)}
            kinds = {kind: ropes[facts.labels[kind]] for kind in dict.fromkeys(in_order)}
            config.notes.append(str(facts.note))
    return layer_ropes(
        config,
        kinds,
        in_order,
        "DeepSeek's inference config",
        facts=_LATENT,
        name="deepseek",
        context=longest,
        beside=ropes_beside(config, facts, in_order, kinds),
        in_config=ConfigLocation(labels=facts.labels),
    )


def _base(config: JsonObject) -> float:
    """The base of a file; where it does not state it, that of the program that reads it."""
    base, model_type = config.number("rope_theta", above=1), config.text("model_type")
    default, whose = 10_000.0, "a constant in Meta's code for Llama 1 and 2"
    if model_type is not None:
        default, whose = table().huggingface[model_type].base, f"what MLX assumes for {model_type}"
    elif base is None and (config.contains("use_scaled_rope") or not config.has("multiple_of")):
        others = "programs that read params.json fill it in differently (10000 and 1000000)"
        for key in filter(_is_base, config.unread()):
            others += f"; {key} says {config.values[key]}, under a name of another program"
        raise ConfigError(f"{config.name('rope_theta')} is absent, and {others}; add it")
    return config.or_default("rope_theta", base, default, whose)


def _is_base(key: str) -> bool:
    return key in meanings() and meanings()[key].means == "base"


def _read_llama3(config: JsonObject, layers: int) -> Llama3:
    """Llama 3's law with the numbers of the file, of Llama 4's code, or of the release."""
    factor = config.number("rope_scaling_factor", above=0)
    is_llama4 = config.has("moe_args") or config.has("nope_layer_interval")
    marks = _params()["llama4" if is_llama4 else "llama3"]
    high = config.number("rope_high_freq_factor", above=0) or marks["high_freq_factor"]
    if is_llama4:
        whose = "the default of Llama 4's code"
        factor = config.or_default("rope_scaling_factor", factor, marks["factor"], whose)
    if factor is None:
        release = marks["releases"].get(f"{config.whole('dim')} x {layers}")
        if release is None:
            raise ConfigError(f"{config.name('use_scaled_rope')} {marks['unknown']}")
        factor = float(release["factor"])
        config.notes.append(marks["release"].format(**release))
        config.notes += [marks["not_8"]] * (factor != 8)
    with renamed_keys(config, high_freq_factor="rope_high_freq_factor"):
        return Llama3(factor=factor, original_max_positions=8192, high_freq_factor=high)


def _read_yarn(block: JsonObject, *, latent: bool) -> Yarn:
    """Mistral's yarn block: ``beta`` is YaRN's fast end, ``alpha`` its slow one."""
    apply_scale = block.require("apply_scale", block.flag("apply_scale"))
    if apply_scale and latent:
        block.refuse("apply_scale", "false, as Mistral's own latent-attention models have it")
    names, key = ("beta", "alpha", "factor"), "original_max_position_embeddings"
    fast, slow, factor = (block.require(k, block.number(k, above=0)) for k in names)
    with renamed_keys(block, beta_fast="beta", beta_slow="alpha"):
        return Yarn(
            factor=factor,
            original_max_positions=block.require(key, block.whole(key)),
            beta_fast=fast,
            beta_slow=slow,
            attention_factor=None if apply_scale else 1.0,
        )


# diffusers.


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """Facts of a class of diffusers; ``diffusers.toml`` explains each where it lists them."""

    pairing: Pairing = "half"
    base: float | None = None
    head_dim: int | None = None
    fraction: float | None = None
    uses: str | None = None
    refused: str | None = None
    note: str | None = None
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    axes_key: str | None = None
    dims: tuple[int, ...] = ()
    summed: bool = False
    split: str | None = None
    layer_keys: tuple[str, ...] = ("num_layers",)
    order: tuple[str, ...] = ()
    only_if: str | None = None


def load_diffusers(top: JsonObject) -> LayerRopes | None:
    """The rope of each layer of a transformer of diffusers, the same for all."""
    if (name := top.text("_class_name")) is None:
        return None
    if (facts := _classes().get(name)) is None:
        known = "a transformer that phasor knows (of a pipeline give its transformer/config.json, "
        top.refuse("_class_name", f"{known}else describe the embedding with phasor.Rope(...))")
    if facts.refused is not None:
        raise ConfigError(f"{top.name('_class_name')} {name} cannot be read: {facts.refused}")
    names = {"num_attention_heads": ()} if facts.uses else facts.names
    config = JsonObject(top.values, names=names, strict=top.strict)
    config.notes += [facts.note] if facts.note else []
    layers = sum(config.whole(key, least=0, most=MOST_LAYERS) or 0 for key in facts.layer_keys)
    rope, blocks = None, ()
    if facts.uses is not None:
        config.notes.append(f"{name} has no rotary embedding; in its place: {facts.uses}.")
        blocks = filter(None, map(config.object, ("rope_scaling", "rope_parameters")))
    else:
        config.require(facts.layer_keys[0], layers or None)
        rope = _transformer_rope(config, facts)
        config.notes += [f"Axes are ({', '.join(facts.order)})."] * bool(facts.order)
    if facts.only_if is not None and config.flag(facts.only_if) is not True:
        rope = None
        config.notes.append(f"{config.name(facts.only_if)} is off: positions are sinusoidal.")
    kind = "nope" if rope is None else "rope"
    return layer_ropes(
        config,
        {kind: rope},
        (kind,) * (layers or 1),
        f"a diffusers {name}",
        facts=Architecture(uses=facts.uses),
        blocks=blocks,
        name=name,
    )


def _transformer_rope(config: JsonObject, facts: Transformer) -> Rope:
    sizes = () if facts.axes_key is None else config.wholes(facts.axes_key) or facts.dims
    head_dim = sum(sizes)
    if not facts.summed:
        # a class that has a key for the width of all heads has none for that of one
        default = None if "hidden_size" in facts.names else facts.head_dim
        head_dim = config.width("head_dim") or default or config.head_dim()
    if facts.split is not None:
        sizes = _SPLITS[facts.split](head_dim)
    elif facts.axes_key and (any(size % 2 for size in sizes) or sum(sizes) > head_dim):
        config.refuse(facts.axes_key, f"even numbers of coordinates, at most {head_dim} together")
    base, block = config.number("rope_theta", above=1), config.object("rope_scaling")
    outside = rope_blocks.LawContext(NO_FACTS, head_dim, config)
    with renamed_keys(config, sections=facts.axes_key or "head_dim"):
        return Rope(
            head_dim=head_dim,
            pairing=facts.pairing,
            base=facts.base if base is None else base,
            rotary_dim=sum(sizes) if sizes else int(head_dim * (facts.fraction or 1)),
            scaling=None if block is None else rope_blocks.read_law(block, outside),
            axes=Axial(tuple(size // 2 for size in sizes)) if sizes else OneAxis(),
        )


_SPLITS: Mapping[str, Callable[[int], tuple[int, ...]]] = {
    "wan": lambda n: (n - 4 * (n // 6), 2 * (n // 6), 2 * (n // 6)),
    "cogvideox": lambda n: (n // 4, n // 8 * 3, n // 8 * 3),
    "halves": lambda n: (n // 2, n // 2),
}


@lru_cache(maxsize=1)
def _classes() -> Mapping[str, Transformer]:
    """``diffusers.toml``, read once."""
    plain = read_table("diffusers.toml")
    entries: dict[str, dict[str, Any]] = plain["rotating"]
    entries |= {name: {"uses": uses} for name, uses in plain["without_rotation"].items()}
    entries |= {name: {"refused": why} for name, why in plain["refused"].items()}
    return architectures(entries, plain["names"], Transformer)
