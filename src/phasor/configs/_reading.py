"""Files and dictionaries that others wrote: read once, checked key by key.

`Block` is a JSON object together with its path, so that every complaint names the key as the
file's author wrote it, and remembers which keys were asked for, so that what nobody understood
can be refused instead of ignored.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

from phasor._checks import number, shown, twice, whole
from phasor.errors import ConfigError

#: Keys under which the config of a larger model holds that of its language model.
NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
SIZE_LIMIT = 16 * 2**20
_NAMES = ("config.json", "params.json")
_WHOLE_LIMIT = 2**63 - 1
_T = TypeVar("_T")


class Block:
    """A JSON object and its path inside the file; a null is the same as no key.

    Args:
        values: The object.
        path: Dotted path of the object in its file; empty for the file itself.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self.values = values
        self.path = path
        self._asked: set[str] = set()

    def name(self, key: str) -> str:
        """``key`` with its path."""
        return f"{self.path}.{key}" if self.path else key

    def has(self, key: str) -> bool:
        """Whether ``key`` is there and not null."""
        return self.values.get(key) is not None

    def ignore(self, *keys: str) -> None:
        """Mark ``keys`` as understood, though nothing here depends on them."""
        self._asked.update(keys)

    def not_asked(self) -> list[str]:
        """Keys with a value that nobody has read."""
        return [k for k, v in self.values.items() if v is not None and k not in self._asked]

    def refuse(self, key: str, expected: str) -> NoReturn:
        """Raise the error about the value of ``key``."""
        came = shown(self.values.get(key))
        raise ConfigError(f"{self.name(key)} must be {expected}, got {came}")

    def _get(self, key: str) -> Any:
        self._asked.add(key)
        return self.values.get(key)

    def number(
        self, key: str, *, above: float | None = None, least: float | None = None
    ) -> float | None:
        """The finite number at ``key``."""
        value = self._get(key)
        if value is None:
            return None
        return number(self.name(key), value, above=above, least=least, error=ConfigError)

    def whole(self, key: str, *, least: int = 1, most: int = _WHOLE_LIMIT) -> int | None:
        """The whole number at ``key``; ``64.0`` is one too, as some programs write it."""
        value = self._get(key)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        return whole(self.name(key), value, least=least, most=most, error=ConfigError)

    def flag(self, key: str) -> bool | None:
        """The true or false at ``key``."""
        value = self._get(key)
        if value is not None and not isinstance(value, bool):
            self.refuse(key, "true or false")
        return value

    def text(self, key: str) -> str | None:
        """The string at ``key``."""
        value = self._get(key)
        if value is not None and not isinstance(value, str):
            self.refuse(key, "a string")
        return value

    def block(self, key: str) -> Block | None:
        """The object at ``key``."""
        value = self._get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            self.refuse(key, "an object")
        return Block(cast(Mapping[str, Any], value), self.name(key))

    def items(self, key: str) -> tuple[Any, ...] | None:
        """The list at ``key``, its items unchecked."""
        value = self._get(key)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)):
            self.refuse(key, "a list")
        return tuple(cast(Iterable[Any], value))

    def texts(self, key: str) -> tuple[str, ...] | None:
        """The list of strings at ``key``."""
        return self._each(key, Block.text)

    def wholes(self, key: str, *, least: int = 0) -> tuple[int, ...] | None:
        """The list of whole numbers at ``key``."""
        return self._each(key, lambda item, i: item.whole(i, least=least))

    def numbers(self, key: str, *, above: float) -> tuple[float, ...] | None:
        """The list of finite numbers at ``key``."""
        return self._each(key, lambda item, i: item.number(i, above=above))

    def _each(self, key: str, read: Callable[[Block, str], _T | None]) -> tuple[_T, ...] | None:
        given = self.items(key)
        if given is None:
            return None
        listed = Block({str(i): value for i, value in enumerate(given)}, self.name(key))
        read_items = tuple(read(listed, i) for i in listed.values)
        if None in read_items:
            raise ConfigError(f"{listed.name(str(read_items.index(None)))} must not be null")
        return cast(tuple[_T, ...], read_items)

    def first(self, keys: Iterable[str], read: Callable[[Block, str], _T | None]) -> _T | None:
        """What ``keys``, names of one thing, say; they must agree."""
        return agreed((self.name(key), read(self, key)) for key in keys)


def agreed(said: Iterable[tuple[str, _T | None]]) -> _T | None:
    """The one value that every key with a value gives.

    Raises:
        ConfigError: If two of them differ.
    """
    given = [(name, value) for name, value in said if value is not None]
    for name, value in given[1:]:
        if value != given[0][1]:
            raise ConfigError(
                f"{given[0][0]} says {shown(given[0][1])} and {name} says {shown(value)}: "
                "they must agree; remove the wrong one"
            )
    return given[0][1] if given else None


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
                "model; give the one you mean as a dictionary"
            )
        found.append(cast(Block, outer.block(inner[0])))
    return found


def read_source(source: object) -> Block:
    """The top-level object of a file, a directory that holds one, or a dictionary.

    Raises:
        ConfigError: If there is nothing to read, too much of it, or no JSON object.
    """
    if isinstance(source, Mapping):
        strays = [key for key in cast(Mapping[object, Any], source) if not isinstance(key, str)]
        if strays:
            raise ConfigError(f"keys must be strings, got {shown(strays[0])}")
        return Block(cast(Mapping[str, Any], source))
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(
            "source must be the path of a config file or directory, or the dictionary it holds, "
            f"got {shown(source)}"
        )
    try:
        path = Path(cast("str | os.PathLike[str]", source))
        if path.is_dir():
            path = _inside(path)
        if not path.is_file():
            raise ConfigError(f"{path} is not a file; give the path of a config.json")
        with path.open("rb") as stream:
            data = stream.read(SIZE_LIMIT + 1)
    except (OSError, ValueError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{shown(cast(object, source))} cannot be read: {error}") from None
    return Block(_parsed(data, path))


def _inside(directory: Path) -> Path:
    found = [directory / name for name in _NAMES if (directory / name).is_file()]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(
            f"{directory} holds both config.json and params.json, which describe differently "
            "paired weights; give the path of the one that belongs to your weights"
        )
    raise ConfigError(f"{directory} holds neither config.json nor params.json; name the file")


def _parsed(data: bytes, path: Path) -> dict[str, Any]:
    if len(data) > SIZE_LIMIT:
        raise ConfigError(
            f"{path} is larger than {SIZE_LIMIT // 2**20} MiB, which no config file is; "
            "give the config.json that lies beside the weights"
        )
    if data.startswith(b"GGUF"):
        raise ConfigError(
            f"{path} is a binary GGUF file; read its metadata with the gguf package and give them "
            'as a dictionary with the key "general.architecture"'
        )
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} must be UTF-8 text, got {error}") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply for a config file") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{path} must be JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {shown(value)}")
    return cast(dict[str, Any], value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if (key := twice(pairs)) is not None:
        raise ConfigError(f"the key {shown(key)} stands twice in one object; keep one")
    return dict(pairs)


def _refuse_constant(literal: str) -> NoReturn:
    raise ConfigError(f"{literal} is not a number that JSON knows; numbers must be finite")


def _finite(literal: str) -> float:
    value = float(literal)
    if not math.isfinite(value):
        raise ConfigError(f"{shown(literal)} is too large for a float")
    return value
