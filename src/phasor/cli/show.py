"""``phasor show``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import click

from phasor.cli.options import read_model, seq_len_option, takes_models, tokens_option
from phasor.cli.output import Screen, print_json
from phasor.describe import (
    PairRow,
    as_plain,
    pair_rows,
    ranges,
    rule_sentences,
    sentences,
    static_rope,
)
from phasor.layers import LayerRopes

_MOST_ROWS = 20  # tables of at most this many rows are printed in full


@click.command(epilog="Example: phasor show llama-3.1-8b --context 8k")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option("--pairs", is_flag=True, help="Print all pairs instead of a selection.")
@tokens_option("--context", "Count turns over this length.")
@seq_len_option
@takes_models("model")
def show(
    model: str,
    as_json: bool,
    pairs: bool,
    context: int | None,
    seq_len: int | None,
    **load_options: Any,
) -> None:
    """Describe the rotation of MODEL, in sentences and pair by pair."""
    ropes = read_model(model, **load_options)
    length = context or ropes.context
    if as_json:
        print_json(as_plain(ropes, seq_len or length, length))
        return
    print_model(ropes, seq_len or length, length, every_pair=pairs)


def print_model(
    ropes: LayerRopes, seq_len: int | None, context: int | None, *, every_pair: bool
) -> None:
    """Print the rope of each kind of layer, in sentences and as a table of pairs."""
    screen = Screen()
    heads = f", {ropes.num_heads} query heads" if ropes.num_heads else ""
    heads += f" and {ropes.num_kv_heads} key heads" if ropes.num_kv_heads else ""
    length = f", context {ropes.context}" if ropes.context else ""
    screen.print_line((ropes.name, "bold"), f": {len(ropes)} layers{heads}{length}")
    where = {
        kind: [i for i, k in enumerate(ropes.layer_kinds) if k == kind] for kind in ropes.kinds
    }
    parts = [(kind, rope, "", where[kind]) for kind, rope in ropes.kinds.items()]
    parts += [
        (name, rope, "outside attention, ", [*layers])
        for name, rope, layers in ropes.auxiliary_ropes
    ]
    for name, rope, place, layers in parts:
        screen.print_line()
        screen.print_line((name, "bold cyan"), f" ({place}layers {ranges(layers)})")
        if not place and (factor := ropes.query_factors.get(name)):
            screen.print_line(f"  Queries are multiplied by {factor} at position p.")
        if rope is None:
            screen.print_line("  No position embedding.")
            continue
        static = static_rope(rope, seq_len)
        screen.print_lines((*rule_sentences(rope, seq_len), *sentences(static, context)), "  ")
        rows = pair_rows(static, context)
        _print_pairs(screen, rows if every_pair else _select_rows(rows), context)
        if not every_pair and len(rows) > _MOST_ROWS:
            screen.print_line(f"  Selected from {len(rows)} pairs; --pairs shows all.")
    screen.print_line()
    if ropes.softmax_factor != 1:
        screen.print_line(f"Softmax scale: multiplied by {ropes.softmax_factor:.6g}")
    for note in ropes.notes:
        screen.print_line(f"Note: {note}")


def _select_rows(rows: Sequence[PairRow]) -> list[PairRow]:
    """Select some of many rows: both ends, rows where the law's effect changes, and eight more."""
    if len(rows) <= _MOST_ROWS:
        return list(rows)
    last = len(rows) - 1
    changes = {
        i + end
        for i, (row, after) in enumerate(pairwise(rows))
        if (row.divided_by == 1.0) != (after.divided_by == 1.0)
        or (row.turns or 1) >= 1 > (after.turns or 1)
        for end in (0, 1)
    }
    selected = {0, 1, last - 1, last, *range(0, last, max(1, last // 8)), *changes}
    return [rows[i] for i in sorted(selected)]


def _print_pairs(screen: Screen, rows: Sequence[PairRow], context: int | None) -> None:
    columns = {
        "pair": [str(row.pair) for row in rows],
        "axis": [str(row.axis) for row in rows],
        "inv_freq": [f"{row.inv_freq:.6g}" for row in rows],
        "wavelength": ["-" if row.wavelength is None else f"{row.wavelength:.6g}" for row in rows],
    }
    if len(set(columns["axis"])) == 1:
        del columns["axis"]
    turns = [
        row.turns for row in rows if row.turns is not None
    ]  # either all rows have turns or none
    if context is not None:
        words = (f"{count:.4g}" + (" never" if count < 1 else "") for count in turns)
        columns[f"turns in {context}"] = list(words)
    columns["law"] = [_law_cell(row.divided_by) for row in rows]
    styles = ["yellow" if count < 1 else None for count in turns]
    screen.print_table(columns, words=["law"], styles=styles)


def _law_cell(divided_by: float | None) -> str:
    if divided_by is None:
        return "stopped"
    return "kept" if divided_by == 1.0 else f"/ {divided_by:.6g}"
