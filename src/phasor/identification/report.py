"""The report about a rotation: fields for programs, sentences for people, JSON values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from phasor.describe import plain_fields, ranges, sentences
from phasor.layers import summarize
from phasor.pairings import Pairing
from phasor.rope import Rope
from phasor.scaling import Law, Rule

#: The sentence of each finding; `make_finding` replaces the braces by measured values. Findings
#: about a table's end, negative positions and norms have sentences where they are measured.
SENTENCES = {
    "inputs-written": "It writes its inputs: keep a copy of what goes in.",
    "remembers": "The result depends on earlier calls, or on chance: positions up to {top} are "
    "turned otherwise when they are asked for again.",
    "depends-on-length": "The result depends on the length of the call: it changes when one "
    "reaches {length}.{rule}",
    "table-in-{dtype}": "Cos and sin are held in {dtype}: every value of the {result_dtype} result "
    "is a {dtype} number, so they are off by up to {error:.1e}.",
    "steps-in-{dtype}": "{steps} rounded to {dtype}, not the result alone: a number is off by "
    "{error:.1e} that one rounding moves by {once:.1e} at most.",
    "noise": "A number is off by {error:.1e} that rounding to {dtype} moves by {once:.1e} at most: "
    "noise, or an approximation.",
    "frequencies-in-{dtype}": "Frequencies are held in {dtype}: each is a {dtype} number{details}.",
    "angles-in-float32": "Angles are computed in float32: the error grows with the position, and "
    "is {error:.1e} near {near}.",
    "positions-in-{dtype}": "Positions are held in {dtype}: {position} is turned as if it were "
    "{rounded}.",
    "beyond-half-a-turn": "Pair {pairs} by more than half a turn per position, or against the "
    "others: whole positions cannot tell which.",
    "sign-reversed": "It turns clockwise: y0 = x0 cos + x1 sin. Scores against keys turned the "
    "usual way are wrong.",
    "position-offset": "Positions are off by {offset:+g}{others}: position 0 is turned as "
    "{offset:g}. Scores of distances are right, keys turned elsewhere are not.",
    "constant-phase": "Position 0 is turned by a constant angle.",
    "samples-part": "Up to position {last_position} the samples turn alike; {unused} does not.",
    "interleaved-rows-on-halves": "Rows of cos and sin for interleaved pairs (each angle twice in "
    "a row) are used on halves: the two members of a pair turn by different angles.",
    "half-rows-on-interleaved": "Rows of cos and sin for halves (all angles, then all again) are "
    "used on interleaved pairs: the two members of a pair turn by different angles.",
    "reflection": "{which} reflected, not turned: one sign is wrong.",
    "members-on-different-axes": "The two members of {count} pairs turn by different angles, such "
    "as coordinates {coordinates}: they follow different axes. Equal coordinates hide it, so text "
    "is right and images are not.",
    "members-differ": "The two members of {count} pairs turn by different angles, such as "
    "coordinates {coordinates}.",
    "factor-on-one-side": "Queries are multiplied by {queries:.7g} and keys by {keys:.7g}: a "
    "softmax factor is folded into one of them.",
    "keys-turn-backwards": "Keys turn against queries: scores depend on the sum of positions.",
    "queries-and-keys-differ": "Queries and keys are turned differently, pair {pair} the most: "
    "scores do not depend on distance alone.",
    "exponent-width": "The exponents run over {width}, not over the {rotary_dim} coordinates that "
    "turn: frequencies are {intended:.15g}^(-2k/{width}). Where pairs were meant not to turn "
    "(p-RoPE) that is right, in a partial rotation it is not.",
    "stretch-on-frequencies": "Every frequency is divided by {factor:.15g}^(d/(d-2)), the number "
    "by which NTK-aware scaling multiplies the base.",
    "index-from-one": "Pairs are counted from 1: frequencies are {base:.15g}^(-2(k+1)/"
    "{rotary_dim}), so that every one is one step too slow.",
    "ramp-inverted": "YaRN's ramp runs the wrong way: fast pairs are divided by {factor:.15g} and "
    "slow ones kept, where it should be the other way round.",
}


class Finding(NamedTuple):
    """A property or mistake of the rotation that a user should know."""

    name: str  # for programs
    sentence: str  # for people


def make_finding(name: str, /, **measured: Any) -> Finding:
    """The finding of that name in `SENTENCES`, with the measured values."""
    return Finding(name.format_map(measured), SENTENCES[name].format_map(measured))


class Difference(ABC):
    """How two sides differ: false if they agree where they were compared; printed as `lines`."""

    @abstractmethod
    def lines(self) -> list[str]:
        """The differences, a line each."""

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def as_plain(self) -> dict[str, Any]:
        """Everything as JSON values, with the verdict in ``differ``; axes as their repr."""
        return {"differ": bool(self)} | plain_fields(self)


class PairFound(NamedTuple):
    """The coordinates and the frequency of one pair."""

    read: tuple[int, int]  # its two coordinates before
    written: tuple[int, int]  # its two coordinates after
    inv_freq: float  # radians per position; whole positions cannot tell whole turns
    uncertainty: float  # how far off ``inv_freq`` may be
    axis: int | None  # the one that drives it; None if it does not turn


@dataclass(frozen=True, kw_only=True)
class Identification:
    """The report of `identify` and `identify_samples`.

    Attributes:
        head_dim: Width of the head.
        called: How it was called: arguments, dimensions, arrays; None for recorded samples.
        linear: Whether it is a linear map at every position.
        is_rotation: Whether that map turns pairs of coordinates, up to one factor.
        keeps_norms: Whether the factor is 1.
        attention_factor: The factor; None if there is no single one.
        key_factor: The factor on keys, if it differs.
        pairing: The pairing it reads, None if it is neither.
        pairing_out: The pairing it writes, None if it is neither.
        rotary_start: First coordinate of the rotated slice.
        rotary_dim: How wide it is.
        direction: 1 counter-clockwise, -1 clockwise.
        pairs: Every pair.
        base: The base that explains the frequencies best, if one does.
        law: The law beside it; None for plain powers, and if nothing explains them.
        known_law: Whether a base and a law explain the frequencies.
        alternatives: Other laws that give the same frequencies within the uncertainty.
        rule: The rule that picks other laws at other lengths, if there is one.
        position_offset: The number added to a position before it is turned.
        table_end: The first position that is not turned as the lower ones are.
        beyond: What happens from there on.
        negative: What happens to negative positions.
        precision: Positions, and the largest error of a turned unit vector near them.
        findings: The findings, worst first.
        rope: The Rope that does the same to whole positions (shifted by ``position_offset``, its
            result times ``attention_factor`` inside the slice), None if no Rope does.
        error: The largest difference seen between that and the function, for unit vectors.
        why_no_rope: The reason why ``rope`` is None.
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

    def __repr__(self) -> str:
        rope = f"no Rope: {self.why_no_rope}" if self.rope is None else summarize(self.rope)
        names = ", ".join(finding.name for finding in self.findings)
        return f"Identification({rope}; findings: {names or 'none'})"

    def __str__(self) -> str:
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
        lines += [finding.sentence for finding in self.findings]
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
        if any(pair.uncertainty > max(abs(pair.inv_freq), 1e-9) for pair in self.pairs):
            return "No law is told: some pairs are not told from pairs that stand still."
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
        return plain_fields(self)


def add_findings(
    report: Identification, *findings: Finding, **changed_fields: Any
) -> Identification:
    """The report with more findings, and with other fields changed."""
    return replace(report, findings=(*report.findings, *findings), **changed_fields)
