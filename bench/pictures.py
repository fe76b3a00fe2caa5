"""The pictures of the page of benchmarks, from what was measured: ``python -m docs.draw bench``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import altair as alt
from measure import COPY, Measured

CPU = Path(__file__).parent / "results" / "cpu.json"
#: Of the cases that are drawn, what stands over their bars.
_TIMES = {
    "prefill 4096, bfloat16": "Prefill of 4096 tokens, bfloat16",
    "decode 32, bfloat16": "Decode, 32 sequences, bfloat16",
}
#: Where errors were measured; the contenders of one kind of angles differ by nothing.
_ERRORS = "errors, near "
_DRAWN = {
    "phasor, in place, half": "phasor, in place",
    "phasor, new output, half": "phasor, new output",
    "Meta, complex, interleaved": "Meta, complex",
    "transformers, compiled, half": "transformers, compiled",
    "transformers, half": "transformers",
    "torchtune, interleaved": "torchtune",
    "rotary-embedding-torch, interleaved": "rotary-embedding-torch",
}


def pictures() -> Iterator[tuple[str, alt.TopLevelMixin]]:
    """Each by the name of its file."""
    cases = json.loads(CPU.read_text("utf-8"))["cases"]
    yield "benchmarks-time", times_chart(cases)
    yield "benchmarks-error", errors_chart(cases)


def times_chart(cases: Mapping[str, Any]) -> alt.VConcatChart:
    """How many copies of its query and key each contender takes as long as."""
    panels: list[alt.LayerChart] = []
    for name, title in _TIMES.items():
        seconds = Measured.from_plain(cases[name]).seconds
        rows = [
            {"contender": text, "copies": round(seconds.ratio(key, COPY).median, 2)}
            for key, text in _DRAWN.items()
            if key in seconds
        ]
        y = alt.Y("contender:N", sort=None, title=None, axis=alt.Axis(labelLimit=200))
        x = alt.X(
            "copies:Q", title="time / time of a copy", scale=alt.Scale(type="log", domainMin=0.3)
        )
        bars = alt.Chart(alt.Data(values=rows)).encode(y=y)
        number = bars.mark_text(align="left", dx=8).encode(x=x, text="copies:Q")
        points = bars.mark_point(filled=True, size=70).encode(x=x)
        panels.append(alt.layer(points, number).properties(title=title, width=300))
    return alt.vconcat(*panels).resolve_scale(x="shared")


def errors_chart(cases: Mapping[str, Any]) -> alt.Chart:
    """The error of exact angles, and of those that are float32 products, by position."""
    series = {
        "phasor, in place, half": "phasor",
        "transformers, half": "float32 angles: all others but onnxruntime",
    }
    rows = [
        {
            "position": float(name.removeprefix(_ERRORS).partition(",")[0]),
            "error": error,
            "of": values,
        }
        for name, plain in cases.items()
        if name.startswith(_ERRORS)
        for key, values in series.items()
        if (error := plain["errors"][key])
    ]
    log = alt.Scale(type="log")
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_line(point=True)
        .encode(
            x=alt.X("position:Q", scale=log, axis=alt.Axis(values=[1e5, 1e6, 1e7], format="~e")),
            y=alt.Y("error:Q", scale=log, title="error", axis=alt.Axis(format="~e", tickCount=4)),
            color=alt.Color("of:N", sort=None, title=None),
            strokeDash=alt.StrokeDash("of:N", sort=None, title=None),
        )
        .properties(width=300, height=180)
    )
