"""Everything about a model's rope as one HTML page, which loads nothing from the network."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from typing import Any, cast

import numpy as np
import vl_convert
from jinja2 import Environment, StrictUndefined

from phasor._checks import short_repr
from phasor.charts.coverage import turns_chart
from phasor.charts.curves import cosine_chart, decay_chart, precision_chart, scaling_chart
from phasor.charts.style import AnyChart, screen_spec, stylesheet
from phasor.describe import pair_rows, ranges, rule_sentences, sentences, usage_example
from phasor.errors import SpecError, visible
from phasor.extending import ExtensionPlan, plan_extension
from phasor.extending.planning import longest_plan
from phasor.layers import LayerRopes
from phasor.papers.heads import attention_weight, required_alpha
from phasor.rope import Rope

_CURVE_POINTS = 240  # number of distances on a curve
_LONGEST_HEAD_CONTEXT = (
    1 << 20
)  # limit on the context of a head, whose weight is a sum over all distances
_DEFAULT_EXTENSION = 8  # default longest context of a report, divided by the trained context
_FIT = {"type": "fit-x", "contains": "padding"}


def report(
    ropes: LayerRopes,
    *,
    context: int | None = None,
    to: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> str:
    """The page: a description, a comparison of laws, charts, precision, heads, pairs and code.

    Args:
        ropes: The model.
        context: Tokens in training; the model's own context by default.
        to: The longest context to report on; by default eight times ``context``, or the longest for
            which laws are compared.
        progress: Called after each step with the number of finished steps and of all steps.

    Returns:
        HTML with its scripts and styles inside, about a megabyte.

    >>> from phasor import LayerRopes
    >>> kinds = {"rope": Rope(head_dim=8, pairing="half")}
    >>> toy = LayerRopes(name="toy", layer_kinds=("rope",), kinds=kinds, context=64)
    >>> report(toy).startswith("<!doctype html>")
    True
    """
    if not isinstance(cast(object, ropes), LayerRopes):
        raise SpecError(
            f"ropes must be a model from phasor.load or phasor.preset, got {short_repr(ropes)}"
        )
    if not ropes.ropes:
        raise SpecError(f"no layer of {ropes.name} has a rotary embedding to report on")
    context = ropes.context if context is None else context
    if context is None:
        raise SpecError(
            f"context must be given, because the description of {ropes.name} has none: how many "
            "tokens was it trained on?"
        )
    if to is None:
        longest = min(map(longest_plan, ropes.ropes))
        to = max(context, min(_DEFAULT_EXTENSION * context, longest))
    steps = len(ropes.ropes) + 1
    sections: list[dict[str, Any]] = []
    for rope in ropes.ropes:
        sections.append(_describe_section(ropes, rope, context, to, len(sections)))
        if progress is not None:
            progress(len(sections), steps)
    layers = {
        kind: [layer for layer, name in enumerate(ropes.layer_kinds) if name == kind]
        for kind in ropes.kinds
    }
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    source = resources.files("phasor.charts").joinpath("page.html").read_text("utf-8")
    page = environment.from_string(source).render(
        model=visible(ropes.name),
        ropes=ropes,
        context=context,
        to=to,
        colours=stylesheet(),
        layers=layers,
        ranges=ranges,
        sections=sections,
        bundle=_load_chart_program(),
    )
    if progress is not None:
        progress(steps, steps)
    return page


@cache
def _load_chart_program() -> str:
    """The script that draws charts, the same for every page; bundling it takes almost a second."""
    program = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    # this text would end the script
    return program.replace("</script", "<\\/script")


def _describe_section(
    ropes: LayerRopes, rope: Rope, context: int, to: int, index: int
) -> dict[str, Any]:
    """Values for the template about the layers that rotate by ``rope``."""
    kinds = [kind for kind, kind_rope in ropes.kinds.items() if kind_rope == rope]
    planned = plan_extension(ropes, to, kind=kinds, context=context)
    laws = {name: way.rope for name, way in planned.options.items()}
    trained = laws["unchanged"]
    head: dict[str, Any]
    try:
        alpha = required_alpha(trained, min(context, _LONGEST_HEAD_CONTEXT), 0.99)
        head = {"alpha": alpha, "kept": _weights_kept(laws, alpha, planned.to)}
    except SpecError as error:  # no pair turns, or all pairs return within the context
        head = {"alpha": None, "kept": {}, "no_head": str(error)}
    return {
        "id": f"rope-{index}",
        "title": ", ".join(kinds),
        "sentences": [*rule_sentences(rope, context), *sentences(trained, context)],
        "planned": planned,
        "configs": {
            name: json.dumps(option.config, indent=2) for name, option in planned.options.items()
        },
        **head,
        "charts": {
            # in the colours of the page, as wide as its column
            name: {
                "id": f"rope-{index}-{name}",
                "spec": screen_spec(chart, width="container", autosize=_FIT),
            }
            for name, chart in _draw_charts(planned, laws).items()
        },
        "pairs": pair_rows(trained, context),
        "several_axes": rope.axes.n_axes > 1,
        "usage": usage_example(rope, context),
    }


def _draw_charts(planned: ExtensionPlan, laws: Mapping[str, Rope]) -> dict[str, AnyChart]:
    """The charts for every rope."""
    context, to, trained = planned.context, planned.to, laws["unchanged"]
    # integer distances with evenly spaced logarithms
    distances = np.unique(np.geomspace(1, to - 1, _CURVE_POINTS).astype(np.int64))
    return {
        "coverage": turns_chart({name: way.coverage for name, way in planned.options.items()}),
        "scaling": scaling_chart(trained, laws),
        # the menu starts with the documented law if there is one, otherwise with the first new law
        "cosine": cosine_chart(
            laws, distances, kinds=["aligned"], context=context, menu=list(laws)[1]
        ),
        "decay": decay_chart({"trained": trained}, distances, context=context, log=True),
        "precision": precision_chart(trained, bits=to.bit_length(), context=context),
    }


def _weights_kept(laws: Mapping[str, Rope], alpha: float, to: int) -> dict[str, float]:
    """By law, the weight that a previous-token head of this sharpness keeps over ``to`` tokens.

    A law's factor on the logits (YaRN's temperature) sharpens the head too.
    """
    tokens, sharpness = min(to, _LONGEST_HEAD_CONTEXT), alpha / laws["unchanged"].logit_factor
    return {
        name: attention_weight(law, sharpness * law.logit_factor, tokens)
        for name, law in laws.items()
    }
