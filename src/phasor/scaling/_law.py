"""What a frequency law is: a pure function of frequencies, and what it does to the softmax."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple

Frequencies = tuple[Decimal, ...]


class Temperature(NamedTuple):
    """How a law changes the size of attention logits.

    Attributes:
        attention_factor: What the field multiplies cos and sin by, so that a fully rotated
            head's logits are multiplied by its square.
        softmax_scale: What the model multiplies its softmax scale by, beside that.
    """

    attention_factor: float = 1.0
    softmax_scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Law(ABC):
    """A static scaling law: plain frequencies in, scaled frequencies out.

    Laws compute in 60-digit decimals, so the scaled frequencies are real numbers as good as
    exact; floats are their rounding.
    """

    @abstractmethod
    def apply(self, plain: Frequencies, base: Decimal) -> Frequencies:
        """The scaled frequencies.

        Args:
            plain: One frequency per pair of a whole spectrum, ``base ** (-2k/d)`` with
                ``d = 2 * len(plain)``, in radians per position.
            base: The base of that spectrum.
        """

    def temperature(self) -> Temperature:
        """What the law does to the logits; nothing, for most."""
        return Temperature()


@dataclass(frozen=True, kw_only=True)
class Rule(ABC):
    """A rule that picks a law from the length of the sequence."""

    def __init_subclass__(cls) -> None:
        # who picks other laws does not inherit the arithmetic of the laws that were picked before
        if "at" in vars(cls) and "at_lengths" not in vars(cls):
            cls.at_lengths = Rule.at_lengths

    @abstractmethod
    def at(self, seq_len: int) -> Law:
        """The law for sequences of ``seq_len`` tokens."""

    def at_lengths(self, lengths: Any, plain: Any, xp: Any) -> tuple[Any, Any] | None:
        """What the laws of ``at`` make of frequencies, for lengths that only a device knows.

        Args:
            lengths: Any number of lengths, a float64 array.
            plain: One frequency per pair of a whole spectrum, float64, of the same library.
            xp: That library: ``torch``, NumPy from 2.0, or another with the names of the array API.

        Returns:
            The scaled frequencies ``[..., num_pairs]`` and the attention factor, a number or
            ``[...]``. None where the rule has no arithmetic of its own: whoever asked has to read
            the length, and call `at`.
        """
        del lengths, plain, xp
        return None
