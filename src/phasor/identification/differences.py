"""How two Ropes, two functions or the layers of two models differ."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from phasor._checks import short_repr
from phasor.axes import Mixed
from phasor.describe import ranges, static_rope
from phasor.identification.report import Difference
from phasor.identification.spectrum import Floats
from phasor.layers import LayerRopes, QueryFactor
from phasor.numpy import phasors
from phasor.rope import Rope, plain_axes, real_inv_freq, values_by_axis

_LAYOUT = ("head_dim", "pairing", "rotary_dim", "rotary_start", "direction", "axes")


_FACTORS = ("attention_factor", "softmax_factor", "logit_factor")


@dataclass(frozen=True, kw_only=True)
class PairDifference(Difference):
    """The first position where the angles of one pair differ."""

    pair: int
    position: int  # the first position where the unit vectors are more than the tolerance apart
    error: float  # how far apart the two unit vectors are there
    inv_freq: tuple[float, float]  # in the first and in the second Rope

    def lines(self) -> list[str]:
        first, second = self.inv_freq
        return [
            f"{self.pair} at position {self.position}, {self.error:.3g} apart "
            f"(inv_freq {first:.9g} and {second:.9g})"
        ]


@dataclass(frozen=True, kw_only=True)
class RopeDifference(Difference):
    """How two Ropes differ within a context; falsy if they agree."""

    # fields that determine the frequencies, if these differ, then fields of the layout
    fields: dict[str, tuple[object, object]]
    context: int  # positions 0 to ``context - 1`` were compared
    earliest: PairDifference | None = None  # the pair that differs at the lowest position
    first_pair: PairDifference | None = None  # the pair with the lowest index that differs
    pairs: int = 0  # how many pairs differ
    attention_factors: tuple[float, float] | None = None  # None if they are equal
    softmax_factors: tuple[float, float] | None = None
    logit_factors: tuple[float, float] | None = None

    def __bool__(self) -> bool:
        return bool(self.fields or self.earliest or self.attention_factors or self.softmax_factors)

    def lines(self) -> list[str]:
        lines = [f"{name}: {_value_text(values, name)}" for name, values in self.fields.items()]
        for name in _FACTORS:
            if factors := getattr(self, f"{name}s"):
                words = name.replace("_", " ").capitalize()
                lines.append("{}: {:.9g} and {:.9g}.".format(words, *factors))
        if self.earliest is None or self.first_pair is None:
            return lines
        differ = "1 pair differs" if self.pairs == 1 else f"{self.pairs} pairs differ"
        lines += [f"{differ} within the context.", f"Earliest pair: {self.earliest}"]
        return lines + [f"First pair: {self.first_pair}"] * (self.first_pair != self.earliest)

    def __str__(self) -> str:
        agree = f"They agree at every position within the context, 0 to {self.context - 1}."
        return super().__str__() or agree


def _value_text(values: tuple[object, object], name: str) -> str:
    """Two values of a field as text; for laws of different kinds, only the names of the laws."""
    first_text, second_text = (
        "none" if value is None else short_repr(value) if name == "axes" else f"{value}"
        for value in values
    )
    kinds = [text.partition("(")[0] for text in (first_text, second_text)]
    # a law for each axis is a tuple, which begins with its parenthesis
    are_two_laws = name == "law" and kinds[0] != kinds[1] and all(kinds)
    return " and ".join(kinds if are_two_laws else (first_text, second_text))


def _frequency_settings(rope: Rope) -> dict[str, object]:
    """The fields of a Rope that determine its frequencies."""
    axis_values = values_by_axis(rope.axes, "base"), values_by_axis(rope.axes, "scaling")
    base = rope.base if rope.base is None or rope.base % 1 else int(rope.base)
    base = base if axis_values[0] is None else f"{axis_values[0]}"
    law = rope.scaling if axis_values[1] is None else axis_values[1]
    law = None if law is None else f"{law}"
    return {"base": base, "law": law, "inv_freq_dtype": rope.inv_freq_dtype}


def diff_ropes(a: Rope, b: Rope, context: int, tolerance: float) -> RopeDifference:
    """The difference of two Ropes; each pair's position is computed from its frequencies."""
    layout = {name: (getattr(a, name), getattr(b, name)) for name in _LAYOUT}
    layout["pairing_out"] = a.output_pairing, b.output_pairing
    layout["axes"] = plain_axes(a.axes), plain_axes(b.axes)
    if _axes_of_pairs(a) == _axes_of_pairs(b):
        layout.pop("axes")  # different sections may give every pair the same axis
    # pairs of Mixed axes have several frequencies to compare
    mixed = "axes" in layout and Mixed in (type(a.axes), type(b.axes))
    comparable = a.num_pairs == b.num_pairs and not mixed
    positions = _first_differences(a, b, tolerance) if comparable else np.array([])
    differing: list[int] = np.flatnonzero(positions < context).tolist()

    def compare_pair(pair: int) -> PairDifference:
        place = int(positions[pair])
        za, zb = (phasors(rope, [place])[0, pair] for rope in (a, b))
        inv_freq = float(a.inv_freq[pair]), float(b.inv_freq[pair])
        error = float(abs(za - zb))
        return PairDifference(pair=pair, position=place, error=error, inv_freq=inv_freq)

    factors = ((name, getattr(a, name), getattr(b, name)) for name in _FACTORS)
    fields: dict[str, tuple[object, object]] = {}
    if differing or not comparable:
        settings = _frequency_settings(b)
        fields = {name: (value, settings[name]) for name, value in _frequency_settings(a).items()}
    return RopeDifference(
        fields={
            name: values for name, values in (fields | layout).items() if values[0] != values[1]
        },
        context=context,
        earliest=compare_pair(int(np.argmin(positions))) if differing else None,
        first_pair=compare_pair(differing[0]) if differing else None,
        pairs=len(differing),
        **{f"{name}s": _pair_if_different(fa, fb, tolerance) for name, fa, fb in factors},
    )


def _axes_of_pairs(rope: Rope) -> tuple[object, ...]:
    if isinstance(rope.axes, Mixed):
        return (rope.axes,)
    pairs = rope.num_pairs
    return rope.axes.n_axes, rope.axes.axis_of_pair(pairs), rope.axes.spectra(pairs)


def _pair_if_different(a: float, b: float, tolerance: float) -> tuple[float, float] | None:
    return (a, b) if abs(a - b) > tolerance * max(abs(a), abs(b)) else None


def _first_differences(a: Rope, b: Rope, tolerance: float) -> Floats:
    """The first position where each pair differs, ``[num_pairs]``; infinity if there is none."""
    # |exp(ix) - exp(iy)| = 2 |sin((x - y) / 2)| exceeds the tolerance from this angle on
    angle = 2 * math.asin(tolerance / 2)
    # whole positions cannot tell frequencies that differ by whole turns
    pairs = zip(real_inv_freq(a), real_inv_freq(b), strict=True)
    gaps = np.array([abs(math.remainder(float(fa - fb), 2 * math.pi)) for fa, fb in pairs])
    with np.errstate(divide="ignore"):
        return np.floor(angle / gaps) + 1


@dataclass(frozen=True, kw_only=True)
class LayerDifference(Difference):
    """Layers that have one kind in the first model and one in the second; falsy if they agree."""

    layers: str  # the indices of the layers as ranges
    kinds: tuple[str, str]  # the kind of these layers in the first and in the second model
    has_rope: tuple[bool, bool]
    difference: RopeDifference | None  # None unless both models have a rope here
    queries: str = ""  # by which factor each model multiplies its queries, if the factors differ

    def __bool__(self) -> bool:
        return self.has_rope[0] != self.has_rope[1] or bool(self.difference or self.queries)

    def lines(self) -> list[str]:
        kinds = " and ".join(dict.fromkeys(self.kinds))
        order = "first" if self.has_rope[0] else "second"
        lines = [f"Only the {order} has a rotation here."] * sum(self.has_rope)
        if self.difference is not None:
            lines = self.difference.lines()
        lines += [self.queries] * bool(self.queries)
        return [f"{kinds} (layers {self.layers})", *(f"  {line}" for line in lines)]


@dataclass(frozen=True, kw_only=True)
class ModelDifference(Difference):
    """Two models side by side; falsy if no layer, frequency or factor differs."""

    names: tuple[str, str]
    layer_counts: tuple[int, int]
    softmax_factors: tuple[float, float]  # by which each model multiplies the softmax scale
    context: int  # how many positions were compared
    tolerance: float  # how far apart two unit vectors may be
    layers: tuple[LayerDifference, ...]  # one for every two kinds that share a layer index

    def __bool__(self) -> bool:
        factors = _pair_if_different(*self.softmax_factors, self.tolerance)
        return factors is not None or any(self.layers)

    def lines(self) -> list[str]:
        lines = [f"{' and '.join(self.names)}, positions 0 to {self.context - 1}"]
        if not self:
            lines.append(f"They agree within {self.tolerance:g} on every pair of every layer.")
        if self.layer_counts[0] != self.layer_counts[1]:
            alike = "" if self else "; the layers that both have rotate alike"
            lines.append("  Layers: {} and {}{}.".format(*self.layer_counts, alike))
        if self and self.softmax_factors[0] != self.softmax_factors[1]:
            lines.append("  Softmax scale: times {:.9g} and {:.9g}.".format(*self.softmax_factors))
        for difference in self.layers:
            if difference:
                lines += ["", *difference.lines()]
        return lines

    def __repr__(self) -> str:
        verdict = "they differ" if self else "they agree"
        return f"ModelDifference({self.names[0]!r}, {self.names[1]!r}: {verdict})"


def diff_models(
    a: LayerRopes, b: LayerRopes, seq_len: int, context: int, tolerance: float
) -> ModelDifference:
    """A difference for each two kinds that share a layer, up to the shorter model's end."""
    layers_by_ropes: dict[tuple[tuple[str, str], Rope | None, Rope | None], list[int]] = {}
    for layer, kinds in enumerate(zip(a.layer_kinds, b.layer_kinds, strict=False)):
        layers_by_ropes.setdefault((kinds, a[layer], b[layer]), []).append(layer)
    for name in dict.fromkeys(
        rotation.name for rotation in (*a.auxiliary_ropes, *b.auxiliary_ropes)
    ):
        for layer in sorted(
            {
                i
                for n, _, layers_of_rope in (*a.auxiliary_ropes, *b.auxiliary_ropes)
                if n == name
                for i in layers_of_rope
            }
        ):
            ropes = a.auxiliary_rope(name, layer), b.auxiliary_rope(name, layer)
            # a file may omit its layers for multi-token prediction
            if layer < min(len(a), len(b)) or (len(a) == len(b) and all(ropes)):
                layers_by_ropes.setdefault(((name, name), *ropes), []).append(layer)
    differences: list[LayerDifference] = []
    for (kinds, *ropes), layers in layers_by_ropes.items():
        pair = [static_rope(rope, seq_len) for rope in ropes if rope is not None]
        rope_difference = (
            diff_ropes(pair[0], pair[1], context, tolerance) if len(pair) == 2 else None
        )
        has_rope = ropes[0] is not None, ropes[1] is not None
        query_factors = [
            m.query_factors.get(k, QueryFactor()) for m, k in zip((a, b), kinds, strict=True)
        ]
        # each factor is monotone in the position, so its values at both ends bound it
        span = np.ptp([factor([0, context - 1]) for factor in query_factors])
        is_same = query_factors[0] == query_factors[1] or span <= tolerance
        query_text = "" if is_same else "Queries: times {} and {}.".format(*query_factors)
        difference = LayerDifference(
            layers=ranges(layers),
            kinds=kinds,
            has_rope=has_rope,
            difference=rope_difference,
            queries=query_text,
        )
        differences.append(difference)
    return ModelDifference(
        names=(a.name, b.name),
        layer_counts=(len(a), len(b)),
        softmax_factors=(a.softmax_factor, b.softmax_factor),
        context=context,
        tolerance=tolerance,
        layers=tuple(differences),
    )
