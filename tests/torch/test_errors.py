"""Every refusal names the argument, what was expected, what came and the way out; first it asks."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from phasor import Rope
from phasor.angles import cos_sin
from phasor.axes import Sectioned
from phasor.errors import BackendError, PhasorError, PositionError, SpecError, TensorError
from phasor.scaling import DynamicNTK
from phasor.torch import (
    RotaryEmbedding,
    rotate,
    rotate_,
    rotate_by,
    rotate_by_,
    rotate_qk,
    rotate_qk_,
)
from phasor.torch._operator import eager, ops

from .torch_cases import HALF, THREE
from .torch_oracle import assert_rotated, normal

RULE = Rope(head_dim=8, pairing="half", scaling=DynamicNTK(factor=2.0, original_max_positions=4096))
META = torch.device("meta")


class Refusal(NamedTuple):
    """What is wrong with one argument, and what has to be said about it."""

    error: type[PhasorError]
    text: str
    changed: dict[str, Any]


def x(*shape: int, **options: Any) -> Tensor:
    """A tensor that is wrong in one thing."""
    return torch.zeros(shape, **options)


TENSORS = {
    "not a tensor": (np.zeros((4, 2, 8)), "{} must be a torch.Tensor, got ndarray"),
    "nothing": (None, "{} must be a torch.Tensor, got NoneType"),
    "integers": (
        x(4, 2, 8, dtype=torch.int64),
        "{} must be float64, float32, bfloat16 or float16, got torch.int64",
    ),
    "complex": (
        x(4, 2, 8, dtype=torch.complex64),
        "{} must be float64, float32, bfloat16 or float16, got torch.complex64",
    ),
    "eight bits": (
        x(4, 2, 8, dtype=torch.float8_e4m3fn),
        "{} must be float64, float32, bfloat16 or float16, got torch.float8_e4m3fn",
    ),
    "sparse": (
        x(4, 2, 8).to_sparse(),
        "{} must be a dense tensor, got torch.sparse_coo; pad it, or .to_dense() it",
    ),
    "no heads": (x(4, 8), "{} must be [..., seq, heads, head_dim], got shape [4, 8]"),
    "another width": (x(4, 2, 6), "{} must end in head_dim (8), got shape [4, 2, 6]"),
}
POSITIONS: dict[str, tuple[Any, str]] = {
    "words": ("ab", "positions must be an array of numbers: "),
    "nothing": (None, "positions must be an array of numbers: "),
    "ragged": ([[1], [1, 2]], "positions must be an array of numbers: "),
    "beyond int64": ([2**64, 1, 2, 3], "positions must be an array of numbers: "),
    "one beyond int64": (2**64, "positions must fit 64 bits, got 18446744073709551616: "),
    "sparse": (torch.ones(4).to_sparse(), "positions must be a dense tensor"),
    "uint64": (
        torch.ones(4, dtype=torch.uint64),
        "positions must be integers, float32 or float64, got torch.uint64: those from 2**63 on "
        "are not int64; cast with .long()",
    ),
    "bools": (
        torch.ones(4, dtype=torch.bool),
        "positions must be integers, float32 or float64, got torch.bool: a bool is a mask; "
        "phasor.positions.padded makes positions of one",
    ),
    "bfloat16": (
        torch.ones(4, dtype=torch.bfloat16),
        "positions must be integers, float32 or float64, got torch.bfloat16: "
        "bfloat16 cannot tell 256 from 257",
    ),
    "float16": (
        torch.ones(4, dtype=torch.float16),
        "positions must be integers, float32 or float64, got torch.float16: "
        "float16 cannot tell 2048 from 2049",
    ),
    "complex": (
        torch.ones(4, dtype=torch.complex64),
        "positions must be integers, float32 or float64, got torch.complex64: "
        "a position is a real number",
    ),
    "eight bits": (
        torch.ones(4).to(torch.float8_e4m3fn),
        "positions must be integers, float32 or float64, got torch.float8_e4m3fn",
    ),
    "elsewhere": (
        torch.arange(4, device=META),
        "positions must be on the device of the tensors (cpu), got meta",
    ),
    "learned": (
        torch.ones(4, requires_grad=True),
        "positions must not require a gradient, for none is computed; "
        "rotate_by differentiates with respect to cos and sin",
    ),
    "too many": (
        torch.arange(5),
        "positions must be a scalar or broadcast to the leading dimensions [4] of "
        "x [..., seq, heads, head_dim], got [5]",
    ),
    "too deep": (
        torch.zeros(1, 4, dtype=torch.int64),
        "positions must be a scalar or broadcast to the leading dimensions [4] of "
        "x [..., seq, heads, head_dim], got [1, 4]",
    ),
    "NaN": ([0.0, 1.0, float("nan"), 2.0], "positions must be finite and below 2**63, got nan"),
    "infinite": ([0.0, 1.0, float("-inf"), 2.0], "positions must be finite and below 2**63"),
    "off the scale": ([0.0, 1.0, 2.0**63, 2.0], "positions must be finite and below 2**63"),
}
AXES: dict[str, tuple[Any, str]] = {
    "a scalar": (3, "positions must end in one coordinate per axis (3) for Sectioned axes, "),
    "one axis": (
        torch.arange(4),
        "positions must end in one coordinate per axis (3) for Sectioned axes, got shape [4]; "
        "phasor.positions.every_axis repeats text positions",
    ),
    "too many": (
        torch.zeros(5, 3, dtype=torch.int64),
        "positions must be a scalar or broadcast to the leading dimensions [4] of "
        "x [..., seq, heads, head_dim], got [5]",
    ),
}
BY_POSITIONS = {
    **{f"x: {k}": Refusal(TensorError, t.format("x"), {"x": v}) for k, (v, t) in TENSORS.items()},
    **{
        f"positions: {k}": Refusal(PositionError, text, {"positions": value})
        for k, (value, text) in POSITIONS.items()
    },
    **{
        f"axes: {k}": Refusal(PositionError, text, {"positions": value, "rope": THREE})
        for k, (value, text) in AXES.items()
    },
    "gain: words": Refusal(SpecError, "gain must be a finite number, got 'two'", {"gain": "two"}),
    "gain: NaN": Refusal(
        SpecError, "gain must be a finite number, got nan", {"gain": float("nan")}
    ),
    "gain: infinite": Refusal(
        SpecError, "gain must be a finite number, got inf", {"gain": float("inf")}
    ),
    "gain: learned": Refusal(
        SpecError,
        "gain must be a finite number, got tensor(2., requires_grad=True)",
        {"gain": torch.tensor(2.0, requires_grad=True)},
    ),
    "inverse: words": Refusal(
        SpecError, "inverse must be True or False, got 'no'", {"inverse": "no"}
    ),
    "a rule": Refusal(
        SpecError,
        "scaling is the rule DynamicNTK, whose law depends on the length of the sequence; "
        "use rope.at(seq_len)",
        {"rope": RULE},
    ),
    "backend": Refusal(
        BackendError,
        "backend must be 'auto' or one of 'cpu', 'triton', 'eager'",
        {"backend": "nonesuch"},
    ),
}
ROW = normal(4, 4)
BY_ROWS = {
    "cos is a list": Refusal(TensorError, "cos must be a torch.Tensor, got list", {"cos": [1.0]}),
    "sin is nothing": Refusal(
        TensorError, "sin must be a torch.Tensor, got NoneType", {"sin": None}
    ),
    "inverse: words": Refusal(
        SpecError, "inverse must be True or False, got 'no'", {"inverse": "no"}
    ),
    **{
        f"x: {k}": Refusal(TensorError, t.format("x"), {"x": v})
        for k, (v, t) in TENSORS.items()
        if k != "another width"
    },
    "pairing": Refusal(
        SpecError, "pairing must be 'half' or 'interleaved', got 'neox'", {"pairing": "neox"}
    ),
    "pairing_out": Refusal(
        SpecError, "pairing_out must be 'half' or 'interleaved', got ''", {"pairing_out": ""}
    ),
    "shapes differ": Refusal(
        TensorError, "sin must have the shape of cos [4, 4], got [4]", {"sin": ROW[0]}
    ),
    "cos of integers": Refusal(
        TensorError,
        "cos must be a real floating tensor [..., seq, num_pairs], got torch.int64 of shape [4, 4]",
        {"cos": ROW.long()},
    ),
    "sin of complex numbers": Refusal(
        TensorError,
        "sin must be a real floating tensor [..., seq, num_pairs], "
        "got torch.complex64 of shape [4, 4]",
        {"sin": ROW.to(torch.complex64)},
    ),
    "scalars": Refusal(
        TensorError,
        "cos must be a real floating tensor [..., seq, num_pairs], got torch.float32 of shape []",
        {"cos": torch.tensor(1.0), "sin": torch.tensor(1.0)},
    ),
    "cos elsewhere": Refusal(
        TensorError, "cos must be on the device of x (cpu), got meta", {"cos": ROW.to(META)}
    ),
    "sin elsewhere": Refusal(
        TensorError, "sin must be on the device of x (cpu), got meta", {"sin": ROW.to(META)}
    ),
    "full width": Refusal(
        TensorError,
        "cos must hold one entry per pair: rotary_start + 2 * num_pairs is at most head_dim (8), "
        "got 0 + 2 * 8; of a full-width table take the first half",
        {"cos": normal(4, 8), "sin": normal(4, 8)},
    ),
    "start too far": Refusal(
        TensorError,
        "rotary_start + 2 * num_pairs is at most head_dim (8), got 1 + 2 * 4",
        {"rotary_start": 1},
    ),
    "start below 0": Refusal(TensorError, "got -1 + 2 * 4", {"rotary_start": -1}),
    "too many rows": Refusal(
        TensorError,
        "cos and sin must broadcast to the leading dimensions [4] of x [..., seq, heads, head_dim]"
        ", got [5]",
        {"cos": normal(5, 4), "sin": normal(5, 4)},
    ),
    "backend": Refusal(
        BackendError,
        "backend must be 'auto' or one of 'cpu', 'triton', 'eager'",
        {"backend": "nonesuch"},
    ),
}
OF_TWO = {
    **{f"k: {k}": Refusal(TensorError, t.format("k"), {"k": v}) for k, (v, t) in TENSORS.items()},
    **{f"q: {k}": Refusal(TensorError, t.format("q"), {"q": v}) for k, (v, t) in TENSORS.items()},
    "tokens differ": Refusal(
        TensorError,
        "q and k must share their tokens [..., seq], got [4] and [5]; rotate them one by one",
        {"k": x(5, 2, 8)},
    ),
    "batches differ": Refusal(
        TensorError,
        "q and k must share their tokens [..., seq], got [4] and [1, 4]",
        {"k": x(1, 4, 2, 8)},
    ),
    "devices differ": Refusal(
        TensorError,
        "q and k must be on one device, got cpu and meta",
        {"k": x(4, 2, 8, device=META)},
    ),
    "positions": Refusal(PositionError, "positions must be finite", {"positions": float("nan")}),
    "backend": Refusal(
        BackendError,
        "backend must be 'auto' or one of 'cpu', 'triton', 'eager'",
        {"backend": "nonesuch"},
    ),
}


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory behind a tensor's elements."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def assert_refused(verb: Any, refusal: Refusal, usual: dict[str, Any]) -> None:
    """The right error with the right text, and not a bit of any argument moved."""
    arguments = usual | refusal.changed
    tensors = [t for t in arguments.values() if isinstance(t, Tensor)]
    given = [t for t in tensors if t.device.type == "cpu" and t.layout == torch.strided]
    before = [t.detach().clone() for t in given]
    versions = [t._version for t in given]
    with pytest.raises(refusal.error, match=re.escape(refusal.text)):
        verb(**arguments)
    for tensor, old in zip(given, before, strict=True):
        assert torch.equal(as_bytes(tensor), as_bytes(old))
    assert [t._version for t in given] == versions


@pytest.mark.parametrize("verb", [rotate, rotate_])
@pytest.mark.parametrize("case", BY_POSITIONS)
def test_rotating_says_what_it_cannot_use(case: str, verb: Any) -> None:
    """One tensor and its positions."""
    usual = {"x": normal(4, 2, 8), "positions": torch.arange(4), "rope": HALF}
    assert_refused(verb, BY_POSITIONS[case], usual)


@pytest.mark.parametrize("verb", [rotate_qk, rotate_qk_])
@pytest.mark.parametrize("case", OF_TWO)
def test_rotating_two_says_which_it_cannot_use(case: str, verb: Any) -> None:
    """Query and key: a fault of the second leaves the first unwritten."""
    usual = {
        "q": normal(4, 3, 8),
        "k": normal(4, 2, 8),
        "positions": torch.arange(4),
        "rope": HALF,
    }
    assert_refused(verb, OF_TWO[case], usual)


@pytest.mark.parametrize("verb", [rotate_by, rotate_by_])
@pytest.mark.parametrize("case", BY_ROWS)
def test_rotating_by_rows_says_what_it_cannot_use(case: str, verb: Any) -> None:
    """One tensor and its rows."""
    usual = {"x": normal(4, 2, 8), "cos": ROW.clone(), "sin": ROW.clone(), "pairing": "half"}
    assert_refused(verb, BY_ROWS[case], usual)


def test_tokens_that_do_not_fit_are_named_in_full() -> None:
    """The shapes that come and go in the message are the caller's."""
    with pytest.raises(PositionError, match=re.escape("[2, 3] of x [..., seq, heads, head_dim]")):
        rotate(normal(2, 3, 1, 8), torch.zeros(2, 2, dtype=torch.int64), HALF)
    with pytest.raises(TensorError, match=re.escape("[2, 3] of x [..., seq, heads, head_dim]")):
        rotate_by(normal(2, 3, 1, 8), normal(2, 1, 4)[:, [0, 0]], normal(2, 2, 4), pairing="half")


def test_a_named_backend_is_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that cannot differentiate rows says so; the one that can is asked by its name."""
    monkeypatch.setitem(ops.BACKENDS, "other", eager)
    cos, sin = normal(4, 4).requires_grad_(), normal(4, 4)
    for verb in (rotate_by, rotate_by_):
        tensor = normal(4, 2, 8)
        before = tensor.clone()
        with pytest.raises(BackendError, match=r"backend='other' has no gradients for cos"):
            verb(tensor, cos, sin, pairing="half", backend="other")
        assert torch.equal(tensor, before)
    known = ", ".join(map(repr, ops.BACKENDS))
    with pytest.raises(BackendError, match=f"one of {known}, got 'third'"):
        rotate(normal(4, 2, 8), 1, HALF, backend="third")
    assert rotate_by(normal(4, 2, 8), cos, sin, pairing="half", backend="eager").requires_grad
    assert torch.equal(
        rotate(normal(4, 2, 8), 1, HALF, backend="other"),
        rotate(normal(4, 2, 8), 1, HALF, backend="eager"),
    )


def test_positions_with_a_tangent_are_refused() -> None:
    """Forward mode would lose it without a word."""
    with forward_ad.dual_level():
        places = forward_ad.make_dual(torch.arange(4.0), torch.ones(4))
        with pytest.raises(PositionError, match="positions must not require a gradient"):
            rotate(normal(4, 2, 8), places, HALF)


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_tensors_of_inference_mode_are_written_only_there(backend: str) -> None:
    """As torch does it, whoever rotates."""
    with torch.inference_mode():
        x = normal(4, 2, 8)
    before = x.clone()
    with pytest.raises(TensorError, match="must not be an inference tensor outside"):
        rotate_(x, torch.arange(4), HALF, backend=backend)
    assert torch.equal(x, before)
    with torch.inference_mode():
        turned = rotate_(x, torch.arange(4), HALF, backend=backend)
        assert_rotated(turned, before, range(4), HALF)


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_a_view_that_negates_is_not_written(backend: str) -> None:
    """Torch writes none by an operator of two tensors; out of place it is like any other."""
    view = normal(4, 2, 8, dtype=torch.complex64).conj().imag
    before = view.clone()
    with pytest.raises(TensorError, match=r"not be a view that negates.*resolve_neg"):
        rotate_(view, torch.arange(4), HALF, backend=backend)
    assert torch.equal(view, before)
    assert_rotated(rotate(view, torch.arange(4), HALF, backend=backend), before, range(4), HALF)


def test_several_axes_without_positions_are_told_what_makes_them() -> None:
    """Of images first: that is what such ropes are for."""
    with pytest.raises(PositionError, match=r"positions\.grid makes those of images"):
        RotaryEmbedding(THREE)(normal(4, 2, 8), normal(4, 2, 8))


def test_axes_that_come_first_are_told_where_they_go() -> None:
    """Transformers has positions of images as [3, batch, seq]."""
    rope = Rope(head_dim=8, pairing="half", axes=Sectioned((1, 1, 2)))
    for positions in (np.zeros((3, 5), dtype=int), torch.zeros(3, 2, 5, dtype=torch.int64)):
        with pytest.raises(PositionError, match=r"if the axes come first.*movedim\(0, -1\)"):
            rotate(torch.zeros(2, 5, 1, 8), positions, rope)
    with pytest.raises(PositionError, match=r"np\.moveaxis\(positions, 0, -1\)"):
        cos_sin(rope, np.zeros((3, 5), dtype=int))


def test_a_missing_key_is_told_of_the_verb_for_one_tensor() -> None:
    """``rotate_qk(q, None, ...)``."""
    rope = Rope(head_dim=8, pairing="half")
    with pytest.raises(
        TensorError, match=r"^k must be a torch.Tensor, got NoneType; rotate takes one"
    ):
        rotate_qk(torch.zeros(5, 1, 8), None, torch.arange(5), rope)
