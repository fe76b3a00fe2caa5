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

#: Of the first token's score over others.
_ADVANTAGES = "all pairs", "strongest pair", "its number, quartiles"
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
    """``[layers, heads]``: cosines, and how far the first token is ahead of others by its pairs."""
    pairs = reader.rope.num_pairs
    found: Row = {"itself": [], "before": [], **{of: [] for of in _ADVANTAGES}}
    model_file = sys.modules[type(reader.model).__module__]
    rotate: Callable[..., tuple[Tensor, Tensor]] = getattr(model_file, ROTATE)

    def read(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        rotated = rotate(*args, **options)
        q, k = (x[0].transpose(0, 1).float() for x in rotated)  # [seq, heads, head_dim]
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        found["itself"].append(cosine_similarity(q, k, -1).mean(0).numpy())
        found["before"].append(cosine_similarity(q[1:], k[:-1], -1).mean(0).numpy())
        by_pair = first_over_others(q, k, pairs).numpy()
        for of, value in zip(_ADVANTAGES, _summed(by_pair), strict=True):
            found[of].append(value.tolist())
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


def _summed(by_pair: NDArray[np.float64]) -> tuple[NDArray[Any], ...]:
    """Of ``[heads, pairs]``: the sum, the largest, and its pair."""
    return by_pair.sum(-1), by_pair.max(-1), by_pair.argmax(-1)


def tables(study: Study) -> str:
    """Cosines of the heads that look at one place, and the pairs that look at the first token."""
    texts = [study.measured[f"scores/{name}"] for name in TEXTS]
    # [texts, layers, heads]
    scores = {key: np.array([text[key] for text in texts]) for key in texts[0]}
    alike, deciding = list[list[str]](), list[list[str]]()
    for role, chosen in heads_by_role(study).items():
        if not chosen.any():
            continue
        means = {key: f"{values[:, chosen].mean():.2f}" for key, values in scores.items()}
        whole, strongest, number = _ADVANTAGES
        quartiles = np.quantile(scores[number][:, chosen], (0.25, 0.5, 0.75))
        count, numbers = str(chosen.sum()), ", ".join(f"{quartile:.0f}" for quartile in quartiles)
        alike.append([role, count, means["itself"], means["before"]])
        deciding.append([role, count, means[whole], means[strongest], numbers])
    return "\n\n".join(
        [
            table(["mean cosine of query and key", "heads", "same token", "token before"], alike),
            table(["score of the first token over others", "heads", *_ADVANTAGES], deciding),
        ]
    )
