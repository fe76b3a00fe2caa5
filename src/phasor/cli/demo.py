"""``phasor demo``: read a model's configuration, rotate, and check the result, in seconds.

The oracle shares only NumPy with the library: it has its own formula for each model's frequencies,
uses float64 angles (within 1e-10 at these positions) and multiplies complex numbers.
"""

from __future__ import annotations

from importlib import resources
from itertools import product
from typing import TYPE_CHECKING, assert_never

import click
import numpy as np
from numpy.typing import NDArray

from phasor.angles import COS_SIN_ERROR_FLOAT32
from phasor.cli.output import Screen, require_modules
from phasor.describe import sentences
from phasor.files.presets import preset
from phasor.files.reading import load
from phasor.layers import LayerRopes
from phasor.pairings import Pairing
from phasor.papers import angle_errors
from phasor.rope import Rope

if TYPE_CHECKING:
    # so that --help works without torch
    import torch
    from torch import Tensor

_TOKENS = 256
# a model as phasor reads it, with equal layers, and its frequencies by the oracle's formula
_Case = tuple[LayerRopes, NDArray[np.float64]]


def _geometric(base: float, pairs: int) -> NDArray[np.float64]:
    return np.array([base ** -(k / pairs) for k in range(pairs)])


def _llama_3_1() -> NDArray[np.float64]:
    """Divide by 8 below one turn in 8192 positions, keep above four, blend in between."""
    plain = _geometric(500_000.0, 64)
    kept_share = np.clip((8192 * plain / (2 * np.pi) - 1) / 3, 0, 1)
    return kept_share * plain + (1 - kept_share) * plain / 8


def _deepseek_v3() -> NDArray[np.float64]:
    """Divide by 40, with a ramp from pair 10 to pair 23 (32 turns and one turn in 4096)."""
    plain = _geometric(10_000.0, 32)
    divided = np.clip((np.arange(32) - 10) / 13, 0, 1)
    return plain * (1 - divided) + plain / 40 * divided


def _cases() -> list[_Case]:
    config = resources.files("phasor.cli") / "llama-3.1-8b.json"
    with resources.as_file(config) as path:
        llama = load(path)
    return [
        (llama, _llama_3_1()),
        (preset("gpt-j-6b"), _geometric(10_000.0, 32)),
        (preset("deepseek-v3"), _deepseek_v3()),
        (preset("qwen3-8b"), _geometric(1e6, 64)),
    ]


def _positions(ropes: LayerRopes) -> NDArray[np.int64]:
    assert ropes.context is not None
    return np.arange(ropes.context - _TOKENS, ropes.context)


@click.command(epilog="Example: phasor demo")
def demo() -> None:
    """Rotate with the configs of real models, and check the result."""
    require_modules("the demo", "torch", "torch")
    raise click.exceptions.Exit(0 if run() else 1)


def run() -> bool:
    """Print every step; True if every result is within its bound."""
    import torch
    from rich.progress import track

    screen, cases = Screen(), _cases()
    llama, _ = cases[0]
    screen.print_line(("1. Read a configuration", "bold"), " (llama-3.1-8b.json)")
    screen.print_lines(sentences(llama.ropes[0], llama.context), "   ")
    screen.print_line()
    title = "2. Rotate queries and keys", "bold"
    screen.print_line(title, f" of real shapes, {_TOKENS} tokens at the context's end,")
    screen.print_line("   forward and backward, and compare with complex128 multiplication")
    runs = list(product(cases, (torch.float32, torch.bfloat16)))
    progress = track(runs, "   rotating", console=screen, transient=True)
    errors = [_errors(*case, dtype) for case, dtype in progress]
    models = [ropes for (ropes, _), _ in runs]
    columns = {
        "model": [ropes.name for ropes in models],
        "q and k": [
            f"{ropes.num_heads} + {ropes.num_kv_heads} heads of {ropes.ropes[0].head_dim}"
            for ropes in models
        ],
        "dtype": [str(dtype).removeprefix("torch.") for _, dtype in runs],
        "forward": [f"{forward:.3f}" for forward, _ in errors],
        "backward": [f"{backward:.3f}" for _, backward in errors],
    }
    screen.print_table(columns, words=("model", "q and k", "dtype"))
    largest = max(map(max, errors))
    is_within = largest <= 1.0
    verdict = ("within the bound", "green") if is_within else ("BEYOND THE BOUND", "red")
    line = f"   Largest error, in units of the derived bound: {largest:.3f}, "
    screen.print_line(line, verdict, ".")
    screen.print_line()
    positions = _positions(llama)
    line = f": near position {positions[0]} the usual float32 angles cause errors of"
    screen.print_line(("3. For comparison", "bold"), line)
    usual = angle_errors(llama.ropes[0], positions, "float32 angle").max()
    line = f"   up to {usual:.1e} in cos and sin, phasor's at most {COS_SIN_ERROR_FLOAT32:.2e}."
    screen.print_line(line)
    return is_within


def _errors(
    ropes: LayerRopes, inv_freq: NDArray[np.float64], dtype: torch.dtype
) -> tuple[float, float]:
    """Largest error of the rotated q and k, and of their gradients, in units of the bound."""
    import torch

    from phasor.torch import rotate_qk

    rope, positions = ropes.ropes[0], _positions(ropes)
    generator = torch.Generator().manual_seed(0)

    def draw() -> tuple[Tensor, Tensor]:
        heads = ropes.num_heads, ropes.num_kv_heads
        q, k = (torch.randn(1, _TOKENS, n or 1, rope.head_dim, generator=generator) for n in heads)
        return q.to(dtype), k.to(dtype)

    (q, k), grads = draw(), draw()
    inputs = q.requires_grad_(), k.requires_grad_()
    rotated = rotate_qk(*inputs, torch.from_numpy(positions), rope, gain=1.0)
    gradients = torch.autograd.grad(rotated, inputs, grads)
    turns = np.exp(1j * positions[:, None] * inv_freq)[:, None, :]
    # query heads followed by key heads
    x, y, grad_y, grad_x = (torch.cat(parts, 2) for parts in (inputs, rotated, grads, gradients))
    first, last = rope.pairing, rope.output_pairing
    forward = _error(_pairs(x, first, rope), _pairs(y, last, rope), turns, dtype)
    backward = _error(_pairs(grad_y, last, rope), _pairs(grad_x, first, rope), turns.conj(), dtype)
    return forward, backward


def _pairs(x: Tensor, pairing: Pairing, rope: Rope) -> NDArray[np.complex128]:
    """The pairs that turn, as complex numbers."""
    numbers = x.detach().double().numpy()[..., rope.rotary_start :][..., : rope.rotary_dim]
    match pairing:
        case "half":
            first, second = np.split(numbers, 2, axis=-1)
        case "interleaved":
            first, second = numbers[..., 0::2], numbers[..., 1::2]
        case _:
            assert_never(pairing)
    return first + 1j * second


def _error(
    x: NDArray[np.complex128],
    y: NDArray[np.complex128],
    turns: NDArray[np.complex128],
    dtype: torch.dtype,
) -> float:
    """The error of ``y`` compared with ``x * turns``, in units of the bound: see precision.md.

    The bound covers float32 arithmetic, cos and sin, and one rounding to ``dtype``.
    """
    import torch

    expected = x * turns
    angles = 2**0.5 * COS_SIN_ERROR_FLOAT32 * (np.abs(x.real) + np.abs(x.imag))
    rounding = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    # both products of each coordinate
    real = np.abs(x.real * turns.real) + np.abs(x.imag * turns.imag)
    imag = np.abs(x.real * turns.imag) + np.abs(x.imag * turns.real)
    largest = 0.0
    for values, exact, products in ((y.real, expected.real, real), (y.imag, expected.imag, imag)):
        wide = 2 * 2.0**-23 * products + angles
        bound = wide + rounding * (np.abs(exact) + wide)
        largest = max(largest, float(np.max(np.abs(values - exact) / bound)))
    return largest
