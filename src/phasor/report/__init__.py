"""Everything about a model's rope as one HTML page, which asks the network for nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import resources
from typing import Any

import vl_convert
from jinja2 import Environment, StrictUndefined

from phasor.describe import pair_rows, ranges, sentences
from phasor.errors import SpecError
from phasor.extending import ExtensionPlan, plan
from phasor.layers import LayerRopes
from phasor.papers import RECIPES
from phasor.report import _charts, _numbers
from phasor.report._snippet import usage
from phasor.rope import Rope
from phasor.scaling import Rule

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
        kinds=[_kind(ropes, kind) for kind in ropes.kinds],
        sections=sections,
        # the program of the charts; nothing in a script may end it
        bundle=vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").replace(
            "</script", "<\\/script"
        ),
    )
    if progress is not None:
        progress(steps, steps)
    return page


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
    planned = plan(ropes, kinds, context, to)
    trained = planned.ways["unchanged"].extension.rope
    best = planned.way(None)
    heads = _numbers.head_rows(planned)
    return {
        "id": f"rope-{index}",
        "title": ", ".join(kinds),
        "sentences": [*_rule_sentence(rope, context), *sentences(trained, context)],
        "planned": planned,
        "config": None if best.config is None else json.dumps(best.config, indent=2),
        "refused": best.refused,
        "heads": heads,
        "charts": _all_charts(planned, heads, f"rope-{index}"),
        "pairs": pair_rows(trained, context),
        "several_axes": rope.axes.n_axes > 1,
        "usage": usage(rope, context),
    }


def _rule_sentence(rope: Rope, context: int) -> list[str]:
    if not isinstance(rope.scaling, Rule):
        return []
    rule = type(rope.scaling).__name__
    return [f"The rule {rule} picks the law from the length; here at {context} tokens."]


def _all_charts(
    planned: ExtensionPlan, heads: _numbers.HeadRows | str, prefix: str
) -> dict[str, dict[str, Any]]:
    laws, context = list(planned.ways), planned.context
    charts = {
        "coverage": _charts.coverage_chart(
            _numbers.coverage_rows(planned), laws, context, planned.to
        ),
        "slowing": _charts.slowing_chart(_numbers.slowing_rows(planned), laws),
        "cosine": _charts.cosine_chart(
            _numbers.cosine_rows(planned), laws, planned.recommended, context
        ),
        "decay": _charts.decay_chart(_numbers.decay_rows(planned), context),
        "precision": _charts.precision_chart(_numbers.precision_rows(planned), RECIPES, context),
    }
    if isinstance(heads, _numbers.HeadRows):
        weights = [f"{weight:g}" for weight in _numbers.WEIGHTS]
        charts["needed"] = _charts.needed_chart(heads.needed, weights, context)
        charts["kept"] = _charts.kept_chart(heads.kept, laws, context)
    return {name: {"id": f"{prefix}-{name}", "spec": spec} for name, spec in charts.items()}


__all__ = ["report"]
