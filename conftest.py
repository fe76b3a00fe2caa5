"""Settings for every test, and the rule that code blocks in the README and the docs run."""

import gc
import os
import re
import shlex
from collections import defaultdict
from collections.abc import Hashable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings
from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser
from tests.cli.running import run_phasor
from tests.sampling import SAMPLED, sample

# each worker of pytest-xdist has a core: more threads would wait for one another, and turn while
# they wait, five times as long as the work takes
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# scripts that need what only `make docs` installs
collect_ignore_glob = ["docs/*.py"]
if find_spec("triton") is None:
    collect_ignore_glob.append("src/phasor/torch/_operator/triton/kernels.py")

# a shared machine is slow now and then; that is not a failure
# failures are remembered beside the tests, where that can be written
MEMORY = {} if os.access(Path(__file__).parent, os.W_OK) else {"database": None}
settings.register_profile("everything", deadline=None, print_blob=True, **MEMORY)
settings.register_profile("checked", settings.get_profile("everything"), max_examples=30)
settings.register_profile("everyday", settings.get_profile("everything"), max_examples=10)


KINDS = (
    *("transformers", "compile", "onnx", "report", "processes", "training"),
    *("programs", "kernels", "every_kernel", "more_cases"),
)
# files and folders of one kind, by what they take; `slow` where that is only their arithmetic
ROOMS = {
    "docs/attention.md": "slow",
    "docs/exporting.md": "onnx",
    "docs/extending.md": "report",
    "docs/figures.md": "report",
    "docs/from-torchtune.md": "slow",
    "docs/jax.md": "compile",
    "docs/lesson.md": "report",
    "docs/linear-attention.md": "slow",
    "docs/mlx.md": "compile",
    "docs/seeds.md": "slow",
    "docs/verify.md": "transformers",
    "src/phasor/charts": "report",
    "src/phasor/jax.py": "compile",
    "src/phasor/mlx.py": "compile",
    "src/phasor/torch/export.py": "onnx",
    "src/phasor/torch/live.py": "transformers",
    "tests/charts": "report",
    "tests/files/checkpoint/test_models.py": "transformers",
    "tests/files/configs/class_sizes.py": "transformers",
    "tests/files/configs/test_rotations.py": "transformers",
    "tests/examples": "training",
    "tests/gpu/test_code.py": "kernels",
    "tests/gpu/test_compiled.py": "kernels",
    "tests/gpu/test_kernels.py": "kernels",
    "tests/identification/test_foreign.py": "transformers",
    "tests/jax/test_equinox.py": "compile",
    "tests/files/configs/test_walks.py": "slow",
    "tests/identification/test_precision.py": "slow",
    "tests/test_copied_pages.py": "slow",
    "tests/test_patterns.py": "slow",
    "tests/torch/compile": "compile",
    "tests/torch/distributed/distributed_worker.py": "processes",
    "tests/torch/distributed/forked.py": "processes",
    "tests/torch/distributed/test_processes.py": "processes",
    "tests/torch/export/onnx_engines.py": "onnx",
    "tests/torch/export/test_export.py": "compile",
    "tests/torch/export/test_lengths.py": "onnx",
    "tests/torch/export/test_onnx.py": "onnx",
    "tests/torch/export/test_onnx_models.py": "onnx",
    "tests/torch/export/test_plain_graph.py": "compile",
    "tests/torch/live": "transformers",
    "tests/torch/export/test_portable.py": "onnx",
    "tests/torch/export/test_runtimes.py": "compile",
    "tests/tools": "transformers",
    "tests/torch/test_linear_attention_training.py": "slow",
    "tests/verify/test_misplaced.py": "slow",
    "tests/verify/test_named.py": "slow",
    "tests/ptx": "every_kernel",
}
# those that take a minute or more
LONGEST = (
    "tests/torch/distributed/test_processes.py",
    "tests/torch/live/test_patch.py",
    "tests/gpu/test_kernels.py",
)
ROOT = Path(__file__).parent
#: What ``-m`` is given by `make test` and by `make check`.
EVERYDAY, CHECKED = "not slow", "not every_kernel and not more_cases"


@cache
def kind_of(path: Path) -> str | None:
    """The kind of the file or folder ``path``, where all of it is of one."""
    marker_kind = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    return next(
        (ROOMS[str(kind)] for kind in (marker_kind, *marker_kind.parents) if str(kind) in ROOMS),
        None,
    )


def is_everyday(config: pytest.Config) -> bool:
    """Whether this is a run of ``make test``."""
    return config.option.markexpr == EVERYDAY


def pytest_configure(config: pytest.Config) -> None:
    """Try a tenth of the examples of each property every day, and a third before a merge."""
    profiles = {EVERYDAY: "everyday", CHECKED: "checked"}
    settings.load_profile(profiles.get(config.option.markexpr, "everything"))
    missing = [place for place in (*ROOMS, *LONGEST) if not (ROOT / place).exists()]
    missing += [
        f"{file}::{test}"
        for file, tests in SAMPLED.items()
        for test in tests
        if f"def {test}(" not in (ROOT / file).read_text("utf-8")
    ]
    assert not missing, f"conftest.py or tests/sampling.py names what is not there: {missing}"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import what everyday tests leave out."""
    return True if is_everyday(config) and kind_of(collection_path) else None


def values_of(item: pytest.Item) -> list[Hashable]:
    """The value of each parameter, or its number where it cannot be compared."""
    call = getattr(item, "callspec", None)
    if call is None:
        return []
    return [
        value if is_hashable(value) else call.indices[name] for name, value in call.params.items()
    ]


def is_hashable(value: object) -> bool:
    """Whether a set may hold it; a tuple of lists is hashable by its type alone."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark rooms of one kind with it, and all kinds as slow, for ``-m "not slow"``.

    The longest files come first, and then all of slow tests, so that at the end no worker waits for
    another's.
    """
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    for file, sizes in SAMPLED.items():
        for test, size in sizes.items():
            # CI runs none of the others in any case
            every = [
                item
                for item in cases[f"{file}::{test}"]
                if item.get_closest_marker("every_kernel") is None
            ]
            chosen = sample([values_of(item) for item in every], size)
            for index, item in enumerate(every):
                if index not in chosen:
                    item.add_marker("more_cases")
    for item in items:
        if kind := kind_of(item.path):
            item.add_marker(kind)
        if any(mark.name in KINDS for mark in item.iter_markers()):
            item.add_marker("slow")
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    longest = {ROOT / entry for entry in LONGEST}
    items.sort(key=lambda item: (item.path not in longest, item.path not in slow))


def pytest_collection() -> None:
    """Do not search thousands of tests for garbage again and again while they are collected."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Leave them out of every later search, of which there are fewer."""
    gc.freeze()
    # compilers make millions of objects that stay: searching them took a twentieth of all tests
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


def run_console(example: Example) -> None:
    """Run each ``$ phasor ...`` line of a block and compare what a terminal shows of it.

    A line of three dots stands for any lines.
    """
    sessions = [part for part in ("\n" + example.parsed).split("\n$ ") if part.strip()]
    for session in sessions:
        command, _, output = session.partition("\n")
        program, *arguments = shlex.split(command)
        assert program == "phasor", f"only phasor commands are run, got {command!r}"
        done = run_phasor(*arguments, FORCE_COLOR="1", TERM="xterm")
        result = re.sub("\x1b\\[[0-9;]*m", "", done.stderr if done.returncode == 2 else done.stdout)
        printed = [line.rstrip() for line in result.strip().splitlines()]
        lines = [line.rstrip() for line in output.strip().splitlines()]
        if "..." in lines:
            dots = lines.index("...")
            printed[dots : len(printed) - len(lines[dots + 1 :])] = ["..."]
        assert printed == lines, "\n".join(["printed:", *printed])


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), CodeBlockParser(language="console", evaluator=run_console)],
    patterns=["README.md", "docs/*.md"],
).pytest()
