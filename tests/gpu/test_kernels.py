"""The tests of kernels, run without a GPU: interpreted, and as compiled on a machine for PTX.

Each run is a process that imports Triton once: see `triton_runs`. A few shapes of every kernel are
run with every change, on the machine for one device; all of them by `make test-gpu-kernels`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .triton_runs import run_interpreted, run_on_machine, starts_another

HEADS_FIRST = "tests/torch/test_heads_first.py"
ROTATED = ["tests/gpu/test_triton.py", "tests/gpu/test_launch.py", HEADS_FIRST]
MOVED = "tests/gpu/test_machine.py"
FEW, REST = "not every_kernel", "every_kernel"
EVERY = f"{FEW} or {REST}"

pytestmark = starts_another


def test_the_kernel_is_right_in_the_interpreter() -> None:
    """In the shapes that every change is tried on."""
    run_interpreted(ROTATED, FEW)


@pytest.mark.every_kernel
def test_kernels_are_right_in_the_interpreter_in_every_shape() -> None:
    """In the others."""
    run_interpreted(ROTATED, REST)


def test_kernels_are_right_and_frugal_as_compiled(tmp_path: Path) -> None:
    """For an H100, in the shapes of three models."""
    run_on_machine([MOVED], FEW, 90, tmp_path)


@pytest.mark.every_kernel
@pytest.mark.parametrize(
    ("capability", "file"),
    [
        *((90, file) for file in (*ROTATED, MOVED)),
        *((capability, "tests/gpu/test_triton.py") for capability in (80, 100)),
    ],
)
def test_every_kernel_is_right_as_compiled(capability: int, file: str, tmp_path: Path) -> None:
    """For an H100, and where conversions or packed arithmetic differ: an A100, a B200."""
    run_on_machine([file], EVERY, capability, tmp_path)
