"""Starts a process for every file of the kernel's tests, in which what Triton compiles is run."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.gpu.test_kernels import FILES
from tests.gpu.triton_runs import run_pytest, starts_another


@starts_another
@pytest.mark.parametrize(
    ("capability", "file"),
    [
        *((90, file) for file in (*FILES, "tests/ptx/test_traffic.py")),
        *((capability, "tests/gpu/test_triton.py") for capability in (80, 100)),
    ],
)
def test_the_kernel_is_right_as_compiled(capability: int, file: str, tmp_path: Path) -> None:
    """For an H100, and where conversions or packed arithmetic differ: an A100, a B200."""
    given = {"PTX_CAPABILITY": str(capability), "TRITON_CACHE_DIR": str(tmp_path)}
    run_pytest("-p", "tests.ptx.device", file, **given)
