"""A launch of the Triton kernel: how many, when without checks, and what is refused."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from phasor import BackendError, Rope, TensorError
from phasor.torch import Rotation, rotate, rotate_, rotate_qk, rotate_qk_
from phasor.torch._operator import internals as _internals
from phasor.torch._operator import ops
from phasor.torch._operator import triton as triton_backend

from ..torch.torch_arrays import assert_rotated
from .triton_runs import (
    DEVICE,
    HALF,
    TRITON,
    here,
    on_gpu,
    runs_kernels,
)

pytestmark = pytest.mark.usefixtures("small_tensors")


@runs_kernels
def test_query_and_key_go_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """With different numbers of heads and strides; each as if it were alone."""
    q = here(2, 9, 5, 16).transpose(0, 1).contiguous().transpose(0, 1)
    k = here(2, 9, 4, 16, seed=1)[:, :, 1:2]
    places = [3, 1, 4, 1, 5, 9, 2, 6, 70_001]
    options: dict[str, Any] = {"inverse": True, "gain": 1.25, **TRITON}
    alone = [rotate(x, places, HALF, **options) for x in (q, k)]
    launches: list[int] = []
    launch = triton_backend.LaunchPlan.launch

    def counted(self: triton_backend.LaunchPlan, *given: Any) -> None:
        launches.append(1)
        launch(self, *given)

    monkeypatch.setattr(triton_backend.LaunchPlan, "launch", counted)
    together = rotate_qk(q, k, places, HALF, **options)
    assert all(map(torch.equal, alone, together))
    rotate_qk_(q, k, places, HALF, **options)
    assert all(map(torch.equal, (q, k), together))
    assert len(launches) == 2


@runs_kernels
@pytest.mark.parametrize("shape", [(0, 2, 16), (3, 0, 16), (2, 0, 4, 16)])
def test_nothing_is_rotated_to_nothing(shape: tuple[int, ...]) -> None:
    """No token, no head: no launch, no error; and a key without heads leaves the query be."""
    x = here(*shape)
    assert rotate(x, 7, HALF, **TRITON).shape == x.shape
    q, k = here(3, 2, 16), here(3, 0, 16)
    assert torch.equal(rotate_qk(q, k, 7, HALF, **TRITON)[0], rotate(q, 7, HALF, **TRITON))
    assert torch.equal(rotate_qk(k, q, 7, HALF, **TRITON)[1], rotate(q, 7, HALF, **TRITON))


@runs_kernels
def test_rows_of_no_pairs_change_nothing() -> None:
    """A slice of width zero."""
    x, none = here(3, 2, 16), here(3, 0)
    assert torch.equal(Rotation(none, none, pairing="half")(x, **TRITON), x)


@runs_kernels
def test_writing_in_place_is_counted() -> None:
    """Autograd refuses to differentiate with values that were overwritten."""
    x = here(3, 2, 16)
    weight = here(3, 2, 16, seed=1).requires_grad_()
    product = weight * x
    rotate_(x, 5, HALF, **TRITON)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    with torch.inference_mode():
        rotate_(here(3, 2, 16), 5, HALF, **TRITON)


@runs_kernels
def test_a_launch_that_was_made_before_is_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past checks and dispatcher, for other positions."""
    q, k = here(5, 3, 16), here(5, 2, 16, seed=1)
    before, places = torch.arange(5, device=DEVICE), torch.arange(5, device=DEVICE) * 70_001
    rotation, other = Rotation.at(before, HALF), Rotation.at(places, HALF)
    rotation(q, k, **TRITON)
    rotation.rotate_(q.clone(), k.clone(), **TRITON)
    monkeypatch.setattr(ops, "turn", refuse)
    turned = other(q, k, **TRITON)
    for x, y in zip((q, k), turned, strict=True):
        assert_rotated(y.cpu(), x.cpu(), places, HALF)
    versions = q._version, k._version
    other.rotate_(q, k, **TRITON)
    assert all(map(torch.equal, (q, k), turned))
    assert (q._version, k._version) == (versions[0] + 1, versions[1] + 1)


def refuse(*_: Any, **__: Any) -> None:
    """What must not be called."""
    raise AssertionError("the operator was called")


@runs_kernels
@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"q": here(5, 3, 16).requires_grad_()}, id="a gradient"),
        pytest.param({"q": here(5, 3, 16, dtype=torch.float64)}, id="another dtype"),
        pytest.param({"q": here(5, 3, 16)[:, :, ::1].transpose(0, 1)}, id="another shape"),
        pytest.param({"q": here(5, 6, 16)[:, ::2]}, id="other strides"),
        pytest.param({"k": here(5, 4, 16)}, id="other heads"),
        pytest.param({"positions": torch.zeros(4, dtype=torch.int64)}, id="too few positions"),
        pytest.param({"positions": torch.zeros(5, device="meta").long()}, id="another device"),
        pytest.param({"dtype": torch.float64}, id="other cosines"),
        pytest.param({"rope": Rope(head_dim=16, pairing="interleaved")}, id="another rope"),
    ],
)
def test_anything_else_is_checked_first(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan serves what it was made for and nothing else."""
    usual: dict[str, Any] = {"q": here(5, 3, 16), "k": here(5, 2, 16), "rope": HALF, **TRITON}
    usual |= {"positions": torch.arange(5, device=DEVICE), "dtype": torch.float32}

    def turn(q: Any, k: Any, positions: Any, rope: Rope, dtype: Any, backend: str) -> None:
        Rotation.at(positions, rope, dtype=dtype)(q, k, backend=backend)

    turn(**usual)
    monkeypatch.setattr(ops, "turn", refuse)
    turn(**usual)
    with pytest.raises((AssertionError, ValueError)):
        turn(**{**usual, **change})


@runs_kernels
def test_a_plan_is_launched_though_another_thread_forgets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between the line that keeps it and the one that launches it."""

    class Cleared(dict[Any, Any]):
        def __setitem__(self, key: Any, plan: Any) -> None:
            self.clear()

    monkeypatch.setattr(triton_backend, "_PLANS", Cleared())
    x = here(3, 2, 16)
    assert_rotated(rotate(x, [1, 2, 3], HALF, **TRITON).cpu(), x.cpu(), [1, 2, 3], HALF)


class OnDevice(Tensor):
    """A tensor that says it is in a GPU's memory."""

    is_cuda = True


@pytest.mark.parametrize("capturing", [False, True])
def test_constants_that_a_graph_was_captured_with_are_kept(
    capturing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has their address alone."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(_internals, "_captured", set())
    constants = torch.zeros(7, 8, dtype=torch.int32).as_subclass(OnDevice)
    kept = weakref.ref(constants)
    _internals.hold_for_graph(constants)
    del constants
    gc.collect()
    assert (kept() is not None) == capturing


def test_constants_are_28_bytes_a_pair() -> None:
    """On the device once, and those of the latest Ropes alone."""
    ropes = [Rope(head_dim=128, pairing="half", base=100.0 + i).to_json() for i in range(65)]
    cpu = torch.device("cpu")
    first = triton_backend.rope_constants(ropes[0], cpu)
    assert first.nbytes == 64 * 28
    assert triton_backend.rope_constants(ropes[0], cpu) is first
    for rope in ropes[1:]:
        triton_backend.rope_constants(rope, cpu)
    assert triton_backend.rope_constants(ropes[0], cpu) is not first


@runs_kernels
def test_one_tensor_is_not_written_twice() -> None:
    """As query and as key, though two like it were."""
    x = here(5, 2, 16)
    places = torch.arange(5, device=DEVICE)
    rotate_qk_(x, x.clone(), places, HALF, **TRITON)
    with pytest.raises(TensorError, match="two different tensors"):
        rotate_qk_(x, x, places, HALF, **TRITON)


@runs_kernels
def test_slices_of_one_projection_are_written_side_by_side() -> None:
    """Q and k inside one tensor share no element, though their extents overlap."""
    qkv, places = here(2, 5, 8, 16), torch.arange(5, device=DEVICE)
    q, k = qkv[:, :, :4], qkv[:, :, 4:6]
    expected = rotate_qk(q.clone(), k.clone(), places, HALF, **TRITON)
    rotate_qk_(q, k, places, HALF, **TRITON)
    assert all(map(torch.equal, (q, k), expected))


@runs_kernels
@pytest.mark.parametrize("shift", [0, 1, 3])
def test_query_and_key_that_share_memory_are_refused(shift: int) -> None:
    """Heads that both would write, also where others like them were written; nothing is."""
    qkv, places = here(2, 5, 8, 16), torch.arange(5, device=DEVICE)
    q, k = qkv[:, :, :4], qkv[:, :, shift : shift + 2]
    rotate_qk_(q, qkv[:, :, 4:6], places, HALF, **TRITON)
    kept = qkv.clone()
    with pytest.raises(TensorError, match="q and k must not share memory"):
        rotate_qk_(q, k, places, HALF, **TRITON)
    with pytest.raises(TensorError, match="q and k must not share memory"):
        rotate_qk_(q, k.view(torch.bfloat16)[..., ::2], places, HALF, **TRITON)
    assert torch.equal(qkv, kept)


@runs_kernels
@pytest.mark.parametrize(("heads", "meet"), [(5, False), (6, True)])
def test_a_key_may_run_into_the_next_token_but_not_into_its_query(heads: int, meet: bool) -> None:
    """Tokens of 8 heads, of which the query has the third and fourth, the key those after five."""
    memory = here(500)
    q = memory.as_strided((3, 2, 16), (128, 16, 1), 32)
    k = memory.as_strided((3, heads, 16), (128, 16, 1), 80)
    expected = rotate_qk(q, k, 7, HALF, **TRITON)
    if meet:
        with pytest.raises(TensorError, match="q and k must not share memory"):
            rotate_qk_(q, k, 7, HALF, **TRITON)
    else:
        rotate_qk_(q, k, 7, HALF, **TRITON)
        assert all(map(torch.equal, (q, k), expected))


@runs_kernels
def test_overlapping_windows_are_refused() -> None:
    """A view whose tokens overlap would be turned twice; nothing is written."""
    memory = here(100)
    kept = memory.clone()
    with pytest.raises(TensorError, match="x must not share memory with itself"):
        rotate_(memory.as_strided((5, 1, 16), (8, 16, 1)), 3, HALF, **TRITON)
    assert torch.equal(memory, kept)


@runs_kernels
def test_rows_inside_what_is_written_are_refused() -> None:
    """They would change while they are read; beside it they may lie."""
    memory = here(3, 2, 24)
    x, beside = memory[:, :1, :16], here(2, 3, 8)
    Rotation(*beside, pairing="half").rotate_(x, **TRITON)
    kept = memory.clone()
    with pytest.raises(TensorError, match="cos and sin must not share memory with x"):
        Rotation(memory[:, 0, 16:], beside[0], pairing="half").rotate_(x, **TRITON)
    assert torch.equal(memory, kept)


@runs_kernels
def test_the_kernel_compiles_into_a_graph() -> None:
    """`torch.compile` sees one operator and gives its bits."""
    torch._dynamo.reset()
    quick = torch.compile(
        lambda x, p: rotate(x, p, HALF, **TRITON), fullgraph=True, backend="aot_eager"
    )
    x, places = here(5, 2, 16), torch.arange(5, device=DEVICE)
    assert torch.equal(quick(x, places), rotate(x, places, HALF, **TRITON))


@runs_kernels
@pytest.mark.every_kernel
def test_offsets_beyond_2_31_are_followed() -> None:
    """Tokens and heads so far apart that a 32-bit product of index and stride would wrap."""
    far = 2**32 + 64
    memory = torch.empty(far + 64, dtype=torch.bfloat16, device=DEVICE)
    for strides in ((far, 16, 1), (16, far, 1)):
        x = memory.as_strided((2, 2, 16), strides)
        x.copy_(here(2, 2, 16, dtype=torch.bfloat16))
        expected = rotate(x.contiguous(), [5, 7], HALF, **TRITON)
        rotate_(x, [5, 7], HALF, **TRITON)
        assert torch.equal(x, expected)


@on_gpu
def test_a_call_can_be_captured_in_a_graph() -> None:
    """After the first one; new positions are read when the graph runs."""
    q, k = here(64, 8, 128, dtype=torch.bfloat16), here(64, 2, 128, dtype=torch.bfloat16)
    rope = Rope(head_dim=128, pairing="half")
    places = torch.arange(64, device=DEVICE)
    rotate_qk(q, k, places, rope, **TRITON)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = rotate_qk(q, k, places, rope, **TRITON)
    places += 70_001
    graph.replay()
    assert all(map(torch.equal, captured, rotate_qk(q, k, places, rope, **TRITON)))


@on_gpu
def test_nothing_waits_for_the_device() -> None:
    """No call synchronises after the first with integers and with fractions, of any length."""
    x, places = here(64, 8, 128), torch.arange(64, device=DEVICE)
    rope = Rope(head_dim=128, pairing="half")
    rotate(x, places, rope, **TRITON)
    rotate(x, places + 0.5, rope, **TRITON)
    torch.cuda.set_sync_debug_mode("error")
    try:
        rotate(x[:33], places[:33], rope, **TRITON)
        rotate_(x[:33], places[:33] + 0.5, rope, **TRITON)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@runs_kernels
def test_a_named_kernel_needs_memory_it_can_read() -> None:
    """The backend is not replaced where it cannot run."""
    with pytest.raises(BackendError, match="backend='triton' cannot rotate x: it needs a tensor"):
        rotate(torch.zeros(1, 1, 16, device="meta"), 0, HALF, **TRITON)
