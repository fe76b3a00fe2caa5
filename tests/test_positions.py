"""Tokens stand where plain loops say they stand, however a batch is laid out."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasor.errors import PositionError
from phasor.positions import (
    Positions,
    cached,
    context_parallel,
    every_axis,
    grid,
    packed,
    padded,
    span,
)

LAYOUTS = ["contiguous", "zigzag"]
INT64 = st.integers(-(2**63), 2**63 - 1)


def assert_positions(actual: Positions, expected: object) -> None:
    """int64, and equal to nested lists of Python ints in shape and in every entry."""
    assert actual.dtype == np.int64
    assert actual.tolist() == expected


@given(length=st.integers(0, 50), start=INT64)
def test_a_span_counts_up_from_its_start(length: int, start: int) -> None:
    """Any start works, up to the last int64."""
    start = min(start, 2**63 - max(length, 1))
    assert_positions(span(length, start), list(range(start, start + length)))


def test_a_span_may_end_at_the_last_int64() -> None:
    """The edge of the range is inside it."""
    assert_positions(span(2, 2**63 - 2), [2**63 - 2, 2**63 - 1])


@given(lengths=st.lists(st.integers(0, 9), max_size=8))
def test_a_pack_counts_each_sequence_from_zero(lengths: list[int]) -> None:
    """The pack is the sequences' own positions end to end, empty sequences included."""
    boundaries = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert_positions(packed(boundaries), [j for n in lengths for j in range(n)])


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "uint64"])
def test_boundaries_of_any_integer_dtype_give_the_same_pack(dtype: str) -> None:
    """The kernels' int32 boundaries come out as int64 positions."""
    assert_positions(packed(np.array([0, 2, 2, 5], dtype=dtype)), [0, 1, 0, 1, 2])


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        pytest.param([[0, 0, 1, 1, 1]], [[0, 0, 0, 1, 2]], id="left"),
        pytest.param([[1, 1, 1, 0, 0]], [[0, 1, 2, 0, 0]], id="right"),
        pytest.param([[0, 1, 0, 0, 1, 1, 0]], [[0, 0, 0, 0, 1, 2, 0]], id="holes"),
        pytest.param([[0, 0], [1, 1]], [[0, 0], [0, 1]], id="a row of padding alone"),
        pytest.param([False, True, True], [0, 0, 1], id="bools, no batch"),
        pytest.param([[[1, 1]], [[0, 1]]], [[[0, 1]], [[0, 0]]], id="two batch axes"),
        pytest.param([], [], id="no tokens"),
        pytest.param(np.array([[0, 1, 1]], dtype=np.uint8), [[0, 0, 1]], id="uint8"),
    ],
)
def test_padding_takes_no_positions(mask: object, expected: object) -> None:
    """Real tokens count from 0 in each row, and padding is at 0."""
    assert_positions(padded(mask), expected)


@given(
    rows=st.integers(0, 9).flatmap(
        lambda n: st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=1, max_size=4)
    )
)
def test_real_tokens_of_a_padded_row_stand_as_if_alone(rows: list[list[bool]]) -> None:
    """With the padding dropped a row is the span of its own length; the rest is 0."""
    positions = padded(rows)
    for row, mask in zip(positions.tolist(), rows, strict=True):
        assert [p for p, real in zip(row, mask, strict=True) if real] == list(range(sum(mask)))
        assert not any(p for p, real in zip(row, mask, strict=True) if not real)


@given(lengths=st.lists(st.integers(-(2**63), 2**63 - 6), max_size=5), new=st.integers(0, 6))
def test_new_tokens_follow_each_row_of_the_cache(lengths: list[int], new: int) -> None:
    """Each row goes on where its own cache ends."""
    assert_positions(cached(lengths, new), [[n + j for j in range(new)] for n in lengths])


@given(sizes=st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_a_grid_runs_through_its_cells_in_row_major_order(sizes: list[int]) -> None:
    """The last axis runs fastest, and a grid without cells still has its axes."""
    cells = grid(*sizes)
    assert cells.shape[1] == len(sizes)
    assert_positions(cells, [list(cell) for cell in itertools.product(*map(range, sizes))])


@given(positions=st.lists(INT64, max_size=6), n_axes=st.integers(1, 4))
def test_text_stands_at_the_same_position_on_every_axis(positions: list[int], n_axes: int) -> None:
    """Every coordinate of a token is its position."""
    assert_positions(every_axis(positions, n_axes), [[p] * n_axes for p in positions])


def test_axes_come_after_all_leading_dimensions() -> None:
    """A batch of rows keeps its shape in front of the new axis."""
    assert_positions(every_axis([[4, 5], [6, 7]], 2), [[[4, 4], [5, 5]], [[6, 6], [7, 7]]])


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        pytest.param("contiguous", [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]], id="contiguous"),
        pytest.param("zigzag", [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]], id="zigzag"),
    ],
)
def test_ranks_hold_the_chunks_of_their_layout(layout: str, expected: list[list[int]]) -> None:
    """Twelve tokens on three ranks, written out."""
    for rank, positions in enumerate(expected):
        assert_positions(context_parallel(12, rank, 3, layout), positions)


@pytest.mark.parametrize("layout", LAYOUTS)
@given(size=st.integers(0, 5), world_size=st.integers(1, 6))
def test_all_ranks_together_hold_every_position_once(
    layout: str, size: int, world_size: int
) -> None:
    """Nothing is lost, nothing is held twice, and every rank holds as much."""
    length = 2 * world_size * size
    shards = [context_parallel(length, r, world_size, layout) for r in range(world_size)]
    assert {shard.size for shard in shards} == {2 * size}
    assert sorted(np.concatenate(shards).tolist()) == list(range(length))
    assert all((np.diff(shard) > 0).all() for shard in shards)


@given(size=st.integers(1, 5), world_size=st.integers(1, 6))
def test_zigzag_ranks_share_a_causal_mask_evenly(size: int, world_size: int) -> None:
    """A query at ``p`` reads ``p + 1`` keys; every rank has the same number to read."""
    length = 2 * world_size * size
    reads = {
        sum(p + 1 for p in context_parallel(length, r, world_size, "zigzag").tolist())
        for r in range(world_size)
    }
    assert reads == {length * (length + 1) // 2 // world_size}


@pytest.mark.parametrize(
    ("place", "given_values"),
    [
        pytest.param(packed, [0, 2, 3], id="packed"),
        pytest.param(padded, [0, 1, 1], id="padded"),
        pytest.param(lambda lengths: cached(lengths, 1), [3, 0], id="cached"),
        pytest.param(lambda positions: every_axis(positions, 2), [5, 6], id="every_axis"),
    ],
)
def test_what_is_passed_in_is_neither_written_nor_shared(
    place: Callable[[Positions], Positions], given_values: list[int]
) -> None:
    """Filling the result with something else leaves the argument as it was."""
    argument = np.array(given_values)
    place(argument)[...] = -7
    assert argument.tolist() == given_values


MOST = f"must be at most {2**60 - 1}, as many positions as an array holds, got"
WHOLE = "must hold whole numbers that fit in int64, got dtype"
MASK = "mask must hold only 0 (padding) and 1 (token), got"
NUMBERED = "if it numbers packed sequences, give their boundaries instead, as cu_seqlens"
ERRORS = {
    "length must be a whole number >= 0, got -3": lambda: span(-3),
    "length must be a whole number >= 0, got True": lambda: span(True),
    "length must be a whole number >= 0, got 2.5": lambda: span(2.5),
    "start must be a whole number >= -9223372036854775808, got '7'": lambda: span(2, "7"),
    "start + length - 1 must be at most 2**63 - 1, got 9223372036854775806 + 3 - 1": (
        lambda: span(3, 2**63 - 2)
    ),
    f"length {MOST} {2**62}": lambda: span(2**62),
    f"cu_seqlens[-1] {MOST} {2**60}": lambda: packed([0, 2**60]),
    f"new_tokens {MOST} {2**62}": lambda: cached([1], 2**62),
    f"the product of sizes {MOST} {2**80}": lambda: grid(2**40, 2**40),
    "cu_seqlens must have the shape [n_sequences + 1], got [2, 2]": (
        lambda: packed([[0, 1], [0, 2]])
    ),
    "cu_seqlens must start with 0, got none": lambda: packed([]),
    "cu_seqlens must start with 0, got 2": lambda: packed([2, 5]),
    "cu_seqlens must never decrease, got 5 and then 3 at index 2; "
    "lengths become boundaries by a cumulative sum": lambda: packed([0, 5, 3]),
    f"cu_seqlens {WHOLE} float64": lambda: packed([0.0, 2.0]),
    f"cu_seqlens {WHOLE} bool": lambda: packed([False, True]),
    f"cu_seqlens {WHOLE} uint64": lambda: packed(np.array([0, 2**63], dtype=np.uint64)),
    "cu_seqlens must be rectangular, got [[0], [0, 1]]": lambda: packed([[0], [0, 1]]),
    f"{MASK} 2; {NUMBERED}": lambda: padded([1, 1, 2]),
    f"{MASK} -1; {NUMBERED}": lambda: padded([[0, 1], [-1, 1]]),
    f"mask {WHOLE} float64": lambda: padded([[0.0, float("-inf")]]),
    "mask must have the shape [..., seq], got a single value": lambda: padded(1),
    "lengths must have the shape [batch], got a single value": lambda: cached(4, 1),
    "new_tokens must be a whole number >= 0, got 0.5": lambda: cached([4], 0.5),
    "lengths + new_tokens - 1 must be at most 2**63 - 1, got 9223372036854775807 + 2 - 1": (
        lambda: cached([0, 2**63 - 1], 2)
    ),
    "sizes must name at least one axis, got none": lambda: grid(),
    "sizes[0] must be a whole number >= 0, got (2, 3)": lambda: grid((2, 3)),
    "sizes[1] must be a whole number >= 0, got -1": lambda: grid(2, -1),
    "n_axes must be a whole number >= 1, got 0": lambda: every_axis([1], 0),
    f"positions {WHOLE} float64": lambda: every_axis([0.5], 3),
    "positions must have the shape [..., seq], got a single value": lambda: every_axis(3, 3),
    "rank must be below world_size (2), got 2": lambda: context_parallel(8, 2, 2, "zigzag"),
    "rank must be a whole number >= 0, got -1": lambda: context_parallel(8, -1, 2, "zigzag"),
    "world_size must be a whole number >= 1, got 0": lambda: context_parallel(8, 0, 0, "zigzag"),
    "layout must be 'contiguous' or 'zigzag', got 'striped'": (
        lambda: context_parallel(8, 0, 2, "striped")
    ),
    "length must be a multiple of 8, the chunks of the zigzag layout on 4 ranks, got 10; "
    "pad the sequence to 16": lambda: context_parallel(10, 0, 4, "zigzag"),
    "length must be a multiple of 4, the chunks of the contiguous layout on 4 ranks, got 10; "
    "pad the sequence to 12": lambda: context_parallel(10, 0, 4, "contiguous"),
}


@pytest.mark.parametrize("message", ERRORS)
def test_an_argument_that_means_nothing_is_refused_by_name(message: str) -> None:
    """Each error names the argument, what was expected and what came."""
    with pytest.raises(PositionError) as caught:
        ERRORS[message]()
    assert str(caught.value) == message


@given(length=st.integers(0, 200), world_size=st.integers(1, 9), layout=st.sampled_from(LAYOUTS))
def test_the_length_an_error_asks_for_is_accepted(
    length: int, world_size: int, layout: str
) -> None:
    """Padding to the length that the message names is the way out, and the shortest one."""
    chunks = world_size if layout == "contiguous" else 2 * world_size
    longer = next(n for n in range(length, length + chunks) if n % chunks == 0)
    assert context_parallel(longer, 0, world_size, layout).size * world_size == longer
    if longer != length:
        with pytest.raises(PositionError, match=f"pad the sequence to {longer}$"):
            context_parallel(length, 0, world_size, layout)
