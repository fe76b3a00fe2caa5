"""Config files of other programs in, the rope of every layer out; and a rope's block back.

Read are Hugging Face ``config.json`` (transformers 4 and 5), ``params.json`` of Mistral and Meta,
DeepSeek's inference configs and the metadata of GGUF files. This package is the only place that
knows foreign key names. Nothing is guessed: a key about the rope that is not understood, two keys
that disagree or a value out of range is a `ConfigError` that names the key.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from phasor.configs._deepseek import load_deepseek
from phasor.configs._gguf import load_gguf
from phasor.configs._huggingface import load_huggingface
from phasor.configs._params import load_params
from phasor.configs._reading import NESTED, Block, language_models, read_source
from phasor.configs._table import table
from phasor.configs._writing import (
    REPLACED,
    REPLACED_OF_KINDS,
    config_keys,
    rope_parameters,
)
from phasor.errors import ConfigError, SpecError
from phasor.layers import LayerRopes

__all__ = [
    "NESTED",
    "REPLACED",
    "REPLACED_OF_KINDS",
    "config_keys",
    "language_models",
    "load",
    "model_types",
    "read_source",
    "rope_parameters",
]

_PARAMS = ("dim", "n_layers", "n_heads")
_DEEPSEEK = ("qk_rope_head_dim", "inter_dim")


def load(source: str | os.PathLike[str] | Mapping[str, Any]) -> LayerRopes:
    """The rope of each layer of the model that a config file describes.

    Args:
        source: Path of a file, of a directory that holds a ``config.json`` or a ``params.json``,
            or the dictionary that such a file holds. GGUF metadata come as a dictionary from key
            to value; the tensors ``rope_freqs.weight``, ``rope_factors_short.weight`` and
            ``rope_factors_long.weight`` may stand among them as lists.

    Returns:
        The ropes, with the kinds of layers as the file names them, else ``rope`` and ``nope``.
        ``notes`` names numbers that are missing from the file and were taken from the model class.
        In models with latent attention (DeepSeek) a rope describes the ``qk_rope_head_dim`` slice
        on its own.

    Raises:
        ConfigError: If the file cannot be read, is damaged, contradicts itself, or says something
            about its rope that phasor does not understand.

    >>> ropes = load({
    ...     "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 4096,
    ...     "num_attention_heads": 32, "rope_theta": 500000.0,
    ... })
    >>> ropes[0].pairing, ropes[0].base, ropes[0].head_dim
    ('half', 500000.0, 128)
    """
    config = read_source(source)
    try:
        return _dialect(config)(config)
    except SpecError as error:
        raise ConfigError(f"the config describes no usable embedding: {error}") from None


def model_types() -> tuple[str, ...]:
    """The Hugging Face model types that `load` knows, sorted.

    >>> "llama" in model_types()
    True
    """
    return tuple(sorted(table().huggingface))


def _dialect(config: Block) -> Any:
    if config.has("general.architecture"):
        return load_gguf
    if config.has("model_type"):
        return load_huggingface
    if all(config.has(key) for key in _DEEPSEEK):
        return load_deepseek
    if all(config.has(key) for key in _PARAMS):
        return load_params
    return load_huggingface
