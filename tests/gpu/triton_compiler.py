"""Triton's compiler, which needs no GPU to write for an H100, and launches that it is asked in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from phasor import Rope
from phasor.axes import Sectioned
from phasor.torch._operator import triton as triton_backend
from phasor.torch._operator.arguments import Layout, Turn
from phasor.torch._operator.triton import load_kernels

from .triton_runs import APART, forget_plans, needs_triton

compiles = [needs_triton, pytest.mark.skipif(APART, reason="it compiles by itself")]

HALF = Rope(head_dim=128, pairing="half")
JOINED = Rope(head_dim=128, pairing="interleaved")
DEEPSEEK = Rope(
    head_dim=192, rotary_dim=64, rotary_start=128, pairing="interleaved", pairing_out="half"
)
PARTIAL = Rope(head_dim=128, rotary_dim=64, pairing="half")
THREE = Rope(head_dim=128, pairing="half", axes=Sectioned((16, 24, 24)))
PREFILL, DECODE = (1, 4096), (64, 1)


class Hopper:
    """What Triton asks of a driver; launches are written down."""

    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 227 * 1024},
        load_binary=lambda *binary: (1, 2, 64, 0, 1024),
    )

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []

    def launcher_cls(self, *made: Any) -> Callable[..., None]:
        return lambda *given: self.launched.append(given)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


class Compiler:
    """Stands where the kernel is launched: compiles it and keeps it, and launches nothing."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.made: list[Any] = []

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def compile_only(*given: Any, **constants: Any) -> None:
            self.made.append(self.kernel.run(*given, grid=grid, warmup=True, **constants))

        return compile_only

    def variants(self) -> int:
        """How many different kernels there are."""
        return len({id(kernel) for kernel in self.made})

    def assembly(self) -> str:
        """Of the last kernel."""
        return self.made[-1].asm["ptx"]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hopper:
    """A device to compile for, for which nothing has been compiled yet."""
    import triton.runtime

    driver = Hopper()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    for kernel in (load_kernels().rotation, load_kernels().cos_sin_rows):
        monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
    forget_plans(monkeypatch)
    return driver


@pytest.fixture
def compiler(hopper: Hopper, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """The rotation, compiled and not launched."""
    made = Compiler(load_kernels().rotation)
    monkeypatch.setattr(load_kernels(), "rotation", made)
    return made


@pytest.fixture
def compiler_of_rows(hopper: Hopper, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """The same of the kernel that makes cos and sin."""
    made = Compiler(load_kernels().cos_sin_rows)
    monkeypatch.setattr(load_kernels(), "cos_sin_rows", made)
    return made


def launch(
    rope: Rope = HALF,
    tokens: tuple[int, ...] = PREFILL,
    heads: tuple[int, ...] = (8, 2),
    dtype: torch.dtype = torch.bfloat16,
    *,
    rows: Callable[[Tensor], Tensor] | None = None,
    laid: Callable[[Tensor], Tensor] | None = None,
    in_place: bool = False,
    transposed: bool = False,
) -> None:
    """The launch for a query, and a key, of those heads, by cos and sin laid out by ``rows``."""
    xs = [torch.empty(*tokens, n, rope.head_dim, dtype=dtype) for n in heads]
    xs = xs if laid is None else [laid(x) for x in xs]
    outs = xs if in_place else [torch.empty_like(x) for x in xs]
    row = torch.zeros(tokens[-1], rope.num_pairs)
    row = row if rows is None else rows(row)
    layout = Layout(rope.pairing, rope.output_pairing, rope.rotary_start)
    triton_backend.run_into(Turn(xs, row, row, *layout, transposed), outs)


def make_rows(
    rope: Rope = HALF,
    places: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    gain: float = 1.0,
) -> None:
    """The launch that makes cos and sin."""
    places = torch.zeros(64, dtype=torch.int64) if places is None else places
    triton_backend.cos_sin(places, rope.to_json(), gain, dtype)


def as_it_is(x: Tensor) -> Tensor:
    """In one piece."""
    return x


def heads_first(x: Tensor) -> Tensor:
    """The same shape, of memory ``[batch, heads, seq, head_dim]``."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def inside(x: Tensor) -> Tensor:
    """The same shape, as heads of a wider projection."""
    return torch.cat((x, x, x), -2)[..., x.shape[-2] :, :][..., : x.shape[-2], :]


def misaligned(x: Tensor) -> Tensor:
    """The same shape, one element off."""
    return x.new_zeros(x.numel() + 1)[1:].view(x.shape)
