"""``phasor presets``."""

from __future__ import annotations

import click

from phasor.cli.common import say
from phasor.presets import preset_names


@click.command()
def presets() -> None:
    """List the presets."""
    for name in preset_names():
        say(name)
