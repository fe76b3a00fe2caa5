"""In place, no element is written twice: whoever rotates, and whether or not a graph records it."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from phasor import Rope
from phasor.errors import TensorError
from phasor.torch import rotate, rotate_, rotate_qk_
from phasor.torch._operator.in_place import qk_memory

from ..torch_arrays import normal

ROPE = Rope(head_dim=16, pairing="half")
PLACES = torch.arange(5)
BACKENDS = ["auto", "eager"]
MEMORY = torch.zeros(4096, dtype=torch.uint8)


def addresses(x: Tensor) -> set[int]:
    """Every byte that belongs to an element, one by one."""
    found = set[int]()
    for index in product(*map(range, x.shape)):
        start = x.data_ptr() + x.element_size() * sum(
            i * step for i, step in zip(index, x.stride(), strict=True)
        )
        found |= set(range(start, start + x.element_size()))
    return found


@st.composite
def nests(draw: st.DrawFn) -> Tensor:
    """A view of the memory whose dimensions nest, in any order, with gaps between them."""
    shape = draw(st.lists(st.integers(1, 4), min_size=3, max_size=4))
    strides, reach = list[int](), 1
    for n in shape:
        strides.append(reach)
        reach *= n * draw(st.sampled_from([1, 1, 1, 2, 3]))
    order = draw(st.permutations(range(len(shape))))
    dtype = draw(st.sampled_from([torch.float32, torch.float16]))
    start = draw(st.integers(0, 40))
    size = [shape[i] for i in order], [strides[i] for i in order], start
    room = start + sum((n - 1) * step for n, step in zip(*size[:2], strict=True)) + 1
    if room * dtype.itemsize > len(MEMORY):
        return MEMORY.view(dtype).as_strided((1, 1, 1), (1, 1, 1), start)
    return MEMORY.view(dtype).as_strided(*size)


@given(nests(), nests(), st.integers(0, 60))
def test_two_views_meet_where_a_byte_is_in_both(q: Tensor, k: Tensor, start: int) -> None:
    """Of layouts that have nothing in common, and of two alike: the sets of addresses decide."""
    pairs = [(q, k)]
    if start + q.numel() * 4 < len(MEMORY) // q.element_size():
        room = q.untyped_storage().nbytes() // q.element_size() - start
        if sum((n - 1) * s for n, s in zip(q.shape, q.stride(), strict=True)) < room:
            pairs.append((q, q.as_strided(q.shape, q.stride(), start)))
    for one, other in pairs:
        meet = qk_memory(one, other).overlaps(one.data_ptr(), other.data_ptr())
        assert meet == bool(addresses(one) & addresses(other))


@pytest.mark.parametrize("backend", BACKENDS)
def test_heads_of_query_key_and_value_in_turn_are_written(backend: str) -> None:
    """As GPT-NeoX lays one projection out: interwoven, and nothing shared."""
    qkv = normal(2, 5, 4, 3, 16)
    q, k, v = qkv.clone().unbind(-2)
    rotate_qk_(q, k, PLACES, ROPE, backend=backend)
    for turned, plain in zip((q, k), qkv.unbind(-2), strict=False):
        assert torch.equal(turned, rotate(plain, PLACES, ROPE, backend=backend))
    assert torch.equal(v, qkv[..., 2, :])


def recorded(x: Tensor, *, gradient: bool) -> Tensor:
    """``x``, or the same numbers with a history, which in-place verbs copy into."""
    return x.clone().requires_grad_() * 1 if gradient else x.clone()


@pytest.mark.parametrize("gradient", [False, True], ids=["plain", "recorded"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_overlapping_windows_are_refused(backend: str, gradient: bool) -> None:
    """A view whose tokens overlap would be turned twice; nothing is written."""
    memory = recorded(normal(100), gradient=gradient)
    kept = memory.detach().clone()
    windows = memory.as_strided((5, 1, 16), (8, 16, 1))
    with pytest.raises(TensorError, match="x must not share memory with itself"):
        rotate_(windows, PLACES, ROPE, backend=backend)
    assert torch.equal(memory.detach(), kept)


@pytest.mark.parametrize("gradient", [False, True], ids=["plain", "recorded"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shift", [0, 1, 3])
def test_a_head_of_query_and_key_is_refused(shift: int, backend: str, gradient: bool) -> None:
    """Both would write it; nothing is written."""
    qkv = recorded(normal(2, 5, 8, 16), gradient=gradient)
    kept = qkv.detach().clone()
    with pytest.raises(TensorError, match="q and k must not share memory"):
        rotate_qk_(qkv[:, :, :4], qkv[:, :, shift : shift + 2], PLACES, ROPE, backend=backend)
    assert torch.equal(qkv.detach(), kept)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_written_where_there_is_nothing(backend: str) -> None:
    """An empty view shares no element, whatever its strides say."""
    empty = torch.zeros(1, 2, 16).expand(5, 2, 16)[:, :0]
    assert rotate_(empty, PLACES, ROPE, backend=backend) is empty


def test_the_search_ends() -> None:
    """Strides without an order have too many ways to meet; then they are said to."""
    memory = torch.zeros(1 << 19)
    q = memory.as_strided([8] * 4, [4944, 5208, 5196, 3726])
    k = memory.as_strided([8] * 4, [6540, 7230, 6320, 7660], 4966)
    assert qk_memory(q, k).overlaps(q.data_ptr(), k.data_ptr())
