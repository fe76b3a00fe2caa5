"""Megatron-LM's arguments, in a launch script or saved, and models of Megatron-Bridge and NeMo."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from phasor.axes import OneAxis, Sectioned
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
    spellings,
    with_sections,
)
from phasor.files.configs.source import JsonObject
from phasor.files.dialects.blocks import rotated_fraction
from phasor.files.dialects.by_reading import Dialect, settings_or_refusal
from phasor.files.dialects.target import (
    Keys,
    ProgramSettings,
    Target,
    is_latent,
    law_numbers,
    layers_with,
    mscales,
    round_base,
    softmax_notes,
)
from phasor.layers import LayerRopes
from phasor.rope import Rope
from phasor.scaling import Linear, Llama3, Yarn

_TYPE = "position_embedding_type"


# Reading.


def read(model: ProgramModel) -> LayerRopes:
    """The rope of each layer."""
    class_entry = _class_facts(model)
    position_type = _position_type(model)
    position_type = class_entry.get("position", position_type)
    if model.config.flag("gpt_oss"):  # overrides the other keys
        position_type = "yarn"
    letters = _letters(model.config, class_entry)
    is_griffin = model.config.has("griffin") or "griffin" in model.title  # a model of NeMo
    model.latent = model.config.flag("latent") is True or bool({*letters} & {*"D+"})
    model.config = _fill_values(model, letters, is_griffin=is_griffin)
    config = model.config
    if is_griffin:
        letters = ("RR*" * config.layers())[: config.layers()]
    if position_type != "mrope" and config.has("mrope_section"):
        text = f"{config.name('mrope_section')} is for several axes"
        config.notes.append(f"{text}, and is not read: Megatron's {position_type} has one.")
    if model.latent and position_type not in ("none", "relative"):
        position_type = config.text("rope_type", "rope", "yarn") or "yarn"
    model.turns_all = model.latent and position_type == "yarn"  # the fraction has no effect
    if position_type in model.facts["instead"]:
        return model.no_rotation(f"Megatron's type {position_type}", position_type)
    if "kinds" in class_entry:
        return _ropes_by_kind(model, class_entry)
    config.notes += class_entry.get("notes", ())
    rope = _rope(model, class_entry, position_type, letters)
    attention_free = _attention_free_kinds(config, letters)
    still_layers = _still_layers(model)
    if not attention_free and config.value("spec"):
        config.notes.append(f"The layers are made by {config.name('spec')}; some may not rotate.")
    return model.ropes({"nope": None, "rope": rope}, still_layers, attention_free)


def _class_facts(model: ProgramModel) -> Mapping[str, Any]:
    """The facts of the Megatron-Bridge class that a file names; refuses keys that they exclude."""
    config, facts = model.config, model.facts
    name = (config.text("_target_") or "").rpartition(".")[2]
    class_entry = next(v for k, v in facts["classes"].items() if name.startswith(k))
    refused = {**facts["refused"], **class_entry.get("refused", {})}
    for key in filter(config.has, refused):
        config.refuse(key, refused[key])
    if config.text("transformer_type") not in (None, "megatron"):
        config.refuse("transformer_type", "megatron, or give the config.json of that model")
    model.defaults |= {**facts["bridge_says"], **class_entry} if name else {}
    return class_entry


def _position_type(model: ProgramModel) -> str:
    """The type of the position embedding, which a switch of older files overrides."""
    config = model.config
    if not config.flag("use_rotary"):
        if not config.has(_TYPE) and (model_name := config.value("other_model")) is not None:
            warnings.warn(
                f"{config.name('other_model')} names another model ({model_name}), and no {_TYPE} "
                "is given; if that model is trained, give its config.json.",
                PhasorWarning,
                stacklevel=6,
            )
        return model.position_type()
    type_in_file = config.value(_TYPE)
    if type_in_file not in (None, "rope"):
        switch = f"{config.name('use_rotary')} makes the position embedding rope"
        config.notes.append(f"{switch}; {config.name(_TYPE)} (got {type_in_file}) is not read.")
    return "rope"


def _letters(config: JsonObject, class_entry: Mapping[str, Any]) -> str:
    """A letter for each layer of a hybrid model; empty for other models."""
    letters = re.sub(r"/.*|\|", "", config.text("hybrid") or "")
    layer_letters = "MG*D+-E" + class_entry.get("letters", "")
    if {*letters} - {*layer_letters}:
        config.refuse("hybrid", f"letters of layers among {', '.join(layer_letters)}")
    return letters


def _fill_values(model: ProgramModel, letters: str, *, is_griffin: bool) -> JsonObject:
    """The file with values that the program uses always, or for absent keys."""
    config, facts = model.config, model.facts
    fixed: Keys = {}
    if config.flag("gpt_oss"):
        fixed |= facts["gpt_oss"]
    if letters:
        fixed["num_layers"] = len(letters)
    if config.flag("grouped") is False:  # then nothing reads the number of groups
        fixed["num_query_groups"] = None
    names = spellings(fixed)
    other_values = {key: v for key, v in config.values.items() if key not in names}
    assumed: Keys = {}
    if is_griffin:
        assumed["partial_rotary_factor"] = 0.5
    if config.flag("not_rounded"):
        assumed["yarn_correction_range_round_to_int"] = False
    if config.has("_target_"):  # a class of Megatron-Bridge
        assumed |= facts["bridge"] | (facts["bridge_latent"] if model.latent else {})
        assumed[CONTEXT] = config.whole("seq_length")
    return config.with_values(other_values | fixed).with_defaults(assumed)


def _rope(
    model: ProgramModel, class_entry: Mapping[str, Any], position_type: str, letters: str
) -> Rope:
    config = model.config
    interleaved = config.flag("interleaved") or model.latent
    # latent attention writes half pairs
    rope = model.rope("interleaved" if interleaved else "half", "half" if model.latent else None)
    halves = () if model.latent else class_entry.get("halves", model.facts["halves"])
    class_name = "hybrid model" if letters and "R" not in letters else position_type
    if interleaved and class_name in halves:
        config.refuse("interleaved", f"false, as Megatron's {class_name} turns halves alone")
    if position_type == "yarn":
        # it uses the frequencies of whole heads, and the fraction has no effect
        return model.law("yarn", replace(rope, rotary_dim=rope.head_dim))
    if model.latent:
        return rope
    if position_type == "rope" and config.flag("llama3") and not letters:
        rope = model.law("llama3", rope)
    elif config.has("scale_factor") and config.has("old_context_len"):
        rope = model.law("bridge", rope)
    if position_type == "mrope":
        sections = whole_numbers(config, "mrope_section")
        rope = with_sections(rope, config, sections, class_entry.get("layout"))
    return divided(rope, config.number("interpolation", above=0))


def _still_layers(model: ProgramModel) -> LayerPattern:
    """Layers that do not rotate: every n-th, or those with a 1 in a list."""
    config, count = model.config, model.config.layers()
    if model.latent and config.value("no_rope"):  # the class of latent attention does not read it
        config.notes.append(f"{config.name('no_rope')} is not read in latent attention.")
        return LayerPattern.every(0, count)
    return number_pattern(config, "no_rope", count) or LayerPattern.every(0, count)


def _attention_free_kinds(config: JsonObject, letters: str) -> Sequence[str]:
    """What each layer has instead of attention, and so of a rotation; "" if it has attention."""
    if letters:
        kinds = {"M": "mamba", "R": "recurrent", "G": "linear_attention", "-": "mlp", "E": "moe"}
        return [kinds.get(letter, "") for letter in letters]
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


def _ropes_by_kind(model: ProgramModel, class_entry: Mapping[str, Any]) -> LayerRopes:
    """The ropes of local layers and of global ones, whose heads may be wider."""
    config, divisor, base = model.config, 1.0, None
    kinds: Mapping[str, Mapping[str, Any]] = class_entry["kinds"]
    model.turns_all, local = "partial" not in class_entry, kinds["sliding_attention"]
    if "base_key" not in local:  # classes with a key for each base do not divide positions
        local_base, base = _two_bases(config, local.get("base"))
        bases = {"sliding_attention": local_base, "full_attention": base}
        kinds = {kind: {**entry, "base": bases[kind]} for kind, entry in kinds.items()}
        divisor = config.number("interpolation", above=0) or 1.0
    if config.value("no_rope"):
        config.refuse("no_rope", "absent, as every layer of this class rotates")
    rope = model.rope("interleaved" if config.flag("interleaved") else "half", base=base)
    return model.ropes_by_kind(rope, {**class_entry, "kinds": kinds}, divisor)


def _two_bases(config: JsonObject, local_base: float | None) -> tuple[float, float]:
    """The bases of local and global layers; the first may be a constant in the code."""
    key = "rope_theta"
    if local_base is not None and not isinstance(config.value(key), (list, tuple)):
        return local_base, config.require(key, config.whole(key, least=2))
    bases = config.wholes(key, least=2) or ()
    if len(bases) != 2:
        config.refuse(key, "two bases, of local layers and of global ones")
    return bases[0], bases[1]


# Writing: flags of the training command.

# constants in the code for --use-rope-scaling, which takes only a factor
_LLAMA3: Keys = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_positions": 8192}
# constants in the code for latent attention
_LATENT_YARN: Keys = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_positions": 4096,
    "truncate": True,
}


def _settings(ropes: LayerRopes, _context: int) -> Iterator[Keys]:
    """The flags of standard attention."""
    rope = ropes.ropes[0]
    if rope.base is None:
        return
    law, axes = rope.scaling, rope.axes
    flags: Keys = {"--position-embedding-type": "rope"}
    flags |= {"--kv-channels": rope.head_dim, "--rotary-base": int(rope.base)}
    if rope.rotary_dim < rope.head_dim:
        flags["--rotary-percent"] = rotated_fraction(rope.rotary_dim, rope.head_dim)
    if rope.pairing == "interleaved":
        flags["--rotary-interleaved"] = True
    if isinstance(axes, Sectioned):
        flags["--position-embedding-type"] = "mrope"
        flags["--mrope-section"] = " ".join(map(str, axes.sections))
    if isinstance(law, Linear):
        flags["--rotary-seq-len-interpolation-factor"] = int(law.factor)
    elif isinstance(law, Llama3):
        flags |= {"--use-rope-scaling": True, "--rope-scaling-factor": law.factor}
    elif isinstance(law, Yarn):
        flags["--position-embedding-type"] = "yarn"
        rounded = "yarn-correction-range-round-to-int"
        flags |= _yarn_flags(law)
        flags[f"--{rounded}" if law.truncate else f"--no-{rounded}"] = True
        flags |= law_numbers(
            law,
            original_max_positions="--yarn-original-max-position-embeddings",
            beta_fast="--yarn-beta-fast",
            beta_slow="--yarn-beta-slow",
        )
    still_layers = layers_with(ropes, None).numbers
    if any(still_layers):
        flags["--no-rope-freq"] = f"[{','.join(map(str, still_layers))}]"
    yield flags


def _latent_settings(ropes: LayerRopes, _context: int) -> Iterator[Keys]:
    """The flags of latent attention, which reads interleaved pairs and writes half pairs."""
    rope = ropes.ropes[0]
    if rope.base is None:
        return
    is_yarn = isinstance(rope.scaling, Yarn)
    yield {
        "--multi-latent-attention": True,
        # otherwise it would add learned embeddings
        "--position-embedding-type": "rope",
        "--rope-type": "yarn" if is_yarn else "rope",
        "--qk-pos-emb-head-dim": rope.head_dim,
        "--rotary-base": int(rope.base),
        **(_yarn_flags(rope.scaling) if isinstance(rope.scaling, Yarn) else {}),
    }


def _yarn_flags(law: Yarn) -> Keys:
    scales = {f"--{name.replace('_', '-')}": value for name, value in mscales(law).items()}
    return {"--rotary-scaling-factor": law.factor, **scales}


def _sizes(ropes: LayerRopes, _context: int) -> Keys:
    return {"num_layers": len(ropes), "hidden_size": 64, "num_attention_heads": 1}


def _similar_ropes(rope: Rope) -> Iterator[Rope]:
    """The rope with the numbers of its law that are constants in the code."""
    law = rope.scaling
    if isinstance(law, Llama3):
        yield round_base(replace(rope, scaling=replace(law, **_LLAMA3)))
    if isinstance(law, Yarn):
        yield round_base(replace(rope, scaling=replace(law, **_LATENT_YARN)))


DIALECT = Dialect(
    read=lambda file: read(ProgramModel("Megatron", file)),
    settings=_settings,
    sizes=_sizes,
    near=_similar_ropes,
    has_both_pairings=False,
    scales_softmax=False,
)
LATENT_DIALECT = Dialect(
    read=DIALECT.read,
    settings=_latent_settings,
    sizes=_sizes,
    near=_similar_ropes,
    states_still_layers=False,
)


def _write(ropes: LayerRopes, context: int) -> ProgramSettings:
    rope = ropes.ropes[0]
    latent = is_latent(ropes, rope)
    dialect = LATENT_DIALECT if latent else DIALECT
    written = settings_or_refusal(MEGATRON, dialect, ropes, context)
    notes = [] if latent else softmax_notes(rope.softmax_factor)
    if latent and None in ropes:
        notes.append("Latent attention rotates in all its layers: others must be of another kind.")
    notes.append(
        "Megatron-Bridge and NeMo read the same numbers as fields of a model's configuration: "
        "rotary_base, rotary_percent, seq_len_interpolation_factor, "
        f"{'' if latent else 'yarn_'}rotary_scaling_factor."
    )
    # a shell would read the list's brackets as a pattern of file names
    texts = {flag: f"'{v}'" if str(v).startswith("[") else v for flag, v in written.keys.items()}
    words = [flag if text is True else f"{flag} {text}" for flag, text in texts.items()]
    return ProgramSettings(written.keys, " ".join(words), tuple(notes), written.performed)


MEGATRON = Target(
    name="megatron",
    program="flags of Megatron-LM's training command",
    source="https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/training/arguments.py",
    checked="run",
    package="megatron-core",
    write=_write,
    other_pairs_out=True,
    axes=(OneAxis, Sectioned),
    softmax_note="",
)
