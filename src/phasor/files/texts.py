"""Texts as plain values: JSON, YAML, and the arguments of a command.

YAML is version 1.2, where ``1e6`` is a number and ``no`` is a text. ruamel.yaml reads it without
making objects: a node with a program's own tag, such as ``!!python/name``, becomes the text of its
tag, which no reader of numbers accepts.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from phasor._checks import first_repeated, short_repr
from phasor.errors import ConfigError, PhasorError, install_hint
from phasor.files import refusal
from phasor.files.budget import MOST_ELEMENTS, MOST_TEXT

_LONGEST_YAML = 2**18  # longer than any config, and a few seconds to read
_MOST_VALUES = 20_000  # with aliases expanded, which could fill the memory
_STANDARD = "tag:yaml.org,2002:"


@dataclass(frozen=True, repr=False)
class Unclear:
    """A value that its text leaves open; errors about a key that needs it have the reason."""

    reason: str
    is_on: bool = False  # whether it is on as a switch, which needs no value

    def __repr__(self) -> str:
        return self.reason


@contextmanager
def _refuse_damage(origin: str, kind: str, error: type[PhasorError]) -> Generator[None]:
    """Turn what a parser raises into an ``error`` about the file; ``kind`` is what it must be."""
    try:
        yield
    except UnicodeDecodeError as problem:
        if problem.object.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise refusal("utf16", origin=origin) from None
        raise refusal("not_utf8", error, origin=origin, got=problem) from None
    except RecursionError:
        raise refusal("too_deep", error, origin=origin) from None
    except json.JSONDecodeError as problem:
        if problem.msg.startswith("Unterminated") or not problem.doc[problem.pos :].strip():
            raise refusal("cut_short", error, origin=origin, kind=kind) from None
        raise refusal("not_parsed", error, origin=origin, kind=kind, problem=problem) from None
    except PhasorError:
        raise
    # parsers of numbers raise other errors
    except Exception as problem:
        words = " ".join(str(problem).split())
        raise refusal("not_parsed", error, origin=origin, kind=kind, problem=words) from None


def refuse_stand_in(data: bytes, origin: str, error: type[PhasorError]) -> None:
    """Raise the ``error`` about a file that stands in for the expected one, such as a web page."""
    begins = data[:64].lstrip().lower()
    if begins.startswith(b"version https://git-lfs"):
        raise refusal("lfs_pointer", error, origin=origin)
    if begins.startswith((b"<!doctype", b"<html")):
        raise refusal("web_page", error, origin=origin)
    if not begins and len(data) < 64:
        raise refusal("empty", error, origin=origin)


def parse_json(data: bytes, origin: str, error: type[PhasorError]) -> dict[str, Any]:
    """The JSON object of a file; ``error`` if it holds anything else, or a key appears twice."""

    def refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if (key := first_repeated(pairs)) is not None:
            raise refusal("key_twice", error, origin=origin, key=key)
        return dict(pairs)

    refuse_stand_in(data, origin, error)
    # before parsing, because the number of values is what takes memory
    if sum(map(data.count, (b",", b"[", b"{"))) > MOST_ELEMENTS:
        raise refusal("too_many", error, origin=origin, most=MOST_ELEMENTS)
    with _refuse_damage(origin, "JSON", error):
        value = json.loads(data.decode("utf-8-sig"), object_pairs_hook=refuse_repeated_keys)
    if not isinstance(value, dict):
        raise refusal("no_object", error, origin=origin, kind="a JSON object", got=value)
    return cast(dict[str, Any], value)


def parse_yaml(data: bytes, origin: str) -> dict[str, Any]:
    """The only document of a file; a `ConfigError` unless it is an object of plain values."""
    try:
        from ruamel.yaml import YAML
    except ImportError:
        raise refusal("no_yaml", origin=origin, hint=install_hint("yaml")) from None
    if len(data) > _LONGEST_YAML:
        raise refusal("long_yaml", origin=origin, kib=_LONGEST_YAML // 2**10)
    with _refuse_damage(origin, "YAML", ConfigError):
        documents = list(YAML(typ="safe", pure=True).compose_all(data.decode("utf-8-sig")))
        if len(documents) != 1:
            raise refusal("documents", origin=origin, got=len(documents))
        value = _read_node(documents[0], origin, itertools.count())
    if not isinstance(value, dict):
        raise refusal("no_object", origin=origin, kind="an object of keys", got=value)
    return cast("dict[str, Any]", value)


def _read_node(node: Any, origin: str, count: Iterator[int], parents: tuple[int, ...] = ()) -> Any:
    """The values of a graph of nodes; an alias has the value of the node that it names."""
    if id(node) in parents:
        raise refusal("endless_yaml", origin=origin)
    if next(count) == _MOST_VALUES:
        raise refusal("too_many", origin=origin, most=_MOST_VALUES)
    value, kind = node.value, str(node.tag).removeprefix(_STANDARD)
    if kind not in {*_SCALARS, "str", "timestamp", "seq", "map", "value"}:
        return f"{node.tag}"
    if isinstance(value, str):
        convert = _SCALARS.get(kind)
        return convert(value.replace("_", "").lower()) if convert else value
    parents = (*parents, id(node))
    if kind != "map":
        return [_read_node(item, origin, count, parents) for item in value]
    merged: dict[str, Any] = {}
    pairs: list[tuple[str, Any]] = []
    for key, value_node in value:
        if str(key.tag) == f"{_STANDARD}merge":
            merge_values = _read_node(value_node, origin, count, parents)
            for mapping in cast(
                "list[Any]", merge_values if isinstance(merge_values, list) else [merge_values]
            ):
                if not isinstance(mapping, dict):
                    raise refusal("yaml_merge", origin=origin, got=mapping)
                merged = cast("dict[str, Any]", mapping) | merged
        elif not isinstance(key.value, str):
            raise refusal("yaml_key", origin=origin, got=key.tag)
        else:
            pairs.append((key.value, _read_node(value_node, origin, count, parents)))
    values = dict(pairs)
    # real files may repeat a key with the same value; lists compare NaN by identity
    for key, item in pairs:
        last = values[key]
        if [item] == [last] or isinstance(last, Unclear):
            continue
        if isinstance(item, (dict, list)) or isinstance(last, (dict, list)):
            raise refusal("key_twice", origin=origin, key=key)
        reason = f"{short_repr(item)} and {short_repr(last)}, because it appears twice (keep one)"
        values[key] = Unclear(reason)
    return merged | values


# from texts in small letters and without underscores; a ``timestamp`` stays a text
_SCALARS: Mapping[str, Callable[[str], Any]] = {
    "null": lambda _: None,
    "bool": lambda text: text in ("true", "yes", "on"),  # YAML 1.1 has the other words
    # 017 is decimal since YAML 1.2
    "int": lambda text: int(text, 0 if text.lstrip("+-")[:2] in ("0x", "0o", "0b") else 10),
    "float": lambda text: float(text.replace(".inf", "inf").replace(".nan", "nan")),
}


def _fill(text: str, pattern: str, filling: Callable[[re.Match[str]], str], origin: str) -> str:
    """``text`` with every match filled in; refused if that is longer than the budget allows."""
    parts: list[str] = []
    end = length = 0
    for match in re.finditer(pattern, text):
        parts += [text[end : match.start()], filling(match)]
        end = match.end()
        length += len(parts[-1]) + len(parts[-2])
        if length > MOST_TEXT:
            raise refusal("too_much_text", origin=origin, most=MOST_TEXT)
    return "".join([*parts, text[end:]])


def parse_arguments(text: str, origin: str) -> dict[str, Any]:
    """The flags of a launch script with their values (True if there is none), variables filled in.

    A flag with several values, such as one for each size of model, is `Unclear`, and so is a value
    from a variable that the script does not set.
    """
    plain = re.sub(r"\\\r?\n", " ", re.sub(r"(?m)(^|\s)#.*$", "", text))
    variables: dict[str, Any] = {}
    assigned = r"(?m)(?:^|[\s;])(\w+)=[\"']?(?:\$\{\w+:?-)?([\w.+*|/-]+)\}?[\"']?(?=[\s;]|$)"
    for name, value in re.findall(assigned, plain):
        _add(variables, name, value)

    def calculate(match: re.Match[str]) -> str:
        return _calculated(match[1], variables, origin) or match[0]

    plain = _fill(plain, r"\$\(\(([^()]*)\)\)", calculate, origin)
    for name, value in re.findall(assigned, plain):
        _add(variables, name, value)
    variable = r"\$\{(\w+)(?::?-([\w.+-]+))?\}|\$(\w+)"
    plain = _fill(plain, variable, lambda m: variables.get(m[1] or m[3], m[2] or m[0]), origin)
    flags: dict[str, Any] = {}
    for line in plain.splitlines():
        line_flags: list[tuple[str, list[Any]]] = []
        for word in re.findall(_WORD, line):
            flag, equals, value = word.partition("=")
            if re.match("--[a-z]", flag):
                line_flags.append((flag, [_argument(value)] if equals else []))
            elif line_flags:
                values = line_flags[-1][1]
                if not values or {type(values[0]), type(_argument(word))} <= {int, float}:
                    values.append(_argument(word))
        for flag, values in line_flags:
            clear_values = [value for value in values if not isinstance(value, Unclear)]
            values = clear_values or values[:1] or [True]
            _add(flags, flag, values[0] if len(values) == 1 else values)
    return {flag: _merge_branches(value) for flag, value in flags.items()}


def _merge_branches(value: Any) -> Any:
    """A value; several different ones make it `Unclear`."""
    values = value.split(_OR) if isinstance(value, str) else []
    if len(values) < 2:
        return value
    return Unclear(f"{' or '.join(values)} (the script has each; give one of them)")


def _calculated(expression: str, variables: Mapping[str, str], origin: str) -> str | None:
    """The result of a shell's sums and products, with its variables; None for other expressions."""
    name = r"\$?\{?([A-Za-z_]\w*)\}?"
    filled = _fill(expression, name, lambda m: variables.get(m[1], "?"), origin)
    if not re.fullmatch(r"\s*\d{1,9}(\s*[-+*]\s*\d{1,9}){0,9}\s*", filled):
        return None
    terms = re.findall(r"([-+]?)([^-+]+)", filled)
    factors = [(sign, map(int, re.findall(r"\d+", term))) for sign, term in terms]
    return str(sum(math.prod(term) * (-1 if sign == "-" else 1) for sign, term in factors))


# a list, an expression of lists such as ([0]*3+[1])*2, or a word between spaces; if brackets
# follow each other, only the first begins an expression
_LIST = r"\[[\d\s,]*+\](?!\s*[*+])"
_EXPRESSION = r"(?<![(\[])[(\[]++\d(?:[\d,\[\]()]|\s*+[*+]\s*+)*+"
_WORD = rf"{_LIST}|{_EXPRESSION}|[^\s\"'()\\]+"


_OR = "\0"  # separates the values of several branches, because no text contains it


def _add(values: dict[str, Any], name: str, value: Any) -> None:
    """Add a named value; if it has another value already, store a text of both."""
    first = values.setdefault(name, value)
    if [first] != [value] and str(value) not in str(first).split(_OR):
        values[name] = f"{first}{_OR}{value}"


def _argument(word: str) -> Any:
    """A number, a text, or `Unclear` for a variable that nothing fills in."""
    for number in (int, float):
        try:
            return number(word)
        except ValueError:
            pass
    reason = f"{word}, a variable that the script does not set (give its value)"
    return Unclear(reason, is_on=True) if word.startswith("$") else word
