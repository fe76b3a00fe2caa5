"""Files of programs that train or serve: Megatron, and those that have a dialect.

``programs.toml`` has their names of keys, and what their code assumes for those that are absent.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from phasor.errors import PhasorWarning
from phasor.files.configs.layer_pattern import (
    LayerPattern,
    flag_pattern,
    number_pattern,
    whole_numbers,
)
from phasor.files.configs.program_model import (
    CONTEXT,
    ProgramModel,
    divided,
    read_programs,
    spellings,
    with_sections,
)
from phasor.files.configs.source import JsonObject, is_huggingface
from phasor.files.dialects import kerashub, litgpt, tensorrt_llm, torchtune
from phasor.layers import LayerRopes


def load_program(top: JsonObject) -> LayerRopes | None:
    """The rope of each layer; None if the file is none of these programs'."""
    for program, facts in read_programs().items():
        for place in (*facts["inside"], ""):
            values = top.find(place) if place else top.values
            values = cast("Mapping[str, Any]", values if isinstance(values, Mapping) else {})
            found = JsonObject(values, place, strict=top.strict)
            if any(map(is_huggingface, (top, found))):
                continue
            if all(any(map(found.has, spellings(keys))) for keys in facts["marks"]):
                model = ProgramModel(program, found, str(top.values.get("name")))
                return _READERS[program](model)
    return None


# Megatron-LM's arguments, and the models of Megatron-Bridge and NeMo.


def _load_megatron(model: ProgramModel) -> LayerRopes:
    config, facts = model.config, model.facts
    name = (config.text("_target_") or "").rpartition(".")[2]
    of_class = next(v for k, v in facts["classes"].items() if name.startswith(k))
    refused = {**facts["refused"], **of_class.get("refused", {})}
    for key in filter(config.has, refused):
        config.refuse(key, refused[key])
    model.defaults |= {**facts["bridge_says"], **of_class} if name else {}
    if config.text("transformer_type") not in (None, "megatron"):
        config.refuse("transformer_type", "megatron, or give the config.json of that model")
    position_type = _megatron_positions(model)
    position_type = of_class.get("position", position_type)
    if config.flag("gpt_oss"):  # whatever else is said
        position_type = "yarn"
        model.put(facts["gpt_oss"])
    if pattern := re.sub(r"/.*|\|", "", config.text("hybrid") or ""):
        if {*pattern} - {*(letters := "MG*D+-E" + of_class.get("letters", ""))}:
            config.refuse("hybrid", f"letters of layers among {', '.join(letters)}")
        model.put({"num_layers": len(pattern)})
    if position_type != "mrope" and config.has("mrope_section"):
        of_axes = f"{config.name('mrope_section')} is for several axes"
        config.notes.append(f"{of_axes}, and is not read: Megatron's {position_type} has one.")
    config = model.config
    if config.has("griffin") or "griffin" in model.title:  # a model of NeMo's
        model.add_defaults({"partial_rotary_factor": 0.5})
        pattern = ("RR*" * config.layers())[: config.layers()]
    model.latent = config.flag("latent") is True or bool({*pattern} & {*"D+"})
    if config.flag("grouped") is False:  # its groups are then those of a default that nothing reads
        model.put({"num_query_groups": None})
    if config.flag("not_rounded"):
        model.add_defaults({"yarn_correction_range_round_to_int": False})
    if config.has("_target_"):  # a class of Megatron-Bridge's
        model.add_defaults(facts["bridge"] | (facts["bridge_latent"] if model.latent else {}))
        model.add_defaults({CONTEXT: config.whole("seq_length")})
    config = model.config
    if model.latent and position_type not in ("none", "relative"):
        position_type = config.text("rope_type", "rope", "yarn") or "yarn"
    model.turns_all = model.latent and position_type == "yarn"  # whatever the fraction is
    if position_type in facts["instead"]:
        return model.without(f"Megatron's type {position_type}", position_type)
    if "kinds" in of_class:
        return _load_bridge_kinds(model, of_class)
    config.notes += of_class.get("notes", ())
    interleaved = config.flag("interleaved") or model.latent
    # latent attention writes halves
    rope = model.rope("interleaved" if interleaved else "half", "half" if model.latent else None)
    halves = () if model.latent else of_class.get("halves", facts["halves"])
    what = "hybrid model" if pattern and "R" not in pattern else position_type
    if interleaved and what in halves:
        config.refuse("interleaved", f"false, as Megatron's {what} turns halves alone")
    if position_type == "yarn":
        # its frequencies are those of whole heads, whatever the fraction is
        rope = model.law("yarn", replace(rope, rotary_dim=rope.head_dim))
    elif not model.latent:
        if position_type == "rope" and config.flag("llama3") and not pattern:
            rope = model.law("llama3", rope)
        elif config.has("scale_factor") and config.has("old_context_len"):
            rope = model.law("bridge", rope)
        if position_type == "mrope":
            sections = whole_numbers(config, "mrope_section")
            rope = with_sections(rope, config, sections, of_class.get("layout"))
        rope = divided(rope, config.number("interpolation", above=0))
    # every n-th layer, or those with a 1 in a list, do not rotate
    count = config.layers()
    without = number_pattern(config, "no_rope", count) or LayerPattern.every(0, count)
    if model.latent and config.value("no_rope"):  # whose class does not read it
        config.notes.append(f"{config.name('no_rope')} is not read in latent attention.")
        without = LayerPattern.every(0, count)
    others = _without_attention(config, pattern)
    if not others and config.value("spec"):
        config.notes.append(f"The layers are made by {config.name('spec')}; some may not rotate.")
    return model.ropes({"nope": None, "rope": rope}, without, others)


def _megatron_positions(model: ProgramModel) -> str:
    """The word for the position embedding, which a switch of older files replaces."""
    config, key = model.config, "position_embedding_type"
    if not config.flag("use_rotary"):
        if not config.has(key) and (named := config.value("other_model")) is not None:
            warnings.warn(
                f"{config.name('other_model')} names another model ({named}), and no {key} is "
                "given; if that model is trained, give its config.json.",
                PhasorWarning,
                stacklevel=6,
            )
        return model.position_type()
    stated = config.value(key)
    if stated not in (None, "rope"):
        switch = f"{config.name('use_rotary')} makes the position embedding rope"
        config.notes.append(f"{switch}; {config.name(key)} (got {stated}) is not read.")
    return "rope"


def _without_attention(config: JsonObject, pattern: str) -> Sequence[str]:
    """What layers have in place of attention, and with it of a rotation; "" where they have it."""
    if pattern:
        kinds = {"M": "mamba", "R": "recurrent", "G": "linear_attention", "-": "mlp", "E": "moe"}
        return [kinds.get(letter, "") for letter in pattern]
    if config.number("hybrid_ratio") and config.flag("is_hybrid") is not False:
        config.refuse("hybrid_ratio", f"absent without a {config.name('hybrid')}")
    if config.number("falconh1_ratio") not in (None, 1):
        config.refuse("falconh1_ratio", f"1 without a {config.name('hybrid')}")
    key, layers = "linear_every", config.layers()
    delta_nets = ("gated_delta_net", "gdn", "gdn2")
    if config.text("attention_variant", "dsa", *delta_nets) not in delta_nets:
        return ()
    numbers = config.require(key, whole_numbers(config, key))
    if len(numbers) == 1 and numbers[0]:
        return LayerPattern.every(numbers[0], layers).kinds("", "linear_attention")
    return flag_pattern(config, key, numbers, layers).kinds("linear_attention", "")


def _load_bridge_kinds(model: ProgramModel, of_class: Mapping[str, Any]) -> LayerRopes:
    """A base for local layers and one for global ones, whose heads may be wider."""
    config, by = model.config, 1.0
    kinds: Mapping[str, Mapping[str, Any]] = of_class["kinds"]
    model.turns_all, local = "partial" not in of_class, kinds["sliding_attention"]
    if "base_key" not in local:  # with a key for each base, no factor divides positions
        if "base" in local and not isinstance(base := config.value("rope_theta"), (list, tuple)):
            model.put({"rotary_base": [local["base"], base]})
            config = model.config
        bases = config.wholes("rope_theta", least=2) or ()
        if len(bases) != 2:
            config.refuse("rope_theta", "two bases, of local layers and of global ones")
        each = zip(kinds.items(), bases[::-1], strict=True)  # global layers come first in kinds
        kinds = {kind: {**own, "base": base} for (kind, own), base in each}
        model.put({"rotary_base": bases[1]})
        config = model.config
        by = config.number("interpolation", above=0) or 1.0
    if config.value("no_rope"):
        config.refuse("no_rope", "absent, as every layer of this class rotates")
    rope = model.rope("interleaved" if config.flag("interleaved") else "half")
    return model.ropes_by_kind(rope, {**of_class, "kinds": kinds}, by)


_READERS: Mapping[str, Callable[[ProgramModel], LayerRopes]] = {
    "litgpt": litgpt.read,
    "TensorRT-LLM": tensorrt_llm.read,
    "Megatron": _load_megatron,
    "KerasHub": kerashub.read,
    "torchtune": torchtune.read,
}
