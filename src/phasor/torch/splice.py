"""Ranges of cached tokens: cut out, or put in, with the later keys moved to fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from phasor._checks import whole
from phasor.errors import PositionError, TensorError
from phasor.rope import Rope
from phasor.torch._arguments import check_heads, check_is_tensor, check_rope
from phasor.torch.cache import as_stored
from phasor.torch.functional import rotate

#: How far tokens move: positions, one number per axis where the Rope has several.
Steps = int | Sequence[int]

_FAR = 2**63 - 1


def evict(
    keys: Tensor,
    values: Tensor,
    start: int,
    stop: int,
    rope: Rope | None,
    *,
    gap: Steps | None = None,
) -> tuple[Tensor, Tensor]:
    """Keys and values without tokens ``start`` to ``stop - 1``; later keys close the gap.

    With the first few tokens kept and a window of the latest, this is a cache of StreamingLLM
    (2309.17453, section 3.2), which numbers tokens by their place in the cache.

    Args:
        keys: ``[..., seq, heads, head_dim]``, rotated by ``rope``.
        values: ``[..., seq, heads, width]`` of the same tokens.
        start: Index of the first token to go.
        stop: Index behind the last one.
        rope: What rotated the keys; None if nothing did.
        gap: How many positions the later tokens move up, one number per axis where ``rope`` has
            several. By default as many as tokens go, for a Rope of one axis.

    Returns:
        New keys and values ``[..., seq - (stop - start), heads, ...]``.

    Raises:
        PositionError: If the range is not within the tokens, or ``gap`` is missing or does not
            fit.
        TensorError: If a shape does not fit.
        SpecError: If ``rope.scaling`` is a rule.

    >>> import torch
    >>> from phasor.torch import rotate
    >>> rope = Rope(head_dim=8, pairing="half")
    >>> raw = torch.randn(6, 2, 8, dtype=torch.float64)
    >>> keys, values = evict(rotate(raw, range(6), rope), raw, 1, 3, rope)
    >>> bool(torch.allclose(keys, rotate(raw[[0, 3, 4, 5]], range(4), rope), atol=1e-14))
    True
    """
    start, stop, steps = checked_range(keys, values, start, stop, rope, gap)
    back = [-step for step in steps]
    later = _moved(keys[..., stop:, :, :], back, rope)
    kept = torch.cat([values[..., :start, :, :], values[..., stop:, :, :]], dim=-3)
    return torch.cat([keys[..., :start, :, :], later], dim=-3), kept


def insert(
    keys: Tensor,
    values: Tensor,
    at: int,
    new_keys: Tensor,
    new_values: Tensor,
    rope: Rope | None,
    *,
    offset: Steps | None = None,
    gap: Steps | None = None,
) -> tuple[Tensor, Tensor]:
    """Keys and values with others put in before token ``at``; later keys make room for them.

    The tokens put in stood at 0, 1, ... by themselves, as a passage does that was encoded once for
    many prompts. At the end, ``at = seq``, this merges two caches.

    Args:
        keys: ``[..., seq, heads, head_dim]``, rotated by ``rope``.
        values: ``[..., seq, heads, width]`` of the same tokens.
        at: Index of the token before which they go, or ``seq``.
        new_keys: ``[..., count, heads, head_dim]``, rotated by ``rope``.
        new_values: ``[..., count, heads, width]``.
        rope: What rotated all the keys; None if nothing did.
        offset: How many positions the new tokens move, one number per axis where ``rope`` has
            several. By default ``at``, for a Rope of one axis.
        gap: How many positions the later tokens move. By default ``count``, for a Rope of one
            axis.

    Returns:
        New keys and values ``[..., seq + count, heads, ...]``.

    Raises:
        PositionError: If ``at`` is not within the tokens, or ``offset`` or ``gap`` is missing or
            does not fit.
        TensorError: If a shape, dtype or device does not fit.
        SpecError: If ``rope.scaling`` is a rule.

    >>> import torch
    >>> from phasor.torch import rotate
    >>> rope = Rope(head_dim=8, pairing="half")
    >>> raw = torch.randn(6, 2, 8, dtype=torch.float64)
    >>> first, second = rotate(raw[:4], range(4), rope), rotate(raw[4:], range(2), rope)
    >>> keys, values = insert(first, raw[:4], 4, second, raw[4:], rope)
    >>> bool(torch.allclose(keys, rotate(raw, range(6), rope), atol=1e-14))
    True
    """
    at, steps, back = checked_places(keys, values, at, new_keys, new_values, rope, offset, gap)
    there = _moved(new_keys, steps, rope)
    later = _moved(keys[..., at:, :, :], back, rope)
    held = torch.cat([values[..., :at, :, :], new_values, values[..., at:, :, :]], dim=-3)
    return torch.cat([keys[..., :at, :, :], there, later], dim=-3), held


def checked_range(
    keys: Tensor, values: Tensor, start: int, stop: int, rope: Rope | None, gap: Steps | None
) -> tuple[int, int, list[int]]:
    """The range of `evict` and how far later tokens move, or the error that it raises."""
    _check_rope(keys, rope)
    seq = _tokens(keys, values)
    stop = whole("stop", stop, least=0, most=seq, error=PositionError)
    start = whole("start", start, least=0, most=stop, error=PositionError)
    return start, stop, _steps("gap", gap, stop - start, rope)


def checked_places(
    keys: Tensor,
    values: Tensor,
    at: int,
    new_keys: Tensor,
    new_values: Tensor,
    rope: Rope | None,
    offset: Steps | None,
    gap: Steps | None,
) -> tuple[int, list[int], list[int]]:
    """The place of `insert` and how far new and later tokens move, or the error that it raises."""
    _check_rope(keys, rope)
    seq, count = _tokens(keys, values), _tokens(new_keys, new_values)
    for name, old, new in (("new_keys", keys, new_keys), ("new_values", values, new_values)):
        wanted = [*old.shape[:-3], count, *old.shape[-2:]]
        same_kind = (new.dtype, new.device) == (old.dtype, old.device)
        if list(new.shape) != wanted or not same_kind:
            raise TensorError(
                f"{name} must be {wanted} in {old.dtype} on {old.device} like what is cached, "
                f"got {list(new.shape)} in {new.dtype} on {new.device}"
            )
    at = whole("at", at, least=0, most=seq, error=PositionError)
    return at, _steps("offset", offset, at, rope), _steps("gap", gap, count, rope)


def _check_rope(keys: Tensor, rope: Rope | None) -> None:
    if rope is not None:
        check_rope(rope)
        check_heads("keys", keys, rope)


def _tokens(keys: Tensor, values: Tensor) -> int:
    """How many tokens keys and values hold, once they are known to hold the same ones."""
    check_is_tensor("keys", keys)
    check_is_tensor("values", values)
    if keys.dim() < 3 or keys.shape[:-2] != values.shape[:-2]:
        raise TensorError(
            "keys and values must be [..., seq, heads, width] of the same tokens, "
            f"got shapes {list(keys.shape)} and {list(values.shape)}"
        )
    return keys.shape[-3]


def _steps(name: str, given: Any, tokens: int, rope: Rope | None) -> list[int]:
    """How far tokens move along each axis."""
    if rope is None:
        return []  # its keys stand nowhere
    n_axes = rope.axes.n_axes
    if given is None and n_axes > 1:
        raise PositionError(
            f"{name} must be given for a Rope of {n_axes} axes, along which tokens do not stand "
            "one position apart, got None; give one number of positions per axis"
        )
    if given is None:
        return [tokens]
    steps = list(cast(Sequence[Any], given)) if isinstance(given, (list, tuple)) else [given]
    if len(steps) != n_axes:
        raise PositionError(f"{name} must be one number per axis ({n_axes}), got {given!r}")
    return [whole(name, step, least=-_FAR, most=_FAR, error=PositionError) for step in steps]


def _moved(keys: Tensor, steps: list[int], rope: Rope | None) -> Tensor:
    if rope is None:
        return keys
    return rotate(keys, steps if len(steps) > 1 else steps[0], as_stored(rope))
