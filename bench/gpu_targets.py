"""What phasor promises to cost on a GPU, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpu_contenders import NORM
from gpu_measure import EMPTY, excess
from targets import Target, Values, target_rows

from phasor.angles import ROW_ERROR_40
from phasor.bench import COPY, Case, Measured
from phasor.pairings import PAIRINGS

_FORMS = {"in place": "phasor, in place", "new output": "phasor, new output"}
# a float32 row of four digits, and one more complex product in float32
FAR_BOUND = ROW_ERROR_40 + 5**0.5 * 2**-24


def _label(m: Measured, key: str) -> str:
    return f"{m.case.name}, {m.case.dtype}, {key.removeprefix('phasor, ')}"


def _long(case: Case) -> bool:
    return case.seq > 1


def _copies(form: str) -> Callable[[Sequence[Measured]], Values]:
    """Time over a copy of as many bytes, in prefill and training."""

    def pick(measured: Sequence[Measured]) -> Values:
        return {
            _label(m, key): excess(m, key)
            for m in measured
            for key in (f"{_FORMS[form]}, {pairing}" for pairing in PAIRINGS)
            if _long(m.case) and key in m.seconds and COPY in m.seconds
        }

    return pick


def _rivals(form: str) -> Callable[[Sequence[Measured]], Values]:
    """Phasor over the fastest contender of the same pairing that does the same work."""

    def pick(measured: Sequence[Measured]) -> Values:
        found: Values = {}
        for m in measured:
            for pairing in PAIRINGS:
                key = f"{_FORMS[form]}, {pairing}"
                others = [
                    other
                    for other in m.seconds
                    if other.endswith(f", {pairing}")
                    and not other.startswith(("phasor", "transformers Qwen3"))
                    and (m.case.backward or (", in place" in other) == (form == "in place"))
                ]
                if key in m.seconds and others and _long(m.case):
                    found[_label(m, key)] = max(m.ratio(key, other).median for other in others)
        return found

    return pick


def _norm(*, backward: bool) -> Callable[[Sequence[Measured]], Values]:
    """Norm and rotation over rotation, in training or in prefill."""

    def pick(measured: Sequence[Measured]) -> Values:
        return {
            _label(m, key): m.ratio(key, alone).median
            for m in measured
            for key, alone in (
                (f"{NORM}, {pairing}", f"{_FORMS['new output']}, {pairing}") for pairing in PAIRINGS
            )
            if key in m.seconds and alone in m.seconds
            if _long(m.case) and m.case.backward == backward
        }

    return pick


def _empty(measured: Sequence[Measured]) -> Values:
    return {
        _label(m, key): m.ratio(key, EMPTY).median
        for m in measured
        for key in (f"{_FORMS['in place']}, {pairing}" for pairing in PAIRINGS)
        if not _long(m.case) and key in m.seconds and EMPTY in m.seconds
    }


def _host(measured: Sequence[Measured]) -> Values:
    """Microseconds."""
    return {
        _label(m, key): 1e6 * sorted(m.seconds[key])[len(m.seconds[key]) // 2]
        for m in measured
        for key in (f"{form}, {pairing}" for form in _FORMS.values() for pairing in PAIRINGS)
        if key in m.seconds
    }


OF_CALLS = [
    Target("prefill and training, in place / a copy of its bytes (95 % of the bandwidth)",
           1 / 0.95, _copies("in place")),
    Target("prefill and training, new output / a copy of its bytes (92 %)",
           1 / 0.92, _copies("new output")),
    Target("prefill and training, in place / the fastest contender", 1.0, _rivals("in place")),
    Target("prefill and training, new output / the fastest contender", 1.0,
           _rivals("new output")),
    Target("norm and rotation in one / rotation alone", 1.05, _norm(backward=False)),
    Target("training, norm and rotation in one / rotation alone (five passes to four)",
           1.05 * 5 / 4, _norm(backward=True)),
]  # fmt: skip
OF_REPLAYS = [Target("decode as a graph, in place / an empty kernel", 1.15, _empty)]
OF_LAUNCHES = [Target("one call of the host, query and key, µs", 12.0, _host)]


def rows(
    measured: Sequence[Measured],
    launches: Sequence[Measured],
    far: Mapping[str, Mapping[str, float | str]],
    tables: Sequence[Mapping[str, Any]],
) -> list[tuple[str, str, str, str]]:
    """For each target: what it says, its limit, the range measured, and whether it is held."""

    def table_sizes(_: Sequence[Measured]) -> Values:
        return {
            f"{row['length']} positions": row["bytes"] / 2**21
            for row in tables
            if row["recipe"] == "phasor"
        }

    def far_error(_: Sequence[Measured]) -> Values:
        return {
            f"{key}, {place}": error / FAR_BOUND
            for key, found in far.items()
            if key.startswith("phasor")
            for place, error in found.items()
            if isinstance(error, float) and place.endswith("float32")
        }

    facts = [
        Target("tables of phasor / 2 MB", 1.0, table_sizes),
        Target("error far out / its bound, float32", 1.0, far_error),
    ]
    return [
        *target_rows(measured, OF_CALLS),
        *target_rows([m.replayed() for m in measured], OF_REPLAYS),
        *target_rows(launches, OF_LAUNCHES),
        *target_rows([], facts),
    ]
