"""Whatever Rope, shape, memory layout, dtype and position: the torch verbs match the oracle."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import vmap

from phasor import Rope
from phasor.axes import Alternating, Axial, InterleavedSections, Sectioned
from phasor.scaling import Linear
from phasor.torch import Rotation, rotate, rotate_, rotate_qk, rotate_qk_

from .torch_arrays import DTYPES, assert_rotated, excess_by, float64, normal

PAIRING = st.sampled_from(["half", "interleaved"])
AXES = {
    2: [None, Axial((1, 1)), Sectioned((0, 2)), InterleavedSections((1, 1))],
    3: [None, Axial((1, 0, 2)), Sectioned((1, 1, 1)), Alternating((1, 1, 1))],
    4: [None, Sectioned((2, 1, 1)), InterleavedSections((2, 1, 1)), Alternating((0, 2, 2))],
}
WHOLE = st.one_of(
    st.integers(-(2**11), 2**11),
    st.integers(-(2**40), 2**40),
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([s * 2**e + d for e in (10, 20, 30, 40) for d in (-1, 0, 1) for s in (1, -1)]),
)
REAL = st.one_of(
    st.floats(-100, 100), st.floats(-(2.0**40), 2.0**40), st.floats(-(2.0**62), 2.0**62)
)


class Case(NamedTuple):
    """A rotation to do."""

    rope: Rope
    lead: tuple[int, ...]
    places: Tensor
    options: dict[str, Any]


@st.composite
def ropes(draw: st.DrawFn) -> Rope:
    """Any slice, pairings, direction and axes; the plain law, one other, or explicit numbers."""
    pairs = draw(st.integers(1, 4))
    start, tail = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    fields: dict[str, Any] = {
        "axes": draw(st.sampled_from(AXES.get(pairs, [None]))),
        "direction": draw(st.sampled_from([1, -1])),
        "pairing_out": draw(st.none() | PAIRING),
    }
    if draw(st.booleans()):
        fields["base"] = draw(st.floats(1.5, 1e7))
        fields["scaling"] = draw(st.none() | st.builds(Linear, factor=st.floats(0.25, 64.0)))
    else:
        frequency = st.floats(1e-9, 6.25) | st.just(0.0)
        fields["explicit_inv_freq"] = tuple(
            draw(st.lists(frequency, min_size=pairs, max_size=pairs))
        )
    return Rope(
        head_dim=start + 2 * pairs + tail,
        rotary_dim=2 * pairs,
        rotary_start=start,
        pairing=draw(PAIRING),
        **fields,
    )


@st.composite
def cases(draw: st.DrawFn, *, whole: Any = WHOLE, real: Any = REAL) -> Case:
    """A Rope, tokens, and positions that broadcast to them."""
    rope = draw(ropes())
    lead = tuple(draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)))
    shape = [n if draw(st.booleans()) else 1 for n in lead[draw(st.integers(0, len(lead))) :]]
    n_axes = rope.axes.n_axes
    full = [*shape, n_axes] if n_axes > 1 else shape
    kinds = [torch.int64, torch.float64, torch.float32]
    kind = draw(st.sampled_from(kinds))
    count = int(np.prod(full))
    values = draw(
        st.lists(real if kind.is_floating_point else whole, min_size=count, max_size=count)
    )
    places = torch.tensor(values, dtype=kind).reshape(full)
    options = {"inverse": draw(st.booleans()), "gain": draw(st.just(1.0) | st.floats(0.125, 4.0))}
    return Case(rope, lead, places, options)


@st.composite
def tensors(
    draw: st.DrawFn, shape: tuple[int, ...], *, shared: bool = True, largest: int = 10
) -> Tensor:
    """Numbers of some size and dtype: permuted, strided, off by some elements, or expanded."""
    dtype = draw(st.sampled_from(DTYPES))
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.integers(1, 2)) for _ in shape]
    offset = draw(st.integers(0, 3))
    sizes = [shape[i] * steps[i] for i in order]
    numbers = normal(offset + int(np.prod(sizes)), seed=draw(st.integers(0, 99)))
    numbers = (numbers * 2.0 ** draw(st.integers(-20, largest))).to(dtype)
    x = numbers[offset:].view(sizes).permute([order.index(i) for i in range(len(shape))])
    x = x[tuple(slice(None, None, step) for step in steps)]
    if shared and draw(st.booleans()):
        at = draw(st.integers(0, len(shape) - 1))
        x = x.narrow(at, 0, min(1, shape[at])).expand(shape)
    assert x.shape == shape
    return x


def applied(options: dict[str, Any]) -> dict[str, Any]:
    """What cos and sin are multiplied by: the inverse undoes a gain."""
    gain = options["gain"]
    return options | {"gain": 1 / gain if options["inverse"] else gain}


def tokens(case: Case, data: st.DataObject, **options: bool) -> Tensor:
    """A tensor for that rotation."""
    heads = data.draw(st.integers(0, 3), label="heads")
    return data.draw(tensors((*case.lead, heads, case.rope.head_dim), **options), label="x")


@given(case=cases(), data=st.data())
def test_any_rotation_is_the_oracles(case: Case, data: st.DataObject) -> None:
    """Right to the derived bound, laid out like the input, and the input is as it was."""
    x = tokens(case, data)
    before = x.clone()
    y = rotate(x, case.places, case.rope, **case.options)
    assert_rotated(y, x, case.places, case.rope, **applied(case.options))
    assert y.stride() == torch.empty_like(x).stride()
    assert torch.equal(x, before)
    assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() or x.numel() == 0


@given(case=cases(), data=st.data())
def test_any_write_is_the_copy(case: Case, data: st.DataObject) -> None:
    """In place is out of place to the bit, for query and key of different dtypes and layouts."""
    q, k = (tokens(case, data, shared=False) for _ in range(2))
    expected = rotate_qk(q, k, case.places, case.rope, **case.options)
    for x, y in zip((q, k), expected, strict=True):
        assert torch.equal(rotate(x, case.places, case.rope, **case.options), y)
    alone = rotate_(q.clone(), case.places, case.rope, **case.options)
    written = rotate_qk_(q, k, case.places, case.rope, **case.options)
    assert all(map(torch.equal, (alone, *written), (expected[0], *expected)))


@given(case=cases(), data=st.data())
def test_any_backward_is_the_inverse_rotation(case: Case, data: st.DataObject) -> None:
    """With any layout of the incoming gradient."""
    x = tokens(case, data)
    out = data.draw(tensors(tuple(x.shape)), label="gradient").to(x.dtype)
    leaf = x.clone().requires_grad_()
    (came,) = torch.autograd.grad(
        rotate(leaf, case.places, case.rope, **case.options), leaf, out, allow_unused=True
    )
    inverse = not case.options["inverse"]
    options = applied(case.options) | {"inverse": inverse}
    assert_rotated(came, out, case.places, case.rope, **options)


@given(case=cases(), data=st.data())
def test_any_rows_turn_as_they_say(case: Case, data: st.DataObject) -> None:
    """Explicit rows of any float dtype, out of place and in place."""
    x = tokens(case, data, shared=False)
    rope = case.rope
    shape = (*(n for n in case.lead), rope.rotary_dim // 2)[data.draw(st.integers(0, 1)) :]
    # no larger, for the products to stay within float16
    cos, sin = (data.draw(tensors(shape, largest=0)) for _ in range(2))
    layout: dict[str, Any] = {
        "pairing": rope.pairing,
        "pairing_out": rope.pairing_out,
        "rotary_start": rope.rotary_start,
    }
    if len(shape) == len(case.lead):  # a dimension was left out: the rest must still broadcast
        cos, sin = cos.expand(shape), sin.expand(shape)
    rows = float64(cos) + 1j * float64(sin)
    y = Rotation(cos, sin, **layout)(x)
    pairing = (rope.pairing, rope.output_pairing)
    assert excess_by(y, x, rows, pairing, rope.rotary_start) <= 1
    assert torch.equal(Rotation(cos, sin, **layout).rotate_(x), y)


@given(
    case=cases(
        whole=st.integers(-(2**40) + 1, 2**40 - 1),
        # float32 has nothing between this and 2**40
        real=st.floats(-(2.0**40) + 2**16, 2.0**40 - 2**16, width=32),
    ),
    data=st.data(),
)
def test_any_batched_rotation_is_the_oracles(case: Case, data: st.DataObject) -> None:
    """Through torch.func's plain operations, a head at a time, wherever digits reach."""
    heads = data.draw(st.integers(1, 3), label="heads")
    x = data.draw(tensors((*case.lead, heads, case.rope.head_dim)), label="x")

    def one_head(t: Tensor) -> Tensor:
        return rotate(t.unsqueeze(-2), case.places, case.rope, **case.options).squeeze(-2)

    y = vmap(one_head, in_dims=-2, out_dims=-2)(x)
    assert_rotated(y, x, case.places, case.rope, **applied(case.options))
