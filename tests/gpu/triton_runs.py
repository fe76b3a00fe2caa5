"""Where Triton's kernels run in tests.

On a GPU if there is one. Elsewhere a test file of kernels runs in a process of its own, interpreted
by Triton, which decides when it is imported whether it interprets, and interpreted cannot compile:
`test_kernels` starts it. By hand it runs as PTX on the CPU (`tests/ptx`), which stands for a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from phasor import Rope
from phasor.torch._operator import triton as triton_backend

from ..torch.torch_arrays import normal

ROOT = Path(__file__).parents[2]
_INSTALLED = find_spec("triton") is not None
#: What runs kernels in this process: "machine" (`tests/ptx`), "interpreter", "gpu", or "".
RUN_BY = (
    "machine" if "tests.ptx.device" in sys.modules
    else "interpreter" if os.environ.get("TRITON_INTERPRET") == "1"
    else "gpu" if torch.cuda.is_available() and _INSTALLED
    else ""
)  # fmt: skip
DEVICE = torch.device("cuda" if RUN_BY == "gpu" else "cpu")
#: A process of kernels alone, which is started by one that runs everything else.
APART = RUN_BY in ("machine", "interpreter")

needs_triton = pytest.mark.skipif(not _INSTALLED, reason="Triton is not installed")
runs_kernels = pytest.mark.skipif(
    not RUN_BY, reason="no GPU: these run in processes of their own, which other tests start"
)
on_gpu = pytest.mark.skipif(RUN_BY != "gpu", reason="it takes a GPU")
starts_another = pytest.mark.skipif(
    not _INSTALLED or bool(RUN_BY),
    reason="Triton is not installed, or the kernels run in this process",
)


HALF = Rope(head_dim=16, pairing="half")
TRITON: dict[str, Any] = {"backend": "triton"}  # by its name, which is never replaced


def here(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Standard normal numbers where the kernel runs."""
    return normal(*shape, dtype=dtype, seed=seed).to(DEVICE)


def ask_for_many(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make so many tokens many, which have a tile of their own."""
    monkeypatch.setattr(triton_backend, "HEAD_STEPS", ((tokens, 8),))
    forget_plans(monkeypatch)


def forget_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every launch the first of its kind: a plan keeps the tile that it was made with."""
    monkeypatch.setattr(triton_backend, "_PLANS", {})


def run_pytest(*arguments: str, **environment: str) -> None:
    """Run tests in a process of their own."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def convert_as_devices_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round bfloat16 to nearest even: the interpreter drops the bits for which there is no room.

    On a device too, every test has plans of its own.
    """
    forget_plans(monkeypatch)
    if RUN_BY != "interpreter":
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    theirs = InterpreterBuilder.cast_impl

    def cast(self: Any, source: Any, target: Any) -> Any:
        kinds = source.dtype.scalar, target.scalar
        if kinds == (tl.float32, tl.bfloat16):
            values = torch.from_numpy(np.array(source.data)).to(torch.bfloat16)
            return TensorHandle(values.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)
        if kinds == (tl.bfloat16, tl.float32):
            bits = np.array(source.data).astype(np.uint32) << 16
            return TensorHandle(bits.view(np.float32), tl.float32)
        return theirs(self, source, target)

    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast)


@pytest.fixture
def small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of small tensors: the tile that most of them use is the one for many tokens."""
    convert_as_devices_do(monkeypatch)
    ask_for_many(1, monkeypatch)
