"""Every refusal names the argument, what was expected, what came and the way out; first it asks."""

from __future__ import annotations

import re
from operator import attrgetter
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
from phasor.torch import (
    RotaryEmbedding,
    Rotation,
    rotate,
    rotate_,
    rotate_qk,
    rotate_qk_,
)
from phasor.torch._operator import eager, ops

from ..rotation_cases import RULE, THREE
from .torch_arrays import assert_rotated, normal
from .torch_cases import HALF, turn, turn_

META = torch.device("meta")


class Refusal(NamedTuple):
    """What has to be said, of what was given instead of something right."""

    error: type[PhasorError]
    text: str
    changed: dict[str, Any]


def each(error: type[PhasorError], name: str, said: dict[str, Any], **more: Any) -> list[Refusal]:
    """A refusal of every value that stands behind what is said of the argument."""
    return [Refusal(error, f"{name} {text}", {name: bad, **more}) for text, bad in said.items()]


def x(*shape: int, **options: Any) -> Tensor:
    """A tensor that is wrong in one thing."""
    return torch.zeros(shape, **options)


ROW = normal(4, 4)
LEADING = "must broadcast to the leading dimensions [4] of x [..., seq, heads, "
NUMBERS = "must be integers, float32 or float64, got"
ARRAY = "must be an array of numbers:"
REAL = "must be float64, float32, bfloat16 or float16, got"
WIDTH = {"must end in head_dim (8), got 6": x(4, 2, 6)}
TENSORS = {
    "must be a dense torch.Tensor, got ndarray": np.zeros((4, 2, 8)),
    "must be a dense torch.Tensor, got NoneType": None,
    **{
        f"must be float64, float32, bfloat16 or float16, got {dtype}": x(4, 2, 8, dtype=dtype)
        for dtype in (torch.int64, torch.complex64, torch.float8_e4m3fn)
    },
    "must be a dense torch.Tensor, got torch.sparse_coo; pad it, or .to_dense() it": (
        x(4, 2, 8).to_sparse()
    ),
    "must be a dense torch.Tensor, got torch._mkldnn": x(4, 2, 8).to_mkldnn(),
    "must be [..., seq, heads, head_dim], got shape [4, 8]": x(4, 8),
}
POSITIONS = {
    f"{ARRAY} can't convert np.ndarray of type numpy.str_": "ab",
    "must be given, got None; for one sequence pass torch.arange(seq)": None,
    f"{ARRAY} can't convert np.ndarray of type numpy.object_": [2**64, 1, 2, 3],
    f"{ARRAY} setting an array element with a sequence": [[1], [1, 2]],
    "must fit 64 bits, got 18446744073709551616: ": 2**64,
    "must be a dense torch.Tensor, got torch.sparse_coo": torch.ones(4).to_sparse(),
    f"{NUMBERS} torch.uint64: it holds numbers above int64; cast to int64": (
        torch.ones(4).to(torch.uint64)
    ),
    f"{NUMBERS} torch.bool: this is a mask; phasor.positions.padded turns a mask into positions": (
        torch.ones(4).bool()
    ),
    f"{NUMBERS} torch.bfloat16: bfloat16 cannot tell 256 from 257": torch.ones(4).bfloat16(),
    f"{NUMBERS} torch.float16: float16 cannot tell 2048 from 2049": torch.ones(4).half(),
    f"{NUMBERS} torch.complex64: a position is a real number": torch.ones(4).to(torch.complex64),
    f"{NUMBERS} torch.float8_e4m3fn": torch.ones(4).to(torch.float8_e4m3fn),
    "must be on the device of the tensors (cpu), got meta": torch.arange(4, device=META),
    "must not require a gradient, because none is computed; "
    "to learn angles, make a Rotation from your own cos and sin: these get gradients": torch.ones(
        4, requires_grad=True
    ),
    f"{LEADING}head_dim], got [5]": torch.arange(5),
    f"{LEADING}head_dim], got [1, 4]": torch.zeros(1, 4).long(),
    "must be finite and below 2**63, got nan": [0.0, 1.0, float("nan"), 2.0],
    "must be finite and below 2**63, got -inf": [0.0, 1.0, float("-inf"), 2.0],
    "must be finite and below 2**63, got 9.22": [0.0, 1.0, 2.0**63, 2.0],
}
AXES = {
    "must end in one coordinate per axis (3) for Sectioned axes, ": 3,
    "must end in one coordinate per axis (3) for Sectioned axes, got shape [4]; "
    "phasor.positions.every_axis repeats text positions": torch.arange(4),
    f"{LEADING}head_dim], got [5]": torch.zeros(5, 3).long(),
}
INVERSE = {"must be True or False, got 'no'": "no"}
BACKEND = {
    f"must be 'auto' or one of 'cpu', 'triton', 'eager', got {bad!r}": bad
    for bad in ("nonesuch", None)
}
TEXT = attrgetter("text")
BY_POSITIONS = [
    *each(TensorError, "x", TENSORS | WIDTH),
    *each(PositionError, "positions", POSITIONS),
    *each(PositionError, "positions", AXES, rope=THREE),
    *each(
        SpecError,
        "gain",
        {
            "must be a finite number, got 'two'": "two",
            "must be a finite number, got nan": float("nan"),
            "must be a finite number, got inf": float("inf"),
            "must be a finite number, got tensor(2., requires_grad=True)": (
                torch.tensor(2.0, requires_grad=True)
            ),
        },
    ),
    *each(SpecError, "inverse", INVERSE),
    Refusal(
        SpecError,
        "scaling is the rule DynamicNTK, whose law depends on the length of the sequence; "
        "use rope.at(seq_len)",
        {"rope": RULE},
    ),
    *each(BackendError, "backend", BACKEND),
]
BY_ROWS = [
    *each(TensorError, "x", TENSORS),
    *each(SpecError, "pairing", {"must be 'half' or 'interleaved', got 'neox'": "neox"}),
    *each(SpecError, "pairing_out", {"must be 'half' or 'interleaved', got ''": ""}),
    *each(
        TensorError,
        "cos",
        {
            "must be a dense torch.Tensor, got list": [1.0],
            f"{REAL} torch.int64": ROW.long(),
        },
    ),
    Refusal(
        TensorError,
        "rotation must be on the device of the tensors (cpu), got meta",
        {"cos": ROW.to(META), "sin": ROW.to(META)},
    ),
    *each(
        TensorError,
        "sin",
        {
            "must be a dense torch.Tensor, got NoneType": None,
            "must have the shape of cos [4, 4], got [4]": ROW[0],
            f"{REAL} torch.complex64": ROW.to(torch.complex64),
            "must be on the device of the tensors (cpu), got meta": ROW.to(META),
        },
    ),
    *each(TensorError, "cos", {"must be [..., seq, num_pairs], got shape []": x()}, sin=x()),
    Refusal(
        TensorError,
        "cos must hold one entry per pair: rotary_start + 2 * num_pairs is at most head_dim (8), "
        "got 0 + 2 * 8; if cos repeats every entry, pass its first half",
        {"cos": normal(4, 8), "sin": normal(4, 8)},
    ),
    Refusal(
        TensorError,
        "rotary_start + 2 * num_pairs is at most head_dim (8), got 1 + 2 * 4",
        {"rotary_start": 1},
    ),
    *each(SpecError, "rotary_start", {"must be a whole number >= 0, got -1": -1}),
    Refusal(
        TensorError,
        "cos and sin must broadcast to the leading dimensions [4] of x [..., seq, heads, head_dim]"
        ", got [5]",
        {"cos": normal(5, 4), "sin": normal(5, 4)},
    ),
    *each(BackendError, "backend", BACKEND),
]
TOKENS = "q and k must share their tokens [..., seq], got [4] and"
OF_TWO = [
    *each(TensorError, "k", TENSORS | WIDTH),
    *each(TensorError, "q", TENSORS | WIDTH),
    Refusal(TensorError, f"{TOKENS} [5]; rotate each with its own positions", {"k": x(5, 2, 8)}),
    Refusal(TensorError, f"{TOKENS} [1, 4]", {"k": x(1, 4, 2, 8)}),
    Refusal(
        TensorError,
        "k must be on the device of the tensors (cpu), got meta",
        {"k": x(4, 2, 8, device=META)},
    ),
    *each(PositionError, "positions", {"must be finite": float("nan")}),
    *each(BackendError, "backend", BACKEND),
]


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
@pytest.mark.parametrize("refusal", BY_POSITIONS, ids=TEXT)
def test_rotating_says_what_it_cannot_use(refusal: Refusal, verb: Any) -> None:
    """One tensor and its positions."""
    usual = {"x": normal(4, 2, 8), "positions": torch.arange(4), "rope": HALF}
    assert_refused(verb, refusal, usual)


@pytest.mark.parametrize("verb", [rotate_qk, rotate_qk_])
@pytest.mark.parametrize("refusal", OF_TWO, ids=TEXT)
def test_rotating_two_says_which_it_cannot_use(refusal: Refusal, verb: Any) -> None:
    """Query and key: a fault of the second leaves the first unwritten."""
    usual = {"q": normal(4, 3, 8), "k": normal(4, 2, 8), "positions": torch.arange(4), "rope": HALF}
    assert_refused(verb, refusal, usual)


@pytest.mark.parametrize("verb", [turn, turn_])
@pytest.mark.parametrize("refusal", BY_ROWS, ids=TEXT)
def test_rotating_by_rows_says_what_it_cannot_use(refusal: Refusal, verb: Any) -> None:
    """One tensor and its rows."""
    usual = {"x": normal(4, 2, 8), "cos": ROW.clone(), "sin": ROW.clone(), "pairing": "half"}
    assert_refused(verb, refusal, usual)


def test_tokens_that_do_not_fit_are_named_in_full() -> None:
    """The shapes that come and go in the message are the caller's."""
    with pytest.raises(PositionError, match=re.escape("[2, 3] of x [..., seq, heads, head_dim]")):
        rotate(normal(2, 3, 1, 8), torch.zeros(2, 2, dtype=torch.int64), HALF)
    with pytest.raises(TensorError, match=re.escape("[2, 3] of x [..., seq, heads, head_dim]")):
        Rotation(normal(2, 1, 4)[:, [0, 0]], normal(2, 2, 4), pairing="half")(normal(2, 3, 1, 8))


def test_a_named_backend_is_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that cannot differentiate rows says so; the one that can is asked by its name."""
    monkeypatch.setitem(ops.BACKENDS, "other", eager)
    cos, sin = normal(4, 4).requires_grad_(), normal(4, 4)
    for verb in (turn, turn_):
        tensor = normal(4, 2, 8)
        before = tensor.clone()
        with pytest.raises(BackendError, match=r"backend='other' has no gradients for cos"):
            verb(tensor, cos, sin, pairing="half", backend="other")
        assert torch.equal(tensor, before)
    known = ", ".join(map(repr, ops.BACKENDS))
    with pytest.raises(BackendError, match=f"one of {known}, got 'third'"):
        rotate(normal(4, 2, 8), 1, HALF, backend="third")
    assert Rotation(cos, sin, pairing="half")(normal(4, 2, 8), backend="eager").requires_grad
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
    with pytest.raises(PositionError, match=r"positions has grid for images"):
        RotaryEmbedding(THREE, heads_first=False)(normal(4, 2, 8), normal(4, 2, 8))


def test_axes_that_come_first_are_told_where_they_go() -> None:
    """Transformers has positions of images as [3, batch, seq]."""
    rope = Rope(head_dim=8, pairing="half", axes=Sectioned((1, 1, 2)))
    for positions in (np.zeros((3, 5), dtype=int), torch.zeros(3, 2, 5, dtype=torch.int64)):
        with pytest.raises(PositionError, match=r"if the axes come first.*movedim\(0, -1\)"):
            rotate(torch.zeros(2, 5, 1, 8), positions, rope)
    with pytest.raises(PositionError, match=r"np\.moveaxis\(positions, 0, -1\)"):
        cos_sin(np.zeros((3, 5), dtype=int), rope)


def test_a_missing_key_is_told_of_the_function_for_one_tensor() -> None:
    """``rotate_qk(q, None, ...)``."""
    rope = Rope(head_dim=8, pairing="half")
    with pytest.raises(
        TensorError,
        match=r"^k must be a dense torch.Tensor, got NoneType; to rotate a single tensor",
    ):
        rotate_qk(torch.zeros(5, 1, 8), None, torch.arange(5), rope)
