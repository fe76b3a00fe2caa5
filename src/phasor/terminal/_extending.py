"""What ``phasor extend`` and ``phasor report`` show on a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from phasor.extending import Plan


def print_plan(planned: Plan, law: str | None) -> None:
    """The laws for a longer context side by side, the recommendation, and what a config says."""
    console, chosen = Console(highlight=False), planned.way(law)
    console.print(
        f"[bold]{escape(planned.model)}[/], {escape(', '.join(planned.kinds))} layers: "
        f"from {planned.context} to {planned.to} tokens\n"
    )
    console.print(_plan_table(planned))
    console.print("  new phases: pairs that show an angle never met in training")
    console.print("  slowest: turns of the slowest pair over the context")
    console.print("  C(r) < 0: distance from where a like key may score below a random one")
    console.print("  neighbours: how much of the angle between neighbours the fastest pair keeps")
    console.print(f"\n[bold]Recommended without training: {planned.recommended}[/]")
    console.print(f"  {planned.reason}.", soft_wrap=True)
    console.print("  Measure perplexity before you rely on it; fine-tuning improves any law.")
    console.print(f"\n[bold]{chosen.extension.name}[/] in a Hugging Face config.json")
    if chosen.config is None:
        console.print(f"  {chosen.refused}", soft_wrap=True, markup=False)
        return
    if planned.labels:
        verb = "is the block" if len(planned.labels) == 1 else "are the blocks"
        console.print(
            f"  {', '.join(map(repr, planned.labels))} {verb} of these layers; "
            "any other says what it said.",
            soft_wrap=True,
            markup=False,
        )
    set_these = f"In {planned.inside} set" if planned.inside else "Set"
    console.print(
        f"  {set_these} these keys, and remove {', '.join(planned.replaced)} where they stand:",
        soft_wrap=True,
        markup=False,
    )
    console.print(json.dumps(chosen.config, indent=2), soft_wrap=True, markup=False)


def _plan_table(planned: Plan) -> Table:
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


@contextmanager
def waiting(what: str) -> Generator[None]:
    """A sign of life on a terminal's stderr while something runs."""
    with Console(stderr=True).status(what):
        yield


@contextmanager
def progress_bar(what: str) -> Generator[Callable[[int, int], None]]:
    """A bar on a terminal's stderr, moved by how much is done, and of how much."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, of: progress.update(task, completed=done, total=of)
