"""What phasor promises to cost, as data, and what it cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatch
from typing import NamedTuple

from cases import Case, Question
from contenders import IN_PLACE, NEW
from device import EMPTY
from measure import COPY, MULTIPLY, Measured

from phasor.angles import COS_SIN_ERROR_FLOAT32, turn_limbs
from phasor.pairings import PAIRINGS

_FAR_OUT = "phasor, positions near 2^62"
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
    asks: Question = "times"

    def is_about(self, case: Case) -> bool:
        """Whether it is a promise for this case."""
        return case.asks == self.asks and any(
            fnmatch(case.label, pattern) for pattern in self.cases
        )

    def row(self, measured: Iterable[Measured]) -> dict[str, str]:
        """Its limit, the range of what was measured, and whether it is held."""
        values = {
            f"{m.case.label}, {key.removeprefix('phasor, ')}": value
            for m in measured
            if self.is_about(m.case)
            for key, value in self.values(m)
        }
        limit = {"limit": f"≤ {self.limit:.3g}"}
        if not values:
            return limit | {"measured": "", "held": "not measured"}
        low, high = (f"{end(values.values()):.2f}" for end in (min, max))
        short = [name for name, value in values.items() if not value <= self.limit]
        worst = sorted(short, key=lambda name: -values[name])[:3]
        worst_text = "; ".join(f"{name}: {values[name]:.2f}" for name in worst)
        verdict = f"**short** in {len(short)} of {len(values)}: {worst_text}" if short else "held"
        return limit | {"measured": low if low == high else f"{low} to {high}", "held": verdict}


def moved(case: Case, key: str) -> int:
    """Bytes of query and key that one call has to read and write.

    What is in place touches the slice that turns, what makes new tensors touches whole heads, and
    a backward pass does it again. Positions, rows and tables are not counted.
    """
    in_place = key == MULTIPLY or ", in place" in key
    width = case.rotary_dim if in_place and case.rotary_dim else case.head_dim
    passes = 4 if case.backward else 2
    return passes * case.size * width // case.head_dim


def _phasor_names(m: Measured, *forms: str) -> list[str]:
    """The keys of forms of phasor's that were timed, one for each pairing."""
    keys = [f"{form}, {pairing}" for form in forms for pairing in PAIRINGS]
    return [key for key in keys if key in m.seconds]


def _ratio_to(form: str, to: str) -> Values:
    """Ratios to a reference, or to another form of the same pairing."""
    return lambda m: [
        (key, m.seconds.ratio(key, rival).median)
        for key in _phasor_names(m, form)
        for rival in (to, to + key.removeprefix(form))
        if rival in m.seconds
    ]


def _over_bytes(form: str) -> Values:
    """Time over a copy of as many bytes."""
    return lambda m: [
        (key, ratio * moved(m.case, COPY) / moved(m.case, key))
        for key, ratio in _ratio_to(form, COPY)(m)
    ]


def _ratios_to_others(form: str, *, alike: bool = False) -> Values:
    """Ratios to each contender of the same pairing, or only to those that do the same work."""
    return lambda m: [
        (rival, m.seconds.ratio(key, rival).median)
        for key in _phasor_names(m, form)
        for rival in m.seconds
        if rival.endswith(key.rpartition(", ")[2]) and not rival.startswith("phasor")
        if not alike or m.case.backward or (", in place" in rival) == (form == IN_PLACE)
    ]


def _over_bound(begin: str) -> Values:
    """Errors of the contenders whose names begin so, in bounds."""
    return lambda m: [(k, e / FAR_BOUND) for k, e in m.errors.items() if k.startswith(begin)]


def _pairing_ratios(m: Measured) -> Iterable[tuple[str, float]]:
    """The slower pairing over the faster."""
    keys_by_form = {
        form: keys for form in (IN_PLACE, NEW) if len(keys := _phasor_names(m, form)) == 2
    }
    ratios = {form: m.seconds.ratio(*keys).median for form, keys in keys_by_form.items()}
    return [(form, max(ratio, 1 / ratio)) for form, ratio in ratios.items()]


_TWO_DECODES = "decode 1, *", "decode 32, *"
_FROM_4096 = "prefill 4096*", "prefill 32768*"
_LONG = "*, prefill*", "*, training*"
_FAR = Target("error far out / its bound, float32", 1.0, _over_bound("phasor"), ("*float32",),
              "errors")  # fmt: skip
_CPU = [
    Target("prefill from 4096 tokens, in place / multiply", 1.05,
           _ratio_to(IN_PLACE, MULTIPLY), _FROM_4096),
    Target("prefill of 512 tokens, bfloat16, in place / copy", 0.75,
           _ratio_to(IN_PLACE, COPY), ("prefill 512*bfloat16",)),
    Target("prefill of 64 tokens, bfloat16, in place / multiply", 1.0,
           _ratio_to(IN_PLACE, MULTIPLY), ("prefill 64*bfloat16",)),
    Target("prefill from 4096 tokens, new output / copy", 0.85, _ratio_to(NEW, COPY), _FROM_4096),
    Target("prefill of 512 tokens, new output / copy", 1.25,
           _ratio_to(NEW, COPY), ("prefill 512*",)),
    Target("forward and backward, new outputs / two copies", 0.9,
           _ratio_to(NEW, COPY), ("training*",)),
    Target("decode 1 and 32, in place / transformers' apply alone", 1 / 9,
           _ratio_to(IN_PLACE, "transformers"), _TWO_DECODES),
    Target("slower pairing / faster pairing, every case", 1.05, _pairing_ratios),
    Target("MLA, in place / strided copy", 0.95, _ratio_to(IN_PLACE, COPY), ("DeepSeek MLA*",)),
    Target("AVX2 / best instruction set, prefill from 4096 tokens", 1.1,
           _ratio_to("phasor, avx2", IN_PLACE), _FROM_4096),
    Target("AVX2 / best instruction set, prefill up to 512 tokens", 3.0,
           _ratio_to("phasor, avx2", IN_PLACE), ("prefill 64*", "prefill 512*")),
    Target("positions near 2^62 / rows of a table", 1.05,
           _ratio_to(_FAR_OUT, "phasor, rows of a table")),
    Target("error near position 2^62 / its bound, float32", 1.0, _over_bound(_FAR_OUT),
           ("*float32",)),
    Target("new output / each contender, every case", 1.03, _ratios_to_others(NEW)),
    Target("in place / each contender, every case", 1.03, _ratios_to_others(IN_PLACE)),
    Target("new output, float32, malloc as it comes / onnxruntime", 1.0,
           _ratio_to(NEW, "onnxruntime"), ("*float32",), "malloc"),
    _FAR,
]  # fmt: skip
_GPU = [
    Target("prefill and training, in place / a copy of its bytes (95 % of the bandwidth)",
           1 / 0.95, _over_bytes(IN_PLACE), _LONG),
    Target("prefill and training, new output / a copy of its bytes (92 %)",
           1 / 0.92, _over_bytes(NEW), _LONG),
    Target("prefill and training, in place / each contender in place", 1.0,
           _ratios_to_others(IN_PLACE, alike=True), _LONG),
    Target("prefill and training, new output / each contender with new outputs", 1.0,
           _ratios_to_others(NEW, alike=True), _LONG),
    Target("decode as a graph, in place / an empty kernel", 1.15,
           lambda m: _ratio_to(IN_PLACE, EMPTY)(m.replayed()), ("*, decode*",)),
    Target("one call of the host, query and key, µs", 12.0,
           lambda m: [(k, 1e6 * m.seconds.median(k)) for k in _phasor_names(m, IN_PLACE, NEW)],
           asks="host"),
    Target("constants of phasor, bytes a pair", 64.0,
           lambda m: [("phasor", 2 * turn_limbs(m.case.rope("half")).nbytes / m.case.head_dim)],
           asks="host"),
    _FAR,
]  # fmt: skip
#: All of them by type of device.
TARGETS = {"cpu": _CPU, "cuda": _GPU}
