"""How scores change with distance."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from phasor.figures._style import label, legend, panels, styled
from phasor.papers import KINDS, Kind, cosine, decay
from phasor.rope import Rope

_WHAT: dict[Kind, str] = {
    "aligned": "aligned: q = k = (1, 1, …)",
    "opposite": "opposite: q = (1, 1, …) = −k",
    "random": "random: q = k, one Gaussian draw",
    "independent": "independent: q and k, one Gaussian draw each",
}


def decay_figure(
    ropes: Mapping[str, Rope], distances: ArrayLike, *, window: tuple[float, float] | None = None
) -> Figure:
    """RoFormer's decay curve, whole, and once more cut as figures of it are printed.

    The mean length of the partial sums of ``exp(i r inv_freq[k])``, `phasor.papers.decay` (Su
    et al. 2104.09864, section 3.4.3). Their figure 2 is width 128, base 10000, distances 0 to
    256, and shows 6 to 22 of a curve that begins at 32.5.

    Args:
        ropes: Up to seven Ropes of one axis, by the name their curve gets.
        distances: Integers or floats ``[...]``, ascending.
        window: The lowest and highest value that a second panel shows; no such panel without it.

    Returns:
        A figure with one curve for each Rope in each panel.

    Raises:
        PositionError: If the distances are not numbers.
        SpecError: If there are more Ropes than styles of lines, or one's scaling is a rule that
            has not picked its law.

    >>> ropes = {"base 10 000": Rope(head_dim=128, pairing="half")}
    >>> figure = decay_figure(ropes, range(257), window=(6, 22))
    >>> print(figure.axes[1].get_title())
    cut to 6 … 22
    """
    curves = [(decay(ropes[name], distances), look) for name, look in styled(ropes)]
    count = 1 if window is None else 2
    figure, drawn = panels(1, count, size=(4.8 * count, 3.8))
    for axes in drawn:
        label(axes, "distance (tokens)", "mean length of partial sums")
        for curve, look in curves:
            axes.plot(distances, curve, **look)
    drawn[0].set_ylim(bottom=0)
    if window is not None:
        drawn[0].set_title("whole", fontsize="medium")
        low, high = window
        drawn[1].set_title(f"cut to {low:g} … {high:g}", fontsize="medium")
        drawn[1].set_ylim(low, high)
    legend(figure, drawn[0])
    return figure


def cosine_figure(ropes: Mapping[str, Rope], distances: ArrayLike, *, seed: int) -> Figure:
    """Cosine of a rotated query and a rotated key against distance, a panel for each kind.

    `phasor.papers.cosine`: aligned vectors lose their likeness, opposite ones gain, and
    independent ones stay within a few ``head_dim ** -0.5`` of 0 at every distance, which is the
    grey band (Barbero et al. 2410.06205, proposition 3.2 and figure 2).

    Args:
        ropes: Up to seven Ropes of one axis, by the name their curve gets; of one ``head_dim``
            they see the same vectors.
        distances: Integers or floats ``[...]`` above 0, ascending.
        seed: What the Gaussian vectors are drawn from.

    Returns:
        A figure of four panels, with one curve for each Rope in each.

    Raises:
        PositionError: If the distances are not numbers.
        SpecError: If there are more Ropes than styles of lines, or one's scaling is a rule that
            has not picked its law.

    >>> figure = cosine_figure({"base 10 000": Rope(head_dim=128, pairing="half")}, [1, 10], seed=0)
    >>> figure.axes[0].get_title()
    'aligned: q = k = (1, 1, …)'
    """
    looks = list(styled(ropes))
    figure, drawn = panels(2, 2, size=(9, 6.4), sharex=True, sharey=True)
    for axes, kind in zip(drawn, KINDS, strict=True):
        label(axes, "", "")
        axes.set_title(_WHAT[kind], fontsize="medium")
        from_seed = seed if kind in ("random", "independent") else None
        for name, look in looks:
            axes.semilogx(distances, cosine(ropes[name], distances, kind, seed=from_seed), **look)
        axes.axhline(0, color="0.4", linewidth=0.8)
    spread = min(rope.head_dim for rope in ropes.values()) ** -0.5
    band = "one deviation of independent vectors"
    drawn[-1].axhspan(-spread, spread, color="0.88", zorder=0, label=band)
    for axes in drawn[2:]:
        axes.set_xlabel("distance (tokens)")
    for axes in drawn[::2]:
        axes.set_ylabel("cosine")
    legend(figure, drawn[-1], columns=2)
    return figure
