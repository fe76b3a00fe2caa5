"""What people type first works, or is answered with what to type."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import phasor
from phasor import PhasorError, Rope
from phasor.axes import Axial
from phasor.scaling import DynamicNTK, Linear, Yarn
from phasor.torch import RotaryEmbedding, Rotation, rotate, rotate_qk

HALF = Rope(head_dim=8, pairing="half")
X = torch.zeros(1, 5, 2, 8)
PLACES = torch.arange(5)
ROTARY = RotaryEmbedding(HALF, heads_first=False)


def rope(**fields: Any) -> Rope:
    """One with fields of other programs."""
    return Rope(**({"head_dim": 64, "pairing": "half"} | fields))


ANSWERED: dict[str, Callable[[], Any]] = {
    "a Rope has no field 'theta'; write base=...": lambda: rope(theta=5e5),
    "a Rope has no field 'rope_theta'; write base=...": lambda: rope(rope_theta=5e5),
    "a Rope has no field 'dim'; write head_dim=...": lambda: Rope(dim=64, pairing="half"),
    "a Rope has no field 'partial_rotary_factor'; write rotary_dim=...": (
        lambda: rope(partial_rotary_factor=0.5)
    ),
    "a Rope has no field 'max_seq_len'; write nothing": lambda: rope(max_seq_len=4096),
    "Yarn(factor=..., original_max_positions=...), got 4 without a name": lambda: Yarn(4),
    "Yarn lacks original_max_positions: Yarn(factor=": lambda: Yarn(factor=4.0),
    "Linear(factor=...), got 4 without a name": lambda: Linear(4),
    "DynamicNTK(factor=..., original_max_positions=...), got 2 without": lambda: DynamicNTK(2),
    "phasor.load reads a config with that": (
        lambda: rope(scaling={"rope_type": "yarn", "factor": 4.0})
    ),
    "these are coordinates: write (8, 28, 28)": (
        lambda: rope(head_dim=128, axes=Axial((16, 56, 56)))
    ),
    "positions come before rope, got them in the opposite order": (lambda: rotate(X, HALF, PLACES)),
    "positions must be given, got None; for one sequence pass torch.arange(seq)": (
        lambda: rotate_qk(X, X, None, HALF)
    ),
    "phasor.preset('llama-3.1-8b')[0]": lambda: rotate(X, PLACES, "llama-3.1-8b"),
    "positions come before rope": lambda: Rotation.at(HALF, PLACES),
    "values are not rotated": lambda: ROTARY(X, X, X),
    "write positions=position_ids": lambda: ROTARY(X, X, position_ids=PLACES),
    "write offset=seqlen_offset": lambda: ROTARY(X, X, seqlen_offset=3),
    "without a key, pass positions by keyword: positions=": lambda: ROTARY(X, PLACES),
    "cu_seqlens must rise from 0 to the number of tokens (5), got [0, 3, 2]": (
        lambda: ROTARY(X, X, cu_seqlens=torch.tensor([0, 3, 2]))
    ),
    "heads_first must be given, because counted positions fit either order: True": (
        lambda: RotaryEmbedding(HALF)
    ),
}


@pytest.mark.parametrize("text", ANSWERED)
def test_a_first_try_is_answered_with_what_to_type(text: str) -> None:
    """The error says it."""
    with pytest.raises(PhasorError, match=re.escape(text)):
        ANSWERED[text]()


def test_what_can_work_does() -> None:
    """A module is given one tensor, and a package is found behind its parent."""
    assert torch.equal(ROTARY(X), X)
    assert phasor.torch.rotate_qk is rotate_qk
    assert re.match(r"\d+\.", phasor.__version__)
