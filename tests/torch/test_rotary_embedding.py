"""`RotaryEmbedding` rotates by the positions that it counts, and holds nothing but its Rope."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from phasor import Rope
from phasor.errors import BackendError, PositionError, SpecError, TensorError
from phasor.scaling import DynamicNTK, Yarn
from phasor.torch import RotaryEmbedding, positions

from ..rotation_cases import THREE
from .torch_arrays import assert_rotated, normal
from .torch_cases import HALF, MIXED

WARM = Rope(head_dim=8, pairing="half", scaling=Yarn(factor=8.0, original_max_positions=64))
BATCH, SEQ = 2, 7

#: What is given, and where the tokens of each row then stand.
COUNTED: dict[str, tuple[dict[str, Any], list[list[int]]]] = {
    "nothing": ({}, [[0, 1, 2, 3, 4, 5, 6]] * 2),
    "an offset": ({"offset": 40}, [[40, 41, 42, 43, 44, 45, 46]] * 2),
    "an offset before 0": ({"offset": -3}, [[-3, -2, -1, 0, 1, 2, 3]] * 2),
    "an offset as a tensor": ({"offset": torch.tensor(9)}, [[9, 10, 11, 12, 13, 14, 15]] * 2),
    "one per row": (
        {"offset": torch.tensor([5, -2], dtype=torch.int32)},
        [[5, 6, 7, 8, 9, 10, 11], [-2, -1, 0, 1, 2, 3, 4]],
    ),
    "sequences": (
        {"cu_seqlens": torch.tensor([0, 3, 3, 7], dtype=torch.int32)},
        [[0, 1, 2, 0, 1, 2, 3]] * 2,
    ),
    "sequences in a list": ({"cu_seqlens": [0, 3, 3, 7]}, [[0, 1, 2, 0, 1, 2, 3]] * 2),
    "sequences and padding": (
        {"cu_seqlens": torch.tensor([0, 3, 5], dtype=torch.int32)},
        [[0, 1, 2, 0, 1, 0, 1]] * 2,
    ),
    "sequences and an offset": (
        {"cu_seqlens": [0, 3, 7], "offset": 10},
        [[10, 11, 12, 10, 11, 12, 13]] * 2,
    ),
    "one for each sequence": (
        {"cu_seqlens": torch.tensor([0, 3, 3, 5]), "offset": torch.tensor([10, 20, -30])},
        [[10, 11, 12, -30, -29, 0, 1]] * 2,
    ),
    "one for all sequences": (
        {"cu_seqlens": [0, 3, 7], "offset": torch.tensor(4)},
        [[4, 5, 6, 4, 5, 6, 7]] * 2,
    ),
}


def pair(heads_first: bool = False, **options: Any) -> tuple[Tensor, Tensor]:
    """A query of four heads and a key of two."""
    q, k = normal(BATCH, SEQ, 4, 8, **options), normal(BATCH, SEQ, 2, 8, seed=1, **options)
    return (q.transpose(1, 2), k.transpose(1, 2)) if heads_first else (q, k)


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("rope", [HALF, MIXED], ids=["half", "mixed"])
@pytest.mark.parametrize("name", COUNTED)
def test_tokens_stand_where_they_are_counted(name: str, rope: Rope, heads_first: bool) -> None:
    """From the start of each row or sequence on, plus the offset."""
    options, expected = COUNTED[name]
    given = pair(heads_first)
    made = RotaryEmbedding(rope, heads_first=heads_first)(*given, **options)
    for y, x in zip(made, given, strict=True):
        y, x = (y.transpose(1, 2), x.transpose(1, 2)) if heads_first else (y, x)
        assert_rotated(y, x, expected, rope)


def test_packed_tokens_need_no_batch() -> None:
    """As variable-length kernels take them, with an offset for each sequence."""
    x = normal(5, 2, 8)
    bounds, offset = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([7, 0])
    for y in RotaryEmbedding(HALF, heads_first=False)(x, x, cu_seqlens=bounds, offset=offset):
        assert_rotated(y, x, [7, 8, 0, 1, 2], HALF)


def test_positions_may_be_given() -> None:
    """Of every form that `rotate` takes; several axes want them."""
    q, k = pair()
    places = torch.arange(BATCH * SEQ).reshape(BATCH, SEQ) * 70_001 - 5
    for y, x in zip(RotaryEmbedding(HALF, heads_first=False)(q, k, places), (q, k), strict=True):
        assert_rotated(y, x, places, HALF)
    grid = torch.stack((places, places * 2, places * 3), -1)
    for y, x in zip(RotaryEmbedding(THREE, heads_first=False)(q, k, grid), (q, k), strict=True):
        assert_rotated(y, x, grid, THREE)


def test_the_gain_is_the_ropes_unless_it_is_given() -> None:
    """Also after another rope has taken the place of the first."""
    q, k = pair()
    factor = WARM.attention_factor
    assert factor > 1.2
    for gain, rope, expected in ((None, WARM, factor), (1.0, WARM, 1.0), (None, HALF, 1.0)):
        built, changed = (
            RotaryEmbedding(rope, heads_first=False, gain=gain),
            RotaryEmbedding(MIXED, heads_first=False, gain=gain),
        )
        changed.rope = rope
        for rotary in (built, changed):
            assert rotary.gain == expected
            y, _ = rotary(q, k)
            plain = Rope(head_dim=8, pairing="half", explicit_inv_freq=tuple(rope.inv_freq))
            assert_rotated(y, q, [list(range(SEQ))] * 2, plain, gain=expected)


def test_gradients_are_the_inverse_rotation() -> None:
    """Of both tensors, from a float64 difference."""
    q, k = (x.requires_grad_() for x in pair(dtype=torch.float64))
    rotary = RotaryEmbedding(MIXED, heads_first=False, gain=1.5)
    assert torch.autograd.gradcheck(lambda q, k: rotary(q, k, offset=3), (q, k), fast_mode=True)


def test_there_is_nothing_to_cast_to_save_or_to_lose() -> None:
    """No parameter and no buffer; .half() and the meta device change no bit."""
    q, k = pair()
    with torch.device("meta"):
        rotary = RotaryEmbedding(WARM, heads_first=False)
    assert [*rotary.parameters(), *rotary.buffers()] == []
    assert rotary.state_dict() == {}
    rotary.load_state_dict({})
    expected = RotaryEmbedding(WARM, heads_first=False)(q, k, offset=70_001)
    for other in (
        rotary.half().to_empty(device="cpu"),
        rotary.to(torch.bfloat16),
        copy.deepcopy(rotary),
        pickle.loads(pickle.dumps(rotary)),
    ):
        assert all(map(torch.equal, other(q, k, offset=70_001), expected))


def test_narrow_tensors_know_far_positions() -> None:
    """Float16 and bfloat16, at positions that neither could hold."""
    for dtype in (torch.float16, torch.bfloat16):
        q, k = pair(dtype=dtype)
        y, _ = RotaryEmbedding(HALF, heads_first=False).to(dtype)(q, k, offset=2**30 + 1)
        assert_rotated(y, q, [[2**30 + 1 + i for i in range(SEQ)]] * 2, HALF)


def test_printing_it_says_what_it_does() -> None:
    """The gain, the layout and the rope."""
    text = RotaryEmbedding(HALF, gain=2, heads_first=True).extra_repr()
    assert text.startswith("gain=2.0, heads_first=True, rope=Rope(")


@pytest.mark.parametrize("kind", ["fake", "meta"])
@pytest.mark.parametrize("name", COUNTED)
def test_nothing_asks_a_device_for_a_number(name: str, kind: str) -> None:
    """Tensors without numbers are rotated all the same: whoever asked would be refused."""
    options = COUNTED[name][0]

    def there(values: Any) -> Any:
        if not isinstance(values, Tensor):
            return values
        return torch.empty_like(values, device="meta" if kind == "meta" else None)

    if kind == "fake":
        with FakeTensorMode():
            given = {name: there(torch.empty(v.shape, dtype=v.dtype)) if isinstance(v, Tensor)
                     else v for name, v in options.items()}  # fmt: skip
            y, _ = RotaryEmbedding(HALF, heads_first=False)(
                *(torch.empty(x.shape) for x in pair()), **given
            )
        assert isinstance(y, FakeTensor)
    else:
        given = {name: there(v) for name, v in options.items()}
        y, _ = RotaryEmbedding(HALF, heads_first=False)(*map(there, pair()), **given)
        assert y.is_meta
    assert y.shape == (BATCH, SEQ, 4, 8)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a GPU")
@pytest.mark.parametrize("name", COUNTED)
def test_a_gpu_is_not_waited_for(name: str) -> None:
    """Torch raises where the host would wait."""
    options, expected = COUNTED[name]
    there = {n: v.cuda() if isinstance(v, Tensor) else v for n, v in options.items()}
    q, k = (x.cuda() for x in pair())
    rotary = RotaryEmbedding(HALF, heads_first=False)
    rotary(q, k, **there)  # kernels and tables are made at the first call
    torch.cuda.set_sync_debug_mode("error")
    try:
        y, _ = rotary(q, k, **there)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_rotated(y.cpu(), q.cpu(), expected, HALF)


@pytest.mark.usefixtures("forget_graphs")
@pytest.mark.compile
@pytest.mark.parametrize("name", COUNTED)
def test_a_compiler_sees_one_graph(name: str) -> None:
    """Of the whole call, with eager mode's bits, forward and backward."""
    options, rotary = COUNTED[name][0], RotaryEmbedding(WARM, heads_first=False)
    quick = torch.compile(rotary, fullgraph=True, dynamic=True, backend="aot_eager")
    results: list[list[Any]] = []
    for run in (rotary, quick):
        q, k = (x.requires_grad_() for x in pair())
        made = run(q, k, **options)
        (made[0].sum() + made[1].square().sum()).backward()
        results.append([*made, q.grad, k.grad])
    assert all(map(torch.equal, *results))


class Decoder(nn.Module):
    """As a model holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary = RotaryEmbedding(HALF, heads_first=False)

    def forward(self, q: Tensor, k: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens behind those that are cached."""
        return self.rotary(q, k, offset=offset)


@pytest.mark.usefixtures("forget_graphs")
@pytest.mark.compile
def test_one_graph_serves_every_length_and_offset() -> None:
    """Lengths that are symbols, offsets in a tensor or as a number."""
    rotary = RotaryEmbedding(HALF, heads_first=False)
    with torch._dynamo.config.patch(error_on_recompile=True):
        by_tensor = torch.compile(Decoder(), fullgraph=True, dynamic=True, backend="aot_eager")
        by_number = torch.compile(
            lambda q, k, offset: rotary(q, k, offset=offset),
            fullgraph=True, dynamic=True, backend="aot_eager",
        )  # fmt: skip
        for length, offset in ((5, 9), (6, 2), (9, 70_001)):
            q, k = normal(3, length, 4, 8), normal(3, length, 2, 8)
            expected = rotary(q, k, offset=offset)
            assert all(map(torch.equal, by_tensor(q, k, torch.tensor([offset] * 3)), expected))
            assert all(map(torch.equal, by_number(q, k, offset), expected))


@pytest.mark.compile
def test_an_exported_program_takes_every_length() -> None:
    """With an offset for each row, and packed with boundaries."""
    q, k = pair()
    length = {1: torch.export.Dim.DYNAMIC}
    changing: dict[str, Any] = {"q": length, "k": length, "offset": None}
    program = torch.export.export(
        Decoder(), (q, k, torch.tensor([3, 4])), dynamic_shapes=changing
    ).module()
    for seq in (4, 5, 11):
        q, k, offset = normal(2, seq, 4, 8), normal(2, seq, 2, 8), torch.tensor([seq, 0])
        assert all(map(torch.equal, program(q, k, offset), Decoder()(q, k, offset)))
    bounds = torch.tensor([0, 2, 7], dtype=torch.int32)
    packed = torch.export.export(
        RotaryEmbedding(HALF, heads_first=False), (*pair(),), {"cu_seqlens": bounds}
    ).module()
    other = torch.tensor([0, 4, 7], dtype=torch.int32)
    expected = RotaryEmbedding(HALF, heads_first=False)(*pair(), cu_seqlens=other)
    assert all(map(torch.equal, packed(*pair(), cu_seqlens=other), expected))


RULE = Rope(head_dim=8, pairing="half", scaling=DynamicNTK(factor=2.0, original_max_positions=64))
BUILDS: dict[str, tuple[dict[str, Any], str]] = {
    "a rule": ({"rope": RULE}, "use rope.at(seq_len)"),
    "no rope": ({"rope": None}, "rope must be a phasor.Rope, got NoneType"),
    "a word": ({"gain": "auto"}, "gain must be a finite number, got 'auto'"),
    "no layout": (
        {"heads_first": None},
        "heads_first must be given, because counted positions fit either order: True for tensors "
        "[..., heads, seq, head_dim], False for [..., seq, heads, head_dim]",
    ),
    "a layout in words": ({"heads_first": "yes"}, "heads_first must be True or False, got 'yes'"),
}


@pytest.mark.parametrize("case", BUILDS)
def test_modules_that_cannot_be_are_refused(case: str) -> None:
    """When they are built, and a rope when it is assigned."""
    options, text = BUILDS[case]
    with pytest.raises(SpecError) as refused:
        RotaryEmbedding(**{"rope": HALF, "heads_first": False} | options)
    assert text in str(refused.value)
    if "rope" in options:
        with pytest.raises(SpecError) as refused:
            RotaryEmbedding(HALF, heads_first=False).rope = options["rope"]
        assert text in str(refused.value)


THERE = torch.zeros(2, dtype=torch.int64, device="meta")
ELSEWHERE = "must be on the device of the tensors (cpu), got meta"
BEYOND = "offset plus the positions of a sequence must be at most 2**63 - 1"
EVERY = torch.arange(SEQ)
REFUSED: dict[type[Exception], list[tuple[str, dict[str, Any]]]] = {
    PositionError: [
        ("positions and offset exclude each other", {"positions": EVERY, "offset": 1}),
        ("positions and offset exclude each other", {"positions": EVERY, "offset": EVERY[0]}),
        ("positions and cu_seqlens exclude each other", {"positions": EVERY, "cu_seqlens": [0, 7]}),
        ("offset must be a whole number", {"offset": 0.5}),
        ("offset must hold whole numbers", {"offset": torch.tensor([True, False])}),
        ("at most 2**63 - 1", {"offset": 2**63 - 2}),
        (BEYOND, {"offset": 2**63 - 2, "cu_seqlens": [0, 3, SEQ]}),
        (
            BEYOND,
            {"offset": torch.tensor([2**63 - 2, 0, 5]), "cu_seqlens": torch.tensor([0, 3, 5, SEQ])},
        ),
        (
            "offset must be a single value, or one per row [2], got shape [7]",
            {"offset": EVERY},
        ),
        (
            "one per sequence of cu_seqlens [3], got shape [2]",
            {"offset": torch.arange(2), "cu_seqlens": [0, 1, 2, SEQ]},
        ),
        (f"offset {ELSEWHERE}", {"offset": THERE}),
        (f"cu_seqlens {ELSEWHERE}", {"cu_seqlens": THERE}),
        ("cu_seqlens must rise from 0 to the number of tokens (7)", {"cu_seqlens": [0, 3]}),
        (
            "cu_seqlens must rise from 0 to the number of tokens (7), got [0, 9]",
            {"cu_seqlens": torch.tensor([0, 9])},
        ),
        ("cu_seqlens must be whole numbers", {"cu_seqlens": 7}),
    ],
    TensorError: [
        ("q must end in head_dim (8)", {"q": normal(7, 2, 6)}),
        ("q and k must share", {"k": normal(BATCH, 3, 2, 8)}),
        ("q must be a dense torch.Tensor, got list", {"q": [1.0]}),
    ],
}
CALLS = [
    pytest.param(kind, text, call, id=text)
    for kind, calls in REFUSED.items()
    for text, call in calls
]


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize(("kind", "text", "call"), CALLS)
def test_calls_that_mean_nothing_are_refused(
    kind: type[Exception], text: str, call: dict[str, Any], heads_first: bool
) -> None:
    """With the argument, what was expected and what came."""
    q, k = pair()
    given: dict[str, Any] = {"q": q, "k": k} | call
    if heads_first:
        given |= {n: given[n].transpose(-3, -2) for n in "qk" if isinstance(given[n], Tensor)}
    with pytest.raises(kind) as refused:
        RotaryEmbedding(HALF, heads_first=heads_first)(**given)
    assert text in str(refused.value)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_torchscript_is_refused() -> None:
    """It would freeze the positions of one call; the message names the ways out."""
    for attempt in (torch.jit.script, lambda module: torch.jit.trace(module, pair())):
        with pytest.raises(BackendError, match="phasor has no form in TorchScript"):
            attempt(RotaryEmbedding(HALF, heads_first=False))


def shards(bounds: list[int], ranks: int) -> dict[str, Callable[[int], tuple[Tensor, Tensor]]]:
    """The documented recipes: which tokens of a pack a rank holds, and their positions."""

    def of_the_pack(rank: int) -> tuple[Tensor, Tensor]:
        here = positions.context_parallel(bounds[-1], rank, ranks, "zigzag")
        return here, positions.packed(torch.tensor(bounds), bounds[-1])[here]

    def of_each_sequence(rank: int) -> tuple[Tensor, Tensor]:
        parts = [
            (a, positions.context_parallel(b - a, rank, ranks, "zigzag"))
            for a, b in pairwise(bounds)
        ]
        return torch.cat([a + part for a, part in parts]), torch.cat([part for _, part in parts])

    return {"the pack": of_the_pack, "each sequence": of_each_sequence}


@pytest.mark.parametrize("what", ["the pack", "each sequence"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_shards_of_a_pack_are_parts_of_the_whole(ranks: int, what: str) -> None:
    """Every rank's tokens come out as they do on one machine, and no token is left out."""
    bounds = [0, 12, 12, 36, 48]
    q, k = normal(48, 4, 8), normal(48, 2, 8, seed=1)
    whole = RotaryEmbedding(HALF, heads_first=False)(q, k, cu_seqlens=bounds)
    held: list[int] = []
    for rank in range(ranks):
        here, places = shards(bounds, ranks)[what](rank)
        made = RotaryEmbedding(HALF, heads_first=False)(q[here], k[here], places)
        assert all(torch.equal(y, right[here]) for y, right in zip(made, whole, strict=True))
        held += here.tolist()
    assert sorted(held) == list(range(48))
