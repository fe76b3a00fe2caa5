"""What was found out about a rotation: fields for programs, sentences for people, JSON values."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from phasor.describe import ranges, sentences
from phasor.pairings import Pairing
from phasor.rope import Rope
from phasor.scaling import Law, Rule


@dataclass(frozen=True)
class Finding:
    """Something worth knowing.

    Attributes:
        name: What it is called, for programs.
        says: One sentence, for people.
    """

    name: str
    says: str


@dataclass(frozen=True, kw_only=True)
class PairFound:
    """What one pair does.

    Attributes:
        read: Its two coordinates before.
        written: Its two coordinates after.
        inv_freq: Radians per position; whole positions cannot tell whole turns.
        uncertainty: How far off that may be.
        axis: The axis that drives it; None if it does not turn.
    """

    read: tuple[int, int]
    written: tuple[int, int]
    inv_freq: float
    uncertainty: float
    axis: int | None


@dataclass(frozen=True, kw_only=True)
class Identification:
    """What `identify` and `identify_samples` found out.

    Attributes:
        head_dim: Width of the head.
        called: How it was called: arguments, layout, arrays; None for recorded samples.
        linear: Whether it is a linear map at every position.
        is_rotation: Whether that map turns pairs of coordinates, up to one factor.
        keeps_norms: Whether the factor is 1.
        attention_factor: The factor; None if there is no single one.
        key_factor: The factor on keys, where it differs.
        pairing: The pairing it reads, None if it is neither.
        pairing_out: The pairing it writes, None if it is neither.
        rotary_start: Where the rotated slice begins.
        rotary_dim: How wide it is.
        direction: 1 counter-clockwise, -1 clockwise.
        pairs: Every pair.
        base: The base that explains the frequencies best, if one does.
        law: The law beside it; None for plain powers, and where nothing explains them.
        known_law: Whether a base and a law explain the frequencies.
        alternatives: Other laws that give the same frequencies within the uncertainty.
        rule: The rule that picks other laws at other lengths, if that is what it does.
        position_offset: What is added to a position before it is turned.
        table_end: The first position that is not turned as the lower ones are.
        beyond: What happens there.
        negative: What happens to negative positions.
        precision: Positions, and the largest error of a turned unit vector near them.
        findings: What is worth knowing, worst first.
        rope: The Rope that does the same to whole positions (shifted by ``position_offset``, its
            result times ``attention_factor`` inside the slice), None if no Rope does.
        error: The largest difference seen between that and the function, for unit vectors.
        why_no_rope: The reason, where ``rope`` is None.
    """

    head_dim: int
    called: str | None
    linear: bool
    is_rotation: bool = False
    keeps_norms: bool = False
    attention_factor: float | None = None
    key_factor: float | None = None
    pairing: Pairing | None = None
    pairing_out: Pairing | None = None
    rotary_start: int = 0
    rotary_dim: int = 0
    direction: int = 1
    pairs: tuple[PairFound, ...] = ()
    base: float | None = None
    law: Law | None = None
    known_law: bool = False
    alternatives: tuple[str, ...] = ()
    rule: Rule | None = None
    position_offset: float = 0.0
    table_end: int | None = None
    beyond: str | None = None
    negative: str | None = None
    precision: tuple[tuple[int, float], ...] = ()
    findings: tuple[Finding, ...] = ()
    rope: Rope | None = None
    error: float | None = None
    why_no_rope: str | None = None

    def names(self) -> set[str]:
        """The names of the findings."""
        return {finding.name for finding in self.findings}

    def __str__(self) -> str:
        return self.explain()

    def explain(self) -> str:
        """The report as a few lines of text."""
        lines = [] if self.called is None else [f"Called with {self.called}."]
        if self.rope is not None:
            lines += [*sentences(self.rope, None), self._law_sentence()]
        else:
            lines.append(f"No Rope does this: {self.why_no_rope}.")
            lines += self._pair_sentences()
        if self.attention_factor is not None and self.attention_factor != 1:
            lines.append(f"Its result is multiplied by {self.attention_factor:.9g}.")
        if self.position_offset:
            lines.append(f"Position p is turned as p {self.position_offset:+g}.")
        lines += [finding.says for finding in self.findings]
        if self.negative is not None and not any("negative" in name for name in self.names()):
            lines.append(f"A negative position {self.negative}.")
        if self.precision:
            listed = ", ".join(f"{error:.1e} near {p}" for p, error in self.precision)
            lines.append(f"Error of a turned unit vector: {listed}.")
        if self.error is not None:
            lines.append(
                f"The Rope and the function differ by {self.error:.1e} at most where compared."
            )
        return "\n".join(lines)

    def _law_sentence(self) -> str:
        if self.alternatives:
            return f"The same frequencies come from {'; or '.join(self.alternatives)}."
        if self.known_law:
            return "No other law known here gives the same frequencies."
        if sum(pair.inv_freq != 0 for pair in self.pairs) == 1:
            return "One frequency fits any base."
        return "No known law gives these frequencies."

    def _pair_sentences(self) -> list[str]:
        turning = [k for k, pair in enumerate(self.pairs) if pair.inv_freq]
        if not turning or "reflection" in self.names():  # what is reflected has no angle
            return []
        first = self.pairs[turning[0]]
        return [
            f"Pairs {ranges(turning)} turn; the first reads coordinates {first.read} and turns by "
            f"{first.inv_freq:.6g} per position."
        ]

    def as_plain(self) -> dict[str, Any]:
        """Everything as JSON values; an error that is no finite number is None."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        plain["pairs"] = [asdict(pair) for pair in self.pairs]
        plain["findings"] = [asdict(finding) for finding in self.findings]
        plain["precision"] = [[p, finite_or_none(error)] for p, error in self.precision]
        plain["error"] = None if self.error is None else finite_or_none(self.error)
        plain["alternatives"] = list(self.alternatives)
        plain["rope"] = None if self.rope is None else self.rope.to_dict()
        for name, value in (("law", self.law), ("rule", self.rule)):
            plain[name] = None if value is None else repr(value)
        return plain


def finite_or_none(value: float) -> float | None:
    """``value``, or None for infinities and NaN, for which JSON has no numbers."""
    return value if math.isfinite(value) else None
