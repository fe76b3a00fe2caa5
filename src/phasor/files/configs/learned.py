"""Learned frequencies: the frequencies of the config, times the exponential of a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from phasor.files import refusal
from phasor.files.configs.model_class import LEARNED, ModelConfig
from phasor.files.tensors import open_checkpoint, read_floats
from phasor.rope import Rope, with_inv_freq


def learned_ropes(
    model: ModelConfig, folder: Path, kinds: Mapping[str, Rope | None]
) -> tuple[tuple[str, ...], dict[str, Rope | None]]:
    """The kind of each layer and their ropes, frequencies times exp(alpha) of the checkpoint."""
    files, learned = open_checkpoint(folder).files.values(), LEARNED[model.model_type]
    endings = tuple(f".{name}" for name in learned)
    tensors = {name: entry for file in files for name, entry in file.tensors.items()}
    # the drafter (mtp_dspark) is another model
    tensors = {n: e for n, e in tensors.items() if f".{n}".endswith(endings) and "mtp" not in n}
    order: list[str] = []
    ropes: dict[str, Rope | None] = {}
    for i, kind in enumerate(model.layer_kinds):
        if (rope := kinds[kind]) is not None:
            # a tensor for all layers, or one for each
            names = [n for n in tensors if f".layers.{i}." in f".{n}" or ".layers." not in f".{n}"]
            if len(names) != 1:
                requirement = f"{learned[0]} of layer {i}"
                raise refusal("learned", folder=folder, name=requirement, got=names or None)
            entry, pairs = tensors[names[0]], rope.num_pairs
            alpha = read_floats(entry) if [*entry.shape] == [pairs] else np.array(np.nan)
            # the exponential of a larger number is not a frequency
            if not (np.abs(alpha) < 30).all():
                got = alpha.tolist() if alpha.ndim else f"the shape {[*entry.shape]}"
                requirement = f"{names[0]}, with a float below 30 for each of {pairs} pairs"
                raise refusal("learned", folder=folder, name=requirement, got=got)
            if rope.softmax_factor != 1:
                raise refusal("learned_softmax", block=model.blocks.top.path)
            rope = with_inv_freq(rope, (rope.inv_freq * np.exp(alpha)).tolist())
        same_ropes = (name for name in ropes if name.split()[0] == kind and ropes[name] == rope)
        order.append(next(same_ropes, f"{kind} {i}" if kind in ropes else kind))
        ropes[order[-1]] = rope
    return tuple(order), ropes
