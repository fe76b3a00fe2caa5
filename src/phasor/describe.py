"""A Rope in words and numbers: sentences and rows for people, plain values for machines."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from typing import Any

from phasor.axes import Alternating, Axes, Axial, InterleavedSections, OneAxis, Sectioned
from phasor.frequencies import turns, wavelengths
from phasor.layers import LayerRopes
from phasor.pairings import Pairing, by_pairing
from phasor.rope import Rope, real_inv_freq
from phasor.scaling import Rule


@dataclass(frozen=True, kw_only=True)
class PairRow:
    """What one pair does.

    Attributes:
        pair: Its index, from 0.
        axis: The position axis that drives it.
        inv_freq: Radians per position.
        wavelength: Positions per turn; None if it stands still.
        turns: Turns over the context; None without a context.
        divided_by: What the scaling law divided the plain frequency by; None if it stopped it.
    """

    pair: int
    axis: int
    inv_freq: float
    wavelength: float | None
    turns: float | None
    divided_by: float | None


def pair_rows(rope: Rope, context: float | None) -> list[PairRow]:
    """One row for each pair of a Rope with a static law."""
    over = [None] * rope.num_pairs if context is None else turns(rope, context).tolist()
    lengths = wavelengths(rope).tolist()
    return [
        PairRow(
            pair=pair,
            axis=axis,
            inv_freq=step,
            wavelength=None if math.isinf(lengths[pair]) else lengths[pair],
            turns=over[pair],
            divided_by=_divisor(plain, scaled),
        )
        for pair, (axis, step, plain, scaled) in enumerate(
            zip(
                rope.axes.axis_of_pair(rope.num_pairs),
                rope.inv_freq.tolist(),
                real_inv_freq(without_law(rope)),
                real_inv_freq(rope),
                strict=True,
            )
        )
    ]


def without_law(rope: Rope) -> Rope:
    """The Rope before its law; itself if the frequencies were given."""
    return rope if rope.explicit_inv_freq is not None else replace(rope, scaling=None)


def original_context(rope: Rope) -> int | None:
    """The context the law says it starts from, if it says so."""
    return getattr(rope.scaling, "original_max_positions", None)


def _divisor(plain: Decimal, scaled: Decimal) -> float | None:
    if not scaled:
        return None if plain else 1.0
    return float(plain / scaled)


def sentences(rope: Rope, context: int | None) -> list[str]:
    """What the Rope is, in plain words, from geometry to temperature.

    Args:
        rope: With a static law; ``rope.at(seq_len)`` picks a rule's.
        context: Positions to count turns over, if any.

    >>> print(sentences(Rope(head_dim=4, pairing="half"), None)[0])
    All 4 coordinates of a head turn, in 2 pairs (i, i + 2).
    """
    said = [_slice_sentence(rope), *_axes_sentences(rope), _frequency_sentence(rope)]
    if rope.direction < 0:
        said.append("It turns clockwise, against the usual direction.")
    said += _law_sentences(rope)
    for length, when in ((original_context(rope), " before the extension"), (context, "")):
        if length:
            of = without_law(rope) if when else rope
            said.append(f"{_unturned(of, length)} a turn within {length} positions{when}.")
    temperature = rope.attention_factor, rope.logit_factor
    if temperature != (1.0, 1.0):
        said.append(
            f"Attention factor {temperature[0]:.6g} on cos and sin; "
            f"logits of a fully rotated head are multiplied by {temperature[1]:.6g}."
        )
    return said


def _slice_sentence(rope: Rope) -> str:
    if rope.rotary_dim == rope.head_dim:
        what = f"All {rope.head_dim} coordinates of a head turn"
    else:
        end = rope.rotary_start + rope.rotary_dim - 1
        what = f"Coordinates {rope.rotary_start} to {end} of {rope.head_dim} turn, the others pass"
    text = f"{what}, in {rope.num_pairs} pairs {_formula(rope.pairing, rope.num_pairs)}"
    if rope.pairing_out is not None:
        text += f", and are written back as {_formula(rope.pairing_out, rope.num_pairs)}"
    return text + "."


def _formula(pairing: Pairing, num_pairs: int) -> str:
    return by_pairing(pairing, half=f"(i, i + {num_pairs})", interleaved="(2i, 2i + 1)")


def _axes_sentences(rope: Rope) -> list[str]:
    counts = [rope.axes.axis_of_pair(rope.num_pairs).count(a) for a in range(rope.axes.n_axes)]
    how: dict[type[Axes], str] = {
        Sectioned: "in consecutive sections of one spectrum",
        Axial: "in consecutive sections, each a spectrum of its own",
        InterleavedSections: "dealt out in turn",
        Alternating: "height and width in turn on the fast pairs, time on the slow ones",
    }
    if isinstance(rope.axes, OneAxis):
        return []
    split = ", ".join(str(count) for count in counts)
    return [f"{rope.axes.n_axes} position axes drive {split} pairs, {how[type(rope.axes)]}."]


def _frequency_sentence(rope: Rope) -> str:
    rounding = ", rounded to float32" if rope.inv_freq_dtype == "float32" else ""
    if rope.explicit_inv_freq is not None:
        return f"Frequencies are given one by one{rounding}."
    return f"Frequencies are powers of base {rope.base:.15g}{rounding}."


def _law_sentences(rope: Rope) -> list[str]:
    law = rope.law()
    if law is None:
        return []
    values = ", ".join(
        f"{name} {value:.15g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in asdict(law).items()
        if value is not None and not isinstance(value, tuple)
    )
    split = "; ".join(f"{ranges(pairs)} {what}" for what, pairs in _groups(rope).items())
    return [
        f"Scaling is {type(law).__name__}{f' ({values})' if values else ''}.",
        f"Pairs {split}.",
    ]


def _groups(rope: Rope) -> dict[str, list[int]]:
    """Pairs by what the law did to them, in the order a reader asks."""
    divisors = [row.divided_by for row in pair_rows(rope, None)]
    changed = [d for d in divisors if d is not None and d != 1.0]
    most = max(changed, default=1.0)
    settled = changed.count(most) > 1
    between = (
        "divided by less"
        if settled
        else f"divided by {min(changed, default=1.0):.6g} to {most:.6g}"
    )
    groups: dict[str, list[int]] = {}
    for pair, divisor in enumerate(divisors):
        if divisor is None:
            what = "stopped"
        elif divisor == 1.0:
            what = "kept"
        elif settled and divisor == most:
            what = f"divided by {most:.6g}"
        else:
            what = between
        groups.setdefault(what, []).append(pair)
    return groups


def _unturned(rope: Rope, context: float) -> str:
    never = [pair for pair, n in enumerate(turns(rope, context).tolist()) if n < 1]
    if not never:
        return "Every pair completes"
    return (
        f"Pair {never[0]} never completes"
        if len(never) == 1
        else (f"Pairs {ranges(never)} never complete")
    )


def ranges(pairs: list[int]) -> str:
    """Sorted indices with runs written short.

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


def as_plain(ropes: LayerRopes, seq_len: int | None, context: int | None) -> dict[str, Any]:
    """Everything `sentences` and `pair_rows` say, as JSON values.

    Args:
        ropes: What to describe.
        seq_len: The length at which rules pick their law.
        context: Positions to count turns over.
    """
    kinds: dict[str, Any] = {}
    for kind, rope in ropes.kinds.items():
        if rope is None:
            kinds[kind] = None
            continue
        static = resolved(rope, seq_len)
        kinds[kind] = {
            "rope": rope.to_dict(),
            "law": static.to_dict()["scaling"],
            "attention_factor": static.attention_factor,
            "softmax_factor": static.softmax_factor,
            "logit_factor": static.logit_factor,
            "pairs": [asdict(row) for row in pair_rows(static, context)],
        }
    return {
        "name": ropes.name,
        "context": context,
        "seq_len": seq_len,
        "softmax_factor": ropes.softmax_factor,
        "query_heads": ropes.query_heads,
        "key_heads": ropes.key_heads,
        "layer_kinds": list(ropes.layer_kinds),
        "kinds": kinds,
        "notes": list(ropes.notes),
    }


def resolved(rope: Rope, seq_len: int | None) -> Rope:
    """The Rope with its rule, if it has one, applied at ``seq_len``."""
    if not isinstance(rope.scaling, Rule):
        return rope
    length = original_context(rope) if seq_len is None else seq_len
    return rope.at(1 if length is None else length)
