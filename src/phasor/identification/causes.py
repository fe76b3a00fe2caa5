"""What makes recorded turns differ from those of a rope: positions, frequencies, roundings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasor.describe import ranges
from phasor.errors import PhasorError
from phasor.identification.blocks import Arrangement
from phasor.identification.explaining import explain
from phasor.identification.hypotheses import (
    COARSE,
    FACTORS,
    Changes,
    Hypothesis,
    Meant,
    alternatives,
    compare,
    compare_layouts,
    exchanged_axes,
    factor_missing,
    precisions,
    rounded,
    rows_of,
    suppose,
)
from phasor.identification.report import Finding
from phasor.identification.spectrum import ROUNDING, Floats, Interval, doubling, find_spectrum
from phasor.identification.turns import (
    Sample,
    Turns,
    angle_errors,
    arrangements,
    coarser,
    measure_turns,
    rotates_as,
)
from phasor.rope import Rope
from phasor.scaling import Linear

#: What differs, and texts of what that cannot be told from.
Found = tuple[Changes, tuple[str, ...]]
#: The names of changes, the most important first; those of roundings follow.
_ORDER = (
    *("heads", "tokens", "not-turned", "pairing", "slice", "direction", "twice", "layer", "offset"),
    *("restart", "first-row", "clamped", "table-end", "length", "base", "law-missing"),
    *("law", "law-parameter", "frequencies", "factor-missing", "factor-twice", "factor", "axes"),
)
# of two differences, one is mostly one of these
_OFTEN = {"direction", "slice", "layer", "base", "law-missing", "length"}
_NEAR = 64  # offsets of positions that are tried
_FEW = 6  # tokens on which they are, and that are more than chance
_STEPS = sorted(range(-3, 4), key=abs)
_MAX_CANDIDATES = 4096
_LOG_BASES = math.log(20), math.log(1e10)
_GRID = 129


def measure(sample: Sample, rope: Rope) -> Iterator[list[Turns]]:
    """The turns for each arrangement of pairs that explains the sample: first of the slice meant.

    If none does, one may if cos and sin are rounded.
    """
    for row_dtype in (None, *coarser(sample.dtype)):
        is_found = False
        for first, last in ((0, 4), (4, None)):
            candidates = islice(arrangements(rope, sample), first, last)
            measured = (measure_turns(sample, one, row_dtype) for one in candidates)
            fitting = (turns for turns in measured if turns is not None)
            yield (found := [*islice(fitting, 4 if is_found else 16)])
            is_found |= bool(found)
        if is_found:
            return


@dataclass(frozen=True)
class Finder:
    """Looks for what differs in some tokens of a recording."""

    meant: Meant
    sample: Sample  # of these tokens
    tokens: NDArray[np.intp]
    positions: NDArray[Any]  # of the whole recording, [batch, seq] or [batch, seq, n_axes]

    def find(self) -> Found:
        """What differs, the most important first; nothing if nothing explains it.

        If nothing explains all tokens, heads or tokens are explained that are turned wrongly.
        """
        whole = self._explain_best()
        if whole and not is_vague(whole[0]):
            return whole
        good = rotates_as(self.sample, self.meant.rope)
        heads, is_bad = (np.logical_not(good.all(axis=axis)) for axis in (0, 1))
        if heads.any() and not heads.all():
            changes, undecided = replace(self, sample=self.sample.of_heads(heads)).find()
            if changes and not is_vague(changes):
                which = ranges(np.flatnonzero(heads).tolist())
                text = f"Only some heads are wrong, counted from 0: {which}."
                return (Finding("heads", text), *changes), undecided
        if is_bad.all() or not is_bad.any():
            return whole or ((), ())
        bad = replace(self, sample=self.sample.of(is_bad), tokens=self.tokens[is_bad])
        part = bad._explain_best()
        if whole and (part is None or is_vague(part[0])):
            return whole
        changes, undecided = part or ((), ())
        text = f"Only {self._name_tokens(is_bad)} are wrong"
        text += "." if changes else ", and turned by no position."
        return (Finding("tokens", text), *changes), undecided

    def _explain_best(self) -> Found | None:
        results: list[Found] = []
        for measured in measure(self.sample, self.meant.rope):
            results += map(self._explain, measured)
            if any(not is_vague(changes) for changes, _ in results):
                break  # interleaved pairs that stand still may be of the slice or not
        if not results:
            return None
        changes, undecided = min(results, key=lambda one: (is_vague(one[0]), len(one[0])))
        return tuple(sorted(changes, key=_order_of)), undecided

    def _name_tokens(self, is_bad: NDArray[np.bool_]) -> str:
        places = self.sample.positions.reshape(len(is_bad), -1).max(axis=1)
        good, bad = places[~is_bad], places[is_bad]
        if good.max() < bad.min():
            return f"tokens from position {bad.min():.15g} on"
        if bad.max() < good.min():
            return f"tokens up to position {bad.max():.15g}"
        return f"some tokens, such as {self.tokens[is_bad][0]} at position {bad[0]:.15g},"

    def _explain(self, turns: Turns) -> Found:
        layout = [*compare_layouts(self.meant.rope, turns.arrangement)]
        if turns.row_dtype is not None:
            text = f"Cos and sin are rounded to {turns.row_dtype}."
            layout.append(Finding(f"table-in-{turns.row_dtype}", text))
        rope = _arranged(self.meant.rope, turns.arrangement)
        for level in () if rope is None else self._levels(rope, turns):
            fitting: list[tuple[int, float, Changes]] = []
            for hypothesis in level:
                worst = float(turns.misfit(hypothesis).max())
                gain = _gain_changes(hypothesis.rope, turns)
                if worst <= 1 and (changes := (*layout, *hypothesis.changes, *gain)):
                    fitting.append((len(changes), round(worst, 1), changes))
            if fitting:
                fitting.sort(key=lambda one: one[:2])
                best, *others = (changes for *_, changes in fitting)
                names = {change.name for change in best}
                others = [one for one in others if not names <= {change.name for change in one}]
                texts = (" ".join(change.sentence for change in other) for other in others[:3])
                return best, tuple(dict.fromkeys(texts))
        found = self._measure_frequencies(turns) or self._name_pairs(turns)
        return (*layout, *found), ()

    def _levels(self, rope: Rope, turns: Turns) -> Iterator[Iterator[Hypothesis]]:
        """Hypotheses of no change, of one, and of two, the likelier before the others."""
        places = turns.positions
        same = suppose(rope, places)
        if not _gain_changes(rope, turns):
            yield iter([same])
        single = [*alternatives(self.meant._replace(rope=rope), places)]

        def one() -> Iterator[Hypothesis]:
            yield same
            yield from single
            twice = Finding("twice", "It is rotated twice: R(2p) in place of R(p).")
            yield suppose(rope, 2 * places, twice)
            yield from self._moved(same, turns)
            yield from precisions(rope, places)
            yield from exchanged_axes(rope, places)

        def two(names: set[str]) -> Iterator[Hypothesis]:
            for first in single:
                name = first.changes[0].name
                if (name in _OFTEN) == (names == _OFTEN):
                    rest = None if name == "direction" else names - {name}
                    for second in alternatives(Meant(first.rope), places, rest):
                        yield second._replace(changes=first.changes + second.changes)

        yield one()
        yield two(_OFTEN)
        yield (moved for first in single for moved in self._moved(first, turns))
        yield two({"slice", "base"})

    # ---- positions ----

    def _moved(self, hypothesis: Hypothesis, turns: Turns) -> Iterator[Hypothesis]:
        """The hypothesis at other positions, which explain every token."""
        changes, rope, places, rows = hypothesis
        n_axes = rope.axes.n_axes

        def everywhere(moved: NDArray[Any]) -> NDArray[Any]:
            return moved if n_axes == 1 else np.repeat(moved[:, None], n_axes, axis=1)

        # R(p + offset) = R(p) R(offset): [offsets, T, num_pairs]
        offsets = np.array(sorted({*range(-_NEAR, _NEAR + 1)} - {0}, key=abs))
        moved = rows[:_FEW] * (rows_of(rope, everywhere(offsets)) / rope.attention_factor)[:, None]
        off = np.abs(turns.z[:_FEW] - turns.scale(rope) * moved)
        fits = np.all(off <= turns.allowed(rope, places)[:_FEW], axis=(1, 2))
        for offset in offsets[fits][:3].tolist():
            yield suppose(rope, places + offset, *changes, *_offset_changes(offset))
        every = places if n_axes == 1 else places[:, 0]
        if n_axes > 1 and np.any(places != every[:, None]):
            return  # of text all coordinates are one number
        mapped = self._map_positions(rope, turns, every, everywhere)
        if mapped is not None:
            names = self._name_positions(mapped, every)
            yield suppose(rope, everywhere(mapped), *changes, *names)

    def _map_positions(
        self, rope: Rope, turns: Turns, places: NDArray[Any],
        everywhere: Callable[[NDArray[Any]], NDArray[Any]],
    ) -> NDArray[np.int64] | None:  # fmt: skip
        """The position in or near the recording as which each token is turned, if there is one."""
        recorded = np.rint(self.positions.reshape(-1)[:_MAX_CANDIDATES])
        counted = np.arange(min(int(self.positions.shape[1]), _MAX_CANDIDATES), dtype=np.float64)
        known: Floats = np.concatenate([recorded, counted])
        shifted = [known + by for by in _STEPS]
        coarse = [rounded(places, dtype) for places in shifted for dtype in COARSE]
        coarse += [rounded(known, dtype) + by for dtype in COARSE for by in _STEPS]
        candidates = np.unique(np.concatenate([*shifted, *coarse])).astype(np.int64)
        scale = turns.scale(rope)
        rows = scale * rows_of(rope, everywhere(candidates))
        slack = scale * rope.attention_factor * angle_errors(candidates, rope.inv_freq, turns.dtype)
        mapped = np.empty(len(turns.z), np.int64)
        for token, place in enumerate(places):
            fits = np.abs(turns.z[token] - rows) <= turns.errors[token] + slack
            fitting = candidates[fits.all(axis=1)]
            if not len(fitting):
                return None
            mapped[token] = fitting[np.argmin(np.abs(fitting - place))]
        return mapped

    def _name_positions(self, mapped: NDArray[np.int64], places: NDArray[Any]) -> list[Finding]:
        if not mapped.any():
            return [Finding("not-turned", "It is not turned: every token is as at position 0.")]
        column = self.tokens % self.positions.shape[1]
        # the first tokens show an offset alone, where others restart
        off = mapped - places
        by = off[0] if np.all(off[:3] == off[0]) else 0
        changes = _offset_changes(by)
        wrong = off != by
        if not wrong.any():
            return changes
        first, last = int(np.argmax(wrong)), int(mapped.max())
        where = (
            f"token {self.tokens[first]} (position {places[first]:.15g}) is turned as "
            f"{mapped[first]}"
        )
        if len(self.positions) > 1 and np.array_equal(mapped, self.positions[0, column]):
            text = f"Positions: every row of the batch has those of the first: {where}."
            return [Finding("first-row", text)]
        for dtype in COARSE:
            change = Finding(f"positions-in-{dtype}", f"Positions are rounded to {dtype}: {where}.")
            for step in _STEPS:
                choices = rounded(places + step, dtype), rounded(places, dtype) + step
                if any(np.array_equal(mapped, choice) for choice in choices):
                    return [*_offset_changes(step), change]
            far = np.abs(mapped) > 1 / ROUNDING[dtype]
            if far.sum() >= _FEW:
                # what tokens are turned as, and what they would be without a restart
                is_rounded, *others = (
                    np.array_equal(rounded(some[far], dtype), some[far])
                    for some in (mapped, column, places)
                )
                changes += [change] if is_rounded and not all(others) else []
        if np.array_equal(mapped, np.minimum(places + by, last)):
            text = f"Table: it ends, positions from {last - by + 1:.15g} on turn as {last}."
            return [*changes, Finding("clamped", text)]
        if not mapped[wrong].any():
            text = f"a table ends, or positions are not counted on: {where}, and so are others"
            return [*changes, Finding("table-end", f"Positions: {text}.")]
        text = "restart elsewhere"
        if np.array_equal(mapped, column):
            text = "are counted through and do not restart"
        return [*changes, Finding("restart", f"Positions {text}: {where}.")]

    # ---- frequencies ----

    def _measure_frequencies(self, turns: Turns) -> list[Finding] | None:
        """What the frequencies are, and by how much positions are off."""
        places, offset, found = turns.positions, 0, list[Rope]()
        pairs = turns.z.shape[1]
        index = None if places.ndim > 1 or np.any(places % 1) else doubling(places)
        if index is not None:
            z, gain = turns.z[index], sum(turns.gain) / 2
            errors = np.minimum(turns.errors[index] / gain, np.pi)
            spectrum = find_spectrum(places[index].astype(int).tolist(), z, errors)
            drivers = np.ones((1, z.shape[1]), dtype=bool)
            sizes, rounding = np.full(z.shape, gain), ROUNDING[turns.dtype]
            report = explain(turns.arrangement, spectrum, drivers, sizes, rounding=rounding)
            offset = 0 if report.position_offset % 1 else int(report.position_offset)
            if report.rope is not None and report.known_law:
                found.append(replace(report.rope, inv_freq_dtype="exact"))
        offsets = dict.fromkeys((offset, *_STEPS))
        moved = [(places + by if by else places, _offset_changes(by)) for by in offsets]
        moved += [(rounded(places, dtype), [Finding(f"positions-in-{dtype}",
                   f"Positions are rounded to {dtype}.")]) for dtype in COARSE]  # fmt: skip
        for at, changes in moved if places.ndim == 1 else ():
            ropes = [*found, *self._find_bases(turns, at)]
            likely = [suppose(rope, at, *changes) for rope in ropes if rope.num_pairs == pairs]
            if at is places:
                likely += [moved for one in likely[:4] for moved in self._moved(one, turns)]
            fitting = [
                [*one.changes, *compare(self.meant.rope, one.rope), *_gain_changes(one.rope, turns)]
                for one in likely
                if turns.misfit(one).max() <= 1
            ]
            if fitting:
                return min(fitting, key=len)
        return None

    def _find_bases(self, turns: Turns, places: NDArray[Any]) -> Iterator[Rope]:
        """The rope with bases that tokens allow, with its law, none or others, either direction.

        The bases that some tokens allow are found on a grid, then on finer ones for more tokens;
        where later ones allow none, as after a restart, the first may be right all the same.
        """
        meant = _arranged(self.meant.rope, turns.arrangement)
        if meant is None or meant.base is None:
            return
        order = np.argsort(np.abs(places), kind="stable")
        linear = (Linear(factor=factor) for factor in FACTORS if places is turns.positions)
        for law, direction in product(dict.fromkeys((meant.scaling, None, *linear)), (1, -1)):
            (low, high), bases = _LOG_BASES, Interval(1, 0)
            for some in (order[:4], order[:8], order[:16], order[:32], order, order, order):
                count = _GRID + int((high - low) * float(np.abs(places[some]).max()) / 8)
                logs = np.linspace(low, high, min(count, 4 * _MAX_CANDIDATES))
                rope = replace(meant, scaling=law, direction=direction)
                kept = _allowed_bases(rope, logs, places, turns, some)
                if not len(kept):
                    break
                step = float(logs[1] - logs[0])
                low, high = float(kept[0]) - step, float(kept[-1]) + step
                bases = Interval(low, high).exp()
            for base in bases.decimals():
                yield replace(meant, base=base, scaling=law, direction=direction)

    def _name_pairs(self, turns: Turns) -> list[Finding]:
        """From which pair on the frequencies differ."""
        rope = _arranged(self.meant.rope, turns.arrangement)
        if rope is None:
            return [Finding("frequencies", "Frequencies differ.")]
        misfit = turns.misfit(suppose(rope, turns.positions)).max(axis=0)
        pairs: list[int] = np.flatnonzero(misfit > 1).tolist()
        if not pairs:
            text = "Angles differ by a little more than rounding explains."
            return [Finding("angles", text), *_gain_changes(rope, turns)]
        text = f"Frequencies differ from pair {pairs[0]} on: pairs {ranges(pairs)}."
        return [Finding("frequencies", text), *_gain_changes(rope, turns)]


def _order_of(change: Finding) -> int:
    return _ORDER.index(change.name) if change.name in _ORDER else len(_ORDER)


def is_vague(changes: Changes) -> bool:
    """Whether it is said that something differs, and not why."""
    return any(change.name in ("frequencies", "angles", "tokens") for change in changes)


def _offset_changes(by: float) -> list[Finding]:
    return [Finding("offset", f"Positions are off by {by:+.15g}.")] if by else []


def _allowed_bases(
    rope: Rope, logs: Floats, places: NDArray[Any], turns: Turns, some: NDArray[np.intp]
) -> Floats:
    """The logarithms of bases, of those on an even grid, that some tokens allow."""
    z, (low, high) = turns.z[some], turns.gain
    allowed, gain = turns.errors[some] + (high - low) / 2, (low + high) / 2
    pairs: Floats = np.arange(rope.num_pairs) / rope.num_pairs
    # what the law divides powers by changes slowly: logarithms at some bases, [bases, pairs]
    few: Floats = np.linspace(float(logs[0]), float(logs[-1]), 65)
    lawful = np.array([replace(rope, base=math.exp(log)).inv_freq for log in few.tolist()])
    divided = np.log(np.maximum(lawful, 1e-300)) + few[:, None] * pairs
    change = np.abs(np.diff(divided, axis=0, append=divided[-1:]))
    change = np.maximum(change, np.roll(change, 1, axis=0))
    kept: list[float] = []
    for part in np.array_split(logs, 1 + len(logs) * z.size // 4_000_000):
        ratio, off = (_interpolate(table, few, part) for table in (divided, change))
        f = np.exp(ratio - part[:, None] * pairs)  # [bases, pairs]
        angles = rope.direction * places[some][:, None] * f[:, None]  # [bases, T, pairs]
        # neighbours on the grid are a step apart, and float32 angles rounded
        unsure = pairs * (logs[1] - logs[0]) + off[:, None] + 2.0**-20
        slack = gain * np.minimum(np.abs(angles) * unsure, 2)
        fits = np.abs(z - gain * np.exp(1j * angles)) <= allowed + slack
        kept += part[fits.all(axis=(1, 2))].tolist()
    return np.array(kept)


def _interpolate(table: Floats, at: Floats, wanted: Floats) -> Floats:
    """Rows of a table ``[at, n]`` between those that there are, ``[wanted, n]``."""
    columns: list[Floats] = [np.interp(wanted, at, column) for column in table.T]
    return np.stack(columns, axis=1)


def _arranged(rope: Rope, arrangement: Arrangement) -> Rope | None:
    """The rope with the pairs of an arrangement; None if its law or axes do not fit them."""
    assert arrangement.pairing is not None
    try:
        return replace(
            rope, pairing=arrangement.pairing, pairing_out=arrangement.pairing_out,
            rotary_dim=arrangement.rotary_dim, rotary_start=arrangement.rotary_start,
        )  # fmt: skip
    except PhasorError:
        return None


def _gain_changes(rope: Rope, turns: Turns) -> list[Finding]:
    """How the factor of cos and sin differs from the rope's."""
    factor, (low, high) = rope.attention_factor, turns.gain
    if low <= factor <= high:
        return []
    if low <= 1 <= high:
        return [factor_missing(factor)]
    if low <= factor**2 <= high:
        return [Finding("factor-twice", f"Factor: {factor:.7g} is multiplied twice.")]
    return [Finding("factor", f"Factor: {(low + high) / 2:.6g} in place of {factor:.7g}.")]
