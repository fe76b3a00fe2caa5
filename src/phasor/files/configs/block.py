"""One JSON object of a config file, read key by key.

`Block` knows the object's path, so that errors name a key as it is written in the file; the other
names that a model type has for a key; and which keys were read, so that the unread ones can be
noted or refused.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar, cast

from phasor._checks import number, short_repr, whole
from phasor.errors import ConfigError, SpecError
from phasor.rope import WIDEST

Names = Mapping[str, tuple[str, ...]]

_EMPTY: Mapping[str, Any] = MappingProxyType({})
_LARGEST = 2**63 - 1
_T = TypeVar("_T")


class Block:
    """A JSON object and its path inside the file.

    Args:
        values: The object.
        path: Dotted path of the object in its file; empty for the file itself.
        names: By key, the names that the file may have for it; ``a.b`` is key ``b`` of the object
            ``a``. A key that is not in here has only its own name.
        nulls: By key, the value that an explicit null stands for. For other keys null counts as
            absent.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        path: str = "",
        *,
        names: Names = _EMPTY,
        nulls: Mapping[str, Any] = _EMPTY,
    ) -> None:
        self.values, self.path = values, path
        self._names, self._nulls = names, nulls
        self._keys_read: set[str] = set()

    def name(self, key: str) -> str:
        """The path of ``key`` under the name that it has in this file."""
        names = self._aliases(key)
        return self.path_of(next((n for n in names if self._find(n) is not None), names[0]))

    def path_of(self, name: str) -> str:
        """The path of the key with this name in the file."""
        return f"{self.path}.{name}" if self.path else name

    def has(self, key: str) -> bool:
        """Whether the file has ``key`` with a value other than null."""
        return any(self._find(name) is not None for name in self._aliases(key))

    def contains(self, key: str) -> bool:
        """Whether the file has ``key``, even with null."""
        return any(name in self.values for name in self._aliases(key))

    def add_defaults(self, values: Mapping[str, Any]) -> None:
        """Add ``values`` for keys that the file does not have."""
        self.values = {self._aliases(key)[0]: v for key, v in values.items()} | {**self.values}

    def ignore(self, *keys: str) -> None:
        """Count ``keys`` as read, because their values do not matter."""
        self._keys_read.update(keys)

    def unread(self) -> dict[str, Any]:
        """The keys that were not read, with their values; nulls are left out."""
        return {k: v for k, v in self.values.items() if v is not None and k not in self._keys_read}

    def unread_objects(self) -> list[Block]:
        """The objects at keys that were not read, or of which only single keys were."""
        objects: list[Block] = []
        for key, value in self.values.items():
            read = [n[len(key) + 1 :] for n in self._keys_read if n.startswith(f"{key}.")]
            if isinstance(value, Mapping) and (read or key not in self._keys_read):
                values = {str(inner): v for inner, v in cast(Mapping[Any, Any], value).items()}
                objects.append(Block(values, self.path_of(key)))
                objects[-1].ignore(*read)
        return objects

    def refuse(self, key: str, expected: str) -> NoReturn:
        """Raise the error about the value of ``key``."""
        raise ConfigError(f"{self.name(key)} must be {expected}, got {short_repr(self._read(key))}")

    def _find(self, path: str) -> Any:
        """The value at ``path``, a key or keys joined by dots; None if there is none."""
        if path in self.values:
            return self.values[path]
        head, dot, rest = path.partition(".")
        inner = self.values.get(head)
        if not dot or not isinstance(inner, Mapping):
            return None
        return Block(cast(Mapping[str, Any], inner))._find(rest)

    def _aliases(self, key: str) -> tuple[str, ...]:
        """The names that this file may have for ``key``."""
        return self._names.get(key, (key,))

    def _read(self, key: str) -> Any:
        """The value of ``key`` under any of its names, which then count as read."""
        names = self._aliases(key)
        self._keys_read.update(names, (name.partition(".")[0] for name in names))
        value = single_value((self.path_of(name), self._find(name)) for name in names)
        if value is None and key in self._nulls and self.contains(key):
            return self._nulls[key]
        return value

    def number(
        self, key: str, *, above: float | None = None, least: float | None = None
    ) -> float | None:
        """The finite number at ``key``."""
        value = self._read(key)
        if value is None:
            return None
        return number(self.name(key), value, above=above, least=least, error=ConfigError)

    def whole(self, key: str, *, least: int = 1, most: int = _LARGEST) -> int | None:
        """The whole number at ``key``; ``64.0`` is one too, as some programs write it."""
        value = self._read(key)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        return whole(self.name(key), value, least=least, most=most, error=ConfigError)

    def largest(self, key: str) -> int | None:
        """The whole number at ``key``, or the largest of a list with one for each layer."""
        if isinstance(self._read(key), (list, tuple)):
            return max(self.wholes(key) or (0,)) or None
        return self.whole(key)

    def _of_type(self, key: str, types: Any, expected: str) -> Any:
        """The value at ``key``; refused if it has none of the types."""
        value = self._read(key)
        if value is not None and not isinstance(value, types):
            self.refuse(key, expected)
        return value

    def flag(self, key: str) -> bool | None:
        """The true or false at ``key``."""
        return self._of_type(key, bool, "true or false")

    def text(self, key: str) -> str | None:
        """The string at ``key``."""
        return self._of_type(key, str, "a string")

    def block(self, key: str) -> Block | None:
        """The object at ``key``."""
        values = self._of_type(key, Mapping, "an object")
        return None if values is None else Block(values, self.name(key))

    def items(self, key: str) -> tuple[Any, ...] | None:
        """The list at ``key``, its items unchecked."""
        items = self._of_type(key, (list, tuple), "a list")
        return None if items is None else tuple(items)

    def texts(self, key: str) -> tuple[str, ...] | None:
        """The list of strings at ``key``."""
        return self._read_items(key, Block.text)

    def wholes(self, key: str, *, least: int = 0) -> tuple[int, ...] | None:
        """The list of whole numbers at ``key``."""
        return self._read_items(key, lambda item, i: item.whole(i, least=least))

    def numbers_per_pair(self, key: str, pairs: int) -> tuple[float, ...] | None:
        """The list of positive numbers at ``key``, one for each pair."""
        numbers = self._read_items(key, lambda item, i: item.number(i, above=0))
        if numbers is not None and len(numbers) != pairs:
            raise ConfigError(
                f"{self.name(key)} must hold one number per pair ({pairs}), got {len(numbers)}"
            )
        return numbers

    def _read_items(
        self, key: str, read: Callable[[Block, str], _T | None]
    ) -> tuple[_T, ...] | None:
        items = self.items(key)
        if items is None:
            return None
        # a block whose keys are the indices, so that errors name the item
        by_index = Block({str(i): item for i, item in enumerate(items)}, self.name(key))
        values = tuple(read(by_index, i) for i in by_index.values)
        if None in values:
            raise ConfigError(f"{by_index.name(str(values.index(None)))} must not be null")
        return cast(tuple[_T, ...], values)


def single_value(named_values: Iterable[tuple[str, _T | None]]) -> _T | None:
    """The one value of several keys, given with their names; None is no value.

    Raises:
        ConfigError: If two values differ.
    """
    present = [(name, value) for name, value in named_values if value is not None]
    for name, value in present[1:]:
        first_name, first = present[0]
        if value != first:
            raise ConfigError(
                f"{first_name} says {short_repr(first)} and {name} says {short_repr(value)}: "
                "they must agree; remove the wrong one"
            )
    return present[0][1] if present else None


def head_width(block: Block, key: str, quotient: str, width: int, heads: int) -> int:
    """The width of a head, ``width / heads``, for a file without ``key``.

    Raises:
        ConfigError: If no Rope can have that width; ``quotient`` names the two keys.
    """
    if width % heads or not 2 <= width // heads <= WIDEST:
        raise ConfigError(
            f"{block.name(key)} is absent, and {quotient} ({width} / {heads}) must be a whole "
            f"number from 2 to {WIDEST}; add it"
        )
    return width // heads


def require(block: Block, key: str, value: _T | None) -> _T:
    """``value``; if it is None, raise the error that ``key`` is absent."""
    if value is None:
        raise ConfigError(f"{block.name(key)} is absent; add it, as the model's authors give it")
    return value


def or_default(
    block: Block, key: str, value: float | None, default: float | None, whose: str, notes: list[str]
) -> float:
    """``value``; if it is None, the default, with a note that says ``whose`` it is."""
    if value is not None:
        return value
    default = require(block, key, default)
    notes.append(f"The file has no {block.name(key)}; {default:g} is {whose}.")
    return default


@contextmanager
def renamed_keys(block: Block, names: Mapping[str, str]) -> Generator[None]:
    """Turn a SpecError about a field of a Rope or law into a ConfigError about the file's key."""
    try:
        yield
    except SpecError as error:
        first = str(error).split(" ", 1)[0].split("[", 1)[0]
        where = block.name(names[first]) if first in names else block.path or "the config"
        raise ConfigError(f"{where} cannot be used: {error}") from None
