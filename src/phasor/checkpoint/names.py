"""Which part of a model a tensor is, by its name: queries, keys, both, their scales, or neither."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib import resources
from typing import Any, Literal

from phasor._checks import shown
from phasor.errors import CheckpointError

Role = Literal["query", "key", "latent key", "blocks", "groups", "fused", "vectors"]

_MODULES: dict[Role, str] = {
    "query": "q_proj|wq|query|q_b_proj|wq_b",
    "key": "k_proj|wk|key",
    "latent key": "kv_a_proj_with_mqa|wkv_a_with_mqa|wkv_a",
    "fused": "qkv_proj|query_key_value|[Ww]qkv|qkv|c_attn",
    "vectors": r"(?:q|k|query|key)_(?:norm|layernorm)(?:\.norms\.\d+)?",
}
_ALL_MODULES = "|".join(_MODULES.values())
# towers for pictures and sound have rotations of their own, so every word before the layers counts
_OUTSIDE = (
    "model|base_model|language_model|text_model|transformer|backbone_model|encoder|decoder|mtp|"
    "bert|new|esm|roformer|gpt_neox|gpt_neox_japanese"
)
_INSIDE = re.compile(
    rf"(?P<outside>(?:(?:{_OUTSIDE})\.)*)(?:layers|layer|h|blocks)\.(?P<layer>[0-9]{{1,9}})\."
    r"(?:self_attn|self_attention|attention|attn)(?:\.(?:self|attention|\d+))?\."
    rf"(?P<module>{_ALL_MODULES})\.(?P<suffix>.+)"
)
_ALIKE = re.compile(rf"(?:.*\.)?(?:{_ALL_MODULES})\..+")
_LAYER = re.compile(r"(?:.*\.)?(?:layers|layer|h|blocks)\.(?P<layer>[0-9]{1,9})\..*")
# the value projection beside a key projection
VALUE_OF = {"k_proj": "v_proj", "wk": "wv", "key": "value"}


@dataclass(frozen=True, slots=True)
class Part:
    """What the name of a tensor says.

    Attributes:
        role: What its rows are; ``vectors`` has heads on its last axis instead.
        layer: The layer, if the name has one.
        module: The word for the projection; empty where a pattern named the whole tensor.
        suffix: What follows it.
        extra: Whether the layer belongs to a module for several tokens at a time, which counts
            its layers anew.
    """

    role: Role
    layer: int | None
    module: str = ""
    suffix: str = ""
    extra: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Patterns:
    """Regular expressions that match whole names of tensors, in place of what phasor knows.

    Args:
        query: Projections of queries, or their biases: heads on the first axis.
        key: Projections of keys.
        blocks: Fused projections, all queries before all keys before all values.
        groups: Fused projections, for each key head its queries, the key, the value.
        vectors: Heads on the last axis: scales of a QK-norm, cached keys.
    """

    query: tuple[str, ...] = ()
    key: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    vectors: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for role, pattern in self.each():
            try:
                re.compile(pattern)
            except (re.error, OverflowError, RecursionError) as error:
                raise CheckpointError(
                    f"{role} must be a regular expression, got {shown(pattern)}: {error}"
                ) from None

    def each(self) -> list[tuple[Any, str]]:
        """Every pattern with its role."""
        return [
            (field.name, pattern) for field in fields(self) for pattern in getattr(self, field.name)
        ]

    def part(self, name: str) -> Part | None:
        """What the patterns say about the tensor ``name``."""
        roles = {role for role, pattern in self.each() if re.fullmatch(pattern, name)}
        if not roles:
            return None
        if len(roles) > 1:
            raise CheckpointError(
                f"{shown(name)} must match patterns of one kind, got {', '.join(sorted(roles))}"
            )
        layered = _LAYER.fullmatch(name)
        return Part(roles.pop(), int(layered["layer"]) if layered else None)

    def unused(self, names: Iterable[str]) -> list[str]:
        """Patterns that match no tensor."""
        every = list(names)
        return [
            pattern
            for _, pattern in self.each()
            if not any(re.fullmatch(pattern, name) for name in every)
        ]


def known_part(name: str) -> Part | None:
    """What a tensor is by the names that model classes use; None where it is no such thing.

    >>> known_part("model.layers.3.self_attn.q_proj.weight").role
    'query'
    >>> known_part("vision_tower.layers.3.self_attn.q_proj.weight") is None
    True
    """
    found = _INSIDE.fullmatch(name)
    if found is None:
        return None
    module = found["module"]
    roles: list[Role] = [r for r, words in _MODULES.items() if re.fullmatch(words, module)]
    return Part(roles[0], int(found["layer"]), module, found["suffix"], "mtp." in found["outside"])


def looks_alike(name: str) -> bool:
    """Whether a name has the word of a query or key projection, wherever it stands."""
    return _ALIKE.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class Projections:
    """``projections.toml``, for one model type."""

    fused: Literal["blocks", "groups"] | None = None
    gated: bool = False
    varied: bool = False


PLAIN = Projections()


def projections(model_type: str | None) -> Projections:
    """What the table says about a model type.

    Raises:
        CheckpointError: If its queries and keys cannot be re-ordered on their own.
    """
    plain = _table()
    if model_type in plain["refused"]:
        raise CheckpointError(
            f"checkpoints of the model type {model_type} cannot be converted: "
            f"{plain['refused'][model_type]}"
        )
    types = plain["types"]
    return Projections(
        plain["fused"].get(model_type), model_type in types["gated"], model_type in types["varied"]
    )


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    return tomllib.loads(resources.files("phasor").joinpath("projections.toml").read_text("utf-8"))
