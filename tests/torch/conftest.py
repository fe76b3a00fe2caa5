"""Fixtures that several files of torch's tests ask for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from phasor.torch import attention

from .torch_oracle import implementations, run_on


@pytest.fixture(params=[3, 512], ids=["masks of 3 queries", "masks of 512"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many queries share a mask: few enough to need several, and as it is."""
    monkeypatch.setattr(attention, "CHUNK", request.param)
    return request.param


@pytest.fixture
def forget_graphs() -> Iterator[None]:
    """Compile from nothing."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=implementations())
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every implementation that this machine has."""
    run_on(request.param, monkeypatch)
