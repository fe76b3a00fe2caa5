"""How far apart two float32 computations of one thing may be, on whichever processor.

A sum of n products in float32 is, in whatever order and width of register a processor adds them up,
the exact sum of products that are each off by about ``sqrt(n)`` roundings (Higham & Mary 2019, "A
new approach to probabilistic rounding error analysis", theorem 3.1; in the worst case by n of them:
Higham 2002, section 3.1). So what roundings may do to a model is measured by doing as much to its
weights: each is moved by that many roundings, up or down by chance. The model itself says how much
of that reaches its answer, so that a sharp attention or a deep model gets the room that it needs.

The longest sums in the models of these tests have 1,024 terms. Beside 32 roundings in every weight
what else is rounded counts little: a dozen element by element between two products, and the angles
of a model that computes them in float32, which at position p are off by ``p * inv_freq`` roundings.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .torch.live.live_models import Answer, difference, prefill

#: The rounding of float32, and how many of them a sum of 1,024 terms gathers.
UNIT = 2.0**-24
GATHERED = 1024**0.5


def rounding(model: nn.Module, way: Callable[[Any], Answer]) -> float:
    """The room for `difference` between ``way(model)`` and the same by other float32 operations.

    Args:
        model: In float32; it and what it holds stay as they are.
        way: Calls the model; its answer is compared.
    """
    return difference(way(copy.deepcopy(model)), way(moved(model)))


@contextmanager
@torch.no_grad()
def says_the_same(model: nn.Module, way: Callable[[Any], Answer] = prefill) -> Generator[None]:
    """What is done to the model inside changes its answer by roundings alone."""
    before, room = way(model), rounding(model, way)
    yield
    assert difference(before, way(model)) <= room


@torch.no_grad()
def moved(model: nn.Module) -> nn.Module:
    """A copy with every weight moved by what a sum gathers."""
    twin = copy.deepcopy(model)
    chance = torch.Generator().manual_seed(0)
    for weight in twin.parameters():
        sign = torch.randint(0, 2, weight.shape, generator=chance) * 2 - 1
        weight *= 1 + GATHERED * UNIT * sign
    return twin
