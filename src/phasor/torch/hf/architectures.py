"""The architectures of the installed transformers that rotate."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from phasor._checks import shown
from phasor.errors import BackendError, ConfigError, PhasorError

_ROTATES = re.compile(r"^def \w*(rotary|rotate)|Rotary|rotary_emb|sinusoidal_pos", re.MULTILINE)
#: Models that rotate in their own class and hold other models beside.
_HOLDERS = frozenset({"chameleon", "esm", "moshi", "phi4_multimodal"})
_NO_ROTATION = "its tokens are not rotated"
_INSIDE = "it is given the hidden states of a larger model, not tokens"
#: Model types whose modules name a rotation, and why there is no tiny model of them here.
NOT_BUILT: Mapping[str, str] = {
    "aimv2_text_model": _NO_ROTATION,
    "blt_local_decoder": _INSIDE,
    "blt_local_encoder": _INSIDE,
    "clvp_encoder": "it turns values too, and by a width that no key of its config states",
    "clvp_decoder": _NO_ROTATION,
    "dia_decoder": "it takes the codes of several channels and an encoder's output",
    "distilbert": _NO_ROTATION,
    "glm5_next_text": _NO_ROTATION,
    "inkling2_text": _NO_ROTATION,
    "jamba": _NO_ROTATION,
    "mistral_large4_text": "its frequencies are learned (LeRoPE), so no config states them",
    "moshi_depth": _NO_ROTATION,
    "nemotron_h": _NO_ROTATION,
    "qwen2_5_omni_talker": _INSIDE,
    "qwen3_omni_moe_talker_code_predictor": _INSIDE,
    "qwen3_omni_moe_talker_text": _INSIDE,
    "seamless_m4t": _NO_ROTATION,
    "t5gemma2_decoder": "it needs the output of an encoder",
    "videoprism_text_model": _NO_ROTATION,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """One model class of transformers that rotates queries and keys.

    Attributes:
        model_type: What its configs call it.
        module: Where its code is.
        class_name: The class that is built: the causal language model where there is one.
    """

    model_type: str
    module: str
    class_name: str

    @property
    def model_class(self) -> Any:
        """The class itself."""
        return getattr(import_module(self.module), self.class_name)


def transformers() -> Any:
    """The installed transformers.

    Raises:
        BackendError: If there is none.
    """
    if find_spec("transformers") is None:
        raise BackendError(
            "the architectures of transformers are asked for, and transformers is not installed: "
            "pip install 'phasor[transformers]'"
        )
    return import_module("transformers")


def model_types() -> tuple[str, ...]:
    """The model types of the installed transformers whose models take tokens and rotate, sorted.

    Raises:
        BackendError: If transformers is not installed.
    """
    return tuple(name for name in sorted(_modules()) if _found(name) is not None)


def not_built() -> Mapping[str, str]:
    """Model types of the installed transformers that name a rotation, and why none is built."""
    known = _modules()
    return {name: NOT_BUILT[name] for name in sorted(NOT_BUILT) if name in known}


def architecture(name: str) -> Architecture:
    """The architecture of a model type, or of the name of a model class.

    Args:
        name: Such as ``llama`` or ``LlamaForCausalLM``.

    Raises:
        BackendError: If transformers is not installed.
        ConfigError: If it has no such architecture that takes tokens and rotates them.

    >>> found = architecture("LlamaForCausalLM")
    >>> found.model_type, found.class_name, architecture("llama") == found
    ('llama', 'LlamaForCausalLM', True)
    """
    named: Any = None
    if name not in _modules() and name.isidentifier():
        named = getattr(transformers(), name, None)
    config = getattr(named, "config_class", None)
    model_type = str(getattr(config, "model_type", name))
    if model_type in NOT_BUILT:
        raise ConfigError(f"{shown(name)} is not built here: {NOT_BUILT[model_type]}")
    found = _found(model_type)
    if found is None:
        known = "" if named is None else f": {name} is there, and its code has none"
        raise ConfigError(
            f"{shown(name)} must be a model type or a model class of the installed transformers "
            f"that takes tokens and rotates them{known}; `phasor identify --list` shows them all"
        )
    return found


@cache
def _modules() -> Mapping[str, str]:
    """Modules whose code names a rotation, by model type; none is imported."""
    library = transformers()
    auto = import_module("transformers.models.auto.configuration_auto")
    folder = Path(library.__file__).parent / "models"
    rotating: dict[str, str] = {}
    for model_type in auto.CONFIG_MAPPING_NAMES:
        name = auto.model_type_to_module_name(model_type)
        code = folder / name / f"modeling_{name}.py"
        if code.exists() and _ROTATES.search(code.read_text("utf-8")):
            rotating[model_type] = f"transformers.models.{name}.modeling_{name}"
    return rotating


@cache
def _found(model_type: str) -> Architecture | None:
    module = _modules().get(model_type)
    if module is None or model_type in NOT_BUILT:
        return None
    code = import_module(module)
    auto = import_module("transformers.models.auto.modeling_auto")
    names: list[object] = [
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type),
        auto.MODEL_MAPPING_NAMES.get(model_type),
        *vars(code),
    ]
    for name in names:
        one = getattr(code, name, None) if isinstance(name, str) else None
        if isinstance(one, type) and one.__module__ == module and _takes_tokens(one, model_type):
            return Architecture(model_type=model_type, module=module, class_name=one.__name__)
    return None


def _takes_tokens(one: Any, model_type: str) -> bool:
    """Whether a class is a whole model of this type that is given tokens, and holds no other."""
    if not issubclass(one, transformers().PreTrainedModel):
        return False
    config = one.config_class
    # some audio models are annotated with a union of configs
    if not isinstance(config, type) or cast(Any, config).model_type != model_type:
        return False
    if cast(Any, config).sub_configs and model_type not in _HOLDERS:
        return False
    return "input_ids" in inspect.signature(one.forward).parameters


@contextmanager
def attempting(what: str) -> Generator[None]:
    """One kind of error, whatever somebody's class raises, and none of its talk about defaults."""
    logging = transformers().logging
    usual = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except PhasorError:
        raise
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{what}: {why[:300]}") from error
    finally:
        logging.set_verbosity(usual)
