"""The scaling laws: pure functions from unscaled to scaled frequencies.

The classes form three groups: laws that stretch every pair by one formula, laws that keep fast
pairs and interpolate slow ones, and laws that decide for each pair on its own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Decimal
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

from phasor._checks import NamedFields, choice, number, numbers, whole
from phasor._reals import PI, cos_sin_of_turns, in_reals, powers
from phasor.errors import SpecError

Frequencies = tuple[Decimal, ...]

_ONE, _ZERO = Decimal(1), Decimal(0)

#: The check of each field, by name; a name means the same in every law and rule.
_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor"), partial(number, above=0)),
    **dict.fromkeys(("beta_fast", "beta_slow", "attention_factor"), partial(number, above=0)),
    **dict.fromkeys(("short_attention_factor", "long_attention_factor"), partial(number, above=0)),
    **dict.fromkeys(("mscale", "mscale_all_dim"), partial(number, least=0, most=1e9)),
    "exponent": partial(number, least=0),
    **dict.fromkeys(("factors", "short_factors", "long_factors"), partial(numbers, above=0)),
    "fraction": partial(number, least=0, most=1),
    "original_max_positions": partial(whole, least=1),
    "num_pairs": partial(whole, least=2),
    "truncate": partial(choice, allowed=(True, False)),
    "clip": partial(choice, allowed=("soft", "hard")),
}


def check_fields(law: Any, **checks: Callable[[str, Any], Any]) -> None:
    """Replace the fields of a law or rule by checked values, from ``checks`` or `_CHECKS`."""
    for field in fields(law):
        check = checks.get(field.name, _CHECKS.get(field.name))
        value = getattr(law, field.name)
        if check is not None and not (value is None and field.default is None):
            object.__setattr__(law, field.name, check(field.name, value))


class Temperature(NamedTuple):
    """How a law changes the size of attention logits."""

    attention_factor: float = 1.0  # multiplies cos and sin, so its square multiplies the logits
    softmax_factor: float = 1.0  # multiplies the logits, in addition to the attention factor


@dataclass(frozen=True, kw_only=True)
class Law(NamedFields, ABC):
    """A static scaling law: from unscaled frequencies to scaled ones.

    Laws compute in 60-digit decimals; results are rounded to floats only where they are used.
    """

    def __post_init__(self) -> None:
        check_fields(self)

    @abstractmethod
    def apply(self, plain: Frequencies, base: Decimal) -> Frequencies:
        """The scaled frequencies of a full spectrum.

        ``plain`` has one frequency per pair, ``base ** (-2k/d)`` with ``d = 2 * len(plain)``, in
        radians per position.
        """

    def temperature(self) -> Temperature:
        """The factors by which the law changes the logits; both are 1 for most laws."""
        return Temperature()


def scale_alike(a: Law | None, b: Law | None) -> bool:
    """Whether the laws have the same numbers, except those of their temperature."""
    if a is None or b is None or type(a) is not type(b):
        return a == b
    names = {field.name for field in fields(a)} - {"attention_factor", "mscale", "mscale_all_dim"}
    return all(getattr(a, name) == getattr(b, name) for name in names)


@lru_cache(maxsize=4096)  # searches try many laws with the same base
@in_reals
def _ln(value: Decimal) -> Decimal:
    return value.ln()


# Laws that stretch every pair by one formula: interpolation and the NTK family.


@dataclass(frozen=True, kw_only=True)
class _Stretch(Law):
    factor: float


def _divide(plain: Frequencies, factor: float) -> Frequencies:
    return tuple(f / Decimal(factor) for f in plain)


@dataclass(frozen=True, kw_only=True)
class Linear(_Stretch):
    """Every frequency divided by ``factor``: position interpolation (Chen et al. 2306.15595).

    Position ``p`` at the divided frequency has the angle of ``p / factor`` at the original one.

    >>> from phasor import Rope
    >>> from phasor.scaling import Linear
    >>> Rope(head_dim=4, pairing="half", base=100.0, scaling=Linear(factor=2.0)).inv_freq
    array([0.5 , 0.05])
    """

    def apply(self, plain: Frequencies, base: Decimal) -> Frequencies:
        return _divide(plain, self.factor)


def _divide_by_powers(plain: Frequencies, factor: float, last: int, first: int = 0) -> Frequencies:
    """Pair ``k`` divided by ``factor ** ((k + first) / last)``."""
    # `powers` needs one product per pair; a Decimal power takes 0.1 ms, so seconds for a wide head
    multipliers = powers(Decimal(factor), -1 / Decimal(last), len(plain) + first)[first:]
    return tuple(f * multiplier for f, multiplier in zip(plain, multipliers, strict=True))


@dataclass(frozen=True, kw_only=True)
class NTK(_Stretch):
    """The base replaced by ``base * factor ** (d / (d - 2))``: NTK-aware scaling.

    The fastest pair is kept and the slowest is divided by exactly ``factor`` (bloc97; YaRN
    2309.00071, eq. 16). Hunyuan's constant ``alpha`` is this law's ``factor``.
    """

    def apply(self, plain: Frequencies, base: Decimal) -> Frequencies:
        last = len(plain) - 1
        if last == 0:
            raise SpecError("NTK scaling needs at least two pairs (rotary_dim >= 4), got one")
        return _divide_by_powers(plain, self.factor, last)

    def raised_base(self, base: float, num_pairs: int) -> float:
        """The base that has the same effect without a law: ``base * factor ** (n / (n - 1))``."""
        power = Decimal(num_pairs) / (num_pairs - 1)
        return float(Decimal(base) * Decimal(self.factor) ** power)


@dataclass(frozen=True, kw_only=True)
class NTKOld(_Stretch):
    """The base multiplied by ``factor``: ``(base * factor) ** (-2k/d)`` (Su, kexue.fm/9675)."""

    def apply(self, plain: Frequencies, base: Decimal) -> Frequencies:
        return _divide_by_powers(plain, self.factor, len(plain))


@dataclass(frozen=True, kw_only=True)
class NTKFixed(_Stretch):
    """Pair ``k`` divided by ``factor ** (2(k+1)/d)`` (Su's "fixed" NTK, kexue.fm/9706).

    The slowest pair is divided by exactly ``factor``; unlike NTK-aware scaling the fastest one
    slows down too.
    """

    def apply(self, plain: Frequencies, base: Decimal) -> Frequencies:
        return _divide_by_powers(plain, self.factor, len(plain), first=1)


@dataclass(frozen=True, kw_only=True)
class NTKMixed(_Stretch):
    """Pair ``k`` multiplied by ``exp(-a (k+1)**exponent)`` (Su's "mixed" NTK, kexue.fm/9706).

    ``a = ln(factor) / (d/2)**exponent``. An exponent of 1 is `NTKFixed`, of 0 is `Linear`; the
    post uses 0.625.
    """

    exponent: float = 0.625

    def apply(self, plain: Frequencies, base: Decimal) -> Frequencies:
        power, last = Decimal(self.exponent), len(plain)
        # (k / last) ** exponent by logarithms: a power of Decimals takes five times as long
        parts = ((power * (_ln(Decimal(k)) - _ln(Decimal(last)))).exp() for k in range(1, last + 1))
        ln_factor = _ln(Decimal(self.factor))
        return tuple(f * (-ln_factor * part).exp() for f, part in zip(plain, parts, strict=True))


# Laws that keep fast pairs, interpolate slow ones, and blend the pairs in between.


def _clip(value: Decimal) -> Decimal:
    return min(max(value, _ZERO), _ONE)


def _blend(fast: Frequencies, slow: Frequencies, weights: Frequencies) -> Frequencies:
    """``weight * fast + (1 - weight) * slow``, pair by pair."""
    return tuple(f * w + s * (1 - w) for f, s, w in zip(fast, slow, weights, strict=True))


def _turn_ramp(plain: Frequencies, context: int, betas: tuple[float, float]) -> Frequencies:
    """Weight of each pair's unscaled frequency, from 1 to 0: linear in its turns, or a step."""
    fast, slow = map(Decimal, betas)

    def weight(f: Decimal) -> Decimal:
        turns = context * f / (2 * PI)
        if fast == slow:
            return _ONE if turns >= fast else _ZERO
        return _clip((turns - slow) / (fast - slow))

    return tuple(map(weight, plain))


def _index_ramp(
    num_pairs: int, base: Decimal, context: int, betas: tuple[float, float], truncate: bool
) -> Frequencies:
    """Weight of each pair's unscaled frequency, from 1 to 0: a ramp linear in the pair's index."""

    def index(turns: float) -> Decimal:
        # the index, a real number, of the pair that makes this many turns over the context
        return num_pairs * (context / (2 * PI * Decimal(turns))).ln() / _ln(base)

    low, high = index(betas[0]), index(betas[1])
    if truncate:
        low = low.to_integral_value(rounding=ROUND_FLOOR)
        high = high.to_integral_value(rounding=ROUND_CEILING)
    # d - 1, not d/2 - 1, because checkpoints were trained with it
    low, high = max(low, _ZERO), min(high, Decimal(2 * num_pairs - 1))
    if low == high:
        high += Decimal("0.001")
    return tuple(1 - _clip((k - low) / (high - low)) for k in range(num_pairs))


@dataclass(frozen=True, kw_only=True)
class _Extension(Law):
    factor: float
    original_max_positions: int

    def _check_order(self, larger: str, smaller: str) -> None:
        high, low = getattr(self, larger), getattr(self, smaller)
        if high < low:
            raise SpecError(f"{larger} must be at least {smaller} ({low:g}), got {high:g}")


def yarn_multiplier(factor: float, coefficient: float) -> float:
    """YaRN's ``m(x) = 0.1 x ln(factor) + 1``; 1 without an extension (2309.00071, 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * coefficient * math.log(factor) + 1.0


@dataclass(frozen=True, kw_only=True)
class _YarnTemperature(_Extension):
    """The fields that both forms of YaRN share: the ends of the ramp and the logit factors."""

    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_order("beta_fast", "beta_slow")

    def temperature(self) -> Temperature:
        """DeepSeek's form of YaRN's section 3.4; its defaults give the paper's ``0.1 ln s + 1``.

        With ``m(x) = 0.1 x ln(factor) + 1``, cos and sin are multiplied by ``attention_factor``, by
        default ``m(mscale) / m(mscale_all_dim)``. The softmax scale is multiplied by
        ``m(mscale_all_dim) ** 2``.
        """
        all_dim = yarn_multiplier(self.factor, self.mscale_all_dim)
        attention_factor = self.attention_factor
        if attention_factor is None:
            attention_factor = yarn_multiplier(self.factor, self.mscale) / all_dim
        return Temperature(attention_factor, all_dim**2)


@dataclass(frozen=True, kw_only=True)
class Yarn(_YarnTemperature):
    """YaRN as checkpoints use it: a ramp linear in the pair's index.

    This is what the reference code of Peng et al. (2309.00071), transformers, vLLM and
    llama.cpp compute. The paper's own ramp is linear in turns and differs by up to 55 %: see
    `YarnPaper`.

    Args:
        factor: The extended context divided by the original one.
        original_max_positions: The context before the extension.
        beta_fast: Pairs with more turns than this over the context are kept.
        beta_slow: Pairs with fewer turns than this are divided by ``factor``.
        truncate: Round the ends of the ramp outwards to whole indices (gpt-oss does not).
        mscale: DeepSeek's coefficient of the factor on cos and sin.
        mscale_all_dim: DeepSeek's coefficient of the factor on the softmax scale.
        attention_factor: The factor on cos and sin, if the model states it.

    >>> Yarn(factor=40.0, original_max_positions=4096, mscale_all_dim=1.0).temperature()
    Temperature(attention_factor=1.0, softmax_factor=1.8738542070926265)
    """

    truncate: bool = True

    def apply(self, plain: Frequencies, base: Decimal) -> Frequencies:
        betas = (self.beta_fast, self.beta_slow)
        weights = _index_ramp(len(plain), base, self.original_max_positions, betas, self.truncate)
        return _blend(plain, _divide(plain, self.factor), weights)


@dataclass(frozen=True, kw_only=True)
class YarnPaper(_YarnTemperature):
    """YaRN as the paper prints it: a ramp linear in turns (2309.00071, eq. 17-23).

    No known checkpoint was trained with it; `Yarn` is the one they use.
    """

    def apply(self, plain: Frequencies, base: Decimal) -> Frequencies:
        if self.beta_fast == self.beta_slow:
            raise SpecError(
                "beta_fast must be above beta_slow for a ramp in turns, both are "
                f"{self.beta_fast:g}"
            )
        betas = (self.beta_fast, self.beta_slow)
        weights = _turn_ramp(plain, self.original_max_positions, betas)
        return _blend(plain, _divide(plain, self.factor), weights)


@dataclass(frozen=True, kw_only=True)
class Llama3(_Extension):
    """Keep fast pairs, divide slow ones by ``factor``, blend in between (Llama 3.1).

    A pair with at least ``high_freq_factor`` turns over the original context is kept; one with
    fewer than ``low_freq_factor`` is divided by ``factor``. Llama 4 Scout sets both to 1:
    then the law is a step.
    """

    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_order("high_freq_factor", "low_freq_factor")

    def apply(self, plain: Frequencies, base: Decimal) -> Frequencies:
        betas = (self.high_freq_factor, self.low_freq_factor)
        weights = _turn_ramp(plain, self.original_max_positions, betas)
        return _blend(plain, _divide(plain, self.factor), weights)


@dataclass(frozen=True, kw_only=True)
class PartNTK(_Extension):
    """NTK-by-parts, the predecessor of YaRN: a blend of unscaled, NTK-aware and linear scaling.

    One index ramp (1.25 to 0.75 turns) blends NTK-aware and linear scaling, another (16 to 2 turns)
    blends unscaled frequencies and the result. The constants are from the YaRN authors' repository.
    """

    def apply(self, plain: Frequencies, base: Decimal) -> Frequencies:
        def ramp(fast: float, slow: float) -> Frequencies:
            return _index_ramp(len(plain), base, self.original_max_positions, (fast, slow), True)

        ntk_aware = NTK(factor=self.factor).apply(plain, base)
        slow = _blend(ntk_aware, _divide(plain, self.factor), ramp(1.25, 0.75))
        return _blend(plain, slow, ramp(16.0, 2.0))


# Laws that stop, fade, round or divide pairs individually.


@dataclass(frozen=True, kw_only=True)
class Proportional(Law):
    """The fastest ``fraction`` of the pairs turn, the others stand still: p-RoPE.

    Round and Round We Go (2410.06205), section 6.1; transformers' ``proportional`` (Gemma 4).
    ``int(fraction * d // 2)`` pairs turn at ``base ** (-2k/d) / factor``, where ``d`` is the full
    rotary width, unlike in a partial rotation. With a fraction of 0 no pair turns.
    """

    fraction: float
    factor: float = 1.0

    def apply(self, plain: Frequencies, base: Decimal) -> Frequencies:
        turning = int(self.fraction * (2 * len(plain)) // 2)
        return _divide(plain[:turning], self.factor) + (_ZERO,) * (len(plain) - turning)


@dataclass(frozen=True, kw_only=True)
class Hope(Law):
    """Pairs that never complete a turn within the context stand still (HoPE, 2410.21216)."""

    original_max_positions: int

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

    def apply(self, plain: Frequencies, base: Decimal) -> Frequencies:
        num_fast = len(plain) - self.num_pairs
        if num_fast < 0:
            raise SpecError(
                f"num_pairs must be at most the number of pairs ({len(plain)}), "
                f"got {self.num_pairs}"
            )

        def weight(j: int) -> Decimal:
            if self.clip == "hard":
                return _ZERO
            cos, _ = cos_sin_of_turns(Decimal(j) / (2 * (self.num_pairs - 1)))
            return (1 + cos) / 2

        slow = plain[num_fast:]
        return plain[:num_fast] + tuple(f * weight(j) for j, f in enumerate(slow))


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

    def apply(self, plain: Frequencies, base: Decimal) -> Frequencies:
        if len(self.factors) != len(plain):
            raise SpecError(
                f"factors must hold one number per pair ({len(plain)}), got {len(self.factors)}"
            )
        return tuple(f / Decimal(s) for f, s in zip(plain, self.factors, strict=True))

    def temperature(self) -> Temperature:
        return Temperature(self.attention_factor)
