"""The first stage: the contents of a config file, as a `JsonObject` that is read key by key.

A source is a file, a folder, standard input, a dictionary or a config object of transformers; of a
GGUF file it is the header. The object knows its path, so that errors name a key as it is written in
the file; the other names that a model type has for a key; and which keys were read, so that the
unread ones can be noted or refused.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, NoReturn, TypeVar, cast

from phasor._checks import find_name, number, whole
from phasor.errors import ConfigError, SpecError
from phasor.files import refusal
from phasor.files.budget import MOST_TEXT
from phasor.files.configs.facts import table
from phasor.files.gguf_header import read_gguf_header
from phasor.files.presets import preset_names
from phasor.files.texts import (
    Unclear,
    parse_arguments,
    parse_json,
    parse_yaml,
    refuse_stand_in,
)
from phasor.rope import WIDEST

_EMPTY: Mapping[str, Any] = MappingProxyType({})
_LARGEST = 2**63 - 1
# far above any model's, so that a damaged count cannot fill the memory
MOST_LAYERS = 100_000
_T = TypeVar("_T")


class JsonObject:
    """A JSON object at a dotted path of its file; the file itself has the empty one.

    ``names`` are those that the file may have for a key, where ``a.b`` is key ``b`` of the object
    ``a``; other keys have their own name alone. ``nulls`` maps keys to the meaning of an explicit
    null; elsewhere null counts as absent. ``origins`` maps a key that a rewrite (`rewrites`) put
    here to its place in the file. ``strict`` is whether unread keys are refused. ``notes`` are
    those of the ropes: what was assumed, ignored or taken from elsewhere.

    Its values never change; `with_values` returns another object.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        path: str = "",
        *,
        names: Mapping[str, Sequence[str]] = _EMPTY,
        nulls: Mapping[str, Any] = _EMPTY,
        origins: Mapping[str, str] = _EMPTY,
        strict: bool = True,
    ) -> None:
        self.values: Final = MappingProxyType(values)
        self.path, self.strict = path, strict
        self.notes: list[str] = []
        self._names, self._nulls, self._origins = names, nulls, origins
        self._read: set[str] = set()
        self.folder: Path | None = None  # the folder of the file, if a folder was given

    def name(self, key: str) -> str:
        """The path of ``key`` under the name that it has in this file."""
        return self.path_of([*self._present(key), *self._aliases(key), key][0])

    def path_of(self, name: str) -> str:
        """The path of the key with this name in the file."""
        return self._origins.get(name) or (f"{self.path}.{name}" if self.path else name)

    def has(self, key: str) -> bool:
        """Whether the file has ``key`` with a value other than null."""
        return bool(self._present(key))

    def contains(self, key: str) -> bool:
        """Whether the file has ``key``, even with null."""
        return any(name in self.values for name in self._aliases(key))

    def with_values(
        self, values: Mapping[str, Any], origins: Mapping[str, str] = _EMPTY
    ) -> JsonObject:
        """The object with other values, the same notes and the same record of keys that were read.

        ``origins`` maps each new key to the key of this object that it was made from; a dot joins
        a key inside an object to the object's key.
        """
        paths = {key: self.path_of(name) for key, name in origins.items()}
        copy = JsonObject(
            values,
            self.path,
            names=self._names,
            nulls=self._nulls,
            origins={**self._origins, **paths},
            strict=self.strict,
        )
        copy.notes, copy._read, copy.folder = self.notes, self._read, self.folder
        return copy

    def with_defaults(self, values: Mapping[str, Any]) -> JsonObject:
        """The object with ``values`` for keys that are absent from the file, or null."""
        added = {self._aliases(key)[0]: v for key, v in values.items() if not self.has(key)}
        return self.with_values({**self.values, **added}) if added else self

    def ignore(self, *keys: str) -> None:
        """Count ``keys`` as read, because their values do not matter."""
        self._read.update(keys)

    @property
    def keys_read(self) -> set[str]:
        """The keys that were read; a key inside an object also counts the object's key."""
        return self._read.union([n.partition(".")[0] for n in self._read if "." in n])

    def unread(self) -> dict[str, Any]:
        """The keys that were not read, with their values; nulls are left out."""
        read = self.keys_read
        return {k: v for k, v in self.values.items() if v is not None and k not in read}

    def unread_objects(self) -> list[JsonObject]:
        """The objects at keys that were not read, or that were read only in part."""
        objects: list[JsonObject] = []
        for key, value in self.values.items():
            if not isinstance(value, Mapping):
                continue
            read = [n[len(key) + 1 :] for n in self._read if n.startswith(f"{key}.")]
            if read or key not in self._read:
                values = {str(inner): v for inner, v in cast(Mapping[Any, Any], value).items()}
                objects.append(JsonObject(values, self.path_of(key)))
                objects[-1].ignore(*read)
        return objects

    def refuse(self, key: str, expected: str) -> NoReturn:
        """Raise the error about the value of ``key``."""
        raise refusal("value", key=self.name(key), expected=expected, got=self.value(key))

    def find(self, path: str) -> Any:
        """The value at ``path``, a key or keys joined by dots; None if there is none."""
        if "." not in path or path in self.values:
            return self.values.get(path)
        head, _, rest = path.partition(".")
        inner = self.values.get(head)
        is_inside = isinstance(inner, Mapping)
        return JsonObject(cast(Mapping[str, Any], inner)).find(rest) if is_inside else None

    def _aliases(self, key: str) -> Sequence[str]:
        """The names that this file may have for ``key``."""
        return self._names.get(key, (key,))

    def _present(self, key: str) -> list[str]:
        """The names of ``key`` that the file has, with values other than null."""
        return [name for name in self._aliases(key) if self.find(name) is not None]

    def value(self, key: str) -> Any:
        """The value of ``key`` under any of its names, which then count as read."""
        self._read.update(self._aliases(key))
        present = self._present(key)
        if len(present) > 1:
            return single_value((self.path_of(name), self.find(name)) for name in present)
        if present:
            return self.find(present[0])
        return self._nulls[key] if key in self._nulls and self.contains(key) else None

    def number(self, key: str, **bounds: float) -> float | None:
        """The finite number at ``key``, within the bounds ``above``, ``least`` and ``most``."""
        value = self.value(key)
        return None if value is None else number("", value, error=self._error(key), **bounds)

    def _error(self, key: str) -> Callable[[str], ConfigError]:
        return lambda says: ConfigError(f"{self.name(key)}{says}")  # the name is seldom needed

    def whole(self, key: str, *, least: int = 1, most: int = _LARGEST) -> int | None:
        """The whole number at ``key``; ``64.0`` is one too, as some programs write it."""
        if (value := self.value(key)) is None:
            return None
        value = int(value) if isinstance(value, float) and value.is_integer() else value
        return whole("", value, least=least, most=most, error=self._error(key))

    def largest(self, key: str) -> int | None:
        """The whole number at ``key``, or the largest of a list with one for each layer."""
        if isinstance(self.value(key), (list, tuple)):
            return max(self.wholes(key) or (0,)) or None
        return self.whole(key)

    def _typed_value(self, key: str, types: Any, expected: str) -> Any:
        """The value at ``key``; refused if it has none of the types."""
        value = self.value(key)
        if value is not None and not isinstance(value, types):
            self.refuse(key, expected)
        return value

    def flag(self, key: str) -> bool | None:
        """The true or false at ``key``."""
        value = self.value(key)
        if isinstance(value, Unclear) and value.is_on:
            return True
        if value is not None and not isinstance(value, bool):
            self.refuse(key, "true or false")
        return value

    def text(self, key: str, *words: str) -> str | None:
        """The string at ``key``, one of the ``words`` if there are any."""
        text = self._typed_value(key, str, "a string")
        if words and text not in (None, *words):
            self.refuse(key, f"one of {', '.join(words)}")
        return text

    def object(self, key: str, nulls: Mapping[str, Any] = _EMPTY) -> JsonObject | None:
        """The object at ``key``, in which explicit ``nulls`` stand for something."""
        values = self._typed_value(key, Mapping, "an object")
        if values is None:
            return None
        # the file's own names of the inner keys, if this object knows them
        start = f"{key}."
        inner_names = [name for name in self._origins if name.startswith(start)]
        origins = {name.removeprefix(start): self._origins[name] for name in inner_names}
        path, strict = self.name(key), self.strict
        return JsonObject(values, path, nulls=nulls, origins=origins, strict=strict)

    def items(self, key: str) -> tuple[Any, ...] | None:
        """The list at ``key``, its items unchecked."""
        items = self._typed_value(key, (list, tuple), "a list")
        return None if items is None else tuple(items)

    def texts(self, key: str) -> tuple[str, ...] | None:
        """The list of strings at ``key``."""
        return self._read_items(key, lambda item, i: item.text(i))

    def wholes(self, key: str, *, least: int = 0) -> tuple[int, ...] | None:
        """The list of whole numbers at ``key``."""
        return self._read_items(key, lambda item, i: item.whole(i, least=least))

    def numbers(self, key: str, *, above: float) -> tuple[float, ...] | None:
        """The list of numbers at ``key``."""
        return self._read_items(key, lambda item, i: item.number(i, above=above))

    def sign(self, key: str) -> Literal[1, -1]:
        """-1 if every number of the list at ``key`` is negative: such pairs turn clockwise."""
        value: Any = self.find(self._aliases(key)[0])
        items: list[Any] = [*value] if isinstance(value, (list, tuple)) else []
        negative = [item for item in items if isinstance(item, (int, float)) and item < 0]
        return -1 if items and len(negative) == len(items) else 1

    def numbers_per_pair(self, key: str, pairs: int) -> tuple[float, ...] | None:
        """The list of divisors at ``key``, one for each pair, without their `sign`."""
        sign, numbers = self.sign(key), self.items(key)
        if not all(type(item) is float and 0 < sign * item < math.inf for item in numbers or ()):
            # to name the item that is no number, or to make floats of ints
            bounds = {"above": 0.0} if sign > 0 else {}
            numbers = self._read_items(key, lambda item, i: item.number(i, **bounds))
        if numbers is not None and len(numbers) != pairs:
            raise refusal("per_pair", key=self.name(key), pairs=pairs, got=len(numbers))
        return numbers and tuple(sign * number for number in numbers)

    def _read_items(
        self, key: str, read: Callable[[JsonObject, str], _T | None]
    ) -> tuple[_T, ...] | None:
        items = self.items(key)
        if items is None:
            return None
        # a block whose keys are the indices, so that errors name the item
        items_by_index = JsonObject({str(i): item for i, item in enumerate(items)}, self.name(key))
        values = tuple(read(items_by_index, i) for i in items_by_index.values)
        if None in values:
            raise refusal("null", key=items_by_index.name(str(values.index(None))))
        return cast(tuple[_T, ...], values)

    def require(self, key: str, value: _T | None) -> _T:
        """``value`` of ``key``; if it is None, raise the error that ``key`` is absent."""
        if value is None:
            raise refusal("no_value", key=self.name(key))
        return value

    def or_default(
        self, key: str, value: float | None, default: float | None, source: str
    ) -> float:
        """``value`` of ``key``; if it is None, the default, with a note about its ``source``."""
        if value is not None:
            return value
        default = self.require(key, default)
        self.notes.append(f"The file has no {self.name(key)}; {default:g} is {source}.")
        return default

    def layers(self) -> int:
        """The number of layers."""
        key = "num_hidden_layers"
        return self.require(key, self.whole(key, most=MOST_LAYERS))

    def width(self, key: str, *, least: int = 2) -> int | None:
        """The number of coordinates at ``key``, of a head or a part of it."""
        return self.whole(key, least=least, most=WIDEST)

    def head_dim(self, key: str = "head_dim", default: int | None = None) -> int:
        """The width of a head at ``key``, else the default, else the hidden size by the heads.

        The default is for an absent key; with a null, classes divide the hidden size.
        """
        if (head_dim := self.width(key)) is not None:
            return head_dim
        if default is not None and not self.contains(key):
            return default
        width, heads = self.whole("hidden_size"), self.whole("num_attention_heads")
        names = {"key": self.name(key), "width_key": self.name("hidden_size")}
        names["heads_key"] = self.name("num_attention_heads")
        if width is None or heads is None:
            raise refusal("no_head_dim", **names)
        if width % heads or not 2 <= width // heads <= WIDEST:
            raise refusal("head_width", **names, got=f"{width} / {heads}", widest=WIDEST)
        return width // heads


def single_value(named_values: Iterable[tuple[str, _T | None]]) -> _T | None:
    """The one value of several keys, given with their names; None counts as absent."""
    present = [(name, value) for name, value in named_values if value is not None]
    for name, value in present[1:]:
        first_name, first = present[0]
        if value != first:
            raise refusal("two_values", first_name=first_name, first=first, name=name, value=value)
    return present[0][1] if present else None


#: transformers' keys for fields of Ropes, laws and axes whose name here is different.
KEYS = {
    "axes": "mrope_section",
    "base": "rope_theta",
    "fraction": "partial_rotary_factor",
    "long_factors": "long_factor",
    "original_max_positions": "original_max_position_embeddings",
    "rotary_dim": "partial_rotary_factor",
    "sections": "mrope_section",
    "short_factors": "short_factor",
}


@contextmanager
def renamed_keys(block: JsonObject, **keys: str) -> Generator[None]:
    """Turn a SpecError about a field of a Rope or law into a ConfigError about the file's key.

    ``keys`` has the keys of fields that differ from those in `KEYS`.
    """
    try:
        yield
    except SpecError as error:
        field, names = re.split(r"[ \[]", str(error))[0], {**KEYS, **keys}
        key = names.get(field, field)
        where = block.name(key) if field in names or block.has(key) else block.path or "the config"
        raise refusal("unusable", key=where, error=error) from None


# Files, folders and dictionaries.

_FILE_NAMES = ("config.json", "params.json")
_YAML = (".yaml", ".yml")
# a line that begins with a key without JSON's quotes, after empty lines, comments and the marker
# of a document, each of which ends with its line
_KEY_OF_YAML = rb"(\xef\xbb\xbf)?(?:[ \t\r]*+(?:#[^\n]*+)?\n|---\s)*+[A-Za-z_]\w*+:(\s|$)"


def read_source(source: object) -> JsonObject:
    """The contents of a file, a folder that holds one, ``-``, a dictionary or a config object."""
    # a config object of transformers: the dictionary it would save
    as_dict = getattr(source, "to_dict", None)
    if not isinstance(source, (type, Mapping)) and callable(as_dict):
        source = as_dict()
    if isinstance(source, Mapping):
        not_text = [key for key in cast(Mapping[object, Any], source) if not isinstance(key, str)]
        if not_text:
            raise refusal("keys", got=not_text[0])
        try:
            with suppress(RecursionError):  # deeper nesting is refused with the key
                json.dumps({**source}, default=lambda _: None, skipkeys=True)
        except ValueError:
            raise refusal("endless") from None
        return JsonObject(cast(Mapping[str, Any], source))
    if not isinstance(source, (str, os.PathLike)):
        raise refusal("source", source=source)
    source = cast("str | os.PathLike[str]", source)
    if source == "-":
        return _parse_config(sys.stdin.buffer.read(MOST_TEXT + 1), "standard input")
    try:
        path = Path(source)
        folder = path if path.is_dir() else None
        if folder is not None:
            path = _config_file_in(folder)
        # opening a pipe that has no writer would block for ever
        if not stat.S_ISREG(path.stat().st_mode):
            raise refusal("not_file", path=path, way_out="give the path of a config.json")
        with path.open("rb") as stream:
            data = stream.read(MOST_TEXT + 1)
    except FileNotFoundError:
        raise refusal("not_file", path=source, way_out=_suggest_source(str(source))) from None
    except (OSError, ValueError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise refusal("source_unreadable", source=source, error=error) from None
    if data.startswith(b"GGUF"):
        return JsonObject(read_gguf_header(path))
    if (other_format := table().files["other_files"].get(path.suffix)) is not None:
        raise refusal("other_file", path=path, what=other_format)
    refuse_stand_in(data, str(path), ConfigError)
    if path.suffix == ".gguf":
        raise refusal("no_gguf", path=path)
    config = _parse_config(data, str(path), path.suffix)
    config.folder = folder
    return config


def cached_config(repository: str) -> Path | None:
    """The config of a repository of the Hub in the local cache; nothing is downloaded."""
    try:
        from huggingface_hub import try_to_load_from_cache

        paths = [try_to_load_from_cache(repository, name) for name in _FILE_NAMES]
    except (ImportError, ValueError):  # or if no repository can have this name
        return None
    return next((Path(path) for path in paths if isinstance(path, str)), None)


def is_huggingface(config: JsonObject) -> bool:
    """Whether the file has a key that transformers writes and other programs do not."""
    # Megatron's arguments have an enumeration of this name
    is_megatron = str(config.values.get("model_type")).startswith("ModelType.")
    keys = ("architectures", "auto_map", *(() if is_megatron else ("model_type",)))
    return any(map(config.has, keys))


# the address of a repository of the Hub, or of a file in it
_HUB_ADDRESS = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)"
    r"(?:/(?:blob|resolve|raw|tree)/[^?#]*)?/?(?:[?#].*)?"
)


def hub_id(source: object) -> str | None:
    """The ``owner/name`` that ``source`` is, alone or in an address; None for anything else.

    >>> hub_id("https://huggingface.co/Qwen/Qwen3-8B/blob/main/config.json")
    'Qwen/Qwen3-8B'
    """
    if not isinstance(source, str) or source.startswith("."):
        return None
    if address := _HUB_ADDRESS.fullmatch(source):
        return address[1]
    is_id = re.fullmatch(r"[\w.-]+/[\w.-]+", source) and not Path(source).exists()
    return source if is_id else None


def _suggest_source(source: str) -> str:
    """What to do about a ``source`` that is no file."""
    if (name := find_name(source, preset_names())) is not None:
        return f"the preset of that name is phasor.preset({name!r})"
    if "://" in source:
        return "phasor downloads nothing: get the config.json yourself and pass its path"
    if hub_id(source) and not source.endswith((".json", ".gguf", *_YAML)):
        return (
            "if it is a repository of the Hugging Face Hub, its config is not in the local "
            f"cache: `hf download {source} config.json` (of huggingface_hub) fetches it"
        )
    return "give the path of a config.json"


def _config_file_in(folder: Path) -> Path:
    files = [folder / name for name in _FILE_NAMES if (folder / name).is_file()]
    if len(files) == 1:
        return files[0]
    if files:
        raise refusal("two_configs", folder=folder)
    for inner in (folder / name for name in table().files["file_names"]):
        if inner.is_file():
            return inner
    suffixes = (".json", ".gguf", *_YAML)
    file_names = sorted(path.name for path in folder.iterdir() if path.suffix in suffixes)
    listed = (
        f"; it holds {', '.join(file_names[:8])}: give the path of a config" if file_names else ""
    )
    raise refusal("no_config_file", folder=folder, found=listed)


def _parse_config(data: bytes, origin: str, suffix: str = "") -> JsonObject:
    if len(data) > MOST_TEXT:
        raise refusal("too_large", origin=origin, limit=MOST_TEXT // 2**20)
    if suffix in _YAML or (not suffix and re.match(_KEY_OF_YAML, data)):
        return JsonObject(parse_yaml(data, origin))
    if re.search(rb"(^|\s)--(num-layers|hidden-size|kv-channels)[ =]", data) and data[:1] != b"{":
        return JsonObject(parse_arguments(data.decode("utf-8", "replace"), origin))
    if suffix == ".sh":
        raise refusal("no_arguments", origin=origin)
    return JsonObject(parse_json(data, origin, ConfigError))
