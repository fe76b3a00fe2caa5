"""`verify`: does what was recorded rotate as a rope says, and if not, what differs?

The rope is tried first, as it is. Only then the recording is measured: which coordinates turn
together and by which factor, by which angle each token's pairs are turned, and which positions,
frequencies or roundings give these angles. All decisions are made within bounds, not by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phasor.describe import static_rope
from phasor.errors import SpecError, TensorError
from phasor.identification.blocks import arrangement_of
from phasor.identification.causes import Change, Finder, is_vague, measure
from phasor.identification.differences import Difference
from phasor.identification.hypotheses import alternatives, rows_of, suppose
from phasor.identification.recordings import (
    Stored,
    Vectors,
    read_recording,
    rows_of_tables,
    vectors_of,
)
from phasor.identification.spectrum import Complex
from phasor.identification.turns import (
    Turns,
    measure_turns,
    rotates_as,
    row_errors,
    turns_of_rows,
)
from phasor.layers import LayerRopes, one_layer
from phasor.rope import Rope

Progress = Callable[[int, int], None]
_CHUNK, _SAMPLE = 1 << 13, 64
_MAX_UNDECIDED = 6


@dataclass(frozen=True, kw_only=True)
class SideVerification(Difference):
    """One layer's queries, keys or tables beside its rope; false if they rotate as it says."""

    name: str  # "layer 3, q"
    tokens: int
    changes: tuple[Change, ...] = ()  # what differs, the most important first
    undecided: tuple[str, ...] = ()  # what these data cannot tell from that
    # the lowest position that is turned beyond rounding, and how much a score of unit vectors
    # changes there, at most
    position: float | None = None
    score: float | None = None

    def __bool__(self) -> bool:
        return bool(self.changes)

    def lines(self) -> list[str]:
        verdict = "differs" if self else "rotates as it should"
        lines = [f"{self.name}: {verdict} ({self.tokens} tokens)."]
        lines += [f"  {change.sentence}" for change in self.changes]
        if self.position is not None and self.score is not None:
            lines.append(
                f"  Beyond rounding from position {self.position:.15g} on, where a score of unit "
                f"vectors changes by up to {self.score:.2g}."
            )
        if self.undecided:
            lines.append("  These data cannot tell it from:")
            lines += [f"    {text}" for text in self.undecided]
        return lines


@dataclass(frozen=True, kw_only=True)
class Verification(Difference):
    """Everything that was recorded; false if all of it rotates as it should."""

    model: str
    sides: tuple[SideVerification, ...]

    def __bool__(self) -> bool:
        return any(self.sides)

    def lines(self) -> list[str]:
        wrong = sum(map(bool, self.sides))
        verdict = f"{wrong} of {len(self.sides)} differ" if wrong else "rotates as it should"
        lines = [f"{self.model}: {verdict}."]
        alike: dict[tuple[Change, ...], list[SideVerification]] = {}
        for side in self.sides:
            alike.setdefault(side.changes, []).append(side)
        for first, *others in alike.values():
            lines += first.lines()
            if others:
                lines.append(f"  So do {', '.join(side.name for side in others)}.")
        return lines

    def __repr__(self) -> str:
        names = dict.fromkeys(change.name for side in self.sides for change in side.changes)
        return f"Verification({self.model!r}: {', '.join(names) or 'rotates as it should'})"


def verify(
    rope: Rope | LayerRopes,
    recording: object,
    *,
    dims: str | None = None,
    seq_len: int | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Whether vectors or tables that a program recorded rotate as ``rope`` says, and what differs.

    Args:
        rope: What the checkpoint says: `phasor.load` of it, or one layer's.
        recording: A mapping, or a ``.safetensors`` or ``.npz`` file, of ``positions``, ``q`` and
            ``q_rotated``, ``k`` and ``k_rotated`` (``layers.3.q`` where there are several layers;
            ``qk`` for both in one tensor), any order of dimensions. Or of tables, a row a
            position: ``cos`` and ``sin``, ``cos_sin_cache``, complex ``freqs_cis``, angles
            ``freqs``; also a module that holds them.
        dims: The order of dimensions, such as ``"bshd"``; ``"sd"`` for ``[tokens, heads * dim]``.
            Found unless given.
        seq_len: The length at which a rule picks its law; the highest position's unless given.
        progress: Called with how many layers are done, and how many there are.

    Returns:
        The verdict: false if everything rotates as it should, printed as a report.

    Raises:
        TensorError: If the recording cannot be read so, saying why.
        PositionError: If positions are not finite.

    >>> from phasor.numpy import rotate
    >>> rope = Rope(head_dim=64, pairing="half", base=10_000.0)
    >>> q = np.random.default_rng(0).standard_normal((16, 2, 64))
    >>> turned = rotate(q, np.arange(16), Rope(head_dim=64, pairing="interleaved", base=10_000.0))
    >>> found = verify(rope, {"positions": np.arange(16), "q": q, "q_rotated": turned})
    >>> print(found.sides[0].changes[0].sentence)
    Pairing: interleaved in place of half.
    """
    layers = one_layer(rope) if isinstance(rope, Rope) else rope
    if not isinstance(layers, LayerRopes):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SpecError(f"rope must be a Rope or LayerRopes, got {type(rope).__name__}")
    arrays = read_recording(recording)
    shared = arrays.pop(None, {})
    if not arrays or set(shared) - {"positions"}:
        arrays = {None: shared, **arrays}
    sides: list[SideVerification] = []
    for done, (layer, own) in enumerate(sorted(arrays.items(), key=lambda item: item[0] or 0)):
        if progress is not None:
            progress(done, len(arrays))
        if layer is not None and layer >= len(layers):
            raise TensorError(f"the recording has a layer {layer}, and {layers.name} {len(layers)}")
        sides += _Layer(layers, layer, {"positions": None} | shared | own, dims, seq_len).verify()
    return Verification(model=layers.name, sides=tuple(sides))


class _Meant(NamedTuple):
    """The rope of a kind of layers: its law chosen, before that, and the ropes of other kinds."""

    rope: Rope | None
    unresolved: Rope | None
    others: list[tuple[str, Rope]]


class _Layer:
    """What was recorded of one layer, or of one that has no number."""

    def __init__(
        self, layers: LayerRopes, layer: int | None, arrays: Mapping[str, Stored | None],
        dims: str | None, seq_len: int | None,
    ) -> None:  # fmt: skip
        self.layers, self.arrays, self.dims, self.seq_len = layers, arrays, dims, seq_len
        self.kinds = [*layers.kinds] if layer is None else [layers.layer_kinds[layer]]
        self.where = "" if layer is None else f"layer {layer}, "

    def verify(self) -> Iterator[SideVerification]:
        """The queries, the keys, or the tables."""
        sides = [side for side in ("q", "k", "qk") if side in self.arrays]
        for side in sides or ["tables"]:
            found = [self._verify_side(kind, side) for kind in self.kinds]
            agreeing = [one for one in found if not one]
            if len(found) > 1 and not agreeing:
                raise TensorError(
                    f"{self.layers.name} has layers of the kinds {', '.join(map(repr, self.kinds))}"
                    f": name the arrays by layer, as layers.0.{side}, or give the rope of one"
                )
            yield (agreeing or found)[0]

    def _meant(self, kind: str, highest: float) -> _Meant:
        length = self.seq_len or max(int(highest) + 1, 1)
        static = {
            name: static_rope(rope, length) for name, rope in self.layers.kinds.items() if rope
        }
        own = static.get(kind)
        others = [(name, rope) for name, rope in static.items() if name != kind and rope != own]
        return _Meant(own, self.layers.kinds[kind], others)

    def _verify_side(self, kind: str, side: str) -> SideVerification:
        title = f"{self.where}{side}"
        some = self.layers.kinds[kind] or self.layers.ropes[0]
        if side == "tables":
            rows, dtype, positions = rows_of_tables(self.arrays)
            meant = self._meant(kind, float(positions.max()))
            return _verify_table(rows, dtype, positions, meant, title)
        choices = vectors_of(self.arrays, side, some.head_dim, some.axes.n_axes, self.dims)
        meant = self._meant(kind, float(choices[0].positions.max()))
        found = [(vectors.dims, result) for vectors in choices
                 if (result := _verify_vectors(vectors, meant, title)) is not None]  # fmt: skip
        clear = [one for one in found if not is_vague(one[1].changes)]
        best = [one for one in found if not one[1]] or clear or found
        if len(best) > 1:
            orders = " and as ".join(repr(order) for order, _ in best)
            raise TensorError(f"{side} can be read as {orders}, and both explain it: give dims")
        if best:
            return best[0][1]
        text = (
            "It turns no pairs of coordinates, up to one factor of all; perhaps these are not the "
            "same vectors, or a norm lies between."
        )
        change = Change("no-rotation", text)
        return SideVerification(name=title, tokens=choices[0].num_tokens, changes=(change,))


def _verify_vectors(vectors: Vectors, meant: _Meant, title: str) -> SideVerification | None:
    """The verdict; None if no pairs of coordinates explain the recording as turns."""
    rope, size = meant.rope, vectors.num_tokens
    vectors = vectors.in_own_dtype(_choose_tokens(size, np.array([], np.intp)))
    bad = _bad_tokens(vectors, rope)
    if rope is None:
        turned = Change("turned", "It is turned, and this layer has no position embedding.")
        return SideVerification(name=title, tokens=size, changes=(turned,) if len(bad) else ())
    tokens = _choose_tokens(size, bad)
    sample = vectors.sample(tokens)
    if not sample.x.any():
        raise TensorError(
            f"{vectors.name} must hold other numbers than 0, of which nothing is told"
        )
    if not len(bad):
        turns = measure_turns(sample, arrangement_of(rope))
        undecided = () if turns is None else _undecided(turns, rope, meant)
        return SideVerification(name=title, tokens=size, undecided=undecided)
    finder = Finder(rope, meant.unresolved, meant.others, vectors.positions, tokens)
    changes, undecided = finder.find(
        lambda some: measure(sample.of(some), rope), np.isin(tokens, bad)
    )
    if not changes:
        return None
    first, score = _first_wrong(vectors, bad, rope)
    return SideVerification(
        name=title, tokens=size, changes=changes, undecided=undecided, position=first, score=score
    )


def _verify_table(
    rows: Complex, dtype: str, positions: NDArray[Any], meant: _Meant, title: str
) -> SideVerification:
    rope, size = meant.rope, len(rows)
    if rope is None or rows.shape[1] != rope.num_pairs:
        pairs = "none" if rope is None else str(rope.num_pairs)
        change = Change("slice", f"Slice: {rows.shape[1]} pairs turn, in place of {pairs}.")
        return SideVerification(name=title, tokens=size, changes=(change,))
    exact = suppose(rope, positions)
    span = rope.attention_factor, rope.attention_factor
    errors = row_errors(rows, dtype)
    turns = Turns(arrangement_of(rope), rows, errors, span, positions, dtype)
    bad = np.flatnonzero(turns.misfit(exact).max(axis=1) > 1)
    tokens = _choose_tokens(size, bad)
    if not len(bad):
        some = turns._replace(z=rows[tokens], errors=errors[tokens], positions=positions[tokens])
        return SideVerification(name=title, tokens=size, undecided=_undecided(some, rope, meant))

    def measure_rows(some: NDArray[np.bool_]) -> list[Turns]:
        return turns_of_rows(rows[tokens[some]], positions[tokens[some]], dtype, rope)

    finder = Finder(rope, meant.unresolved, meant.others, positions[None], tokens)
    changes, undecided = finder.find(measure_rows, np.isin(tokens, bad))
    places = positions[bad].reshape(len(bad), -1).max(axis=1)
    first = int(np.argmin(np.abs(places)))
    score = float(np.abs(rows[bad[first]] - exact.rows[bad[first]]).max())
    if not changes:
        text = "Its rows are no cos and sin of one angle each, up to one factor of all."
        changes = (Change("no-rotation", text),)
    return SideVerification(
        name=title, tokens=size, changes=changes, undecided=undecided,
        position=float(places[first]), score=score,
    )  # fmt: skip


def _bad_tokens(vectors: Vectors, rope: Rope | None) -> NDArray[np.intp]:
    """The tokens that are not turned as the rope says: of every token the first head is tried.

    Of some tokens all heads are.
    """
    count = vectors.num_tokens
    parts = [
        (np.arange(start, min(start + _CHUNK, count)), slice(0, 1))
        for start in range(0, count, _CHUNK)
    ]
    parts.append((np.unique(np.linspace(0, count - 1, _SAMPLE).astype(np.intp)), slice(1, None)))
    bad: list[NDArray[np.intp]] = []
    for tokens, heads in parts:
        sample = vectors.sample(tokens, heads)
        is_finite = (np.isfinite(sample.x) & np.isfinite(sample.y)).all(axis=(1, 2))
        if not is_finite.all():
            raise TensorError(
                f"{vectors.name} and {vectors.name}_rotated must be finite, and hold NaN or "
                f"infinities at token {tokens[~is_finite][0]}; leave such tokens out"
            )
        bad.append(tokens[~rotates_as(sample, rope)])
    return np.unique(np.concatenate(bad))


def _choose_tokens(count: int, bad: NDArray[np.intp]) -> NDArray[np.intp]:
    """Tokens to look at: some anywhere, the first at distances that double, and wrong ones."""
    spread = np.linspace(0, count - 1, _SAMPLE // 2).astype(np.intp)
    doubling = [0, *(1 << j for j in range(count.bit_length()))]
    near_bad = [token + step for token in bad[:4].tolist() for step in (-1, 0, 1)]
    some_bad = bad[np.linspace(0, max(len(bad) - 1, 0), min(16, len(bad))).astype(np.intp)]
    tokens = np.unique(np.array([*spread, *doubling, *near_bad, *some_bad], dtype=np.intp))
    return tokens[(tokens >= 0) & (tokens < count)]


def _first_wrong(vectors: Vectors, bad: NDArray[np.intp], rope: Rope) -> tuple[float, float]:
    """The position nearest to 0 that is turned wrongly, and how far a unit vector is off there."""
    places = vectors.positions_of(bad).astype(np.float64).reshape(len(bad), -1).max(axis=1)
    token = int(np.argmin(np.abs(places)))
    sample = vectors.sample(bad[token : token + 1])
    arrangement = arrangement_of(rope)
    (u, _), expected = sample.pairs(arrangement), sample.x.copy()
    turned = rows_of(rope, sample.positions)[:, None] * u
    expected[..., arrangement.written[0]] = turned.real
    expected[..., arrangement.written[1]] = turned.imag
    sizes = np.maximum(np.linalg.norm(expected, axis=-1), 1e-300)
    return float(places[token]), float((np.linalg.norm(sample.y - expected, axis=-1) / sizes).max())


def _undecided(turns: Turns, rope: Rope, meant: _Meant) -> tuple[str, ...]:
    """What the recording cannot tell from the rope, which explains it."""
    low, high = turns.gain
    fitting = (
        hypothesis.changes[0].sentence
        for hypothesis in alternatives(rope, turns.positions, meant.unresolved, meant.others)
        if low <= hypothesis.rope.attention_factor <= high and turns.misfit(hypothesis).max() <= 1
    )
    return tuple(islice(fitting, _MAX_UNDECIDED))
