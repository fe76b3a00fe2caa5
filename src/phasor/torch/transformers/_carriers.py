"""What goes through a foreign model in the place of its cosines and sines, and what meets it.

A carrier holds the positions of the tokens and says which Rope turns them: a few integers, where
the model would have handed ``[batch, seq, head_dim]`` of cosines and as many sines from layer to
layer. Only a Rope whose rule picks its law from the length of the sequence is carried as rows,
half as wide and made once a forward pass: which law it is depends on the data then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from phasor.errors import TensorError
from phasor.pairings import Pairing
from phasor.rope import Rope
from phasor.scaling import Rule
from phasor.torch import ops
from phasor.torch._arguments import checked_positions
from phasor.torch._layout import constant, count_axes, layout_text, read_rope
from phasor.torch.backends import cpu
from phasor.torch.transformers._rules import rule_rows

Width = Literal["twice", "repeated", "half", "complex"]


class Form(NamedTuple):
    """The geometry of one foreign rotation function, as it was measured.

    Attributes:
        pairing: Pairs on the way in.
        pairing_out: Pairs on the way out.
        direction: -1 where positive angles turn clockwise.
        slice: Which coordinates of a head wider than the rotation it turns; ``"exact"`` where it
            takes no such head.
        width: ``"twice"`` where it wants all cosines and all of them again, ``"repeated"`` where
            each comes twice in a row, ``"half"`` where each comes once, ``"complex"`` as one
            complex number.
        heads_first: Whether tensors are ``[..., heads, seq, head_dim]`` unless it is told.
    """

    pairing: Pairing
    pairing_out: Pairing
    direction: int
    slice: Literal["start", "end", "exact"]
    width: Width
    heads_first: bool


class Ids(NamedTuple):
    """How a foreign module is told where tokens stand.

    Attributes:
        last: Whether coordinates stand last, ``[..., seq, axes]``, and not first, ``[axes, batch,
            seq]``.
        batched: Whether there is a batch, ``[batch, seq]``, in what it is given and answers.
        order: Which coordinate each axis of the Rope is, where they stand in another order.
        fixed: The positions of all tokens, where it is told nothing.
    """

    last: bool = False
    batched: bool = True
    order: tuple[int, ...] = ()
    fixed: tuple[tuple[int, ...], ...] = ()


_PLAIN = Ids()


@dataclass(frozen=True)
class Turns:
    """How one kind of layer turns.

    Attributes:
        rope: The Rope, counter-clockwise, as text.
        gain: Of its cosines and sines.
        ids: How positions come to it.
        rule: What picks the Rope's law, if anything; here because a compiler follows the methods
            of what a module holds, and not of what a text describes.
    """

    rope: str
    gain: float
    ids: Ids = _PLAIN
    rule: Rule | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        scaling = read_rope(self.rope).scaling
        object.__setattr__(self, "rule", scaling if isinstance(scaling, Rule) else None)


@dataclass(frozen=True, eq=False)
class Carrier:
    """Stands where a model expects cosines, sines, or both as complex numbers.

    Attributes:
        angles: ``(positions,)``, or ``(cos, sin)`` rows of half width that hold their gain.
        turns: Which Rope turns them.
        inverse: Whether to undo the rotation; the negative of a sine says so.
    """

    angles: tuple[Tensor, ...]
    turns: Turns
    inverse: bool = False

    def __neg__(self) -> Carrier:
        return Carrier(self.angles, self.turns, not self.inverse)

    @property
    def rank(self) -> int:
        """Dimensions of the cosines that it stands for: those of the tokens, and the width."""
        first = self.angles[0].dim()
        return first + (len(self.angles) == 1 and count_axes(self.turns.rope) == 1)

    def _over_tokens(self, change: Callable[[Tensor], Tensor]) -> Carrier:
        return Carrier(tuple(map(change, self.angles)), self.turns, self.inverse)

    def __getitem__(self, key: Any) -> Carrier:
        """``cos[..., :n]`` where that is all there is, or ``cos[tokens, :]``."""
        match key:
            case (e, slice(start=None, stop=int(stop), step=None)) if e is Ellipsis:
                if stop >= read_rope(self.turns.rope).rotary_dim:
                    return self
            case (*tokens, slice(start=None, stop=None, step=None)) if len(key) == self.rank:
                return self._over_tokens(lambda a: a[tuple(tokens)])
            case _:
                pass
        raise TensorError(f"cosines of a patched model are positions and cannot be cut, got {key}")

    def reshape(self, *shape: int) -> Carrier:
        """Tokens in other dimensions, ``cos.reshape(groups, -1, width)``."""
        if shape[-1] not in (-1, read_rope(self.turns.rope).rotary_dim):
            raise TensorError(
                f"cosines of a patched model are positions and keep their width, got {shape}"
            )
        one = len(self.angles) == 1 and count_axes(self.turns.rope) == 1
        return self._over_tokens(lambda a: a.reshape(shape[:-1] + (() if one else a.shape[-1:])))

    def to(self, *args: Any, **kwargs: Any) -> Carrier:
        """Follow a model to another device; a change of dtype is for cosines, not for positions."""
        device = kwargs.get("device", args[0] if args else None)
        if isinstance(device, (str, int, torch.device)):
            return self._over_tokens(lambda a: a.to(device))
        return self

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a model patched by phasor.torch.transformers carries positions here, not cosines "
            f"and sines, and its code asked for .{name}; unpatch it and report its architecture"
        )


def carried(turns: Turns, position_ids: Tensor, dtype: torch.dtype) -> Carrier:
    """The carrier for a model's ``position_ids``, whatever was carried before.

    Args:
        turns: How these layers turn.
        position_ids: ``[batch, seq]``, or as ``turns.ids`` says where positions have axes; one
            coordinate stands for all of them.
        dtype: Of the hidden states.
    """
    positions, ids = position_ids, turns.ids
    n_axes = count_axes(turns.rope)
    if n_axes > 1 and not ids.last:
        positions = (positions[None] if positions.dim() == 2 else positions).movedim(0, -1)
        if positions.shape[-1] == 1:
            positions = positions.expand(*positions.shape[:-1], n_axes)
    if ids.order:
        positions = positions[..., list(ids.order)]
    if turns.rule is None:
        return Carrier((positions,), turns)
    with torch.no_grad():
        return Carrier(rule_rows(turns.rule, turns.rope, positions, dtype), turns)


def turned(xs: Sequence[Tensor], carrier: Any, form: Form, heads_first: bool) -> list[Tensor]:
    """``xs`` rotated as a foreign function of that form would have done it.

    Args:
        xs: Tensors ``[..., heads, seq, head_dim]`` or ``[..., seq, heads, head_dim]``.
        carrier: What a patched model hands to it.
        form: The function's geometry.
        heads_first: Which of the two.
    """
    if not isinstance(carrier, Carrier):
        raise TensorError(
            "cos and sin must come from a rotary embedding of the patched model, got "
            f"{type(carrier).__name__}; unpatch the model before handing it cosines of your own"
        )
    given = [x.transpose(-3, -2) if heads_first else x for x in xs]
    inverse = carrier.inverse is (form.direction > 0)
    if inverse and form.pairing != form.pairing_out:
        raise TensorError(
            "a negative sine must go to a function that writes the pairs it reads, got one that "
            f"reads {form.pairing} and writes {form.pairing_out} pairs"
        )
    where = carrier.turns.rope, given[0].shape[-1], form
    if len(carrier.angles) == 2:
        done = ops.apply(given, list(carrier.angles), rows_text(*where), inverse, 1.0, "auto")
    elif torch.compiler.is_compiling():
        text, gain = rope_text(*where), carrier.turns.gain
        done = ops.apply(given, list(carrier.angles), text, inverse, gain, "auto")
    else:
        done = _by_positions(given, carrier, placed(*where), inverse)
    return [y.transpose(-3, -2) if heads_first else y for y in done]


def _by_positions(
    xs: Sequence[Tensor], carrier: Carrier, rope: Rope, inverse: bool
) -> list[Tensor]:
    positions, gain = carrier.angles[0], carrier.turns.gain
    done = cpu.quick(xs, positions, rope, inverse, gain, "auto")
    if done is None:
        checked = [checked_positions(positions, xs, rope)]
        done = ops.apply(list(xs), checked, rope.to_json(), inverse, gain, "auto")
    return done


@lru_cache(maxsize=256)
def placed(text: str, head_dim: int, form: Form) -> Rope:
    """The Rope that turns heads of that width as the foreign function does."""
    rope = read_rope(text)
    spare = head_dim - rope.rotary_dim
    if spare < 0 or (spare and form.slice == "exact"):
        raise TensorError(
            f"the rotated tensors must end in {rope.rotary_dim} coordinates, got {head_dim}"
        )
    start = spare if form.slice == "end" else 0
    return replace(
        rope,
        head_dim=head_dim,
        rotary_start=start,
        pairing=form.pairing,
        pairing_out=form.pairing_out,
    )


@constant
def rope_text(text: str, head_dim: int, form: Form) -> str:
    """`placed` as the operator's text for positions."""
    return placed(text, head_dim, form).to_json()


@constant
def rows_text(text: str, head_dim: int, form: Form) -> str:
    """`placed` as the operator's text for rows."""
    return layout_text(form.pairing, form.pairing_out, placed(text, head_dim, form).rotary_start)
