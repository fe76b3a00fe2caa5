"""``phasor demo``: from a model's configuration to a proved rotation, in a few seconds.

The oracle shares only NumPy with the library: it has its own formula for each model's frequencies,
takes float64 angles (within 1e-10 at these positions) and multiplies complex numbers.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, assert_never

import click
import numpy as np
from numpy.typing import NDArray

from phasor.angles import COS_SIN_ERROR_FLOAT32
from phasor.cli.common import Screen, make_table, require_modules
from phasor.describe import sentences
from phasor.files.configs import load
from phasor.files.presets import preset
from phasor.layers import LayerRopes
from phasor.pairings import Pairing
from phasor.papers import angle_errors
from phasor.rope import Rope

if TYPE_CHECKING:
    # the help of every command is shown without torch
    import torch
    from torch import Tensor

_TOKENS = 256


@dataclass(frozen=True)
class _Case:
    """A model, and its rotation by the oracle."""

    ropes: LayerRopes  # what phasor read
    inv_freq: NDArray[np.float64]  # by the oracle's formula
    start: int  # the first position of the test, near the end of the model's context

    @property
    def rope(self) -> Rope:
        """The rope of every layer."""
        return self.ropes.ropes[0]


def _geometric(base: float, pairs: int) -> NDArray[np.float64]:
    return np.array([base ** -(k / pairs) for k in range(pairs)])


def _llama_3_1() -> NDArray[np.float64]:
    """Divide by 8 below one turn in 8192 positions, keep above four, blend between."""
    plain = _geometric(500_000.0, 64)
    kept_share = np.clip((8192 * plain / (2 * np.pi) - 1) / 3, 0, 1)
    return kept_share * plain + (1 - kept_share) * plain / 8


def _deepseek_v3() -> NDArray[np.float64]:
    """Divide by 40, with a ramp over the pairs 10 to 23: those of 32 turns and of one in 4096."""
    plain = _geometric(10_000.0, 32)
    divided = np.clip((np.arange(32) - 10) / 13, 0, 1)
    return plain * (1 - divided) + plain / 40 * divided


def _cases() -> list[_Case]:
    config = resources.files("phasor.cli") / "llama-3.1-8b.json"
    with resources.as_file(config) as path:
        llama = load(path)
    return [
        _Case(llama, _llama_3_1(), 131_072 - _TOKENS),
        _Case(preset("gpt-j-6b"), _geometric(10_000.0, 32), 2048 - _TOKENS),
        _Case(preset("deepseek-v3"), _deepseek_v3(), 163_840 - _TOKENS),
        _Case(preset("qwen3-8b"), _geometric(1e6, 64), 40_960 - _TOKENS),
    ]


@click.command(epilog="Example: phasor demo")
def demo() -> None:
    """Rotate with the configs of real models, and prove the result."""
    require_modules("the demo", "torch", "torch")
    sys.exit(0 if run() else 1)


def run() -> bool:
    """Print what phasor reads and does; true if every result is within its bound."""
    import torch
    from rich.progress import track

    screen = Screen()
    cases = _cases()
    llama = cases[0].ropes
    screen.print_line(("1. Read a configuration", "bold"), " (llama-3.1-8b.json)")
    for sentence in sentences(cases[0].rope, llama.context):
        screen.print_line(f"   {sentence}")
    screen.print_line()
    screen.print_line(
        ("2. Rotate queries and keys", "bold"),
        f" of real shapes, {_TOKENS} tokens at the context's end,",
    )
    screen.print_line("   forward and backward, and compare with complex128 multiplication")
    combinations = [(case, dtype) for case in cases for dtype in (torch.float32, torch.bfloat16)]
    words = "model", "q and k", "dtype"
    table = make_table(*words, "forward", "backward", words=words)
    largest_error = 0.0
    for case, dtype in track(combinations, "   rotating", console=screen, transient=True):
        forward, backward = _errors(case, dtype)
        largest_error = max(largest_error, forward, backward)
        shapes = f"{case.ropes.num_heads} + {case.ropes.num_kv_heads} heads of {case.rope.head_dim}"
        cells = (case.ropes.name, shapes, str(dtype).removeprefix("torch."))
        table.add_row(*cells, f"{forward:.3f}", f"{backward:.3f}")
    screen.print(table)
    is_within_bound = largest_error <= 1.0
    verdict = ("within the bound", "green") if is_within_bound else ("BEYOND THE BOUND", "red")
    text = f"   Largest error, in units of the derived bound: {largest_error:.3f}, "
    screen.print_line(text, verdict, ".")
    screen.print_line()
    screen.print_line(
        ("3. For comparison", "bold"),
        f": near position {cases[0].start} the usual float32 angles are off by",
    )
    positions = np.arange(cases[0].start, cases[0].start + _TOKENS)
    usual_error = angle_errors(cases[0].rope, positions, "float32 angle").max()
    text = (
        f"   up to {usual_error:.1e} in cos and sin; phasor's within {COS_SIN_ERROR_FLOAT32:.2e}."
    )
    screen.print_line(text)
    return is_within_bound


def _errors(case: _Case, dtype: torch.dtype) -> tuple[float, float]:
    """Largest error of the new q and k, and of their gradients, in units of the bound."""
    import torch

    from phasor.torch import rotate_qk

    rope = case.rope
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int | None) -> Tensor:
        return torch.randn(1, _TOKENS, heads or 1, rope.head_dim, generator=generator).to(dtype)

    q, k = draw(case.ropes.num_heads), draw(case.ropes.num_kv_heads)
    grads = draw(case.ropes.num_heads), draw(case.ropes.num_kv_heads)
    positions = torch.arange(case.start, case.start + _TOKENS)
    inputs = q.requires_grad_(), k.requires_grad_()
    rotated = rotate_qk(*inputs, positions, rope)
    gradients = torch.autograd.grad(rotated, inputs, grads)
    turns = np.exp(1j * positions.numpy()[:, None] * case.inv_freq)[:, None, :]
    pairings = rope.pairing, rope.output_pairing
    # the heads of queries and of keys side by side
    return (
        _error(torch.cat(inputs, 2), torch.cat(rotated, 2), turns, pairings, rope),
        _error(torch.cat(grads, 2), torch.cat(gradients, 2), turns.conj(), pairings[::-1], rope),
    )


def _error(
    x: Tensor, y: Tensor, turns: NDArray[np.complex128], pairings: tuple[Pairing, ...], rope: Rope
) -> float:
    """The error of ``y`` as the rotation of ``x``, in units of the bound."""
    rotary_slice = slice(rope.rotary_start, rope.rotary_start + rope.rotary_dim)
    inputs = _pairs(x.detach().double().numpy()[..., rotary_slice], pairings[0])
    expected = inputs * turns
    error = _pairs(y.detach().double().numpy()[..., rotary_slice], pairings[1]) - expected
    sizes = np.abs(inputs.real) + np.abs(inputs.imag)
    products = np.abs(inputs.real * turns.real) + np.abs(inputs.imag * turns.imag)
    crossed = np.abs(inputs.real * turns.imag) + np.abs(inputs.imag * turns.real)
    parts = ((error.real, products, expected.real), (error.imag, crossed, expected.imag))
    return max(float(np.max(np.abs(e) / _bound(y.dtype, m, sizes, r))) for e, m, r in parts)


def _pairs(x: NDArray[np.float64], pairing: Pairing) -> NDArray[np.complex128]:
    half = x.shape[-1] // 2
    match pairing:
        case "half":
            return x[..., :half] + 1j * x[..., half:]
        case "interleaved":
            return x[..., 0::2] + 1j * x[..., 1::2]
        case _:
            assert_never(pairing)


def _bound(
    dtype: torch.dtype,
    products: NDArray[np.float64],
    size: NDArray[np.float64],
    ref: NDArray[np.float64],
) -> NDArray[np.float64]:
    """The error of float32 arithmetic, cos and sin, and one rounding: see precision.md."""
    import torch

    wide = 2 * 2.0**-23 * products + 2**0.5 * COS_SIN_ERROR_FLOAT32 * size
    if dtype == torch.float32:
        return wide
    return wide + torch.finfo(dtype).eps / 2 * (np.abs(ref) + wide)
