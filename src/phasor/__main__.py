"""``python -m phasor`` is the command ``phasor``."""

from phasor.cli import run

run()
