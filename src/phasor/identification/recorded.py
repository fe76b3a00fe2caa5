"""How recorded vectors or tables differ from a rope: in which tokens, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from phasor.describe import static_rope
from phasor.errors import TensorError
from phasor.identification.calling import Caller, RefusedError
from phasor.identification.causes import Finder
from phasor.identification.frequencies import other_ropes
from phasor.identification.hypotheses import ExpectedRope, is_vague, suppose
from phasor.identification.members import compare_queries_and_keys
from phasor.identification.positions import Tokens
from phasor.identification.recordings import (
    Arrays,
    Vectors,
    rows_of_tables,
    vectors_of,
    vectors_of_rows,
)
from phasor.identification.report import (
    Changes,
    Finding,
    SideVerification,
    in_order,
    make_finding,
)
from phasor.identification.roundings import find_float32
from phasor.identification.spectrum import Floats, powers_of_two
from phasor.identification.turns import Sample, arrangement_of, measure_turns, rotates_as
from phasor.layers import LayerRopes, QueryFactor, one_layer
from phasor.numpy import rotate
from phasor.rope import Rope

# a function that is called with the completed share, from 0 to 1
Advance = Callable[[float], None]
# tokens that are read at once, to bound memory, and tokens whose heads are all checked
_CHUNK, _SAMPLE = 1 << 13, 64
# wrong tokens that are searched for causes, to bound time, and the same with their neighbours; the
# verdict states how many tokens were searched
_WRONG, _WITH_NEIGHBOURS = 16, 4


_FACTORS = {"factor", "factor-missing", "factor-twice"}


def find_causes(
    rope: Rope, caller: Caller, max_position: int, *, offset: float = 0.0, gain: float = 1.0
) -> Changes:
    """How a function differs from a Rope, the most important first; empty if unknown.

    The function is compared with the rope after ``offset`` is added to positions, and ``gain`` is
    multiplied into the vectors.
    """
    layers = one_layer(rope)
    factors = np.ones(rope.head_dim)
    factors[arrangement_of(rope).read] = gain
    try:
        arrays = caller.record(max_position)
        arrays["positions"] = arrays["positions"] + offset if offset else arrays["positions"]
        arrays["q"] = factors * arrays["q"]
        return verify_side(layers, layers.layer_kinds[0], arrays, "q").changes
    except (RefusedError, TensorError):  # a position is refused, or its result is NaN
        return ()


def verify_side(
    layers: LayerRopes, kind: str, arrays: Arrays, side: str, dims: str | None = None,
    seq_len: int | None = None, *, advance: Advance | None = None,
) -> SideVerification:  # fmt: skip
    """The verdict on queries, keys or tables of one kind of layers.

    ``advance`` is called with the share of the tokens that has been checked.
    """
    rope, change = layers.kinds[kind], make_finding("no-rotation")
    if side == "tables":
        rows, dtype = rows_of_tables(arrays, rope)
        if rope is None or rows.shape[1] != rope.num_pairs:
            pairs = "none" if rope is None else f"{rope.num_pairs}"
            change = Finding("slice", f"Slice: {rows.shape[1]} pairs turn, instead of {pairs}.")
            return SideVerification(name=side, tokens=len(rows), changes=(change,))
        choices = [vectors_of_rows(rows, dtype, rope, arrays.get("positions"))]
        text = "Its rows are not the cos and sin of angles, even apart from one common factor."
        change = Finding("no-rotation", text)
    else:
        choices = vectors_of(arrays, side, rope or layers.ropes[0], dims)
    expected = None
    if rope is not None:
        length = seq_len or max(int(float(choices[0].positions.max())) + 1, 1)
        static_ropes = [(k, static_rope(r, length)) for k, r in layers.kinds.items() if r]
        own_static = static_rope(rope, length)
        expected = ExpectedRope(
            own_static,
            rope,
            [item for item in static_ropes if item[1] != own_static],
            length,
        )
    factor = layers.query_factors.get(kind, QueryFactor()) if side == "q" else QueryFactor()
    verdicts = (
        (vectors.dims, _verify_vectors(vectors, expected, factor, advance)) for vectors in choices
    )
    explained = [(order, verdict) for order, verdict in verdicts if verdict is not None]
    # with a wrong order of dimensions some turns may fit by chance, but no cause does
    clear = [(order, verdict) for order, verdict in explained if not is_vague(verdict.changes)]
    best = [(order, verdict) for order, verdict in explained if not verdict] or clear or explained
    if len(best) > 1:
        orders = " and as ".join(repr(order) for order, _ in best)
        raise TensorError(f"{side} can be read as {orders}, and both explain it: give dims")
    none = SideVerification(name=side, tokens=choices[0].num_tokens, changes=(change,))
    return best[0][1] if best else none


def _verify_vectors(
    vectors: Vectors, expected: ExpectedRope | None, factor: QueryFactor, advance: Advance | None
) -> SideVerification | None:
    """The verdict; None if no pairs of coordinates explain the recording as turns."""
    size = vectors.num_tokens
    vectors = vectors.with_coarsest_dtype(_choose_tokens(size, np.array([], np.intp)))
    wrong, lost = _find_bad_tokens(
        vectors, None if expected is None else expected.rope, advance=advance
    )
    if len(lost):
        _check_that_a_table_ends(vectors, lost)
    verdict = SideVerification(name=vectors.name, tokens=size)
    if expected is None and len(wrong):  # the recording may precede the query factor
        wrong, _ = _find_bad_tokens(vectors, None, factor)
    tokens = _choose_tokens(size, wrong)
    sample = vectors.sample(tokens)
    if expected is None:
        return replace(verdict, changes=(_name_change(sample),)) if len(wrong) else verdict
    if not sample.x.any():
        raise TensorError(
            f"{vectors.name} must contain other numbers than 0, from which nothing can be read"
        )
    if not len(wrong):
        undecided, roundings = _find_undecided(sample, expected)
        return replace(verdict, undecided=undecided, roundings=roundings)
    diagnosis = Finder(expected, sample, Tokens(tokens, vectors.positions)).find()
    first, score = _first_wrong(vectors, wrong, expected.rope)
    if not diagnosis.changes:
        return None
    return replace(
        verdict, **diagnosis._asdict(), position=first, score=score, sought_in=len(tokens)
    )


def _find_bad_tokens(
    vectors: Vectors, rope: Rope | None, factor: QueryFactor | None = None, *,
    advance: Advance | None = None,
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:  # fmt: skip
    """The tokens that the rope does not explain, and the tokens that are not finite.

    The first head of every token is checked, and all heads of some tokens. A ``factor`` multiplies
    the vectors recorded before the rotation.
    """
    count = vectors.num_tokens
    chunks = np.array_split(np.arange(count), -(-count // _CHUNK))
    parts = [(chunk, slice(0, 1)) for chunk in chunks]
    parts.append((np.unique(np.linspace(0, count - 1, _SAMPLE).astype(np.intp)), slice(1, None)))
    # samples are [tokens, heads, head_dim]
    wrong, lost = list[NDArray[np.intp]](), list[NDArray[np.intp]]()
    for tokens, heads in parts:
        sample = vectors.sample(tokens, heads)
        is_finite = [np.asarray(np.isfinite(s).all(axis=(1, 2))) for s in (sample.x, sample.y)]
        if not is_finite[0].all():
            raise _not_finite(vectors.name, tokens[~is_finite[0]][0])
        lost.append(tokens[~is_finite[1]])
        tokens, sample = tokens[is_finite[1]], sample.select(is_finite[1])
        if factor is not None:
            places = sample.positions.reshape(len(sample.x), -1).max(axis=1)
            sample = sample._replace(x=factor(places)[:, None, None] * sample.x)
        wrong.append(tokens[~rotates_as(sample, rope).all(axis=1)])
        if advance is not None:
            advance(len(wrong) / len(parts))
    return np.unique(np.concatenate(wrong + lost)), np.unique(np.concatenate(lost))


def _check_that_a_table_ends(vectors: Vectors, lost: NDArray[np.intp]) -> None:
    """Refuse NaN and infinity, unless exactly the tokens from some position on contain them."""
    places = vectors.positions.reshape(vectors.num_tokens, -1).max(axis=1)
    if not np.array_equal(np.flatnonzero(places >= places[lost].min()), lost):
        raise _not_finite(vectors.name, lost[0])


def _not_finite(name: str, token: int) -> TensorError:
    return TensorError(
        f"{name} and {name}_rotated must be finite, got NaN or infinity at token {token}; "
        "leave such tokens out"
    )


def _name_change(sample: Sample) -> Finding:
    """The finding about tokens that should not be rotated but are changed."""
    # [T, heads, head_dim] -> [T, 1, 1]
    sizes = np.maximum((sample.x**2).sum(axis=(1, 2), keepdims=True), 1e-300)
    factors: Floats = (sample.x * sample.y).sum(axis=(1, 2), keepdims=True) / sizes
    if sample._replace(x=factors * sample.x).is_kept().all():
        return make_finding("multiplied", least=factors.min(), most=factors.max())
    return make_finding("turned")


def _choose_tokens(count: int, wrong: NDArray[np.intp]) -> NDArray[np.intp]:
    """The tokens to explain: some evenly spread, some at doubling distances, and wrong ones."""
    spread = np.linspace(0, count - 1, _SAMPLE // 2).astype(np.intp)
    # neighbours of wrong tokens are included, because a restart or a table's end shows there
    neighbours = [t + step for t in wrong[:_WITH_NEIGHBOURS].tolist() for step in (-1, 0, 1)]
    some_wrong = wrong[
        np.linspace(0, max(len(wrong) - 1, 0), min(_WRONG, len(wrong))).astype(np.intp)
    ]
    tokens = np.unique(
        np.array([*spread, *powers_of_two(count), *neighbours, *some_wrong], dtype=np.intp)
    )
    return tokens[(tokens >= 0) & (tokens < count)]


def _first_wrong(
    vectors: Vectors, wrong: NDArray[np.intp], rope: Rope
) -> tuple[float, float | None]:
    """The wrong position nearest to 0, and the error of a unit vector there."""
    # with several axes, a token's position is its largest coordinate
    columns = np.divmod(wrong, vectors.positions.shape[1])
    places = vectors.positions[columns].astype(np.float64).reshape(len(wrong), -1).max(axis=1)
    token = int(np.argmin(np.abs(places)))
    sample, arrangement = vectors.sample(wrong[token : token + 1]), arrangement_of(rope)
    predicted = rotate(sample.x, sample.positions, rope)
    errors = sample._replace(y=sample.y - predicted)
    # in a table each pair is a unit vector
    sizes = np.maximum(np.linalg.norm(predicted, axis=-1), 1e-300)
    if not np.isfinite(errors.y).all():
        return float(places[token]), None
    pair_errors, head_errors = (
        np.abs(errors.pairs(arrangement)[1]),
        np.linalg.norm(errors.y, axis=-1) / sizes,
    )
    return float(places[token]), float((pair_errors if vectors.is_table else head_errors).max())


def _find_undecided(sample: Sample, expected: ExpectedRope) -> tuple[tuple[str, ...], Changes]:
    """What else would explain a recording that fits the rope, and float32 roundings that show."""
    turns = measure_turns(sample, arrangement_of(expected.rope))
    if turns is None:
        return (), ()
    # another factor would show whatever the angles are, so only other ropes remain
    low, high = turns.gain
    fitting = (
        changes[0].sentence
        for changes, rope, *turned in other_ropes(expected, turns.positions)
        if low <= rope.attention_factor <= high and turns.misfit(rope, *turned).max() <= 1
    )
    roundings = find_float32(turns, suppose(expected.rope, turns.positions))
    return tuple(dict.fromkeys(fitting)), roundings


def compare_sides(
    queries: SideVerification, keys: SideVerification, arrays: Arrays, rope: Rope, dims: str | None
) -> tuple[SideVerification, SideVerification]:
    """The verdicts about a layer; if a side differs, extended by how queries and keys differ."""
    if queries.changes == keys.changes:
        return queries, keys
    keys_by_dims = {vectors.dims: vectors for vectors in vectors_of(arrays, "k", rope, dims)}
    for vectors in vectors_of(arrays, "q", rope, dims):
        keys_alike = keys_by_dims.get(vectors.dims)
        if keys_alike is None or keys_alike.num_tokens != vectors.num_tokens:
            continue
        tokens = _choose_tokens(vectors.num_tokens, np.array([], np.intp))
        turns = [
            measure_turns(side.with_coarsest_dtype(tokens).sample(tokens), arrangement_of(rope))
            for side in (vectors, keys_alike)
        ]
        if turns[0] is None or turns[1] is None:
            continue
        tolerance = 2 * float(
            max(side_turns.errors.max() for side_turns in turns if side_turns is not None)
        )
        _, finding = compare_queries_and_keys(turns[0].z, turns[1].z, tolerance)
        differing = keys if keys.changes else queries
        better_names = {"factor-on-one-side": _FACTORS, "keys-turn-backwards": {"direction"}}
        better = better_names.get(finding.name, set[str]())
        remaining = (change for change in differing.changes if change.name not in better)
        extended = replace(differing, changes=in_order((finding, *remaining)))
        return (queries, extended) if differing is keys else (extended, keys)
    return queries, keys
