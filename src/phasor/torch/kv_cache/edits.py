"""Functions for rotated, cached keys: shift, retune, evict, insert.

Functions with a trailing underscore change the keys in place; `insert` and `evict` return new ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from phasor._checks import number, whole
from phasor._tensors import check_rope
from phasor.errors import PositionError, SpecError, TensorError
from phasor.rope import Rope
from phasor.torch._operator.angles import (
    check_has_angles,
    cos_sin_of_turns,
    positions_of_pairs,
    turns,
)
from phasor.torch._operator.arguments import ARRAYS, tokens_first
from phasor.torch._operator.text import compute_dtype
from phasor.torch.functional import rotate, rotate_
from phasor.torch.kv_cache.cache import check_fits_cache
from phasor.torch.kv_cache.eight_bit import check_stored, is_eight_bit, store_, widened
from phasor.torch.rotation import Rotation

#: How far tokens move, in positions; one number per axis if the Rope has several.
Distance = int | Sequence[int]

# elements of cos and of sin that `retune_` computes at once, which limits its memory
CHUNK = 1 << 20
_INT64_MAX = 2**63 - 1


def shift_(
    keys: Tensor,
    delta: Any,
    rope: Rope,
    *,
    scales: Tensor | None = None,
    heads_first: bool = False,
) -> Tensor:
    """``R(delta) k`` for every cached key, in place: a key at ``p`` moves to ``p + delta``.

    Returns ``keys``. They keep their gain, if any. A key with ``delta`` 0 keeps its bits. Shifting
    by ``a`` and then by ``b`` equals shifting by ``a + b``, but rounds twice: see the page on
    cached keys before you shift 16-bit keys repeatedly.

    Keys of 8 bits are turned in float32 and rounded once. Turned coordinates may be larger; scales
    then grow, in place like the keys.

    Args:
        keys: ``[..., seq, heads, head_dim]``, rotated by ``rope``; int8 and float8 are supported.
        delta: Added to the positions, in the form of ``positions`` in `phasor.torch.rotate`: a
            scalar for all tokens, or ``[..., seq]``, with one coordinate per axis at the end if
            ``rope`` has several. The resulting positions may be negative.
        rope: The Rope of the keys.
        scales: Multiplied into keys of 8 bits; must be given for int8. In the layout of the keys,
            with 1 in dimensions that share a scale, and in the last the number of groups of
            coordinates: ``[..., seq, heads, 1]`` is one per token and head.
        heads_first: Whether ``keys`` is ``[..., heads, seq, head_dim]``; ``delta`` keeps its shape.

    Raises:
        PositionError: If ``delta`` does not fit the keys.
        TensorError: If the keys do not fit the Rope, or their elements share memory; if scales are
            missing or do not fit.
        SpecError: If ``rope.scaling`` is a rule: use ``rope.at(seq_len)`` for the keys' length.

    >>> import torch
    >>> from phasor.torch import rotate
    >>> rope = Rope(head_dim=8, pairing="half")
    >>> raw = torch.randn(5, 2, 8, dtype=torch.float64)
    >>> keys = shift_(rotate(raw, [10, 11, 12, 13, 14], rope), -10, rope)
    >>> bool(torch.allclose(keys, rotate(raw, range(5), rope), atol=1e-14))
    True
    """
    check_rope(rope)
    wide = widened(keys, scales)
    (view,) = tokens_first([wide], heads_first)
    positions = ARRAYS.fit_positions(delta, [wide], rope, heads_first, ["keys"])
    check_stored(keys, scales)
    rotate_(view, positions, _rope_of_stored_keys(rope), gain=1.0)
    store_(keys, scales, wide)
    return keys


def retune_(
    keys: Tensor,
    positions: Any,
    old: Rope,
    new: Rope,
    *,
    gain: float = 1.0,
    scales: Tensor | None = None,
    heads_first: bool = False,
) -> Tensor:
    """``gain R_new(p) R_old(-p) k`` for every cached key, in place: keys for other frequencies.

    Call this when a rule picks another law as the sequence grows, such as LongRoPE with its short
    and long list, or dynamic NTK. The two rotations combine into one, by ``p (f_new - f_old)``;
    turns are subtracted as integers, so the keys are rounded once. Returns ``keys``.

    Args:
        keys: ``[..., seq, heads, head_dim]``, rotated by ``old``.
        positions: Positions of the tokens, as for `phasor.torch.rotate`.
        old: The Rope of the keys.
        new: Their new Rope, which may differ from ``old`` only in frequencies or direction.
        gain: Multiplied into the rotated coordinates: ``new.attention_factor /
            old.attention_factor`` for keys that include the factor.
        scales: As for `shift_`.
        heads_first: As for `shift_`.

    Raises:
        SpecError: As for `shift_`, or if the Ropes differ in more than frequencies or direction.

    >>> import torch
    >>> from phasor.scaling import DynamicNTK
    >>> from phasor.torch import rotate
    >>> rule = DynamicNTK(factor=2.0, original_max_positions=4)
    >>> rope = Rope(head_dim=8, pairing="half", scaling=rule)
    >>> raw = torch.randn(5, 2, 8, dtype=torch.float64)
    >>> keys = retune_(rotate(raw, range(5), rope.at(5)), range(5), rope.at(5), rope.at(6))
    >>> bool(torch.allclose(keys, rotate(raw, range(5), rope.at(6)), atol=1e-14))
    True
    """
    gain = number("gain", gain, above=0)
    check_rope(old, "old")
    check_rope(new, "new")
    for field in ("head_dim", "rotary_dim", "rotary_start", "output_pairing", "axes"):
        before, after = getattr(old, field), getattr(new, field)
        if before != after:
            raise SpecError(
                f"new must have the {field} of old ({before}), because only the frequencies of "
                f"rotated keys can change, got {after}; undo old with rotate_ and inverse=True, "
                f"then apply new with rotate_"
            )
    wide = widened(keys, scales)
    (view,) = tokens_first([wide], heads_first)
    positions = ARRAYS.fit_positions(positions, [wide], old, heads_first, ["keys"])
    check_stored(keys, scales)
    check_has_angles(positions)
    text, dtype = old.to_json(), compute_dtype(view.dtype)
    layout: dict[str, Any] = {"pairing": old.output_pairing, "rotary_start": old.rotary_start}
    for chunk, chunk_positions in _split_tokens(view, positions, old):
        places = positions_of_pairs(chunk_positions, text)
        difference = turns(places, new.to_json(), dtype) - turns(places, text, dtype)
        cos, sin = cos_sin_of_turns(difference, places, dtype)
        Rotation(gain * cos, gain * sin, **layout).rotate_(chunk)
    store_(keys, scales, wide)
    return keys


def evict(
    keys: Tensor,
    values: Tensor,
    start: int,
    stop: int,
    rope: Rope | None,
    *,
    gap: Distance | None = None,
    heads_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """Keys and values without tokens ``start`` to ``stop - 1``; later keys close the gap.

    StreamingLLM (2309.17453, section 3.2) keeps the first few tokens and a window of the latest,
    and numbers tokens by their index in the cache.

    Args:
        keys: ``[..., seq, heads, head_dim]``, rotated by ``rope``.
        values: ``[..., seq, heads, value_dim]`` of the same tokens.
        start: Index of the first token to remove.
        stop: Index after the last one.
        rope: The Rope of the keys; None if they are not rotated.
        gap: Positions by which later tokens move down, one number per axis if ``rope`` has several.
            For a Rope with one axis, by default the number of tokens removed.
        heads_first: Whether tensors, results included, are ``[..., heads, seq, head_dim]``.

    Returns:
        New keys and values ``[..., seq - (stop - start), heads, ...]``.

    Raises:
        PositionError: If the range is not within the tokens, or ``gap`` is missing or does not fit.

    >>> import torch
    >>> from phasor.torch import rotate
    >>> rope = Rope(head_dim=8, pairing="half")
    >>> raw = torch.randn(6, 2, 8, dtype=torch.float64)
    >>> keys, values = evict(rotate(raw, range(6), rope), raw, 1, 3, rope)
    >>> bool(torch.allclose(keys, rotate(raw[[0, 3, 4, 5]], range(4), rope), atol=1e-14))
    True
    """
    keys, values = tokens_first((keys, values), heads_first)
    seq = _count_tokens(keys, values, rope)
    stop = whole("stop", stop, least=0, most=seq, error=PositionError)
    start = whole("start", start, least=0, most=stop, error=PositionError)
    later = [-steps for steps in distances("gap", gap, stop - start, rope)]
    key_parts = keys[..., :start, :, :], _shift_keys(keys[..., stop:, :, :], later, rope)
    value_parts = values[..., :start, :, :], values[..., stop:, :, :]
    joined = torch.cat(key_parts, dim=-3), torch.cat(value_parts, dim=-3)
    keys, values = tokens_first(joined, heads_first)
    return keys, values


def insert(
    keys: Tensor,
    values: Tensor,
    at: int,
    new_keys: Tensor,
    new_values: Tensor,
    rope: Rope | None,
    *,
    offset: Distance | None = None,
    gap: Distance | None = None,
    heads_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """Keys and values with new ones inserted before token ``at``; later keys make room for them.

    The new tokens are a passage that was encoded separately, from position 0 on, for example once
    for many prompts. With ``at = seq`` one cache is appended to another.

    Args:
        keys: As for `evict`.
        values: As for `evict`.
        at: Index of the token before which to insert, or ``seq``.
        new_keys: ``[..., count, heads, head_dim]``, rotated by ``rope``.
        new_values: ``[..., count, heads, value_dim]``.
        rope: The Rope of all keys; None if they are not rotated.
        offset: Positions by which the new tokens move, like ``gap`` of `evict`; by default ``at``.
        gap: Positions by which later tokens move; by default ``count``.
        heads_first: As for `evict`.

    Returns:
        New keys and values ``[..., seq + count, heads, ...]``.

    Raises:
        PositionError: If ``at`` is not within the tokens, or ``offset`` or ``gap`` is missing or
            does not fit.

    >>> import torch
    >>> from phasor.torch import rotate
    >>> rope = Rope(head_dim=8, pairing="half")
    >>> raw = torch.randn(6, 2, 8, dtype=torch.float64)
    >>> first, second = rotate(raw[:4], range(4), rope), rotate(raw[4:], range(2), rope)
    >>> keys, values = insert(first, raw[:4], 4, second, raw[4:], rope)
    >>> bool(torch.allclose(keys, rotate(raw, range(6), rope), atol=1e-14))
    True
    """
    keys, values = tokens_first((keys, values), heads_first)
    new_keys, new_values = tokens_first((new_keys, new_values), heads_first)
    joined = insert_tokens(keys, values, new_keys, new_values, at, rope, offset=offset, gap=gap)
    keys, values = tokens_first(joined, heads_first)
    return keys, values


def insert_tokens(
    keys: Tensor,
    values: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    at: int,
    rope: Rope | None,
    *,
    offset: Distance | None,
    gap: Distance | None,
    names: Sequence[str] = ("new_keys", "new_values"),
) -> tuple[Tensor, Tensor]:
    """`insert` for ``[..., seq, heads, head_dim]``; ``names`` are the new tensors' in messages."""
    seq, count = _count_tokens(keys, values, rope), _count_tokens(new_keys, new_values, None)
    for name, x, cached in zip(names, (new_keys, new_values), (keys, values), strict=True):
        check_fits_cache(name, x, [*cached.shape[:-3], count, *cached.shape[-2:]], cached)
    at = whole("at", at, least=0, most=seq, error=PositionError)
    new_keys = _shift_keys(new_keys, distances("offset", offset, at, rope), rope)
    later_keys = _shift_keys(keys[..., at:, :, :], distances("gap", gap, count, rope), rope)
    key_parts = keys[..., :at, :, :], new_keys, later_keys
    value_parts = values[..., :at, :, :], new_values, values[..., at:, :, :]
    return torch.cat(key_parts, dim=-3), torch.cat(value_parts, dim=-3)


def _shift_keys(keys: Tensor, steps: list[int], rope: Rope | None) -> Tensor:
    if rope is None:
        return keys
    delta = steps if len(steps) > 1 else steps[0]
    return rotate(keys, delta, _rope_of_stored_keys(rope), gain=1.0)


def _rope_of_stored_keys(rope: Rope) -> Rope:
    """A Rope for keys that ``rope`` rotated, which already have its output pairing."""
    if rope.pairing_out is None:
        return rope
    return dataclasses.replace(rope, pairing=rope.pairing_out, pairing_out=None)


def _count_tokens(keys: Tensor, values: Tensor, rope: Rope | None) -> int:
    """The number of tokens of keys and values, or an error if they do not fit."""
    ARRAYS.check_kind("keys", keys)
    if rope is not None:
        check_rope(rope)
        if is_eight_bit(keys.dtype):
            raise TensorError(
                f"keys in {keys.dtype} must be moved by shift_, which takes their scales, and then "
                "cut or joined with torch.cat"
            )
        ARRAYS.check_heads("keys", keys, head_dim=rope.head_dim)
    ARRAYS.check_kind("values", values)
    if keys.dim() < 3 or keys.shape[:-2] != values.shape[:-2]:
        raise TensorError(
            "keys and values must be [..., seq, heads, head_dim] of the same tokens, "
            f"got shapes {list(keys.shape)} and {list(values.shape)}"
        )
    return keys.shape[-3]


def distances(name: str, distance: Distance | None, default: int, rope: Rope | None) -> list[int]:
    """How far tokens move along each axis, or an error if ``distance`` does not fit the Rope."""
    if rope is None:
        return []  # keys that are not rotated have no position
    n_axes = rope.axes.n_axes
    if distance is None:
        if n_axes > 1:
            raise PositionError(
                f"{name} must be given for a Rope of {n_axes} axes, because tokens are not one "
                f"position apart along each axis, got None; pass one number of positions per axis"
            )
        return [default]
    steps = list(distance) if isinstance(distance, (list, tuple)) else [distance]
    if len(steps) != n_axes:
        raise PositionError(f"{name} must be one number per axis ({n_axes}), got {distance!r}")
    return [
        whole(name, step, least=-_INT64_MAX, most=_INT64_MAX, error=PositionError) for step in steps
    ]


def _split_tokens(keys: Tensor, positions: Tensor, rope: Rope) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of a few tokens at a time, with their positions."""
    token_dim = -2 if rope.axes.n_axes > 1 else -1
    per_token = positions.dim() >= -token_dim and positions.shape[token_dim] != 1
    seq, sequences = keys.shape[-3], max(1, keys.shape[:-3].numel())
    step = max(1, CHUNK // (sequences * rope.num_pairs))
    for start in range(0, seq, step):
        count = min(step, seq - start)
        chunk = keys.narrow(-3, start, count)
        yield chunk, positions.narrow(token_dim, start, count) if per_token else positions
