"""Charts of attention maps, of the frequencies that heads use, and of linear attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import altair as alt
import numpy as np
from numpy.typing import ArrayLike

from phasor._checks import short_repr, whole
from phasor.charts.style import (
    chart_of,
    check_list,
    curves,
    heat_map,
    horizontal_line,
    index_ticks,
    layer,
    records,
    style_for_paper,
)
from phasor.errors import TensorError
from phasor.layers import check_rope
from phasor.papers import cosine, linear_weights
from phasor.papers.heads import attention_map
from phasor.rope import Rope

_OFFSET_NAMES = {0: "the token itself", 1: "the previous token"}


def attention_chart(
    rope: Rope, offsets: Sequence[int], *, alpha: float, tokens: int
) -> alt.ConcatChart:
    """Causal attention maps of heads that look at a fixed offset, one map per offset.

    The maps are `phasor.papers.heads.attention_map` (Barbero et al. 2410.06205, theorem 5.3, and
    Wendler's previous-token head). The first ``offset`` tokens have no token that far back, so they
    attend to the token with the highest score: token 0 if the score falls steadily with distance.
    Masked keys are grey.

    Args:
        rope: The rope of queries and keys.
        offsets: Tokens back, 0 to ``tokens - 1``: 0 is the token itself, 1 the previous token.
        alpha: Sharpness, as in `phasor.papers.heads.positional_head`.
        tokens: Length of the sequence.

    >>> rope = Rope(head_dim=128, pairing="half")
    >>> chart = attention_chart(rope, [0, 1], alpha=12.0, tokens=16)
    >>> chart.concat[1].title
    'offset 1 (the previous token)'
    """
    check_rope("rope", rope)
    check_list("offsets", offsets)
    tokens = whole("tokens", tokens, least=2)
    offsets = [whole("each offset", offset, least=0, most=tokens - 1) for offset in offsets]
    query, key = np.indices((tokens, tokens))
    ticks = index_ticks(tokens, 6)
    x = alt.X("key:O").title("key (token)").axis(values=ticks, labelAngle=0)
    y = alt.Y("query:O").title("query (token)").axis(values=ticks)
    panels: list[alt.LayerChart] = []
    for offset in offsets:
        weights = attention_map(rope, offset, alpha=alpha, tokens=tokens)
        rows = records(query=query.ravel(), key=key.ravel(), weight=weights.ravel())
        cells = chart_of(rows).encode(x=x, y=y)
        masked = cells.mark_rect(style="shade").transform_filter("datum.weight === null")
        visible = cells.transform_filter("datum.weight !== null")
        visible = heat_map(visible, "weight", "attention weight", "query:O", "key:O", domain=[0, 1])
        title = f"offset {offset} ({_OFFSET_NAMES.get(offset, f'{offset} tokens back')})"
        panels.append(layer(masked, visible).properties(title=title, width=200, height=200))
    return style_for_paper(
        alt.concat(*panels, columns=3), "Attention weight of every query and key, for each offset."
    )


def usage_chart(norms: Mapping[str, ArrayLike]) -> alt.FacetChart:
    """Frequency usage: the mean length of every pair, one row per head.

    Barbero et al. (2410.06205, figure 3) draw means over the heads of a layer; here every head has
    a row, so that a head that uses other frequencies than the rest stands out.

    Args:
        norms: For each layer, by name, ``[heads, num_pairs]`` from `phasor.papers.pair_norms` or
            ``phasor.torch.papers.usage``. All layers need the same number of pairs; numbers of
            heads may differ.

    >>> chart = usage_chart({"layer 0": np.ones((6, 64)), "layer 1": np.ones((6, 64))})
    >>> len(chart.data.values)
    768
    """
    if not (isinstance(cast(object, norms), Mapping) and norms):
        raise TensorError(
            "norms must hold [heads, num_pairs] for at least one layer, by name, such as "
            f"{{'layer 0': norms}}, got {short_repr(norms)}"
        )
    layers = {name: np.asarray(array) for name, array in norms.items()}
    width = next(iter(layers.values())).shape[-1:]
    for name, array in layers.items():
        is_table = array.dtype != object and array.ndim == 2 and 0 not in array.shape
        if not is_table or array.shape[-1:] != width:
            raise TensorError(
                f"norms must be [heads, num_pairs], of as many pairs in every layer, "
                f"got {list(array.shape)} in {name!r}; draw layers of other widths separately"
            )
    tables = (
        records(layer=name, head=head, pair=range(len(lengths)), length=lengths)
        for name, array in layers.items()
        for head, lengths in enumerate(array)
    )
    x = alt.X("pair:O").title("pair (index)").axis(values=index_ticks(width[0]), labelAngle=0)
    cells = chart_of(*tables).encode(x=x, y=alt.Y("head:O", title=None, axis=None))
    labels = "layer:N", "head:O", "pair:O"
    cells = heat_map(cells, "length", "mean length", *labels, digits=".4~g", domainMin=0)
    header = alt.Header(title="layer, one row per head", labelAngle=0, labelAlign="left")
    rows = alt.Row("layer:N", sort=list(layers), header=header)
    chart = cells.properties(width=480, height=alt.Step(10)).facet(row=rows, spacing=4)
    chart = chart.resolve_scale(y="independent")
    return style_for_paper(chart, "Mean length of each pair, one row per head in each layer.")


def linear_chart(rope: Rope, lengths: Sequence[int], *, draws: int) -> alt.ConcatChart:
    """Share of negative weights in linear attention, and sum of weights, by number of keys.

    Weights of RoFormer's eq. 19 (2104.09864), `phasor.papers.linear_weights`, for Gaussian queries
    and keys: means over the draws, and bands of one standard deviation. Without a rotation no
    weight would be negative, and they would sum to 1. The work grows as ``draws * sum(lengths)``:
    32 draws of 8192 keys at width 64 take a second.

    Args:
        rope: The rope, with one axis.
        lengths: Numbers of keys, ascending.
        draws: Number of queries at each length; each has its own keys.

    >>> chart = linear_chart(Rope(head_dim=64, pairing="half"), [64, 256], draws=4)
    >>> chart.save("linear.svg")  # doctest: +SKIP
    """
    check_rope("rope", rope)
    check_list("lengths", lengths)
    whole("draws", draws, least=1)
    draw = [[_random_weights(rope, n, seed) for seed in range(draws)] for n in lengths]
    negative = np.array([[(weights < 0).mean() for weights in row] for row in draw])
    total = np.array([[weights.sum() for weights in row] for row in draw])
    sums = [cosine(rope, np.arange(n), "aligned").mean() for n in lengths]

    def panel(
        title: str, values: Any, number_format: str, least: float, expected: Any
    ) -> alt.LayerChart:
        mean, spread = values.mean(-1), values.std(-1)
        rows = records(keys=lengths, high=mean + spread, low=np.maximum(mean - spread, least))
        x = alt.X("keys:Q").title("keys (tokens)").scale(type="log", base=2, nice=False)
        x = x.axis(values=list(lengths), grid=False, format="d")
        low = alt.Y("low:Q", title=title)
        band = chart_of(rows).mark_area(style="shade").encode(x=x, y=low, y2="high:Q")
        y = alt.Y("value:Q").title(title).axis(format=number_format)
        series = {f"mean of {draws} draws": mean, "expected sum": expected}
        lines = curves(lengths, series, x, y, clickable=False)
        return layer(band, horizontal_line(0), lines).properties(width=320, height=240)

    return style_for_paper(
        alt.concat(
            panel("share of weights below 0", negative, ".0%", 0.0, np.nan),
            panel("sum of weights", total, "~g", -np.inf, sums),
        ),
        "Share of negative weights and sum of weights against the number of keys.",
    )


def _random_weights(rope: Rope, length: int, seed: int) -> Any:
    """The weights ``[length]`` of a Gaussian query on Gaussian keys."""
    generator = np.random.default_rng(seed)
    query = generator.standard_normal(rope.head_dim)
    return linear_weights(query, generator.standard_normal((length, rope.head_dim)), rope)
