"""Keys retuned from one Rope to another are the keys that the other would have made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from phasor import Rope
from phasor.angles import COS_SIN_ERROR
from phasor.scaling import NTK, DynamicNTK, Linear
from phasor.torch import rotate
from phasor.torch.kv_cache import edits, retune_

from ...oracle import exact_rows
from ...strategies import EVERY_LAW
from ..torch_arrays import DTYPES, normal, row_error
from .turned_keys import LAYOUTS, LONG, assert_turned, places


def assert_retuned(
    keys: Tensor, stored: Tensor, at: Tensor, old: Rope, new: Rope, gain: float = 1.0
) -> None:
    """One rotation by the difference of the angles, one rounding."""
    rows = exact_rows(new, at) * exact_rows(old, at).conj()
    assert_turned(keys, stored, rows, old, error=row_error(keys.dtype, at), gain=gain)


@pytest.mark.parametrize("name", EVERY_LAW)
def test_keys_of_the_plain_law_become_keys_of_any_other(name: str) -> None:
    """And back."""
    plain = Rope(head_dim=64, pairing="half")
    law = Rope(head_dim=64, pairing="half", scaling=EVERY_LAW[name])
    stored, at = normal(4, 2, 64), torch.tensor([0, 1, 4097, 2**33])
    there = retune_(stored.clone(), at, plain, law)
    assert_retuned(there, stored, at, plain, law)
    assert_retuned(retune_(there.clone(), at, law, plain), there, at, law, plain)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_keys_of_every_layout_are_retuned(name: str, dtype: torch.dtype) -> None:
    """Along every axis, with one rounding; the coordinates that do not turn keep their bits."""
    old = LAYOUTS[name]
    new = replace(old, base=500.0, direction=-old.direction)
    stored, at = normal(2, 5, 3, 8, dtype=dtype), places(old, 2, 5)
    keys = stored.clone()
    assert retune_(keys, at, old, new) is keys
    assert_retuned(keys, stored, at, old, new)


GROWTHS: dict[str, tuple[Any, int, int]] = {
    "LongRoPE from short to long": (LONG, 16, 17),
    "LongRoPE from long to short": (LONG, 17, 16),
    "dynamic NTK by one token": (DynamicNTK(factor=2.0, original_max_positions=16), 40, 41),
    "dynamic NTK out of the original context": (
        DynamicNTK(factor=2.0, original_max_positions=16), 16, 64,
    ),
}  # fmt: skip


@pytest.mark.parametrize("growth", GROWTHS)
def test_a_rule_that_picks_another_law_retunes_keys(growth: str) -> None:
    """To those that the new law would have made, attention factor included."""
    rule, before, after = GROWTHS[growth]
    rope = Rope(head_dim=8, pairing="half", scaling=rule)
    old, new = rope.at(before), rope.at(after)
    raw, at = normal(16, 2, 8, dtype=torch.float64), torch.arange(16)
    keys = rotate(raw, at, old, gain=old.attention_factor)
    retune_(keys, at, old, new, gain=new.attention_factor / old.attention_factor)
    fresh = exact_rows(new, at)
    error = 8 * (COS_SIN_ERROR + 4 * 2**-52)  # of two rotations, and what pairs add by being two
    assert_turned(keys, raw, fresh, new, error=error, gain=new.attention_factor)


def test_the_attention_factor_of_longrope_changes_with_its_list() -> None:
    """So that the test above sees a gain."""
    rope = Rope(head_dim=8, pairing="half", scaling=LONG)
    assert (rope.at(16).attention_factor, rope.at(17).attention_factor) == (1.1, 1.4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_token_at_the_origin_keeps_its_bits(dtype: torch.dtype) -> None:
    """For R'(0) R(0) is the identity."""
    stored = normal(2, 2, 8, dtype=dtype)
    keys = retune_(stored.clone(), torch.arange(2), LAYOUTS["half"], LAYOUTS["clockwise"])
    assert torch.equal(keys[0], stored[0])
    assert not torch.equal(keys[1], stored[1])


AT: dict[str, tuple[str, Callable[[], Any]]] = {
    "one for all": ("half", lambda: torch.tensor(9)),
    "a number": ("half", lambda: 9),
    "every token's": ("half", lambda: torch.arange(14).view(2, 7)),
    "every sequence's own": ("half", lambda: torch.tensor([[3], [50]])),
    "shared by sequences": ("half", lambda: list(range(7))),
    "fractions": ("half", lambda: torch.linspace(-3, 3, 7, dtype=torch.float64)),
    "far away": ("half", lambda: torch.arange(7) + 2**50),
    "axes, one for all": ("sectioned", lambda: torch.tensor([3, 1, 2])),
    "axes, every token's": ("sectioned", lambda: torch.arange(21).view(7, 3)),
}


@pytest.mark.parametrize("rows_at_once", [1, 3 * 8, 1 << 20])
@pytest.mark.parametrize("form", AT)
def test_positions_of_every_form_are_taken(
    form: str, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a token, three or all of them are worked on at once."""
    monkeypatch.setattr(edits, "CHUNK", rows_at_once)
    name, given_at = AT[form]
    old, stored = LAYOUTS[name], normal(2, 7, 3, 8, dtype=torch.float64)
    new = replace(old, base=77.0)
    keys = retune_(stored.clone(), given_at(), old, new)
    tail = () if old.axes.n_axes == 1 else (3,)
    at = torch.as_tensor(given_at()).expand(2, 7, *tail)
    assert_retuned(keys, stored, at, old, new)


def test_a_cache_without_tokens_is_retuned_into_itself() -> None:
    """There is nothing to do."""
    old, keys = LAYOUTS["half"], torch.empty(2, 0, 3, 8)
    assert retune_(keys, torch.empty(0, dtype=torch.int64), old, replace(old, base=7.0)) is keys


def test_laws_of_explicit_frequencies_are_retuned_too() -> None:
    """A Rope may state its frequencies; NTK's and theirs are then one law."""
    ntk = Rope(head_dim=8, pairing="half", scaling=NTK(factor=4.0))
    stated = Rope(head_dim=8, pairing="half", explicit_inv_freq=(1.0, 0.5, 0.0, 0.001))
    halved = Rope(head_dim=8, pairing="half", scaling=Linear(factor=2.0))
    stored, at = normal(6, 2, 8, dtype=torch.float64), torch.arange(6)
    step = retune_(stored.clone(), at, ntk, stated)
    assert_retuned(step, stored, at, ntk, stated)
    assert_retuned(retune_(step.clone(), at, stated, halved), step, at, stated, halved)
