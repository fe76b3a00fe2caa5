"""The report on a rotation: fields for programs, sentences for people, JSON values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from phasor.describe import plain_fields, ranges, sentences
from phasor.layers import summarize
from phasor.pairings import Pairing
from phasor.rope import Rope, plain_axes
from phasor.scaling import Law, Rule

#: The sentence of each finding; `make_finding` replaces the braces by measured values. Differences
#: from the expected rope come first, the most important at the top. Findings about a table's end,
#: negative positions and norms have their sentences where they are measured.
SENTENCES = {
    "heads": "Only some heads are wrong, counted from 0: {which}.",
    "tokens": "Only {which} are wrong{more}.",
    "not-turned": "It is not turned: every token is as at position 0.",
    "turned": "It rotates, but this layer should have no rotation.",
    "multiplied": "Each token is multiplied by one number, {least:.6g} to {most:.6g}, and not "
    "turned: a temperature by position.",
    "no-rotation": "It is no rotation of pairs of coordinates, even with a common factor; perhaps "
    "the two vectors do not belong together, or a norm lies between them.",
    "head-width": "Heads: {found} wide instead of {expected}.",
    "pairing": "Pairing: {found} instead of {expected}.",
    "slice": "Slice: coordinates {found} turn, instead of {expected}.",
    "direction": "Sign: it turns {way}.",
    "twice": "It is rotated twice: R(2p) instead of R(p).",
    "swapped": "Cos and sin are exchanged.",
    "one-sign": "Sign: both members of a pair {how} the product with sin, instead of only one.",
    "layer": "Layer: it rotates like layers of the kind {kind!r}.",
    "offset": "Positions are off by {offset:+.15g}{more}.",
    "restart": "Positions {how}: {where}.",
    "first-row": "Positions: every row of the batch has those of the first: {where}.",
    **dict.fromkeys(
        (
            "table-end-raises",
            "table-end-nan",
            "table-end-zeros",
            "table-end-identity",
            "clamped",
            "wrapped",
            "table-end-garbage",
        ),
        "Up to position {last} it turns; from {end} on {beyond}.",
    ),
    **dict.fromkeys(
        ("negative-wraps", "negative-unsigned", "negative-clamped", "negative-garbage"),
        "A negative position {negative}.",
    ),
    "length": "Length: its frequencies are chosen {which}.",
    "base": "Base: {found} instead of {expected}.",
    "law-missing": "Law: {law} is not applied, frequencies are the plain powers.",
    "law": "Law: {found} instead of {expected}.",
    "law-twice": "Law: {law} is applied twice.",
    "length-off-by-one": "Length: frequencies are computed for one token {how} than there are.",
    "axis-scaled": "Positions on axis {axis} are multiplied by {factor:.15g}.",
    "law-parameter": "Law: {law} with {parameters}.",
    "frequencies": "Frequencies differ{where}.",
    "factor-missing": "Factor: missing, cos and sin should be multiplied by {factor:.7g}.",
    "factor-twice": "Factor: {factor:.7g} is multiplied twice.",
    "factor": "Factor: {found:.6g} instead of {factor:.7g}.",
    "axes": "Axes: {found}.",
    "angles": "Angles differ by a little more than rounding explains.",
    "positions-in-{dtype}": "Positions are rounded to {dtype}{where}.",
    "frequencies-in-{dtype}": "Frequencies are rounded to {dtype}{details}.",
    "angles-in-{dtype}": "{what} are rounded to {dtype}.",
    "table-in-{dtype}": "Cos and sin are rounded to {dtype}{details}.",
    "steps-in-{dtype}": "{steps} rounded to {dtype}, not just the result: a number is off by "
    "{error:.1e}, where one rounding changes it by {once:.1e} at most.",
    "angles-in-float32": "Angles are computed in float32: the error grows with the position, and "
    "is {error:.1e} near {near}.",
    "noise": "A number is off by {error:.1e}, where rounding to {dtype} changes it by {once:.1e} "
    "at most: noise, or an approximation.",
    "inputs-written": "It overwrites its inputs: pass copies if you still need them.",
    "remembers": "The result depends on earlier calls, or on chance: positions up to {top} are "
    "turned differently when they are asked for again.",
    "depends-on-length": "The result depends on the length of the call: it changes when one "
    "reaches {length}.{rule}",
    "norm-varies": "{how}.",
    "beyond-half-a-turn": "Pair {pairs} by more than half a turn per position, or against the "
    "others: whole positions cannot tell which.",
    "constant-phase": "Position 0 is turned by a constant angle.",
    "samples-disagree": "Up to position {last_position} the samples turn alike; {unused} does not.",
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
    "turn: frequencies are {intended:.15g}^(-2k/{width}). That is right where pairs "
    "should not turn (p-RoPE), and wrong in a partial rotation.",
    "stretch-on-frequencies": "Every frequency is divided by {factor:.15g}^(d/(d-2)), the number "
    "by which NTK-aware scaling multiplies the base.",
    "index-from-one": "Pairs are counted from 1: frequencies are {base:.15g}^(-2(k+1)/"
    "{rotary_dim}), so that each frequency is one step too low.",
    "ramp-inverted": "YaRN's ramp runs the wrong way: fast pairs are divided by {factor:.15g} and "
    "slow ones kept, where it should be the other way round.",
}
#: The names of findings, causes and changes by subject; the pages and ``--json`` have no others.
#: A name that ends in a dtype stands for those of every dtype.
NAMES = {
    "pairs": (
        "pairing", "slice", "axes", "direction", "swapped", "one-sign", "reflection",
        "interleaved-rows-on-halves", "half-rows-on-interleaved", "members-differ",
        "members-on-different-axes",
    ),
    "heads, queries and keys": (
        "heads", "head-width", "factor-on-one-side", "keys-turn-backwards",
        "queries-and-keys-differ",
    ),
    "positions": (
        "offset", "restart", "first-row", "tokens", "twice", "not-turned", "axis-scaled",
        "constant-phase",
    ),
    "the end of a table": (
        "table-end-raises", "table-end-nan", "table-end-zeros", "table-end-identity",
        "table-end-garbage", "clamped", "wrapped",
    ),
    "negative positions": (
        "negative-wraps", "negative-unsigned", "negative-clamped", "negative-garbage",
    ),
    "frequencies": (
        "base", "law", "law-missing", "law-parameter", "law-twice", "layer", "length",
        "length-off-by-one", "exponent-width",
        "index-from-one", "stretch-on-frequencies", "ramp-inverted", "frequencies",
        "beyond-half-a-turn",
    ),
    "the factor": ("factor", "factor-missing", "factor-twice", "norm-varies", "multiplied"),
    "rounding": (
        "positions-in-{dtype}", "frequencies-in-{dtype}", "angles-in-{dtype}", "table-in-{dtype}",
        "steps-in-{dtype}", "noise", "angles",
    ),
    "calls": ("depends-on-length", "remembers", "inputs-written"),
    "what was recorded": ("no-rotation", "turned", "samples-disagree"),
}  # fmt: skip


_MOST_LISTED = 6


class Finding(NamedTuple):
    """A property or mistake of the rotation that a user should know."""

    name: str  # for programs
    sentence: str  # for people


Changes = tuple[Finding, ...]


def make_finding(name: str, /, **measured: Any) -> Finding:
    """The finding of that name in `SENTENCES`, with the measured values."""
    return Finding(name.format_map(measured), SENTENCES[name].format_map(measured))


def in_order(changes: Iterable[Finding]) -> Changes:
    """Findings, the most important first; roundings have no order and come last."""
    places = {name: place for place, name in enumerate(SENTENCES)}
    return tuple(sorted(changes, key=lambda change: places.get(change.name, len(places))))


def is_rounding(finding: Finding) -> bool:
    """Whether the finding states which digits are lost."""
    return "-in-" in finding.name or finding.name in ("noise", "angles")


def _listed(texts: Sequence[str]) -> list[str]:
    """The first few texts, and how many more the JSON values contain."""
    remaining = len(texts) - _MOST_LISTED
    return [
        *texts[:_MOST_LISTED],
        *([f"{remaining} more, which --json lists"] if remaining > 0 else []),
    ]


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
    axis: int | None  # the axis that drives it; None if it does not turn


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
        law: The law that goes with it; None for plain powers, and if nothing explains them.
        known_law: Whether a base and a law explain the frequencies of all axes, or of each axis;
            then ``rope.axes`` has them.
        alternatives: Other laws with the same frequencies within the uncertainty.
        rule: The rule that picks other laws at other lengths, if there is one.
        position_offset: The number added to a position before it is turned.
        table_end: The first position that is not turned as the lower ones are.
        beyond: What happens from there on.
        negative: What happens to negative positions.
        precision: Positions with the largest error of a turned unit vector near each.
        findings: The findings, worst first.
        rope: The Rope that does the same to whole positions (shifted by ``position_offset``, its
            result times ``attention_factor`` inside the slice), None if no Rope does.
        error: The largest difference seen between the Rope and the function, for unit vectors.
        why_no_rope: The reason why ``rope`` is None.
    """

    head_dim: int
    called: str | None = None
    linear: bool = True
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
            return f"The same frequencies come from {'; or '.join(_listed(self.alternatives))}."
        if self.rope is not None and plain_axes(self.rope.axes) != self.rope.axes:
            return "No base and law for all axes give the same frequencies."
        if self.known_law:
            return "No other law known here gives the same frequencies."
        if sum(pair.inv_freq != 0 for pair in self.pairs) == 1:
            return "One frequency fits any base."
        if any(pair.uncertainty > max(abs(pair.inv_freq), 1e-9) for pair in self.pairs):
            return "No law was determined: some pairs hardly differ from pairs that stand still."
        return "No known law gives these frequencies."

    def _pair_sentences(self) -> list[str]:
        turning = [k for k, pair in enumerate(self.pairs) if pair.inv_freq]
        if not turning or "reflection" in self.names():  # a reflected pair has no angle
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
    earlier = changed_fields.pop("findings", report.findings)
    return replace(report, findings=(*earlier, *findings), **changed_fields)


@dataclass(frozen=True, kw_only=True)
class SideVerification(Difference):
    """The comparison of one layer's queries, keys or tables with its rope; false if they agree."""

    name: str  # "layer 3, q"
    tokens: int
    changes: Changes = ()  # the differences, the most important first
    undecided: tuple[str, ...] = ()  # causes that explain these data as well
    roundings: Changes = ()  # float32 angles or frequencies that show, which are no difference
    # the lowest position with an error beyond rounding, and the largest change of a score of unit
    # vectors there
    position: float | None = None
    score: float | None = None
    sought_in: int | None = None  # how many tokens were searched for causes, wrong ones included

    def __bool__(self) -> bool:
        return bool(self.changes)

    def lines(self) -> list[str]:
        verdict = "differs" if self else "rotates as it should"
        lines = [f"{self.name}: {verdict} ({self.tokens} tokens)."]
        lines += [f"  {change.sentence}" for change in self.changes + self.roundings]
        if self.position is not None and self.score is not None:
            lines.append(
                f"  Beyond rounding from position {self.position:.15g} on, where a score of unit "
                f"vectors changes by up to {self.score:.2g}."
            )
        if self.sought_in is not None and self.sought_in < self.tokens:
            lines.append(f"  Causes were sought in {self.sought_in} of the tokens.")
        if self.undecided:
            lines.append("  These data cannot tell it from:")
            lines += [f"    {text}" for text in _listed(self.undecided)]
        return lines


@dataclass(frozen=True, kw_only=True)
class Verification(Difference):
    """The verdicts on a recording; false if all of it rotates as it should."""

    model: str
    sides: tuple[SideVerification, ...]

    def __bool__(self) -> bool:
        return any(self.sides)

    def lines(self) -> list[str]:
        num_wrong = sum(map(bool, self.sides))
        verdict = (
            f"{num_wrong} of {len(self.sides)} differ" if num_wrong else "rotates as it should"
        )
        lines = [f"{self.model}: {verdict}."]
        alike: dict[Changes, list[SideVerification]] = {}
        for side in self.sides:
            alike.setdefault(side.changes, []).append(side)
        for first, *same_sides in alike.values():
            lines += first.lines()
            if same_sides:
                lines.append(f"  The same holds for {', '.join(side.name for side in same_sides)}.")
        return lines

    def __repr__(self) -> str:
        names = dict.fromkeys(change.name for side in self.sides for change in side.changes)
        return f"Verification({self.model!r}: {', '.join(names) or 'rotates as it should'})"
