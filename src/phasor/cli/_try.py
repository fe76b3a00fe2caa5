"""``phasor demo`` and ``phasor bench``."""

from __future__ import annotations

import sys

import click

from phasor.cli._common import need_torch


@click.command()
def demo() -> None:
    """Read a real model's configuration, rotate its queries and keys, and prove the result."""
    need_torch("the demo")
    from phasor.cli.demo import run

    sys.exit(0 if run() else 1)


@click.command()
def bench() -> None:
    """Measure this machine for a minute: phasor against a copy and against plain torch."""
    need_torch("the benchmark")
    from phasor.cli.bench import run

    run()
