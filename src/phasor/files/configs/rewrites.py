"""Convert unusual files to the keys of transformers 5: a function for each kind of file.

A function gets the config of a model type whose ``rewrite`` in ``huggingface.toml`` names it. It
returns the config with canonical keys, and records the file's own key of each value. Code that
reads the config afterwards knows only these keys, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from phasor.files import refusal
from phasor.files.configs.source import JsonObject, single_value

_BLOCKS = ("rope_parameters", "rope_scaling")


def _chatglm(config: JsonObject) -> JsonObject:
    """ChatGLM's ``rope_ratio`` is the base, in units of 10,000."""
    ratio = config.number("rope_ratio", above=0)
    if ratio is None:
        return config
    ratio_name, base_name = config.name("rope_ratio"), config.name("rope_theta")
    file_base = config.number("rope_theta", above=1)
    base = single_value([(base_name, file_base), (ratio_name, ratio * 10_000.0)])
    return config.with_values({**config.values, "rope_theta": base}, {"rope_theta": "rope_ratio"})


def _deepseek_v4(config: JsonObject) -> JsonObject:
    """With one block for all layers, DeepSeek V4's class does not scale cos and sin."""
    values = {**config.values}
    for key in _BLOCKS:
        block = values.get(key)
        if not isinstance(block, Mapping):
            continue
        is_yarn = "yarn" in (block.get("rope_type"), block.get("type"))
        if is_yarn and block.get("attention_factor") is None:
            values[key] = {**block, "attention_factor": 1.0}
    return config.with_values(values)


def _gpt_oss(config: JsonObject) -> JsonObject:
    """OpenAI's own code has the numbers of YaRN under other names, outside a block."""
    keys = {
        "factor": "rope_scaling_factor",
        "beta_fast": "rope_ntk_beta",
        "beta_slow": "rope_ntk_alpha",
        "original_max_position_embeddings": "initial_context_length",
    }
    numbers = ("rope_scaling_factor", "rope_ntk_beta", "rope_ntk_alpha")
    if not any(map(config.has, numbers)):
        return config
    for block_key in filter(config.has, _BLOCKS):
        number_key = next(filter(config.has, numbers))
        raise refusal("two_scalings", first=config.name(number_key), second=config.name(block_key))
    yarn_numbers = {
        name: config.require(key, config.number(key, above=0)) for name, key in keys.items()
    }
    block = {"rope_type": "yarn", "truncate": False, **yarn_numbers}
    values = {key: value for key, value in config.values.items() if key not in numbers}
    origins = {f"rope_scaling.{name}": key for name, key in keys.items()}
    return config.with_values({**values, "rope_scaling": block}, origins)


def _internlm(config: JsonObject) -> JsonObject:
    """InternLM 20B has its law in ``rotary``; its type ``origin`` means no law."""
    values, name = config.values, "rotary"
    rotary = None
    if not any(isinstance(values.get(key), Mapping) for key in _BLOCKS):
        rotary = config.object(name)
    if rotary is None:
        return config
    renamed = {"base": "rope_theta", "scaling_factor": "factor"}
    block = {renamed.get(key, key): value for key, value in rotary.values.items()}
    if block.get("type") == "origin":
        block["type"] = "default"
    if block.get("type") == "dynamic" and block.get("factor") is None:  # the class's values
        lengths = {"original_max_position_embeddings": values.get("max_position_embeddings")}
        block |= {"factor": 1.0, **lengths}
    origins = {f"rope_scaling.{renamed.get(key, key)}": f"{name}.{key}" for key in rotary.values}
    return config.with_values({**values, "rope_scaling": block}, {"rope_scaling": name, **origins})


def _minimax_m2(config: JsonObject) -> JsonObject:
    """MiniMax M2's class reads null as the whole head, and uses its default for an absent key."""
    key = "partial_rotary_factor"
    if key in config.values and config.values[key] is None:
        return config.with_values({**config.values, key: 1.0})
    return config


def _nomic_bert(config: JsonObject) -> JsonObject:
    """Nomic's classes have dynamic NTK outside a block; a factor of 0 means no law."""
    key, length_key = "rotary_scaling_factor", "max_trained_positions"
    factor = config.number(key, least=0)
    if not factor:
        return config
    for block_key in filter(config.has, _BLOCKS):
        config.refuse(key, f"absent with the law of {config.name(block_key)}")
    length = config.whole(length_key) or 2048
    original = "original_max_position_embeddings"
    block = {"rope_type": "dynamic", "factor": factor, original: length}
    origins = {"rope_scaling.factor": key, f"rope_scaling.{original}": length_key}
    return config.with_values({**config.values, "rope_scaling": block}, origins)


def _qwen3_tts(config: JsonObject) -> JsonObject:
    """Qwen3-TTS's block states whether the sections of its axes alternate."""
    name, block = "rope_scaling", config.values.get("rope_scaling")
    if not isinstance(block, Mapping) or "interleaved" not in block:
        return config
    key = "mrope_interleaved"
    entries = cast("Mapping[str, Any]", block)
    renamed = {key if inner == "interleaved" else inner: v for inner, v in entries.items()}
    return config.with_values(
        {**config.values, name: renamed}, {f"{name}.{key}": f"{name}.interleaved"}
    )


def _step3p5(config: JsonObject) -> JsonObject:
    """Make a block for each kind of layer from the law and the lists by layer of Step 3.5."""
    kinds, count = config.texts("layer_types"), config.layers()
    if kinds is None:
        return config
    # layers for multi-token prediction come last
    all_layers = count + (config.whole("num_nextn_predict_layers", least=0) or 0)
    values: dict[str, Any] = {**config.values}
    if len(kinds) == all_layers > count:
        values |= {"layer_types": kinds[:count], "mtp_layer_types": kinds[count:]}
    lists = {"rope_theta": "rope_theta", "partial_rotary_factors": "partial_rotary_factor"}
    if config.has("rope_parameters"):  # then the class reads no lists
        listed = {key for key in lists if isinstance(values.get(key), (list, tuple))}
        return config.with_values({k: v for k, v in values.items() if k not in listed})
    blocks: dict[str, dict[str, Any]] = {}
    for name, key in lists.items():
        is_list = isinstance(values.get(name), (list, tuple))
        numbers: list[Any] = [*values[name]] if is_list else [values.get(name)] * count
        if len(numbers) not in (count, all_layers):
            config.refuse(name, f"a number, or one for each of {count} layers")
        for kind, number in zip(kinds, numbers, strict=False):
            if blocks.setdefault(kind, {}).setdefault(key, number) != number:
                config.refuse(name, "the same for all layers of a kind")
        values[name] = None
    law = config.object("rope_scaling")
    if (
        law is not None and "full_attention" in blocks
    ):  # the class uses the law only in these layers
        blocks["full_attention"] |= law.values
    return config.with_values({**values, "rope_parameters": blocks, "rope_scaling": None})


def _stripedhyena(config: JsonObject) -> JsonObject:
    """StripedHyena divides positions by a number of its own if a switch is on."""
    if not config.flag("use_interpolated_rotary_pos_emb"):
        return config
    key = "rotary_emb_scaling_factor"
    factor = config.number(key, above=0) or 1.0
    # a file that was saved again may have both, which must agree
    for block_key in filter(config.has, _BLOCKS):
        block_object = config.object(block_key) or JsonObject({})
        law = block_object.values.get("rope_type") or block_object.values.get("type")
        if law != "linear" or block_object.values.get("factor") != factor:
            raise refusal("two_scalings", first=config.name(key), second=config.name(block_key))
    values = {name: value for name, value in config.values.items() if name not in _BLOCKS}
    base = next((b["rope_theta"] for b in _blocks(config) if "rope_theta" in b), None)
    block = {"rope_type": "linear", "factor": factor, "rope_theta": base}
    return config.with_values({**values, "rope_scaling": block}, {"rope_scaling.factor": key})


def _blocks(config: JsonObject) -> list[Mapping[str, Any]]:
    """The rope blocks of a file."""
    blocks = (config.values.get(key) for key in _BLOCKS)
    return [block for block in blocks if isinstance(block, Mapping)]


#: The function for each ``rewrite`` of a model type.
REWRITES: Mapping[str, Callable[[JsonObject], JsonObject]] = {
    "chatglm": _chatglm,
    "deepseek_v4": _deepseek_v4,
    "gpt_oss": _gpt_oss,
    "internlm": _internlm,
    "minimax_m2": _minimax_m2,
    "nomic_bert": _nomic_bert,
    "qwen3_tts": _qwen3_tts,
    "step3p5": _step3p5,
    "stripedhyena": _stripedhyena,
}
#: For some rewrites, the key of a base in units of the class's own base.
BASE_UNITS: Mapping[str, str] = {"chatglm": "rope_ratio"}
#: Rewrites for files without a block of transformers 4: the law has other keys, or lists by layer.
WITHOUT_OLD_STYLE = ("internlm", "step3p5")
