"""Table 1 of Round and Round We Go (2410.06205): which heads can be built without and with RoPE."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from phasor import Rope, SpecError
from phasor.angles import wavelengths
from phasor.numpy import rotate, score
from phasor.papers.heads import attention_weight, required_alpha, semantic_head
from phasor.scaling import Proportional

ROPE = Rope(head_dim=64, pairing="half")
NOPE = Rope(head_dim=64, pairing="half", explicit_inv_freq=(0.0,) * 32)
P_ROPE = replace(ROPE, scaling=Proportional(fraction=0.75))
DISTANCES = [0, 1, 1000, 10**6, 10**9]


def test_without_positions_no_head_looks_one_token_back() -> None:
    """The last of [bos, x, x] gives itself and the token before the same score, in any head."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        bos, same = rng.standard_normal((2, 64))
        keys = np.stack([bos, same, same])[:, None]  # [seq, heads, head_dim]
        turned = rotate(keys, np.arange(3), NOPE)[:, 0]
        assert turned[1].tolist() == turned[2].tolist()  # so every query scores them alike
    with pytest.raises(SpecError):
        required_alpha(NOPE, 1024, 0.99)


@pytest.mark.parametrize("rope", [ROPE, P_ROPE], ids=["RoPE", "p-RoPE"])
def test_with_rotation_a_head_looks_one_token_back(rope: Rope) -> None:
    """With nearly all of its weight, also where a quarter of the pairs stands still."""
    alpha = required_alpha(rope, 1024, 0.99)
    assert attention_weight(rope, alpha, 1024) >= 0.99 - 1e-9


@pytest.mark.parametrize("rope", [NOPE, P_ROPE], ids=["NoPE", "p-RoPE"])
def test_pairs_that_stand_still_find_content_at_any_distance(rope: Rope) -> None:
    """Its score is the same however far away it is."""
    head = semantic_head(rope, 1, alpha=1.0, width=2)
    assert score(head.query[:, 0], head.key[:, 1], DISTANCES, rope).tolist() == [1.0] * 5


def test_with_rope_every_pair_loses_content_at_some_distance() -> None:
    """After half a turn it scores as little as it scored much, whichever pair looks."""
    for pair, wavelength in enumerate(wavelengths(ROPE)):
        unit = np.zeros(64)
        unit[pair] = 1.0
        half_a_turn = round(wavelength / 2)
        found = score(unit, unit, [0, half_a_turn], ROPE)
        assert found[0] == 1.0
        # a whole token is off by half a token at most, where the cosine is level
        assert found[1] <= np.cos(np.pi - ROPE.inv_freq[pair] / 2) + 1e-9
