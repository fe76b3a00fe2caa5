"""Which position axis drives which pair: text has one axis, images two, videos three.

Sections count *pairs*, one entry per axis, in the order the positions list their axes (time,
height, width). In `Axial` the frequencies start again at 1 in each section. In `Mixed` every axis
turns every pair, at a frequency per axis and pair. In all others one run of frequencies covers all
pairs, so a position with equal coordinates on all axes is rotated exactly as in a rope with one
axis, unless each axis has its own base or law.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from phasor._checks import number, numbers, short_repr, whole
from phasor.errors import SpecError
from phasor.scaling import Law, Rule


@dataclass(frozen=True)
class Axes(ABC):
    """A map from pairs to position axes."""

    summary: ClassVar[str]  # how the axes share the pairs: "Axes drive ... pairs, {summary}."

    @property
    @abstractmethod
    def n_axes(self) -> int:
        """How many coordinates a position has."""

    @abstractmethod
    def axis_of_pair(self, num_pairs: int) -> tuple[int, ...]:
        """The axis that drives each of ``num_pairs`` pairs."""

    def indices(self, num_pairs: int) -> tuple[int, ...] | tuple[tuple[int, ...], ...]:
        """The axis of each pair; for `Mixed` one row per axis."""
        return self.axis_of_pair(num_pairs)

    def counts(self, num_pairs: int) -> tuple[int, ...]:
        """How many of the pairs each axis drives."""
        axis_of_pair = self.axis_of_pair(num_pairs)
        return tuple(axis_of_pair.count(axis) for axis in range(self.n_axes))

    def spectra(self, num_pairs: int) -> tuple[int, ...]:
        """How many pairs each run of frequencies spans; every run starts at frequency 1."""
        return (num_pairs,)

    def ladder(self, axis: int, num_pairs: int) -> tuple[int, dict[int, int]]:
        """The length of the spectrum that an axis takes frequencies from, and its steps by pair."""
        axis_of_pair = self.axis_of_pair(num_pairs)
        return num_pairs, {
            pair: pair for pair, pair_axis in enumerate(axis_of_pair) if pair_axis == axis
        }


@dataclass(frozen=True)
class OneAxis(Axes):
    """A single coordinate drives every pair, as in text."""

    summary = "all of them by the same coordinate"

    @property
    def n_axes(self) -> int:
        return 1

    def axis_of_pair(self, num_pairs: int) -> tuple[int, ...]:
        return (0,) * num_pairs


@dataclass(frozen=True, repr=False)
class _Sections(Axes):
    """Axes that each drive some of the pairs, and may each have a base and a law of their own."""

    sections: tuple[int, ...]
    base: tuple[float, ...] | None = field(default=None, kw_only=True)
    scaling: tuple[Law | None, ...] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.sections, (str, bytes)) or not hasattr(self.sections, "__iter__"):
            raise SpecError(
                "sections must be a pair count for each axis, such as "
                f"{type(self).__name__}((16, 24, 24)) where a head has 64 pairs, "
                f"got {short_repr(self.sections)}"
            )
        counts = tuple(whole(f"sections[{i}]", n, least=0) for i, n in enumerate(self.sections))
        if len(counts) < 2:
            raise SpecError(
                f"sections must name at least two axes, got {list(counts)}; "
                "one axis is OneAxis(), the default"
            )
        object.__setattr__(self, "sections", counts)
        if self.base is not None:
            bases = self._check_axis_values("base", self.base, "(256.0, 1e4, 1e4)")
            checked = tuple(number(f"base[{i}]", base, above=1) for i, base in enumerate(bases))
            object.__setattr__(self, "base", checked)
        if self.scaling is not None:
            example = "(None, NTK(factor=2.0), NTK(factor=2.0))"
            laws = self._check_axis_values("scaling", self.scaling, example)
            for axis, law in enumerate(laws):
                _check_law_of_axis(axis, law)
            object.__setattr__(self, "scaling", laws)

    def __repr__(self) -> str:
        settings = [(f.name, getattr(self, f.name)) for f in fields(self)]
        listed = ", ".join(f"{name}={value!r}" for name, value in settings if value is not None)
        return f"{type(self).__name__}({listed})"

    @property
    def n_axes(self) -> int:
        return len(self.sections)

    def _check_axis_values(self, name: str, values: Any, example: str) -> tuple[Any, ...]:
        is_sequence = hasattr(values, "__iter__") and not isinstance(values, (str, bytes))
        items = tuple(values) if is_sequence else ()
        if len(items) != self.n_axes:
            raise SpecError(
                f"{name} of the axes must have an entry for each of {self.n_axes} axes, such as "
                f"{example} for three, got {short_repr(values)}; pass a single one to "
                f"the Rope, as its {name}"
            )
        return items

    def _check_sum(self, num_pairs: int) -> None:
        if sum(self.sections) != num_pairs:
            halves = tuple(n // 2 for n in self.sections)
            is_width = sum(self.sections) == 2 * num_pairs and not any(n % 2 for n in self.sections)
            raise SpecError(
                f"sections {list(self.sections)} must add up to the number of pairs "
                f"(rotary_dim / 2 = {num_pairs}), got {sum(self.sections)}"
                f"{f'; these are coordinates: write {halves}' if is_width else ''}"
            )

    def axis_of_pair(self, num_pairs: int) -> tuple[int, ...]:
        """The axis of each pair; here every axis has consecutive pairs."""
        self._check_sum(num_pairs)
        return tuple(axis for axis, n in enumerate(self.sections) for _ in range(n))


def _check_law_of_axis(axis: int, law: object) -> None:
    name = f"scaling[{axis}] of the axes"
    if isinstance(law, Rule):
        raise SpecError(
            f"{name} must be a law, got the rule {type(law).__name__}: a rule picks its law by the "
            "number of tokens, not by the size of an axis; pick the law with its .at(n)"
        )
    if law is None:
        return
    if not isinstance(law, Law):
        raise SpecError(
            f"{name} must be a law of phasor.scaling (such as NTK(factor=2.0)), or None for an "
            f"unscaled axis, got {short_repr(law)}"
        )
    attention_factor, softmax_factor = law.temperature()
    text = f"{name} must not change the logits, but {type(law).__name__} multiplies"
    if attention_factor != 1:
        raise SpecError(
            f"{text} cos and sin by {attention_factor:g}: a rotation has one factor for all "
            f"axes; write attention_factor=1.0 here, and give gain={attention_factor:g} to the "
            "rotation"
        )
    if softmax_factor != 1:
        raise SpecError(
            f"{text} the softmax scale by {softmax_factor:g}: write mscale_all_dim=0.0 here, "
            "and multiply the scale yourself"
        )


@dataclass(frozen=True, repr=False)
class Sectioned(_Sections):
    """One spectrum cut into consecutive sections, one per axis (Qwen2-VL, 2409.12191).

    An axis with its own ``base`` or ``scaling`` (see `Axial`) takes its pairs from the spectrum of
    that base and law over all pairs.

    >>> Sectioned((1, 2, 1)).axis_of_pair(4)
    (0, 1, 1, 2)
    """

    summary = "in consecutive sections of one spectrum"


@dataclass(frozen=True, repr=False)
class Axial(_Sections):
    """Consecutive sections, each with its own full spectrum (RoPE-ViT, 2403.13298).

    In a section of ``n`` pairs, pair ``j`` turns by ``base ** (-j / n)``. FLUX's
    ``axes_dim = [16, 56, 56]`` counts coordinates and is ``Axial((8, 28, 28))``.

    Args:
        sections: The number of pairs of each axis.
        base: A base for each axis, instead of the Rope's ``base``, which is for all axes.
        scaling: A law for each axis, None for one that is not scaled, instead of the Rope's
            ``scaling``. Rules, and laws that change the logits, are refused.

    >>> from phasor import Rope
    >>> from phasor.scaling import NTK
    >>> axes = Axial((2, 2), base=(100.0, 1e4), scaling=(None, NTK(factor=2.0)))
    >>> Rope(head_dim=8, pairing="half", axes=axes).inv_freq
    array([1.   , 0.1  , 1.   , 0.005])
    """

    summary = "in consecutive sections, each with its own spectrum"

    def spectra(self, num_pairs: int) -> tuple[int, ...]:
        self._check_sum(num_pairs)
        return tuple(n for n in self.sections if n)

    def ladder(self, axis: int, num_pairs: int) -> tuple[int, dict[int, int]]:
        count, first = self.sections[axis], sum(self.sections[:axis])
        return count, {first + step: step for step in range(count)}


@dataclass(frozen=True, repr=False)
class InterleavedSections(_Sections):
    """Axes dealt out in turn, so that each drives fast and slow pairs (Qwen3-VL).

    Pair ``p`` belongs to axis ``a = p % n_axes`` while ``p < n_axes * sections[a]``; all other
    pairs belong to the first axis. As in the models, the sections need not add up to the number
    of pairs: ``sections[0]`` is ignored, and so are counts that reach beyond the last pair.

    >>> InterleavedSections((4, 2, 2)).axis_of_pair(8)
    (0, 1, 2, 0, 1, 2, 0, 0)
    >>> InterleavedSections((2, 3, 3)).axis_of_pair(8)
    (0, 1, 2, 0, 1, 2, 0, 1)
    """

    summary = "dealt out in turn"

    def axis_of_pair(self, num_pairs: int) -> tuple[int, ...]:
        return tuple(
            p % self.n_axes if p < self.n_axes * self.sections[p % self.n_axes] else 0
            for p in range(num_pairs)
        )


@dataclass(frozen=True, repr=False)
class Alternating(_Sections):
    """Height and width alternate on the fast pairs, time drives the slow ones.

    The axes of ERNIE-4.5-VL and VideoRoPE (2502.05173): ``sections`` is (time, height,
    width). The first pair belongs to height, and height and width must be equal.

    >>> Alternating((1, 2, 2)).axis_of_pair(5)
    (1, 2, 1, 2, 0)
    """

    summary = "height and width in turn on the fast pairs, time on the slow ones"

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.sections) != 3 or self.sections[1] != self.sections[2]:
            raise SpecError(
                "sections must be (time, height, width) with height equal to width, "
                f"got {list(self.sections)}"
            )

    def axis_of_pair(self, num_pairs: int) -> tuple[int, ...]:
        self._check_sum(num_pairs)
        time, height, _ = self.sections
        return (1, 2) * height + (0,) * time


@dataclass(frozen=True)
class Mixed(Axes):
    """Every axis turns every pair, and the angles add up (RoPE-Mixed, RoPE-ViT 2403.13298, eq. 14).

    The commuting case of STRING (2502.02562), shared by all heads; a `phasor.torch.Rotation` takes
    angles by head. A step on axis ``a`` turns pair ``k`` by ``inv_freq[a][k]`` radians, positive or
    negative. The Rope has no other frequencies: `Rope.inv_freq` is the fastest that a unit step in
    any direction turns a pair.

    >>> Mixed(((1.0, 0.5), (0.0, -2.0))).indices(2)
    ((0, 0), (1, 1))
    """

    inv_freq: tuple[tuple[float, ...], ...]
    summary = "each turned by the sum over all axes"

    def __post_init__(self) -> None:
        rows: Any = self.inv_freq if hasattr(self.inv_freq, "__iter__") else ()
        rows = [numbers(f"inv_freq[{axis}]", row) for axis, row in enumerate(rows)]
        if len(rows) < 2 or len({*map(len, rows)}) > 1:
            raise SpecError(
                "inv_freq must be a row for each of two axes or more, with a number for each pair, "
                "such as Mixed([[0.5] * 64] * 3) where a head has 64 pairs, "
                f"got {short_repr(self.inv_freq)}"
            )
        # turns -0.0 into 0.0, so that equal ropes have equal JSON
        object.__setattr__(self, "inv_freq", tuple(tuple(f + 0.0 for f in row) for row in rows))

    @property
    def n_axes(self) -> int:
        return len(self.inv_freq)

    def axis_of_pair(self, num_pairs: int) -> tuple[int, ...]:
        raise SpecError("axes must not be Mixed here, because every axis turns every pair")

    def indices(self, num_pairs: int) -> tuple[tuple[int, ...], ...]:
        if len(self.inv_freq[0]) != num_pairs:
            raise SpecError(
                "inv_freq of the axes must hold one number per pair (rotary_dim / 2 = "
                f"{num_pairs}), got {len(self.inv_freq[0])}"
            )
        return tuple((axis,) * num_pairs for axis in range(self.n_axes))

    def counts(self, num_pairs: int) -> tuple[int, ...]:
        return (num_pairs,) * self.n_axes

    def spectra(self, num_pairs: int) -> tuple[int, ...]:
        return ()  # Mixed holds its frequencies


#: By their names in JSON. `identify` reports the first one that fits.
AXES: dict[str, type[Axes]] = {
    "one": OneAxis,
    "sectioned": Sectioned,
    "axial": Axial,
    "interleaved": InterleavedSections,
    "alternating": Alternating,
    "mixed": Mixed,
}
