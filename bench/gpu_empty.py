"""A kernel that does nothing on the grid of phasor's: what a launch costs by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from unittest.mock import patch

import triton
from gpu_measure import EMPTY
from torch import Tensor

from phasor.bench import Call, Case
from phasor.torch import rotate_qk_
from phasor.torch.backends.triton import kernels as triton_kernels


@triton.jit
def _nothing(x):
    pass


class _Recorder:
    """Stands for a kernel, and keeps the grid it would be launched on."""

    grid: tuple[int, ...] = ()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.grid = grid
        return lambda *_, **__: None


def empty_kernel(case: Case, positions: Tensor) -> Mapping[str, Call]:
    """The launch of `_nothing` for a step of decoding; nothing for longer cases."""
    if case.seq > 1:
        return {}
    q, k = case.tensors(device=positions.device)
    recorder = _Recorder()
    with patch.object(triton_kernels, "rotation", recorder):
        # with a gain that nobody else has, so that it is not taken from what was compiled before
        rotate_qk_(q, k, positions, case.rope("half"), gain=1.5, backend="triton")
    launch = _nothing[recorder.grid]
    return {EMPTY: lambda: launch(q)}
