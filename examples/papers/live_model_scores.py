"""The trained model's scores: how alike query and key are, and which pairs look at the start."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cosine_similarity

from .live_model_heads import heads_by_role
from .live_model_reading import TEXTS, Reader
from .pictures import table
from .study import Row, Study

#: The function of every model of transformers that rotates a query and a key.
ROTATE = "apply_rotary_pos_emb"


def run(study: Study, reader: Reader) -> None:
    """The scores of every head, text by text."""
    length = study.settings["windows"][-1]
    for number, name in enumerate(TEXTS):
        tokens = reader.window(number, length)
        study.measure(f"scores/{name}", lambda t=tokens: _scores(reader, t))


@torch.no_grad()
def _scores(reader: Reader, tokens: Tensor) -> Row:
    """Cosines ``[layers, heads]``; by pair, how far the first token is ahead of others."""
    pairs = reader.rope.num_pairs
    found: Row = {"itself": [], "before": [], "first": []}
    model_file = sys.modules[type(reader.model).__module__]
    rotate: Callable[..., tuple[Tensor, Tensor]] = getattr(model_file, ROTATE)

    def read(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        rotated = rotate(*args, **options)
        q, k = (x[0].transpose(0, 1).float() for x in rotated)  # [seq, heads, head_dim]
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        found["itself"].append(cosine_similarity(q, k, -1).mean(0).numpy())
        found["before"].append(cosine_similarity(q[1:], k[:-1], -1).mean(0).numpy())
        found["first"].append(first_over_others(q, k, pairs).numpy())
        return rotated

    with patch.object(model_file, ROTATE, read):
        reader.model.get_decoder()(tokens[None])
    return found


def first_over_others(q: Tensor, k: Tensor, pairs: int) -> Tensor:
    """By how much each half pair scores the first token above the other keys, ``[heads, pairs]``.

    ``q`` and ``k`` are rotated, ``[seq, heads, head_dim]``. A pair's share of the score with the
    first key, less its mean share over the later keys that the query sees; the mean over queries.
    """
    seen = torch.arange(1, len(k))[:, None, None]
    others = k[1:].cumsum(0) / seen
    products = q[1:] * (k[:1] - others) / math.sqrt(q.shape[-1])
    # [seq - 1, heads, 2 * pairs] -> [heads, pairs]
    return products[..., : 2 * pairs].unflatten(-1, (2, pairs)).sum(-2).mean(0)


def tables(study: Study) -> str:
    """Cosines of the heads that look at one place, and the pairs that look at the first token."""
    scores = [study.measured[f"scores/{name}"] for name in TEXTS]
    itself, before, first = (
        np.array([text[key] for text in scores]).mean(0) for key in ("itself", "before", "first")
    )
    alike, deciding = list[list[str]](), list[list[str]]()
    for role, chosen in heads_by_role(study).items():
        if not chosen.any():
            continue
        count = str(chosen.sum())
        alike.append([role, count, *(f"{x[chosen].mean():.2f}" for x in (itself, before))])
        deciding.append([role, count, *_strongest_pair(first[chosen])])
    return "\n\n".join(
        [
            table(["mean cosine of query and key", "heads", "same token", "token before"], alike),
            table(
                ["score of the first token over others", "heads", *_STRONGEST],
                deciding,
            ),
        ]
    )


_STRONGEST = ("all pairs", "strongest pair", "its number, quartiles")


def _strongest_pair(first: NDArray[np.float64]) -> list[str]:
    """Means over heads ``[heads, pairs]``, and which pair adds most."""
    numbers = np.quantile(first.argmax(-1), (0.25, 0.5, 0.75))
    return [
        f"{first.sum(-1).mean():.2f}",
        f"{first.max(-1).mean():.2f}",
        ", ".join(f"{number:.0f}" for number in numbers),
    ]
