"""What a patched model hands from layer to layer in the place of its cosines, and how it rotates.

A carrier holds the positions of the tokens and says which Rope rotates by them: a few integers,
where the model would have handed ``[batch, seq, head_dim]`` of cosines and as many sines. Only a
Rope whose rule picks its law from the length of the sequence is carried as rows of cos and sin,
half as wide and made once a forward pass: which law it is depends on the data then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from phasor.errors import TensorError
from phasor.pairings import Pairing
from phasor.rope import Rope
from phasor.scaling import Rule
from phasor.torch import ops
from phasor.torch._internals import cached_constant
from phasor.torch._tables import count_axes, layout_text, read_rope
from phasor.torch.functional import rotate, rotate_qk

RowWidth = Literal["twice", "repeated", "half", "complex", "table"]


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
            complex number, ``"table"`` where all sines and then all cosines are one tensor.
        heads_first: Whether tensors are ``[..., heads, seq, head_dim]`` unless it is told.
    """

    pairing: Pairing
    pairing_out: Pairing
    direction: int
    slice: Literal["start", "end", "exact"]
    width: RowWidth
    heads_first: bool


class PositionLayout(NamedTuple):
    """How a foreign module is told where tokens stand.

    Attributes:
        axes_last: Whether positions of several axes are ``[..., seq, axes]``, and not ``[axes,
            batch, seq]``.
        batched: Whether there is a batch, ``[batch, seq]``, in positions and cosines.
        axis_order: Which coordinate each axis of the Rope is, where they stand in another order.
        fixed: The positions of all tokens, where the module is told nothing.
    """

    axes_last: bool = False
    batched: bool = True
    axis_order: tuple[int, ...] = ()
    fixed: tuple[tuple[int, ...], ...] = ()


_PLAIN_LAYOUT = PositionLayout()


@dataclass(frozen=True)
class CarriedRope:
    """How one kind of layer rotates.

    Attributes:
        rope: The Rope, counter-clockwise, as text.
        gain: Of its cosines and sines.
        layout: How positions come to it.
        rule: What picks the Rope's law, if anything; here because a compiler follows the methods
            of what a module holds, and not of what a text describes.
    """

    rope: str
    gain: float
    layout: PositionLayout = _PLAIN_LAYOUT
    rule: Rule | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        scaling = read_rope(self.rope).scaling
        object.__setattr__(self, "rule", scaling if isinstance(scaling, Rule) else None)


@dataclass(frozen=True, eq=False)
class Carrier:
    """Stands where a model expects cosines, sines, or both as complex numbers.

    Attributes:
        angles: ``(positions,)``, or ``(cos, sin)`` rows of half width that hold their gain.
        by: Which Rope rotates by them.
        inverse: Whether to undo the rotation; the negative of a sine says so.
    """

    angles: tuple[Tensor, ...]
    by: CarriedRope
    inverse: bool = False

    def __neg__(self) -> Carrier:
        return Carrier(self.angles, self.by, not self.inverse)

    @property
    def rank(self) -> int:
        """Dimensions of the cosines that it stands for: those of the tokens, and the width."""
        return self.angles[0].dim() + self._is_without_width

    @property
    def _is_without_width(self) -> bool:
        return len(self.angles) == 1 and count_axes(self.by.rope) == 1

    def _over_tokens(self, change: Callable[[Tensor], Tensor]) -> Carrier:
        return Carrier(tuple(map(change, self.angles)), self.by, self.inverse)

    def __getitem__(self, key: Any) -> Carrier:
        """``cos[..., :n]`` where that is all there is, or ``cos[tokens, :]``."""
        match key:
            case (e, slice(start=None, stop=int(stop), step=None)) if e is Ellipsis:
                if stop >= read_rope(self.by.rope).rotary_dim:
                    return self
            case (*tokens, slice(start=None, stop=None, step=None)) if len(key) == self.rank:
                return self._over_tokens(lambda a: a[tuple(tokens)])
            case _:
                pass
        raise TensorError(f"cosines of a patched model are positions and cannot be cut, got {key}")

    def reshape(self, *shape: int) -> Carrier:
        """Tokens in other dimensions, ``cos.reshape(groups, -1, width)``."""
        if shape[-1] not in (-1, read_rope(self.by.rope).rotary_dim):
            raise TensorError(
                f"cosines of a patched model are positions and keep their width, got {shape}"
            )
        one = self._is_without_width
        return self._over_tokens(lambda a: a.reshape(shape[:-1] + (() if one else a.shape[-1:])))

    def to(self, *args: Any, **kwargs: Any) -> Carrier:
        """Follow a model to another device; a change of dtype is for cosines, not for positions."""
        device = kwargs.get("device", args[0] if args else None)
        if isinstance(device, (str, int, torch.device)):
            return self._over_tokens(lambda a: a.to(device))
        return self

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a model patched by phasor.torch.hf carries positions here, not cosines and sines, "
            f"and its code asked for .{name}; unpatch it and report its architecture"
        )


class CarrierTable:
    """Stands for the table of sines in GPT-J's and CodeGen's attention, and for what it returns.

    Their code looks rows up by positions and splits them into sines and cosines.

    Args:
        by: How the layer rotates.
        device: Where the table is.
        carrier: What was looked up, if anything was.
    """

    def __init__(
        self, by: CarriedRope, device: torch.device, carrier: Carrier | None = None
    ) -> None:
        self.by, self.device, self.carrier = by, device, carrier
        self.shape = (2,)

    def repeat(self, *sizes: int) -> CarrierTable:
        """The same table for every row of the batch."""
        del sizes
        return self

    def to(self, *args: Any) -> CarrierTable:
        """Positions are not cast."""
        del args
        return self

    def __getitem__(self, position_ids: Tensor) -> CarrierTable:
        carrier = carry_positions(self.by, position_ids, torch.float32)
        return CarrierTable(self.by, self.device, carrier)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.gather:
            return args[0][args[2][..., 0]]
        if func is torch.split and args[0].carrier is not None:
            return args[0].carrier, args[0].carrier
        raise TensorError(f"a table of a patched model holds positions, not sines, for {func}")


def carry_positions(by: CarriedRope, position_ids: Tensor, dtype: torch.dtype) -> Carrier:
    """The carrier for a model's ``position_ids``, whatever was carried before.

    Args:
        by: How these layers rotate.
        position_ids: ``[batch, seq]``, or as ``by.layout`` says where positions have axes; one
            coordinate stands for all of them.
        dtype: Of the hidden states.
    """
    positions, layout = position_ids, by.layout
    n_axes = count_axes(by.rope)
    if n_axes > 1 and not layout.axes_last:
        # [axes, batch, seq] -> [batch, seq, axes]
        positions = (positions[None] if positions.dim() == 2 else positions).movedim(0, -1)
        if positions.shape[-1] == 1:
            positions = positions.expand(*positions.shape[:-1], n_axes)
    if layout.axis_order:
        positions = positions[..., list(layout.axis_order)]
    if by.rule is None:
        return Carrier((positions,), by)
    with torch.no_grad():
        return Carrier(rule_rows(by.rule, by.rope, positions, dtype), by)


def rotate_by_carrier(
    xs: Sequence[Tensor], carrier: Any, form: Form, heads_first: bool
) -> list[Tensor]:
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
    inverse = carrier.inverse is (form.direction > 0)
    if inverse and form.pairing != form.pairing_out:
        raise TensorError(
            "a negative sine must go to a function that writes the pairs it reads, got one that "
            f"reads {form.pairing} and writes {form.pairing_out} pairs"
        )
    # the operator takes [..., seq, heads, head_dim]
    xs = [x.transpose(-3, -2) if heads_first else x for x in xs]
    rope = carrier.by.rope, xs[0].shape[-1], form
    if len(carrier.angles) == 2:
        done = ops.apply(xs, list(carrier.angles), rows_text(*rope), inverse, 1.0, "auto")
    elif torch.compiler.is_compiling():
        # a text is a constant to the compiler, a Rope from a cache is not
        text, gain = rope_of_heads(*rope), carrier.by.gain
        done = ops.apply(xs, list(carrier.angles), text, inverse, gain, "auto")
    else:
        positions, of_heads = carrier.angles[0], read_rope(rope_of_heads(*rope))
        if len(xs) == 1:
            done = [rotate(xs[0], positions, of_heads, inverse=inverse, gain=carrier.by.gain)]
        else:
            done = rotate_qk(
                xs[0], xs[1], positions, of_heads, inverse=inverse, gain=carrier.by.gain
            )
    return [y.transpose(-3, -2) if heads_first else y for y in done]


@cached_constant
def rope_of_heads(text: str, head_dim: int, form: Form) -> str:
    """The Rope that rotates heads of that width as the foreign function does, as text."""
    rope = read_rope(text)
    spare = head_dim - rope.rotary_dim
    if spare < 0 or (spare and form.slice == "exact"):
        raise TensorError(
            f"the rotated tensors must end in {rope.rotary_dim} coordinates, got {head_dim}"
        )
    of_heads = replace(
        rope,
        head_dim=head_dim,
        rotary_start=spare if form.slice == "end" else 0,
        pairing=form.pairing,
        pairing_out=form.pairing_out,
    )
    return of_heads.to_json()


@cached_constant
def rows_text(text: str, head_dim: int, form: Form) -> str:
    """The layout of `rope_of_heads`, as the operator's text for rows."""
    start = read_rope(rope_of_heads(text, head_dim, form)).rotary_start
    return layout_text(form.pairing, form.pairing_out, start)


# ---- rows under a rule ----


def rule_rows(
    rule: Rule, text: str, positions: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Rows of cos and sin ``[..., seq, num_pairs]`` under the law for these positions.

    They are what ``rope.at(farthest + 1)`` would say, in tensor operations alone where the rule
    can say it so: then a compiler can follow, and no device is stopped.

    Args:
        rule: Picks the law.
        text: The Rope, whose scaling is that rule.
        positions: ``[..., seq]``, or ``[..., seq, axes]``.
        dtype: Of the tensors that will be rotated.

    Returns:
        Cosines and sines that hold their gain.
    """
    steps, gain = _radians_per_position(rule, text, positions)
    columns = positions.unsqueeze(-1).double()
    if count_axes(text) > 1:
        # the coordinate of each pair: [..., seq, axes] -> [..., seq, num_pairs]
        columns = positions.double()[..., list(_rule_constants(text).axis_of_pair)]
    angles = columns * steps
    row_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return (angles.cos() * gain).to(row_dtype), (angles.sin() * gain).to(row_dtype)


def _radians_per_position(rule: Rule, text: str, positions: Tensor) -> tuple[Tensor, Any]:
    """Of every pair, and the gain."""
    length = (positions.max() + 1).double()
    # numbers, not tensors: a compiler takes only one tensor as a constant from one function
    spectra = [length.new_tensor(one) for one in _rule_constants(text).spectra]
    found = [rule.at_lengths(length, one, torch) for one in spectra]
    scaled = [one for one in found if one is not None]
    if len(scaled) < len(found):
        return _outside_the_graph(text, length)
    steps = torch.cat([one for one, _ in scaled], -1)
    if _rule_constants(text).in_float32:
        steps = steps.float().double()
    return steps, scaled[0][1]


def _read_length(text: str, length: Tensor) -> tuple[Tensor, float]:
    rope = read_rope(text).at(max(1, math.ceil(length)))
    return length.new_tensor(rope.inv_freq.tolist()), rope.attention_factor


# a rule without at_lengths has its length read, which no graph can hold
_outside_the_graph = cast(
    Callable[[str, Tensor], tuple[Tensor, float]],
    torch.compiler.disable(_read_length, reason="the rule has no at_lengths: its length is read"),
)


class _RuleConstants(NamedTuple):
    """What rows under a rule need of its Rope.

    Attributes:
        spectra: The frequencies of every spectrum before the rule.
        in_float32: Whether frequencies are rounded to float32.
        axis_of_pair: The axis of every pair.
    """

    spectra: tuple[tuple[float, ...], ...]
    in_float32: bool
    axis_of_pair: tuple[int, ...]


@cached_constant
def _rule_constants(text: str) -> _RuleConstants:
    rope = read_rope(text)
    pairs = rope.num_pairs
    plain = [Rope(head_dim=2 * n, pairing="half", base=rope.base) for n in rope.axes.spectra(pairs)]
    return _RuleConstants(
        tuple(tuple(one.inv_freq.tolist()) for one in plain),
        rope.inv_freq_dtype == "float32",
        rope.axes.axis_of_pair(pairs),
    )
