"""``phasor extend``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click
from rich import box
from rich.table import Table

from phasor.cli.common import (
    MODEL,
    Screen,
    read,
    reading_options,
    say_json,
    trained_option,
    waiting,
)
from phasor.extending import ExtensionPlan, plan


@click.command()
@click.argument("model", type=MODEL)
@click.option("--to", type=click.IntRange(3), required=True, metavar="TOKENS", help="Wanted.")
@click.option("--law", metavar="NAME", help="Write this law's block, not the recommended one's.")
@click.option("--kind", metavar="NAME", help="Layers to extend, where a model has several kinds.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@trained_option
@reading_options
def extend(
    model: str,
    to: int,
    law: str | None,
    kind: str | None,
    as_json: bool,
    context: int | None,
    reading: Mapping[str, Any],
) -> None:
    """Compare the laws that take MODEL to a longer context, and write the config's block."""
    ropes = read(model, reading)
    with waiting("comparing the laws"):
        planned = plan(ropes, kind, context, to)
    if as_json:
        say_json(planned.as_plain(law))
    else:
        print_plan(planned, law)


def print_plan(planned: ExtensionPlan, law: str | None) -> None:
    """The laws for a longer context side by side, the recommendation, and what a config says."""
    screen, chosen = Screen(), planned.way(law)
    screen.say(
        (planned.model, "bold"),
        f", {', '.join(planned.kinds)} layers: from {planned.context} to {planned.to} tokens",
    )
    screen.say()
    screen.print(_plan_table(planned))
    screen.say("  new phases: pairs that show an angle never met in training")
    screen.say("  slowest: turns of the slowest pair over the context")
    screen.say("  C(r) < 0: distance from where a like key may score below a random one")
    screen.say("  neighbours: how much of the angle between neighbours the fastest pair keeps")
    screen.say()
    screen.say(f"Recommended without training: {planned.recommended}", style="bold")
    screen.say(f"  {planned.reason}.")
    screen.say("  Measure perplexity before you rely on it; fine-tuning improves any law.")
    screen.say()
    screen.say((chosen.extension.name, "bold"), " in a Hugging Face config.json")
    if chosen.config is None:
        screen.say(f"  {chosen.refused}")
        return
    if planned.labels:
        verb = "is the block" if len(planned.labels) == 1 else "are the blocks"
        screen.say(
            f"  {', '.join(map(repr, planned.labels))} {verb} of these layers; "
            "any other says what it said."
        )
    set_these = f"In {planned.inside} set" if planned.inside else "Set"
    screen.say(
        f"  {set_these} these keys, and remove {', '.join(planned.replaced)} where they stand:"
    )
    screen.print(json.dumps(chosen.config, indent=2), soft_wrap=True)


def _plan_table(planned: ExtensionPlan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("law")
    for title in ("new phases", "slowest", "C(r) < 0", "neighbours", "attention factor"):
        table.add_column(title, justify="right")
    for name, way in planned.ways.items():
        does = way.extension
        table.add_row(
            name,
            f"{does.pairs_affected} of {does.rope.num_pairs}",
            f"{does.slowest_turns:.3g}",
            "none" if does.sign_change is None else str(does.sign_change),
            f"{does.resolution:.3g}",
            f"{does.attention_factor:.6g}",
            style="green" if name == planned.recommended else None,
        )
    return table
