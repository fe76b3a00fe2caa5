"""Configs of diffusers, of Mistral's, Meta's and DeepSeek's own code, and of the first MLX.

``transformer/config.json`` of diffusers is read by its ``_class_name``. A ``params.json`` rotates
interleaved pairs in place, but for MLX programs with ``rope_traditional: false``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from phasor._checks import short_repr
from phasor.axes import Axial, OneAxis
from phasor.errors import ConfigError
from phasor.files.configs import rope_blocks
from phasor.files.configs.beside import ropes_beside
from phasor.files.configs.facts import (
    Architecture,
    inherit,
    read_table,
    table,
    tuples_for_lists,
)
from phasor.files.configs.model_class import MOST_LAYERS, layers_by_pattern
from phasor.files.configs.source import JsonObject, renamed_keys, single_value
from phasor.files.configs.unread_keys import check_unread_keys
from phasor.layers import ConfigLocation, LayerRopes
from phasor.pairings import Pairing
from phasor.rope import WIDEST, Rope
from phasor.scaling import Llama3, Yarn

# params.json, and DeepSeek's inference config.


def is_params(config: JsonObject) -> bool:
    """Whether a file has the keys of Mistral's and Meta's code, as those of the first MLX do."""
    marks = read_table("params.toml")["params"]
    if not all(map(config.has, marks["sizes"])):
        return False
    single_value((config.name(key), config.values.get(key)) for key in ("dim", "hidden_size"))
    if any(map(config.has, ["hidden_size", *marks["foreign"]])):
        # beside an equal hidden_size, transformers' keys count
        return False
    if config.has("model_type"):
        return config.text("model_type") in marks["mlx"]
    return any(map(config.has, marks["own"]))


def is_deepseek(config: JsonObject) -> bool:
    """Whether a file has the keys of DeepSeek's inference code."""
    marks = read_table("params.toml")["deepseek"]["marks"]
    return not config.has("model_type") and any(all(map(config.has, keys)) for keys in marks)


def load_params(config: JsonObject, *, strict: bool) -> LayerRopes:
    """The rope of each layer, the same for all but Llama 4's layers without one."""
    heads = config.require("n_heads", config.whole("n_heads"))
    layers = config.require("n_layers", config.whole("n_layers", most=MOST_LAYERS))
    head_dim = _head_dim(config, heads)
    notes: list[str] = []
    base = _base(config, notes)
    yarn = config.object("yarn")
    scaling = _read_llama3(config, layers, notes) if config.flag("use_scaled_rope") else None
    if yarn is not None:
        if scaling is not None:
            config.refuse("use_scaled_rope", "false beside yarn, which scales as well")
        scaling = _read_yarn(yarn, latent=config.has("qk_rope_head_dim"))
    pairing = "half" if config.flag("rope_traditional") is False else "interleaved"
    with renamed_keys(config, {"rotary_dim": "head_dim", "head_dim": "head_dim"}):
        rope = Rope(head_dim=head_dim, pairing=pairing, base=base, scaling=scaling)
    interval = config.whole("nope_layer_interval")
    kinds = ["nope" if interval and i % interval == 0 else "rope" for i in range(1, layers + 1)]
    by_kind = {"rope": rope, "nope": None} if "nope" in kinds else {"rope": rope}
    facts = read_table("params.toml")["llama4" if "nope" in kinds else "mistral"]["query_factor"]
    what = "Mistral's or Meta's params.json"
    blocks = () if yarn is None else (yarn,)
    notes += check_unread_keys(config, blocks, (rope,), what, strict=strict)
    lengths = ("max_position_embeddings", "max_seq_len", "model_max_length")
    context = single_value((config.name(key), config.whole(key)) for key in lengths)
    return LayerRopes(
        name=config.text("model_type") or "params.json",
        layer_kinds=tuple(kinds),
        kinds=by_kind,
        context=context,
        num_heads=heads,
        # latent attention rotates one key for all heads
        num_kv_heads=1 if config.has("qk_rope_head_dim") else config.whole("n_kv_heads"),
        query_factors=rope_blocks.query_factors(facts, config, by_kind),
        notes=tuple(notes),
    )


def load_deepseek(config: JsonObject, *, strict: bool) -> LayerRopes:
    """The rope of each layer: in V4 of a head, else of its ``qk_rope_head_dim`` slice alone."""
    notes: list[str] = []
    is_v4 = config.has("rope_head_dim")
    defaults = read_table("params.toml")["deepseek_v4" if is_v4 else "deepseek"]

    def number_or_default(key: str, above: float = 0) -> float:
        value, whose = config.number(key, above=above), "the default of DeepSeek's own code"
        return config.or_default(key, value, defaults.get(key), whose, notes)

    layers = config.require("n_layers", config.whole("n_layers", most=MOST_LAYERS))
    key = "rope_head_dim" if is_v4 else "qk_rope_head_dim"
    width = config.require(key, config.whole(key, least=2, most=WIDEST))
    longest = config.whole("max_seq_len") or int(number_or_default("max_seq_len"))
    original = config.whole("original_seq_len") or int(number_or_default("original_seq_len"))
    # cos and sin stay as they are; V3's softmax scale takes m(mscale) squared
    keys = ("attention_factor",) if is_v4 else ("mscale", "mscale_all_dim")
    temperature = dict.fromkeys(keys, 1.0 if is_v4 else number_or_default("mscale"))
    names = {name: name for name in ("head_dim", "beta_fast", "beta_slow")}
    with renamed_keys(config, names | {"rotary_dim": key}):
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
        kinds_in_order, facts = ("rope",) * layers, Architecture()
        if config.has("index_head_dim"):
            facts = table().huggingface["deepseek_v32"]
        if is_v4:
            facts = table().huggingface["deepseek_v4"]
            kinds_in_order = layers_by_pattern(config, facts, layers)
            head_dim = config.whole("head_dim", least=width, most=WIDEST)
            head_dim = config.require("head_dim", head_dim)
            main = replace(rope, head_dim=head_dim, rotary_dim=width, rotary_start=head_dim - width)
            base = number_or_default("compress_rope_theta", 1)
            ropes = {"main": main, "compress": replace(main, base=base, scaling=law)}
            kinds = {kind: ropes[facts.labels[kind]] for kind in dict.fromkeys(kinds_in_order)}
            notes.append(str(facts.note))
    beside = ropes_beside(config, facts, kinds_in_order, kinds)
    what = "DeepSeek's inference config"
    notes += check_unread_keys(config, (), kinds.values(), what, strict=strict)
    return LayerRopes(
        name="deepseek",
        layer_kinds=kinds_in_order,
        kinds=kinds,
        context=longest,
        num_heads=config.whole("n_heads"),
        num_kv_heads=1,  # latent attention rotates one key for all heads
        beside=beside,
        notes=tuple(notes),
        in_config=ConfigLocation(labels=facts.labels),
    )


def _base(config: JsonObject, notes: list[str]) -> float:
    """The base of a file; where it does not state it, that of the program that reads it."""
    base, model_type = config.number("rope_theta", above=1), config.text("model_type")
    if base is not None:
        return base
    if model_type is not None:
        default, whose = table().huggingface[model_type].base, f"what MLX assumes for {model_type}"
    elif config.has("multiple_of") and not config.contains("use_scaled_rope"):
        default, whose = 10_000.0, "a constant in Meta's code for Llama 1 and 2"
    else:
        others = "programs that read params.json fill it in differently (10000 and 1000000)"
        raise ConfigError(f"{config.name('rope_theta')} is absent, and {others}; add it")
    return config.or_default("rope_theta", base, default, whose, notes)


def _head_dim(config: JsonObject, heads: int) -> int:
    keys = ("qk_rope_head_dim", "head_dim")
    stated = (config.whole(key, least=2, most=WIDEST) for key in keys)
    if (head_dim := next(filter(None, stated), None)) is not None:
        return head_dim
    width = config.require("dim", config.whole("dim"))
    return config.head_width("head_dim", "dim / n_heads", width, heads)


def _read_llama3(config: JsonObject, layers: int, notes: list[str]) -> Llama3:
    """Llama 3's law with the numbers of the file, of Llama 4's code, or of the release."""
    factor = config.number("rope_scaling_factor", above=0)
    is_llama4 = config.has("moe_args") or config.has("nope_layer_interval")
    marks = read_table("params.toml")["llama4" if is_llama4 else "llama3"]
    high = config.number("rope_high_freq_factor", above=0) or marks["high_freq_factor"]
    if is_llama4:
        whose = "the default of Llama 4's code"
        factor = config.or_default("rope_scaling_factor", factor, marks["factor"], whose, notes)
    if factor is None:
        release = marks["releases"].get(f"{config.whole('dim')} x {layers}")
        if release is None:
            raise ConfigError(f"{config.name('use_scaled_rope')} {marks['unknown']}")
        factor = float(release["factor"])
        notes.append(marks["release"].format(**release))
        notes += [marks["not_8"]] * (factor != 8)
    names = {"factor": "rope_scaling_factor", "high_freq_factor": "rope_high_freq_factor"}
    with renamed_keys(config, names):
        return Llama3(factor=factor, original_max_positions=8192, high_freq_factor=high)


def _read_yarn(block: JsonObject, *, latent: bool) -> Yarn:
    """Mistral's yarn block: ``beta`` is YaRN's fast end, ``alpha`` its slow one."""
    apply_scale = block.require("apply_scale", block.flag("apply_scale"))
    if apply_scale and latent:
        block.refuse("apply_scale", "false, as Mistral's own latent-attention models have it")
    original = block.whole("original_max_position_embeddings")
    names = ("beta", "alpha", "factor")
    fast, slow, factor = (block.require(k, block.number(k, above=0)) for k in names)
    with renamed_keys(block, {"beta_fast": "beta", "beta_slow": "alpha"}):
        return Yarn(
            factor=factor,
            original_max_positions=block.require("original_max_position_embeddings", original),
            beta_fast=fast,
            beta_slow=slow,
            attention_factor=None if apply_scale else 1.0,
        )


# diffusers.


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """Facts of a class of diffusers; ``diffusers.toml`` explains each where it lists them."""

    pairing: Pairing = "half"
    base: float = 10_000.0
    base_key: str | None = None
    axes_key: str | None = None
    dims: tuple[int, ...] = ()
    split: str | None = None
    head_dim: int | None = None
    head_dim_key: str = "attention_head_dim"
    head_dim_from: tuple[str, ...] = ()
    heads: str = "num_attention_heads"
    scaling_key: str | None = None
    fraction: float | None = None
    layers: tuple[str, ...] = ("num_layers",)
    order: tuple[str, ...] = ()
    only_if: str | None = None
    uses: str | None = None
    refused: str | None = None
    note: str | None = None


def load_diffusers(config: JsonObject, *, strict: bool) -> LayerRopes:
    """The rope of each layer of a transformer of diffusers, the same for all."""
    name = config.text("_class_name") or ""
    facts = _classes().get(name)
    if facts is None:
        config.refuse(
            "_class_name",
            "a transformer that phasor knows (of a pipeline give its transformer/config.json, else "
            "describe the embedding with phasor.Rope(...))",
        )
    if facts.refused is not None:
        raise ConfigError(f"{config.name('_class_name')} {name} cannot be read: {facts.refused}")
    notes = [facts.note] if facts.note else []
    layers = sum(config.whole(key, least=0, most=MOST_LAYERS) or 0 for key in facts.layers)
    rope, blocks = None, ()
    if facts.uses is not None:
        notes.append(f"{name} has no rotary embedding; in its place: {facts.uses}.")
        blocks = filter(None, map(config.object, ("rope_scaling", "rope_parameters")))
    else:
        config.require(facts.layers[0], layers or None)
        rope = _transformer_rope(config, facts)
        notes += [f"Axes are ({', '.join(facts.order)})."] * bool(facts.order)
    if facts.only_if is not None and config.flag(facts.only_if) is not True:
        rope = None
        notes.append(f"{config.name(facts.only_if)} is off: positions are sinusoidal.")
    what, classless = f"a diffusers {name}", Architecture(uses=facts.uses)
    notes += check_unread_keys(config, blocks, (rope,), what, strict=strict, facts=classless)
    kind = "nope" if rope is None else "rope"
    return LayerRopes(
        name=name,
        layer_kinds=(kind,) * (layers or 1),
        kinds={kind: rope},
        num_heads=None if facts.uses is not None else config.whole(facts.heads),
        notes=tuple(notes),
    )


def _transformer_rope(config: JsonObject, facts: Transformer) -> Rope:
    head_dim = _transformer_width(config, facts)
    sizes = _axis_sizes(config, facts, head_dim)
    base = None if facts.base_key is None else config.number(facts.base_key, above=1)
    block = None if facts.scaling_key is None else config.object(facts.scaling_key)
    outside = rope_blocks.LawContext(facts=Architecture(), rotary_dim=head_dim, config=config)
    with renamed_keys(config, {"sections": facts.axes_key or facts.head_dim_key}):
        return Rope(
            head_dim=head_dim,
            pairing=facts.pairing,
            base=facts.base if base is None else base,
            rotary_dim=sum(sizes) if sizes else int(head_dim * (facts.fraction or 1)),
            scaling=None if block is None else rope_blocks.scaling(block, outside),
            axes=Axial(tuple(size // 2 for size in sizes)) if sizes else OneAxis(),
        )


def _transformer_width(config: JsonObject, facts: Transformer) -> int:
    if len(facts.head_dim_from) == 2:
        width, heads = (config.whole(key, least=1) for key in facts.head_dim_from)
        if width is not None and heads is not None and 2 <= width // heads <= WIDEST:
            return width // heads
        both, got = (
            " and ".join(facts.head_dim_from),
            f"{short_repr(width)} and {short_repr(heads)}",
        )
        raise ConfigError(f"{config.path_of(both)} must give the width of a head, got {got}")
    if facts.head_dim_from:
        return sum(config.wholes(facts.head_dim_from[0]) or facts.dims)
    width = config.whole(facts.head_dim_key, least=2, most=WIDEST) or facts.head_dim
    return config.require(facts.head_dim_key, width)


def _axis_sizes(config: JsonObject, facts: Transformer, head_dim: int) -> tuple[int, ...]:
    """Rotated coordinates of each axis."""
    if facts.split is not None:
        return _SPLITS[facts.split](head_dim)
    if facts.axes_key is None:
        return ()
    dims = config.wholes(facts.axes_key) or facts.dims
    if any(size % 2 for size in dims) or sum(dims) > head_dim:
        config.refuse(facts.axes_key, f"even numbers of coordinates, at most {head_dim} together")
    return dims


_SPLITS: Mapping[str, Callable[[int], tuple[int, ...]]] = {
    "wan": lambda n: (n - 4 * (n // 6), 2 * (n // 6), 2 * (n // 6)),
    "cogvideox": lambda n: (n // 4, n // 8 * 3, n // 8 * 3),
    "halves": lambda n: (n // 2, n // 2),
}


@lru_cache(maxsize=1)
def _classes() -> Mapping[str, Transformer]:
    """``diffusers.toml``, read once."""
    plain = read_table("diffusers.toml")
    entries: dict[str, Mapping[str, Any]] = plain["rotating"]
    entries |= {name: {"uses": uses} for name, uses in plain["without_rotation"].items()}
    entries |= {name: {"refused": why} for name, why in plain["refused"].items()}
    return {k: Transformer(**tuples_for_lists(inherit(v, entries))) for k, v in entries.items()}
