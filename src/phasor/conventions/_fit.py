"""The explanation of a spectrum that takes the fewest digits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from phasor.axes import Axes
from phasor.conventions._axes import layouts
from phasor.conventions._intervals import Floats, log_base
from phasor.conventions._laws import SLACKS, Explanation, allowed, explanations
from phasor.conventions._report import Finding
from phasor.frequencies import inv_freq as frequencies
from phasor.pairings import by_pairing
from phasor.scaling import Law
from phasor.spec import Rope

# few pairs fit any base to all its digits; as many as this that do so leave no doubt
_MANY = 4
# numbers of no more digits are what somebody chose
_ROUND = 4
_BITS = {"bfloat16": 8, "float16": 11}


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


def best_fit(options: list[dict[str, Any]], f: Floats, uncertainty: Floats) -> Fit | None:
    """The shortest explanation of frequencies ``f``, if there is any.

    Args:
        options: Fields of the `Rope`, but for base and scaling, one of which is right.
        f: Frequencies found, none negative.
        uncertainty: How far off each may be.
    """
    fits = [_fit(one, f, uncertainty) for one in options]
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


def _fit(fields: dict[str, Any], f: Floats, uncertainty: Floats) -> Fit:
    axes: Axes = fields["axes"]
    pairs = fields["rotary_dim"] // 2
    more = (0, pairs - len(f))
    f, uncertainty = np.pad(f, more), np.pad(uncertainty, more)
    spectra = axes.spectra(pairs)
    widest = int(np.argmax(spectra))
    part = slice(sum(spectra[:widest]), sum(spectra[: widest + 1]))
    found: list[Explanation] = []
    tight: list[Explanation] = []
    for slack in SLACKS:
        room = allowed(f, uncertainty, slack)

        def check(base: float, law: Law | None, room: Floats = room) -> bool:
            rope = Rope(**fields, base=base, scaling=law)
            return bool(np.all(np.abs(frequencies(rope) - f) <= room))

        found += [
            one
            for one in explanations(f[part], room[part], head_dim=fields["head_dim"], check=check)
            if one not in found
        ]
        if found and pairs >= _MANY:
            break
        tight = tight or list(found)
    found.sort(key=lambda one: one.digits)
    if found and found[0].digits > _ROUND:
        found = tight or found
    return Fit(fields=fields, explanations=found, inv_freq=f, uncertainty=uncertainty)


def coarse_frequencies(f: Floats, uncertainty: Floats) -> tuple[Floats, Finding] | None:
    """Frequencies that are all numbers of a 16-bit dtype, and what that means."""
    turning = f > 0
    for name, bits in _BITS.items():
        unit = 2.0 ** (np.floor(np.log2(np.where(turning, f, 1.0))) - bits + 1)
        if name == "float16":
            unit = np.maximum(unit, 2.0**-24)  # its subnormal numbers
        near = np.rint(f / unit) * unit
        room = 4 * uncertainty + 2e-7 * f
        sharp = turning & (room < unit / 16)
        if sharp.sum() >= _MANY and np.all(np.abs(near - f)[sharp] <= room[sharp]):
            index = np.arange(len(f), dtype=np.float64)
            loose = unit / np.maximum(f, 1e-300)
            base = log_base(f, loose, len(f), index).exp().simplest()
            return near, Finding(
                name=f"frequencies-in-{name}",
                says=f"Frequencies are held in {name}: each is a {name} number"
                + (f", near the powers of base {base:g}" if base else "")
                + ". A buffer of frequencies followed the model's cast, most likely.",
            )
    return None
