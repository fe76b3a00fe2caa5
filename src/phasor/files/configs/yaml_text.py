"""YAML as the plain values of JSON, by version 1.2 of YAML: ``1e6`` is a number, ``no`` a text.

Read with ruamel.yaml, which makes no objects here: a node with a tag of a program's own, such as
``!!python/name``, stays the text of its tag, which no reader of numbers accepts.
"""

from __future__ import annotations

from typing import Any, cast

from phasor._checks import first_repeated, short_repr
from phasor.errors import ConfigError, install_hint

SIZE_LIMIT = 2**20  # far above any config's, and some seconds to read
_MOST_VALUES = (
    20_000  # aliases written out; a chain of them may stand for more than fits the memory
)
_STANDARD = "tag:yaml.org,2002:"


def parse_yaml(data: bytes, origin: str) -> dict[str, Any]:
    """The one document of a file; a `ConfigError` for anything but an object of plain values."""
    try:
        from ruamel.yaml import YAML
        from ruamel.yaml.error import YAMLError
    except ImportError:
        what = "is YAML, which is read with the ruamel.yaml package"
        raise ConfigError(f"{origin} {what}: {install_hint('yaml')}") from None
    if len(data) > SIZE_LIMIT:
        raise ConfigError(f"{origin} is larger than {SIZE_LIMIT // 2**20} MiB, which no config is")
    try:
        documents = list(YAML(typ="safe", pure=True).compose_all(data.decode("utf-8-sig")))
        if len(documents) != 1:
            what = f"must hold one YAML document, got {len(documents)}"
            raise ConfigError(f"{origin} {what}; give that of the model in a file of its own")
        value = _Reader(origin).read(documents[0])
    except UnicodeDecodeError as problem:
        raise ConfigError(f"{origin} must be UTF-8 text, got {problem}") from None
    except RecursionError:
        raise ConfigError(f"{origin} is nested too deeply") from None
    # a parser of numbers finds faults of its own
    except (YAMLError, ValueError, ArithmeticError) as problem:
        if isinstance(problem, ConfigError):
            raise
        raise ConfigError(f"{origin} must be YAML: {' '.join(str(problem).split())}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{origin} must hold an object of keys, got {short_repr(value)}")
    return cast("dict[str, Any]", value)


class _Reader:
    """The values of a graph of nodes, in which an alias is the node that it names."""

    def __init__(self, origin: str) -> None:
        self.origin, self.count = origin, 0
        self.inside: set[int] = set()

    def read(self, node: Any) -> Any:
        self.count += 1
        if self.count > _MOST_VALUES or id(node) in self.inside:
            what = "repeats itself by its aliases without end"
            if id(node) not in self.inside:
                what = f"holds more than {_MOST_VALUES} values, which no config does"
            raise ConfigError(f"{self.origin} {what}")
        tag, value = str(node.tag), node.value
        kind = tag.removeprefix(_STANDARD)
        if kind not in ("null", "bool", "int", "float", "str", "timestamp", "seq", "map", "value"):
            return f"{node.tag}"
        if isinstance(value, str):
            return _scalar(kind, value)
        self.inside.add(id(node))
        read = self._map(value) if kind == "map" else [self.read(item) for item in value]
        self.inside.discard(id(node))
        return read

    def _map(self, pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        own: list[tuple[str, Any]] = []
        for key, value in pairs:
            if str(key.tag) == f"{_STANDARD}merge":
                found = self.read(value)
                for other in cast("list[Any]", found if isinstance(found, list) else [found]):
                    if not isinstance(other, dict):
                        got = short_repr(other)
                        raise ConfigError(f"{self.origin}: << must name objects, got {got}")
                    merged = cast("dict[str, Any]", other) | merged
            elif not isinstance(key.value, str):
                raise ConfigError(f"{self.origin}: keys must be texts, got {key.tag}")
            else:
                own.append((key.value, self.read(value)))
        if (repeated := first_repeated(own)) is not None:
            what = f"the key {short_repr(repeated)} stands twice in one object; keep one"
            raise ConfigError(f"{self.origin}: {what}")
        return merged | dict(own)


def _scalar(kind: str, text: str) -> Any:
    """The value of a plain text; that of a ``timestamp`` stays a text."""
    digits = text.replace("_", "").lower()
    match kind:
        case "null":
            return None
        case "bool":
            return digits in ("true", "yes", "on")  # as a file says that it is YAML 1.1
        case "int":
            # 017 is decimal since YAML 1.2
            return int(digits, 0) if digits.lstrip("+-")[:2] in ("0x", "0o", "0b") else int(digits)
        case "float":
            return float(digits.replace(".inf", "inf").replace(".nan", "nan"))
        case _:
            return text
