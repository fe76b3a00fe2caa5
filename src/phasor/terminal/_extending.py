"""What ``phasor extend`` and ``phasor report`` show on a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich import box
from rich.progress import Progress
from rich.table import Table

from phasor.extending import ExtensionPlan
from phasor.terminal._screen import Screen


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


@contextmanager
def waiting(what: str) -> Generator[None]:
    """A sign of life on a terminal's stderr while something runs."""
    with Screen(stderr=True).status(what):
        yield


@contextmanager
def progress_bar(what: str) -> Generator[Callable[[int, int], None]]:
    """A bar on a terminal's stderr, moved by how much is done, and of how much."""
    screen = Screen(stderr=True)
    with Progress(console=screen, transient=True, disable=not screen.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, of: progress.update(task, completed=done, total=of)
