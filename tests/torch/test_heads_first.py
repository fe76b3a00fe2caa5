"""`heads_first=True` is the call on transposed views, bit for bit, and nothing is guessed."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from phasor import Rope
from phasor import numpy as numpy_forms
from phasor.axes import Sectioned
from phasor.errors import PositionError, SpecError, TensorError
from phasor.torch import Rotation, rotate, rotate_, rotate_qk, rotate_qk_

from ..gpu.triton_runs import APART
from .torch_arrays import normal
from .torch_cases import turn, turn_

# Triton in a process of its own, which tests/gpu/test_kernels.py starts
BACKENDS = ["triton"] if APART else ["auto", "eager"]
HALF = Rope(head_dim=16, pairing="half")
ROPES = {
    "half": HALF,
    "a slice to another pairing": Rope(
        head_dim=16, rotary_dim=8, rotary_start=4, pairing="interleaved", pairing_out="half"
    ),
}
PLACES = torch.tensor([[3, -1, 2**33, 0, 7], [1, 1, 2, 3, 5]])
COS, SIN = normal(2, 5, 8, dtype=torch.float32), normal(2, 5, 8, dtype=torch.float32, seed=1)
_BY = {"cos": COS, "sin": SIN, "pairing": "half"}
#: Functions of one tensor, which take everything else by name.
ONE: dict[str, Callable[..., Tensor]] = {
    "rotate": partial(rotate, positions=PLACES, rope=HALF),
    "rotate_": partial(rotate_, positions=PLACES, rope=HALF),
    "turn": partial(turn, **_BY),
    "turn_": partial(turn_, **_BY),
}


def swapped(x: Tensor) -> Tensor:
    """The view with heads and tokens in the other order."""
    return x.transpose(1, 2)


def heads_before_tokens(*, heads: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor ``[batch, heads, seq, head_dim]``."""
    return normal(2, heads, 5, 16, dtype=dtype, seed=heads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ONE)
def test_one_tensor_is_the_transposed_call(name: str, backend: str, dtype: torch.dtype) -> None:
    """The same bits in the caller's layout; in place, in the caller's memory."""
    x = heads_before_tokens(dtype=dtype)
    expected = swapped(ONE[name](swapped(x).clone(), backend=backend))
    given = x.clone()
    y = ONE[name](given, heads_first=True, backend=backend)
    assert torch.equal(y, expected)
    assert y.stride() == x.stride()
    assert (y is given) == name.endswith("_")
    assert name.endswith("_") or torch.equal(given, x)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", ROPES)
def test_query_and_key_are_the_transposed_call(case: str, backend: str) -> None:
    """With fewer heads in the key; new or in place, and the inverse undoes it."""
    q, k = heads_before_tokens(heads=4), heads_before_tokens(heads=2)
    options: dict[str, Any] = {"gain": 1.25, "backend": backend}
    expected = rotate_qk(swapped(q), swapped(k), PLACES, ROPES[case], **options)
    new = rotate_qk(q, k, PLACES, ROPES[case], heads_first=True, **options)
    written = q.clone(), k.clone()
    rotate_qk_(*written, PLACES, ROPES[case], heads_first=True, **options)
    for wanted, y, z in zip(expected, new, written, strict=True):
        assert torch.equal(y, swapped(wanted))
        assert torch.equal(z, swapped(wanted))


def test_positions_on_several_axes_keep_their_shape() -> None:
    """``[batch, seq, n_axes]`` beside ``[batch, heads, seq, head_dim]``."""
    rope = Rope(head_dim=16, pairing="half", axes=Sectioned((4, 2, 2)))
    x, places = heads_before_tokens(), torch.arange(30).reshape(2, 5, 3)
    expected = swapped(rotate(swapped(x), places, rope))
    assert torch.equal(rotate(x, places, rope, heads_first=True), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ONE)
def test_gradients_are_those_of_the_transposed_call(name: str, backend: str) -> None:
    """Bit for bit, in place through a copy."""
    weights = heads_before_tokens(heads=3).flip(0)
    gradients: list[Tensor] = []
    for heads_first in (True, False):
        x = heads_before_tokens().requires_grad_()
        view = x * 1
        view = view if heads_first else swapped(view)
        y = ONE[name](view, heads_first=heads_first, backend=backend)
        ((y if heads_first else swapped(y)) * weights).sum().backward()
        assert x.grad is not None
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_cos_and_sin_that_are_learned_have_the_same_gradients() -> None:
    """They have no heads, and so no layout."""
    x = heads_before_tokens()
    gradients: list[Tensor] = []
    for heads_first in (True, False):
        cos, sin = COS.clone().requires_grad_(), SIN.clone().requires_grad_()
        view = x if heads_first else swapped(x)
        y = Rotation(cos, sin, pairing="half")(view, heads_first=heads_first)
        (y if heads_first else swapped(y)).square().sum().backward()
        assert cos.grad is not None
        gradients.append(cos.grad)
    assert torch.equal(*gradients)


@pytest.mark.compile
def test_it_compiles_and_exports_without_a_break() -> None:
    """One graph, new and in place; the exported program gives the same bits."""

    class Both(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
            q = rotate_(q * 1, positions, HALF, heads_first=True)
            return rotate_qk(q, k, positions, HALF, heads_first=True)

    given = heads_before_tokens(heads=4), heads_before_tokens(heads=2), PLACES
    expected = Both()(*given)
    torch._dynamo.reset()
    compiled = torch.compile(Both(), fullgraph=True, backend="aot_eager")
    exported = torch.export.export(Both(), given).module()
    for run in (compiled, exported):
        assert all(map(torch.equal, run(*given), expected))


def test_it_is_batched_by_vmap() -> None:
    """Over a dimension before heads and tokens, new and in place."""
    x = normal(3, 2, 5, 16, dtype=torch.float32)
    places = torch.arange(15).reshape(3, 5)
    transposed = torch.vmap(lambda y, p: rotate(y.transpose(0, 1), p, HALF).transpose(0, 1))
    expected = transposed(x, places)
    new = torch.vmap(lambda y, p: rotate(y, p, HALF, heads_first=True))(x, places)
    assert torch.equal(new, expected)
    written = x.clone()
    torch.vmap(lambda y, p: rotate_(y, p, HALF, heads_first=True))(written, places)
    assert torch.equal(written, expected)


def test_memory_with_heads_first_is_rotated_where_it_is() -> None:
    """No copy: a slice of a larger tensor is written, and nothing beside it."""
    whole = normal(2, 6, 9, 16, dtype=torch.float32)
    expected = whole.clone()
    expected[:, 1:4, 2:7] = swapped(rotate(swapped(whole[:, 1:4, 2:7]), PLACES, HALF))
    rotate_(whole[:, 1:4, 2:7], PLACES, HALF, heads_first=True)
    assert torch.equal(whole, expected)


def test_numpy_takes_heads_first_too() -> None:
    """In each form that has tokens and heads."""
    x = normal(2, 3, 5, 16).numpy()
    places = PLACES.numpy()
    forms: list[Callable[..., Any]] = [
        lambda y, **named: numpy_forms.rotate(y, places, HALF, **named),
        lambda y, **named: numpy_forms.rotate_complex(y, places, HALF, **named),
    ]
    for form in forms:
        expected = form(x.swapaxes(1, 2)).swapaxes(1, 2)
        np.testing.assert_array_equal(form(x, heads_first=True), expected)
    with pytest.raises(PositionError, match=r"if x is .*heads, seq.*, pass heads_first=True"):
        numpy_forms.rotate(x, places, HALF)
    with pytest.raises(TensorError, match=re.escape("[..., heads, seq, head_dim]")):
        numpy_forms.rotate(x[0, 0], 3, HALF, heads_first=True)
    with pytest.raises(SpecError, match="heads_first must be True or False, got 1"):
        numpy_forms.rotate(x, places, HALF, heads_first=1)


MISTAKES: dict[str, tuple[Callable[[Tensor], Any], type[Exception]]] = {
    "positions": (lambda x: rotate(x, PLACES, HALF), PositionError),
    "positions, in place": (lambda x: rotate_(x, PLACES, HALF), PositionError),
    "cos and sin": (lambda x: Rotation(COS, SIN, pairing="half")(x), TensorError),
    "a key of fewer heads": (lambda x: rotate_qk(x, x[:, :2], PLACES, HALF), TensorError),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_heads_before_tokens_without_a_word_is_answered_with_the_word(case: str) -> None:
    """The likely mistake; the tensor is as it was."""
    call, error = MISTAKES[case]
    x = heads_before_tokens()
    with pytest.raises(error, match=r"\[\.\.\., heads, seq, head_dim\], pass heads_first=True"):
        call(x)
    assert torch.equal(x, heads_before_tokens())


def test_tokens_before_heads_with_the_word_are_answered_too() -> None:
    """The opposite mistake names the way out, and the layout that was asked for."""
    x = swapped(heads_before_tokens())
    with pytest.raises(PositionError, match=r"x \[\.\.\., heads, seq.*leave heads_first out"):
        rotate(x, PLACES, HALF, heads_first=True)
    with pytest.raises(TensorError, match="leave heads_first out"):
        rotate_qk(x, x[:, :, :2], PLACES, HALF, heads_first=True)


def test_errors_name_shapes_as_they_were_given() -> None:
    """Neither transposed, nor after an exception of torch."""
    with pytest.raises(TensorError, match=re.escape("[..., heads, seq, head_dim], got shape [5,")):
        rotate(normal(5, 16), 3, HALF, heads_first=True)
    with pytest.raises(TensorError, match=re.escape("head_dim (16), got 8")):
        rotate(normal(2, 3, 5, 8), 3, HALF, heads_first=True)
    with pytest.raises(TensorError, match=r"x must be a dense torch\.Tensor, got list"):
        rotate([1.0], 3, HALF, heads_first=True)  # type: ignore[arg-type]
    for wrong in (1, None, "yes"):
        with pytest.raises(SpecError, match="heads_first must be True or False"):
            rotate(heads_before_tokens(), 3, HALF, heads_first=wrong)  # type: ignore[arg-type]
    one = heads_before_tokens()
    with pytest.raises(TensorError, match="two different tensors"):
        rotate_qk_(one, one, 3, HALF, heads_first=True)
    with pytest.raises(TensorError, match="share memory with itself"):
        rotate_(normal(1, 1, 5, 16).expand(1, 3, 5, 16), 3, HALF, heads_first=True)
