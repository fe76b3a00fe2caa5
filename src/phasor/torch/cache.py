"""Keys that are rotated already: move them, undo them, give them other frequencies.

A cached key is ``R(p) k``, and rotations compose. So a key moves by ``R(d) R(p) = R(p + d)``, and
changes its frequencies by ``R'(p) R(-p)``, which is one rotation too. Nothing is recomputed from
the model, and nothing but the rounding of the stored key is lost.

The verbs here take tensors; `phasor.torch.splice` cuts and joins them, and
`phasor.torch.cached_keys` does either to whole caches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from phasor._checks import number
from phasor.angles import checked_positions as numpy_positions
from phasor.errors import SpecError
from phasor.rope import Rope
from phasor.torch._arguments import check_heads, check_rope, checked_positions
from phasor.torch._rows import TOO_FAR, reach, rows
from phasor.torch._written import check_alone_and_apart, check_copies, check_mutable
from phasor.torch.by_rows import rotate_by_
from phasor.torch.functional import rotate_

_CHUNK = 1 << 20  # rows worked on at once, so that a long cache needs little beside itself


def shift_(keys: Tensor, delta: Any, rope: Rope) -> Tensor:
    """``R(delta) k`` for every cached key, in place: keys of ``p`` become keys of ``p + delta``.

    A gain that the keys were made with stays in them. A key whose ``delta`` is 0 keeps its bits.
    Shifting by ``a`` and then by ``b`` is shifting by ``a + b``, but rounds twice: see the page on
    cached keys before shifting 16-bit keys again and again.

    Args:
        keys: ``[..., seq, heads, head_dim]``, rotated by ``rope``.
        delta: What is added to the positions, as ``positions`` of `phasor.torch.rotate`: a scalar
            for all tokens, or ``[..., seq]``, with one coordinate per axis at the end where
            ``rope`` has several. What comes of a position may be negative.
        rope: What rotated the keys.

    Returns:
        ``keys``.

    Raises:
        PositionError: If ``delta`` does not fit the keys.
        TensorError: If the keys do not fit the Rope, or share memory with themselves.
        SpecError: If ``rope.scaling`` is a rule: use ``rope.at(seq_len)``, with the length for
            which the keys were rotated.

    >>> import torch
    >>> from phasor.torch import rotate
    >>> rope = Rope(head_dim=8, pairing="half")
    >>> raw = torch.randn(5, 2, 8, dtype=torch.float64)
    >>> keys = shift_(rotate(raw, [10, 11, 12, 13, 14], rope), -10, rope)
    >>> bool(torch.allclose(keys, rotate(raw, range(5), rope), atol=1e-14))
    True
    """
    return rotate_(keys, check_shiftable(keys, delta, rope), as_stored(rope))


def undo_(keys: Tensor, positions: Any, rope: Rope, *, gain: float = 1.0) -> Tensor:
    """``R(-p) k / gain`` for every cached key, in place: the keys before they were rotated.

    Args:
        keys: ``[..., seq, heads, head_dim]``, rotated by ``rope``. Their pairing becomes
            ``rope.pairing`` where that differs from ``rope.output_pairing``.
        positions: Where the tokens stand, as for `phasor.torch.rotate`.
        rope: What rotated the keys.
        gain: What cos and sin were multiplied by: ``rope.attention_factor`` for keys of a model
            that does so.

    Returns:
        ``keys``.

    Raises:
        PositionError: If the positions do not fit the keys.
        TensorError: If the keys do not fit the Rope, or share memory with themselves.
        SpecError: If ``gain`` is not a positive number, or ``rope.scaling`` is a rule.

    >>> import torch
    >>> from phasor.torch import rotate
    >>> rope = Rope(head_dim=8, pairing="half")
    >>> raw = torch.randn(5, 2, 8, dtype=torch.float64)
    >>> keys = undo_(rotate(raw, range(5), rope, gain=1.5), range(5), rope, gain=1.5)
    >>> bool(torch.allclose(keys, raw, atol=1e-14))
    True
    """
    check_rope(rope)
    check_heads("keys", keys, rope)
    return rotate_(keys, positions, rope, inverse=True, gain=1 / number("gain", gain, above=0))


def retune_(keys: Tensor, positions: Any, old: Rope, new: Rope, *, gain: float = 1.0) -> Tensor:
    """``gain R_new(p) R_old(-p) k`` for every cached key, in place: keys for other frequencies.

    For a rule that picks another law as the sequence grows: LongRoPE's short list and its long
    one, dynamic NTK. The two rotations are one, by ``p (f_new - f_old)``: cos and sin are composed
    in float64 and the keys are rounded once.

    Args:
        keys: ``[..., seq, heads, head_dim]``, rotated by ``old``.
        positions: Where the tokens stand, as for `phasor.torch.rotate`.
        old: What rotated the keys.
        new: What will have rotated them; it differs from ``old`` in frequencies or direction only.
        gain: What the turned coordinates are multiplied by:
            ``new.attention_factor / old.attention_factor`` for keys that carry the factor.

    Returns:
        ``keys``.

    Raises:
        SpecError: If the Ropes differ in which coordinates turn or along which axis, if the
            scaling of either is a rule, or if ``gain`` is not a positive number.
        PositionError: If the positions do not fit the keys.
        TensorError: If the keys do not fit the Ropes, or share memory with themselves.

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
    places = check_retunable(keys, positions, old, new)
    digits = reach([places])
    layout: dict[str, Any] = {"pairing": old.output_pairing, "rotary_start": old.rotary_start}
    for part, where in _in_parts(keys, places, old):
        cos, sin = rows([where], new.to_json(), torch.float64, digits)
        c, s = rows([where], old.to_json(), torch.float64, digits)
        both = gain * (cos * c + sin * s), gain * (sin * c - cos * s)
        rotate_by_(part, *both, **layout)
    return keys


def check_shiftable(keys: Tensor, delta: Any, rope: Rope) -> Tensor:
    """``delta`` as a tensor, or the error that `shift_` raises."""
    check_rope(rope)
    check_heads("keys", keys, rope)
    places = checked_positions(delta, [keys], rope)
    if not torch.compiler.is_compiling():
        check_mutable([keys])
        check_alone_and_apart({"keys": keys}, {})
        check_copies([keys], [keys])
    return places


def check_retunable(keys: Tensor, positions: Any, old: Rope, new: Rope) -> Tensor:
    """The positions as a tensor, or the error that `retune_` raises."""
    for name, rope in (("old", old), ("new", new)):
        check_rope(rope, name)
    for name in ("head_dim", "rotary_dim", "rotary_start", "output_pairing", "axes"):
        had, wanted = getattr(old, name), getattr(new, name)
        if had != wanted:
            raise SpecError(
                f"new must have the {name} of old ({had}), for only frequencies can change under "
                f"rotated keys, got {wanted}; undo_ the keys and rotate them again"
            )
    places = check_shiftable(keys, positions, old)
    if reach([places]) == TOO_FAR:
        numpy_positions(places.numpy())  # which refuses what is not finite
    return places


def as_stored(rope: Rope) -> Rope:
    """The Rope that turns keys where they lie: they have its output pairing already."""
    if rope.pairing_out is None:
        return rope
    return dataclasses.replace(rope, pairing=rope.pairing_out, pairing_out=None)


def _in_parts(keys: Tensor, places: Tensor, rope: Rope) -> Iterator[tuple[Tensor, Tensor]]:
    """Some tokens at a time of the keys, as views, with their positions."""
    along = -2 if rope.axes.n_axes > 1 else -1
    per_token = places.dim() >= -along and places.shape[along] != 1
    seq, sequences = keys.shape[-3], max(1, keys.shape[:-3].numel())
    step = max(1, _CHUNK // (sequences * rope.num_pairs))
    for start in range(0, seq, step):
        count = min(step, seq - start)
        part = keys.narrow(-3, start, count)
        yield part, places.narrow(along, start, count) if per_token else places
