"""Norm and rotation in one: plain torch, and Triton on a GPU or interpreted.

With it, what both fused functions share: their operators, compilers and graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from phasor import Rope
from phasor.axes import Sectioned
from phasor.errors import BackendError, PhasorError, PositionError, SpecError, TensorError
from phasor.scaling import DynamicNTK
from phasor.torch.backends.triton import fused as triton_fused
from phasor.torch.backends.triton import launching as triton_launching
from phasor.torch.fused import norm_rotate_qk, rotate_and_cache_

from ..gpu.triton_runs import (
    APART,
    DEVICE,
    RUN_BY,
    TRITON,
    convert_as_devices_do,
    runs_kernels,
)
from .fused_cases import BACKENDS, HALF, ROPES, assert_normed, once
from .torch_oracle import normal

THREE = Rope(head_dim=8, pairing="half", axes=Sectioned((2, 1, 1)))
PLACES = [0, 1023, 70_001, -5, 2**39 + 7]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter rounds as devices do; a backward pass has more tiles than programs."""
    if RUN_BY:
        convert_as_devices_do(monkeypatch)
        monkeypatch.setattr(triton_fused, "_MOST_PROGRAMS", 2)


@pytest.fixture(params=[1, 2**20], ids=["many tokens", "few tokens"])
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both tiles."""
    monkeypatch.setattr(triton_launching, "MANY_TOKENS", request.param)


def here(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Standard normal numbers where the kernels run."""
    return normal(*shape, dtype=dtype, seed=seed).to(DEVICE)


def weights_of(width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of a query and of a key: neither alike nor all of one sign."""
    ramp = torch.linspace(-0.5, 2.0, width)
    return ramp.to(dtype).to(DEVICE), ramp.flip(0).to(dtype).to(DEVICE)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_and_rotation_are_right_pair_by_pair(
    dtype: torch.dtype, rope: Rope, backend: str
) -> None:
    """Near and far, with a gain, for a query and a key of their own weights and heads."""
    q = here(len(PLACES), 3, rope.head_dim, dtype=dtype)
    k = 1e-2 * here(len(PLACES), 2, rope.head_dim, dtype=dtype, seed=1)
    qw, kw = weights_of(rope.head_dim, dtype)
    for gain, norm_eps in ((1.0, 1e-6), (1.25, 1e-4)):
        options: dict[str, Any] = {"gain": gain, "norm_eps": norm_eps}
        q2, k2 = norm_rotate_qk(q, k, qw, kw, PLACES, rope, backend=backend, **options)
        assert q2.dtype == k2.dtype == dtype
        assert_normed(q2, q, qw, PLACES, rope, **options)
        assert_normed(k2, k, kw, PLACES, rope, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [1, 5, 40])
@pytest.mark.usefixtures("tile")
def test_norm_is_right_in_every_tile(heads: int, backend: str) -> None:
    """More heads than a tile and fewer, tokens that do not fill one, in two batches."""
    rope = Rope(head_dim=16, pairing="half")
    q, k = here(2, 7, heads, 16), here(2, 7, 1, 16, seed=1)
    qw, kw = weights_of(16, torch.float32)
    places = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]]
    q2, k2 = norm_rotate_qk(q, k, qw, kw, places, rope, norm_eps=1e-6, backend=backend)
    assert_normed(q2, q, qw, places, rope)
    assert_normed(k2, k, kw, places, rope)


POSITIONS: dict[str, tuple[Rope, Any]] = {
    "scalar": (HALF, 11),
    "fractions": (HALF, [0.5, -3.25, 70_000.125, 7.0, 2.0]),
    "three axes": (THREE, [[1, 2, 3], [9, 9, 9], [0, 70_001, 4], [5, 5, 5], [6, 7, -8]]),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("rope", "places"), POSITIONS.values(), ids=POSITIONS)
def test_norm_takes_every_kind_of_position(rope: Rope, places: Any, backend: str) -> None:
    """As the rotation does."""
    q, k = here(5, 3, 8), here(5, 1, 8, seed=1)
    qw, kw = weights_of(8, torch.float32)
    q2, k2 = norm_rotate_qk(q, k, qw, kw, places, rope, norm_eps=1e-6, backend=backend)
    assert_normed(q2, q, qw, places, rope)
    assert_normed(k2, k, kw, places, rope)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads first": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "cut from rows": lambda x: torch.cat([x, x, x], -1)[..., 8:16],
    "every second token": lambda x: x.repeat_interleave(2, 2)[:, :, ::2],
    "tokens in three strides": lambda x: (
        x.permute(2, 1, 0, 3, 4).contiguous().permute(2, 1, 0, 3, 4)
    ),
    "one row for all": lambda x: x[:1, :1, :1].expand(2, 3, 5, -1, -1),
    "columns apart": lambda x: x.transpose(3, 4).contiguous().transpose(3, 4),
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lay_out", LAYOUTS.values(), ids=LAYOUTS)
def test_norm_reads_memory_however_it_lies(
    lay_out: Callable[[Tensor], Tensor], backend: str
) -> None:
    """And writes tensors of the strides that torch gives a tensor like that; backwards too."""
    q, k = (lay_out(here(2, 3, 5, heads, 8, seed=heads)) for heads in (3, 2))
    qw, kw = weights_of(8, torch.float32)
    places = torch.arange(30, device=DEVICE).reshape(2, 3, 5) * 11
    leaves = [x.detach().requires_grad_() for x in (q, k, qw, kw)]
    ys = norm_rotate_qk(*leaves, places, HALF, norm_eps=1e-6, backend=backend)
    for y, x, w in zip(ys, (q, k), (qw, kw), strict=True):
        assert_normed(y.detach(), x, w, places.cpu(), HALF)
        assert y.stride() == torch.empty_like(x).stride()
    grads = [lay_out(here(*y.shape, seed=7 + i)) for i, y in enumerate(ys)]
    came = torch.autograd.grad(ys, leaves, grads)
    wide = [x.detach().cpu().double().requires_grad_() for x in leaves]
    exact = norm_rotate_qk(*wide, places.cpu(), HALF, norm_eps=1e-6, backend="eager")
    right = torch.autograd.grad(exact, wide, [g.cpu().double() for g in grads])
    for a, b in zip(came, right, strict=True):
        # a weight's gradient sums 90 products, each some thirty roundings from exact
        assert float((a.cpu() - b).abs().max()) <= (90 + 30) * 2**-24 * float(b.abs().max())


@once
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_the_gradient_of_the_definition_is_numerically_right(rope: Rope) -> None:
    """Of query, key and both weights."""
    q, k = (normal(3, heads, rope.head_dim, dtype=torch.float64, seed=heads) for heads in (2, 1))
    weights = (normal(rope.head_dim, dtype=torch.float64, seed=seed) for seed in (3, 4))
    leaves = [x.requires_grad_() for x in (q, k, *weights)]

    def function(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return norm_rotate_qk(
            *tensors, [5, -3, 70_001], rope, norm_eps=1e-3, gain=1.5, backend="eager"
        )

    assert gradcheck(function, leaves)


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_whose_squares_are_subnormal_have_a_norm(dtype: torch.dtype) -> None:
    """Which they lose where a square root takes such numbers for 0."""
    # in float32 this is none, and unlike 0.0 its bits are more than 32, to which the interpreter
    # cuts what fits in them
    options: dict[str, Any] = {"norm_eps": 1e-60}
    x, w = (here(5, 3, 8, dtype=dtype) * 2.0**-64).requires_grad_(), here(8, dtype=dtype, seed=1)
    grad = here(5, 3, 8, dtype=dtype, seed=2) * 2.0**-64
    # the interpreter warns of what it computes for heads that a tile has and a tensor has not
    with np.errstate(divide="ignore", invalid="ignore"):
        y, _ = norm_rotate_qk(x, x, w, w, 0, HALF, **options, **TRITON)
        (came,) = torch.autograd.grad(y, x, grad)
    exact = x.detach().cpu().double().requires_grad_()
    w64 = w.cpu().double()
    right, _ = norm_rotate_qk(exact, exact, w64, w64, 0, HALF, **options, backend="eager")
    (wanted,) = torch.autograd.grad(right, exact, grad.cpu().double())
    # eight squares and their sum are each off by half of 2**-149, of which the root takes half; the
    # gradient has the root's inverse three times, and there are fewer than 32 other roundings
    lost = 2.0**-147 / float(exact.detach().square().sum(-1).min())
    eps = torch.finfo(dtype).eps + 3 * lost + 32 * 2.0**-24
    assert lost < 2.0**-16
    assert bool(((y.cpu().double() - right).abs() <= eps * right.abs().max()).all())
    assert bool(((came.cpu().double() - wanted).abs() <= eps * wanted.abs().max()).all())


@runs_kernels
@pytest.mark.parametrize("lead", [(3, 0, 2), (2, 0, 3), (0, 4, 5), (2, 3, 0)])
def test_no_tokens_in_any_number_of_dimensions(lead: tuple[int, ...]) -> None:
    """Have no norm, and are a result of their shape; and so are no heads in any order."""
    q, w = here(*lead, 2, 8), here(8)
    y, _ = norm_rotate_qk(q, q, w, w, torch.arange(lead[-1]), HALF, norm_eps=1e-6, **TRITON)
    assert y.shape == q.shape
    none = torch.empty(4, 3, 2, 0, 8, device=DEVICE).permute(1, 0, 2, 3, 4)
    k = here(3, 4, 2, 2, 8)
    y, turned = norm_rotate_qk(none, k, w, w, 5, HALF, norm_eps=1e-6, **TRITON)
    assert y.shape == none.shape
    assert torch.equal(turned, norm_rotate_qk(k, k, w, w, 5, HALF, norm_eps=1e-6, **TRITON)[1])


@runs_kernels
@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        pytest.param(
            dtype,
            name,
            marks=() if (i + j) % 4 == 0 else pytest.mark.every_kernel,
            id=f"{dtype}-{name}",
        )
        for i, dtype in enumerate(DTYPES)
        for j, name in enumerate(ROPES)
    ],
)
@pytest.mark.usefixtures("tile")
def test_the_kernels_gradient_is_the_definitions(dtype: torch.dtype, name: str) -> None:
    """Computed in float64 from the same numbers; and the same bits again when it is asked again."""
    rope = ROPES[name]
    tensors = [here(2, 7, heads, rope.head_dim, dtype=dtype, seed=heads) for heads in (5, 2)]
    tensors += weights_of(rope.head_dim, dtype)
    grads = [here(*x.shape, dtype=dtype, seed=9 + i) for i, x in enumerate(tensors[:2])]
    places = torch.arange(7) * 10_001

    def gradients(backend: str, kind: torch.dtype, device: Any) -> list[Tensor]:
        leaves = [x.detach().to(device, kind).requires_grad_() for x in tensors]
        options: dict[str, Any] = {"norm_eps": 1e-6, "gain": 0.75, "backend": backend}
        ys = norm_rotate_qk(*leaves, places.to(device), rope, **options)
        return list(torch.autograd.grad(ys, leaves, [g.to(device, kind) for g in grads]))

    came = gradients("triton", dtype, DEVICE)
    again = gradients("triton", dtype, DEVICE)
    right = gradients("eager", torch.float64, "cpu")
    # rounding of the result, and of float32 sums over 14 tokens, 5 heads and a head's width
    eps = torch.finfo(dtype).eps + 100 * (0 if dtype == torch.float64 else 2.0**-23) + 1e-13
    for a, b, c in zip(came, right, again, strict=True):
        assert a.dtype == dtype
        assert float((a.cpu().double() - b).abs().max()) <= eps * float(b.abs().max())
        assert torch.equal(a, c)


@once
def test_backward_keeps_what_came_in() -> None:
    """No normalised tensor, no row of cos and sin."""
    q, k = normal(4, 2, 8).requires_grad_(), normal(4, 1, 8).requires_grad_()
    qw, kw = torch.ones(8), torch.ones(8)
    places = torch.arange(4)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.append(x.data_ptr()) or x, lambda x: x
    ):
        norm_rotate_qk(q, k, qw, kw, places, HALF, norm_eps=1e-6)
    assert set(kept) == {x.data_ptr() for x in (q, k, qw, kw, places)}


@once
def test_a_second_derivative_is_refused_and_torch_func_has_it() -> None:
    """Never a wrong number: by name, with the way out, which works."""
    q, k, w = normal(4, 2, 8, dtype=torch.float64), normal(4, 1, 8, dtype=torch.float64), None
    w = torch.ones(8, dtype=torch.float64)

    def loss(x: Tensor) -> Tensor:
        return norm_rotate_qk(x, k, w, w, 3, HALF, norm_eps=1e-6)[0].pow(3).sum()

    leaf = q.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(leaf), leaf)
    assert torch.allclose(torch.func.grad(loss)(q), first, atol=1e-12)
    with pytest.raises(RuntimeError, match=r"differentiable once; torch\.func"):
        torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    direction = torch.ones_like(q)
    _, second = torch.func.jvp(torch.func.grad(loss), (q,), (direction,))
    step = 1e-6
    finite = (torch.func.grad(loss)(q + step * direction) - torch.func.grad(loss)(q)) / step
    assert torch.allclose(second, finite, atol=1e-3)


@once
def test_norm_batches_under_vmap() -> None:
    """Each is normed and rotated as if it were alone."""
    xs = normal(3, 4, 2, 8)
    w = torch.linspace(0.5, 1.5, 8)

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return norm_rotate_qk(x, x[:, :1], w, w, torch.arange(4), HALF, norm_eps=1e-6)

    batched = torch.func.vmap(both)(xs)
    for i, x in enumerate(xs):
        for turned, given in zip(batched, (x, x[:, :1]), strict=True):
            assert_normed(turned[i], given, w, range(4), HALF)


@once
def test_the_operators_keep_their_promises() -> None:
    """Schemas, fakes and autograd, by torch's own checks."""
    q, k = normal(4, 2, 8).requires_grad_(), normal(4, 1, 8, seed=1).requires_grad_()
    weights = [torch.rand(8).requires_grad_(), torch.rand(8).requires_grad_()]
    angles, text = [torch.arange(4)], HALF.to_json()
    torch.library.opcheck(
        torch.ops.phasor.norm_rotate.default, ([q, k], weights, angles, text, 1e-6, 1.0, "eager")
    )
    plain = [x.detach() for x in (q, k)]
    torch.library.opcheck(
        torch.ops.phasor.norm_rotate_backward.default,
        (plain, plain, [w.detach() for w in weights], angles, text, 1e-6, 1.0, "eager"),
    )
    slots = torch.tensor([3, -1, 0, 5])
    torch.library.opcheck(
        torch.ops.phasor.rotate_and_cache_.default,
        (*plain, normal(4, 1, 8, seed=2), torch.arange(4), slots, torch.zeros(2, 3, 1, 8),
         torch.zeros(2, 3, 1, 8), text, 1.0, 1.0, 1.0, "eager"),
    )  # fmt: skip


@once
@pytest.mark.compile
def test_both_compile_into_one_graph() -> None:
    """With eager's bits, and with what they write."""
    qw, kw = torch.linspace(0.5, 1.5, 8), torch.linspace(1.5, 0.5, 8)

    def step(q: Tensor, k: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q2, k2 = norm_rotate_qk(q, k, qw, kw, torch.arange(4), HALF, norm_eps=1e-6)
        return rotate_and_cache_(q2, k2, k, torch.arange(4), HALF, slots, keys, values)

    def run(function: Callable[..., Tensor]) -> list[Tensor]:
        caches = [torch.zeros(2, 3, 1, 8) for _ in range(2)]
        q, k = normal(4, 2, 8), normal(4, 1, 8, seed=1)
        return [function(q, k, torch.tensor([3, -1, 0, 5]), *caches), *caches]

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for a, b in zip(run(compiled), run(step), strict=True):
        assert torch.equal(a, b)


@once
@pytest.mark.parametrize("function", [norm_rotate_qk, rotate_and_cache_])
def test_torchscript_is_refused(function: Callable[..., Any]) -> None:
    """By name, with the ways out."""
    with pytest.raises(BackendError, match=r"no form in TorchScript .* torch\.export\.export"):
        torch.jit.script(function)


NORM: dict[str, tuple[type[PhasorError], str, dict[str, Any]]] = {
    "weight of a list": (TensorError, "q_weight must be a tensor of floats, got list",
                         {"q_weight": [1.0] * 8}),
    "integer weight": (TensorError, "k_weight must be a tensor of floats, got torch.int64",
                       {"k_weight": torch.ones(8, dtype=torch.int64)}),
    "short weight": (TensorError, r"k_weight must be \[head_dim\] \(8\), got shape \[4\]",
                     {"k_weight": torch.ones(4)}),
    "weight elsewhere": (TensorError, r"q_weight must be on the device of q and k \(cpu\)",
                         {"q_weight": torch.ones(8, device="meta")}),
    "norm_eps": (SpecError, "norm_eps must be a finite number >= 0, got -1", {"norm_eps": -1}),
    "tokens": (TensorError, "q and k must share their tokens", {"k": torch.ones(3, 1, 8)}),
    "positions": (PositionError, "positions must be a scalar or broadcast",
                  {"positions": torch.arange(3)}),
    "rule": (SpecError, r"use rope\.at\(seq_len\)", {"rope": Rope(
        head_dim=8, pairing="half", scaling=DynamicNTK(factor=2.0, original_max_positions=64))}),
    "backend": (BackendError, "backend must be one of 'auto', 'triton', 'eager' here, got 'cpu'",
                {"backend": "cpu"}),
}  # fmt: skip


@once
@pytest.mark.parametrize(("kind", "text", "changed"), NORM.values(), ids=NORM)
def test_norm_refuses_what_it_cannot_use(
    kind: type[PhasorError], text: str, changed: dict[str, Any]
) -> None:
    """By the name of the argument, with what was expected and what came."""
    one = torch.ones(8)
    arguments: dict[str, Any] = {
        "q": normal(4, 2, 8), "k": normal(4, 1, 8), "q_weight": one, "k_weight": one,
        "positions": 0, "rope": HALF, "norm_eps": 1e-6,
    }  # fmt: skip
    with pytest.raises(kind, match=text):
        norm_rotate_qk(**(arguments | changed))


@pytest.mark.skipif(APART, reason="there Triton takes tensors on the CPU")
def test_triton_is_never_replaced_where_it_cannot_run() -> None:
    """On a CPU tensor it is an error by name, and "auto" takes the definition."""
    q, w = normal(1, 1, 8), torch.ones(8)
    with pytest.raises(BackendError, match="backend='triton' cannot do this: it needs a tensor"):
        norm_rotate_qk(q, q, w, w, 0, HALF, norm_eps=1e-6, backend="triton")
    norm_rotate_qk(q, q, w, w, 0, HALF, norm_eps=1e-6)


@pytest.mark.skipif(RUN_BY != "gpu", reason="it takes a GPU")
def test_both_can_be_captured_in_a_graph() -> None:
    """A replay reads and writes what is there then."""
    q, k, v = (here(2, 1, n, 64, dtype=torch.bfloat16, seed=n) for n in (8, 2, 2))
    weight = torch.ones(64, dtype=torch.bfloat16, device="cuda")
    rope, places = Rope(head_dim=64, pairing="half"), torch.tensor([[3], [9]], device="cuda")
    keys, values = (torch.zeros(2, 16, 2, 64, dtype=torch.bfloat16, device="cuda") for _ in "ab")
    slots = torch.tensor([[1], [18]], device="cuda")

    def step() -> Tensor:
        q2, k2 = norm_rotate_qk(q, k, weight, weight, places, rope, norm_eps=1e-6)
        return rotate_and_cache_(q2, k2, v, places, rope, slots, keys, values)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    slots.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(keys[0, 2], keys[0, 1])
    assert torch.equal(out, step())
