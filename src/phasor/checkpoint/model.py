"""What a conversion knows of a model beside its tensors: a config's word, or a rope by hand."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from phasor.checkpoint.names import PLAIN, Part, Projections, projections
from phasor.configs import language_models, load, read_source
from phasor.configs.facts import table
from phasor.errors import CheckpointError
from phasor.layers import LayerRopes
from phasor.pairings import Pairing
from phasor.rope import Rope

_LATENT = "qk_rope_head_dim"


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A model as a conversion sees it.

    Attributes:
        ropes: The rope of each layer, or one for all.
        model_type: Its type, if a config gave one.
        query_heads: Query heads of a layer, if known.
        latent: Whether heads are ``[without position | with position]`` and the key that is rotated
            ends the projection to the latent vector (DeepSeek's multi-head latent attention).
        table: What `projections` says.
        block_rows: Rows that share a scale in a quantised weight, if the config says so.
        switch: Key of the config that, when false, makes the model rotate halves.
        shared: How many of the last layers have no keys of their own and use an earlier layer's.
    """

    ropes: LayerRopes | Rope
    model_type: str | None = None
    query_heads: int | None = None
    latent: bool = False
    table: Projections = PLAIN
    block_rows: int | None = None
    switch: str | None = None
    shared: int = 0

    @property
    def pairing(self) -> Pairing | None:
        """The pairing that the model's code reads; None where layers differ or none rotates."""
        if isinstance(self.ropes, Rope):
            return self.ropes.pairing
        read: list[Pairing] = [rope.pairing for rope in self.ropes.ropes]
        return read[0] if len(set(read)) == 1 else None

    def borrows_keys(self, part: Part) -> bool:
        """Whether a tensor belongs to a layer that uses the keys of an earlier one."""
        if isinstance(self.ropes, Rope) or part.layer is None or part.extra:
            return False
        return part.layer >= len(self.ropes) - self.shared

    def rope_of(self, name: str, part: Part) -> Rope | None:
        """The rope that turns a tensor; None in a layer that has none.

        Raises:
            CheckpointError: If the name does not say which of several ropes it is.
        """
        if isinstance(self.ropes, Rope):
            return self.ropes
        if part.layer is not None and part.layer < len(self.ropes) and not part.extra:
            return self.ropes[part.layer]
        # layers for predicting several tokens stand after or beside the others
        if len(self.ropes.ropes) == 1:
            return self.ropes.ropes[0]
        raise CheckpointError(
            f"{name!r} is in none of the {len(self.ropes)} layers that the config describes, whose "
            "ropes differ; convert it on its own, with a Rope and patterns"
        )


def describe(
    model: str | os.PathLike[str] | Mapping[str, Any] | Rope,
    *,
    like: str | None = None,
    strict: bool = True,
) -> Model:
    """The model that a config file, its dictionary or a rope describes.

    Args:
        model: What describes it.
        like: A known model type to read an unknown one as.
        strict: Whether keys are refused that ask for something else than the model's class does.

    Raises:
        ConfigError: If the config cannot be read.
        CheckpointError: If the order of such a model's tensors cannot be changed.
    """
    if isinstance(model, Rope):
        return Model(ropes=model)
    levels = [block.values for block in language_models(read_source(model))]
    top, config = levels[0], levels[-1]
    ropes = load(top, like=like, strict=strict)
    model_type = like or next(
        (one["model_type"] for one in reversed(levels) if one.get("model_type")), None
    )
    if config.get("rotary_value"):
        raise CheckpointError("rotary_value is true, so values are rotated too: not converted")
    architecture = table().huggingface.get(model_type) if model_type is not None else None
    is_latent = architecture is not None and architecture.latent
    return Model(
        ropes=ropes,
        model_type=model_type,
        query_heads=ropes.query_heads,
        latent=is_latent or (architecture is None and config.get(_LATENT) is not None),
        table=projections(model_type),
        block_rows=_block_rows(top) or _block_rows(config),
        switch=None if architecture is None else architecture.pairing_key,
        shared=_positive(config.get("num_kv_shared_layers")) or 0,
    )


def _block_rows(config: Mapping[str, Any]) -> int | None:
    """Rows of a block of a weight quantised in blocks."""
    quantised = config.get("quantization_config")
    if not isinstance(quantised, Mapping):
        return None
    size = cast(Mapping[str, Any], quantised).get("weight_block_size")
    if not isinstance(size, list) or not size:
        return None
    return _positive(cast(list[object], size)[0])


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
