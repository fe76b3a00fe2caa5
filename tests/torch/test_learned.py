"""`LearnedRotaryEmbedding`: pairs times ``exp(i p f)``, with ``f`` a parameter that stays exact."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.nn.utils import parametrize

from phasor import Rope
from phasor.axes import Axial, Mixed
from phasor.errors import PositionError, SpecError, TensorError
from phasor.scaling import DynamicNTK, Linear, Yarn
from phasor.torch import LearnedRotaryEmbedding, RotaryEmbedding, Rotation

from ..each import each
from ..oracle import pair_places
from .torch_arrays import normal

HALF = Rope(head_dim=8, pairing="half", base=100.0)
#: Everything that a Rope can have besides frequencies.
ODD = Rope(
    head_dim=12, pairing="interleaved", pairing_out="half", rotary_dim=8, rotary_start=2, base=50.0,
    direction=-1, scaling=Yarn(factor=8.0, original_max_positions=64),
)  # fmt: skip
AXIAL = Rope(
    head_dim=8,
    pairing="half",
    axes=Axial((1, 3), base=(50.0, 1e3), scaling=(None, Linear(factor=2.0))),
)
MIXED = Rope(head_dim=8, pairing="half", axes=Mixed(((1.0, 0.5, -0.3, 0.2), (0.1, 0.7, 0.0, 2.0))))
ROPES = {"half": HALF, "odd": ODD, "axial": AXIAL, "mixed": MIXED}
BATCH, SEQ, HEADS = 2, 5, 6


def places(rope: Rope) -> np.ndarray:
    """Positions ``[batch, seq]``, some negative and some far out, or ``[batch, seq, n_axes]``."""
    axes = (rope.axes.n_axes,) if rope.axes.n_axes > 1 else ()
    return np.random.default_rng(0).integers(-9, 2**20, (BATCH, SEQ, *axes))


def closed_form(x: Tensor, positions: np.ndarray, inv_freq: Tensor, rope: Rope) -> np.ndarray:
    """Every pair as a complex number times ``exp(i p f)`` in complex128, head by head.

    ``inv_freq`` is by head, ``[heads, num_pairs]`` or ``[heads, n_axes, num_pairs]``.
    """
    frequencies, result = inv_freq.detach().double().numpy(), x.detach().double().numpy().copy()
    written = result.copy()
    read = pair_places(rope.pairing, rope.rotary_start, rope.num_pairs)
    out = pair_places(rope.output_pairing, rope.rotary_start, rope.num_pairs)
    for head in range(x.shape[-2]):
        for pair in range(rope.num_pairs):
            if isinstance(rope.axes, Mixed):
                angle = positions @ frequencies[head, :, pair]
            elif rope.axes.n_axes > 1:  # one pair by rows, three by columns
                angle = positions[..., 0 if pair < 1 else 1] * frequencies[head, pair]
            else:
                angle = positions * frequencies[head, pair]
            z = result[..., head, read[0][pair]] + 1j * result[..., head, read[1][pair]]
            # YaRN's factor, 0.1 ln(8) + 1
            z = z * np.exp(1j * rope.direction * angle) * (1.2079441541679836 if rope == ODD else 1)
            written[..., head, out[0][pair]] = z.real
            written[..., head, out[1][pair]] = z.imag
    return written


def learned(rope: Rope, num_heads: int | None = None, **options: Any) -> LearnedRotaryEmbedding:
    """A module whose frequencies have been learned: random ones."""
    rotary = LearnedRotaryEmbedding(rope, num_heads, **({"heads_first": False} | options))
    with torch.no_grad():
        rotary.inv_freq.copy_(normal(*rotary.inv_freq.shape, seed=4).abs())
    return rotary


def room(x: Tensor) -> float:
    """Cos and sin to 6e-8, an angle to 2**-53 of itself, and roundings of the rotation.

    All times the factor of ODD, and the root of two coordinates.
    """
    rows = (2.0**-24 if x.dtype == torch.float32 else 2.0**-53) + 2.0**22 * 2.0**-53
    return 3 * float(x.abs().max()) * (rows + 3 * torch.finfo(x.dtype).eps)


@each("dtype", [torch.float32, torch.float64])
@each("heads_first", [False, True])
@pytest.mark.parametrize("num_heads", [None, 3, 6])
@pytest.mark.parametrize("name", ROPES)
def test_pairs_are_multiplied_by_the_exponential_of_the_parameter(
    name: str, num_heads: int | None, heads_first: bool, dtype: torch.dtype
) -> None:
    """Shared, by key head, and by head, in every layout, called and by `at`."""
    rope = ROPES[name]
    rotary = learned(rope, num_heads, heads_first=heads_first)
    q = normal(BATCH, SEQ, HEADS, rope.head_dim, dtype=dtype)
    k = normal(BATCH, SEQ, num_heads or 2, rope.head_dim, seed=1, dtype=dtype)
    positions = places(rope)
    by_head = rotary.inv_freq if num_heads else rotary.inv_freq[None].repeat_interleave(6, 0)
    of_q = by_head.repeat_interleave(HEADS // len(by_head), 0)
    expected = closed_form(q, positions, of_q, rope), closed_form(k, positions, by_head, rope)
    given = (q.transpose(1, 2), k.transpose(1, 2)) if heads_first else (q, k)
    rotation = rotary.at(torch.from_numpy(positions), dtype=dtype)
    assert rotation.cos.dtype == dtype
    for where in (torch.from_numpy(positions), positions, rotation):
        for y, right, x in zip(rotary(*given, where), expected, (q, k), strict=True):
            y = y.transpose(1, 2) if heads_first else y
            assert y.dtype == dtype
            assert np.abs(y.detach().double().numpy() - right).max() <= room(x)
    alone = rotary(given[0], positions=rotation)
    assert torch.equal(alone, rotary(*given, rotation)[0])


@pytest.mark.parametrize("num_heads", [None, 2])
@pytest.mark.parametrize("name", ROPES)
def test_the_gradient_of_the_frequencies_is_right(name: str, num_heads: int | None) -> None:
    """And of queries and keys, numerically."""
    rope = ROPES[name]
    rotary = learned(rope, num_heads).double()
    q = normal(BATCH, SEQ, 4, rope.head_dim, dtype=torch.float64).requires_grad_()
    k = normal(BATCH, SEQ, 2, rope.head_dim, dtype=torch.float64, seed=1).requires_grad_()
    positions = places(rope) % 7

    def function(inv_freq: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return torch.func.functional_call(rotary, {"inv_freq": inv_freq}, (q, k, positions))

    assert gradcheck(function, (rotary.inv_freq.detach().requires_grad_(), q, k))


@pytest.mark.parametrize("name", ["half", "odd"])
def test_it_starts_as_the_rope_and_counts_as_its_module(name: str) -> None:
    """Given positions, an offset, sequences, or nothing."""
    rope = ROPES[name]
    plain = RotaryEmbedding(rope, heads_first=False)
    rotary = LearnedRotaryEmbedding(rope, 2, heads_first=False)
    q, k = normal(2, 7, 4, rope.head_dim), normal(2, 7, 2, rope.head_dim, seed=1)
    packed = torch.tensor([0, 3, 7])
    for more in ({}, {"offset": 5}, {"offset": torch.tensor([5, -2])}, {"cu_seqlens": packed}):
        for y, right in zip(rotary(q, k, **more), plain(q, k, **more), strict=True):
            # frequencies are rounded to float32, positions are below 12
            assert torch.allclose(y, right, atol=5e-6, rtol=0)


@pytest.mark.parametrize("num_heads", [None, 3])
@pytest.mark.parametrize("name", ROPES)
def test_learned_frequencies_are_ropes_again(name: str, num_heads: int | None) -> None:
    """Exact at any position, with all else that the rope had."""
    rope = ROPES[name]
    rotary = learned(rope, num_heads)
    x, positions = normal(1, 3, num_heads or 1, rope.head_dim, dtype=torch.float64), [3, 1, 2]
    if rope.axes.n_axes > 1:
        positions = [[p, 2 * p] for p in positions]
    for head, exact in enumerate(rotary.ropes()):
        assert exact.attention_factor == rope.attention_factor
        again = RotaryEmbedding(Rope.from_json(exact.to_json()), heads_first=False)
        expected = rotary(x, positions=positions)[..., head : head + 1, :]
        y = again(x[..., head : head + 1, :], positions=np.array(positions))
        assert torch.allclose(y, expected, atol=1e-12, rtol=0)
    assert len(rotary.ropes()) == (num_heads or 1)


def test_a_negative_frequency_makes_no_rope() -> None:
    """Nor does one that is not a number; pairs of mixed axes may turn backwards."""
    rotary = learned(HALF)
    for bad in (-1e-6, torch.nan):
        with torch.no_grad():
            rotary.inv_freq[2] = bad
        with pytest.raises(SpecError, match=r"inv_freq must be from 0 on.*logarithm"):
            rotary.ropes()
    (mixed,) = LearnedRotaryEmbedding(MIXED, heads_first=False).ropes()
    assert isinstance(mixed.axes, Mixed)
    assert min(mixed.axes.inv_freq[0]) < 0


class Model(nn.Module):
    """A model of one layer, whose frequencies have the name they have in transformers."""

    def __init__(self, rotary: LearnedRotaryEmbedding) -> None:
        super().__init__()
        self.rotary_emb, self.proj = rotary, nn.Linear(8, 8)


def test_frequencies_are_saved_and_loaded_by_their_usual_name(tmp_path: Path) -> None:
    """Plain values, through torch.save and safetensors, and from a module of transformers."""
    model, fresh = Model(learned(HALF, 2)), Model(LearnedRotaryEmbedding(HALF, 2, heads_first=True))
    assert set(model.state_dict()) == {"rotary_emb.inv_freq", "proj.weight", "proj.bias"}
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    fresh.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(fresh.rotary_emb.inv_freq, model.rotary_emb.inv_freq)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    with torch.device("meta"):
        empty = Model(LearnedRotaryEmbedding(HALF, 2, heads_first=True))
    empty.load_state_dict(torch.load(file), assign=True)
    assert torch.equal(empty.rotary_emb.inv_freq, model.rotary_emb.inv_freq)

    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    sizes: Any = {"hidden_size": 16, "num_attention_heads": 2, "rope_theta": 77.0}
    foreign = LlamaRotaryEmbedding(LlamaConfig(**sizes))
    buffers = {f"rotary_emb.{name}": buffer for name, buffer in foreign.named_buffers()}
    model = Model(LearnedRotaryEmbedding(HALF, heads_first=True))
    missing, unexpected = model.load_state_dict(buffers, strict=False)
    assert torch.equal(model.rotary_emb.inv_freq, buffers["rotary_emb.inv_freq"])
    assert set(missing) == {"proj.weight", "proj.bias"}
    assert unexpected == ["rotary_emb.original_inv_freq"]


def test_a_cast_of_the_model_leaves_the_frequencies_as_they_are() -> None:
    """They and their gradients move and widen, and never become 16 bits."""
    rotary = learned(HALF)
    kept = rotary.inv_freq.detach().clone()
    rotary(normal(1, 3, 2, 8)).sum().backward()
    model = Model(rotary)
    for cast in (model.half, model.bfloat16, lambda: model.to(torch.bfloat16), model.float):
        cast()
        assert rotary.inv_freq.dtype == torch.float32
        assert torch.equal(rotary.inv_freq, kept)
        assert rotary.inv_freq.grad is not None
        assert isinstance(rotary.inv_freq, nn.Parameter)
    assert model.bfloat16().proj.weight.dtype == torch.bfloat16
    assert rotary(normal(1, 3, 2, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert model.double().rotary_emb.inv_freq.dtype == torch.float64
    assert model.to("meta", torch.bfloat16).rotary_emb.inv_freq.is_meta


def test_frequencies_saved_in_16_bits_are_float32_again() -> None:
    """Also if they are assigned; a parameter of 16 bits is an error, not a silent rounding."""
    rotary = learned(HALF)
    saved = {"inv_freq": normal(4).abs().bfloat16()}
    for assign in (False, True):
        rotary.load_state_dict(saved, assign=assign)
        assert rotary.inv_freq.dtype == torch.float32
        assert torch.equal(rotary.inv_freq, saved["inv_freq"].float())
    assert saved["inv_freq"].dtype == torch.bfloat16
    rotary.inv_freq = nn.Parameter(saved["inv_freq"])
    with pytest.raises(TensorError, match=r"float32 or float64.*_keep_in_fp32_modules_strict"):
        rotary.at(3)


def test_frequencies_made_without_memory_are_set_again() -> None:
    """By the method of every layer of torch; the default dtype does not round them."""
    with torch.device("meta"):
        rotary = LearnedRotaryEmbedding(HALF, 3, heads_first=False)
    assert rotary.inv_freq.is_meta
    rotary.to_empty(device="cpu").reset_parameters()
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        rounded = LearnedRotaryEmbedding(HALF, 3, heads_first=False)
    finally:
        torch.set_default_dtype(usual)
    right = torch.tensor([1.0, 100**-0.25, 0.1, 100**-0.75]).expand(3, 4)
    for one in (rotary, rounded):
        assert torch.allclose(one.inv_freq, right, rtol=1e-7, atol=0)


def test_copies_and_pickles_are_equal_and_apart() -> None:
    """With the hook that reads states."""
    rotary = learned(HALF, 2)
    for again in (copy.deepcopy(rotary), pickle.loads(pickle.dumps(rotary))):
        assert torch.equal(again.inv_freq, rotary.inv_freq)
        again.load_state_dict({"inv_freq": torch.ones(2, 4).bfloat16()}, assign=True)
        assert again.inv_freq.dtype == torch.float32
        assert not torch.equal(again.inv_freq, rotary.inv_freq)


class Exp(nn.Module):
    """The parametrization that the page shows."""

    def forward(self, log: Tensor) -> Tensor:
        return log.exp()

    def right_inverse(self, inv_freq: Tensor) -> Tensor:
        return inv_freq.log()


def test_the_logarithm_can_be_learned_instead() -> None:
    """Values stay, also in 16 bits, and are saved plainly once the parametrization is removed."""
    rotary = learned(HALF, 2)
    kept = rotary.inv_freq.detach().clone()
    parametrize.register_parametrization(rotary, "inv_freq", Exp())
    rotary.bfloat16()
    assert torch.allclose(rotary.inv_freq, kept, rtol=1e-6, atol=0)
    rotary(normal(1, 3, 2, 8)).sum().backward()
    (log,) = rotary.parameters()
    assert log.grad is not None
    assert rotary.ropes()[0].num_pairs == 4
    with pytest.raises(RuntimeError, match=r"(?s)Missing.*original.*Unexpected.*inv_freq"):
        rotary.load_state_dict({"inv_freq": kept})
    parametrize.remove_parametrizations(rotary, "inv_freq")
    rotary.load_state_dict({"inv_freq": kept})
    assert torch.equal(rotary.inv_freq, kept)


def test_training_finds_the_frequencies_of_another_rope() -> None:
    """From scores alone, by head."""
    target = Rope(head_dim=4, pairing="half", base=10.0)
    rotary = LearnedRotaryEmbedding(Rope(head_dim=4, pairing="half", base=7.0), 1, heads_first=True)
    teacher = RotaryEmbedding(target, heads_first=True)
    q, k = normal(1, 1, 16, 4), normal(1, 1, 16, 4, seed=1)
    expected = torch.matmul(*(x if i else x.mT for i, x in enumerate(teacher(k, q))))
    optimizer = torch.optim.Adam(rotary.parameters(), lr=1e-3)
    for _ in range(300):
        optimizer.zero_grad()
        scores = torch.matmul(*(x if i else x.mT for i, x in enumerate(rotary(k, q))))
        (scores - expected).square().mean().backward()
        optimizer.step()
    assert np.allclose(rotary.ropes()[0].inv_freq, target.inv_freq, atol=2e-3)


@pytest.mark.compile
@pytest.mark.parametrize("num_heads", [None, 2])
def test_it_works_compiled_and_under_autocast(num_heads: int | None, one_graph: None) -> None:
    """With the same values and gradients, and angles that autocast does not round."""
    rotary = learned(HALF, num_heads)
    q, k = normal(2, 5, 4, 8), normal(2, 5, 2, 8, seed=1)
    positions = torch.arange(5) + 100_000

    def run(function: Any) -> tuple[Tensor, Tensor, Tensor]:
        rotary.zero_grad()
        y, z = function(q, k, positions)
        (y.sin().sum() + z.cos().sum()).backward()
        assert rotary.inv_freq.grad is not None
        return y.detach(), z.detach(), rotary.inv_freq.grad

    plain, compiled = run(rotary), run(torch.compile(rotary, fullgraph=True))
    with torch.autocast("cpu", torch.bfloat16):
        cast = run(rotary)
    for right, other, same in zip(plain, compiled, cast, strict=True):
        assert torch.equal(right, same)
        # gradients are sums of twenty terms times positions
        assert torch.allclose(right, other, rtol=1e-5, atol=1e-5)


@pytest.mark.compile
def test_it_can_be_exported() -> None:
    """As a program whose frequencies are a parameter."""
    rotary = learned(HALF, 2)
    q, k, positions = normal(2, 5, 4, 8), normal(2, 5, 2, 8, seed=1), torch.arange(5)
    program = torch.export.export(rotary, (q, k, positions))
    assert [*program.state_dict] == ["inv_freq"]
    for y, right in zip(program.module()(q, k, positions), rotary(q, k, positions), strict=True):
        assert torch.allclose(y, right, atol=1e-6, rtol=0)


def test_wrong_calls_are_refused_by_name() -> None:
    """Each with a way out."""
    rotary, by_head = learned(HALF), learned(HALF, 4)
    x = normal(2, 5, 8, 8)
    with pytest.raises(TensorError, match=r"k must have a multiple of 4 heads.*key heads"):
        by_head(x, normal(2, 5, 2, 8))
    with pytest.raises(SpecError, match="heads_first must be given"):
        LearnedRotaryEmbedding(HALF)
    with pytest.raises(SpecError, match="num_heads must be"):
        LearnedRotaryEmbedding(HALF, 0, heads_first=True)
    rule = Rope(
        head_dim=8, pairing="half", scaling=DynamicNTK(factor=2.0, original_max_positions=8)
    )
    with pytest.raises(SpecError, match="seq_len"):
        LearnedRotaryEmbedding(rule, heads_first=True)
    with pytest.raises(SpecError, match=r"must be a phasor\.Rope"):
        LearnedRotaryEmbedding(8, heads_first=True)  # pyright: ignore[reportArgumentType]
    with pytest.raises(PositionError, match="broadcast"):
        rotary(x, positions=torch.arange(4))
    with pytest.raises(PositionError, match="exclude each other"):
        rotary(x, positions=torch.arange(5), offset=1)
    with pytest.raises(PositionError, match="must be given for a Rope of 2 axes"):
        learned(AXIAL)(x)
    with pytest.raises(SpecError, match="positions=position_ids"):
        rotary(x, position_ids=torch.arange(5))
    with pytest.raises(SpecError, match="dtype must be"):
        rotary.at(torch.arange(5), dtype=torch.bfloat16)
    with pytest.raises(TensorError, match="index cos and sin before"):
        by_head.at(torch.arange(5))[1:]


def test_a_law_that_stretches_angles_is_where_training_starts() -> None:
    """The frequencies are those after the law, not divided again."""
    rope = Rope(head_dim=8, pairing="half", scaling=Linear(factor=4.0))
    rotary = LearnedRotaryEmbedding(rope, heads_first=False)
    assert np.allclose(rotary.inv_freq.detach().numpy(), rope.inv_freq, rtol=1e-7)
    (exact,) = rotary.ropes()
    assert exact.scaling is None
    assert np.allclose(exact.inv_freq, rope.inv_freq, rtol=1e-7)


def test_a_rotation_by_token_from_elsewhere_is_applied_as_it_is() -> None:
    """Also by a module whose own rotations are by head."""
    x = normal(8, 8, 8, 8)
    rotation = Rotation.at(torch.arange(8), HALF)
    assert torch.equal(learned(HALF, 8)(x, positions=rotation), rotation(x))
