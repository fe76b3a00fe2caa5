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
            found: Any = import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            found = inspect.getattr_static(found, part, None) or getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


class _Written(str):
    """An annotation as it is written, which stands in no quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def signature(function: Callable[..., Any], *, is_bound: bool) -> str:
    """The parameters and the result, as they are written."""
    found = inspect.signature(function)
    parameters = [
        one.replace(annotation=_written(one.annotation)) for one in found.parameters.values()
    ]
    result = _written(found.return_annotation)
    written = found.replace(parameters=parameters[is_bound:], return_annotation=result)
    return re.sub(r" at 0x[0-9a-f]+", "", str(written))


def _written(annotation: Any) -> Any:
    return _Written(annotation) if isinstance(annotation, str) else annotation


def describe(name: str, found: Any) -> Iterator[str]:
    """A line for a function, value or class, then one for each member of the class."""
    if isinstance(found, (staticmethod, classmethod)):
        yield name + signature(found.__func__, is_bound=isinstance(found, classmethod))
    elif isinstance(found, (property, cached_property)):
        getter: Any = found.fget if isinstance(found, property) else found.func
        yield f"{name}: {inspect.signature(getter).return_annotation}"
    elif inspect.isclass(found):
        yield name + constructor(found)
        yield from members(name, found)
    else:
        yield name + signature(found, is_bound="." in found.__qualname__)


def constructor(kind: type) -> str:
    """The parameters of a class, if phasor says them."""
    making = "__new__" if issubclass(kind, tuple) else "__init__"
    for base in kind.__mro__:
        if base.__module__.startswith("phasor") and making in vars(base):
            return signature(getattr(base, making), is_bound=True).removesuffix(" -> None")
    return ""


def members(name: str, kind: type) -> Iterator[str]:
    """The public methods and properties that phasor's classes give ``kind``."""
    own = [base for base in kind.__mro__ if base.__module__.startswith("phasor")]
    found: dict[str, Any] = {}
    for base in reversed(own):
        found |= vars(base)
    for member, value in sorted(found.items()):
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
