"""What every law asks of a config: its model, its contexts, and errors in its author's words."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from phasor.configs._reading import Block, agreed
from phasor.configs._table import Architecture
from phasor.errors import ConfigError, SpecError

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Model:
    """What a law wants to know from outside its block.

    Attributes:
        architecture: The facts of the model class.
        rotary_dim: Rotated coordinates.
        context: ``max_position_embeddings``, if the file gives it.
        original: Its top-level ``original_max_position_embeddings``, with the key's name.
    """

    architecture: Architecture
    rotary_dim: int
    context: int | None
    original: tuple[str, int | None]


@contextmanager
def renamed(block: Block, names: Mapping[str, str]) -> Generator[None]:
    """Turn a SpecError into a ConfigError that names the foreign key behind the field."""
    try:
        yield
    except SpecError as error:
        first = str(error).split(" ", 1)[0].split("[", 1)[0]
        where = block.name(names[first]) if first in names else block.path or "the config"
        raise ConfigError(f"{where} cannot be used: {error}") from None


def required(block: Block, key: str, value: _T | None) -> _T:
    """``value``, or the error that ``key`` is absent."""
    if value is None:
        raise ConfigError(f"{block.name(key)} is absent; add it, as the model's authors give it")
    return value


def original_length(block: Block, model: Model, *, or_context: bool) -> int:
    """The context before the extension, from the block or from beside it."""
    name, outside = model.original
    key = "original_max_position_embeddings"
    length = agreed([(block.name(key), block.whole(key)), (name, outside)])
    if length is None and or_context:
        length = model.context
    return required(block, key, length)


def extension_factor(block: Block, model: Model, original: int) -> float:
    """The block's factor, or the ratio of the two contexts where it gives none."""
    given = block.number("factor", above=0)
    if given is not None:
        return given
    stated = block.has("original_max_position_embeddings") or model.original[1] is not None
    if not stated or model.context is None:
        raise ConfigError(
            f"{block.name('factor')} is absent and cannot be derived; add it, or both "
            "original_max_position_embeddings and max_position_embeddings"
        )
    return model.context / original
