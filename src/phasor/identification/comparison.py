"""Two models compared layer by layer: each pair of ropes that meet, once."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from phasor.describe import ranges, resolved
from phasor.identification import Difference, diff
from phasor.layers import LayerRopes
from phasor.rope import Rope


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Layers at which the same two ropes meet.

    Attributes:
        layers: Their indices, written short.
        kinds: The kind of these layers in the first and in the second model.
        has_rope: Whether each of them has a rope at all.
        difference: How the two ropes differ; None if not both are there.
    """

    layers: str
    kinds: tuple[str, str]
    has_rope: tuple[bool, bool]
    difference: Difference | None

    @property
    def differ(self) -> bool:
        """Whether the layers disagree in anything."""
        return self.has_rope[0] != self.has_rope[1] or bool(self.difference)

    def as_plain(self) -> dict[str, Any]:
        """Everything as JSON values, with the verdict in ``differ``."""
        plain: dict[str, Any] = asdict(self) | {"differ": self.differ}
        if self.difference is not None:
            plain["difference"]["fields"] = {
                name: [shown_field(value) for value in values]
                for name, values in self.difference.fields.items()
            }
        return plain


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two models side by side.

    Attributes:
        names: What they are called.
        layer_counts: How many layers each has.
        softmax_factors: What each multiplies its softmax scale by.
        context: Positions compared.
        tolerance: How far apart two unit vectors may be.
        meetings: Every pair of ropes that meet.
    """

    names: tuple[str, str]
    layer_counts: tuple[int, int]
    softmax_factors: tuple[float, float]
    context: int
    tolerance: float
    meetings: tuple[Meeting, ...]

    @property
    def differ(self) -> bool:
        """Whether anything differs: layers, softmax, layouts, frequencies or factors."""
        a, b = self.softmax_factors
        return (
            self.layer_counts[0] != self.layer_counts[1]
            or abs(a - b) > self.tolerance * max(a, b)
            or any(meeting.differ for meeting in self.meetings)
        )

    def as_plain(self) -> dict[str, Any]:
        """Everything as JSON values, with the verdict in ``differ`` here and at each meeting."""
        plain: dict[str, Any] = asdict(self) | {"differ": self.differ}
        plain["meetings"] = [meeting.as_plain() for meeting in self.meetings]
        return plain


def shown_field(value: object) -> object:
    """A field of a Rope as a JSON value; an axes layout by its repr."""
    return value if isinstance(value, (str, int, float)) else repr(value)


def compare(
    a: LayerRopes, b: LayerRopes, seq_len: int, context: int, tolerance: float
) -> Comparison:
    """Compare two models layer by layer, as far as both have layers.

    Args:
        a: The first model.
        b: The second model.
        seq_len: The length at which rules pick their law.
        context: Positions to compare.
        tolerance: How far apart two unit vectors may be.

    Returns:
        One meeting for each pair of kinds that share a layer; layers that one model has more are
        counted, not compared.

    Raises:
        SpecError: If ``context`` or ``tolerance`` is out of bounds, or ``seq_len`` where a rule
            needs it.

    >>> from phasor import preset
    >>> models = preset("llama-3-8b"), preset("llama-3.1-8b")
    >>> compared = compare(*models, seq_len=8192, context=8192, tolerance=1e-6)
    >>> [(one.layers, one.difference.pairs) for one in compared.meetings]
    [('0-31', 35)]
    """
    met: dict[tuple[str, str], list[int]] = {}
    for layer, kinds in enumerate(zip(a.layer_kinds, b.layer_kinds, strict=False)):
        met.setdefault(kinds, []).append(layer)

    def meeting(kinds: tuple[str, str], layers: list[int]) -> Meeting:
        ropes = a.kinds[kinds[0]], b.kinds[kinds[1]]
        return Meeting(
            layers=ranges(layers),
            kinds=kinds,
            has_rope=(ropes[0] is not None, ropes[1] is not None),
            difference=_difference(*ropes, seq_len, context, tolerance),
        )

    return Comparison(
        names=(a.name, b.name),
        layer_counts=(len(a), len(b)),
        softmax_factors=(a.softmax_factor, b.softmax_factor),
        context=context,
        tolerance=tolerance,
        meetings=tuple(meeting(kinds, layers) for kinds, layers in met.items()),
    )


def _difference(
    a: Rope | None, b: Rope | None, seq_len: int, context: int, tolerance: float
) -> Difference | None:
    if a is None or b is None:
        return None
    return diff(resolved(a, seq_len), resolved(b, seq_len), context=context, tolerance=tolerance)
