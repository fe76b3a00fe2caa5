"""A Rope's fields as JSON values, and back."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import fields
from operator import index
from typing import Any, cast

from phasor._checks import choice, short_repr
from phasor.axes import AXES, Axes
from phasor.errors import SpecError
from phasor.scaling import LAWS, Law, Rule


def to_plain(value: Any) -> Any:
    """Convert tuples to lists, and symbolic numbers of torch.compile to constants."""
    if type(value) is dict:
        items = cast(dict[str, Any], value).items()
        return {name: to_plain(item) for name, item in items}
    if type(value) is tuple:
        return [to_plain(item) for item in cast(tuple[Any, ...], value)]
    if type(value) is float:
        return float.fromhex(value.hex())
    return index(value) if type(value) is int else value


def canonical_json(plain: dict[str, Any]) -> str:
    """JSON without spaces, in the order of the fields."""
    return json.dumps(plain, separators=(",", ":"), allow_nan=False)


# torch.compile can trace how a Rope is made, but not json.dumps: it calls this function instead
canonical_json._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _registered_name(value: object, registry: Mapping[str, type], tag: str) -> str:
    for name, kind in registry.items():
        if kind is type(value):
            return name
    raise SpecError(
        f"{type(value).__name__} is not a {tag} of phasor and has no JSON form; "
        f"known: {', '.join(registry)}"
    )


def check_registered(axes: Axes, *laws: Law | Rule | None) -> None:
    """Refuse axes and laws of somebody else's classes."""
    _registered_name(axes, AXES, "layout")
    for law in laws:
        if law is not None:
            _registered_name(law, LAWS, "law")


def _to_tagged(value: Any, registry: Mapping[str, type], tag: str) -> dict[str, Any]:
    """A registered dataclass as a dict; its first key is ``tag`` and holds the registered name."""
    name = _registered_name(value, registry, tag)
    return {tag: name} | {field.name: getattr(value, field.name) for field in fields(value)}


def law_to_plain(law: Law | Rule | None) -> dict[str, Any] | None:
    """A law or a rule as a dict."""
    return None if law is None else _to_tagged(law, LAWS, "law")


def axes_to_plain(axes: Axes) -> dict[str, Any]:
    """The axes as a dict; a base and scaling of their own are in it only where they are given."""
    plain = _to_tagged(axes, AXES, "layout")
    for name in ("base", "scaling"):
        if plain.get(name, 0) is None:
            del plain[name]
    if "scaling" in plain:
        plain["scaling"] = tuple(law_to_plain(law) for law in plain["scaling"])
    return plain


def axes_from_plain(value: Any) -> Axes:
    """The inverse of `axes_to_plain`."""
    if isinstance(value, Mapping):
        value = dict(cast("Mapping[str, Any]", value))
        if isinstance(laws := value.get("scaling"), list | tuple):
            value["scaling"] = tuple(
                None if law is None else law_from_plain(f"axes.scaling[{axis}]", law)
                for axis, law in enumerate(cast("list[Any]", laws))
            )
    return _from_tagged("axes", value, AXES, "layout")


def law_from_plain(name: str, value: Any) -> Any:
    """The inverse of `law_to_plain`; errors call the value ``name``."""
    return _from_tagged(name, value, LAWS, "law")


def _from_tagged(name: str, value: Any, registry: Mapping[str, type], tag: str) -> Any:
    """The inverse of `_to_tagged`."""
    plain = dict(cast(Mapping[str, Any], value)) if isinstance(value, Mapping) else {}
    if tag not in plain:
        raise SpecError(
            f'{name} must be an object with the key "{tag}", '
            f"got {short_repr(plain or cast(object, value))}"
        )
    registered_name = choice(f"{name}.{tag}", plain.pop(tag), registry)
    values = {k: tuple(cast(list[Any], v)) if type(v) is list else v for k, v in plain.items()}
    registered_fields = fields(registry[registered_name])
    refuse_unknown_fields(
        f"{name} {registered_name!r}", values, {field.name for field in registered_fields}
    )
    needed = {field.name for field in registered_fields if field.default is dataclasses.MISSING}
    if needed - set(values):
        missing = ", ".join(sorted(needed - set(values)))
        raise SpecError(f"{name} {registered_name!r} lacks {missing}")
    return registry[registered_name](**values)


def refuse_unknown_fields(owner: str, plain: Mapping[str, Any], known_fields: set[str]) -> None:
    """Raise if ``plain`` has names that are not fields of its ``owner``."""
    unknown = sorted(str(key) for key in set(plain) - known_fields)
    if unknown:
        listed = ", ".join(sorted(known_fields))
        raise SpecError(f"{owner} has no field {', '.join(map(repr, unknown))}; known: {listed}")
