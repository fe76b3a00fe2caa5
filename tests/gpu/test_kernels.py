"""The kernel's tests without a GPU, interpreted in a process that imports Triton once.

A few shapes are run with every change, all of them by `make test-gpu-kernels`.
"""

from __future__ import annotations

import pytest

from .triton_runs import run_pytest, starts_another

FILES = [
    "tests/gpu/test_angles.py",
    "tests/gpu/test_triton.py",
    "tests/gpu/test_launch.py",
    "tests/torch/test_heads_first.py",
]


@starts_another
@pytest.mark.parametrize(
    "marked",
    [
        "not every_kernel and not more_cases",
        pytest.param("more_cases and not every_kernel", marks=pytest.mark.more_cases),
        pytest.param("every_kernel", marks=pytest.mark.every_kernel),
    ],
)
def test_the_kernel_is_right_in_the_interpreter(marked: str) -> None:
    """In the shapes that every change is tried on, and in the others."""
    run_pytest("-m", marked, *FILES, TRITON_INTERPRET="1")
