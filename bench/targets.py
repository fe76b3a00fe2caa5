"""What phasor promises to cost, as data, and what it cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from phasor.angles import ROW_ERROR_40
from phasor.bench import COPY, MULTIPLY, Measured
from phasor.pairings import PAIRINGS

_IN_PLACE, _NEW = "phasor, in place", "phasor, new output"
_FAR, _LOOKED_UP = "phasor, positions near 2^40, half", "phasor, rows of a table, half"
# a float32 row of four digits, and one more complex product in float32
_FAR_BOUND = ROW_ERROR_40 + 5**0.5 * 2**-24
#: Measured values by what they are of; each has to be at most the limit.
Values = dict[str, float]


class Target(NamedTuple):
    """A promise: every value that ``pick`` finds is at most ``limit``."""

    what: str
    limit: float
    pick: Callable[[Sequence[Measured]], Values]


def _where(
    keep: Callable[[Any], bool], pairs: Iterable[tuple[str, str]]
) -> Callable[[Sequence[Measured]], Values]:
    """Ratios of the first of each pair to the second, in the cases that ``keep`` keeps."""
    wanted = list(pairs)

    def pick(measured: Sequence[Measured]) -> Values:
        return {
            f"{m.case.name}, {m.case.dtype}, {name.removeprefix('phasor, ')}": m.ratio(
                name, to
            ).median
            for m in measured
            if keep(m.case)
            for name, to in wanted
            if name in m.seconds and to in m.seconds
        }

    return pick


def _both(form: str, to: str) -> list[tuple[str, str]]:
    return [(f"{form}, {pairing}", to) for pairing in PAIRINGS]


def _prefill(case: Any) -> bool:
    return case.name.startswith("prefill")


def _one_or_32(case: Any) -> bool:
    return case.name in ("decode 1", "decode 32")


def _saved(measured: Sequence[Measured]) -> Values:
    """Bytes kept for the backward pass, in bytes of positions."""
    return {
        f"{m.case.dtype}, {key.removeprefix('phasor, ')}": m.saved[key] / (8 * m.case.seq)
        for m in measured
        for key in m.saved
        if key.startswith(_NEW)
    }


def _pairings_apart(measured: Sequence[Measured]) -> Values:
    """The slower pairing over the faster."""
    found: Values = {}
    for m in measured:
        for form in (_IN_PLACE, _NEW):
            one, other = (f"{form}, {pairing}" for pairing in PAIRINGS)
            if one in m.seconds and other in m.seconds:
                ratio = m.ratio(one, other).median
                label = f"{m.case.name}, {m.case.dtype}, {form.removeprefix('phasor, ')}"
                found[label] = max(ratio, 1 / ratio)
    return found


def _far_error(measured: Sequence[Measured]) -> Values:
    return {
        f"{m.case.name}, {m.case.dtype}": m.errors[_FAR] / _FAR_BOUND
        for m in measured
        if m.case.dtype == "float32" and _FAR in m.errors
    }


def _against_all(form: str) -> Callable[[Sequence[Measured]], Values]:
    """Phasor over each contender of the same pairing."""

    def pick(measured: Sequence[Measured]) -> Values:
        return {
            f"{m.case.name}, {m.case.dtype}, {key}": m.ratio(f"{form}, {pairing}", key).median
            for m in measured
            for pairing in PAIRINGS
            if f"{form}, {pairing}" in m.seconds
            for key in m.seconds
            if key.endswith(pairing) and not key.startswith("phasor")
        }

    return pick


TARGETS = [
    Target("prefill from 4096 tokens, in place / multiply", 1.05,
           _where(lambda c: _prefill(c) and c.seq >= 4096, _both(_IN_PLACE, MULTIPLY))),
    Target("prefill of 512 tokens, bfloat16, in place / copy", 0.75,
           _where(lambda c: _prefill(c) and c.seq == 512 and c.dtype == "bfloat16",
                  _both(_IN_PLACE, COPY))),
    Target("prefill of 64 tokens, bfloat16, in place / copy", 1.0,
           _where(lambda c: _prefill(c) and c.seq == 64 and c.dtype == "bfloat16",
                  _both(_IN_PLACE, COPY))),
    Target("prefill from 4096 tokens, new output / copy", 0.85,
           _where(lambda c: _prefill(c) and c.seq >= 4096, _both(_NEW, COPY))),
    Target("prefill of 512 tokens, new output / copy", 1.25,
           _where(lambda c: _prefill(c) and c.seq == 512, _both(_NEW, COPY))),
    Target("forward and backward, new outputs / two copies", 0.90,
           _where(lambda c: c.backward, _both(_NEW, COPY))),
    Target("bytes saved for backward / bytes of the positions", 1.0, _saved),
    Target("decode 1 and 32, in place / transformers' apply alone", 1 / 9,
           _where(_one_or_32, [(f"{_IN_PLACE}, half", "transformers, half")])),
    Target("decode 1 and 32, in place / bare operator", 1.3,
           _where(_one_or_32, [(f"{_IN_PLACE}, half", "phasor, bare operator, half")])),
    Target("slower pairing / faster pairing, every case", 1.05, _pairings_apart),
    Target("MLA, in place / strided copy", 0.95,
           _where(lambda c: c.rows is not None, _both(_IN_PLACE, COPY))),
    Target("AVX2 / best instruction set, prefill from 4096 tokens", 1.1,
           _where(lambda c: _prefill(c) and c.seq >= 4096,
                  [("phasor, avx2, half", f"{_IN_PLACE}, half")])),
    Target("AVX2 / best instruction set, prefill up to 512 tokens", 3.0,
           _where(lambda c: _prefill(c) and c.seq <= 512,
                  [("phasor, avx2, half", f"{_IN_PLACE}, half")])),
    Target("positions near 2^40 / rows of a table", 1.05,
           _where(lambda _: True, [(_FAR, _LOOKED_UP)])),
    Target("error near position 2^40 / its bound, float32", 1.0, _far_error),
    Target("new output / each contender, every case", 1.03, _against_all(_NEW)),
    Target("in place / each contender, every case", 1.03, _against_all(_IN_PLACE)),
]  # fmt: skip


def target_rows(
    measured: Sequence[Measured], targets: Sequence[Target] = TARGETS
) -> list[tuple[str, str, str, str]]:
    """For each target: what it says, its limit, the range measured, and whether it is held."""
    found: list[tuple[str, str, str, str]] = []
    for target in targets:
        values = target.pick(measured)
        limit = f"≤ {target.limit:.3g}"
        if not values:
            found.append((target.what, limit, "", "not measured"))
            continue
        low, high = min(values.values()), max(values.values())
        span = f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"
        short = {name: v for name, v in values.items() if not v <= target.limit}
        worst = sorted(short, key=lambda name: -short[name])[:3]
        named = "; ".join(f"{name}: {short[name]:.2f}" for name in worst)
        verdict = f"**short** in {len(short)} of {len(values)}: {named}" if short else "held"
        found.append((target.what, limit, span, verdict))
    return found
