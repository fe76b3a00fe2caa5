"""The positional head as a module: what it returns is what its weights promise."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch

from phasor import PositionError, Rope, SpecError, TensorError
from phasor.axes import InterleavedSections, Sectioned
from phasor.papers.heads import positional_head, required_alpha
from phasor.torch.papers.heads import PositionalHead

from ... import oracle
from ..torch_arrays import DTYPES, normal

ROPES = {
    "half": Rope(head_dim=16, pairing="half"),
    "interleaved": Rope(head_dim=16, pairing="interleaved", base=5e5),
    "clockwise": Rope(head_dim=16, pairing="half", direction=-1),
    "partial": Rope(head_dim=20, pairing="half", rotary_dim=12, rotary_start=3),
    "re-paired": Rope(head_dim=16, pairing="interleaved", pairing_out="half"),
    "sectioned": Rope(head_dim=16, pairing="half", axes=Sectioned((4, 2, 2))),
    "interleaved axes": Rope(head_dim=16, pairing="half", axes=InterleavedSections((4, 2, 2))),
}


def every_axis(rope: Rope, places: list[int]) -> Any:
    """Text positions as ``rope`` takes them."""
    many = rope.axes.n_axes
    return places if many == 1 else [[place] * many for place in places]


def averaged(rope: Rope, offset: int, alpha: float, x: np.ndarray, places: list[int]) -> np.ndarray:
    """Causal attention in loops, one rotation and one score at a time."""
    head = positional_head(rope, offset, alpha=alpha, width=1)
    at = every_axis(rope, places)
    queries, keys = ([oracle.turned(one[:, 0], p, rope) for p in at] for one in head)
    rows = []
    for m, query in enumerate(queries):
        logits = [math.fsum(query * key) / math.sqrt(rope.head_dim) for key in keys[: m + 1]]
        shares = [math.exp(logit - max(logits)) for logit in logits]
        rows.append(sum(share * token for share, token in zip(shares, x, strict=False))
                    / math.fsum(shares))  # fmt: skip
    return np.array(rows)


@pytest.mark.parametrize("offset", [0, 1, 4])
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_a_head_returns_the_causal_average(rope: Rope, offset: int) -> None:
    """In float64, of every kind of rope, from wherever the sequence starts."""
    places = list(range(1000, 1012))
    head = PositionalHead(rope, offset, alpha=3.0, embed_dim=5, dtype=torch.float64)
    x = normal(12, 5, dtype=torch.float64)
    found = head(x, torch.tensor(every_axis(rope, places))).detach().numpy()
    expected = averaged(rope, offset, 3.0, x.numpy(), places)
    # a logit is at most alpha * pairs / sqrt(head_dim) = 6; its error moves an average of numbers
    # below 4 by twice as much
    np.testing.assert_allclose(found, expected, rtol=0, atol=2 * 4 * 6 * 1e-14)


@pytest.mark.parametrize("offset", [0, 1, 100])
def test_a_sharp_head_copies_the_token_it_looks_at(offset: int) -> None:
    """What is missing is at most the attention paid elsewhere, times how far tokens differ."""
    rope = Rope(head_dim=64, pairing="half")
    alpha = required_alpha(rope, 1024, 1 - 1e-9, offset=offset)
    head = PositionalHead(rope, offset, alpha=alpha, embed_dim=8, dtype=torch.float64)
    x = normal(2, 1024, 8, dtype=torch.float64)
    missing = (head(x, torch.arange(1024))[:, offset:] - x[:, : 1024 - offset]).abs().max()
    assert 0 < missing <= 1.01e-9 * 2 * x.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_previous_token_is_found_in_every_dtype(dtype: torch.dtype) -> None:
    """The nearest token to what each position gets is the one before it."""
    rope = Rope(head_dim=64, pairing="half")
    alpha = required_alpha(rope, 256, 0.999)
    head = PositionalHead(rope, 1, alpha=alpha, embed_dim=16, dtype=dtype)
    x = normal(256, 16, dtype=dtype)
    seen = head(x, torch.arange(256))
    assert seen.dtype == dtype
    nearest = torch.cdist(seen.detach().double(), x.double()).argmin(1)
    assert nearest[1:].tolist() == list(range(255))


def test_the_biases_are_the_weights_of_the_core() -> None:
    """Rounded once to the module's dtype, and ordinary parameters that learn."""
    rope = ROPES["partial"]
    head = PositionalHead(rope, 2, alpha=1.5, embed_dim=3)
    made = positional_head(rope, 2, alpha=1.5, width=1)
    for projection, weight in ((head.q_proj, made.query), (head.k_proj, made.key)):
        np.testing.assert_array_equal(
            projection.bias.detach().numpy(), weight[:, 0].astype(np.float32)
        )
        assert projection.weight.shape == (rope.head_dim, 3)
        assert not projection.weight.any()
    head(normal(6, 3, dtype=torch.float32), torch.arange(6)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in head.parameters())


# a rounding of each dtype, and the attention that the docstring says goes elsewhere at most
PROMISED = {
    torch.float32: (2.0**-24, 1 - 0.99898),
    torch.float16: (2.0**-11, 1 - 0.99896),
    torch.bfloat16: (2.0**-8, 1 - 0.99874),
}


@pytest.mark.parametrize("base", [1e4, 5e5])
@pytest.mark.parametrize("d", [4, 8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("dtype", PROMISED, ids=str)
def test_the_promise_holds_but_for_the_rounding_of_biases(
    dtype: torch.dtype, d: int, base: float
) -> None:
    """A pair of the query moves by a rounding of its length, and a rival's gap by no more than
    that times how far the rival's pair stands from the wanted one; scores are float32.
    """
    rounding, elsewhere = PROMISED[dtype]
    rope, context = Rope(head_dim=d, pairing="half", base=base), 512
    alpha = required_alpha(rope, context, 0.999)
    head = PositionalHead(rope, 1, alpha=alpha, embed_dim=context, dtype=dtype)
    shares = head(torch.eye(context, dtype=dtype), torch.arange(context)).detach().double()
    shares[range(1, context), range(context - 1)] = 0

    angles = np.array([1, *range(1, context - 1)])[:, None] * base ** (-2 * np.arange(d // 2) / d)
    gaps = (1 - np.cos(angles)).sum(1) - rounding * np.abs(2 * np.sin(angles / 2)).sum(1)
    scores = (d + 8) * 2.0**-24 * d / 2  # turned by rows, multiplied and summed
    rivals = np.exp(-alpha / math.sqrt(d) * (gaps - 2 * scores)).sum()
    allowed = rivals / (1 + rivals)
    # the softmax and the result are rounded too, relative to each share
    assert shares[1:].sum(-1).max() <= allowed * (1 + rounding + 1e-4)
    assert allowed <= (elsewhere if d > 4 else 1 - 0.9971)


def test_a_copy_looks_where_the_original_did() -> None:
    """By deepcopy, and by a state dict read into a head that looked elsewhere."""
    head = PositionalHead(ROPES["half"], 1, alpha=9.0, embed_dim=4)
    other = PositionalHead(ROPES["half"], 3, alpha=1.0, embed_dim=4)
    x, places = normal(12, 4, dtype=torch.float32), torch.arange(12)
    expected = head(x, places)
    assert not torch.allclose(other(x, places), expected, atol=1e-3)
    other.load_state_dict(head.state_dict())
    assert torch.equal(other(x, places), expected)
    assert torch.equal(copy.deepcopy(head)(x, places), expected)


def test_a_head_says_what_it_is() -> None:
    """Its rope and its offset."""
    said = repr(PositionalHead(ROPES["half"], 7, alpha=1.0, embed_dim=4))
    assert "head_dim=16" in said
    assert "offset=7" in said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offset": -1}, r"offset must be a whole number >= 0, got -1"),
        ({"offset": 1.0}, r"offset must be a whole number >= 0, got 1\.0"),
        ({"alpha": math.nan}, "alpha must be a finite number >= 0, got nan"),
        ({"embed_dim": 0}, "embed_dim must be a whole number >= 1"),
        ({"alpha": 1e39}, r"alpha must give biases that torch\.float32 can hold, got"),
        ({"rope": None}, r"rope must be a phasor\.Rope, got None"),
    ],
    ids=str,
)
def test_a_head_that_means_nothing_is_refused(change: Any, message: str) -> None:
    """Before any memory is taken."""
    head: dict[str, Any] = {"rope": ROPES["half"], "offset": 1, "alpha": 1.0, "embed_dim": 4}
    with pytest.raises(SpecError, match=message):
        PositionalHead(**head | change)


@pytest.mark.parametrize("shape", [(4,), (6, 5), (0,)], ids=str)
def test_tokens_of_another_width_are_refused(shape: tuple[int, ...]) -> None:
    """The error has the width that was expected and the shape that came."""
    head = PositionalHead(ROPES["half"], 1, alpha=1.0, embed_dim=4)
    with pytest.raises(
        TensorError, match=r"x must end in \[seq, embed_dim\] with embed_dim 4, got shape"
    ):
        head(torch.ones(shape), torch.arange(6))


def test_positions_that_do_not_fit_are_refused() -> None:
    """As by the verbs."""
    head = PositionalHead(ROPES["half"], 1, alpha=1.0, embed_dim=4)
    with pytest.raises(PositionError, match="positions must broadcast"):
        head(torch.ones(6, 4), torch.arange(5))
