"""`LayerRopes`: the rope of every layer of a model, its head counts and context, and notes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from types import MappingProxyType, NoneType
from typing import Any, Literal, NamedTuple, overload

import numpy as np

from phasor._checks import choice, number, short_repr, whole
from phasor.errors import ConfigError, SpecError
from phasor.rope import Rope, values_by_axis
from phasor.scaling import Law, Rule

_ROPE_FIELDS = frozenset(field.name for field in fields(Rope))


@dataclass(frozen=True, kw_only=True)
class QueryFactor:
    """The factor that a layer puts on queries, by position (2501.19399); by default 1 everywhere.

    With ``u = (position + first) / length``, taken as 0 or more, the ``form`` ``"steps"`` is
    ``1 + strength ln(1 + floor(u))`` (Llama 4, Ministral 3), ``"log"`` is ``1 + strength
    ln(max(u, 1))`` (Inkling, Qwen), and ``"power"`` is ``(1 + u) ** strength`` (Beam).

    >>> QueryFactor(strength=0.1, length=8192)([8191, 8192]).round(4)
    array([1.    , 1.0693])
    """

    strength: float = 0.0
    length: int = 1
    first: int = 0
    form: Literal["steps", "log", "power"] = "steps"

    def __post_init__(self) -> None:
        # plain numbers, so that JSON takes them
        object.__setattr__(self, "strength", number("strength", self.strength))
        object.__setattr__(self, "length", whole("length", self.length, least=1))
        object.__setattr__(self, "first", whole("first", self.first, least=0))
        choice("form", self.form, ("steps", "log", "power"))

    def __call__(self, positions: Any, xp: Any = np) -> Any:
        """The factors in float64; with ``xp=torch``, in 32 or 64 bits."""
        positions = np.asarray(positions, np.float64) if xp is np else positions
        ahead = xp.clip(positions + self.first, 0, None)
        # torch computes quotients and logs of integers in its default dtype, which may have 16 bits
        ones = xp.ones_like(ahead, dtype=xp.float32)
        if self.form == "power":
            return xp.exp(self.strength * xp.log1p(ahead * ones / self.length))
        if self.form == "log":
            return 1 + self.strength * xp.log(xp.clip(ahead * ones / self.length, 1, None))
        return 1 + self.strength * xp.log1p(ahead // self.length * ones)

    def __str__(self) -> str:
        u = f"(p + {self.first}) / {self.length}" if self.first else f"p / {self.length}"
        if self.form == "power":
            return f"(1 + {u}) ** {self.strength:.12g}"
        grown = f"1 + floor({u})" if self.form == "steps" else f"max({u}, 1)"
        return f"1 + {self.strength:.12g} ln({grown})" if self.strength else "1"


def _freeze(value: Any, *mappings: str) -> None:
    """Replace the named fields of a frozen dataclass by read-only copies."""
    for name in mappings:
        object.__setattr__(value, name, MappingProxyType(dict(getattr(value, name))))


def _rebuild(value: Any, *mappings: str) -> partial[Any]:
    """A call that makes an equal value; pickle and copy cannot handle mapping proxies."""
    values = {field.name: getattr(value, field.name) for field in fields(value)}
    copies = {name: dict(values[name]) for name in mappings}
    return partial(type(value), **(values | copies))


@dataclass(frozen=True, kw_only=True, eq=False)
class ConfigLocation:
    """How a Hugging Face config of a model states its ropes."""

    # for each kind of layer its block in ``rope_parameters``; empty if all layers share one block
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    # ropes of blocks that the config must have although no layer here reads them, by label
    unused_blocks: Mapping[str, Rope] = field(default_factory=dict[str, Rope])
    ignores_scaling: bool = False  # whether the model's class ignores laws and other bases
    path: str = ""  # where this model's config is in the file of a larger one, keys joined by dots
    model_type: str = ""  # Hugging Face's name for the class that reads it
    # the config itself; empty if no Hugging Face config was read
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        _freeze(self, "labels", "unused_blocks", "values")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild(self, "labels", "unused_blocks", "values"), ()

    def label(self, kind: str) -> str:
        """The name of the block for one kind of layer."""
        return self.labels.get(kind, kind)


class NamedRope(NamedTuple):
    """A rotation outside the layers' attention, such as that of an indexer."""

    name: str
    rope: Rope
    layers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, repr=False)
class LayerRopes(Sequence[Rope | None]):
    """The rope of each layer: ``ropes[i]`` is the rope of layer ``i``, or None.

    Equality compares layers, ropes and sizes; it ignores names, notes and ``in_config``.

    Args:
        name: What the model is called.
        layer_kinds: The kind of every layer, in order.
        kinds: The rope of each kind in ``layer_kinds``.
        context: Positions the published model is meant for, if known.
        num_heads: Attention heads of a layer, if known.
        num_kv_heads: Rotated key heads of a layer, if known; 1 in latent attention, where all heads
            share one rotated key.
        auxiliary_ropes: Rotations outside the attention of these layers: those of an ``indexer``, a
            ``compressor``, or ``mtp`` (layers after the last, for multi-token prediction).
        query_factors: The factor that a kind puts on its queries, where that is not 1.
        notes: Facts that a Rope has no field for, and open questions, a sentence each.
        in_config: How a Hugging Face config states the ropes.

    >>> from phasor import Rope
    >>> rope = Rope(head_dim=64, pairing="half")
    >>> kinds = {"rope": rope, "nope": None}
    >>> ropes = LayerRopes(name="toy", layer_kinds=("rope", "nope"), kinds=kinds)
    >>> ropes[0] == rope, ropes[-1], len(ropes)
    (True, None, 2)
    """

    name: str = field(compare=False)
    layer_kinds: tuple[str, ...]
    kinds: Mapping[str, Rope | None]
    context: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    auxiliary_ropes: tuple[NamedRope, ...] = ()
    query_factors: Mapping[str, QueryFactor] = field(default_factory=dict[str, QueryFactor])
    notes: tuple[str, ...] = field(default=(), compare=False)
    in_config: ConfigLocation = field(default=ConfigLocation(), compare=False)

    def __new__(cls, *values: object, **fields: object) -> LayerRopes:
        if values:
            raise SpecError(
                f"LayerRopes takes keyword arguments only, got {short_repr(values[0])}; "
                "give the kind of every layer and the rope of every kind: LayerRopes(name='mine', "
                "layer_kinds=('rope', 'nope'), kinds={'rope': rope, 'nope': None})"
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if not self.layer_kinds:
            raise SpecError("layer_kinds must name the kind of at least one layer, got none")
        undescribed = sorted(set(self.layer_kinds) - set(self.kinds))
        if undescribed:
            raise SpecError(
                f"layer_kinds names {short_repr(undescribed)}, which kinds does not describe"
            )
        _check_values("kinds", self.kinds, (Rope, NoneType), "a Rope or None")
        if not self.query_factors.keys() <= self.kinds.keys():
            raise SpecError(f"query_factors must name some of kinds, got {[*self.query_factors]}")
        _check_values("query_factors", self.query_factors, (QueryFactor,), "a QueryFactor")
        _check_values(
            "auxiliary_ropes", dict(enumerate(self.auxiliary_ropes)), (NamedRope,), "a NamedRope"
        )
        for i, rotation in enumerate(self.auxiliary_ropes):
            check_rope(f"auxiliary_ropes[{i}].rope", rotation.rope)
        for name in ("context", "num_heads", "num_kv_heads"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), least=1)
        _freeze(self, "kinds", "query_factors")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild(self, "kinds", "query_factors"), ()

    def __hash__(self) -> int:
        return hash((self.layer_kinds, frozenset(self.kinds.items()), self.context))

    def __repr__(self) -> str:
        return f"LayerRopes({self.name!r}, {len(self)} layers)"

    def __getattr__(self, name: str) -> Any:
        # names with an underscore are looked up by copy, pickle and IPython
        if name.startswith("_") or (not hasattr(Rope, name) and name not in _ROPE_FIELDS):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise _NotARopeError(
            f"{name} is an attribute of a Rope, got {type(self).__name__}{rope_hint(self)}"
        )

    def __str__(self) -> str:
        counts = {"layers": len(self), "query heads": self.num_heads}
        counts |= {"key heads": self.num_kv_heads, "positions": self.context}
        facts = [f"{count} {unit}" for unit, count in counts.items() if count is not None]
        lines = [f"{self.name}: {', '.join(facts)}"]
        for kind, rope in self.kinds.items():
            summary = "no rotation" if rope is None else summarize(rope)
            if kind in self.query_factors:
                summary += f", queries times {self.query_factors[kind]}"
            lines.append(f"  {kind} ({self.layer_kinds.count(kind)} layers): {summary}")
        for name, rope, layers in self.auxiliary_ropes:
            lines.append(f"  {name}, outside attention ({len(layers)} layers): {summarize(rope)}")
        return "\n".join([*lines, *(f"  Note: {note}" for note in self.notes)])

    @overload
    def __getitem__(self, index: int) -> Rope | None: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Rope | None, ...]: ...
    def __getitem__(self, index: int | slice) -> Rope | tuple[Rope | None, ...] | None:
        if isinstance(index, slice):
            return tuple(self.kinds[kind] for kind in self.layer_kinds[index])
        return self.kinds[self.layer_kinds[index]]

    def __iter__(self) -> Iterator[Rope | None]:
        return map(self.kinds.__getitem__, self.layer_kinds)

    def __len__(self) -> int:
        return len(self.layer_kinds)

    @cached_property
    def ropes(self) -> tuple[Rope, ...]:
        """The different ropes of the model, in the order of `kinds`."""
        return tuple(dict.fromkeys(rope for rope in self.kinds.values() if rope is not None))

    def auxiliary_rope(self, name: str, layer: int) -> Rope | None:
        """The auxiliary rope called ``name`` in a layer; None if the layer has none."""
        return next(
            (r for n, r, layers in self.auxiliary_ropes if n == name and layer in layers), None
        )

    def query_factor(self, layer: int) -> QueryFactor:
        """The factor that a layer puts on its queries, whether it rotates or not."""
        return self.query_factors.get(self.layer_kinds[layer], QueryFactor())

    @property
    def softmax_factor(self) -> float:
        """`Rope.softmax_factor` of every layer, the factor on the logits outside cos and sin.

        An error if layers differ: then read it from each rope.
        """
        # every law that a rule may pick has a softmax_factor of 1
        factors = {
            1.0 if isinstance(rope.scaling, Rule) else rope.softmax_factor for rope in self.ropes
        } or {1.0}
        if len(factors) > 1:
            raise SpecError(
                f"the layers of {self.name} multiply their softmax scale by different factors "
                f"({', '.join(f'{factor:g}' for factor in sorted(factors))}); read each rope's "
                "softmax_factor"
            )
        return factors.pop()

    @property
    def has_blocks_by_kind(self) -> bool:
        """Whether a Hugging Face config has a separate block for each kind of layer."""
        return bool(self.in_config.labels) or len(self.ropes) > 1

    def config_blocks(self) -> Rope | dict[str, Rope | None]:
        """The rope of a config's only block, or the rope of each block by its label."""
        if not self.has_blocks_by_kind:
            return self.ropes[0]
        label = self.in_config.label
        blocks: dict[str, Rope | None] = {}
        for kind, rope in self.kinds.items():
            if blocks.setdefault(label(kind), rope) != rope:
                kinds = [same_kind for same_kind in self.kinds if label(same_kind) == label(kind)]
                raise ConfigError(
                    f"layers of the kinds {' and '.join(kinds)} share one block of the config, "
                    "so their ropes cannot differ; keep the ropes as JSON instead "
                    "(Rope.to_json)"
                )
        return {**self.in_config.unused_blocks, **blocks}


class _NotARopeError(SpecError, AttributeError):
    """A Rope's attribute was looked up on LayerRopes; hasattr is False, as it should be."""


def rope_hint(value: object) -> str:
    """The end of an error where a Rope was expected: how to get it from ``value``."""
    if isinstance(value, str):
        return f"; phasor.preset({value!r})[0] is the first layer's, if that is a preset's name"
    if not isinstance(value, LayerRopes):
        return ""
    return f", the ropes of {len(value)} layers: take ropes[0], or ropes[layer]"


def check_rope(name: str, value: object) -> None:
    """Refuse anything but a Rope, and say how to get one from `LayerRopes`."""
    if not isinstance(value, Rope):
        raise SpecError(f"{name} must be a phasor.Rope, got {short_repr(value)}{rope_hint(value)}")


def summarize(rope: Rope) -> str:
    """The rope on one line: pairing, width, base and all that differs from the defaults."""
    pairs = rope.pairing if rope.pairing_out is None else f"{rope.pairing} to {rope.pairing_out}"
    width = "" if rope.rotary_dim == rope.head_dim else f"{rope.rotary_dim} of "
    start = f" from {rope.rotary_start} on" if rope.rotary_start else ""
    parts = [f"{pairs} pairs", f"{width}{rope.head_dim} coordinates{start}"]
    bases = values_by_axis(rope.axes, "base")
    if bases is not None:
        parts += [f"bases {', '.join(f'{base:.12g}' for base in bases)}"]
    else:
        parts += ["explicit frequencies" if rope.base is None else f"base {rope.base:.12g}"]
    parts += ["in float32"] if rope.inv_freq_dtype == "float32" else []
    if (law := rope.scaling) is not None:
        parts += [_law_in_short(law)]
    if (laws := values_by_axis(rope.axes, "scaling")) is not None:
        names = ["none" if law is None else _law_in_short(law) for law in laws]
        parts += [f"laws {', '.join(names)}"]
    if rope.axes.n_axes > 1:
        counts = ", ".join(map(str, rope.axes.counts(rope.num_pairs)))
        parts += [f"{type(rope.axes).__name__} axes of {counts} pairs"]
    parts += ["clockwise"] if rope.direction < 0 else []
    return ", ".join(parts)


def _law_in_short(law: Law | Rule) -> str:
    factor = getattr(law, "factor", None)
    return type(law).__name__ + ("" if factor is None else f" (factor {factor:g})")


def _check_values(
    name: str, values: Mapping[Any, object], kinds: tuple[type, ...], expected: str
) -> None:
    for key, value in values.items():
        if not isinstance(value, kinds):
            raise SpecError(f"{name}[{key!r}] must be {expected}, got {short_repr(value)}")


def one_layer(rope: Rope) -> LayerRopes:
    """A model of one layer, for functions that take a model or a Rope."""
    return LayerRopes(name="rope", layer_kinds=("rope",), kinds={"rope": rope})
