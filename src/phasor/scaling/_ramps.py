"""Laws that keep fast pairs, interpolate slow ones and blend in between."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

from phasor._checks import choice, number, whole
from phasor._reals import PI
from phasor.errors import SpecError
from phasor.scaling._law import Frequencies, Law, Temperature
from phasor.scaling._uniform import NTK

_ONE, _ZERO = Decimal(1), Decimal(0)


def _clip(value: Decimal) -> Decimal:
    return min(max(value, _ZERO), _ONE)


def _blend(fast: Frequencies, slow: Frequencies, keep: Frequencies) -> Frequencies:
    """``keep`` of the first and the rest of the second, pair by pair."""
    return tuple(f * w + s * (1 - w) for f, s, w in zip(fast, slow, keep, strict=True))


def _divided(plain: Frequencies, factor: float) -> Frequencies:
    return tuple(f / Decimal(factor) for f in plain)


def _turns(inv_freq: Decimal, context: int) -> Decimal:
    return context * inv_freq / (2 * PI)


def _index_ramp(
    num_pairs: int,
    base: Decimal,
    context: int,
    betas: tuple[float, float],
    truncate: bool,
) -> Frequencies:
    """How much of each pair is kept: a ramp linear in the pair's index.

    Its ends are the (real-valued) indices of the pairs that make ``betas`` turns over the
    context. The upper clamp is d - 1, not d/2 - 1: that is what checkpoints were trained with.
    """

    def index(turns: float) -> Decimal:
        return num_pairs * (context / (2 * PI * Decimal(turns))).ln() / base.ln()

    low, high = index(betas[0]), index(betas[1])
    if truncate:
        low = low.to_integral_value(rounding=ROUND_FLOOR)
        high = high.to_integral_value(rounding=ROUND_CEILING)
    low, high = max(low, _ZERO), min(high, Decimal(2 * num_pairs - 1))
    if low == high:
        high += Decimal("0.001")
    return tuple(1 - _clip((k - low) / (high - low)) for k in range(num_pairs))


@dataclass(frozen=True, kw_only=True)
class _Extension(Law):
    factor: float
    original_max_positions: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "factor", number("factor", self.factor, above=0))
        length = whole("original_max_positions", self.original_max_positions, least=1)
        object.__setattr__(self, "original_max_positions", length)


def yarn_multiplier(factor: float, coefficient: float) -> float:
    """YaRN's ``m(x) = 0.1 x ln(factor) + 1``; 1 where nothing is extended (2309.00071, 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * coefficient * math.log(factor) + 1.0


@dataclass(frozen=True, kw_only=True)
class _YarnTemperature(_Extension):
    """The two ends of a YaRN ramp and what goes with it on the logits."""

    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("beta_fast", "beta_slow"):
            object.__setattr__(self, name, number(name, getattr(self, name), above=0))
        for name in ("mscale", "mscale_all_dim"):
            object.__setattr__(self, name, number(name, getattr(self, name), least=0))
        if self.beta_fast < self.beta_slow:
            raise SpecError(
                f"beta_fast must be at least beta_slow ({self.beta_slow:g}), got {self.beta_fast:g}"
            )
        if self.attention_factor is not None:
            given = number("attention_factor", self.attention_factor, above=0)
            object.__setattr__(self, "attention_factor", given)

    def temperature(self) -> Temperature:
        """DeepSeek's form of YaRN's section 3.4; its defaults give the paper's ``0.1 ln s + 1``.

        With ``m(x) = 0.1 x ln(factor) + 1``, cos and sin are multiplied by
        ``m(mscale) / m(mscale_all_dim)`` unless ``attention_factor`` says otherwise, and the
        softmax scale by ``m(mscale_all_dim) ** 2``.
        """
        below = yarn_multiplier(self.factor, self.mscale_all_dim)
        given = self.attention_factor
        return Temperature(
            yarn_multiplier(self.factor, self.mscale) / below if given is None else given,
            below**2,
        )


@dataclass(frozen=True, kw_only=True)
class Yarn(_YarnTemperature):
    """YaRN as checkpoints use it: a ramp linear in the pair's index.

    This is what the reference code of Peng et al. (2309.00071), transformers, vLLM and
    llama.cpp compute. The paper's own ramp is linear in turns and differs by up to 55 %: see
    `YarnPaper`.

    Args:
        factor: How many times longer the context becomes.
        original_max_positions: The context before the extension.
        beta_fast: Pairs with more turns than this over the context are kept.
        beta_slow: Pairs with fewer turns than this are divided by ``factor``.
        truncate: Round the ends of the ramp outwards to whole indices (gpt-oss does not).
        mscale: DeepSeek's coefficient of the factor on cos and sin.
        mscale_all_dim: DeepSeek's coefficient of the factor on the softmax scale.
        attention_factor: The factor on cos and sin, when the model states it.

    >>> Yarn(factor=40.0, original_max_positions=4096, mscale_all_dim=1.0).temperature()
    Temperature(attention_factor=1.0, softmax_scale=1.8738542070926265)
    """

    truncate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("truncate", self.truncate, (True, False))

    def apply(self, plain: Frequencies, base: Decimal) -> Frequencies:
        keep = _index_ramp(
            len(plain),
            base,
            self.original_max_positions,
            (self.beta_fast, self.beta_slow),
            self.truncate,
        )
        return _blend(plain, _divided(plain, self.factor), keep)


@dataclass(frozen=True, kw_only=True)
class YarnPaper(_YarnTemperature):
    """YaRN as the paper prints it: a ramp linear in turns (2309.00071, eq. 17-23).

    No known checkpoint was trained with it; `Yarn` is the one they use.
    """

    def apply(self, plain: Frequencies, base: Decimal) -> Frequencies:
        fast, slow = Decimal(self.beta_fast), Decimal(self.beta_slow)
        if fast == slow:
            raise SpecError(
                f"beta_fast must be above beta_slow for a ramp in turns, both are {fast:g}"
            )
        keep = tuple(
            _clip((_turns(f, self.original_max_positions) - slow) / (fast - slow)) for f in plain
        )
        return _blend(plain, _divided(plain, self.factor), keep)


@dataclass(frozen=True, kw_only=True)
class Llama3(_Extension):
    """Keep pairs of many turns, divide those of few, blend in between (Llama 3.1).

    A pair is kept from ``high_freq_factor`` turns over the original context, divided by
    ``factor`` up to ``low_freq_factor``. Llama 4 Scout ships both at 1, where the ramp is a step.
    """

    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("low_freq_factor", "high_freq_factor"):
            object.__setattr__(self, name, number(name, getattr(self, name), above=0))
        if self.high_freq_factor < self.low_freq_factor:
            raise SpecError(
                f"high_freq_factor must be at least low_freq_factor ({self.low_freq_factor:g}), "
                f"got {self.high_freq_factor:g}"
            )

    def apply(self, plain: Frequencies, base: Decimal) -> Frequencies:
        low, high = Decimal(self.low_freq_factor), Decimal(self.high_freq_factor)

        def keep(f: Decimal) -> Decimal:
            turns = _turns(f, self.original_max_positions)
            if low == high:
                return _ONE if turns >= high else _ZERO
            return _clip((turns - low) / (high - low))

        return _blend(plain, _divided(plain, self.factor), tuple(keep(f) for f in plain))


@dataclass(frozen=True, kw_only=True)
class PartNTK(_Extension):
    """NTK-by-parts before YaRN: two index ramps between linear, NTK-aware and plain.

    The first (1.25 to 0.75 turns) leads from NTK-aware to linear scaling, the second (16 to 2
    turns) from plain frequencies to that blend (the constants of the YaRN authors' repository).
    """

    def apply(self, plain: Frequencies, base: Decimal) -> Frequencies:
        def ramp(fast: float, slow: float) -> Frequencies:
            return _index_ramp(len(plain), base, self.original_max_positions, (fast, slow), True)

        stretched = NTK(factor=self.factor).apply(plain, base)
        inner = _blend(stretched, _divided(plain, self.factor), ramp(1.25, 0.75))
        return _blend(plain, inner, ramp(16.0, 2.0))
