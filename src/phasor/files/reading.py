"""Reads the rope of every layer of a model from whatever file describes it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from phasor.errors import ConfigError, SpecError
from phasor.files.configs.facts import table
from phasor.files.configs.model_class import read_model_config
from phasor.files.configs.ropes import huggingface_ropes
from phasor.files.configs.source import cached_config, hub_id, read_source
from phasor.files.dialects import deepseek, diffusers, gguf, params_json
from phasor.files.dialects.programs import load_program
from phasor.files.presets import preset, preset_of_hub_id
from phasor.layers import LayerRopes

__all__ = ["load", "model_types"]


#: Of formats that are no config of transformers; each gives None for a file of another format.
_READERS = (diffusers.read, gguf.read, deepseek.read, load_program, params_json.read)


def load(
    source: str | os.PathLike[str] | Mapping[str, Any] | object,
    *,
    part: str | None = None,
    like: str | None = None,
    strict: bool = True,
) -> LayerRopes:
    """The rope of each layer of the model that a config file describes.

    Args:
        source: Path of a file, of a folder that holds a ``config.json`` or a ``params.json``, ``-``
            for standard input, the dictionary that such a file holds, or a config object of
            transformers. Or the id or the address of a repository on the Hugging Face Hub: its
            preset, or where there is none, and with ``part`` or ``like``, the file in the local
            cache; nothing is downloaded. Learned frequencies are read from a folder's safetensors
            files. Of a GGUF file the header is read, with the ``gguf`` package. GGUF metadata may
            come as a dictionary too, with the tensors ``rope_freqs.weight``,
            ``rope_factors_short.weight`` and ``rope_factors_long.weight`` among them as lists.
        part: Key of the config inside the file to load, such as ``"vision_config"``; keys joined
            by dots where it lies deeper. By default the language model's.
        like: A known model type, for a file of a type that is unknown but rotates as that one.
        strict: Whether to refuse keys that contradict what the model's class does. With False they
            are ignored, with a note, as the class ignores them.

    Returns:
        The ropes, with the kinds of layers as the file names them, else ``rope`` and ``nope``; None
        for every layer of a model that has no rotary embedding. ``notes`` says what was assumed,
        ignored, or taken from the model class. In models with latent attention (DeepSeek) a
        rope describes the ``qk_rope_head_dim`` slice on its own.

    Raises:
        ConfigError: If the file cannot be read, is damaged, contradicts itself, or says something
            about its rope that phasor does not understand.
        CheckpointError: If the folder's weights lack the frequencies that they should have.

    Warns:
        PhasorWarning: If a size that the file does not say was taken from the model's class, the
            first of several contexts that disagree, or the context for the one before an
            extension; or if a factor is not the quotient of the contexts, or stands twice.

    >>> ropes = load({
    ...     "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 4096,
    ...     "num_attention_heads": 32, "rope_theta": 500000.0,
    ... })
    >>> ropes[0].pairing, ropes[0].base, ropes[0].head_dim
    ('half', 500000.0, 128)
    >>> load({"model_type": "gpt2", "n_layer": 12}).notes[-1]
    'gpt2 has no rotary embedding; in its place: learned absolute position embeddings.'
    """
    if (repository := hub_id(source)) is not None:
        if part is None and like is None and (name := preset_of_hub_id(repository)) is not None:
            return preset(name)
        source = cached_config(repository) or repository
    config = read_source(source)
    config.strict = strict
    try:
        for read in _READERS if part is None and like is None else ():
            if (ropes := read(config)) is not None:
                return ropes
        return huggingface_ropes(read_model_config(config, part=part, like=like))
    except SpecError as error:
        raise ConfigError(f"the config describes no usable embedding: {error}") from None


def model_types() -> tuple[str, ...]:
    """The Hugging Face model types that `load` knows, sorted.

    >>> "llama" in model_types()
    True
    """
    return tuple(sorted(table().huggingface))
