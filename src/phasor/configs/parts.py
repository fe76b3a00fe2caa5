"""Which config inside a file describes which part of a model, and of what type that part is."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import cast

from phasor._checks import shown
from phasor.configs.block import Block
from phasor.configs.facts import table
from phasor.configs.laws import comparable
from phasor.errors import ConfigError

#: Keys under which the config of a larger model holds that of its language model.
NESTED = (
    "text_config",
    "llm_config",
    "language_config",
    "language_model_config",
    "language",
    "lm_config",
    "thinker_config",
    "decoder_config",
    "decoder",
)
_UNKNOWN = (
    "if its code rotates as a known type's does, read it as that one: load(..., like='llama'), "
    "on the command line --like llama; else describe its embedding with phasor.Rope(...)"
)


def language_models(top: Block) -> list[Block]:
    """``top`` and each config inside it that describes its language model, the innermost last.

    Raises:
        ConfigError: If two of one level do, or one is no object.
    """
    found = [top]
    while inner := [key for key in NESTED if found[-1].has(key)]:
        outer = found[-1]
        if len(inner) > 1:
            raise ConfigError(
                f"{outer.name(inner[0])} and {outer.name(inner[1])} both describe a language "
                f"model; name the one you mean: load(..., part={inner[0]!r})"
            )
        found.append(cast(Block, outer.block(inner[0])))
    return found


def described(top: Block, part: str | None, like: str | None) -> tuple[list[Block], str]:
    """The configs on the way to the part that is meant, the innermost last, and its model type.

    Args:
        top: The file.
        part: Its key, dotted where it lies deeper; None for the language model.
        like: A model type to take instead of the file's own.

    Raises:
        ConfigError: If there is no such part, or its type is absent or unknown.
    """
    levels = language_models(top) if part is None else [*_way(top, part)]
    for outer, inner in pairwise(levels):
        if part is None:
            _agree_with_outer(outer, inner)
    known = table().huggingface
    name = _type_of(levels)
    if like is not None:
        if like not in known:
            raise ConfigError(
                f"like must be a model type that phasor knows (phasor.configs.model_types() lists "
                f"them), got {shown(like)}"
            )
        return levels, like
    where = levels[-1].name("model_type")
    if name is None:
        raise ConfigError(
            f"{where} is absent, and without it the pairing of coordinates is unknown; add it; "
            f"{_UNKNOWN}"
        )
    if name not in known:
        raise ConfigError(
            f"{where} must be one that phasor knows (phasor.configs.model_types() lists them), "
            f"got {shown(name)}; {_UNKNOWN}"
        )
    return levels, name


def _way(top: Block, part: str) -> list[Block]:
    levels = [top]
    for key in part.split("."):
        if not isinstance(levels[-1].values.get(key), Mapping):
            inner = [k for k, v in levels[-1].values.items() if isinstance(v, Mapping)]
            raise ConfigError(
                f"part must be the key of a config inside the file "
                f"({', '.join(inner) or 'it holds none'}), got {shown(part)}"
            )
        levels.append(cast(Block, levels[-1].block(key)))
    return levels


def _type_of(levels: list[Block]) -> str | None:
    """The innermost config's type: its own, what its outer class puts there, or the outer one."""
    said: str | None = None
    known = table().huggingface
    for i, level in enumerate(levels):
        key = level.path.rpartition(".")[2]
        outer = None if said is None or i == 0 else known.get(said)
        implied = None if outer is None else outer.parts.get(key)
        own = level.text("model_type")
        # classes of transformers write the type of the whole into its parts, too
        said = implied if implied is not None and own in (None, said) else own or said
    return said


def _agree_with_outer(outer: Block, inner: Block) -> None:
    for key in ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor"):
        if outer.has(key):
            said = [comparable(block.values.get(key)) for block in (outer, inner)]
            if said[0] != said[1]:
                raise ConfigError(
                    f"{outer.name(key)} and {inner.name(key)} differ; the inner one counts, so "
                    "remove the outer one or make them agree"
                )
