"""Which pairs came round in training, and which phases an extension shows anew."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from phasor.errors import SpecError
from phasor.figures._style import HEAT, gaps, label, legend, panels, styled
from phasor.papers import Coverage

_TRAINED = "in training"


def coverage_figure(ways: Mapping[str, Coverage]) -> Figure:
    """Turns of every pair in training and after, and the share of its phases that are new.

    Above, a pair below one turn never came round in training (grey): beyond the critical
    dimension of Liu et al. (2310.05209). Below, one row for each extension, dark where the longer
    context shows angles that training never did.

    Args:
        ways: Up to six extensions of one training, by name: what `phasor.papers.coverage`
            returned, such as ``{way.name: way.coverage for way in extensions(rope, 4096, 32768)}``.

    Returns:
        A figure of two panels over the pairs.

    Raises:
        SpecError: If there is none or more than six, or they differ in their training or in the
            length that they reach.

    >>> from phasor import Rope
    >>> from phasor.extending import extensions
    >>> ways = extensions(Rope(head_dim=128, pairing="half"), 4096, 32_768)
    >>> figure = coverage_figure({way.name: way.coverage for way in ways})
    >>> figure.axes[1].images[0].get_array().shape
    (6, 64)
    """
    looks = dict(styled([_TRAINED, *ways]))
    if not ways:
        raise SpecError("ways must hold a coverage at least, got none")
    first = next(iter(ways.values()))
    for name, one in ways.items():
        same = (one.context, one.to) == (first.context, first.to)
        if not same or not np.array_equal(one.trained_turns, first.trained_turns):
            raise SpecError(
                f"ways must extend one training to one length ({first.context} to {first.to} "
                f"tokens), got {one.context} to {one.to} in {name!r} or other frequencies; draw "
                "them by themselves"
            )

    figure, (above, below) = panels(2, 1, size=(7.5, 6.4), sharex=True, height_ratios=(3, 2))
    label(above, "", f"turns (training {first.context},\nextended {first.to} tokens)")
    above.semilogy(gaps(first.trained_turns), **looks[_TRAINED])
    for name, one in ways.items():
        above.semilogy(gaps(one.extended_turns), **looks[name])
    above.axhline(1, color="0.4", linewidth=0.8)
    never = np.flatnonzero(first.never_turned)
    above.broken_barh(
        [(pair - 0.5, 1) for pair in never],
        (0, 1),
        transform=above.get_xaxis_transform(),
        color="0.9",
        linewidth=0,
        zorder=0,
        label="no whole turn in training",
    )
    legend(figure, above)

    image = below.imshow(
        np.stack([one.new_share for one in ways.values()]),
        cmap=HEAT,
        vmin=0,
        vmax=1,
        aspect="auto",
        interpolation="nearest",
    )
    below.set_yticks(range(len(ways)), list(ways))
    below.set_xlabel("pair (index)")
    below.set_ylabel("extension")
    figure.colorbar(image, ax=below, label="share of distances\nwith a new phase")
    return figure
