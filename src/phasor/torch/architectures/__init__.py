"""The architectures of the installed transformers that rotate, and a tiny random model of each."""

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

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from phasor._checks import shown
from phasor.errors import BackendError, ConfigError, PhasorError, install_hint
from phasor.torch.architectures._tiny import (
    CUT,
    HOLDERS,
    NOT_BUILT,
    OWN_POSITIONS,
    STATED,
    TIMED,
    tiny,
)

_ROTATES = re.compile(r"^def \w*(rotary|rotate)|Rotary|rotary_emb|sinusoidal_pos", re.MULTILINE)
# a model that holds more was not made small
_MOST_NUMBERS = 60_000_000
# more than any model has, of whatever
_MOST_PARTS = 100_000
_COUNTS = re.compile(r"(num|n)_(?!positions|ctx)\w+")


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
            f"{install_hint('transformers')}"
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
    if cast(Any, config).sub_configs and model_type not in HOLDERS:
        return False
    return "input_ids" in inspect.signature(one.forward).parameters


def tiny_config(model_type: str, config: Mapping[str, Any] | None = None) -> Any:
    """The config of a small model that rotates as one of ``model_type`` does.

    It keeps the first layer of every kind, two at least, the width of a head, and all that is said
    about the rotation; hidden width, vocabulary and experts are small.

    Args:
        model_type: A model type, or the name of a model class.
        config: What a ``config.json`` of that type says; the class's defaults if None.

    Returns:
        An instance of the architecture's config class, with eager attention.

    Raises:
        BackendError: If transformers is not installed.
        ConfigError: If the class refuses the config.
    """
    one = architecture(model_type)
    kind = one.model_class.config_class
    given = STATED.get(one.model_type, {}) if config is None else config
    for key, value in given.items():
        if isinstance(value, int) and value > _MOST_PARTS and _COUNTS.fullmatch(key):
            raise ConfigError(f"{key} must be at most {_MOST_PARTS}, got {shown(value)}")
    with attempting(f"no config of {one.class_name} can be built"):
        whole = kind.from_dict(dict(given)).to_dict()
        cut = CUT.get(one.model_type, {})
        small = kind.from_dict({**whole, **tiny(whole), **cut})
        small._attn_implementation = "eager"
    return small


def tiny_model(model_type: str, config: Mapping[str, Any] | None = None, *, seed: int = 0) -> Any:
    """A small random model of an architecture: float32, on the CPU, made without a download.

    Attention is eager, so that everything is called from Python; the rest is as in `tiny_config`.

    Args:
        model_type: A model type, or the name of a model class.
        config: What a ``config.json`` of that type says; the class's defaults if None.
        seed: Of the weights; the global generator is left as it was.

    Returns:
        The model, in evaluation mode.

    Raises:
        BackendError: If transformers is not installed.
        ConfigError: If no tiny model can be built.
    """
    small = tiny_config(model_type, config)
    one = architecture(model_type)
    with attempting(f"no tiny {one.class_name} can be built"):
        with torch.device("meta"):
            planned = one.model_class(small)
        size = sum(x.numel() for x in (*planned.parameters(), *planned.buffers()))
        if size > _MOST_NUMBERS:
            raise ConfigError(f"{one.class_name} holds {size:,} numbers even when made small")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return one.model_class(small).eval()


def tiny_inputs(model: Any, positions: ArrayLike, *, seed: int = 0) -> dict[str, Tensor]:
    """Keyword arguments for a forward pass of a tiny model: two rows of random tokens.

    Args:
        model: Of `tiny_model`.
        positions: Where the tokens of both rows stand, ``[seq]``, or ``[seq, axes]`` for a
            multimodal rope. A model that counts its own positions is given none; these must then be
            0, 1, 2, ...
        seed: Of the tokens.

    Raises:
        ConfigError: If the model counts its own positions and others are asked for.
    """
    at = np.asarray(positions)
    rows, count = 2, len(at)
    words = min(100, model.config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(seed)
    inputs = {"input_ids": torch.randint(3, words, (rows, count), generator=generator)}
    if model.config.model_type in TIMED:
        inputs["t_cond"] = torch.zeros(1, 1, model.config.hidden_size)
    if counts_itself(model):
        if not np.array_equal(at, np.arange(count)):
            raise ConfigError(
                f"{type(model).__name__} counts its own positions, so positions must be 0, 1, 2, "
                f"..., got {shown(at.tolist())}"
            )
    else:
        columns = torch.from_numpy(at.astype(np.int64)).reshape(count, -1).T[:, None]
        inputs["position_ids"] = columns.expand(-1, rows, -1)[0 if at.ndim == 1 else slice(None)]
    return inputs


def position_axes(model: Any) -> int:
    """How many coordinates a model's positions have: 1, or those of its multimodal rope."""
    for module in model.modules():
        sections = getattr(module, "mrope_section", None)
        if isinstance(sections, dict):
            sections = next(iter(cast("dict[str, Any]", sections).values()), None)
        if sections is not None:
            return len(sections)
    return 1


def counts_itself(model: Any) -> bool:
    """Whether a model takes no positions and numbers its tokens from 0."""
    parameters = inspect.signature(model.forward).parameters
    takes = "position_ids" in parameters or any(
        one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()
    )
    return not takes or model.config.model_type in OWN_POSITIONS


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
