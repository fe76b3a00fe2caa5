"""What cannot be done to stored keys is refused in words, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from phasor import PhasorError, PositionError, Rope, SpecError, TensorError
from phasor.torch.kv_cache import evict, insert, retune_, shift_

from .turned_keys import HALF, LAYOUTS, LONG, SECTIONED

K = torch.zeros(2, 5, 3, 8)
RULE = Rope(head_dim=8, pairing="half", scaling=LONG)
REFUSED: dict[str, tuple[Callable[[], Any], type[PhasorError], str]] = {
    "a delta for other tokens": (
        lambda: shift_(K, torch.arange(4), HALF), PositionError, r"broadcast .* \[2, 5\]"),
    "a delta without axes": (
        lambda: shift_(K, 3, SECTIONED), PositionError, "one coordinate per axis"),
    "a rule to shift with": (lambda: shift_(K, 1, RULE), SpecError, r"rope\.at\(seq_len\)"),
    "no Rope": (lambda: shift_(K, 1, None), SpecError, "phasor.Rope, got NoneType"),
    "keys of another width": (
        lambda: shift_(K[..., :6], 1, HALF), TensorError, r"head_dim \(8\)"),
    "keys that share memory": (
        lambda: shift_(K[:1].expand(2, 5, 3, 8), 1, HALF), TensorError, "share memory"),
    "a gain of nothing": (
        lambda: retune_(K, 1, HALF, HALF, gain=0), SpecError, "gain must be .* > 0"),
    "a rule to retune from": (
        lambda: retune_(K, 1, RULE, HALF), SpecError, r"rope\.at\(seq_len\)"),
    "a rule to retune to": (
        lambda: retune_(K, 1, HALF, RULE), SpecError, r"rope\.at\(seq_len\)"),
    "no Rope to retune to": (
        lambda: retune_(K, 1, HALF, 3), SpecError, "new must be a phasor.Rope, got int"),
    "another pairing": (
        lambda: retune_(K, 1, HALF, LAYOUTS["interleaved"]), SpecError,
        r"output_pairing of old \(half\).*got interleaved; undo old with rotate_"),
    "another slice": (
        lambda: retune_(K, 1, HALF, LAYOUTS["a slice"]), SpecError, r"rotary_dim of old \(8\)"),
    "other axes": (
        lambda: retune_(K, [1, 1, 1], SECTIONED, LAYOUTS["alternating"]), SpecError, "axes of old"),
    "a negative gain": (
        lambda: retune_(K, 1, HALF, HALF, gain=-1), SpecError, "gain must be .* > 0, got -1"),
    "positions of other tokens": (
        lambda: retune_(K, torch.arange(4), HALF, HALF), PositionError, r"broadcast .* \[2, 5\]"),
    "an end beyond the last token": (
        lambda: evict(K, K, 0, 6, HALF), PositionError, "stop must be .* from 0 to 5, got 6"),
    "a range that runs backwards": (
        lambda: evict(K, K, 3, 2, HALF), PositionError, "start must be .* from 0 to 2, got 3"),
    "a negative index": (
        lambda: evict(K, K, -2, 5, HALF), PositionError, "start must be .* got -2"),
    "a gap that is not named": (
        lambda: evict(K, K, 0, 1, SECTIONED), PositionError, "gap must be given .* 3 axes"),
    "a gap of one axis": (
        lambda: evict(K, K, 0, 1, SECTIONED, gap=1), PositionError, r"per axis \(3\), got 1"),
    "a fractional gap": (
        lambda: evict(K, K, 0, 1, HALF, gap=0.5), PositionError, "gap must be a whole number"),
    "values of other tokens": (
        lambda: evict(K, K[:, 1:], 0, 1, HALF), TensorError, "of the same tokens"),
    "a rule to evict with": (
        lambda: evict(K, K, 0, 1, RULE), SpecError, r"rope\.at\(seq_len\)"),
    "a place behind the end": (
        lambda: insert(K, K, 6, K, K, HALF), PositionError, "at must be .* from 0 to 5, got 6"),
    "new keys of another dtype": (
        lambda: insert(K, K, 0, K.half(), K, HALF), TensorError,
        r"new_keys .* torch\.float32 .* torch\.float16"),
    "new values of another width": (
        lambda: insert(K, K, 0, K, K[..., :4], HALF), TensorError,
        r"new_values must be \[2, 5, 3, 8\]"),
    "an offset that is not named": (
        lambda: insert(K, K, 0, K, K, SECTIONED, gap=[1, 1, 1]), PositionError, "offset must be"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_refused_in_words(case: str) -> None:
    """And nothing is written."""
    call, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        call()
    assert not K.any()
