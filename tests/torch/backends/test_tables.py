"""A Rope that passes makes the rows that it needs; its tables are those of one that stays."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phasor import Rope, angles
from phasor.axes import Axial
from phasor.scaling import DynamicNTK
from phasor.torch import _tables, rotate, rotate_qk
from phasor.torch.backends import cpu

from ..torch_oracle import assert_rotated, normal

GROWING = Rope(
    head_dim=16, pairing="half", scaling=DynamicNTK(factor=2.0, original_max_positions=8)
)
PLAIN = Rope(head_dim=16, pairing="interleaved", base=4321.0)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """No table from another test, and none for another one."""
    for cache in (_tables.growing_tables, cpu._prepare_plan):
        cache.cache_clear()
    yield
    for cache in (_tables.growing_tables, cpu._prepare_plan):
        cache.cache_clear()


@pytest.fixture
def rows_made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows of tables are made, time by time."""
    counts: list[int] = []
    made = angles.digit_rows

    def counted(rope, digits, values, dtype):
        counts.append(len(digits))
        return made(rope, digits, values, dtype)

    monkeypatch.setattr(angles, "digit_rows", counted)
    return counts


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_a_step_of_decoding_by_hand_makes_the_rows_of_one_position(
    rows_made: list[int], backend: str
) -> None:
    """A row for every digit of it, once for all layers, at every length a law of its own."""
    q, k = normal(1, 1, 4, 16, dtype=torch.float32), normal(1, 1, 2, 16, dtype=torch.float32)
    for length in range(1000, 1100):
        for _ in range(6):
            rope = GROWING.at(length)
            rotate_qk(q, k, torch.tensor([[length - 1]]), rope, backend=backend)
    assert len(rows_made) == 100
    assert max(rows_made) <= angles.DIGITS


def test_tables_are_kept_for_the_latest_ropes_only() -> None:
    """However long the text grows."""
    x = normal(1, 1, 1, 16, dtype=torch.float32)
    for length in range(1, 301):
        rotate(x, torch.tensor([length - 1]), GROWING.at(length))
    for cache in (_tables.growing_tables, cpu._prepare_plan):
        assert cache.cache_info().currsize <= 64


def test_a_static_law_soon_has_all_rows(rows_made: list[int]) -> None:
    """After a few steps, and at once where a prompt comes first; then none is made again."""
    x = normal(1, 1, 1, 16, dtype=torch.float32)
    for position in range(200):
        rotate(x, torch.tensor([position]), GROWING.at(8))
    assert sum(rows_made) == angles.DIGITS * angles.ROWS
    assert len(rows_made) < 25
    rows_made.clear()
    rotate(normal(1, 500, 1, 16, dtype=torch.float32), torch.arange(500), GROWING.at(9))
    assert rows_made == [angles.DIGITS * angles.ROWS]


@given(
    places=st.lists(st.integers(-(2**40) + 1, 2**40 - 1) | st.integers(-3000, 3000), min_size=1,
                    max_size=6),
    before=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=3),
    kind=st.sampled_from([torch.int64, torch.int32, torch.int16]),
    seed=st.integers(8, 10**6),
)  # fmt: skip
def test_bits_do_not_depend_on_which_rows_were_there(
    places: list[int], before: list[int], kind: torch.dtype, seed: int
) -> None:
    """A few rows, others first, or all of them: the same result."""
    reach = torch.iinfo(kind).max
    at = torch.tensor([max(-reach, min(reach, p)) for p in places], dtype=kind)
    x = normal(len(places), 2, 16, dtype=torch.float32)
    rope = GROWING.at(seed)
    if before:
        rotate(normal(len(before), 1, 16, dtype=torch.float32), torch.tensor(before), rope)
    few = rotate(x, at, rope), rotate(x, at, rope, backend="eager")
    whole = _tables.digit_tables(rope.to_json(), CPU, torch.float32)
    table = angles.digit_tables(rope, np.float32).swapaxes(-1, -2)
    assert torch.equal(whole, torch.from_numpy(np.ascontiguousarray(table)))
    assert torch.equal(few[0], rotate(x, at, rope))
    assert torch.equal(few[1], rotate(x, at, rope, backend="eager"))


def test_positions_of_one_size_in_memory_are_told_apart() -> None:
    """The same bytes are two positions of 32 bits, or one of 64."""
    rope, x = PLAIN, normal(2, 1, 16, dtype=torch.float32)
    two = torch.tensor([5, 3], dtype=torch.int32)
    one = two.view(torch.int64)
    rotate(x, two, rope)
    turned = rotate(x[:1], one, rope)
    assert_rotated(turned, x[:1], one, rope)


@pytest.mark.parametrize(
    "places", [[[3, 2**39], [-5, 7]], [[0, 0], [-(2**40) + 1, 1023]]], ids=["near", "ends"]
)
def test_every_axis_has_its_rows(places: list[list[int]]) -> None:
    """Each coordinate of few tokens."""
    rope = Rope(head_dim=16, pairing="half", base=123.0, axes=Axial((4, 4)))
    x, at = normal(2, 3, 16, dtype=torch.float32), torch.tensor(places)
    assert_rotated(rotate(x, at, rope), x, at, rope)


def test_what_digits_do_not_reach_is_exact_as_ever() -> None:
    """A position beyond 2**40, of a Rope that nobody met."""
    x, at = normal(2, 1, 16, dtype=torch.float32), torch.tensor([2**41, -(2**63)])
    assert_rotated(rotate(x, at, PLAIN), x, at, PLAIN)
