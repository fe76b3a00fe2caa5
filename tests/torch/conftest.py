"""Fixtures that several files of torch's tests ask for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from phasor.torch import attention
from phasor.torch._operator import cpu

from .torch_arrays import implementations, run_on


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


@pytest.fixture
def one_graph(forget_graphs: None) -> Iterator[None]:
    """The same, and a second graph for one function is an error."""
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


@pytest.fixture(params=cpu.paths())
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every instruction set that this machine has, one after the other."""
    run_on(request.param, monkeypatch)
    return request.param


@pytest.fixture(params=implementations())
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every implementation that this machine has."""
    run_on(request.param, monkeypatch)
