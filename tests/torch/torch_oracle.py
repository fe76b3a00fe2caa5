"""What a rotation must give and how far off it may be: 60-digit angles and complex numbers.

Of ``phasor`` only the fields of a Rope are read, and the names of the implementations.
Frequencies, axes and angles are written again, as plainly as they can be, and in `rotation_oracle`
pairings and the rotation itself.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from mpmath import mp, mpf
from torch import Tensor

from phasor import Rope
from phasor.angles import COS_SIN_ERROR_FLOAT32
from phasor.scaling import Linear, Llama3
from phasor.torch._operator import cpu, ops

from .. import rotation_oracle

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def implementations() -> list[str]:
    """Every way that this machine can run the operator; Triton's tests are in ``tests/gpu``."""
    return [*(name for name in ops.BACKENDS if name not in ("cpu", "triton")), *cpu.paths()]


def run_on(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``backend="auto"`` mean ``implementation``."""
    if implementation in ops.BACKENDS:
        monkeypatch.setattr(ops, "BACKENDS", {implementation: ops.BACKENDS[implementation]})
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


def frequencies(rope: Rope) -> list[mpf]:
    """Radians per position of every pair, from the formulas of the papers."""
    with mp.workdps(60):
        if rope.explicit_inv_freq is not None:
            return [mpf(f) for f in rope.explicit_inv_freq]
        if type(rope.axes).__name__ == "Mixed":
            return [mpf(f) for row in rope.axes.inv_freq for f in row]
        own_spectrum = type(rope.axes).__name__ == "Axial"
        widths = rope.axes.sections if own_spectrum else [rope.rotary_dim // 2]
        plain = [mpf(rope.base) ** (-mpf(2 * k) / (2 * n)) for n in widths for k in range(n)]
        law = rope.scaling
        if law is None:
            return plain
        if isinstance(law, Linear):
            return [f / mpf(law.factor) for f in plain]
        assert isinstance(law, Llama3), "no other law is written here"
        scaled: list[mpf] = []
        for f in plain:
            wavelength = 2 * mp.pi / f
            length = mpf(law.original_max_positions)
            if wavelength < length / mpf(law.high_freq_factor):
                scaled.append(f)
            elif wavelength > length / mpf(law.low_freq_factor):
                scaled.append(f / mpf(law.factor))
            else:
                smooth = length / wavelength - mpf(law.low_freq_factor)
                smooth /= mpf(law.high_freq_factor) - mpf(law.low_freq_factor)
                scaled.append((1 - smooth) * f / mpf(law.factor) + smooth * f)
        return scaled


def axis_of_pair(rope: Rope) -> list[int]:
    """The coordinate that every pair follows."""
    pairs, kind = rope.rotary_dim // 2, type(rope.axes).__name__
    if kind == "OneAxis":
        return [0] * pairs
    if kind == "Mixed":  # of a pair for each term of its angle
        return [axis for axis in range(rope.axes.n_axes) for _ in range(pairs)]
    sections = rope.axes.sections
    if kind == "InterleavedSections":
        dealt = [0] * pairs
        for axis in range(1, len(sections)):
            for pair in range(axis, len(sections) * sections[axis], len(sections)):
                dealt[pair] = axis
        return dealt
    if kind == "Alternating":
        return [1, 2] * sections[1] + [0] * sections[0]
    assert kind in ("Sectioned", "Axial"), f"tests/torch/torch_oracle.py axis_of_pair needs {kind}"
    return [axis for axis in range(len(sections)) for _ in range(sections[axis])]


@cache
def turn(position: int | float, frequency: mpf, direction: int) -> complex:
    """``exp(i direction position frequency)`` to the last bit of float64."""
    with mp.workdps(60):
        angle = direction * mpf(position) * frequency
        return complex(float(mp.cos(angle)), float(mp.sin(angle)))


def turns(rope: Rope, positions: Any, steps: list[mpf] | None = None) -> np.ndarray:
    """``exp(i angle)`` of every pair at every token, complex128 ``[..., S, num_pairs]``.

    ``steps`` are the frequencies where they are data, else they are made here.
    """
    exact = positions.tolist() if hasattr(positions, "tolist") else positions
    places = np.array(exact, dtype=object).reshape(np.shape(positions))
    axes, steps = axis_of_pair(rope), frequencies(rope) if steps is None else steps
    if type(rope.axes).__name__ == "OneAxis":
        places = places[..., None]
    made = np.empty((*places.shape[:-1], len(steps)), dtype=complex)
    for token in np.ndindex(*places.shape[:-1]):
        for pair, (axis, step) in enumerate(zip(axes, steps, strict=True)):
            made[token][pair] = turn(places[token][axis], step, rope.direction)
    if type(rope.axes).__name__ != "Mixed":
        return made
    # turns that are made one after the other
    return made.reshape(*made.shape[:-1], rope.axes.n_axes, -1).prod(-2)


def agree(found: Tensor, expected: Tensor, rotations: int = 1, size: float | None = None) -> bool:
    """Whether two results of so many rotations in a row can both be right.

    Each rotation is off by `bound`; a pair's two numbers add up to at most twice its largest one,
    and rotations keep lengths.

    Args:
        found: One.
        expected: The other.
        rotations: How many were made, at most.
        size: The largest number that is rotated; of ``expected`` unless given.
    """
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    size = float(expected.abs().max()) if size is None else size
    limit = 2 * (2 * torch.finfo(torch.float32).eps + COS_SIN_ERROR_FLOAT32)
    if found.dtype in (torch.bfloat16, torch.float16):
        limit += torch.finfo(found.dtype).eps
    return bool((found - expected).abs().max() <= 2 * rotations * limit * size)


def row_error(dtype: torch.dtype, positions: Any, fastest: float = 1.0) -> float:
    """`rotation_oracle.row_error` of a dtype of torch."""
    return rotation_oracle.row_error(dtype_name(dtype), positions, fastest)


def excess_by(
    actual: Tensor,
    x: Tensor,
    rows: np.ndarray,
    pairing: tuple[str, str],
    *more: Any,
    **options: Any,
) -> float:
    """`rotation_oracle.excess_by` of tensors, which outside the rotated slice are bit-equal."""
    assert actual.dtype == x.dtype
    values = float64(actual), float64(x), dtype_name(x.dtype)
    return rotation_oracle.excess_by(*values, rows, pairing, *more, **options)


def excess(
    actual: Tensor,
    x: Tensor,
    positions: Any,
    rope: Rope,
    *,
    inverse: bool = False,
    gain: float = 1.0,
) -> float:
    """Largest error of ``actual``, as ``x`` rotated by ``rope``, in units of `bound`."""
    rows = turns(rope, positions)
    pairing = (rope.pairing, rope.output_pairing)
    return excess_by(
        actual,
        x,
        rows.conj() if inverse else rows,
        pairing[::-1] if inverse else pairing,
        rope.rotary_start,
        gain=gain,
        error=row_error(x.dtype, positions, float(max(frequencies(rope)))),
    )


def assert_rotated(actual: Tensor, x: Tensor, positions: Any, rope: Rope, **options: Any) -> None:
    """``actual`` is ``x`` rotated by ``rope``, to within `bound` everywhere."""
    worst = excess(actual, x, positions, rope, **options)
    assert worst <= 1, f"{x.dtype}: {worst:.3g} times the bound"
