"""Axes with a base and a law of their own at every door: functions, recordings, ropes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from phasor import Rope, diff, identify, verify
from phasor.axes import Alternating, Axial, InterleavedSections, Sectioned
from phasor.scaling import NTK, Linear

from .defects import rotate_halves

WIDTH, PAIRS = 64, 32
TWICE, THIRD = NTK(factor=2.0), Linear(factor=3.0)


def by_hand(bases: Any, laws: Any, of_pair: Any, restarts: bool) -> Any:
    """Each pair's frequency from its axis's base and law, a formula for each law."""
    count = [list(of_pair).count(axis) for axis in range(len(bases))]
    f, seen = np.zeros(PAIRS), [0] * len(bases)
    for k, axis in enumerate(of_pair):
        n, step = (count[axis], seen[axis]) if restarts else (PAIRS, k)
        seen[axis] += 1
        law = laws[axis]
        base = bases[axis] * (2.0 ** (n / (n - 1)) if law == TWICE else 1.0)
        f[k] = base ** (-step / n) / (3.0 if law == THIRD else 1.0)
    return f


def turned_by(f: Any, of_pair: Any) -> Any:
    """A function that turns pair ``k`` by the coordinate of its axis."""
    return lambda x, positions: rotate_halves(x, np.asarray(positions)[..., list(of_pair)] * f)


LAYOUTS = [
    Axial((8, 12, 12)),
    Sectioned((8, 12, 12)),
    InterleavedSections((12, 10, 10)),
    Alternating((8, 12, 12)),
]
OWN = [
    ((1e4, 1e4, 1e4), (None, TWICE, TWICE)),
    ((256.0, 1e4, 1e4), (None, None, None)),
    ((1e6, 1e4, 1e4), (TWICE, None, THIRD)),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize(("bases", "laws"), OWN)
def test_identify_says_the_base_and_law_of_each_axis(layout: Any, bases: Any, laws: Any) -> None:
    """From a function with formulas of its own, and the sentence denies one law for all axes."""
    of_pair = layout.axis_of_pair(PAIRS)
    f = by_hand(bases, laws, of_pair, isinstance(layout, Axial))
    found = identify(turned_by(f, of_pair), WIDTH, n_axes=3, dtype="float64")
    axes = type(layout)(layout.sections, base=bases, scaling=laws)
    assert found.rope == Rope(head_dim=WIDTH, pairing="half", axes=axes)
    assert found.known_law
    assert "No base and law for all axes give the same frequencies." in str(found)
    assert found.error is not None
    assert found.error < 1e-14


GRID = np.array([(20 + t, 20 + i, 20 + j) for t in range(6) for i in range(7) for j in range(8)])
OTHERS = [
    pytest.param(
        (None, TWICE, TWICE), (None, None, None),
        "Law: NTK(factor=2.0) on axes 1-2 is not applied, frequencies are the plain powers.",
        id="missing",
    ),
    pytest.param(
        (None, TWICE, TWICE), (TWICE, TWICE, TWICE),
        "Law: NTK(factor=2.0) instead of no law on axis 0 and NTK(factor=2.0) on axes 1-2.",
        id="on-all",
    ),
    pytest.param(
        (None, TWICE, TWICE), (None, None, TWICE),
        "Law: no law on axes 0-1 and NTK(factor=2.0) on axis 2 instead of no law on axis 0 and "
        "NTK(factor=2.0) on axes 1-2.",
        id="missing-on-one",
    ),
    pytest.param(
        (None, None, None), (None, TWICE, TWICE),
        "Law: no law on axis 0 and NTK(factor=2.0) on axes 1-2 instead of no law.",
        id="not-meant",
    ),
    pytest.param(
        (None, THIRD, THIRD), (None, TWICE, TWICE),
        "Law: no law on axis 0 and NTK(factor=2.0) on axes 1-2 instead of no law on axis 0 and "
        "Linear(factor=3.0) on axes 1-2.",
        id="another",
    ),
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=lambda one: type(one).__name__)
@pytest.mark.parametrize(("meant", "done", "sentence"), OTHERS)
def test_a_law_on_the_wrong_axes_is_named(
    layout: Any, meant: Any, done: Any, sentence: str
) -> None:
    """By `diff` of a function, and by `verify` of a small video."""
    of_pair, restarts = layout.axis_of_pair(PAIRS), isinstance(layout, Axial)
    rope = Rope(head_dim=WIDTH, pairing="half", axes=type(layout)(layout.sections, scaling=meant))
    turned = turned_by(by_hand((1e4,) * 3, done, of_pair, restarts), of_pair)
    assert [cause.sentence for cause in diff(rope, turned, context=4096).causes] == [sentence]
    x = np.random.default_rng(0).standard_normal((1, len(GRID), 2, WIDTH)).astype(np.float32)
    y = np.float32(turned(x, GRID[None]))
    (side,) = verify(rope, {"positions": GRID, "q": x, "q_rotated": y}, dims="bshd").sides
    assert [change.sentence for change in side.changes] == [sentence]


@pytest.mark.parametrize(
    ("done", "found"),
    [
        ((256.0, 1e4, 2e4), "256 on axis 0, 10000 on axis 1 and 20000 on axis 2"),
        ((1e4, 1e4, 1e4), "10000"),
    ],
)
def test_the_base_of_one_axis_is_named(done: Any, found: str) -> None:
    """Beside those that are right."""
    axes = Axial((8, 12, 12), base=(256.0, 1e4, 1e4))
    rope, of_pair = Rope(head_dim=WIDTH, pairing="half", axes=axes), axes.axis_of_pair(PAIRS)
    turned = turned_by(by_hand(done, (None,) * 3, of_pair, True), of_pair)
    (cause,) = diff(rope, turned, context=4096).causes
    assert cause.sentence == f"Base: {found} instead of 256 on axis 0 and 10000 on axes 1-2."


def test_two_ropes_differ_by_what_their_axes_say() -> None:
    """As it is written, and layouts without it do not differ."""
    plain = Rope(head_dim=WIDTH, pairing="half", axes=Axial((8, 12, 12)))
    own = Rope(
        head_dim=WIDTH,
        pairing="half",
        axes=Axial((8, 12, 12), base=(256.0, 1e4, 1e4), scaling=(None, TWICE, TWICE)),
    )
    found = diff(plain, own, context=64)
    assert found.fields == {
        "base": (10000, "(256.0, 10000.0, 10000.0)"),
        "law": (None, "(None, NTK(factor=2.0), NTK(factor=2.0))"),
    }
    assert "law: none and (None, NTK(factor=2.0), NTK(factor=2.0))" in str(found)
    assert not diff(own, own)
