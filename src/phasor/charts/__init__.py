"""Charts of the arrays that phasor returns, and a report about a model.

Each function returns an Altair chart: ``chart.save("decay.pdf")`` writes it for a paper, as
``.svg`` or ``.png`` (with ``ppi=300``) too, and a notebook shows it. A chart with a slider or a
menu is saved in its initial state. Click a name in a legend to fade the other curves. Curves differ
in dashes as well as colour, and heat maps darken steadily, so every chart is readable in grey.
Needs ``altair`` and ``vl-convert-python``, the extra ``charts``.
"""

from phasor.charts.attention import attention_chart, linear_chart, usage_chart
from phasor.charts.coverage import coverage_chart, turns_chart
from phasor.charts.curves import (
    cosine_chart,
    decay_chart,
    pairs_chart,
    precision_chart,
    rotation_chart,
    scaling_chart,
)
from phasor.charts.page import report

__all__ = [
    "attention_chart",
    "cosine_chart",
    "coverage_chart",
    "decay_chart",
    "linear_chart",
    "pairs_chart",
    "precision_chart",
    "report",
    "rotation_chart",
    "scaling_chart",
    "turns_chart",
    "usage_chart",
]
