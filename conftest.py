"""Settings for every test, and the rule that code blocks in the README and the docs run."""

import os
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from hypothesis import settings
from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser

# scripts that need what only `make docs` installs
collect_ignore_glob = ["docs/*.py"]
if find_spec("triton") is None:
    collect_ignore_glob += [
        f"src/phasor/torch/backends/triton/{name}.py"
        for name in ("angles", "kernels", "norm", "cache")
    ]

# a shared machine is slow now and then; that is not a failure
# failures are remembered beside the tests, where that can be written
MEMORY = {} if os.access(Path(__file__).parent, os.W_OK) else {"database": None}
settings.register_profile("phasor", deadline=None, print_blob=True, **MEMORY)
settings.load_profile("phasor")


def run_console(example: Example) -> None:
    """Run each ``$ phasor ...`` line of a block and compare what it prints with what follows."""
    sessions = [part for part in ("\n" + example.parsed).split("\n$ ") if part.strip()]
    for session in sessions:
        command, _, expected = session.partition("\n")
        program, *arguments = shlex.split(command)
        assert program == "phasor", f"only phasor commands are run, got {command!r}"
        done = subprocess.run(
            [sys.executable, "-m", "phasor", *arguments],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "COLUMNS": "80"},
        )
        printed = [line.rstrip() for line in (done.stdout + done.stderr).strip().splitlines()]
        wanted = [line.rstrip() for line in expected.strip().splitlines()]
        assert printed == wanted, "\n".join(["printed:", *printed])


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), CodeBlockParser(language="console", evaluator=run_console)],
    patterns=["README.md", "docs/*.md"],
).pytest()
