"""What every target shares: its description, what it is given, and how it refuses.

A target is a program that rotates. Its file says as data what the program can express, and has
one function that writes what the program has to be given for a Rope that it can.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from phasor._checks import short_repr
from phasor._reals import in_reals
from phasor.axes import Axes, OneAxis
from phasor.errors import ConfigError, SpecError
from phasor.extending import with_raised_base
from phasor.layers import LayerRopes
from phasor.pairings import PAIRINGS, Pairing
from phasor.rope import Rope, real_inv_freq
from phasor.scaling import NTK, Linear, NTKFixed, NTKOld, Rule, Yarn
from phasor.scaling.laws import yarn_multiplier


@dataclass(frozen=True, eq=False)  # settings may be arrays
class Part:
    """What a target is given for the layers of one rope, or for the whole model.

    Attributes:
        settings: What to give, by the target's own names: JSON values, and float64 arrays.
        code: How it is given: Python with its imports, which reads the settings as variables; a
            command; or a piece of a file.
        notes: What else has to be done; a sentence each.
        ropes: By kind of layer, the rope that the target then performs, in the pairing that it
            reads.
        as_variables: Whether ``code`` reads the settings as variables; otherwise it contains them.
    """

    settings: Mapping[str, Any]
    code: str
    notes: tuple[str, ...] = ()
    ropes: Mapping[str, Rope] = field(default_factory=dict[str, Rope])
    as_variables: bool = False

    def as_plain(self) -> dict[str, Any]:
        """Everything as JSON values: arrays as lists, infinities as the text ``"inf"``."""
        return {
            "ropes": {kind: rope.to_dict() for kind, rope in self.ropes.items()},
            "settings": {name: _plain(value) for name, value in self.settings.items()},
            "code": self.code,
            "notes": list(self.notes),
        }


class TranslationError(ConfigError):
    """A rope that a target cannot express.

    Attributes:
        nearest: The nearest rope that the target can express; None if none is near.
        radians: By how much a pair's angle then differs at the last position of the context, at
            most, whole turns included; None without ``nearest``.
    """

    def __init__(
        self, message: str, *, nearest: Rope | None = None, radians: float | None = None
    ) -> None:
        super().__init__(message)
        self.nearest = nearest
        self.radians = radians


class RefusalError(TranslationError):
    """What `Target.refuse` raises; `translate` finds the nearest and says how far off it is."""

    def __init__(self, message: str, rope: Rope, context: int, candidates: Iterable[Rope]) -> None:
        super().__init__(message)
        self.rope, self.context = rope, context
        self.candidates = tuple(candidates)

    def with_nearest(self, expressible: Iterable[Rope]) -> TranslationError:
        """The error for users; ``expressible`` are candidates that the target can express."""
        apart = {other: radians_apart(self.rope, other, self.context) for other in expressible}
        if not apart:
            return TranslationError(f"{self}, and nothing that it can is near")
        nearest = min(apart, key=lambda other: apart[other])
        radians, differs = apart[nearest], _differences(self.rope, nearest)
        if radians == 0:
            near = f"exact where a token's coordinates are equal, as in text: {differs}"
        else:
            near = f"off by up to {radians:.3g} radians at position {self.context - 1}: {differs}"
        message = f"{self}; the nearest that it can is {near}"
        return TranslationError(message, nearest=nearest, radians=radians)


@dataclass(frozen=True, kw_only=True)
class Target:
    """A program that rotates, and what it can express.

    Attributes:
        name: What `translate` calls it.
        program: Which part of the program is given what, in half a line.
        source: Where its arguments are documented.
        checked: ``"run"`` where the tests run the program itself with what is written;
            ``"description"`` where they run a function written from its documentation.
        package: What the tests run, as it is installed; ``name`` unless given.
        write: Writes one `Part` for each rope, or for the model; the ropes have passed `check`.
        pairings: Pairings that it turns, for one rope where that depends on its law. Weights of
            the other one are reordered first.
        partial: Whether a part of the head may stay as it is.
        backwards: Whether pairs may turn clockwise.
        axes: Layouts of position axes that it knows.
        rules: Rules that it applies by itself; others are resolved before.
        softmax: Whether ``write`` has a setting or a note for the softmax factor.
        other_pairs_out: Whether it may write other pairs than it reads: ``write`` is given the
            rope's ``pairing_out``.
    """

    name: str
    program: str
    source: str
    checked: Literal["run", "description"]
    write: Callable[[LayerRopes, int], tuple[Part, ...]]
    package: str = ""
    pairings: tuple[Pairing, ...] | Callable[[Rope], tuple[Pairing, ...]] = PAIRINGS
    partial: bool = True
    backwards: bool = False
    axes: tuple[type[Axes], ...] = (OneAxis,)
    rules: tuple[type[Rule], ...] = ()
    softmax: bool = False
    other_pairs_out: bool = False

    def check(self, rope: Rope, context: int) -> None:
        """Refuse a rope that the program cannot express whatever its frequencies are.

        Raises:
            TranslationError: Naming what it lacks, with the nearest rope that it has.
        """
        law = rope.scaling
        if isinstance(law, Rule) and not isinstance(law, self.rules):
            raise TranslationError(
                f"{self.name} keeps one law for all lengths, and {type(law).__name__} picks one by "
                "the length of the sequence; translate rope.at(seq_len), or give --at TOKENS"
            )
        if not isinstance(rope.axes, self.axes):
            self.refuse(
                f"positions of {rope.axes.n_axes} axes ({type(rope.axes).__name__})",
                rope, context, _as_text(rope),
            )  # fmt: skip
        if rope.direction < 0 and not self.backwards:
            self.refuse("pairs that turn clockwise", rope, context, [replace(rope, direction=1)])
        if rope.rotary_dim < rope.head_dim and not self.partial:
            self.refuse(f"{rope.rotary_dim} rotated coordinates of {rope.head_dim}", rope, context)

    def only_rope(self, ropes: LayerRopes, context: int) -> Rope:
        """The rope of all layers, for a program that keeps one.

        Raises:
            TranslationError: If layers have different ropes; the nearest is the first for all.
        """
        first, *others = ropes.ropes
        if others:
            kinds = " and ".join(kind for kind, rope in ropes.kinds.items() if rope is not None)
            near, other = first.at(context), others[0].at(context)
            same_width = [near] if near.num_pairs == other.num_pairs else []
            self.refuse(f"different ropes in {kinds} layers", other, context, same_width)
        return first

    def refuse(
        self, what: str, rope: Rope, context: int, candidates: Iterable[Rope] = ()
    ) -> NoReturn:
        """Raise the error for ``what`` the program lacks; ``candidates`` are ropes near this one.

        The nearest is picked from those that it can express, or whose own candidates it can.
        """
        raise RefusalError(f"{self.name} cannot express {what}", rope, context, candidates)

    def reorder(self, rope: Rope, pairing: Pairing) -> tuple[Rope, str]:
        """The rope with other pairs, and what has to be done with the weights for it."""
        return replace(rope, pairing=pairing, pairing_out=None), (
            f"{self.name} turns {pairing} pairs: reorder the weights first "
            f"(phasor convert FOLDER OUT --to {pairing})."
        )


def per_rope(
    write: Callable[[Rope, int], Part],
) -> Callable[[LayerRopes, int], tuple[Part, ...]]:
    """A `Target.write` that calls ``write``, which leaves out ``ropes``, for each different rope.

    Such a function rotates an array from its first coordinate on; a note says which slice of a
    head that array has to be, where the rotation begins later.
    """

    def part(rope: Rope, ropes: LayerRopes, context: int) -> Part:
        written = write(rope, context)
        notes = written.notes
        if rope.rotary_start:
            notes += (
                f"x is the slice of a head from coordinate {rope.rotary_start} on; the coordinates "
                "before it stay as they are.",
            )
        kinds = {kind: rope for kind, other in ropes.kinds.items() if other == rope}
        return replace(written, ropes=kinds, notes=notes, as_variables=True)

    return lambda ropes, context: tuple(part(rope, ropes, context) for rope in ropes.ropes)


def table_settings(layout: str, rope: Rope, context: int) -> dict[str, Any]:
    """What code that calls `phasor.torch.cos_sin_cache` reads as variables."""
    gain = rope.attention_factor
    return {"rope": rope, "layout": layout, "max_positions": context, "gain": gain}


#: For kernels that read behind the end of a table.
POSITIONS_UNCHECKED = "No position may be max_positions or more: the kernel does not check that."


def softmax_note(factor: float) -> str:
    """What a user of a program that is not given the softmax factor has to do."""
    return f"Multiply the softmax scale by {factor!r} as well, as the model does."


def yarn_mscale(law: Yarn) -> float:
    """The ``mscale`` that says the law's factor on cos and sin without an ``attention_factor``.

    Programs divide `yarn_multiplier` of it by that of ``mscale_all_dim``; for a ``factor`` of at
    most 1 both are 1, whatever this says.
    """
    if law.attention_factor is None or law.factor <= 1:
        return law.mscale
    over = law.attention_factor * yarn_multiplier(law.factor, law.mscale_all_dim)
    return (over - 1) / (yarn_multiplier(law.factor, 1.0) - 1)


@in_reals
def with_simplest_law(rope: Rope) -> Rope:
    """Without a law that changes nothing, or with `Linear` in place of one that acts like it."""
    law = rope.scaling
    if law is None or isinstance(law, (Linear, Rule)) or rope.logit_factor != 1:
        return rope
    plain, scaled = real_inv_freq(replace(rope, scaling=None)), real_inv_freq(rope)
    ratio = plain[0] / scaled[0] if scaled[0] else Decimal(0)
    # the frequencies have 60 digits
    if any(abs(f - s * ratio) > f * Decimal("1e-40") for f, s in zip(plain, scaled, strict=True)):
        return rope
    return replace(rope, scaling=None if ratio == 1 else Linear(factor=float(ratio)))


def ntk_as_base(rope: Rope) -> Rope:
    """The rope with a raised base in place of an NTK law, where that is a base above 1."""
    law = rope.scaling
    with suppress(SpecError):
        if isinstance(law, NTK):
            return with_raised_base(rope, law.factor)
        if isinstance(law, (NTKOld, NTKFixed)):
            assert rope.base is not None, "a law scales the powers of a base"
            # the fixed one divides all pairs by what its fastest one is divided by
            rest = Linear(factor=law.factor ** (1 / rope.num_pairs))
            scaling = rest if isinstance(law, NTKFixed) else None
            return replace(rope, base=rope.base * law.factor, scaling=scaling)
    return rope


def radians_apart(a: Rope, b: Rope, context: int) -> float:
    """The largest difference of a pair's angle at the last position, whole turns included.

    For positions with the same coordinate on all axes. Infinite if the pairs are not as many.
    """
    if a.num_pairs != b.num_pairs:
        return math.inf
    return float((context - 1) * np.abs(_velocities(a) - _velocities(b)).max())


def _velocities(rope: Rope) -> NDArray[np.object_]:
    # exact: float64 frequencies times a million positions would show their rounding
    return np.array([rope.direction * f for f in real_inv_freq(rope)], dtype=object)


def plain_candidates(rope: Rope) -> list[Rope]:
    """Ropes with a base and at most a linear law, near ``rope``: what every program can express.

    The law left out; the base that comes nearest to the scaled frequencies; and that base with
    the positions divided so that the fastest pair is right.
    """
    scaled = rope.inv_freq
    plain = replace(rope, scaling=None, explicit_inv_freq=None)
    fastest = float(scaled.max())
    found = [plain, replace(plain, base=_nearest_base(scaled))]
    if fastest > sys.float_info.min and fastest != 1:
        divided = Linear(factor=1 / fastest)
        found.append(replace(plain, base=_nearest_base(scaled / fastest), scaling=divided))
    return found


def _nearest_base(inv_freq: NDArray[np.float64]) -> float:
    """The base whose plain frequencies are nearest, by the largest difference of a pair."""
    exponents = -np.arange(len(inv_freq)) / len(inv_freq)

    def off(log_base: float) -> float:
        return float(np.abs(np.exp(log_base * exponents) - inv_freq).max())

    low, high = 0.01, 60.0
    for _ in range(6):  # each time a hundredth of the interval is left
        grid = np.linspace(low, high, 201)
        best = int(np.argmin([off(x) for x in grid]))
        low, high = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, 200)])
    return math.exp((low + high) / 2)


def _as_text(rope: Rope) -> list[Rope]:
    """The rope with one axis, where that is the same for positions with equal coordinates."""
    one_spectrum = rope.axes.spectra(rope.num_pairs) == (rope.num_pairs,)
    return [replace(rope, axes=OneAxis())] if one_spectrum else []


def _differences(rope: Rope, other: Rope) -> str:
    """The fields of ``other`` that differ, as they would be written."""
    names = ("base", "scaling", "axes", "direction")
    changed = [
        f"{name}={short_repr(getattr(other, name))}"
        for name in names
        if getattr(rope, name) != getattr(other, name)
    ]
    return ", ".join(changed)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [x if math.isfinite(x) else str(x) for x in value.tolist()]
    return value.to_dict() if isinstance(value, Rope) else value
