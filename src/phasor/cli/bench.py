"""``phasor bench``: the command; `benchmark` is what it runs, with torch."""

from __future__ import annotations

import click

from phasor.cli.common import require_torch


@click.command()
def bench() -> None:
    """Measure this machine for a minute.

    phasor is timed against a copy of the same bytes and against plain torch.
    """
    require_torch("the benchmark")
    from phasor.cli.benchmark import run

    run()
