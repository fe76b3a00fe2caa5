"""The Markdown that the documentation includes, from the results as they were written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any


def markdown(results: Mapping[str, Any]) -> str:
    """Every table."""
    parts = [_about(results)]
    for stage in results["measured"]:
        parts += [f"### Loss, {stage}", _losses(results, stage)]
    parts += [_NOTE, "### Published orders", _orders(results), _ORDERS, _identities(results)]
    return "\n\n".join(parts) + "\n"


_NOTE = """\
Bits per byte by position in the window; bold is the lowest of a column. In brackets: the difference
to the last row, which attends no further than in its training, with the standard error of that
difference over the windows."""
_ORDERS = """\
The loss of the first less that of the second, window by window, with its standard error. The order
*holds* if that is below zero by more than two of them, *reversed* if it is above by as much."""


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first stand right."""
    marks = ["---", *["---:"] * (len(titles) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (titles, marks, *rows))


def signed(mean: float, error: float) -> str:
    """A difference and its error; rounding leaves no sign at zero."""
    return f"{round(mean, 3) + 0.0:+.3f} ± {error:.3f}"


def spans(results: Mapping[str, Any]) -> list[str]:
    """The ranges of positions, counted from 1 as tokens are."""
    return [f"{first + 1}–{last}" for first, last in results["ranges"]]


def _about(results: Mapping[str, Any]) -> str:
    text, settings = results["text"], results["settings"]
    first, longer = settings["first"], settings["longer"]
    return (
        f"Seed {results['seed']}; torch {results['versions']['torch']}; the standard library of "
        f"Python {text['python']}: {text['files']} files (SHA-256 `{text['sha256'][:16]}…`), "
        f"{text['bytes'] / 1e6:.1f} MB to train on, {text['windows']} held-out windows of "
        f"{longer['length']} bytes. {settings['layers']} layers of {settings['heads']} heads of "
        f"{settings['head_dim']}, base {settings['base']:g}; {first['steps']} steps of "
        f"{first['batch']} × {first['length']} bytes, then {longer['steps']} steps of "
        f"{longer['batch']} × {longer['length']} for each law. "
        f"{results['cpu_seconds'] / 60:.1f} minutes of processor time."
    )


def _losses(results: Mapping[str, Any], stage: str) -> str:
    measured = results["measured"][stage]
    lowest = [min(column) for column in zip(*(m["bits"] for m in measured.values()), strict=True)]

    def cells(name: str) -> Iterator[str]:
        found = measured[name]
        numbers = zip(
            *(found[key] for key in ("bits", "above_window", "above_window_error")),
            lowest,
            strict=True,
        )
        for bits, above, error, best in numbers:
            shown = f"**{bits:.3f}**" if bits == best else f"{bits:.3f}"
            yield shown if name == "window" else f"{shown} ({signed(above, error)})"

    titles = {name: way["title"] for name, way in results["ways"].items() if name in measured}
    rows = ([title, *cells(name)] for name, title in titles.items())
    return table(["", *spans(results)], rows)


def _orders(results: Mapping[str, Any]) -> str:
    def named(stage: str, name: str) -> str:
        return f"{results['ways'][name]['title']}, {stage}"

    rows: list[list[str]] = []
    for claim in results["claims"]:
        found = zip(claim["difference"], claim["error"], claim["verdict"], strict=True)
        said = f"{named(*claim['better'])} < {named(*claim['worse'])}"
        cells = (f"{signed(mean, error)} *{verdict}*" for mean, error, verdict in found)
        rows.append([f"{said} [{claim['source']}]", *cells])
    return table(["published", *spans(results)[1:]], rows)


def _identities(results: Mapping[str, Any]) -> str:
    same = results["rule_against_law"]
    (mean,), (error,) = results["growth"]["zero-shot/rerope"].values()
    return (
        f"ReRoPE without training: {signed(mean, error)} bits in the second half against the "
        "trained positions of the same windows; published: no increase. Dynamic NTK should be the "
        "unchanged Rope within the trained context, and NTK-aware at the end of the window: they "
        f"differ by at most {same['within_context']:.0e} and {same['at_target']:.0e} bits."
    )
