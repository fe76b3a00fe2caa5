"""The explanation of a spectrum that takes the fewest digits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from phasor.axes import Axes
from phasor.identification.axes import layouts
from phasor.identification.intervals import Floats, log_base
from phasor.identification.laws import Explanation, explanations
from phasor.identification.report import Finding
from phasor.pairings import by_pairing
from phasor.rope import Rope
from phasor.scaling import Law

#: How far float64 arithmetic leaves a program's frequencies from the real ones.
EXACT = 1e-14
# and float32's: one rounding, a power with its roundings, and one by way of logarithms
_FLOAT32 = (2.0**-24, 2e-7, 1e-6)
# significant bits, and the exponent of the smallest number
_HELD = {"bfloat16": (8, -133), "float16": (11, -24), "float32": (24, -149)}
# that real numbers are all as near to a dtype's by chance has a probability of one to 2 to this
_SURE = 24


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A dtype of which all frequencies are numbers, more surely than chance allows.

    Attributes:
        dtype: Its name.
        inv_freq: The numbers.
    """

    dtype: str
    inv_freq: Floats


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What explains the frequencies of one slice in one layout of axes.

    Attributes:
        fields: Fields of the `Rope`, but for base and scaling.
        explanations: At least one, the shortest first.
        inv_freq: The frequencies, pairs that were not seen to turn included.
        uncertainty: How far off each may be.
    """

    fields: dict[str, Any]
    explanations: list[Explanation]
    inv_freq: Floats
    uncertainty: Floats


def best_fit(
    options: list[dict[str, Any]], f: Floats, uncertainty: Floats, held: str | None
) -> Fit | None:
    """The shortest explanation of frequencies ``f``, if there is any.

    An explanation is as exact as the measurement. Only frequencies that may be float32 numbers may
    be off by what float32 loses, and where they certainly are, fewer digits are likelier.

    Args:
        options: Fields of the `Rope`, but for base and scaling, one of which is right.
        f: Frequencies found, none negative.
        uncertainty: How far off each may be.
        held: The dtype that they certainly are numbers of, if any.
    """
    fit = _shortest([_fit(one, f, uncertainty, EXACT) for one in options])
    near, _ = _nearest(f, "float32")
    if (fit and held is None) or np.any(np.abs(near - f) > uncertainty):
        return fit
    for slack in _FLOAT32:
        loose = _shortest([_fit(one, f, uncertainty, slack) for one in options])
        if loose is not None:
            return _shortest([loose] if fit is None else [fit, loose])
    return fit


def _shortest(fits: list[Fit]) -> Fit | None:
    found = [fit for fit in fits if fit.explanations]
    return min(found, key=lambda fit: fit.explanations[0].digits, default=None)


def placements(
    fields: dict[str, Any], drivers: tuple[tuple[int, ...], ...], n_axes: int
) -> list[dict[str, Any]]:
    """``fields`` with every layout of axes that fits, over the slice seen or the whole head.

    Interleaved pairs that stand still are not seen, so that the slice may be wider; where axes
    are named in the slice seen, that one is taken.
    """
    whole = (fields["head_dim"] - fields["rotary_start"]) // 2 * 2
    unseen = all(
        by_pairing(fields[name], half=False, interleaved=True)
        for name in ("pairing", "pairing_out")
    )
    found: list[dict[str, Any]] = []
    for width in dict.fromkeys([fields["rotary_dim"], whole if unseen else fields["rotary_dim"]]):
        if not found or n_axes == 1:
            more = ((),) * (width // 2 - len(drivers))
            found += [
                fields | {"rotary_dim": width, "axes": axes}
                for axes in layouts((*drivers, *more), n_axes)
            ]
    return found


def _fit(fields: dict[str, Any], f: Floats, uncertainty: Floats, slack: float) -> Fit:
    axes: Axes = fields["axes"]
    pairs = fields["rotary_dim"] // 2
    more = (0, pairs - len(f))
    f, uncertainty = np.pad(f, more), np.pad(uncertainty, more)
    spectra = axes.spectra(pairs)
    widest = int(np.argmax(spectra))
    part = slice(sum(spectra[:widest]), sum(spectra[: widest + 1]))
    room = uncertainty + slack * f

    def check(base: float, law: Law | None) -> bool:
        rope = Rope(**fields, base=base, scaling=law)
        # logarithms were rounded on the way to the base
        return bool(np.all(np.abs(rope.inv_freq - f) <= room + EXACT * f))

    found = explanations(f[part], room[part], head_dim=fields["head_dim"], check=check)
    return Fit(fields=fields, explanations=found, inv_freq=f, uncertainty=uncertainty)


def held_in(f: Floats, uncertainty: Floats) -> Grid | None:
    """The dtype whose numbers all frequencies are, where real numbers would not be by chance."""
    for dtype, (bits, _) in _HELD.items():
        near, unit = _nearest(f, dtype)
        # a number of few bits may be meant, as the powers of two are
        long = np.ldexp(np.frexp(near)[0], bits // 3) % 1 != 0
        evidence = -np.log2(np.clip(2 * uncertainty[long] / unit[long], 1e-300, 1)).sum()
        if evidence >= _SURE and np.all(np.abs(near - f) <= uncertainty):
            return Grid(dtype=dtype, inv_freq=near)
    return None


def _nearest(f: Floats, dtype: str) -> tuple[Floats, Floats]:
    """The nearest numbers of a dtype, and how far apart those are there."""
    bits, least = _HELD[dtype]
    unit = np.ldexp(1.0, np.maximum(np.frexp(f)[1] - bits, least))
    return np.rint(f / unit) * unit, unit


def grid_finding(grid: Grid) -> Finding:
    """What it means that all frequencies are numbers of a dtype."""
    f, (bits, _) = grid.inv_freq, _HELD[grid.dtype]
    index, loose = np.arange(len(f), dtype=np.float64), np.full(len(f), 2.0 ** (1 - bits))
    base = log_base(f, loose, len(f), index).exp().simplest()
    says = f"Frequencies are held in {grid.dtype}: each is a {grid.dtype} number"
    if grid.dtype != "float32":
        says += f", near the powers of base {base:.15g}" if base else ""
        says += ". A buffer of frequencies followed the model's cast, most likely"
    return Finding(name=f"frequencies-in-{grid.dtype}", says=f"{says}.")
