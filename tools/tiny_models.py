"""The architectures of the installed transformers that rotate, and tiny random models of them."""

from __future__ import annotations

import inspect
import re
import tomllib
import warnings
from collections.abc import Generator, Iterable, Mapping, Sized
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
import transformers

from phasor._checks import short_repr
from phasor.errors import ConfigError, PhasorError

_ROTARY = re.compile(r"^def \w*(rotary|rotate)|Rotary|rotary_emb|sinusoidal_pos", re.MULTILINE)
# parameters and buffers of a tiny model
_MAX_SIZE = 60_000_000
# of layers, heads or experts: more than any model has
_MAX_COUNT = 100_000
_COUNT_KEYS = re.compile(r"(num|n)_(?!positions|ctx)\w+")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_WIDTHS = ("hidden_size", "n_embd", "d_model")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
# lists that make layers of different kinds; other lists with an item for each layer are only cut
_KIND_LISTS = ("layer_types", "layers_block_type", "no_rope_layers", "layer_rope_theta")
_MAX_VALUES: Mapping[str, int] = {
    r"vocab_size\w*": 128,
    r"\w*intermediate_size\w*|\w*ffn_hidden_size|n_inner|ffn_dim": 64,
    r"n_routed_experts|num_(local_)?experts|moe_num_experts": 4,
    r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k_experts": 2,
    r"n_group|topk_group|n_shared_experts|num_shared_experts": 1,
    r"\w*lora_rank": 32,
    r"hidden_size_per_layer_input": 16,
    r"sliding_window": 16,
    r"num_kv_shared_layers": 0,
}
_SPECIAL_TOKENS: Mapping[str, int] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@cache
def special_cases() -> Mapping[str, Any]:
    """The content of ``tiny_models.toml``: exceptions for single model types."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


# ---- the installed architectures ----


def installed_model_types() -> tuple[str, ...]:
    """The model types of the installed transformers whose models take tokens and rotate, sorted."""
    return tuple(name for name in sorted(_rotating_modules()) if _find_class(name) is not None)


def not_built() -> Mapping[str, str]:
    """Model types of the installed transformers that name a rotation, and why none is built."""
    types_by_reason = special_cases()["not_built"].items()
    reasons = {name: reason for reason, names in types_by_reason for name in names}
    return {name: reasons[name] for name in sorted(reasons) if name in _rotating_modules()}


def model_class(name: str) -> Any:
    """The class of a model type or any of its classes, its causal model where there is one.

    >>> model_class("llama").__name__, model_class("LlamaModel") is model_class("llama")
    ('LlamaForCausalLM', True)
    """
    name_found: Any = None
    if name not in _rotating_modules() and name.isidentifier():
        name_found = getattr(transformers, name, None)
    config = getattr(name_found, "config_class", None)
    model_type = str(getattr(config, "model_type", name))
    if model_type in not_built():
        raise ConfigError(f"{short_repr(name)} is not built here: {not_built()[model_type]}")
    class_found = _find_class(model_type)
    if class_found is None:
        hint = "" if name_found is None else f": {name} is there, and its code has none"
        raise ConfigError(
            f"{short_repr(name)} must be a model type or a model class of the installed "
            f"transformers that takes tokens and rotates them{hint}; "
            "`python -m tools.verdicts` shows them all"
        )
    return class_found


@cache
def _rotating_modules() -> Mapping[str, str]:
    """Names of the modules whose code names a rotation, by model type; none is imported."""
    auto = import_module("transformers.models.auto.configuration_auto")
    folder = Path(transformers.__file__).parent / "models"
    rotating: dict[str, str] = {}
    for model_type in auto.CONFIG_MAPPING_NAMES:
        name = auto.model_type_to_module_name(model_type)
        code = folder / name / f"modeling_{name}.py"
        if code.exists() and _ROTARY.search(code.read_text("utf-8")):
            rotating[model_type] = f"transformers.models.{name}.modeling_{name}"
    return rotating


@cache
def _find_class(model_type: str) -> Any:
    """The first class of the model type that takes tokens, its causal model first; else None."""
    module = _rotating_modules().get(model_type)
    if module is None or model_type in not_built():
        return None
    code = import_module(module)
    auto = import_module("transformers.models.auto.modeling_auto")
    names: list[object] = [
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type),
        auto.MODEL_MAPPING_NAMES.get(model_type),
        *vars(code),
    ]
    for name in names:
        cls = getattr(code, name, None) if isinstance(name, str) else None
        if isinstance(cls, type) and cls.__module__ == module and _takes_tokens(cls, model_type):
            return cls
    return None


def _takes_tokens(cls: Any, model_type: str) -> bool:
    """Whether a class is a whole model of this type that takes tokens and contains no other."""
    if not issubclass(cls, transformers.PreTrainedModel):
        return False
    config = cls.config_class
    # some audio models are annotated with a union of configs
    if not isinstance(config, type) or cast(Any, config).model_type != model_type:
        return False
    if cast(Any, config).sub_configs and model_type not in special_cases()["containers"]:
        return False
    return "input_ids" in inspect.signature(cls.forward).parameters


@contextmanager
def foreign_errors(failure: str) -> Generator[None]:
    """Turn any exception of foreign code into a ConfigError that begins with ``failure``.

    Its warnings and log messages, which are about defaults, are hidden.
    """
    logging = transformers.logging
    usual = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except PhasorError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{failure}: {reason[:300]}") from error
    finally:
        logging.set_verbosity(usual)


# ---- tiny models ----


def tiny_config(name: str, config: Mapping[str, Any] | None = None) -> Any:
    """The config of a small model that rotates as models of that type or class do.

    Its values are those of ``config``, as in a ``config.json``, or the class's defaults, with the
    first layer of every kind, two at least. The width of a head and all that concerns the rotation
    stay; hidden width, vocabulary and experts become small. Attention is eager, so that all
    functions are called from Python.
    """
    cls = model_class(name)
    config_class, model_type = cls.config_class, cls.config_class.model_type
    if config is None:
        config = cast("Mapping[str, Any]", special_cases()["published"].get(model_type, {}))
    for key, value in config.items():
        if isinstance(value, int) and value > _MAX_COUNT and _COUNT_KEYS.fullmatch(key):
            raise ConfigError(f"{key} must be at most {_MAX_COUNT}, got {short_repr(value)}")
    with foreign_errors(f"no config of {cls.__name__} can be built"):
        full = config_class.from_dict(dict(config)).to_dict()
        dependent = special_cases()["tiny"].get(model_type, {})
        small = config_class.from_dict({**full, **small_values(full), **dependent})
        small._attn_implementation = "eager"
    return small


def tiny_model(name: str, config: Mapping[str, Any] | None = None, *, seed: int = 0) -> Any:
    """A random model of `tiny_config` in evaluation mode, float32, on the CPU, without a download.

    The state of torch's random generator does not change.
    """
    cls, small = model_class(name), tiny_config(name, config)
    with foreign_errors(f"no tiny {cls.__name__} can be built"):
        with torch.device("meta"):
            empty = cls(small)
        size = sum(x.numel() for x in (*empty.parameters(), *empty.buffers()))
        if size > _MAX_SIZE:
            raise ConfigError(f"{cls.__name__} holds {size:,} numbers even when made small")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return cls(small).eval()


def choose_layers(config: Mapping[str, Any]) -> list[int]:
    """The layers to keep: the first of every kind, and two at least."""
    count = _first_value(config, _LAYERS, 2)
    kinds = [config[key] for key in _KIND_LISTS if _is_per_layer(config.get(key), count)]
    layer_settings = list(zip(*kinds, strict=True)) if kinds else [()] * count
    chosen = sorted({layer_settings.index(kind) for kind in layer_settings})
    return chosen if len(chosen) > 1 else list(range(min(count, 2)))


def _first_value(config: Mapping[str, Any], keys: Iterable[str], default: int) -> Any:
    return next((config[key] for key in keys if config.get(key)), default)


def _is_per_layer(value: Any, count: int) -> bool:
    return isinstance(value, (list, tuple)) and len(cast(Sized, value)) == count


def small_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a config with which its model is small and rotates as before."""
    layers, count = choose_layers(config), _first_value(config, _LAYERS, 2)
    heads = _first_value(config, _HEADS, 4)
    width = config.get("head_dim") or _first_value(config, _WIDTHS, 64 * heads) // heads
    fixed = dict.fromkeys(_LAYERS, len(layers)) | dict.fromkeys(_HEADS, 4)
    fixed |= dict.fromkeys(_WIDTHS, 4 * width) | _SPECIAL_TOKENS
    new_values: dict[str, Any] = {}
    for key, value in config.items():
        if key in fixed:
            new_values[key] = fixed[key]
        elif key in _KEY_HEADS and value:
            new_values[key] = 4 if value == heads else min(value, 2)
        elif key == "per_layer_config" and value:
            # the configs of single layers, under their new numbers
            configs = {int(layer): its_config for layer, its_config in value.items()}
            kept_layers = [(new, old) for new, old in enumerate(layers) if old in configs]
            new_values[key] = {f"{new:02d}": configs[old] for new, old in kept_layers}
        elif isinstance(value, Mapping) and any(inner in value for inner in _WIDTHS):
            # a model inside this one
            nested = cast("Mapping[str, Any]", value)
            new_values[key] = {**nested, **small_values(nested)}
        else:
            small = _limit_value(key, value)
            new_values[key] = [small[i] for i in layers] if _is_per_layer(small, count) else small
    return new_values


def _limit_value(key: str, value: Any) -> Any:
    """The value of a key, or every item of it, made no larger than a small model needs."""
    if isinstance(value, (list, tuple)):
        return [_limit_value(key, item) for item in cast(Iterable[Any], value)]
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    limit = next((limit for name, limit in _MAX_VALUES.items() if re.fullmatch(name, key)), value)
    return min(value, limit)
