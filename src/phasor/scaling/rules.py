"""Rules: each picks a law by the length of the sequence.

Keys rotated by one law do not match queries rotated by another, so rules are never applied
implicitly: the caller picks the law with ``rope.at(seq_len)``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any

from phasor._checks import NamedFields, number, short_repr, whole
from phasor.errors import SpecError
from phasor.scaling.laws import NTK, Law, PerPair, check_fields


@dataclass(frozen=True, kw_only=True)
class Rule(NamedFields, ABC):
    """A rule that picks a law by the length of the sequence."""

    def __post_init__(self) -> None:
        check_fields(self)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # a subclass that overrides only `at` must not inherit an `at_lengths` that picks other laws
        if "at" in vars(cls) and "at_lengths" not in vars(cls):
            cls.at_lengths = Rule.at_lengths

    @abstractmethod
    def at(self, seq_len: int) -> Law:
        """The law for sequences of ``seq_len`` tokens."""

    def at_lengths(self, lengths: Any, plain: Any, xp: Any) -> tuple[Any, Any] | None:
        """`at` for an array of lengths on a device, without copying them to the host.

        Args:
            lengths: float64 array ``[...]``.
            plain: The unscaled frequencies of a full spectrum: float64 ``[num_pairs]``, an array of
                the same library as ``lengths``.
            xp: The library: ``torch``, NumPy from 2.0, or another that follows the array API.

        Returns:
            The scaled frequencies ``[..., num_pairs]`` and the attention factor, a number or
            ``[...]``. None if the rule does not implement this: then call `at` with the length.
        """
        del lengths, plain, xp
        return None


@dataclass(frozen=True, kw_only=True)
class DynamicNTK(Rule):
    """NTK-aware scaling with a factor that grows with the sequence (emozilla; "dynamic" elsewhere).

    At ``l > original_max_positions`` tokens the NTK factor is
    ``factor * l / original_max_positions - (factor - 1)``; up to there it is 1.
    """

    factor: float
    original_max_positions: int

    def __post_init__(self) -> None:
        check_fields(self, factor=partial(number, least=1))

    def at(self, seq_len: int) -> NTK:
        """The NTK-aware law for sequences of ``seq_len`` tokens.

        >>> DynamicNTK(factor=8.0, original_max_positions=8192).at(16384)
        NTK(factor=9.0)
        """
        # under torch.compile fields may be symbols; index() converts them to numbers
        start, factor = index(self.original_max_positions), Fraction(self.factor)
        length = max(whole("seq_len", seq_len, least=1), start)
        return _ntk_law(factor * length / start - (factor - 1), seq_len)

    def at_lengths(self, lengths: Any, plain: Any, xp: Any) -> tuple[Any, Any]:
        """`at` for an array of lengths: pair ``k`` of ``n`` times ``factor ** (-k / (n - 1))``."""
        start = self.original_max_positions
        factor = self.factor * xp.where(lengths > start, lengths, start) / start - (self.factor - 1)
        last = len(plain) - 1
        exponents = _array_like(plain, [-k / last for k in range(last + 1)], xp)
        return plain * factor[..., None] ** exponents, 1.0


@dataclass(frozen=True, kw_only=True)
class SteppedNTK(Rule):
    """NTK-aware scaling in steps: the base changes at every doubling of the length (Qwen 1).

    At ``l`` tokens the NTK factor is ``2 ** (k + 1) - 1`` for the smallest ``k`` with
    ``l <= original_max_positions * 2 ** k``; up to ``original_max_positions`` it is 1.
    """

    original_max_positions: int

    def at(self, seq_len: int) -> NTK:
        """The NTK-aware law for sequences of ``seq_len`` tokens.

        >>> [SteppedNTK(original_max_positions=2048).at(n).factor for n in (2048, 2049, 5000)]
        [1.0, 3.0, 7.0]
        """
        ratio = -(-whole("seq_len", seq_len, least=1) // self.original_max_positions)  # ceil
        doublings = (ratio - 1).bit_length()
        return _ntk_law(2 ** (doublings + 1) - 1, seq_len)


@dataclass(frozen=True, kw_only=True)
class LongRope(Rule):
    """One list of divisors up to the original context, another beyond (LongRoPE, 2402.13753).

    Args:
        short_factors: Divisors for sequences of at most ``original_max_positions`` tokens.
        long_factors: Divisors for longer ones.
        original_max_positions: The context before the extension.
        factor: The extended context divided by the original one.
        short_attention_factor: Factor on cos and sin with the short list; by default
            ``sqrt(1 + ln(factor) / ln(original_max_positions))``.
        long_attention_factor: The same for the long list.
    """

    if not TYPE_CHECKING:  # type checkers keep the dataclass's signature

        def __new__(cls, **fields: object) -> LongRope:
            """Tell the user what to pass where Python would raise a bare TypeError."""
            # copy and pickle call this without arguments
            missing = [n for n in ("short_factors", "long_factors") if fields and n not in fields]
            if missing:
                raise SpecError(
                    f"{' and '.join(missing)} must be given: a divisor for each pair, found by a "
                    "search and published in the model's config (phasor.load reads it); Linear, "
                    "NTK and Yarn need only a factor"
                )
            return super().__new__(cls)

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_positions: int
    factor: float
    short_attention_factor: float | None = None
    long_attention_factor: float | None = None

    def __post_init__(self) -> None:
        # with an original context of 1 the default factor would divide by ln(1)
        check_fields(self, original_max_positions=partial(whole, least=2))
        if len(self.short_factors) != len(self.long_factors):
            raise SpecError(
                f"long_factors must be as many as short_factors ({len(self.short_factors)}), "
                f"got {len(self.long_factors)}"
            )

    def at(self, seq_len: int) -> PerPair:
        """The divisors for sequences of ``seq_len`` tokens, with their attention factor."""
        is_long = whole("seq_len", seq_len, least=1) > self.original_max_positions
        factors, attention_factor = self._long_list() if is_long else self._short_list()
        return PerPair(factors=factors, attention_factor=attention_factor)

    def at_lengths(self, lengths: Any, plain: Any, xp: Any) -> tuple[Any, Any]:
        """`at` for an array of lengths: the long or the short list for each."""
        is_long = lengths > self.original_max_positions
        lists = self._long_list(), self._short_list()
        divisors = [_array_like(plain, factors, xp) for factors, _ in lists]
        gains = [_array_like(plain, attention_factor, xp) for _, attention_factor in lists]
        return plain / xp.where(is_long[..., None], *divisors), xp.where(is_long, *gains)

    def _short_list(self) -> tuple[tuple[float, ...], float]:
        return self.short_factors, self._attention_factor(self.short_attention_factor)

    def _long_list(self) -> tuple[tuple[float, ...], float]:
        return self.long_factors, self._attention_factor(self.long_attention_factor)

    def _attention_factor(self, explicit: float | None) -> float:
        if explicit is not None:
            return explicit
        if self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_positions))


def _ntk_law(factor: Fraction | int, seq_len: int) -> NTK:
    """The NTK-aware law with the exact factor of a rule at this length."""
    try:
        # equals float(), which torch.compile before 2.12 cannot trace for a Fraction
        return NTK(factor=factor.numerator / factor.denominator)
    except OverflowError:
        raise SpecError(
            f"seq_len must leave a factor that fits in a float, got {short_repr(seq_len)}"
        ) from None


def _array_like(plain: Any, values: Any, xp: Any) -> Any:
    """``values`` as an array with the dtype and device of ``plain``."""
    # NumPy arrays have no device before 2.0
    place = {"device": plain.device} if hasattr(plain, "device") else {}
    return xp.asarray(values, dtype=plain.dtype, **place)
