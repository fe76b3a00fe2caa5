"""How each pair's vector turns from token to token."""

from __future__ import annotations

import math
from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from phasor._checks import whole
from phasor.angles import cos_sin
from phasor.figures._style import HEAT, panels
from phasor.frequencies import wavelengths
from phasor.positions import every_axis, span
from phasor.rope import Rope

_WIDEST = 3  # panels in a row


def rotation_figure(rope: Rope, *, pairs: Sequence[int], tokens: int) -> Figure:
    """Where the vector (1, 0) of a pair points after its rotation, token by token.

    A pair is a plane, and position ``p`` turns its vector by ``p * inv_freq[k]`` (RoFormer
    2104.09864, eq. 13-15): the first pairs go round every few tokens, the last hardly move.

    Args:
        rope: What rotates; with several axes, tokens stand at the same place on every one.
        pairs: Which pairs, a panel for each, three in a row.
        tokens: Positions 0 to ``tokens - 1``, light to dark.

    Returns:
        A figure with one panel for each pair.

    Raises:
        SpecError: If a number is not in its range, or ``rope.scaling`` is a rule that has not
            picked its law.

    >>> figure = rotation_figure(Rope(head_dim=128, pairing="half"), pairs=[0, 16], tokens=16)
    >>> print(figure.axes[1].get_title())
    pair 16
    62.83 tokens per turn
    """
    whole("number of pairs", len(pairs), least=1)
    shown = [whole("each pair", pair, least=0, most=rope.num_pairs - 1) for pair in pairs]
    positions = span(whole("tokens", tokens, least=2))
    n_axes = rope.axes.n_axes
    cos, sin = cos_sin(rope, positions if n_axes == 1 else every_axis(positions, n_axes))
    lengths = wavelengths(rope)

    # from a tone that can be seen on white
    tones = ListedColormap(mpl.colormaps[HEAT](np.linspace(0.25, 1, 256)))
    columns = min(_WIDEST, len(shown))
    rows = math.ceil(len(shown) / columns)
    figure, every = panels(rows, columns, size=(2.3 * columns + 0.9, 2.8 * rows))
    for unused in every[len(shown) :]:
        unused.remove()
    drawn = every[: len(shown)]
    for axes, pair in zip(drawn, shown, strict=True):
        tips = np.stack([cos[:, pair], sin[:, pair]], axis=-1)
        arms = np.stack([np.zeros_like(tips), tips], axis=1)
        axes.add_collection(
            LineCollection(list(arms), array=positions, cmap=tones, linewidths=1.2, zorder=1)
        )
        points = axes.scatter(*tips.T, c=positions, cmap=tones, s=22, edgecolors="0.2", zorder=2)
        points.set_linewidth(0.4)
        axes.set(xlim=(-1.15, 1.15), ylim=(-1.15, 1.15), aspect="equal")
        axes.set(xticks=(-1, 0, 1), yticks=(-1, 0, 1))
        axes.set_xlabel("first coordinate")
        turn = lengths[pair]
        says = f"{turn:.4g} tokens per turn" if np.isfinite(turn) else "does not turn"
        axes.set_title(f"pair {pair}\n{says}", fontsize="medium")
        axes.axhline(0, color="0.9", linewidth=0.6, zorder=0)
        axes.axvline(0, color="0.9", linewidth=0.6, zorder=0)
    for axes in drawn[::columns]:
        axes.set_ylabel("second coordinate")
    mappable = drawn[0].collections[1]
    figure.colorbar(
        mappable, ax=drawn, label="position (tokens)", shrink=0.8, ticks=MaxNLocator(integer=True)
    )
    return figure
