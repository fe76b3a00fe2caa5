"""Loss against position: what a model needs for each byte, and how sure a mean of it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn


@torch.no_grad()
def bits(model: nn.Module, rows: Tensor) -> Tensor:
    """Bits for every byte but the first: ``-log2 p(rows[p + 1] | rows[0..p])``.

    Args:
        model: Bytes ``[batch, seq]`` to logits ``[batch, seq, 256]``.
        rows: ``[batch, seq + 1]``.

    Returns:
        ``[batch, seq]``, float64.
    """
    logits = model(rows[:, :-1]).double()
    nats = nnf.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none")
    return nats / math.log(2)


def bits_by_position(pool: Executor, model: nn.Module, windows: Tensor, scored: int) -> Tensor:
    """`bits` of all windows, ``scored`` of them at a time."""
    return torch.cat(list(pool.map(partial(bits, model), windows.split(scored))))


def bits_under_a_rule(
    pool: Executor,
    model_at: Callable[[int], nn.Module],
    windows: Tensor,
    scored: int,
    *,
    context: int,
    steps: int,
) -> Tensor:
    """`bits_by_position` where the length of what was read picks the law.

    The text is read anew in lengths that grow by ``context / steps``, as a program does that turns
    all its keys again whenever the law changes; of each length the new positions count.
    """
    target = windows.shape[1] - 1
    lengths = [0, *range(context, target + 1, context // steps)]
    parts = [
        bits_by_position(pool, model_at(last), windows[:, : last + 1], scored)[:, first:]
        for first, last in pairwise(lengths)
    ]
    return torch.cat(parts, dim=1)


def binned(values: Tensor, size: int) -> Tensor:
    """``[windows, seq]`` to ``[windows, seq / size]``: means of ``size`` positions in a row."""
    return values.unflatten(1, (-1, size)).mean(-1)


def mean_and_error(values: Tensor) -> tuple[Tensor, Tensor]:
    """Over windows ``[windows, ...]``: the mean, and its standard error ``s / sqrt(windows)``."""
    return values.mean(0), values.std(0) / math.sqrt(values.shape[0])


def verdict(difference: float, error: float) -> str:
    """Whether a loss that should be lower is so by more than two standard errors."""
    if difference < -2 * error:
        return "holds"
    return "reversed" if difference > 2 * error else "within the error"
