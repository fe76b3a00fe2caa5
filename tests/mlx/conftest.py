"""Kernels that MLX fuses are compiled by the machine's own compiler, a second each."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest


@pytest.fixture(autouse=True)
def fused(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests marked ``compile`` run what is compiled, all others the same operations one by one."""
    if not request.node.get_closest_marker("compile"):
        mx.disable_compile()
    yield
    mx.enable_compile()
