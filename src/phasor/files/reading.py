"""Reads the rope of every layer of a model from any file that describes it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from phasor.errors import SpecError
from phasor.files import refusal
from phasor.files.configs.facts import table
from phasor.files.configs.model_class import read_model_config
from phasor.files.configs.ropes import huggingface_ropes
from phasor.files.configs.source import cached_config, hub_id, read_source
from phasor.files.dialects import deepseek, diffusers, gguf, params_json
from phasor.files.dialects.programs import load_program
from phasor.files.presets import preset, preset_of_hub_id
from phasor.layers import LayerRopes

__all__ = ["load", "model_types"]


#: Readers of formats other than transformers' configs; each returns None for other formats.
_READERS = (diffusers.read, gguf.read, deepseek.read, load_program, params_json.read)


def load(
    source: str | os.PathLike[str] | Mapping[str, Any] | object,
    *,
    part: str | None = None,
    like: str | None = None,
    strict: bool = True,
) -> LayerRopes:
    """The rope of each layer of a model, from its config file.

    Args:
        source: Path of a file, or of a folder with a ``config.json`` or ``params.json``; ``-`` for
            standard input; the contents of such a file as a dictionary; or a config object of
            transformers. Or the id or address of a repository on the Hugging Face Hub, for its
            preset; without a preset, or with ``part`` or ``like``, for the file in the local cache.
            Nothing is downloaded. Learned frequencies are read from a folder's safetensors files.
            The header of a GGUF file is read with the ``gguf`` package. GGUF metadata may also be a
            dictionary, with the tensors ``rope_freqs.weight``, ``rope_factors_short.weight`` and
            ``rope_factors_long.weight`` as lists.
        part: Key of a config inside the file, such as ``"vision_config"``, or keys joined by dots.
            By default the language model's.
        like: A known model type, to read a file of an unknown type that rotates in the same way.
        strict: Whether to refuse keys that contradict the model's class. With False they are
            ignored with a note, as the class ignores them.

    Returns:
        The ropes, with the file's names for kinds of layers, else ``rope`` and ``nope``; None for
        every layer of a model without a rotary embedding. ``notes`` lists everything that was
        assumed, ignored, or taken from the model class. In models with latent attention (DeepSeek)
        a rope describes only the ``qk_rope_head_dim`` slice.

    Raises:
        ConfigError: If the file cannot be read, is damaged, contradicts itself, or has facts about
            its rope that phasor does not understand.
        CheckpointError: If the folder's weights lack learned frequencies.

    Warns:
        PhasorWarning: If a missing size was taken from the model's class, if several contexts
            disagree (the first is used), if the context was used as the one before an extension,
            or if a factor is not the quotient of the contexts or is given twice.

    >>> ropes = load({
    ...     "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 4096,
    ...     "num_attention_heads": 32, "rope_theta": 500000.0,
    ... })
    >>> ropes[0].pairing, ropes[0].base, ropes[0].head_dim
    ('half', 500000.0, 128)
    >>> load({"model_type": "gpt2", "n_layer": 12}).notes[-1]
    'gpt2 has no rotary embedding; instead: learned absolute position embeddings.'
    """
    if (repository := hub_id(source)) is not None:
        if part is None and like is None and (name := preset_of_hub_id(repository)) is not None:
            return preset(name)
        source = cached_config(repository) or repository
    config = read_source(source)
    config.strict = strict
    try:
        for reader in _READERS if part is None and like is None else ():
            if (ropes := reader(config)) is not None:
                return ropes
        return huggingface_ropes(read_model_config(config, part=part, like=like))
    except SpecError as error:
        raise refusal("no_embedding", error=error) from None


def model_types() -> tuple[str, ...]:
    """The Hugging Face model types that `load` knows, sorted.

    >>> "llama" in model_types()
    True
    """
    return tuple(sorted(table().huggingface))
