"""Tensors of torch for its tests, and whether they are rotated as the oracle says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from phasor import Rope
from phasor.torch._operator import cpu, ops

from .. import oracle

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def implementations() -> list[str]:
    """Every way that this machine can run the operator; Triton's tests are in ``tests/gpu``."""
    return [*(name for name in ops.BACKENDS if name not in ("cpu", "triton")), *cpu.paths()]


def run_on(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``backend="auto"`` mean ``implementation``."""
    if implementation in ops.BACKENDS:
        monkeypatch.setattr(ops, "BACKENDS", {implementation: ops.BACKENDS[implementation]})
        cpu.absence()  # it answers once in a process: not what the next line says
        monkeypatch.setattr(cpu, "_absence_reason", "a test hides it")
    else:
        every = list(cpu._native.paths())
        monkeypatch.setattr(cpu, "_path_index", every.index(implementation))


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Standard normal numbers from a generator of their own."""
    generator = torch.Generator().manual_seed(seed)
    # on the CPU whatever the default device is
    values = torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")
    return values.to(dtype)


def float64(x: Tensor) -> np.ndarray:
    """The numbers of ``x``, which float64 holds whatever their dtype was."""
    return x.detach().to("cpu", torch.float64).numpy()


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name without torch's."""
    return str(dtype).removeprefix("torch.")


def row_error(dtype: torch.dtype, positions: Any, fastest: float = 1.0) -> float:
    """`oracle.row_error` of a dtype of torch."""
    return oracle.row_error(dtype_name(dtype), positions, fastest)


def excess_by(
    actual: Tensor,
    x: Tensor,
    rows: np.ndarray,
    pairing: tuple[str, str],
    *more: Any,
    **options: Any,
) -> float:
    """`oracle.excess_by` of tensors, which outside the rotated slice are bit-equal."""
    assert actual.dtype == x.dtype
    values = float64(actual), float64(x), dtype_name(x.dtype)
    return oracle.excess_by(*values, rows, pairing, *more, **options)


def assert_rotated(actual: Tensor, x: Tensor, positions: Any, rope: Rope, **options: Any) -> None:
    """``actual`` is ``x`` rotated by ``rope``, to within the bound everywhere."""
    assert actual.dtype == x.dtype
    values = float64(actual), float64(x), dtype_name(x.dtype)
    worst = oracle.excess(*values, positions, rope, **options)
    assert worst <= 1, f"{x.dtype}: {worst:.3g} times the bound"
