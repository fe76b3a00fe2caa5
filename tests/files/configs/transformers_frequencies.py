"""What the rotary modules of transformers' own classes turn by, for a config as it stands."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import transformers


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what transformers has to say about a config."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(level)


def frequencies(config: dict[str, Any]) -> list[tuple[np.ndarray, float]] | None:
    """Frequencies and factor on cos and sin of each rope that the class makes of ``config``.

    None where transformers has no such class, no module for its frequencies, or cannot build it.
    """
    name, known = config.get("model_type"), transformers.CONFIG_MAPPING
    if name not in known or "model_config" in config:  # MLC's, which no class opens
        return None
    with quiet():
        try:
            whole = known[name].from_dict(copy.deepcopy(config))
            text_config = whole.get_text_config()
            if text_config is not whole and not any(
                isinstance(part, dict) for part in config.values()
            ):
                # a flat file for code of its own: the class does not read the keys at its top
                return None
            module = importlib.import_module(
                type(text_config).__module__.replace("configuration_", "modeling_")
            )
            rotary_class = _rotary_class(module, text_config)
            return None if rotary_class is None else _read_buffers(rotary_class(text_config))
        except Exception:  # a config without a meaning may end in any error, and is no oracle
            return None


def _rotary_class(module: Any, config: Any) -> Any:
    """The one class of the module whose instances are made of this config alone."""
    classes = [
        one
        for name, one in vars(module).items()
        if name.endswith("RotaryEmbedding") and getattr(one, "__module__", "") == module.__name__
    ]
    classes_of_config = [
        one
        for one in classes
        if inspect.signature(one.__init__).parameters.get("config") is not None
        and inspect.signature(one.__init__).parameters["config"].annotation
        in (type(config), type(config).__name__, inspect.Parameter.empty)
    ]
    return classes_of_config[0] if len(classes_of_config) == 1 else None


def _read_buffers(module: Any) -> list[tuple[np.ndarray, float]]:
    found = []
    for name, buffer in module.named_buffers():
        if name.endswith("inv_freq") and "original" not in name:
            gain = getattr(module, name.replace("inv_freq", "attention_scaling"), 1.0)
            found.append((buffer.double().numpy(), float(gain)))
    return found
