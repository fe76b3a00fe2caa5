"""`phasor.torch.positions` makes what `phasor.positions` makes, and nobody waits for a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from phasor import PositionError
from phasor import positions as arrays
from phasor.torch import positions

INTEGERS = [torch.int64, torch.int32, torch.int16, torch.uint8]

#: What is made of tensors: the function, its tensor, and the plain answer.
MADE: dict[str, tuple[Callable[[Tensor], Tensor], list[Any], list[Any]]] = {
    "packed": (lambda t: positions.packed(t, 5), [0, 2, 2, 5], [0, 1, 0, 1, 2]),
    "packed, with room": (lambda t: positions.packed(t, 7), [0, 2, 5], [0, 1, 0, 1, 2, 0, 1]),
    "nothing packed": (lambda t: positions.packed(t, 0), [0], []),
    "padded": (positions.padded, [[0, 0, 1, 1], [1, 0, 1, 0]], [[0, 0, 0, 1], [0, 0, 1, 0]]),
    "cached": (lambda t: positions.cached(t, 2), [7, 0], [[7, 8], [0, 1]]),
    "nothing new": (lambda t: positions.cached(t, 0), [7, 0], [[], []]),
    "every axis": (lambda t: positions.every_axis(t, 2), [3, 5], [[3, 3], [5, 5]]),
}
#: What is made of numbers.
COUNTED: dict[str, tuple[Callable[..., Tensor], list[Any]]] = {
    "span": (lambda **how: positions.span(3, -1, **how), [-1, 0, 1]),
    "grid": (lambda **how: positions.grid(2, 1, 2, **how), arrays.grid(2, 1, 2).tolist()),
    "context parallel": (
        lambda **how: positions.context_parallel(12, 1, 3, "zigzag", **how), [2, 3, 8, 9]
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("name", MADE)
def test_tensors_of_any_integers_give_the_plain_answer(name: str, dtype: torch.dtype) -> None:
    """In int64, where the CPU's memory is looked at."""
    function, values, expected = MADE[name]
    made = function(torch.tensor(values, dtype=dtype))
    assert made.dtype == torch.int64
    assert made.tolist() == expected


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", MADE)
@pytest.mark.compile
def test_a_compiler_makes_the_same_of_what_it_cannot_look_at(name: str, dynamic: bool) -> None:
    """In one graph, which asks no tensor for its numbers."""
    torch._dynamo.reset()
    function, values, expected = MADE[name]
    quick = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    assert quick(torch.tensor(values, dtype=torch.int32)).tolist() == expected
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["fake", "meta"])
@pytest.mark.parametrize("name", MADE)
def test_nothing_asks_a_device_for_a_number(name: str, kind: str) -> None:
    """Tensors without numbers have shapes all the same: whoever asked would be refused."""
    function, values, expected = MADE[name]
    if kind == "fake":
        with FakeTensorMode():
            made = function(torch.empty(np.shape(values), dtype=torch.int32))
        assert isinstance(made, FakeTensor)
    else:
        made = function(torch.empty(np.shape(values), dtype=torch.int32, device="meta"))
        assert made.is_meta
    assert list(made.shape) == list(np.shape(expected))
    assert made.dtype == torch.int64


@pytest.mark.parametrize("name", COUNTED)
def test_numbers_are_counted_on_the_device(name: str) -> None:
    """Torch's default where none is named."""
    function, expected = COUNTED[name]
    assert function().tolist() == expected
    assert function(device="meta").is_meta
    assert list(function(device="meta").shape) == list(np.shape(expected))
    with torch.device("meta"):
        assert function().is_meta


@pytest.mark.compile
def test_the_length_of_a_compiled_span_stays_a_symbol() -> None:
    """One graph for every length."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        quick = torch.compile(
            lambda x: (positions.span(x.shape[0], 4), positions.cached(x[:2], x.shape[0])),
            fullgraph=True, dynamic=True, backend="aot_eager",
        )  # fmt: skip
        for length in (3, 5, 9):
            spans, rows = quick(torch.zeros(length, dtype=torch.int64))
            assert spans.tolist() == list(range(4, 4 + length))
            assert rows.tolist() == [list(range(length))] * 2
    torch._dynamo.reset()


@given(lengths=st.lists(st.integers(0, 5), max_size=6))
def test_a_pack_is_that_of_arrays(lengths: list[int]) -> None:
    """Empty sequences included, with and without the number of its tokens."""
    bounds = np.cumsum([0, *lengths]).astype(np.int32)
    expected = arrays.packed(bounds).tolist()
    assert positions.packed(torch.from_numpy(bounds)).tolist() == expected
    assert positions.packed(torch.from_numpy(bounds), sum(lengths)).tolist() == expected


@given(lengths=st.lists(st.integers(-9, 9), max_size=4), new=st.integers(0, 4))
def test_what_follows_a_cache_is_that_of_arrays(lengths: list[int], new: int) -> None:
    """Rows padded on the left included."""
    made = positions.cached(torch.tensor(lengths, dtype=torch.int32), new)
    assert made.tolist() == arrays.cached(lengths, new).tolist()


@given(
    mask=st.integers(0, 6).flatmap(
        lambda n: st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=1, max_size=3)
    )
)
def test_padding_is_that_of_arrays(mask: list[list[bool]]) -> None:
    """A mask of bools."""
    made = positions.padded(torch.tensor(mask, dtype=torch.bool))
    assert made.tolist() == arrays.padded(mask).tolist()


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a list": (lambda: positions.packed([0, 2]), "phasor.positions takes lists and arrays"),
    "an array": (lambda: positions.padded(np.ones(2, int)), "got ndarray"),
    "floats": (lambda: positions.padded(torch.ones(2)), "mask must hold whole numbers"),
    "bools": (lambda: positions.cached(torch.ones(2, dtype=torch.bool), 1), "torch.bool"),
    "no boundaries": (
        lambda: positions.packed(torch.zeros(0, dtype=torch.int32)), "[n_sequences + 1], got [0]"
    ),
    "boundaries that fall": (lambda: positions.packed(torch.tensor([0, 3, 2]), 3), "decrease"),
    "a pack cut short": (
        lambda: positions.packed(torch.tensor([0, 3]), 2),
        "total_tokens must be at least cu_seqlens[-1] (3), got 2",
    ),
    "a length to be waited for": (
        lambda: positions.packed(torch.zeros(2, dtype=torch.int32, device="meta")),
        "total_tokens must be given for cu_seqlens on meta, so that the host does not wait for it",
    ),
    "a mask of more": (lambda: positions.padded(torch.tensor([1, 2])), "only 0 (padding) and 1"),
    "one mask": (lambda: positions.padded(torch.tensor(1)), "mask must have the shape [..., seq]"),
    "a length of its own": (
        lambda: positions.cached(torch.tensor(1), 1), "shape [batch], got a single value"
    ),
    "past the last": (lambda: positions.cached(torch.tensor([2**63 - 1]), 2), "at most 2**63 - 1"),
    "half a token": (lambda: positions.cached(torch.tensor([1]), 0.5), "new_tokens must be"),
    "a span beyond": (lambda: positions.span(3, 2**63 - 2), "at most 2**63 - 1"),
    "no axis": (lambda: positions.grid(), "sizes must name at least one axis"),
    "less than a cell": (lambda: positions.grid(2, -1), "sizes[1] must be a whole number"),
    "a token without an axis": (
        lambda: positions.every_axis(torch.tensor(1), 2), "positions must have the shape"
    ),
    "no such rank": (lambda: positions.context_parallel(8, 2, 2, "zigzag"), "rank must be below"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_meant_is_refused(name: str) -> None:
    """With the words that say what was expected and what came."""
    call, said = REFUSED[name]
    with pytest.raises(PositionError) as caught:
        call()
    assert said in str(caught.value)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("name", "rest"), [("packed", ()), ("padded", ()), ("cached", (1,)), ("every_axis", (2,))]
)
def test_arrays_say_where_tensors_are_taken(name: str, rest: tuple[Any, ...], device: str) -> None:
    """On any device alike, and for what is made of a tensor too."""
    for values in (
        torch.zeros(3, dtype=torch.int32, device=device),
        torch.nn.Parameter(torch.zeros(3, dtype=torch.int64, device=device), requires_grad=False),
    ):
        with pytest.raises(PositionError, match=r"got a torch tensor; phasor\.torch\.positions"):
            getattr(arrays, name)(values, *rest)


def test_arrays_promise_of_tensors_what_there_is() -> None:
    """A processor's tensors have no function of their own, and the error says what to give."""
    with pytest.raises(PositionError) as caught:
        arrays.processed(torch.tensor([[0, 1, 0]]), torch.tensor([[1, 2, 2]]))
    named, way_out = (
        str(caught.value).split("phasor.torch.positions has ")[1].split(" for tensors; ")
    )
    assert all(hasattr(positions, name) for name in named.replace(" and", ",").split(", "))
    assert way_out == "otherwise pass tensor.numpy()"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a GPU")
@pytest.mark.parametrize("name", MADE)
def test_a_gpu_makes_them_without_a_synchronisation(name: str) -> None:
    """Torch raises where the host would wait."""
    function, values, expected = MADE[name]
    there = torch.tensor(values, dtype=torch.int32, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        made = function(there)
        counted = [one(device="cuda") for one, _ in COUNTED.values()]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert made.is_cuda
    assert made.tolist() == expected
    assert [one.tolist() for one in counted] == [plain for _, plain in COUNTED.values()]
