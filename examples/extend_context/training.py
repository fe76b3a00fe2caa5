"""Optimizer steps that give the same weights wherever they were interrupted."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Executor

import torch
import torch.nn.functional as nnf
from corpus import Corpus
from run import Run
from settings import WORKERS, Settings, Training
from torch import Tensor, nn

_LAST = 50  # steps whose mean loss is told


def rate(plan: Training, step: int) -> float:
    """Of learning at a step, from 0: a straight line up, then half a cosine down to a tenth."""
    if step < plan.warmup:
        return plan.rate * (step + 1) / plan.warmup
    done = (step - plan.warmup) / (plan.steps - plan.warmup)
    return plan.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def gradient(pool: Executor, model: nn.Module, batch: Tensor) -> tuple[float, list[Tensor]]:
    """Mean loss in bits per byte, and its gradient in nats, a part of the batch each worker."""
    weights = list(model.parameters())

    def of_part(part: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        loss = nnf.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten())
        return loss.detach(), torch.autograd.grad(loss, weights)

    parts = list(pool.map(of_part, batch.split(batch.shape[0] // WORKERS)))
    loss = sum(float(part[0]) for part in parts) / len(parts) / math.log(2)
    together = zip(*(part[1] for part in parts), strict=True)
    return loss, [torch.stack(same).mean(0) for same in together]


def train(
    name: str,
    model: nn.Module,
    plan: Training,
    *,
    run: Run,
    text: Corpus,
    seed: int,
    settings: Settings,
    pool: Executor,
    tell: Callable[[int, float], None],
) -> None:
    """Train ``model`` in place, from where ``run`` left off if it was at this training.

    Args:
        name: Of this training.
        model: With the weights that it starts from.
        plan: Length, steps and rate.
        run: Where the state is kept on the way.
        text: What it reads.
        seed: Of the batches; all trainings of one length read the same.
        settings: Says how often the state is kept.
        pool: Of `WORKERS` workers.
        tell: Called with the number of steps done and their loss.
    """
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights, lr=plan.rate, betas=(0.9, 0.95), weight_decay=0.1)
    begin = run.done(name)
    losses: list[float] = []
    if begin and run.under_way:
        losses = run.under_way["losses"]
        model.load_state_dict(run.under_way["model"])
        optimizer.load_state_dict(run.under_way["optimizer"])
    for step in range(begin, plan.steps):
        batch = text.batch(seed, plan.length, step, plan.batch, plan.length)
        loss, slopes = gradient(pool, model, batch)
        for weight, slope in zip(weights, slopes, strict=True):
            weight.grad = slope
        nn.utils.clip_grad_norm_(weights, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate(plan, step)
        optimizer.step()
        losses = [*losses, loss][-_LAST:]
        tell(step + 1, loss)
        if (step + 1) % settings.save_every == 0:
            run.under_way = {
                "name": name,
                "step": step + 1,
                "losses": losses,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
            }
            run.save()
    run.under_way = None
    run.final[name] = sum(losses) / len(losses)
