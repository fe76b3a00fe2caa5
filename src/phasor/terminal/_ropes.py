"""What ``phasor show`` and ``phasor diff`` print."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from phasor.describe import PairRow, original_context, pair_rows, ranges, resolved, sentences
from phasor.identification import Parting
from phasor.identification.comparison import Comparison, Meeting
from phasor.layers import LayerRopes
from phasor.scaling import Rule
from phasor.terminal._screen import Screen

_FEW = 20  # rows of a table that a reader takes in at once


def print_model(
    ropes: LayerRopes, seq_len: int | None, context: int | None, *, every_pair: bool
) -> None:
    """Each layer kind's rope in words, and its pairs as a table."""
    screen = Screen()
    heads = f", {ropes.query_heads} query heads" if ropes.query_heads else ""
    heads += f" and {ropes.key_heads} key heads" if ropes.key_heads else ""
    length = f", context {ropes.context}" if ropes.context else ""
    screen.say((ropes.name, "bold"), f": {len(ropes)} layers{heads}{length}")
    for kind, rope in ropes.kinds.items():
        layers = [i for i, named in enumerate(ropes.layer_kinds) if named == kind]
        screen.say()
        screen.say((kind, "bold cyan"), f" (layers {ranges(layers)})")
        if rope is None:
            screen.say("  No position embedding.")
            continue
        static = resolved(rope, seq_len)
        if isinstance(rope.scaling, Rule):
            at = seq_len or original_context(rope)
            rule = type(rope.scaling).__name__
            screen.say(f"  The rule {rule} picks the law from the length; here at {at} tokens.")
        for sentence in sentences(static, context):
            screen.say(f"  {sentence}")
        rows = pair_rows(static, context)
        screen.print(_pair_table(rows if every_pair else _selected(rows), context))
        if not every_pair and len(rows) > _FEW:
            screen.say(f"  A selection of {len(rows)} pairs; --pairs shows all.")
    screen.say()
    screen.say(f"Softmax scale: multiplied by {ropes.softmax_factor:.6g}")
    for note in ropes.notes:
        screen.say(f"Note: {note}")


def _selected(rows: Sequence[PairRow]) -> list[PairRow]:
    """Rows a reader wants of many: the ends, each change of what the law does, some between."""
    if len(rows) <= _FEW:
        return list(rows)
    last = len(rows) - 1
    wanted = {0, 1, last - 1, last}
    wanted |= {
        end
        for i in range(last)
        if (rows[i].divided_by == 1.0) != (rows[i + 1].divided_by == 1.0)
        or (rows[i].turns or 1) >= 1 > (rows[i + 1].turns or 1)
        for end in (i, i + 1)
    }
    wanted |= set(range(0, last, max(1, last // 8)))
    return [rows[i] for i in sorted(wanted)]


def _pair_table(rows: Sequence[PairRow], context: int | None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    several = len({row.axis for row in rows}) > 1
    table.add_column("pair", justify="right")
    if several:
        table.add_column("axis", justify="right")
    table.add_column("inv_freq", justify="right")
    table.add_column("wavelength", justify="right")
    if context is not None:
        table.add_column(f"turns in {context}", justify="right")
    table.add_column("law")
    for row in rows:
        never = row.turns is not None and row.turns < 1
        cells = [str(row.pair)]
        cells += [str(row.axis)] if several else []
        cells += [
            f"{row.inv_freq:.6g}",
            "-" if row.wavelength is None else f"{row.wavelength:.6g}",
        ]
        if context is not None:
            cells.append(f"{row.turns:.4g}" + (" never" if never else ""))
        cells.append(_law_cell(row.divided_by))
        table.add_row(*cells, style="yellow" if never else None)
    return table


def _law_cell(divided_by: float | None) -> str:
    if divided_by is None:
        return "stopped"
    return "kept" if divided_by == 1.0 else f"/ {divided_by:.6g}"


def print_comparison(compared: Comparison) -> None:
    """Where two models part, or that they do not."""
    screen = Screen()
    a, b = compared.names
    screen.say((a, "bold"), " and ", (b, "bold"), f", positions 0 to {compared.context - 1}")
    if not compared.differ:
        screen.say(
            ("They agree", "green"),
            f" within {compared.tolerance:g} on every pair of every layer.",
        )
        return
    if compared.layer_counts[0] != compared.layer_counts[1]:
        screen.say("  Layers: {} and {}.".format(*compared.layer_counts))
    if compared.softmax_factors[0] != compared.softmax_factors[1]:
        screen.say("  Softmax scale: times {:.9g} and {:.9g}.".format(*compared.softmax_factors))
    for meeting in compared.meetings:
        if meeting.differ:
            _print_meeting(screen, meeting)


def _print_meeting(screen: Screen, meeting: Meeting) -> None:
    kinds = meeting.kinds[0] if len(set(meeting.kinds)) == 1 else " and ".join(meeting.kinds)
    screen.say()
    screen.say((kinds, "bold cyan"), f" (layers {meeting.layers})")
    found = meeting.difference
    if found is None:
        which = "first" if meeting.has_rope[0] else "second"
        screen.say(f"  Only the {which} has a position embedding here.")
        return
    for name, values in found.fields.items():
        screen.say(f"  {name}: {values[0]} and {values[1]}")
    for name, factors in (
        ("Attention factor", found.attention_factors),
        ("Softmax factor", found.softmax_factors),
        ("Logit factor", found.logit_factors),
    ):
        if factors:
            screen.say(f"  {name}: {factors[0]:.9g} and {factors[1]:.9g}.")
    if found.earliest and found.first_pair:
        screen.say(f"  {found.pairs} pairs part within the context.")
        _print_parting(screen, "Earliest", found.earliest)
        if found.first_pair != found.earliest:
            _print_parting(screen, "First", found.first_pair)


def _print_parting(screen: Screen, which: str, parting: Parting) -> None:
    a, b = parting.inv_freq
    screen.say(
        f"  {which} pair: {parting.pair} at position {parting.position}, {parting.error:.3g} apart "
        f"(inv_freq {a:.9g} and {b:.9g})"
    )
