"""A plug-in for vLLM: with ``PHASOR_VERIFY`` set, it verifies the tables of each loaded model.

vLLM calls `register` in each of its processes, as an entry point of ``vllm.general_plugins``.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from importlib import import_module
from typing import Any

from phasor.errors import TensorError
from phasor.files.reading import load
from phasor.identification.verifying import verify

# vLLM shows messages of loggers below its own name
_LOGGER = logging.getLogger("vllm.phasor")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def register() -> None:
    """Let vLLM verify each model that it loads and log one line; without the variable do nothing.

    It raises nothing: if vLLM has moved its loader, vLLM starts and logs that nothing is verified.
    """
    if not os.environ.get("PHASOR_VERIFY"):
        return
    try:
        loader = import_module("vllm.model_executor.model_loader.base_loader").BaseModelLoader
        load_model = loader.load_model
    except Exception as error:  # any version of vLLM has to start
        _LOGGER.warning("phasor: no model is verified, this vLLM is not known: %s", error)
        return

    @functools.wraps(load_model)
    def load_and_verify(*args: Any, **options: Any) -> Any:
        model = load_model(*args, **options)
        configs: list[Any] = [options.get("model_config"), *args]
        names = [str(config.model) for config in configs if hasattr(config, "model")]
        _log(model, names[0] if names else "the model")
        return model

    loader.load_model = load_and_verify


def _log(model: Any, checkpoint: str) -> None:
    """Log whether the model's tables match its checkpoint; errors here do not stop the server."""
    try:
        layers = load(checkpoint)
        # layers of one kind share a module: its table is verified once, as the first layer's
        tables: dict[tuple[int, str | None], tuple[str, Any]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            if (match := _LAYER.search(name)) and hasattr(module, "cos_sin_cache"):
                layer = int(match[1])
                kind = layers.layer_kinds[layer] if layer < len(layers) else None
                table = f"layers.{layer}.cos_sin_cache", module.cos_sin_cache
                tables.setdefault((id(module), kind), table)
        if not tables:
            raise TensorError(f"no layer of {type(model).__name__} has a cos_sin_cache")
        verification = verify(layers, dict(tables.values()))
        level = logging.WARNING if verification else logging.INFO
        _LOGGER.log(level, "phasor: %s", " ".join(map(str.strip, verification.lines())))
    except Exception as error:  # any model may fail here, and the server has to start
        _LOGGER.warning("phasor: %s is not verified: %s", checkpoint, error)
