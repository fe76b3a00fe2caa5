"""Texts as plain values: JSON, YAML, and the arguments of a command.

YAML is that of version 1.2, where ``1e6`` is a number and ``no`` a text. ruamel.yaml reads it and
makes no objects here: a node with a tag of a program's own, such as ``!!python/name``, stays the
text of its tag, which no reader of numbers accepts.
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

_LONGEST_YAML = 2**18  # far above any config's, and some seconds to read
_MOST_VALUES = 20_000  # with aliases written out, which may stand for more than fits the memory
_STANDARD = "tag:yaml.org,2002:"


@dataclass(frozen=True, repr=False)
class Unclear:
    """A value that its text leaves open; an error about a key that needs it says why."""

    why: str
    is_on: bool = False  # as a switch, which needs no value

    def __repr__(self) -> str:
        return self.why


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
    # a parser of numbers finds faults of its own
    except Exception as problem:
        words = " ".join(str(problem).split())
        raise refusal("not_parsed", error, origin=origin, kind=kind, problem=words) from None


def refuse_stand_in(data: bytes, origin: str, error: type[PhasorError]) -> None:
    """Raise the ``error`` about a file that is not the one meant, whatever its name says."""
    begins = data[:64].lstrip().lower()
    if begins.startswith(b"version https://git-lfs"):
        raise refusal("lfs_pointer", error, origin=origin)
    if begins.startswith((b"<!doctype", b"<html")):
        raise refusal("web_page", error, origin=origin)
    if not begins and len(data) < 64:
        raise refusal("empty", error, origin=origin)


def parse_json(data: bytes, origin: str, error: type[PhasorError]) -> dict[str, Any]:
    """The JSON object of a file; ``error`` if it holds anything else, or a key stands twice."""

    def refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if (key := first_repeated(pairs)) is not None:
            raise refusal("key_twice", error, origin=origin, key=key)
        return dict(pairs)

    refuse_stand_in(data, origin, error)
    # before it is parsed: what takes memory is the number of values
    if sum(map(data.count, (b",", b"[", b"{"))) > MOST_ELEMENTS:
        raise refusal("too_many", error, origin=origin, most=MOST_ELEMENTS)
    with _refuse_damage(origin, "JSON", error):
        value = json.loads(data.decode("utf-8-sig"), object_pairs_hook=refuse_repeated_keys)
    if not isinstance(value, dict):
        raise refusal("no_object", error, origin=origin, kind="a JSON object", got=value)
    return cast(dict[str, Any], value)


def parse_yaml(data: bytes, origin: str) -> dict[str, Any]:
    """The one document of a file; a `ConfigError` for anything but an object of plain values."""
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


def _read_node(node: Any, origin: str, count: Iterator[int], inside: tuple[int, ...] = ()) -> Any:
    """The values of a graph of nodes; an alias has the value of the node that it names."""
    if id(node) in inside:
        raise refusal("endless_yaml", origin=origin)
    if next(count) == _MOST_VALUES:
        raise refusal("too_many", origin=origin, most=_MOST_VALUES)
    value, kind = node.value, str(node.tag).removeprefix(_STANDARD)
    if kind not in {*_SCALARS, "str", "timestamp", "seq", "map", "value"}:
        return f"{node.tag}"
    if isinstance(value, str):
        read = _SCALARS.get(kind)
        return read(value.replace("_", "").lower()) if read else value
    inside = (*inside, id(node))
    if kind != "map":
        return [_read_node(item, origin, count, inside) for item in value]
    merged: dict[str, Any] = {}
    pairs: list[tuple[str, Any]] = []
    for key, of_key in value:
        if str(key.tag) == f"{_STANDARD}merge":
            found = _read_node(of_key, origin, count, inside)
            for other in cast("list[Any]", found if isinstance(found, list) else [found]):
                if not isinstance(other, dict):
                    raise refusal("yaml_merge", origin=origin, got=other)
                merged = cast("dict[str, Any]", other) | merged
        elif not isinstance(key.value, str):
            raise refusal("yaml_key", origin=origin, got=key.tag)
        else:
            pairs.append((key.value, _read_node(of_key, origin, count, inside)))
    values = dict(pairs)
    # real files have a key twice with one value; NaN is its own here
    for key, item in pairs:
        last = values[key]
        if [item] == [last] or isinstance(last, Unclear):
            continue
        if isinstance(item, (dict, list)) or isinstance(last, (dict, list)):
            raise refusal("key_twice", origin=origin, key=key)
        why = f"{short_repr(item)} and {short_repr(last)}, as it stands twice (keep one)"
        values[key] = Unclear(why)
    return merged | values


# from texts in small letters and without underscores; a ``timestamp`` stays a text
_SCALARS: Mapping[str, Callable[[str], Any]] = {
    "null": lambda _: None,
    "bool": lambda text: text in ("true", "yes", "on"),  # as a file says that it is YAML 1.1
    # 017 is decimal since YAML 1.2
    "int": lambda text: int(text, 0 if text.lstrip("+-")[:2] in ("0x", "0o", "0b") else 10),
    "float": lambda text: float(text.replace(".inf", "inf").replace(".nan", "nan")),
}


def _fill(text: str, pattern: str, filling: Callable[[re.Match[str]], str], origin: str) -> str:
    """``text`` with every match filled in, of no more characters than the budget allows."""
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
    """The flags of a launch script with their values, True without one; variables are filled in.

    What has two values in it, such as one for each size of model, is `Unclear`, and so is what a
    variable would say that nothing in the script sets.
    """
    plain = re.sub(r"\\\r?\n", " ", re.sub(r"(?m)(^|\s)#.*$", "", text))
    known: dict[str, Any] = {}
    assigned = r"(?m)(?:^|[\s;])(\w+)=[\"']?(?:\$\{\w+:?-)?([\w.+*|/-]+)\}?[\"']?(?=[\s;]|$)"
    for name, value in re.findall(assigned, plain):
        _add(known, name, value)

    def calculate(match: re.Match[str]) -> str:
        return _calculated(match[1], known, origin) or match[0]

    plain = _fill(plain, r"\$\(\(([^()]*)\)\)", calculate, origin)
    for name, value in re.findall(assigned, plain):
        _add(known, name, value)
    variable = r"\$\{(\w+)(?::?-([\w.+-]+))?\}|\$(\w+)"
    plain = _fill(plain, variable, lambda m: known.get(m[1] or m[3], m[2] or m[0]), origin)
    flags: dict[str, Any] = {}
    for line in plain.splitlines():
        found: list[tuple[str, list[Any]]] = []
        for word in re.findall(_WORD, line):
            flag, equals, value = word.partition("=")
            if re.match("--[a-z]", flag):
                found.append((flag, [_argument(value)] if equals else []))
            elif found:
                values = found[-1][1]
                if not values or {type(values[0]), type(_argument(word))} <= {int, float}:
                    values.append(_argument(word))
        for flag, values in found:
            known_values = [value for value in values if not isinstance(value, Unclear)]
            values = known_values or values[:1] or [True]
            _add(flags, flag, values[0] if len(values) == 1 else values)
    return {flag: _one_of_branches(value) for flag, value in flags.items()}


def _one_of_branches(value: Any) -> Any:
    """A value; several different ones make it `Unclear`."""
    several = value.split(_OR) if isinstance(value, str) else []
    if len(several) < 2:
        return value
    return Unclear(f"{' or '.join(several)} (the script has each; give one of them)")


def _calculated(expression: str, known: Mapping[str, str], origin: str) -> str | None:
    """The result of a shell's sums and products, with its variables; None for other expressions."""
    name = r"\$?\{?([A-Za-z_]\w*)\}?"
    filled = _fill(expression, name, lambda m: known.get(m[1], "?"), origin)
    if not re.fullmatch(r"\s*\d{1,9}(\s*[-+*]\s*\d{1,9}){0,9}\s*", filled):
        return None
    terms = re.findall(r"([-+]?)([^-+]+)", filled)
    factors = [(sign, map(int, re.findall(r"\d+", term))) for sign, term in terms]
    return str(sum(math.prod(term) * (-1 if sign == "-" else 1) for sign, term in factors))


# a list, an expression of lists such as ([0]*3+[1])*2, or what stands between spaces; of brackets
# in a row only the first begins an expression
_LIST = r"\[[\d\s,]*+\](?!\s*[*+])"
_EXPRESSION = r"(?<![(\[])[(\[]++\d(?:[\d,\[\]()]|\s*+[*+]\s*+)*+"
_WORD = rf"{_LIST}|{_EXPRESSION}|[^\s\"'()\\]+"


_OR = "\0"  # between the values of several branches, as no text has it


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
    why = f"{word}, a variable that the script does not set (give its value)"
    return Unclear(why, is_on=True) if word.startswith("$") else word
