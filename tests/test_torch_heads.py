"""The positional head as a module: what it returns is what its weights promise."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch

from phasor import Interleaved, PositionError, Rope, Sectioned, SpecError, TensorError
from phasor.heads import attention_weight, positional_head, required_alpha
from phasor.torch.heads import PositionalHead

from . import oracle
from .torch_oracle import DTYPES, implementations, normal, run_on

ROPES = {
    "half": Rope(head_dim=16, pairing="half"),
    "interleaved": Rope(head_dim=16, pairing="interleaved", base=5e5),
    "clockwise": Rope(head_dim=16, pairing="half", direction=-1),
    "partial": Rope(head_dim=20, pairing="half", rotary_dim=12, rotary_start=3),
    "re-paired": Rope(head_dim=16, pairing="interleaved", pairing_out="half"),
    "sectioned": Rope(head_dim=16, pairing="half", axes=Sectioned((4, 2, 2))),
    "interleaved axes": Rope(head_dim=16, pairing="half", axes=Interleaved((4, 2, 2))),
}


@pytest.fixture(autouse=True, params=implementations())
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test here runs on every implementation that this machine has."""
    run_on(request.param, monkeypatch)


def tokens(*shape: int, dtype: torch.dtype = torch.float64, constant: int = 0) -> torch.Tensor:
    """Random content with a 1 in one coordinate."""
    x = normal(*shape, dtype=dtype)
    x[..., constant] = 1
    return x


def every_axis(rope: Rope, places: list[int]) -> Any:
    """Text positions as ``rope`` takes them."""
    many = rope.axes.n_axes
    return places if many == 1 else [[place] * many for place in places]


def averaged(rope: Rope, offset: int, alpha: float, x: np.ndarray, places: list[int]) -> np.ndarray:
    """Causal attention in loops, one rotation and one score at a time."""
    head = positional_head(rope, offset, alpha=alpha, width=x.shape[-1])
    at = every_axis(rope, places)
    queries = [oracle.turned(head.query @ t, p, rope) for t, p in zip(x, at, strict=True)]
    keys = [oracle.turned(head.key @ t, p, rope) for t, p in zip(x, at, strict=True)]
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
    head = PositionalHead(rope, offset, alpha=3.0, width=5, dtype=torch.float64)
    x = tokens(12, 5)
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
    head = PositionalHead(rope, offset, alpha=alpha, width=8, constant=3, dtype=torch.float64)
    x = tokens(2, 1024, 8, constant=3)
    missing = (head(x, torch.arange(1024))[:, offset:] - x[:, : 1024 - offset]).abs().max()
    assert 0 < missing <= 1.01e-9 * 2 * x.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_previous_token_is_found_in_every_dtype(dtype: torch.dtype) -> None:
    """The nearest token to what each position gets is the one before it."""
    rope = Rope(head_dim=64, pairing="half")
    alpha = required_alpha(rope, 256, 0.999)
    head = PositionalHead(rope, 1, alpha=alpha, width=16, dtype=dtype)
    x = tokens(256, 16, dtype=dtype)
    seen = head(x, torch.arange(256))
    assert seen.dtype == dtype
    nearest = torch.cdist(seen.detach().double(), x.double()).argmin(1)
    assert nearest[1:].tolist() == list(range(255))


def test_the_last_token_gets_the_promised_share() -> None:
    """A content coordinate that is 1 at the wanted token alone shows the attention paid to it."""
    rope = Rope(head_dim=32, pairing="half")
    head = PositionalHead(rope, 1, alpha=5.0, width=2, dtype=torch.float64)
    x = torch.zeros(200, 2, dtype=torch.float64)
    x[:, 0] = 1
    x[198, 1] = 1
    share = head(x, torch.arange(200))[-1, 1].item()
    assert abs(share - attention_weight(rope, 5.0, 200)) < 1e-12


def test_no_token_sees_what_comes_after_it() -> None:
    """Other tokens later change nothing earlier; the first token gets itself."""
    head = PositionalHead(ROPES["half"], 1, alpha=2.0, width=4, dtype=torch.float64)
    x = tokens(20, 4)
    changed = x.clone()
    changed[10:, 1:] += 1
    before, after = (head(given, torch.arange(20)) for given in (x, changed))
    torch.testing.assert_close(before[:10], after[:10], rtol=0, atol=1e-14)
    torch.testing.assert_close(before[0], x[0], rtol=0, atol=1e-14)
    assert not torch.allclose(before[11:], after[11:], atol=1e-3)


def test_the_weights_are_those_of_the_core() -> None:
    """Rounded once to the module's dtype, and ordinary parameters that learn."""
    rope = ROPES["partial"]
    head = PositionalHead(rope, 2, alpha=1.5, width=3, constant=1)
    made = positional_head(rope, 2, alpha=1.5, width=3, constant=1)
    for name, weight in made._asdict().items():
        np.testing.assert_array_equal(
            getattr(head, name).weight.detach().numpy(), weight.astype(np.float32)
        )
    assert sorted(head.state_dict()) == ["key.weight", "query.weight"]
    head(tokens(6, 3, dtype=torch.float32), torch.arange(6)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in head.parameters())


def test_a_copy_looks_where_the_original_did() -> None:
    """By deepcopy, and by a state dict read into a head that looked elsewhere."""
    head = PositionalHead(ROPES["half"], 1, alpha=9.0, width=4)
    other = PositionalHead(ROPES["half"], 3, alpha=1.0, width=4)
    x, places = tokens(12, 4, dtype=torch.float32), torch.arange(12)
    expected = head(x, places)
    assert not torch.allclose(other(x, places), expected, atol=1e-3)
    other.load_state_dict(head.state_dict())
    assert torch.equal(other(x, places), expected)
    assert torch.equal(copy.deepcopy(head)(x, places), expected)


def test_a_head_says_what_it_is() -> None:
    """Its rope and its offset."""
    said = repr(PositionalHead(ROPES["half"], 7, alpha=1.0, width=4))
    assert "head_dim=16" in said
    assert "offset=7" in said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offset": -1}, r"offset must be a whole number >= 0, got -1"),
        ({"offset": 1.0}, r"offset must be a whole number >= 0, got 1\.0"),
        ({"alpha": math.nan}, "alpha must be a finite number >= 0, got nan"),
        ({"width": 0}, "width must be a whole number from 1"),
        ({"constant": 4}, "constant must be a whole number from 0 to 3, got 4"),
        ({"rope": None}, r"rope must be a phasor\.Rope, got None"),
    ],
    ids=str,
)
def test_a_head_that_means_nothing_is_refused(change: Any, message: str) -> None:
    """Before any memory is taken."""
    head: dict[str, Any] = {"rope": ROPES["half"], "offset": 1, "alpha": 1.0, "width": 4}
    with pytest.raises(SpecError, match=message):
        PositionalHead(**head | change)


@pytest.mark.parametrize("shape", [(4,), (6, 5), (0,)], ids=str)
def test_tokens_of_another_width_are_refused(shape: tuple[int, ...]) -> None:
    """The error has the width that was expected and the shape that came."""
    head = PositionalHead(ROPES["half"], 1, alpha=1.0, width=4)
    with pytest.raises(TensorError, match=r"x must end in \[seq, width\] with width 4, got shape"):
        head(torch.ones(shape), torch.arange(6))


def test_positions_that_do_not_fit_are_refused() -> None:
    """As by the verbs."""
    head = PositionalHead(ROPES["half"], 1, alpha=1.0, width=4)
    with pytest.raises(PositionError, match="positions must be a scalar or broadcast"):
        head(torch.ones(6, 4), torch.arange(5))
