"""Settings for every test, and the rule that code blocks in the README and the docs run."""

import gc
import os
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings
from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser
from tests.cli.running import run_phasor

# each worker of pytest-xdist has a core: more threads would wait for one another, and turn while
# they wait, five times as long as the work takes
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

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


KINDS = (
    *("transformers", "compile", "onnx", "report", "processes", "training"),
    *("kernels", "every_kernel"),
)
ROOMS = {
    "torch/hf": "transformers",
    "torch/compile": "compile",
    "report": "report",
    "examples": "training",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark rooms of one kind with it, and all kinds as slow, for ``-m "not slow"``.

    Files of slow tests come first, so that at the end no worker waits for another's long file.
    """
    tests = Path(__file__).parent / "tests"
    for item in items:
        for room, kind in ROOMS.items():
            if item.path.is_relative_to(tests / room):
                item.add_marker(kind)
        if any(item.get_closest_marker(kind) for kind in KINDS):
            item.add_marker("slow")
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long)


def pytest_collection_finish() -> None:
    """Leave the thousands of tests that were collected out of every later search for garbage."""
    gc.collect()
    gc.freeze()


def run_console(example: Example) -> None:
    """Run each ``$ phasor ...`` line of a block and compare what a terminal shows of it."""
    sessions = [part for part in ("\n" + example.parsed).split("\n$ ") if part.strip()]
    for session in sessions:
        command, _, expected = session.partition("\n")
        program, *arguments = shlex.split(command)
        assert program == "phasor", f"only phasor commands are run, got {command!r}"
        done = run_phasor(*arguments, FORCE_COLOR="1", TERM="xterm")
        shown = re.sub("\x1b\\[[0-9;]*m", "", done.stderr if done.returncode == 2 else done.stdout)
        printed = [line.rstrip() for line in shown.strip().splitlines()]
        wanted = [line.rstrip() for line in expected.strip().splitlines()]
        assert printed == wanted, "\n".join(["printed:", *printed])


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), CodeBlockParser(language="console", evaluator=run_console)],
    patterns=["README.md", "docs/*.md"],
).pytest()
