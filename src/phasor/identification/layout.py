"""The first question: which coordinates make a pair, which slice turns, by which axes.

All evidence chooses among `candidate_arrangements`, the narrowest first. A function gives whole
maps, which show every pair, and `arrange_blocks` takes the candidate with exactly these pairs. A
recording has fewer vectors at a position than a head has coordinates, so it only shows which
coordinates change: `arrangements` lists the candidates that contain these, and `measure_turns`
keeps a candidate only if all its pairs turn by one common factor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import permutations, product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phasor.axes import AXES, Axes, Mixed, OneAxis
from phasor.errors import PhasorError, SpecError
from phasor.identification.hypotheses import Change, Hypothesis, Positions, suppose
from phasor.identification.report import Changes, Finding, make_finding
from phasor.identification.spectrum import Floats, Spectrum
from phasor.identification.turns import Arrangement, Sample, Turns, arrangement_of
from phasor.pairings import PAIRINGS, by_pairing
from phasor.rope import Rope, with_frequencies, with_listed_frequencies


class MixedCoordinates(NamedTuple):
    """Coordinates that a map mixes only with each other: those it reads, and those it writes."""

    read: tuple[int, ...]
    written: tuple[int, ...]


def find_blocks(maps: Floats, rounding: float) -> list[MixedCoordinates]:
    """The smallest blocks of coordinates that no map ``[P, out, in]`` mixes with each other."""
    mixed = np.abs(maps).max(axis=0)
    connected = mixed > 0
    # products with zero are exact, so rounding errors occur only in maps that mix more than pairs
    if connected.sum(axis=0).max() > 2:
        connected = mixed > 16 * rounding * mixed.max()
    # float32 because NumPy multiplies bools slowly; a coordinate set to 0 writes nothing: [in, in]
    links = connected.astype(np.float32)
    reached, links = (links.T @ links + np.eye(len(links), dtype=np.float32)) > 0, links * 0
    while not np.array_equal(reached, links):
        links = reached.astype(np.float32)
        reached = (links @ links) > 0
    # the coordinates that each block reads [blocks, in] and writes [blocks, out], each block once
    read = reached[reached.argmax(axis=1) == np.arange(len(reached))]
    written = (connected[:, block].any(axis=1) for block in read)
    return [
        MixedCoordinates(*(tuple(np.flatnonzero(side).tolist()) for side in sides))
        for sides in zip(read, written, strict=True)
    ]


def arrange_blocks(blocks: list[MixedCoordinates], head_dim: int) -> Arrangement | None:
    """The narrowest arrangement with exactly these pairs; None if a block is wider than a pair."""
    pairs = [block for block in blocks if len(block.read) == 2]
    moves = [block for block in blocks if len(block.read) == 1 and block.read != block.written]
    is_wide = any(len(read) > 2 or len(read) != len(written) for read, written in blocks)
    if is_wide or not pairs:
        return None
    lowest = min(block.read[0] for block in pairs + moves)
    highest = max(max(block.read + block.written) for block in pairs + moves)
    for candidate in candidate_arrangements(lowest, highest, head_dim, pairs[0]):
        written: dict[tuple[int, ...], tuple[int, ...]] = {}
        for read, write in zip(
            candidate.read.T.tolist(), candidate.written.T.tolist(), strict=True
        ):
            for members in (slice(2), slice(1), slice(1, 2)):
                written[tuple(read[members])] = tuple(write[members])
        if all(written.get(block.read) == block.written for block in pairs + moves):
            return candidate
    # pairs that fit no pairing, in the order of their first coordinates
    layout = Rope(head_dim=head_dim, pairing="half", rotary_start=lowest, rotary_dim=2 * len(pairs))
    columns = (np.array(coordinates).T for coordinates in zip(*pairs, strict=True))
    return Arrangement(layout, *columns, is_named=False)


def candidate_arrangements(
    lowest: int, highest: int, head_dim: int, pair: MixedCoordinates | None = None
) -> Iterator[Arrangement]:
    """The arrangements whose slice contains ``lowest`` to ``highest``, the narrowest first."""
    head = Rope(head_dim=head_dim, pairing="half", rotary_dim=2)  # head_dim may be odd
    # the first pair is the fastest; if it does not turn, the slice most likely begins at 0
    for start in dict.fromkeys([lowest, 0, *range(lowest - 1, 0, -1)]):
        widths = (w for w in range(2, head_dim - start + 1, 2) if start + w > highest)
        for width, pairing, output_pairing in itertools.product(widths, PAIRINGS, PAIRINGS):
            # with a ``pair``, only arrangements whose pairs are as far apart as its coordinates
            gaps = [
                by_pairing(p, half=width // 2, interleaved=1) for p in (pairing, output_pairing)
            ]
            if pair is None or gaps == [b - a for a, b in pair]:
                layout = replace(head, rotary_start=start, rotary_dim=width)
                yield arrangement_of(replace(layout, pairing=pairing, pairing_out=output_pairing))


def measure_noise(arrangement: Arrangement, maps: Floats, rounding: float) -> float:
    """How far maps ``[..., out, in]`` are from turning pairs by one angle and keeping the rest."""
    # rounding, once or at every step, keeps zeros and the equality of the two cosines
    first, second = arrangement.factors(maps)
    rest = maps * (1 - np.eye(maps.shape[-1]))
    rest[..., arrangement.written.T[:, :, None], arrangement.read.T[:, None, :]] = 0
    noise = float(max(np.abs(first - second).max(), np.abs(rest).max()))
    # a deviation far larger than rounding is a mistake, not noise
    return noise if noise <= 32 * rounding * np.abs(maps).max() else 0.0


def arrangements(rope: Rope, sample: Sample) -> Iterator[Arrangement]:
    """Arrangements of the rope's slice, the rope's first, then all that contain every change.

    Slices are as narrow as the changed coordinates allow, or begin and end at quarters of the head.
    A table does not show which coordinates make a pair, so the rope's arrangement is the only one.
    """
    if sample.is_table:
        yield arrangement_of(rope)
        return
    expected_pairings = rope.pairing, rope.output_pairing
    quarter = max(rope.head_dim // 4, 1)

    def is_unlikely(arrangement: Arrangement) -> tuple[bool, bool]:
        pairings = arrangement.layout.pairing, arrangement.layout.output_pairing
        return pairings != expected_pairings, pairings[0] != pairings[1]

    def all_arrangements() -> Iterator[Arrangement]:
        for pairing, output_pairing in sorted(
            itertools.product(PAIRINGS, PAIRINGS), key=lambda p: p != expected_pairings
        ):
            yield arrangement_of(replace(rope, pairing=pairing, pairing_out=output_pairing))
        candidates = [*arrangements_from_changes(sample)]
        narrowest = min((arrangement.layout.rotary_dim for arrangement in candidates), default=0)
        yield from sorted(
            (
                arrangement
                for arrangement in candidates
                if arrangement.layout.rotary_dim == narrowest
                or not (
                    arrangement.layout.rotary_start % quarter
                    or arrangement.layout.rotary_dim % quarter
                )
            ),
            key=is_unlikely,
        )

    # the rope's arrangements come again among the others, and for a single pair all are equal
    seen = set[bytes]()
    for arrangement in all_arrangements():
        if (coordinates := np.stack([arrangement.read, arrangement.written]).tobytes()) not in seen:
            seen.add(coordinates)
            yield arrangement


def arrangements_from_changes(sample: Sample) -> Iterator[Arrangement]:
    """Arrangements that contain every changed coordinate, the narrowest first."""
    changed = np.flatnonzero(~sample.is_kept().all(axis=(0, 1)))
    # the slice may be wider than the changed coordinates, because some pairs may not turn
    if len(changed):
        yield from candidate_arrangements(int(changed[0]), int(changed[-1]), sample.x.shape[-1])


#: Whether an axis turns a pair, ``[n_axes, pairs]``.
Drivers = NDArray[np.bool_]


def find_drivers(spectrum: Spectrum, turns: Turns | None, rounding: float) -> Drivers:
    """Which axis turns each pair, from ``turns`` at unequal coordinates; all False if none does.

    Without ``turns`` there is a single axis, which drives every pair that turns.
    """
    f = spectrum.inv_freq
    if turns is None:
        return f[None] != 0
    units = turns.z / np.maximum(np.abs(turns.z), 1e-300)
    places: Floats = turns.positions[..., None].astype(np.float64)  # [T, n_axes, 1]
    # the program may have rounded angles to the dtype of the vectors
    tolerance = rounding * (8 + np.abs(places * f))
    tolerance += np.abs(places) * spectrum.uncertainty + spectrum.phase_uncertainty
    predicted = np.exp(1j * (spectrum.phase + places * f))
    axis_explains = (np.abs(predicted - units[:, None]) <= tolerance).all(axis=0)
    # if no single axis explains a pair's turns, several axes turn it
    return np.where(axis_explains.sum(axis=0) == 1, axis_explains, ~axis_explains.any(axis=0))


def possible_slices(layout: Rope, drivers: Drivers) -> list[Rope]:
    """Ropes without frequencies, one for each slice and axes that fit."""
    n_axes, num_pairs = drivers.shape
    widths = [layout.rotary_dim]
    # interleaved pairs that do not turn leave no trace: the slice may be as wide as the head
    if "half" not in (layout.pairing, layout.output_pairing):
        widths.append((layout.head_dim - layout.rotary_start) // 2 * 2)
    ropes: list[Rope] = []
    for width in dict.fromkeys(widths):
        if not ropes or n_axes == 1:  # several axes fit a wider slice too easily
            padded = np.pad(drivers, ((0, 0), (0, width // 2 - num_pairs)))
            ropes += [replace(layout, rotary_dim=width, axes=axes) for axes in _find_axes(padded)]
    return ropes


def _find_axes(drivers: Drivers) -> list[Axes]:
    """The axes that assign every pair that turns to the axis measured for it."""
    n_axes, pairs = drivers.shape
    if n_axes == 1:
        return [OneAxis()]
    counts, unseen = drivers.sum(axis=1).tolist(), ~drivers.any(axis=0)
    kinds: list[Any] = [kind for kind in AXES.values() if kind is not OneAxis]
    candidates: list[Axes] = []
    # pairs that do not turn may belong to any axis
    for kind, extras in product(kinds, _distribute(int(unseen.sum()), n_axes)):
        sections = tuple(n + extra for n, extra in zip(counts, extras, strict=True))
        try:
            axes: Axes = kind(sections)
            axis_of_pair = axes.axis_of_pair(pairs)
        except SpecError:
            continue
        # interleaved sections may give an axis another number of pairs than they name
        fits = np.all(drivers[axis_of_pair, range(pairs)] | unseen)
        if fits and axes.counts(pairs) == sections:
            candidates.append(axes)
    return candidates


def _distribute(count: int, n_axes: int) -> list[tuple[int, ...]]:
    """All ways to distribute ``count`` pairs over the axes."""
    if n_axes == 1:
        return [(count,)]
    return [(n, *rest) for n in range(count + 1) for rest in _distribute(count - n, n_axes - 1)]


def compare_layouts(expected: Rope, actual: Rope) -> Changes:
    """How the coordinates of pairs differ from the expected ones."""

    def texts(rope: Rope) -> tuple[str, str]:
        written = "" if rope.pairing_out is None else f" read and {rope.pairing_out} written"
        last = rope.rotary_start + rope.rotary_dim - 1
        return f"{rope.pairing}{written}", f"{rope.rotary_start} to {last}"

    (pairing, part), (expected_pairing, expected_part) = texts(actual), texts(expected)
    changes: list[Finding] = []
    if pairing != expected_pairing:
        changes.append(make_finding("pairing", found=pairing, expected=expected_pairing))
    if part != expected_part:
        changes.append(make_finding("slice", found=part, expected=expected_part))
    return (*changes,)


def narrower(rope: Rope) -> Iterator[Change]:
    """Ropes with a narrower slice, which a measured layout cannot show if pairs are interleaved."""
    if "interleaved" not in (rope.pairing, rope.output_pairing):
        return
    for width in (rope.rotary_dim * eighths // 16 * 2 for eighths in (4, 2, 1, 6, 3, 5, 7)):
        with suppress(PhasorError):
            part = replace(rope, rotary_dim=width)
            all_pairs = (*part.inv_freq.tolist(), *[0.0] * (rope.num_pairs - part.num_pairs))
            changes = compare_layouts(rope, part)
            if (factor := rope.attention_factor) != 1:  # it applies only to the slice
                changes += (make_finding("factor-missing", factor=factor),)
            yield changes, with_frequencies(rope, explicit_inv_freq=all_pairs)


def other_axes(rope: Rope) -> Iterator[Rope]:
    """Ropes that assign pairs to the axes in another way, or all pairs to the first axis."""
    if rope.axes.n_axes == 1 or isinstance(rope.axes, Mixed):
        return
    rope = with_listed_frequencies(rope)
    yield replace(rope, axes=OneAxis())
    kinds: list[Any] = [kind for kind in AXES.values() if kind is not OneAxis]
    orders = dict.fromkeys(permutations(rope.axes.counts(rope.num_pairs)))
    for kind, sections in product(kinds, orders):
        with suppress(PhasorError):
            yield replace(rope, axes=kind(sections))


def exchanged_axes(rope: Rope, places: Positions) -> Iterator[Hypothesis]:
    """The rope's rotation with coordinates in another order."""
    n_axes = rope.axes.n_axes
    same, *orders = permutations(range(n_axes))
    taken = [(order, f"coordinates {order} are taken as {same}") for order in orders]
    single = [((k,) * n_axes, f"every pair is turned by coordinate {k}") for k in range(1, n_axes)]
    for order, text in taken + single:
        yield suppose(rope, places[:, order], make_finding("axes", found=text))


def arranged(rope: Rope, arrangement: Arrangement) -> Rope | None:
    """The rope with the pairs of an arrangement; None if its law or axes do not fit these pairs."""
    fields = ("pairing", "pairing_out", "rotary_dim", "rotary_start")
    with suppress(PhasorError):
        return replace(rope, **{name: getattr(arrangement.layout, name) for name in fields})
    return None
