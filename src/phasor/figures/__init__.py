"""Pictures of what `phasor.papers`, `phasor.frequencies` and `phasor.papers.heads` return.

One function each, all returning a `matplotlib.figure.Figure`: ``figure.savefig("decay.svg")``
writes it. Nothing here touches pyplot or its global state.

Colours are Okabe and Ito's, which colour-blind readers can tell apart; line styles differ as
well, and heat maps darken steadily, so that every picture reads in grey.
"""

from phasor.figures._coverage import coverage_figure
from phasor.figures._decay import cosine_figure, decay_figure
from phasor.figures._heads import attention_figure, usage_figure
from phasor.figures._linear import linear_figure
from phasor.figures._precision import precision_figure
from phasor.figures._rotation import rotation_figure
from phasor.figures._spectrum import scaling_figure, wavelength_figure

__all__ = [
    "attention_figure",
    "cosine_figure",
    "coverage_figure",
    "decay_figure",
    "linear_figure",
    "precision_figure",
    "rotation_figure",
    "scaling_figure",
    "usage_figure",
    "wavelength_figure",
]
