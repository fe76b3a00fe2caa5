"""``params.json`` of Mistral's and Meta's own code, and of the first MLX; written for llama-models.

Pairs are interleaved, except for MLX programs with ``rope_traditional: false`` and for ExecuTorch
with ``use_hf_rope``. torchchat has a few names of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from phasor.files import refusal
from phasor.files.configs import rope_blocks
from phasor.files.configs.facts import NO_FACTS, Architecture, read_table, table
from phasor.files.configs.layer_pattern import LayerPattern
from phasor.files.configs.ropes import layer_ropes
from phasor.files.configs.source import JsonObject, renamed_keys, single_value
from phasor.files.configs.unread_keys import meanings
from phasor.files.dialects.by_reading import Dialect, settings_or_refusal
from phasor.files.dialects.target import (
    Keys,
    ProgramSettings,
    Target,
    as_json,
    has_steps,
    law_numbers,
    layers_with,
)
from phasor.layers import LayerRopes
from phasor.rope import Rope
from phasor.scaling import Law, Llama3, Yarn

# Reading.


@lru_cache(maxsize=1)
def _facts() -> Mapping[str, Any]:
    return read_table("params_json.toml", "phasor.files.dialects")


def _is_params(config: JsonObject) -> bool:
    """Whether a file has the keys of Mistral's and Meta's code, which the first MLX used too."""
    marks = _facts()["marks"]
    if not all(map(config.has, marks["sizes"])):
        return False
    single_value((config.name(key), config.values.get(key)) for key in ("dim", "hidden_size"))
    if any(map(config.has, ["hidden_size", *marks["foreign"]])):
        # with an equal hidden_size, transformers' keys count
        return False
    if config.has("model_type"):
        return config.text("model_type") in marks["mlx"]
    return any(map(config.has, marks["own"]))


def read(top: JsonObject) -> LayerRopes | None:
    """The rope of each layer, the same for all but Llama 4's layers without one."""
    facts = _facts()
    inner_key = facts["inside"].get(str(top.values.get("model_type")))
    if inner_key is not None:
        top = top.object(inner_key) or top
    if not _is_params(top):
        return None
    is_torchchat = any(map(top.has, facts["marks"]["torchchat"]))
    names: dict[str, Any] = {**facts["names"]}
    if is_torchchat:
        names |= facts["torchchat"]
    config = JsonObject(top.values, top.path, names=names, strict=top.strict)
    layers, latent = config.layers(), config.has("qk_rope_head_dim")
    head_dim = config.width("qk_rope_head_dim") or config.head_dim()
    base = _base(config, is_torchchat=is_torchchat)
    block = config.object("rope_scaling" if is_torchchat else "yarn")
    law: Law | None = _read_llama3(config, layers) if config.flag("use_scaled_rope") else None
    if block is not None:
        if law is not None:
            name = config.name("rope_scaling" if is_torchchat else "yarn")
            config.refuse("use_scaled_rope", f"false with {name}, which scales as well")
        law = _read_bands(block) if is_torchchat else _read_yarn(block, latent=latent)
    is_executorch, rotary_dim = config.flag("use_hf_rope") is True, head_dim
    if is_executorch:
        if law is not None:
            config.refuse("use_hf_rope", "false with a law, as ExecuTorch then reads none")
        fraction = config.number("partial_rotary_factor", above=0, most=1) or 1.0
        rotary_dim = int(head_dim * fraction)
    is_half = is_executorch or config.flag("rope_traditional") is False
    pairing = "half" if is_half else "interleaved"
    with renamed_keys(config, rotary_dim="partial_rotary_factor" if is_executorch else "head_dim"):
        rope = Rope(
            head_dim=head_dim, pairing=pairing, base=base, rotary_dim=rotary_dim, scaling=law
        )
    interval = config.whole("nope_layer_interval")
    layer_kinds = LayerPattern.every(interval or 0, layers).kinds("nope", "rope")
    kinds = {"rope": rope, "nope": None} if "nope" in layer_kinds else {"rope": rope}
    query_factor = _facts()["llama4" if "nope" in kinds else "mistral"]["query_factor"]
    lengths = ("max_position_embeddings", "max_seq_len", "model_max_length")
    return layer_ropes(
        config,
        kinds,
        layer_kinds,
        "Mistral's or Meta's params.json",
        facts=Architecture(latent=True) if latent else NO_FACTS,
        blocks=() if block is None else (block,),
        name=config.text("model_type") or "params.json",
        context=single_value((config.name(key), config.whole(key)) for key in lengths),
        query_factors=rope_blocks.query_factors(query_factor, config, kinds),
    )


def _base(config: JsonObject, *, is_torchchat: bool) -> float:
    """The base in a file, else the default of the program that reads it."""
    base, model_type = config.number("rope_theta", above=1), config.text("model_type")
    default, source = 10_000.0, "a constant in Meta's code for Llama 1 and 2"
    if is_torchchat:
        source = "what torchchat assumes"
    elif model_type is not None:
        default, source = table().huggingface[model_type].base, f"what MLX assumes for {model_type}"
    elif base is None and (config.contains("use_scaled_rope") or not config.has("multiple_of")):
        differing = "programs that read params.json fill it in differently (10000 and 1000000)"
        for key in filter(_is_base, config.unread()):
            differing += f"; {key} says {config.values[key]}, under a name of another program"
        raise refusal("params_base", key=config.name("rope_theta"), differing=differing)
    return config.or_default("rope_theta", base, default, source)


def _is_base(key: str) -> bool:
    return key in meanings() and meanings()[key].means == "base"


def _read_llama3(config: JsonObject, layers: int) -> Llama3:
    """Llama 3's law, with numbers from the file, from Llama 4's code, or from the release."""
    factor = config.number("rope_scaling_factor", above=0)
    is_llama4 = config.has("moe_args") or config.has("nope_layer_interval")
    marks = _facts()["llama4" if is_llama4 else "llama3"]
    high = config.number("rope_high_freq_factor", above=0) or marks["high_freq_factor"]
    if is_llama4:
        source = "the default of Llama 4's code"
        factor = config.or_default("rope_scaling_factor", factor, marks["factor"], source)
    if factor is None:
        release = marks["releases"].get(f"{config.whole('dim')} x {layers}")
        if release is None:
            raise refusal(
                "params_factor", key=config.name("use_scaled_rope"), unknown=marks["unknown"]
            )
        factor = float(release["factor"])
        config.notes.append(marks["release"].format(**release))
        config.notes += [marks["not_8"]] * (factor != 8)
    with renamed_keys(config, high_freq_factor="rope_high_freq_factor"):
        return Llama3(factor=factor, original_max_positions=8192, high_freq_factor=high)


def _read_bands(block: JsonObject) -> Llama3:
    """Llama 3's law from a block of torchchat, which has all its numbers."""
    names = ("factor", "low_freq_factor", "high_freq_factor")
    numbers = {name: block.require(name, block.number(name, above=0)) for name in names}
    key = "original_max_position_embeddings"
    with renamed_keys(block):
        return Llama3(original_max_positions=block.require(key, block.whole(key)), **numbers)


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


# Writing, for llama-models.

#: Keys that only Llama 4's code reads; the values are constants in Llama 3's code.
_LLAMA3_CONSTANTS = {"rope_scaling_factor": 8.0, "rope_high_freq_factor": 4.0}


def _settings(ropes: LayerRopes, _context: int) -> Iterator[Keys]:
    rope, *other_ropes = ropes.ropes
    law, interval = rope.scaling, layers_with(ropes, None).interval
    if (
        other_ropes
        or rope.base is None
        or interval is None
        or not isinstance(law, (Llama3, type(None)))
    ):
        return
    keys: Keys = {"rope_theta": rope.base, "use_scaled_rope": law is not None}
    if law is not None:
        names = {"factor": "rope_scaling_factor", "high_freq_factor": "rope_high_freq_factor"}
        keys |= law_numbers(law, **names)
    if interval:
        keys["nope_layer_interval"] = interval
    yield keys


def _sizes(ropes: LayerRopes, _context: int) -> Keys:
    return {"dim": ropes.ropes[0].head_dim, "n_layers": len(ropes), "n_heads": 1}


def _read_file(file: JsonObject) -> LayerRopes:
    ropes = read(file)
    assert ropes is not None, "it has the keys of such a file"
    return ropes


DIALECT = Dialect(read=_read_file, settings=_settings, sizes=_sizes, has_both_pairings=False)


def _write(ropes: LayerRopes, context: int) -> ProgramSettings:
    if layers_with(ropes, None).interval is None:
        feature = "layers without a rotation that are not every n-th"
        META.refuse("still layers", feature, ropes.ropes[0], [])
    written = settings_or_refusal(META, DIALECT, ropes, context)
    keys, (rope, *_) = written.keys, written.form.ropes
    notes = [f"The code computes head_dim as dim / n_heads, which has to be {rope.head_dim}."]
    is_llama3 = all(keys.get(key, number) == number for key, number in _LLAMA3_CONSTANTS.items())
    if not is_llama3 or "nope_layer_interval" in keys:
        notes.append("llama_models.llama4 reads all these keys, llama_models.llama3 does not.")
    for kind, factor in ropes.query_factors.items():
        if META.query_factor(factor, ropes.kinds[kind]):
            keys |= {"attn_temperature_tuning": True}
            keys |= {"floor_scale": factor.length, "attn_scale": factor.strength}
    return as_json(keys, notes, written.performed)


META = Target(
    name="meta",
    program="keys of a params.json for llama-models",
    source="https://github.com/meta-llama/llama-models/tree/main/models",
    checked="run",
    package="llama-models",
    write=_write,
    partial=False,
    query_factor=lambda factor, rope: has_steps(factor) and factor.first == 1,
)
