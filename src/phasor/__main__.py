"""The command ``phasor``, and ``python -m phasor``: an interrupt is quiet from the start on."""

import sys


def run() -> None:
    """Import the command line and run it, quiet where it is interrupted on the way."""
    try:
        from phasor.cli import run as run_command

        run_command()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    run()
