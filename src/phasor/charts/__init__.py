"""Charts of the arrays that phasor returns, and a report about a model.

One function each, all returning an Altair chart: ``chart.save("decay.pdf")`` writes it for a paper,
``.svg`` and ``.png`` (with ``ppi=300``) as well, and a notebook shows it. A chart that has a slider
or a menu is saved as it stands at first. Legends can be clicked: one curve stays, the others fade.

Curves differ in dashes as well as in colour, and heat maps grow steadily stronger, so that every
chart reads in grey. Needs ``altair`` and ``vl-convert-python``, the extra ``charts``.
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
