"""The command line with a click that is older than the installed one."""

from __future__ import annotations

import subprocess
import sys

import pytest

# before 8.4 the class takes no type in brackets
PROGRAM = """
import click
class ParamType(click.ParamType):
    __class_getitem__ = None
click.ParamType = ParamType
from phasor.cli import main
main(["show", "llama-3-8b", "--seq-len", "8k"])
"""


@pytest.mark.processes
def test_commands_run_with_a_click_whose_parameter_types_are_not_generic() -> None:
    """As they are in 8.1 to 8.3."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "500000" in done.stdout
