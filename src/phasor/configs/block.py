"""One JSON object of a foreign file, read key by key.

`Block` carries the object's path, so that every complaint names the key as the file's author wrote
it; the names that a model type has for a key; and which keys were read, so that what nobody
understood can be noted or refused instead of ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar, cast

from phasor._checks import number, shown, whole
from phasor.errors import ConfigError, SpecError

Names = Mapping[str, tuple[str, ...]]

_NONE: Mapping[str, Any] = MappingProxyType({})
_WHOLE_LIMIT = 2**63 - 1
_T = TypeVar("_T")


class Block:
    """A JSON object and its path inside the file.

    Args:
        values: The object.
        path: Dotted path of the object in its file; empty for the file itself.
        names: What the file calls a key, where it is not the key itself; ``a.b`` is key ``b`` of
            the object ``a``.
        nulls: What an explicit null stands for; elsewhere it is the same as no key.
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
        """``key`` with its path, as this file calls it."""
        called = self._names.get(key, (key,))
        return self.place(next((one for one in called if self._at(one) is not None), called[0]))

    def place(self, key: str) -> str:
        """The key that the file itself calls ``key``, with its path."""
        return f"{self.path}.{key}" if self.path else key

    def has(self, key: str) -> bool:
        """Whether ``key`` is there and not null."""
        return any(self._at(one) is not None for one in self._names.get(key, (key,)))

    def states(self, key: str) -> bool:
        """Whether ``key`` is there, null or not."""
        return any(one in self.values for one in self._names.get(key, (key,)))

    def assume(self, values: Mapping[str, Any]) -> None:
        """Go on as if the file said ``values`` as well."""
        self.values = {
            **{self._names.get(key, (key,))[0]: value for key, value in values.items()},
            **self.values,
        }

    def ignore(self, *keys: str) -> None:
        """Mark ``keys`` as understood, though nothing here depends on them."""
        self._read.update(keys)

    def unread(self) -> dict[str, Any]:
        """What stands in the file and was not asked for, nulls left out."""
        return {k: v for k, v in self.values.items() if v is not None and k not in self._read}

    def refuse(self, key: str, expected: str) -> NoReturn:
        """Raise the error about the value of ``key``."""
        raise ConfigError(f"{self.name(key)} must be {expected}, got {shown(self._get(key))}")

    def _at(self, path: str) -> Any:
        """What stands at ``path``, a key or the dotted way to one."""
        if path in self.values:
            return self.values[path]
        head, dot, rest = path.partition(".")
        inner = self.values.get(head)
        if not dot or not isinstance(inner, Mapping):
            return None
        return Block(cast(Mapping[str, Any], inner))._at(rest)

    def _get(self, key: str) -> Any:
        called = self._names.get(key, (key,))
        self._read.update(called, (one.partition(".")[0] for one in called))
        value = single_value((self.place(one), self._at(one)) for one in called)
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


def single_value(said: Iterable[tuple[str, _T | None]]) -> _T | None:
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


def required(block: Block, key: str, value: _T | None) -> _T:
    """``value``, or the error that ``key`` is absent."""
    if value is None:
        raise ConfigError(f"{block.name(key)} is absent; add it, as the model's authors give it")
    return value


@contextmanager
def renamed_keys(block: Block, names: Mapping[str, str]) -> Generator[None]:
    """Turn a SpecError into a ConfigError that names the foreign key behind the field."""
    try:
        yield
    except SpecError as error:
        first = str(error).split(" ", 1)[0].split("[", 1)[0]
        where = block.name(names[first]) if first in names else block.path or "the config"
        raise ConfigError(f"{where} cannot be used: {error}") from None
