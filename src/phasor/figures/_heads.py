"""What attention heads look at, and which frequencies they use."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray

from phasor._checks import whole
from phasor.errors import TensorError
from phasor.figures._style import HEAT, NOTHING, panels
from phasor.numpy import rotate
from phasor.papers.heads import positional_head
from phasor.positions import every_axis, span
from phasor.rope import Rope

_CALLED = {0: "the token itself", 1: "the previous token"}


def attention_figure(rope: Rope, offsets: Sequence[int], *, alpha: float, tokens: int) -> Figure:
    """Causal attention of heads that look at a position, a map for each offset.

    Softmax of ``alpha C(n - m + offset) / sqrt(head_dim)``, from the weights that
    `phasor.papers.heads.positional_head` makes (Barbero et al. 2410.06205, theorem 5.3, and
    Wendler's previous-token head). The first ``offset`` tokens have no token so far back; they
    look at what scores best in its place, the first token where ``C`` falls that far.

    Args:
        rope: What rotates queries and keys.
        offsets: Tokens back, 0 to ``tokens - 1``: 0 the diagonal, 1 the previous token.
        alpha: Sharpness, as given to `positional_head`.
        tokens: Length of the sequence.

    Returns:
        A figure with one map for each offset; what a token cannot see is grey.

    Raises:
        SpecError: If a number is not in its range, or ``rope.scaling`` is a rule that has not
            picked its law.

    >>> rope = Rope(head_dim=128, pairing="half")
    >>> figure = attention_figure(rope, [0, 1], alpha=12.0, tokens=16)
    >>> print(figure.axes[1].get_title())
    offset 1 (the previous token)
    """
    whole("number of offsets", len(offsets), least=1)
    size = whole("tokens", tokens, least=2)
    backs = [whole("each offset", offset, least=0, most=size - 1) for offset in offsets]
    figure, drawn = panels(1, len(backs), size=(3.3 * len(backs) + 0.9, 3.7))
    tones = mpl.colormaps[HEAT].with_extremes(bad=NOTHING)
    shared: dict[str, Any] = {"cmap": tones, "vmin": 0, "vmax": 1, "interpolation": "nearest"}
    for axes, back in zip(drawn, backs, strict=True):
        axes.imshow(_attention(rope, back, alpha, size), **shared)
        called = _CALLED.get(back, f"{back} tokens back")
        axes.set_title(f"offset {back} ({called})", fontsize="medium")
        axes.set_xlabel("key (token)")
    drawn[0].set_ylabel("query (token)")
    figure.colorbar(drawn[0].images[0], ax=drawn, label="attention weight", shrink=0.8)
    return figure


def _attention(rope: Rope, offset: int, alpha: float, tokens: int) -> NDArray[np.float64]:
    """Weights ``[query, key]`` of the head, not a number where the key is later."""
    head = positional_head(rope, offset, alpha=alpha, width=1)
    n_axes = rope.axes.n_axes
    positions = span(tokens) if n_axes == 1 else every_axis(span(tokens), n_axes)
    query, key = (
        rotate(np.tile(weight[:, 0], (tokens, 1, 1)), positions, rope)[:, 0] for weight in head
    )
    later = np.triu(np.ones((tokens, tokens), dtype=bool), 1)
    logits = np.where(later, -np.inf, query @ key.T / math.sqrt(rope.head_dim))
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.where(later, np.nan, weights / weights.sum(-1, keepdims=True))


def usage_figure(norms: Mapping[str, ArrayLike]) -> Figure:
    """Frequency usage: how long the pairs of every head are, a row for each head.

    Barbero et al. (2410.06205, figure 3) draw the means over the heads of a layer; here every
    head has its row, so that one that uses other frequencies than its neighbours shows.

    Args:
        norms: For each layer, by its name, ``[heads, num_pairs]`` as `phasor.papers.pair_norms`
            returns and ``phasor.torch.papers.usage`` collects. Layers need as many pairs, not as
            many heads.

    Returns:
        A figure with one heat map, layers from the top down, lines between them.

    Raises:
        TensorError: If there is no layer, or one is not of that form.

    >>> figure = usage_figure({"layer 0": np.ones((6, 64)), "layer 1": np.ones((6, 64))})
    >>> figure.axes[0].images[0].get_array().shape
    (12, 64)
    """
    layers = {name: np.asarray(array, np.float64) for name, array in norms.items()}
    if not layers:
        raise TensorError("norms must hold a layer at least, got none")
    width = next(iter(layers.values())).shape[-1:]
    for name, array in layers.items():
        if array.ndim != 2 or array.shape[-1:] != width or 0 in array.shape:
            raise TensorError(
                f"norms must be [heads, num_pairs], of as many pairs in every layer, "
                f"got {list(array.shape)} in {name!r}; draw layers of other widths by themselves"
            )
    rows = np.concatenate(list(layers.values()))
    ends = np.cumsum([len(array) for array in layers.values()])
    starts = np.concatenate(([0], ends[:-1]))

    figure, (axes,) = panels(size=(7, min(9.0, 1.4 + 0.16 * len(rows))))
    image = axes.imshow(rows, cmap=HEAT, vmin=0, aspect="auto", interpolation="nearest")
    for end in ends[:-1]:
        axes.axhline(end - 0.5, color="0.2", linewidth=1)
    axes.set_yticks((starts + ends - 1) / 2, list(layers))
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("pair (index)")
    axes.set_ylabel("layer, a row for each head")
    figure.colorbar(image, label="mean length of the pair")
    return figure
