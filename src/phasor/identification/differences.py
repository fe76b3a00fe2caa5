"""How two Ropes, two functions or the layers of two models differ."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from phasor._checks import short_repr
from phasor.axes import Mixed
from phasor.describe import ranges, static_rope
from phasor.identification.calling import Caller, RefusedError
from phasor.identification.report import Changes, Difference
from phasor.identification.spectrum import Floats, find_first_bad, near_powers_of_two
from phasor.layers import LayerRopes, QueryFactor
from phasor.numpy import matrix, pair_indices, phasors
from phasor.rope import Rope, real_inv_freq

_LAYOUT = ("head_dim", "pairing", "rotary_dim", "rotary_start", "direction", "axes")


_FACTORS = ("attention_factor", "softmax_factor", "logit_factor")


@dataclass(frozen=True, kw_only=True)
class PairDifference(Difference):
    """The position where the angles of one pair part."""

    pair: int
    position: int  # the first at which they are more than the tolerance apart
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
    """How two Ropes differ within a context; false if they do not."""

    fields: dict[str, tuple[object, object]]  # of the layout: these part at once
    earliest: PairDifference | None = None  # parts at the lowest position
    first_pair: PairDifference | None = None  # the lowest index that parts at all
    pairs: int = 0  # how many part
    attention_factors: tuple[float, float] | None = None  # None if they are equal
    softmax_factors: tuple[float, float] | None = None
    logit_factors: tuple[float, float] | None = None

    def __bool__(self) -> bool:
        return bool(self.fields or self.earliest or self.attention_factors or self.softmax_factors)

    def lines(self) -> list[str]:
        lines = [
            "{}: {} and {}".format(name, *(short_repr(v) if name == "axes" else v for v in both))
            for name, both in self.fields.items()
        ]
        for name in _FACTORS:
            if factors := getattr(self, f"{name}s"):
                words = name.replace("_", " ").capitalize()
                lines.append("{}: {:.9g} and {:.9g}.".format(words, *factors))
        if self.earliest is None or self.first_pair is None:
            return lines
        part = "1 pair parts" if self.pairs == 1 else f"{self.pairs} pairs part"
        lines += [f"{part} within the context.", f"Earliest pair: {self.earliest}"]
        return lines + [f"First pair: {self.first_pair}"] * (self.first_pair != self.earliest)

    def __str__(self) -> str:
        return super().__str__() or "They agree at every position within the context."


def diff_ropes(a: Rope, b: Rope, context: int, tolerance: float) -> RopeDifference:
    """The difference of two Ropes; each pair's position is computed from its frequencies."""
    fields = {name: (getattr(a, name), getattr(b, name)) for name in _LAYOUT}
    fields["pairing_out"] = a.output_pairing, b.output_pairing
    if _axes_of_pairs(a) == _axes_of_pairs(b):
        fields.pop("axes")  # different sections may give every pair the same axis
    # pairs of axes that mix have no one frequency to compare
    mixed = "axes" in fields and Mixed in (type(a.axes), type(b.axes))
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
    return RopeDifference(
        fields={name: values for name, values in fields.items() if values[0] != values[1]},
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
    """The first position at which each pair differs, infinity if none, ``[num_pairs]``."""
    # |exp(ix) - exp(iy)| = 2 |sin((x - y) / 2)| passes the tolerance at this angle
    angle = 2 * math.asin(tolerance / 2)
    # whole positions cannot tell frequencies that differ by whole turns
    pairs = zip(real_inv_freq(a), real_inv_freq(b), strict=True)
    gaps = np.array([abs(math.remainder(float(fa - fb), 2 * math.pi)) for fa, fb in pairs])
    with np.errstate(divide="ignore"):
        return np.floor(angle / gaps) + 1


@dataclass(frozen=True, kw_only=True)
class MapDifference(Difference):
    """How two linear maps differ, and the position where they part; what is not finite is None."""

    # the first found at which they differ, None if they do not where they were compared
    position: int | None = None
    # of several axes the one on which it is, with 0 on the others; None if it is on all of them
    axis: int | None = None
    # the one read and the one written that differ most there
    coordinates: tuple[int, int] | None = None
    pair: int | None = None  # the pair that reads it, in the first side that is a Rope
    size: float | None = None  # how far apart the images of a unit vector are there, at most
    # the largest change of a score of unit vectors, the query there and the key at 0
    score: float | None = None
    # what a function does otherwise than a Rope, the most important first; none if unknown
    causes: Changes = ()
    # the message of the function that refused the position; all else is None then
    refused: str | None = None
    context: int = 0  # positions 0 to ``context - 1`` were compared

    def lines(self) -> list[str]:
        return [*(cause.sentence for cause in self.causes), self._where()]

    def _where(self) -> str:
        if self.position is None:
            return f"They agree at every position compared, 0 to {self.context - 1}."
        where = "" if self.axis is None else f" on axis {self.axis}, 0 on the others"
        text = f"They part at position {self.position}{where}"
        if self.refused is not None:
            return f"{text}, which one refuses: {self.refused}."
        if self.pair is not None:
            text += f"{',' if where else ''} in pair {self.pair}"
        if self.size is None or self.score is None:
            return f"{text}: one gives no finite numbers."
        return (
            f"{text}: a unit vector comes out {self.size:.3g} apart, and a score of unit vectors "
            f"changes by up to {self.score:.3g}."
        )


def diff_measured(
    first: Rope | Caller, second: Rope | Caller, context: int, tolerance: float
) -> MapDifference | None:
    """The first position found where two functions, or a function and a Rope, differ."""
    n_axes = next((side.axes.n_axes for side in (first, second) if isinstance(side, Rope)), 1)
    # on all axes, where images and text are alike, and on each alone
    ways = (None, *range(n_axes)) if n_axes > 1 else (None,)

    def compare_at(position: int) -> MapDifference | None:
        found = (compare_on(axis, position) for axis in ways)
        return next((one for one in found if one is not None), None)

    def compare_on(axis: int | None, position: int) -> MapDifference | None:
        try:
            first_map, second_map = (_find_map(side, position, axis) for side in (first, second))
            origins = [_find_map(side, 0) for side in (first, second)]
        except RefusedError as error:
            return MapDifference(position=position, axis=axis, refused=str(error), context=context)
        distances = np.linalg.norm(first_map - second_map, axis=0)
        if np.all(distances <= tolerance):
            return None
        read = int(np.argmax(np.where(np.isfinite(distances), distances, np.inf)))
        # [d, d]: how the scores of all pairs of unit vectors change, the key at position 0
        scores = first_map.T @ origins[0] - second_map.T @ origins[1]
        pairs = (_pair_of(side, read) for side in (first, second) if isinstance(side, Rope))
        return MapDifference(
            position=position,
            context=context,
            axis=axis,
            coordinates=(read, int(np.argmax(np.abs(first_map - second_map)[:, read]))),
            pair=next(pairs, None),
            size=float(distances[read]) if np.isfinite(distances[read]) else None,
            score=float(np.linalg.norm(scores, 2)) if np.isfinite(scores).all() else None,
        )

    last_equal = -1
    for position in near_powers_of_two(context):
        if compare_at(position) is not None:
            return compare_at(find_first_bad(last_equal, position, lambda p: compare_at(p) is None))
        last_equal = position
    return None


def _find_map(side: Rope | Caller, position: int, axis: int | None = None) -> Floats:
    """The linear map ``[out, in]``; the queries' if there is one for keys."""
    n_axes = side.n_axes if isinstance(side, Caller) else side.axes.n_axes
    place = position * (np.ones(n_axes, int) if axis is None else np.eye(n_axes, dtype=int)[axis])
    if isinstance(side, Caller):
        return side.turn(np.eye(side.head_dim), place[None] if n_axes > 1 else place)[0, 0].T
    return matrix(place if n_axes > 1 else position, side)


def _pair_of(rope: Rope, coordinate: int) -> int | None:
    pairs = np.flatnonzero(np.equal(pair_indices(rope, rope.pairing), coordinate).any(axis=0))
    return int(pairs[0]) if len(pairs) else None


@dataclass(frozen=True, kw_only=True)
class LayerDifference(Difference):
    """The layers of one kind in the first model and one in the second; false if they agree."""

    layers: str  # their indices as ranges
    kinds: tuple[str, str]  # of these layers in the first and in the second model
    has_rope: tuple[bool, bool]
    difference: RopeDifference | None  # None unless both models have a rope here
    queries: str = ""  # what each multiplies its queries by, if they differ

    def __bool__(self) -> bool:
        return self.has_rope[0] != self.has_rope[1] or bool(self.difference or self.queries)

    def lines(self) -> list[str]:
        kinds = " and ".join(dict.fromkeys(self.kinds))
        which = "first" if self.has_rope[0] else "second"
        lines = [f"Only the {which} has a rotation here."] * sum(self.has_rope)
        if self.difference is not None:
            lines = self.difference.lines()
        lines += [self.queries] * bool(self.queries)
        return [f"{kinds} (layers {self.layers})", *(f"  {line}" for line in lines)]


@dataclass(frozen=True, kw_only=True)
class ModelDifference(Difference):
    """Two models side by side; false if no layer, frequency or factor differs."""

    names: tuple[str, str]
    layer_counts: tuple[int, int]
    softmax_factors: tuple[float, float]  # those on the softmax scale of each
    context: int  # positions compared
    tolerance: float  # how far apart two unit vectors may be
    layers: tuple[LayerDifference, ...]  # for every two kinds of layers that meet at one index

    def __bool__(self) -> bool:
        return (
            self.layer_counts[0] != self.layer_counts[1]
            or _pair_if_different(*self.softmax_factors, self.tolerance) is not None
            or any(self.layers)
        )

    def lines(self) -> list[str]:
        lines = [f"{' and '.join(self.names)}, positions 0 to {self.context - 1}"]
        if not self:
            lines.append(f"They agree within {self.tolerance:g} on every pair of every layer.")
        if self.layer_counts[0] != self.layer_counts[1]:
            lines.append("  Layers: {} and {}.".format(*self.layer_counts))
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
    layers_of: dict[tuple[tuple[str, str], Rope | None, Rope | None], list[int]] = {}
    for layer, kinds in enumerate(zip(a.layer_kinds, b.layer_kinds, strict=False)):
        layers_of.setdefault((kinds, a[layer], b[layer]), []).append(layer)
    for name in dict.fromkeys(rotation.name for rotation in (*a.beside, *b.beside)):
        for layer in sorted({i for n, _, at in (*a.beside, *b.beside) if n == name for i in at}):
            ropes = a.rope_beside(name, layer), b.rope_beside(name, layer)
            # files need not say whether layers follow that predict further tokens
            if layer < min(len(a), len(b)) or (len(a) == len(b) and all(ropes)):
                layers_of.setdefault(((name, name), *ropes), []).append(layer)
    differences: list[LayerDifference] = []
    for (kinds, *ropes), layers in layers_of.items():
        both = [static_rope(rope, seq_len) for rope in ropes if rope is not None]
        found = diff_ropes(both[0], both[1], context, tolerance) if len(both) == 2 else None
        has_rope = ropes[0] is not None, ropes[1] is not None
        times = [m.query_factors.get(k, QueryFactor()) for m, k in zip((a, b), kinds, strict=True)]
        # each is monotone, so that its values at both ends bound it
        span = np.ptp([factor([0, context - 1]) for factor in times])
        is_same = times[0] == times[1] or span <= tolerance
        said = "" if is_same else "Queries: times {} and {}.".format(*times)
        difference = LayerDifference(
            layers=ranges(layers), kinds=kinds, has_rope=has_rope, difference=found, queries=said
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
