"""Laws that decide pair by pair: stop some, clip some, snap some, or follow a list."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Decimal
from typing import Literal

from phasor._checks import choice, number, numbers, whole
from phasor._reals import PI, cos_sin_of_turns
from phasor.errors import SpecError
from phasor.scaling._law import Frequencies, Law, Temperature

_ZERO = Decimal(0)


@dataclass(frozen=True, kw_only=True)
class Proportional(Law):
    """The fastest ``fraction`` of the pairs turn, the others stand still: p-RoPE.

    Round and Round We Go (2410.06205), section 6.1; transformers' ``proportional`` (Gemma 4).
    Exponents run over the whole rotary width, which is what sets it apart from a partial
    rotation: ``int(fraction * d // 2)`` pairs keep ``base ** (-2k/d) / factor``.

    A fraction of 0 is no position embedding at all.
    """

    fraction: float
    factor: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "fraction", number("fraction", self.fraction, least=0, most=1))
        object.__setattr__(self, "factor", number("factor", self.factor, above=0))

    def apply(self, plain: Frequencies, base: Decimal) -> Frequencies:
        turning = int(self.fraction * (2 * len(plain)) // 2)
        return tuple(
            f / Decimal(self.factor) if k < turning else _ZERO for k, f in enumerate(plain)
        )


@dataclass(frozen=True, kw_only=True)
class Hope(Law):
    """Pairs that never complete a turn within the context stand still (HoPE, 2410.21216)."""

    original_max_positions: int

    def __post_init__(self) -> None:
        length = whole("original_max_positions", self.original_max_positions, least=1)
        object.__setattr__(self, "original_max_positions", length)

    def apply(self, plain: Frequencies, base: Decimal) -> Frequencies:
        return tuple(f if f * self.original_max_positions >= 2 * PI else _ZERO for f in plain)


@dataclass(frozen=True, kw_only=True)
class Cope(Law):
    """The slowest ``num_pairs`` frequencies faded out by a half cosine (CoPE, 2602.05258).

    The ``j``-th of them (from 0) is multiplied by ``(1 + cos(pi j / (num_pairs - 1))) / 2``;
    ``clip="hard"`` stops all of them.
    """

    num_pairs: int = 20
    clip: Literal["soft", "hard"] = "soft"

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_pairs", whole("num_pairs", self.num_pairs, least=2))
        choice("clip", self.clip, ("soft", "hard"))

    def apply(self, plain: Frequencies, base: Decimal) -> Frequencies:
        kept = len(plain) - self.num_pairs
        if kept < 0:
            raise SpecError(
                f"num_pairs must be at most the number of pairs ({len(plain)}), "
                f"got {self.num_pairs}"
            )

        def weight(j: int) -> Decimal:
            if self.clip == "hard":
                return _ZERO
            cos, _ = cos_sin_of_turns(Decimal(j) / (2 * (self.num_pairs - 1)))
            return (1 + cos) / 2

        return plain[:kept] + tuple(f * weight(j) for j, f in enumerate(plain[kept:]))


@dataclass(frozen=True, kw_only=True)
class Resonance(Law):
    """Every wavelength rounded to a whole number of positions (Resonance RoPE, 2403.00071)."""

    def apply(self, plain: Frequencies, base: Decimal) -> Frequencies:
        return tuple(
            2 * PI / (2 * PI / f).to_integral_value(rounding=ROUND_HALF_EVEN) for f in plain
        )


@dataclass(frozen=True, kw_only=True)
class PerPair(Law):
    """Pair ``k`` divided by ``factors[k]``: LongRoPE's (2402.13753) or any searched list."""

    factors: tuple[float, ...]
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "factors", numbers("factors", self.factors, above=0))
        given = number("attention_factor", self.attention_factor, above=0)
        object.__setattr__(self, "attention_factor", given)

    def apply(self, plain: Frequencies, base: Decimal) -> Frequencies:
        if len(self.factors) != len(plain):
            raise SpecError(
                f"factors must hold one number per pair ({len(plain)}), got {len(self.factors)}"
            )
        return tuple(f / Decimal(s) for f, s in zip(plain, self.factors, strict=True))

    def temperature(self) -> Temperature:
        return Temperature(self.attention_factor)
