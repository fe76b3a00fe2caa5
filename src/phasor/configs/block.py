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

_NONE: Mapping[str, Any] = MappingProxyType({})
_WHOLE_LIMIT = 2**63 - 1
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
        names: Names = _NONE,
        nulls: Mapping[str, Any] = _NONE,
    ) -> None:
        self.values = values
        self.path = path
        self._names = names
        self._nulls = nulls
        self._read: set[str] = set()

    def name(self, key: str) -> str:
        """The path of ``key`` under the name it has in this file."""
        names = self._aliases(key)
        return self.place(next((name for name in names if self._at(name) is not None), names[0]))

    def place(self, key: str) -> str:
        """The path of the key that is literally called ``key``."""
        return f"{self.path}.{key}" if self.path else key

    def has(self, key: str) -> bool:
        """Whether ``key`` is there and not null."""
        return any(self._at(name) is not None for name in self._aliases(key))

    def states(self, key: str) -> bool:
        """Whether ``key`` is there, null or not."""
        return any(name in self.values for name in self._aliases(key))

    def assume(self, values: Mapping[str, Any]) -> None:
        """Add ``values`` where the file has none."""
        self.values = {
            **{self._aliases(key)[0]: value for key, value in values.items()},
            **self.values,
        }

    def ignore(self, *keys: str) -> None:
        """Count ``keys`` as read, although their values do not matter."""
        self._read.update(keys)

    def unread(self) -> dict[str, Any]:
        """The keys that were not read, with their values; nulls are left out."""
        return {k: v for k, v in self.values.items() if v is not None and k not in self._read}

    def refuse(self, key: str, expected: str) -> NoReturn:
        """Raise the error about the value of ``key``."""
        raise ConfigError(f"{self.name(key)} must be {expected}, got {short_repr(self._get(key))}")

    def _at(self, path: str) -> Any:
        """The value at ``path``, a key or keys joined by dots; None if there is none."""
        if path in self.values:
            return self.values[path]
        head, dot, rest = path.partition(".")
        inner = self.values.get(head)
        if not dot or not isinstance(inner, Mapping):
            return None
        return Block(cast(Mapping[str, Any], inner))._at(rest)

    def _aliases(self, key: str) -> tuple[str, ...]:
        """The names that this file may have for ``key``."""
        return self._names.get(key, (key,))

    def _get(self, key: str) -> Any:
        """The value of ``key`` under any of its names, which counts them as read."""
        names = self._aliases(key)
        self._read.update(names, (name.partition(".")[0] for name in names))
        value = single_value((self.place(name), self._at(name)) for name in names)
        if value is None and key in self._nulls and self.states(key):
            return self._nulls[key]
        return value

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

    def largest(self, key: str) -> int | None:
        """The whole number at ``key``, or the largest of a list with one for each layer."""
        if isinstance(self._get(key), (list, tuple)):
            return max(self.wholes(key) or (0,)) or None
        return self.whole(key)

    def _of_type(self, key: str, types: Any, expected: str) -> Any:
        """The value at ``key``, refused unless it is of one of the types."""
        value = self._get(key)
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
        return self._each(key, Block.text)

    def wholes(self, key: str, *, least: int = 0) -> tuple[int, ...] | None:
        """The list of whole numbers at ``key``."""
        return self._each(key, lambda item, i: item.whole(i, least=least))

    def numbers(self, key: str, *, above: float) -> tuple[float, ...] | None:
        """The list of finite numbers at ``key``."""
        return self._each(key, lambda item, i: item.number(i, above=above))

    def _each(self, key: str, read: Callable[[Block, str], _T | None]) -> tuple[_T, ...] | None:
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
    """The value that all keys agree on; those without a value (None) do not count.

    Args:
        named_values: The name of each key, for the error, and its value.

    Raises:
        ConfigError: If two values differ.
    """
    present = [(name, value) for name, value in named_values if value is not None]
    if not present:
        return None
    first_name, first = present[0]
    for name, value in present[1:]:
        if value != first:
            raise ConfigError(
                f"{first_name} says {short_repr(first)} and {name} says {short_repr(value)}: "
                "they must agree; remove the wrong one"
            )
    return first


def head_width(block: Block, key: str, quotient: str, width: int, heads: int) -> int:
    """The width of one of so many heads, for a file without ``key``, which would say it.

    Raises:
        ConfigError: If ``quotient``, which says what is divided, is no width that a Rope can have.
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


@contextmanager
def renamed_keys(block: Block, names: Mapping[str, str]) -> Generator[None]:
    """Turn a SpecError about a field into a ConfigError about the file's key for it."""
    try:
        yield
    except SpecError as error:
        first = str(error).split(" ", 1)[0].split("[", 1)[0]
        where = block.name(names[first]) if first in names else block.path or "the config"
        raise ConfigError(f"{where} cannot be used: {error}") from None
