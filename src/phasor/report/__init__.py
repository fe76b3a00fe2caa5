"""Everything about a model's rope as one HTML page, which asks the network for nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
import vl_convert
from jinja2 import Environment, StrictUndefined

from phasor import charts
from phasor.charts.style import AnyChart, screen_spec, stylesheet
from phasor.describe import pair_rows, ranges, rule_sentences, sentences
from phasor.errors import SpecError
from phasor.extending import ExtensionPlan, plan
from phasor.layers import LayerRopes
from phasor.papers.heads import required_alpha
from phasor.report.snippet import usage
from phasor.rope import Rope

_POINTS = 240  # of a curve over distances
_LONGEST_HEAD = 1 << 20  # a head's weight looks at every distance
_TIMES = 8  # the longest context that a report looks at, of the trained one, unless told


def report(
    ropes: LayerRopes,
    *,
    context: int | None = None,
    to: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> str:
    """The page: words, laws side by side, charts, precision, heads, pairs and code.

    Args:
        ropes: The model.
        context: Tokens of the training; the model's own context unless given.
        to: The longest context to look at; eight times ``context`` unless given.
        progress: Called after each step with how many are done, and of how many.

    Returns:
        HTML with its scripts and styles inside, about a megabyte.

    Raises:
        SpecError: If no layer rotates, no context is known, or ``to`` is not above it.

    >>> from phasor import LayerRopes
    >>> kinds = {"rope": Rope(head_dim=8, pairing="half")}
    >>> toy = LayerRopes(name="toy", layer_kinds=("rope",), kinds=kinds, context=64)
    >>> report(toy).startswith("<!doctype html>")
    True
    """
    if not ropes.ropes:
        raise SpecError(f"no layer of {ropes.name} has a rotary embedding to report on")
    length = ropes.context if context is None else context
    if length is None:
        raise SpecError(
            f"context must be given, since the description of {ropes.name} has none: how many "
            "tokens was it trained on?"
        )
    longest = _TIMES * length if to is None else to
    steps = len(ropes.ropes) + 1
    sections: list[dict[str, Any]] = []
    for rope in ropes.ropes:
        sections.append(_section(ropes, rope, length, longest, len(sections)))
        if progress is not None:
            progress(len(sections), steps)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = environment.from_string(
        resources.files("phasor.report").joinpath("page.html").read_text("utf-8")
    )
    page = template.render(
        ropes=ropes,
        context=length,
        to=longest,
        colours=stylesheet(),
        kinds=[_kind(ropes, kind) for kind in ropes.kinds],
        sections=sections,
        bundle=_bundle(),
    )
    if progress is not None:
        progress(steps, steps)
    return page


@cache
def _bundle() -> str:
    """The program of the charts, which is the same for every page and takes most of a second."""
    program = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    # nothing in a script may end it
    return program.replace("</script", "<\\/script")


def _kind(ropes: LayerRopes, kind: str) -> dict[str, Any]:
    layers = [index for index, named in enumerate(ropes.layer_kinds) if named == kind]
    return {
        "name": kind,
        "layers": ranges(layers),
        "count": len(layers),
        "rotates": ropes.kinds[kind] is not None,
    }


def _section(ropes: LayerRopes, rope: Rope, context: int, to: int, index: int) -> dict[str, Any]:
    """What the template says about the layers that rotate by ``rope``."""
    kinds = [kind for kind, its in ropes.kinds.items() if its == rope]
    planned = plan(ropes, to, kind=kinds, context=context)
    trained = planned.ways["unchanged"].rope
    drawn = _curves(planned)
    alpha: float | None = None
    no_head = ""
    try:
        alpha = required_alpha(trained, min(context, _LONGEST_HEAD), 0.99)
        drawn |= _head_charts(planned, alpha)
    except SpecError as error:  # no pair turns, or all come back within the context
        alpha, no_head = None, str(error)
    return {
        "id": f"rope-{index}",
        "title": ", ".join(kinds),
        "sentences": [*rule_sentences(rope, context), *sentences(trained, context)],
        "planned": planned,
        "configs": {name: json.dumps(way.config, indent=2) for name, way in planned.ways.items()},
        "alpha": alpha,
        "no_head": no_head,
        "charts": {
            name: {"id": f"rope-{index}-{name}", "spec": _responsive(chart)}
            for name, chart in drawn.items()
        },
        "pairs": pair_rows(trained, context),
        "several_axes": rope.axes.n_axes > 1,
        "usage": usage(rope, context),
    }


def _curves(planned: ExtensionPlan) -> dict[str, AnyChart]:
    """The charts that every rope has."""
    context, to = planned.context, planned.to
    laws = {name: way.rope for name, way in planned.ways.items()}
    trained = laws["unchanged"]
    # whole distances, evenly in their logarithm
    distances = np.unique(np.geomspace(1, to - 1, _POINTS).astype(np.int64))
    return {
        "coverage": charts.turns_chart({name: way.coverage for name, way in planned.ways.items()}),
        "scaling": charts.scaling_chart(trained, laws),
        # beside the unchanged rope, the documented one at first, or any
        "cosine": charts.cosine_chart(
            laws, distances, kinds=["aligned"], context=context, menu=list(laws)[1]
        ),
        "decay": charts.decay_chart({"trained": trained}, distances, context=context, log=True),
        "precision": charts.precision_chart(trained, bits=to.bit_length(), context=context),
    }


def _head_charts(planned: ExtensionPlan, alpha: float) -> dict[str, AnyChart]:
    """What a previous-token head needs, and what one of sharpness ``alpha`` keeps."""
    context = planned.context
    contexts = [1 << bit for bit in range(2, min(planned.to, _LONGEST_HEAD).bit_length())]
    laws = {name: way.rope for name, way in planned.ways.items()}
    trained = laws["unchanged"]
    return {
        "needed": charts.required_alpha_chart(trained, contexts, context=context),
        "kept": charts.previous_token_chart(
            laws, contexts, trained=trained, alpha=alpha, context=context
        ),
    }


def _responsive(chart: AnyChart) -> dict[str, Any]:
    """The chart in the page's colours, as wide as its place."""
    fit = {"type": "fit-x", "contains": "padding"}
    return screen_spec(chart, width="container", autosize=fit)


__all__ = ["report"]
