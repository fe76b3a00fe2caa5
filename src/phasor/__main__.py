"""The command ``phasor``, and ``python -m phasor``; Ctrl-C ends it without a traceback."""

import sys


def run() -> None:
    """Import the command line and run it; Ctrl-C during the import shows no traceback either."""
    try:
        from phasor.cli import run as run_command

        run_command()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    run()
