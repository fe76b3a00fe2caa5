"""What a frequency law is: a pure function of frequencies, and what it does to the softmax."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from decimal import Decimal
from typing import NamedTuple

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

    @abstractmethod
    def at(self, seq_len: int) -> Law:
        """The law for sequences of ``seq_len`` tokens."""
