"""Write tests/public_names.txt, names with their signatures: ``python -m tools.public_names``.

Public is what docs/api/index.md lists, and of a class the methods and properties that have no
underscore; all else is private. A test compares, so that a change of either shows in review.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests/public_names.txt"


def listed() -> list[str]:
    """The dotted names that the reference lists, sorted."""
    index = (ROOT / "docs/api/index.md").read_text("utf-8")
    return sorted(set(re.findall(r"\]\[(phasor[\w.]+)\]", index)))


def find(name: str) -> Any:
    """What has the dotted name."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            target: Any = import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            target = inspect.getattr_static(target, part, None) or getattr(target, part)
        return target
    raise ModuleNotFoundError(name)


class _Written(str):
    """An annotation as it is written, which stands in no quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def signature(function: Callable[..., Any], *, is_bound: bool) -> str:
    """The parameters and the result, as they are written."""
    parsed = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=_annotation_text(parameter.annotation))
        for parameter in parsed.parameters.values()
    ]
    result = _annotation_text(parsed.return_annotation)
    text = parsed.replace(parameters=parameters[is_bound:], return_annotation=result)
    return re.sub(r" at 0x[0-9a-f]+", "", str(text))


def _annotation_text(annotation: Any) -> Any:
    return _Written(annotation) if isinstance(annotation, str) else annotation


def describe(name: str, target: Any) -> Iterator[str]:
    """A line for a function, value or class, then one for each member of the class."""
    if isinstance(target, (staticmethod, classmethod)):
        yield name + signature(target.__func__, is_bound=isinstance(target, classmethod))
    elif isinstance(target, (property, cached_property)):
        getter: Any = target.fget if isinstance(target, property) else target.func
        yield f"{name}: {inspect.signature(getter).return_annotation}"
    elif inspect.isclass(target):
        yield name + constructor(target)
        yield from members(name, target)
    else:
        yield name + signature(target, is_bound="." in target.__qualname__)


def constructor(kind: type) -> str:
    """The parameters of a class, if phasor says them."""
    making = "__new__" if issubclass(kind, tuple) else "__init__"
    for base in kind.__mro__:
        if base.__module__.startswith("phasor") and making in vars(base):
            return signature(getattr(base, making), is_bound=True).removesuffix(" -> None")
    return ""


def members(name: str, kind: type) -> Iterator[str]:
    """The public methods and properties that phasor's classes give ``kind``."""
    bases = [base for base in kind.__mro__ if base.__module__.startswith("phasor")]
    attributes: dict[str, Any] = {}
    for base in reversed(bases):
        attributes |= vars(base)
    for member, value in sorted(attributes.items()):
        kinds = (property, cached_property, staticmethod, classmethod)
        is_made = isinstance(value, kinds) or callable(value)
        if is_made and not member.startswith("_") and not inspect.isclass(value):
            yield from describe(f"{name}.{member}", value)


def text() -> str:
    """The file as it should be."""
    names = listed()
    lines = [line for name in names for line in describe(name, find(name))]
    # a class has the members that the reference lists as well
    return "".join(f"{line}\n" for line in dict.fromkeys(lines))


if __name__ == "__main__":
    FILE.write_text(text(), "utf-8")
    print(FILE.relative_to(ROOT))
