"""Laws that stretch every pair by one formula: interpolation and the NTK family."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from phasor._checks import number
from phasor._reals import powers
from phasor.errors import SpecError
from phasor.scaling._law import Frequencies, Law


@dataclass(frozen=True, kw_only=True)
class _Stretch(Law):
    factor: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "factor", number("factor", self.factor, above=0))


@dataclass(frozen=True, kw_only=True)
class Linear(_Stretch):
    """Every frequency divided by ``factor``: position interpolation (Chen et al. 2306.15595).

    Rotating by ``p`` at the divided frequency is rotating by ``p / factor`` at the plain one.

    >>> from phasor import Rope
    >>> from phasor.scaling import Linear
    >>> Rope(head_dim=4, pairing="half", base=100.0, scaling=Linear(factor=2.0)).inv_freq
    array([0.5 , 0.05])
    """

    def apply(self, plain: Frequencies, base: Decimal) -> Frequencies:
        return tuple(f / Decimal(self.factor) for f in plain)


@dataclass(frozen=True, kw_only=True)
class NTK(_Stretch):
    """The base raised to ``base * factor ** (d / (d - 2))``, NTK-aware scaling.

    The fastest pair is kept and the slowest is divided by exactly ``factor`` (bloc97; YaRN
    2309.00071, eq. 16). Hunyuan's constant ``alpha`` is this law's ``factor``.
    """

    def apply(self, plain: Frequencies, base: Decimal) -> Frequencies:
        last = len(plain) - 1
        if last == 0:
            raise SpecError("NTK scaling needs at least two pairs (rotary_dim >= 4), got one")
        slower = powers(Decimal(self.factor), -1 / Decimal(last), len(plain))
        return tuple(f * by for f, by in zip(plain, slower, strict=True))


@dataclass(frozen=True, kw_only=True)
class NTKOld(_Stretch):
    """The base multiplied by ``factor``: ``(base * factor) ** (-2k/d)`` (Su, kexue.fm/9675)."""

    def apply(self, plain: Frequencies, base: Decimal) -> Frequencies:
        return tuple(
            f * Decimal(self.factor) ** (-Decimal(k) / len(plain)) for k, f in enumerate(plain)
        )


@dataclass(frozen=True, kw_only=True)
class NTKFixed(_Stretch):
    """Pair ``k`` divided by ``factor ** (2(k+1)/d)`` (Su's "fixed" NTK, kexue.fm/9706).

    The slowest pair is divided by exactly ``factor``; unlike NTK-aware scaling the fastest one
    slows down too.
    """

    def apply(self, plain: Frequencies, base: Decimal) -> Frequencies:
        return tuple(
            f * Decimal(self.factor) ** (-Decimal(k + 1) / len(plain)) for k, f in enumerate(plain)
        )


@dataclass(frozen=True, kw_only=True)
class NTKMixed(_Stretch):
    """Pair ``k`` multiplied by ``exp(-a (k+1)**exponent)`` (Su's "mixed" NTK, kexue.fm/9706).

    ``a = ln(factor) / (d/2)**exponent``. An exponent of 1 is `NTKFixed`, of 0 is `Linear`; the
    post uses 0.625.
    """

    exponent: float = 0.625

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "exponent", number("exponent", self.exponent, least=0))

    def apply(self, plain: Frequencies, base: Decimal) -> Frequencies:
        power = Decimal(self.exponent)
        a = Decimal(self.factor).ln() / Decimal(len(plain)) ** power
        return tuple(f * (-a * Decimal(k + 1) ** power).exp() for k, f in enumerate(plain))
