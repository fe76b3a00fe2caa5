"""Hypothesis strategies: positions, and ropes of every law, axes and pairing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from phasor import Rope, pairings
from phasor.axes import Alternating, Axes, Axial, InterleavedSections, Mixed, OneAxis, Sectioned
from phasor.scaling import (
    NTK,
    REGISTRY,
    Cope,
    DynamicNTK,
    Hope,
    Law,
    Linear,
    Llama3,
    LongRope,
    NTKFixed,
    NTKMixed,
    NTKOld,
    PartNTK,
    PerPair,
    Proportional,
    Resonance,
    Rule,
    SteppedNTK,
    Yarn,
    YarnPaper,
)

# of every law one, fit for a head of 64; of a rule, the law of a long sequence
EVERY_LAW: dict[str, Law | None] = {"plain": None}
for name, (example, _) in REGISTRY.items():
    EVERY_LAW[name] = example.at(65_536) if isinstance(example, Rule) else example

EVERY_AXES = ("one", "sectioned", "axial", "interleaved", "alternating", "mixed")

INT64 = st.integers(-(2**63), 2**63 - 1) | st.integers(-5000, 5000)
FLOAT_POSITIONS = st.floats(-(2.0**62), 2.0**62) | st.floats(-5000, 5000)
PAIRINGS = st.sampled_from(pairings.PAIRINGS)
FACTORS = st.floats(0.25, 64.0)
LENGTHS = st.integers(2, 2**20)


@st.composite
def axes(draw: st.DrawFn, pairs: int) -> Axes:
    """Axes that fit ``pairs`` pairs."""
    kind = draw(st.sampled_from(EVERY_AXES if pairs >= 3 else EVERY_AXES[:1]))
    if kind == "one":
        return OneAxis()
    if kind == "mixed":
        row = st.lists(st.floats(-8.0, 8.0), min_size=pairs, max_size=pairs).map(tuple)
        return Mixed(draw(st.lists(row, min_size=2, max_size=3).map(tuple)))
    if kind == "alternating":
        each = draw(st.integers(0, pairs // 2))
        return Alternating((pairs - 2 * each, each, each))
    if kind == "interleaved":
        # the p-th pair is axis p % 3, so an axis past the first finds pairs // 3 turns for certain
        others = draw(st.lists(st.integers(0, pairs // 3), min_size=2, max_size=2))
        return InterleavedSections((pairs - sum(others), *others))
    # two pairs at least in every section that has any, which is what NTK laws ask for
    first = draw(st.integers(0, pairs - 2).filter(lambda n: n != 1 and pairs - n != 1))
    sections = draw(st.permutations([first, pairs - first, 0]))
    return {"sectioned": Sectioned, "axial": Axial}[kind](tuple(sections))


@st.composite
def betas(draw: st.DrawFn) -> dict[str, float]:
    """The two ends of a ramp in turns, the fast one above the slow one."""
    slow = draw(st.floats(0.25, 4.0))
    return {"beta_slow": slow, "beta_fast": slow + draw(st.floats(0.5, 64.0))}


def laws(spectra: tuple[int, ...]) -> st.SearchStrategy[Law]:
    """A law that fits spectra of these many pairs."""
    stretch = [st.builds(law, factor=FACTORS) for law in (Linear, NTKOld, NTKFixed)]
    extend: dict[str, Any] = {"factor": FACTORS, "original_max_positions": LENGTHS}
    found: list[st.SearchStrategy[Any]] = [
        *stretch,
        st.builds(NTKMixed, factor=FACTORS, exponent=st.floats(0.0, 2.0)),
        st.builds(
            lambda ends, **rest: Yarn(**ends, **rest), betas(), truncate=st.booleans(), **extend
        ),
        st.builds(lambda ends, **rest: YarnPaper(**ends, **rest), betas(), **extend),
        st.builds(
            Llama3,
            low_freq_factor=st.floats(0.5, 2.0),
            high_freq_factor=st.floats(2.0, 8.0),
            **extend,
        ),
        st.builds(Proportional, fraction=st.floats(0.0, 1.0), factor=FACTORS),
        st.builds(Hope, original_max_positions=LENGTHS),
        st.just(Resonance()),
    ]
    if min(spectra) >= 2:
        found += [
            st.builds(NTK, factor=FACTORS),
            st.builds(PartNTK, **extend),
            st.builds(
                Cope, num_pairs=st.integers(2, min(spectra)), clip=st.sampled_from(["soft", "hard"])
            ),
        ]
    if len(set(spectra)) == 1:
        found.append(st.builds(PerPair, factors=divisors(spectra[0]), attention_factor=FACTORS))
    return st.one_of(found)


def divisors(pairs: int) -> st.SearchStrategy[tuple[float, ...]]:
    """One divisor per pair."""
    return st.lists(FACTORS, min_size=pairs, max_size=pairs).map(tuple)


def rules(spectra: tuple[int, ...]) -> st.SearchStrategy[Rule]:
    """A rule whose laws fit spectra of these many pairs."""
    found: list[st.SearchStrategy[Any]] = []
    if min(spectra) >= 2:
        found.append(
            st.builds(DynamicNTK, factor=st.floats(1.0, 16.0), original_max_positions=LENGTHS)
        )
        found.append(st.builds(SteppedNTK, original_max_positions=LENGTHS))
    if len(set(spectra)) == 1:
        found.append(
            st.builds(
                LongRope,
                short_factors=divisors(spectra[0]),
                long_factors=divisors(spectra[0]),
                original_max_positions=LENGTHS,
                factor=FACTORS,
                short_attention_factor=st.none() | FACTORS,
                long_attention_factor=st.none() | FACTORS,
            )
        )
    return st.one_of(found)


@st.composite
def by_axis(draw: st.DrawFn, layout: Any, pairs: int) -> dict[str, Any]:
    """The axes with a base for each, a law for each or both, and the rope's own base if none."""
    spectra = layout.sections if isinstance(layout, Axial) else (pairs,) * layout.n_axes
    select_axis = [st.none() | laws((count or 1,)).map(without_factor) for count in spectra]
    base = draw(st.floats(1.5, 1e9))
    bases = draw(st.none() | st.tuples(*[st.floats(1.5, 1e9)] * layout.n_axes))
    scaling = draw(st.tuples(*select_axis))
    axes = replace(layout, base=bases, scaling=scaling)
    return {"axes": axes} | ({"base": base} if bases is None else {})


def without_factor(law: Law) -> Law:
    """The law without the factor on cos and sin, which no axis has for itself."""
    return replace(law, attention_factor=1.0) if hasattr(law, "attention_factor") else law


@st.composite
def descriptions(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of a rope; its scaling may be a rule that has not picked its law."""
    pairs = draw(st.integers(1, 12))
    start = draw(st.integers(0, 3))
    layout = draw(axes(pairs))
    fields: dict[str, Any] = {
        "head_dim": start + 2 * pairs + draw(st.integers(0, 3)),
        "pairing": draw(PAIRINGS),
        "pairing_out": draw(PAIRINGS),
        "rotary_dim": 2 * pairs,
        "rotary_start": start,
        "axes": layout,
        "direction": draw(st.sampled_from([1, -1])),
        "inv_freq_dtype": draw(st.sampled_from(["exact", "float32"])),
    }
    if isinstance(layout, Mixed):
        return fields
    spectra = layout.spectra(pairs)
    source = draw(st.sampled_from(["plain", "law", "rule", "explicit", "by axis"]))
    if source == "explicit":
        given = st.lists(st.floats(0.0, 8.0).map(abs), min_size=pairs, max_size=pairs)
        return fields | {"explicit_inv_freq": tuple(draw(given))}
    if source == "by axis" and not isinstance(layout, OneAxis):
        return fields | draw(by_axis(layout, pairs))
    fields["base"] = draw(st.floats(1.5, 1e9))
    if source == "law":
        fields["scaling"] = draw(laws(spectra))
    if source == "rule" and (min(spectra) >= 2 or len(set(spectra)) == 1):
        fields["scaling"] = draw(rules(spectra))
    return fields


def ropes() -> st.SearchStrategy[Rope]:
    """Any rope, rules and all."""
    return descriptions().map(lambda fields: Rope(**fields))


@st.composite
def resolved_ropes(draw: st.DrawFn) -> Rope:
    """Any rope that can rotate: a rule has picked its law."""
    return draw(ropes()).at(draw(LENGTHS))


@st.composite
def placed_ropes(draw: st.DrawFn, coordinates: st.SearchStrategy[Any] = INT64) -> tuple[Rope, Any]:
    """A rope that can rotate and one position for it: a number, or one per axis."""
    rope = draw(resolved_ropes())
    if rope.axes.n_axes == 1:
        return rope, draw(coordinates)
    return rope, [draw(coordinates) for _ in range(rope.axes.n_axes)]
