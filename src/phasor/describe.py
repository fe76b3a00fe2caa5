"""A Rope in words and numbers: sentences and rows for people, plain values for machines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from typing import Any, NamedTuple, cast

from phasor.angles import turns, wavelengths
from phasor.axes import Axes, Mixed, OneAxis
from phasor.layers import LayerRopes
from phasor.pairings import Pairing, by_pairing
from phasor.rope import Rope, real_inv_freq, values_by_axis
from phasor.scaling import Law, Rule


class PairRow(NamedTuple):
    """The numbers of one pair."""

    pair: int  # its index, from 0
    axis: int | None  # the position axis that drives it; None where all do
    inv_freq: float  # radians per position
    wavelength: float | None  # positions per turn; None if its frequency is 0
    turns: float | None  # over the context; None without a context
    divided_by: float | None  # unscaled frequency / scaled frequency; None if the law made it 0


def pair_rows(rope: Rope, context: float | None) -> list[PairRow]:
    """One row for each pair of a Rope with a static law."""
    no_axis = (None,) * rope.num_pairs
    axes = no_axis if isinstance(rope.axes, Mixed) else rope.axes.axis_of_pair(rope.num_pairs)
    lengths = wavelengths(rope).tolist()
    turns_of_pair = None if context is None else turns(rope, context).tolist()
    frequencies = zip(real_inv_freq(without_law(rope)), real_inv_freq(rope), strict=True)
    return [
        PairRow(
            pair=pair,
            axis=axes[pair],
            inv_freq=float(rope.inv_freq[pair]),
            wavelength=None if math.isinf(lengths[pair]) else lengths[pair],
            turns=None if turns_of_pair is None else turns_of_pair[pair],
            divided_by=float(plain / scaled) if scaled else None if plain else 1.0,
        )
        for pair, (plain, scaled) in enumerate(frequencies)
    ]


def without_law(rope: Rope) -> Rope:
    """The Rope without its scaling law; unchanged if its frequencies are explicit."""
    if rope.explicit_inv_freq is not None:
        return rope
    has_own_laws = values_by_axis(rope.axes, "scaling") is not None
    axes = replace(cast(Any, rope.axes), scaling=None) if has_own_laws else rope.axes
    return replace(rope, scaling=None, axes=axes)


def original_context(rope: Rope) -> int | None:
    """The law's ``original_max_positions``, if it has that field."""
    return getattr(rope.scaling, "original_max_positions", None)


def sentences(rope: Rope, context: int | None) -> list[str]:
    """Sentences about a Rope with a static law, and which pairs complete a turn in a context.

    >>> print(sentences(Rope(head_dim=4, pairing="half"), None)[0])
    All 4 coordinates of a head turn, in 2 pairs (i, i + 2).
    """
    lines = [_slice_sentence(rope)]
    if not isinstance(rope.axes, OneAxis):
        counts = ", ".join(map(str, rope.axes.counts(rope.num_pairs)))
        lines.append(f"{rope.axes.n_axes} position axes drive {counts} pairs, {rope.axes.summary}.")
    rounding = ", rounded to float32" if rope.inv_freq_dtype == "float32" else ""
    lines.append(f"Frequencies are {bases_text(rope)}{rounding}.")
    if rope.direction < 0:
        lines.append("It turns clockwise, opposite to the usual direction.")
    lines += _law_sentences(rope)
    if original := original_context(rope):
        lines.append(f"{_turns_sentence(without_law(rope), original)} before the extension.")
    if context:
        lines.append(f"{_turns_sentence(rope, context)}.")
    if (rope.attention_factor, rope.logit_factor) != (1.0, 1.0):
        lines.append(
            f"Cos and sin are multiplied by the attention factor {rope.attention_factor:.6g}; "
            f"this and the softmax factor multiply the logits of a fully rotated head by "
            f"{rope.logit_factor:.6g}."
        )
    return lines


def rule_sentences(rope: Rope, seq_len: int | None) -> list[str]:
    """A sentence that names the length for which a rule picks its law; none for a law."""
    if not isinstance(rope.scaling, Rule):
        return []
    length = seq_len or original_context(rope)
    rule = type(rope.scaling).__name__
    return [f"The rule {rule} picks the law by length; shown here for {length} tokens."]


def _slice_sentence(rope: Rope) -> str:
    if rope.rotary_dim == rope.head_dim:
        clause = f"All {rope.head_dim} coordinates of a head turn"
    else:
        end = rope.rotary_start + rope.rotary_dim - 1
        clause = (
            f"Coordinates {rope.rotary_start} to {end} of {rope.head_dim} turn and the others are "
            "unchanged"
        )
    text = f"{clause}, in {rope.num_pairs} pairs {_formula(rope.pairing, rope.num_pairs)}"
    if rope.pairing_out is not None:
        text += f", and are written back as {_formula(rope.pairing_out, rope.num_pairs)}"
    return text + "."


def _formula(pairing: Pairing, num_pairs: int) -> str:
    return by_pairing(pairing, half=f"(i, i + {num_pairs})", interleaved="(2i, 2i + 1)")


def bases_text(rope: Rope) -> str:
    """What frequencies are before scaling: the powers of a base, or of one for each axis.

    >>> from phasor.axes import Axial
    >>> bases_text(Rope(head_dim=8, pairing="half", axes=Axial((2, 2), base=(256.0, 1e4))))
    'powers of base 256 on axis 0 and base 10000 on axis 1'
    """
    bases = values_by_axis(rope.axes, "base")
    if bases is not None:
        return f"powers of {by_axis([f'base {base:.15g}' for base in bases])}"
    return "listed one by one" if rope.base is None else f"powers of base {rope.base:.15g}"


def by_axis(texts: Sequence[str], leaving_out: str | None = None) -> str:
    """A text for each axis, those of equal axes together; the text alone if all are equal.

    >>> by_axis(["no law", "NTK", "NTK"])
    'no law on axis 0 and NTK on axes 1-2'
    """
    axes: dict[str, list[int]] = {}
    for axis, text in enumerate(texts):
        axes.setdefault(text, []).append(axis)
    if len(axes) == 1:
        return texts[0]
    axes.pop(leaving_out or "", None)
    listed = [
        f"{t} on {'axis' if len(indices) == 1 else 'axes'} {ranges(indices)}"
        for t, indices in axes.items()
    ]
    return " and ".join([", ".join(listed[:-1]), listed[-1]] if len(listed) > 1 else listed)


def _law_sentences(rope: Rope) -> list[str]:
    laws = values_by_axis(rope.axes, "scaling")
    if laws is not None:
        scaling = by_axis(["none" if law is None else _law_with_values(law) for law in laws])
    elif (law := rope.law()) is not None:
        scaling = _law_with_values(law)
    else:
        return []
    groups = "; ".join(f"{ranges(pairs)} {effect}" for effect, pairs in _pairs_by_effect(rope))
    return [f"Scaling is {scaling}.", f"Pairs {groups}."]


def _law_with_values(law: Law) -> str:
    values = ", ".join(
        f"{name} {value:.15g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in asdict(law).items()
        if value is not None and not isinstance(value, tuple)
    )
    return f"{type(law).__name__}{f' ({values})' if values else ''}"


def _pairs_by_effect(rope: Rope) -> Iterable[tuple[str, list[int]]]:
    """The effects of the law, each with its pairs, in the order of their first pairs."""
    divisors = [row.divided_by for row in pair_rows(rope, None)]
    true_divisors = [d for d in divisors if d is not None and d != 1.0]
    largest = max(true_divisors, default=1.0)
    has_plateau = true_divisors.count(largest) > 1  # several pairs have one divisor, as in YaRN
    other_divisors = [d for d in true_divisors if not (has_plateau and d == largest)]
    ends = dict.fromkeys(f"{end(other_divisors):.6g}" for end in (min, max) if other_divisors)
    groups: dict[str, list[int]] = {}
    for pair, divisor in enumerate(divisors):
        if divisor is None:
            effect = "stopped"
        elif divisor == 1.0:
            effect = "kept"
        elif has_plateau and divisor == largest:
            effect = f"divided by {largest:.6g}"
        else:
            effect = f"divided by {' to '.join(ends)}"
        groups.setdefault(effect, []).append(pair)
    return groups.items()


def _turns_sentence(rope: Rope, context: float) -> str:
    """Which pairs complete a turn within the context; without the full stop."""
    incomplete = [pair for pair, n in enumerate(turns(rope, context).tolist()) if n < 1]
    if not incomplete:
        subject = "Every pair completes"
    elif len(incomplete) == 1:
        subject = f"Pair {incomplete[0]} never completes"
    else:
        subject = f"Pairs {ranges(incomplete)} never complete"
    return f"{subject} a turn within {context} positions"


def ranges(pairs: list[int]) -> str:
    """Sorted indices as text, consecutive ones as a range.

    >>> ranges([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7-8'
    """
    runs: list[list[int]] = []
    for pair in pairs:
        if runs and pair == runs[-1][-1] + 1:
            runs[-1].append(pair)
        else:
            runs.append([pair])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def to_plain(value: object) -> Any:
    """``value`` as JSON values: None for a number that is not finite, laws and axes as their repr.

    >>> to_plain((1, float("inf"), OneAxis()))
    [1, None, 'OneAxis()']
    """
    match value:
        case float():
            return value if math.isfinite(value) else None
        case None | str() | int():
            return value
        case Rope():
            return value.to_dict()
        case Law() | Rule() | Axes():
            return repr(value)
        case Mapping():
            items = cast("Mapping[str, object]", value).items()
            return {name: to_plain(item) for name, item in items}
        case _ if hasattr(value, "as_plain"):  # a class that adds values to its fields
            return cast(Any, value).as_plain()
        case _ if hasattr(value, "_fields") or is_dataclass(value):
            return plain_fields(value)
        case _:
            return [to_plain(item) for item in cast("Iterable[object]", value)]


def plain_fields(value: Any) -> dict[str, Any]:
    """The fields of a dataclass or a named tuple as JSON values."""
    names = getattr(value, "_fields", None) or [field.name for field in fields(value)]
    return {name: to_plain(getattr(value, name)) for name in names}


def as_plain(ropes: LayerRopes, seq_len: int | None, context: int | None) -> dict[str, Any]:
    """The ropes, laws picked for ``seq_len``, factors, and turns over a context, as JSON values."""

    def describe(rope: Rope) -> dict[str, Any]:
        static = static_rope(rope, seq_len)
        return {
            "rope": rope.to_dict(),
            "law": static.to_dict()["scaling"],
            "attention_factor": static.attention_factor,
            "softmax_factor": static.softmax_factor,
            "logit_factor": static.logit_factor,
            "pairs": [plain_fields(row) for row in pair_rows(static, context)],
        }

    return {
        "name": ropes.name,
        "context": context,
        "seq_len": seq_len,
        "softmax_factor": ropes.softmax_factor,
        "num_heads": ropes.num_heads,
        "num_kv_heads": ropes.num_kv_heads,
        "layer_kinds": list(ropes.layer_kinds),
        "kinds": {k: None if rope is None else describe(rope) for k, rope in ropes.kinds.items()},
        "auxiliary_ropes": [
            {"name": name, "layers": [*layers]} | describe(rope)
            for name, rope, layers in ropes.auxiliary_ropes
        ],
        "query_factors": to_plain(ropes.query_factors),
        "notes": list(ropes.notes),
    }


def static_rope(rope: Rope, seq_len: int | None) -> Rope:
    """The Rope with the law that its rule picks for ``seq_len``, or for its original context."""
    if not isinstance(rope.scaling, Rule):
        return rope
    length = original_context(rope) if seq_len is None else seq_len
    return rope.at(1 if length is None else length)


def construction(rope: Rope) -> str:
    """The expression that makes ``rope`` after ``import phasor``, without default values.

    >>> print(construction(Rope(head_dim=64, pairing="half")))
    phasor.Rope(
        head_dim=64,
        pairing="half",
        base=10000.0,
    )
    """
    plain = Rope(head_dim=rope.head_dim, pairing=rope.pairing)
    lines: list[str] = []
    for field in fields(rope):
        value = getattr(rope, field.name)
        if value is None and field.name == "base":
            continue  # explicit frequencies replace the base
        is_required = field.name in ("head_dim", "pairing", "base")
        if not is_required and value == getattr(plain, field.name):
            continue
        text = f'"{value}"' if isinstance(value, str) else _expression(value)
        lines.append(f"    {field.name}={text},")
    return "\n".join(["phasor.Rope(", *lines, ")"])


def _expression(value: object) -> str:
    """The repr of a field's value, with the modules of laws and axes."""
    match value:
        case Law() | Rule():
            return f"phasor.scaling.{value!r}"
        case Axes():
            named_values = (
                (field.name, getattr(value, field.name)) for field in fields(cast(Any, value))
            )
            listed = ", ".join(
                f"{name}={_expression(v)}" for name, v in named_values if v is not None
            )
            return f"phasor.axes.{type(value).__name__}({listed})"
        case tuple():
            items = [_expression(item) for item in cast("tuple[object, ...]", value)]
            return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
        case _:
            return repr(value)


def usage_example(rope: Rope, context: int) -> str:
    """Python that rotates queries and keys with ``rope``."""
    rule = f"rope = rope.at({context})  # the law for this many tokens\n"
    positions = f"torch.arange(16)[:, None].expand(16, {rope.axes.n_axes})  # as in text"
    return f"""\
import torch

import phasor
from phasor.torch import rotate_qk

rope = {construction(rope)}
{rule if isinstance(rope.scaling, Rule) else ""}
# queries and keys: [batch, tokens, heads, {rope.head_dim}]
q = torch.randn(1, 16, 8, {rope.head_dim})
k = torch.randn(1, 16, 2, {rope.head_dim})
positions = {"torch.arange(16)" if rope.axes.n_axes == 1 else positions}
q, k = rotate_qk(q, k, positions, rope)"""
