"""`Rotation`: one value for the rotation of given tokens, whichever door it is asked at."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

import phasor
from phasor import Rope, SpecError, TensorError
from phasor.scaling import Yarn
from phasor.torch import (
    RotaryAttention,
    RotaryEmbedding,
    RotaryLinearAttention,
    Rotation,
    rotate,
    rotate_qk,
    rotate_qk_,
)

from .torch_arrays import normal

WARM = Rope(
    head_dim=16,
    pairing="interleaved",
    pairing_out="half",
    rotary_dim=8,
    rotary_start=4,
    scaling=Yarn(factor=4.0, original_max_positions=64),
)
PLACES = torch.tensor([3, 70_001, -5, 2**33])


def doors(q: Tensor, k: Tensor, positions: Tensor, rope: Rope) -> dict[str, tuple[Tensor, ...]]:
    """A query and a key rotated in every way there is."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    rotation = Rotation.at(positions, rope, dtype=wide)
    rotary = RotaryEmbedding(rope, heads_first=False)
    written = q.clone(), k.clone()
    first = [x.transpose(1, 2) for x in (q, k)]
    own = Rotation(
        rotation.cos,
        rotation.sin,
        pairing=rope.pairing,
        pairing_out=rope.pairing_out,
        rotary_start=rope.rotary_start,
    )
    return {
        "one call": rotate_qk(q, k, positions, rope),
        "one call, in place": rotate_qk_(q.clone(), k.clone(), positions, rope),
        "alone": (rotate(q, positions, rope), rotate(k, positions, rope)),
        "rotation": rotation(q, k),
        "rotation, in place": rotation.rotate_(*written),
        "rotation, alone": (rotation(q), rotation(k)),
        "of one's own": own(q, k),
        "heads first": tuple(y.transpose(1, 2) for y in rotation(*first, heads_first=True)),
        "module": rotary(q, k, positions),
        "module, shared": rotary(q, k, rotary.at(positions, dtype=wide)),
        "module, alone": (rotary(q, positions=positions), rotary(k, positions=positions)),
    }


def ropes_of(name: str) -> set[Rope]:
    """The different ropes of a preset, with the law of its context."""
    layers = phasor.preset(name)
    return {rope.at(layers.context or 4096) for rope in layers.ropes}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_door_gives_the_same_bits_for_every_preset(dtype: torch.dtype) -> None:
    """The attention factor is in all of them, and the inverse undoes it."""
    room = {torch.float32: 2**-18, torch.bfloat16: 2**-4, torch.float64: 2**-46}[dtype]
    for rope in set[Rope]().union(*map(ropes_of, phasor.preset_names())):
        q = normal(1, 4, 4, rope.head_dim, dtype=dtype)
        k = normal(1, 4, 2, rope.head_dim, dtype=dtype, seed=1)
        positions = torch.arange(100, 104)
        if rope.axes.n_axes > 1:
            positions = torch.stack([positions] * rope.axes.n_axes, -1)
        (name, first), *others = doors(q, k, positions, rope).items()
        for other, made in others:
            assert all(map(torch.equal, first, made)), (name, other, rope)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        rotation = Rotation.at(positions, rope, dtype=wide)
        assert float((rotation.inverse()(first[0]) - q).abs().max()) <= room * q.abs().max()
        back = rotate(first[0], positions, rope, inverse=True)
        assert float((back - q).abs().max()) <= room * q.abs().max()


def test_the_attention_factor_is_in_it_unless_it_is_left_out() -> None:
    """By default, by a number, and by 1."""
    x, factor = normal(4, 2, 16), WARM.attention_factor
    assert factor > 1
    # the pairs of a rotated slice are as long as they were, times the factor
    lengths = x[..., 4:12].norm(dim=-1)
    for gain, expected in ((None, factor), (1.5, 1.5), (1.0, 1.0)):
        for y in (Rotation.at(PLACES, WARM, gain=gain)(x), rotate(x, PLACES, WARM, gain=gain)):
            torch.testing.assert_close(y[..., 4:12].norm(dim=-1), expected * lengths)


def test_layers_may_be_given_the_rotation_of_the_model_around_them() -> None:
    """Attention with its queries and keys, and with keys of another sequence."""
    rope = Rope(head_dim=8, pairing="half")
    x, memory = normal(1, 5, 16), normal(1, 3, 16, seed=1)
    layer = RotaryAttention(rope, 16, num_heads=2)
    rotation = Rotation.at(torch.arange(5), rope)
    assert torch.equal(layer(x, rotation), layer(x))
    cross = RotaryAttention(rope, 16, num_heads=2, causal=False)
    made = cross(
        x, rotation, key_value_states=memory, key_value_positions=Rotation.at([0, 1, 2], rope)
    )
    assert torch.equal(made, cross(x, key_value_states=memory))


def test_a_tree_of_two_tensors_is_taken_apart_and_put_together() -> None:
    """By torch's own functions, by copies and by pickles, without a check on the way."""
    rotation = Rotation.at(PLACES, WARM)
    x = normal(4, 2, 16)
    leaves, spec = _pytree.tree_flatten(rotation)
    assert [leaf is row for leaf, row in zip(leaves, (rotation.cos, rotation.sin), strict=True)]
    placeholders = _pytree.tree_unflatten([0, None], spec)
    assert (placeholders.cos, placeholders.sin) == (0, None)
    for again in (
        _pytree.tree_map(torch.clone, rotation),
        copy.deepcopy(rotation),
        pickle.loads(pickle.dumps(rotation)),
    ):
        assert type(again) is Rotation
        assert torch.equal(again(x), rotation(x))
    moved = _pytree.tree_map(lambda row: row.to("meta"), rotation)
    assert moved(x.to("meta")).is_meta


def test_checkpointing_and_vmap_take_it() -> None:
    """With the gradients of the plain call; a batch of rotations is one for each entry."""
    rotation = Rotation.at(torch.stack((PLACES, PLACES + 7)), WARM)
    x = normal(2, 4, 2, 16).requires_grad_()
    y = checkpoint(lambda rotation, x: rotation(x), rotation, x, use_reentrant=False)
    (came,) = torch.autograd.grad(y.sum(), x)
    (right,) = torch.autograd.grad(rotation(x).sum(), x)
    assert torch.equal(came, right)
    by_entry = torch.vmap(lambda rotation, x: rotation(x))(rotation, x.detach())
    assert torch.allclose(by_entry, rotation(x.detach()), atol=1e-6)


@pytest.mark.compile
def test_graphs_and_programs_take_it() -> None:
    """As an argument, with eager's numbers; and one that is made inside."""

    class Layers(torch.nn.Module):
        """Two layers that share it."""

        def forward(self, q: Tensor, rotation: Rotation) -> Tensor:
            """Rotated twice, and by one of its own."""
            return Rotation.at(torch.arange(4), WARM)(rotation(rotation(q)))

    rotation, x = Rotation.at(PLACES, WARM), normal(4, 2, 16)
    expected = Layers()(x, rotation)
    torch._dynamo.reset()
    for backend in ("aot_eager", "inductor"):
        quick = torch.compile(Layers(), fullgraph=True, backend=backend)
        torch.testing.assert_close(quick(x, rotation), expected, rtol=0, atol=1e-5)
    program = torch.export.export(Layers(), (x, rotation)).module()
    torch.testing.assert_close(program(x, rotation), expected, rtol=0, atol=1e-5)


def test_the_backward_pass_keeps_the_shared_rows_alone() -> None:
    """Whatever the number of layers."""
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    rotation = Rotation.at(PLACES, WARM)
    q, k = normal(2, 4, 6, 16).requires_grad_(), normal(2, 4, 2, 16).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        for _ in range(3):
            rotation(q, k)
    assert {x.data_ptr() for x in kept} == {rotation.cos.data_ptr(), rotation.sin.data_ptr()}


@pytest.mark.parametrize(
    "index", [slice(-1, None), slice(0, 2), [2, 0], torch.tensor([1, 1]), slice(None, None, 2)]
)
def test_some_tokens_of_a_longer_rotation_are_theirs(index: Any) -> None:
    """Bit for bit, also where each row has positions of its own."""
    x = normal(2, 4, 3, 16)
    for places in (PLACES, torch.stack((PLACES, PLACES + 1))):
        rotation = Rotation.at(places, WARM)
        assert torch.equal(rotation[index](x[:, index]), rotation(x)[:, index])


def test_a_number_keeps_the_dimension_of_tokens() -> None:
    """So that a row of a batch is never taken for a token."""
    rotation = Rotation.at(torch.stack((PLACES, PLACES + 1)), WARM)
    x = normal(2, 4, 3, 16)
    assert rotation[-1].cos.shape == (2, 1, 4)
    assert torch.equal(rotation[-1](x[:, -1:]), rotation(x)[:, -1:])


ROW = torch.ones(4, 4)
REFUSED = {
    "a Rotation takes one tensor, or a query and a key, got 3; values are not rotated": (
        lambda: Rotation(ROW, ROW, pairing="half")(*[torch.zeros(4, 2, 8)] * 3)
    ),
    "sin must have the shape of cos [4, 4], got [4]": lambda: Rotation(ROW, ROW[0], pairing="half"),
    "x must end in head_dim (16), got 32": lambda: Rotation.at(PLACES, WARM)(torch.zeros(4, 2, 32)),
    "q and k must share their tokens [..., seq], got [4] and [5]": (
        lambda: Rotation.at(PLACES, WARM)(torch.zeros(4, 2, 16), torch.zeros(5, 2, 16))
    ),
    "a Rotation of 4 tokens has no token 4": lambda: Rotation.at(PLACES, WARM)[4],
    "a Rotation is indexed by token alone": lambda: Rotation.at(PLACES, WARM)[:, 1],
    "index cos and sin before": (lambda: Rotation(ROW[None], ROW[None], pairing="half")[-1:]),
    "q and k must be two different tensors": lambda: Rotation.at(PLACES, WARM).rotate_(
        *[normal(4, 2, 16)] * 2
    ),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_does_not_fit_is_refused(text: str) -> None:
    """In words that name what came."""
    with pytest.raises(TensorError, match=re.escape(text)):
        REFUSED[text]()


def test_it_prints_what_it_is_and_is_not_taken_for_a_pair() -> None:
    """Unpacking would otherwise index by 0 and 1."""
    assert repr(Rotation.at(PLACES, WARM)) == (
        "Rotation(cos and sin [4, 4] float32, pairing='interleaved', pairing_out='half', "
        "rotary_start=4, head_dim=16)"
    )
    with pytest.raises(TypeError, match=r"Rotation.*not iterable"):
        _, _ = Rotation.at(PLACES, WARM)


def test_its_attributes_are_not_assigned_to() -> None:
    """What calls keep of it would be of another rotation."""
    rotation = Rotation.at(PLACES, WARM)
    with pytest.raises(SpecError, match="a Rotation is immutable; make a new one"):
        rotation.pairing = "half"
    with pytest.raises(SpecError, match="is immutable"):
        rotation.cos = rotation.sin


def test_cos_and_sin_that_begin_to_want_a_gradient_get_it() -> None:
    """Earlier calls had none to record."""
    cos, sin = normal(4, 4).float(), normal(4, 4).float()
    own = Rotation(cos, sin, pairing="half")
    x = normal(4, 2, 16).float()
    own(x)
    cos.requires_grad_()
    own(x).sum().backward()
    assert cos.grad is not None
    assert bool(cos.grad.any())


def test_negated_views_are_turned_by_as_what_they_stand_for() -> None:
    """The memory of a conjugate's imaginary part holds other signs."""
    turns = torch.polar(torch.ones(4, 4), normal(4, 4).float())
    sin = turns.conj().imag
    assert sin.is_neg()
    x = normal(4, 2, 16).float()
    lazy = Rotation(turns.real.contiguous(), sin, pairing="half")
    plain = Rotation(turns.real.contiguous(), sin.resolve_neg().contiguous(), pairing="half")
    for _ in range(2):
        assert torch.equal(lazy(x), plain(x))


MODULES = {
    "rotary": RotaryEmbedding(WARM, heads_first=False),
    "attention": RotaryAttention(WARM, 32, 2),
    "linear": RotaryLinearAttention(WARM, 32, 2),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize(
    "key", ["inv_freq", "cos_cached", "sin_cached", "cos_sin_cache", "rotary_emb.inv_freq"]
)
def test_tables_of_other_modules_are_dropped_from_a_state_dict(key: str, name: str) -> None:
    """They are no state; any other key is still unexpected."""
    model = torch.nn.ModuleDict({name: MODULES[name]})
    model.load_state_dict({**model.state_dict(), f"{name}.{key}": torch.zeros(4)})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({**model.state_dict(), f"{name}.weight": torch.zeros(4)})


def test_what_a_subclass_has_under_such_a_name_is_loaded() -> None:
    """It is state there."""

    class Learned(RotaryAttention):
        """One with frequencies of its own."""

        def __init__(self) -> None:
            super().__init__(WARM, 32, 2)
            self.inv_freq = torch.nn.Parameter(torch.zeros(4))

    loaded = Learned()
    loaded.load_state_dict({**loaded.state_dict(), "inv_freq": torch.ones(4)})
    assert torch.equal(loaded.inv_freq, torch.ones(4))
