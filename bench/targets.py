"""What phasor promises to cost, as data, and what it cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any, NamedTuple

from cases import Case
from contenders import IN_PLACE, NEW
from device import EMPTY
from measure import COPY, MULTIPLY, Measured

from phasor.angles import COS_SIN_ERROR_FLOAT32
from phasor.pairings import PAIRINGS

_FAR = "phasor, positions near 2^62"
#: Of a cosine and a sine in float32, and a complex product in float32.
FAR_BOUND = 2**0.5 * COS_SIN_ERROR_FLOAT32 + 5**0.5 * 2**-24
#: Values of a case, by the contender that they are of.
Values = Callable[[Measured], Iterable[tuple[str, float]]]


class Target(NamedTuple):
    """A promise: every value in the cases that it is about is at most ``limit``."""

    what: str
    limit: float
    values: Values
    cases: tuple[str, ...] = ("*",)  # as in ``--cases``

    def row(self, measured: Iterable[Measured]) -> tuple[str, str, str, str]:
        """`verdict` of what was measured."""
        found = {
            f"{m.case.label}, {key.removeprefix('phasor, ')}": value
            for m in measured
            if any(fnmatch(m.case.label, pattern) for pattern in self.cases)
            for key, value in self.values(m)
        }
        return verdict(self.what, self.limit, found)


def verdict(what: str, limit: float, values: Mapping[str, float]) -> tuple[str, str, str, str]:
    """What is promised, its limit, the range measured, and whether it is held."""
    if not values:
        return what, f"≤ {limit:.3g}", "", "not measured"
    low, high = (f"{end(values.values()):.2f}" for end in (min, max))
    short = {name: v for name, v in values.items() if not v <= limit}
    worst = sorted(short, key=lambda name: -short[name])[:3]
    named = "; ".join(f"{name}: {short[name]:.2f}" for name in worst)
    held = f"**short** in {len(short)} of {len(values)}: {named}" if short else "held"
    return what, f"≤ {limit:.3g}", low if low == high else f"{low} to {high}", held


def moved(case: Case, key: str) -> int:
    """Bytes of query and key that one call has to read and write.

    What is in place touches the slice that turns, what makes new tensors touches whole heads, and
    a backward pass does it again. Positions, rows and tables are not counted.
    """
    in_place = key == MULTIPLY or ", in place" in key
    width = case.rotary_dim if in_place and case.rotary_dim else case.head_dim
    passes = 4 if case.backward else 2
    return passes * case.size * width // case.head_dim


def _own(m: Measured, *forms: str) -> list[str]:
    """The keys of forms of phasor's that were timed, one for each pairing."""
    keys = [f"{form}, {pairing}" for form in forms for pairing in PAIRINGS]
    return [key for key in keys if key in m.seconds]


def _over(form: str, to: str) -> Values:
    """Ratios to a reference, or to another form of the same pairing."""
    return lambda m: [
        (key, m.seconds.ratio(key, other).median)
        for key in _own(m, form)
        for other in (to, to + key.removeprefix(form))
        if other in m.seconds
    ]


def _over_bytes(form: str) -> Values:
    """Time over a copy of as many bytes."""
    return lambda m: [
        (key, ratio * moved(m.case, COPY) / moved(m.case, key))
        for key, ratio in _over(form, COPY)(m)
    ]


def _over_others(form: str) -> Values:
    """Ratios to each contender of the same pairing."""
    return lambda m: [ratio for key in _own(m, form) for ratio in _to_others(m, key)]


def _to_others(m: Measured, key: str) -> list[tuple[str, float]]:
    pairing = key.rpartition(", ")[2]
    return [
        (other, m.seconds.ratio(key, other).median)
        for other in m.seconds
        if other.endswith(pairing) and not other.startswith("phasor")
    ]


def _over_fastest(form: str) -> Values:
    """Ratios to the fastest contender of the same pairing that does the same work."""

    def values(m: Measured) -> Iterable[tuple[str, float]]:
        for key in _own(m, form):
            alike = [
                ratio
                for other, ratio in _to_others(m, key)
                if m.case.backward or (", in place" in other) == (form == IN_PLACE)
            ]
            if alike:
                yield key, max(alike)

    return values


def _pairings_apart(m: Measured) -> Iterable[tuple[str, float]]:
    """The slower pairing over the faster."""
    for form in (IN_PLACE, NEW):
        if len(keys := _own(m, form)) == 2:
            ratio = m.seconds.ratio(*keys).median
            yield form, max(ratio, 1 / ratio)


_TWO_DECODES = "decode 1, *", "decode 32, *"
_FROM_4096 = "prefill 4096*", "prefill 32768*"
_LONG = "*, prefill*", "*, training*"
_CPU = [
    Target("prefill from 4096 tokens, in place / multiply", 1.05,
           _over(IN_PLACE, MULTIPLY), _FROM_4096),
    Target("prefill of 512 tokens, bfloat16, in place / copy", 0.75,
           _over(IN_PLACE, COPY), ("prefill 512*bfloat16",)),
    Target("prefill of 64 tokens, bfloat16, in place / multiply", 1.0,
           _over(IN_PLACE, MULTIPLY), ("prefill 64*bfloat16",)),
    Target("prefill from 4096 tokens, new output / copy", 0.85, _over(NEW, COPY), _FROM_4096),
    Target("prefill of 512 tokens, new output / copy", 1.25, _over(NEW, COPY), ("prefill 512*",)),
    Target("forward and backward, new outputs / two copies", 0.9, _over(NEW, COPY), ("training*",)),
    Target("bytes saved for backward / bytes of the positions", 1.0,
           lambda m: [(key, n / (8 * m.case.seq)) for key, n in m.saved.items()
                      if key.startswith(NEW)]),
    Target("decode 1 and 32, in place / transformers' apply alone", 1 / 9,
           _over(IN_PLACE, "transformers"), _TWO_DECODES),
    Target("decode 1 and 32, in place / bare operator", 1.3,
           _over(IN_PLACE, "phasor, bare operator"), _TWO_DECODES),
    Target("slower pairing / faster pairing, every case", 1.05, _pairings_apart),
    Target("MLA, in place / strided copy", 0.95, _over(IN_PLACE, COPY), ("DeepSeek MLA*",)),
    Target("AVX2 / best instruction set, prefill from 4096 tokens", 1.1,
           _over("phasor, avx2", IN_PLACE), _FROM_4096),
    Target("AVX2 / best instruction set, prefill up to 512 tokens", 3.0,
           _over("phasor, avx2", IN_PLACE), ("prefill 64*", "prefill 512*")),
    Target("positions near 2^62 / rows of a table", 1.05, _over(_FAR, "phasor, rows of a table")),
    Target("error near position 2^62 / its bound, float32", 1.0,
           lambda m: [(key, error / FAR_BOUND) for key, error in m.errors.items()
                      if key.startswith(_FAR)], ("*float32",)),
    Target("new output / each contender, every case", 1.03, _over_others(NEW)),
    Target("in place / each contender, every case", 1.03, _over_others(IN_PLACE)),
]  # fmt: skip
_SYSTEM = Target("new output, float32, malloc as it comes / onnxruntime", 1.0,
                 _over(NEW, "onnxruntime"), ("*float32",))  # fmt: skip
_GPU = [
    Target("prefill and training, in place / a copy of its bytes (95 % of the bandwidth)",
           1 / 0.95, _over_bytes(IN_PLACE), _LONG),
    Target("prefill and training, new output / a copy of its bytes (92 %)",
           1 / 0.92, _over_bytes(NEW), _LONG),
    Target("prefill and training, in place / the fastest contender", 1.0,
           _over_fastest(IN_PLACE), _LONG),
    Target("prefill and training, new output / the fastest contender", 1.0,
           _over_fastest(NEW), _LONG),
]  # fmt: skip
_REPLAY = Target(
    "decode as a graph, in place / an empty kernel", 1.15, _over(IN_PLACE, EMPTY), ("*, decode*",)
)
_HOST = Target(
    "one call of the host, query and key, µs",
    12.0,
    lambda m: [(key, 1e6 * m.seconds.median(key)) for key in _own(m, IN_PLACE, NEW)],
)


def cpu_rows(cases: Sequence[Measured], system: Sequence[Measured]) -> list[tuple[str, ...]]:
    """`verdict` of each target of a CPU; of the system's allocator at last."""
    return [*(target.row(cases) for target in _CPU), _SYSTEM.row(system)]


def gpu_rows(
    cases: Sequence[Measured],
    host: Sequence[Measured],
    tables: Sequence[Mapping[str, Any]],
    far: Mapping[str, Mapping[str, float | str]],
) -> list[tuple[str, ...]]:
    """`verdict` of each target of a GPU."""
    sizes = {f"{t['length']} positions": t["bytes"] / 64 for t in tables if t["recipe"] == "phasor"}
    errors = {
        f"{key}, {place}": error / FAR_BOUND
        for key, found in far.items()
        for place, error in found.items()
        if key.startswith("phasor") and place.endswith("float32") and isinstance(error, float)
    }
    return [
        *(target.row(cases) for target in _GPU),
        _REPLAY.row([m.replayed() for m in cases]),
        _HOST.row(host),
        verdict("constants of phasor, bytes a pair", 64.0, sizes),
        verdict("error far out / its bound, float32", 1.0, errors),
    ]
