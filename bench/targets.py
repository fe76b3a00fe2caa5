"""What phasor promises to cost, as data, and what it cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from cases import Case
from contenders import IN_PLACE, NEW
from device import EMPTY
from measure import COPY, MULTIPLY, Measured

from phasor.angles import COS_SIN_ERROR_FLOAT32
from phasor.pairings import PAIRINGS

_FAR, _TABLE = "phasor, positions near 2^62, half", "phasor, rows of a table, half"
#: Of a cosine and a sine in float32, and a complex product in float32.
FAR_BOUND = 2**0.5 * COS_SIN_ERROR_FLOAT32 + 5**0.5 * 2**-24
#: Measured values by what they are of; each has to be at most the limit.
Values = dict[str, float]
Pick = Callable[[Sequence[Measured]], Values]


class Target(NamedTuple):
    """A promise: every value that ``pick`` finds is at most ``limit``."""

    what: str
    limit: float
    pick: Pick


def moved(case: Case, key: str) -> int:
    """Bytes of query and key that one call has to read and write.

    What is in place touches the slice that turns, what makes new tensors touches whole heads, and
    a backward pass does it again. Positions, rows and tables are not counted.
    """
    in_place = key == MULTIPLY or ", in place" in key
    width = case.rotary_dim if in_place and case.rotary_dim else case.head_dim
    passes = 4 if case.backward else 2
    return passes * case.size * width // case.head_dim


def _label(m: Measured, key: str) -> str:
    return f"{m.case.label}, {key.removeprefix('phasor, ')}"


def _each(
    keep: Callable[[Case], bool], form: str, value: Callable[[Measured, str], float | None]
) -> Pick:
    """A value of both pairings of a form of phasor's, in the cases that ``keep`` keeps."""

    def pick(measured: Sequence[Measured]) -> Values:
        found = {
            _label(m, key): value(m, key)
            for m in measured
            if keep(m.case)
            for key in (f"{form}, {pairing}" for pairing in PAIRINGS)
            if key in m.seconds
        }
        return {label: one for label, one in found.items() if one is not None}

    return pick


def _over(keep: Callable[[Case], bool], form: str, to: str) -> Pick:
    """Ratios to a reference, or to another form of the same pairing where it has pairings."""

    def value(m: Measured, key: str) -> float | None:
        other = to if to in (COPY, MULTIPLY, EMPTY) else f"{to}, {key.rpartition(', ')[2]}"
        return m.ratio(key, other).median if other in m.seconds else None

    return _each(keep, form, value)


def _half_over(keep: Callable[[Case], bool], pairs: Iterable[tuple[str, str]]) -> Pick:
    """Ratios of one key to another."""

    def pick(measured: Sequence[Measured]) -> Values:
        return {
            _label(m, key): m.ratio(key, to).median
            for m in measured
            if keep(m.case)
            for key, to in pairs
            if key in m.seconds and to in m.seconds
        }

    return pick


def _over_bytes(form: str) -> Pick:
    """Time over a copy of as many bytes, in prefill and training."""

    def value(m: Measured, key: str) -> float:
        return m.ratio(key).median * moved(m.case, COPY) / moved(m.case, key)

    return _each(_long, form, value)


def _over_fastest(form: str) -> Pick:
    """Phasor over the fastest contender of the same pairing that does the same work."""

    def value(m: Measured, key: str) -> float | None:
        others = [
            other
            for other in m.seconds
            if other.endswith(key.removeprefix(form)) and not other.startswith("phasor")
            and (m.case.backward or (", in place" in other) == (form == IN_PLACE))
        ]  # fmt: skip
        return max((m.ratio(key, other).median for other in others), default=None)

    return _each(_long, form, value)


def _over_all(form: str) -> Pick:
    """Phasor over each contender of the same pairing."""

    def pick(measured: Sequence[Measured]) -> Values:
        return {
            f"{m.case.label}, {key}": m.ratio(f"{form}, {pairing}", key).median
            for m in measured
            for pairing in PAIRINGS
            if f"{form}, {pairing}" in m.seconds
            for key in m.seconds
            if key.endswith(pairing) and not key.startswith("phasor")
        }

    return pick


def _saved(measured: Sequence[Measured]) -> Values:
    """Bytes kept for the backward pass, in bytes of positions."""
    return {
        _label(m, key): size / (8 * m.case.seq)
        for m in measured
        for key, size in m.saved.items()
        if key.startswith(NEW)
    }


def _pairings_apart(measured: Sequence[Measured]) -> Values:
    """The slower pairing over the faster."""
    found: Values = {}
    for m in measured:
        for form in (IN_PLACE, NEW):
            one, other = (f"{form}, {pairing}" for pairing in PAIRINGS)
            if one in m.seconds and other in m.seconds:
                ratio = m.ratio(one, other).median
                found[_label(m, form)] = max(ratio, 1 / ratio)
    return found


def _far_probe(measured: Sequence[Measured]) -> Values:
    return {
        m.case.label: m.errors[_FAR] / FAR_BOUND
        for m in measured
        if m.case.dtype == "float32" and _FAR in m.errors
    }


def _prefill(case: Case, least: int = 0, most: int = 2**20, dtype: str = "") -> bool:
    return case.name.startswith("prefill") and least <= case.seq <= most and dtype in case.dtype


def _one_or_32(case: Case) -> bool:
    return case.name in ("decode 1", "decode 32")


def _long(case: Case) -> bool:
    return case.seq > 1


_HALF = f"{IN_PLACE}, half"
_CPU_TARGETS = [
    Target("prefill from 4096 tokens, in place / multiply", 1.05,
           _over(lambda c: _prefill(c, 4096), IN_PLACE, MULTIPLY)),
    Target("prefill of 512 tokens, bfloat16, in place / copy", 0.75,
           _over(lambda c: _prefill(c, 512, 512, "bfloat16"), IN_PLACE, COPY)),
    Target("prefill of 64 tokens, bfloat16, in place / multiply", 1.0,
           _over(lambda c: _prefill(c, 64, 64, "bfloat16"), IN_PLACE, MULTIPLY)),
    Target("prefill from 4096 tokens, new output / copy", 0.85,
           _over(lambda c: _prefill(c, 4096), NEW, COPY)),
    Target("prefill of 512 tokens, new output / copy", 1.25,
           _over(lambda c: _prefill(c, 512, 512), NEW, COPY)),
    Target("forward and backward, new outputs / two copies", 0.90,
           _over(lambda c: c.backward, NEW, COPY)),
    Target("bytes saved for backward / bytes of the positions", 1.0, _saved),
    Target("decode 1 and 32, in place / transformers' apply alone", 1 / 9,
           _half_over(_one_or_32, [(_HALF, "transformers, half")])),
    Target("decode 1 and 32, in place / bare operator", 1.3,
           _half_over(_one_or_32, [(_HALF, "phasor, bare operator, half")])),
    Target("slower pairing / faster pairing, every case", 1.05, _pairings_apart),
    Target("MLA, in place / strided copy", 0.95,
           _over(lambda c: c.rows is not None, IN_PLACE, COPY)),
    Target("AVX2 / best instruction set, prefill from 4096 tokens", 1.1,
           _half_over(lambda c: _prefill(c, 4096), [("phasor, avx2, half", _HALF)])),
    Target("AVX2 / best instruction set, prefill up to 512 tokens", 3.0,
           _half_over(lambda c: _prefill(c, 0, 512), [("phasor, avx2, half", _HALF)])),
    Target("positions near 2^62 / rows of a table", 1.05,
           _half_over(lambda _: True, [(_FAR, _TABLE)])),
    Target("error near position 2^62 / its bound, float32", 1.0, _far_probe),
    Target("new output / each contender, every case", 1.03, _over_all(NEW)),
    Target("in place / each contender, every case", 1.03, _over_all(IN_PLACE)),
]  # fmt: skip
_SYSTEM = Target(
    "new output, float32, malloc as it comes / onnxruntime", 1.0,
    _half_over(lambda c: c.dtype == "float32",
               [(f"{NEW}, {pairing}", f"onnxruntime, {pairing}") for pairing in PAIRINGS]),
)  # fmt: skip
_GPU_TARGETS = [
    Target("prefill and training, in place / a copy of its bytes (95 % of the bandwidth)",
           1 / 0.95, _over_bytes(IN_PLACE)),
    Target("prefill and training, new output / a copy of its bytes (92 %)",
           1 / 0.92, _over_bytes(NEW)),
    Target("prefill and training, in place / the fastest contender", 1.0,
           _over_fastest(IN_PLACE)),
    Target("prefill and training, new output / the fastest contender", 1.0, _over_fastest(NEW)),
]  # fmt: skip
_REPLAY = Target("decode as a graph, in place / an empty kernel", 1.15,
                 _over(lambda c: not _long(c), IN_PLACE, EMPTY))  # fmt: skip


def _host(measured: Sequence[Measured]) -> Values:
    """Microseconds."""
    picks = (
        _each(lambda _: True, form, lambda m, k: 1e6 * m.median(k)) for form in (IN_PLACE, NEW)
    )
    return {label: value for pick in picks for label, value in pick(measured).items()}


def target_rows(results: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """For each target: what it says, its limit, the range measured, and whether it is held."""
    measured = [Measured.from_plain(plain) for plain in results["cases"]]
    if results["device"] == "cpu":
        system = [Measured.from_plain(plain) for plain in results["system_memory"]]
        rows = [_row(target, target.pick(measured)) for target in _CPU_TARGETS]
        return [*rows, _row(_SYSTEM, _SYSTEM.pick(system))]
    launches = [Measured.from_plain(plain) for plain in results["launches"]]
    sizes = {
        f"{row['length']} positions": row["bytes"] / 64
        for row in results["tables"]
        if row["recipe"] == "phasor"
    }
    far = {
        f"{key}, {place}": error / FAR_BOUND
        for key, found in results["far"].items()
        if key.startswith("phasor")
        for place, error in found.items()
        if isinstance(error, float) and place.endswith("float32")
    }
    return [
        *(_row(target, target.pick(measured)) for target in _GPU_TARGETS),
        _row(_REPLAY, _REPLAY.pick([m.replayed() for m in measured])),
        _row(Target("one call of the host, query and key, µs", 12.0, _host), _host(launches)),
        _row(Target("constants of phasor, bytes a pair", 64.0, lambda _: sizes), sizes),
        _row(Target("error far out / its bound, float32", 1.0, lambda _: far), far),
    ]


def _row(target: Target, values: Values) -> tuple[str, str, str, str]:
    limit = f"≤ {target.limit:.3g}"
    if not values:
        return target.what, limit, "", "not measured"
    low, high = min(values.values()), max(values.values())
    span = f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"
    short = {name: v for name, v in values.items() if not v <= target.limit}
    worst = sorted(short, key=lambda name: -short[name])[:3]
    named = "; ".join(f"{name}: {short[name]:.2f}" for name in worst)
    verdict = f"**short** in {len(short)} of {len(values)}: {named}" if short else "held"
    return target.what, limit, span, verdict
