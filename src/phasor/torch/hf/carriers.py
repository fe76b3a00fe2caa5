"""Foreign rotation functions: their geometry, and what replaces them in a patched model.

A rotation function is measured by calling it. Its replacement in a patched model takes a carrier:
rows of cos and sin, half as wide as the model's own and made once a forward pass for all layers,
and the Rope that rotates by them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from phasor.errors import TensorError
from phasor.pairings import PAIRINGS, Pairing
from phasor.rope import Rope
from phasor.scaling import Rule
from phasor.torch._operator import ops
from phasor.torch._operator.angles import cos_sin, positions_of_pairs
from phasor.torch._operator.internals import cached_constant
from phasor.torch._operator.text import compute_dtype, count_axes, layout_text, read_rope
from phasor.torch.functional import rotate_by
from phasor.torch.hf.methods import COMPLEX_ROWS, ROWS, parameters

#: The parameter for sines and cosines in RoFormer, where they are one tensor.
TABLE_ROWS = "sinusoidal_pos"
_OPTIONS = ("position_ids", "unsqueeze_dim", "value_layer")
# of the heads that measure a function: rotated pairs, and further coordinates
_PAIRS, _SPARE = 4, 6
_TOLERANCE = 1e-6
RowWidth = Literal["twice", "repeated", "half", "complex", "table"]
RotatedSlice = Literal["start", "end", "exact"]


class Form(NamedTuple):
    """The geometry of one foreign rotation function, as it was measured.

    Attributes:
        pairing: Of its input.
        pairing_out: Of its output.
        direction: -1 where positive angles turn clockwise.
        slice: Which coordinates it rotates of a head that is wider than the rotation; ``"exact"``
            where it takes no such head.
        width: How it takes cosines and sines: ``"half"`` once per pair, ``"twice"`` with a copy
            after them, ``"repeated"`` each twice in a row, ``"complex"`` as complex numbers,
            ``"table"`` all sines and then all cosines in one tensor.
        heads_first: Whether tensors are ``[..., heads, seq, head_dim]`` by default.
    """

    pairing: Pairing
    pairing_out: Pairing
    direction: int
    slice: RotatedSlice
    width: RowWidth
    heads_first: bool


class PositionLayout(NamedTuple):
    """How a foreign module takes the positions of tokens.

    Attributes:
        axes_last: Whether positions of several axes are ``[..., seq, axes]``, and not ``[axes,
            batch, seq]``.
        batched: Whether positions and cosines have a batch, ``[batch, seq]``.
        axis_order: The coordinate of each axis of the Rope, where their order differs.
        fixed_positions: Those of all tokens, where the module takes none.
    """

    axes_last: bool = False
    batched: bool = True
    axis_order: tuple[int, ...] = ()
    fixed_positions: tuple[tuple[int, ...], ...] = ()


_PLAIN_LAYOUT = PositionLayout()


@dataclass(frozen=True)
class CarriedRope:
    """How one kind of layer rotates.

    Attributes:
        text: The Rope, counter-clockwise, as JSON.
        gain: Of its cosines and sines.
        layout: How the model passes positions.
        rule: The Rope's rule, if it has one. It is an attribute because a compiler can follow the
            methods of an object that a module holds, but not those of one that a text describes.
    """

    text: str
    gain: float
    layout: PositionLayout = _PLAIN_LAYOUT
    rule: Rule | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        scaling = read_rope(self.text).scaling
        object.__setattr__(self, "rule", scaling if isinstance(scaling, Rule) else None)


class Carrier:
    """Stands where a model expects cosines, sines, or both as complex numbers.

    It is no dataclass, tuple or tensor: FSDP rounds the tensors that it finds in those to the
    parameters' dtype.

    Attributes:
        cos: Rows ``[..., seq, num_pairs]``, multiplied by the gain.
        sin: The same.
        rope: The Rope that rotates by them.
        inverse: Whether to undo the rotation, as the negative of a sine does.
    """

    def __init__(self, cos: Tensor, sin: Tensor, rope: CarriedRope, inverse: bool = False) -> None:
        self.cos, self.sin, self.rope, self.inverse = cos, sin, rope, inverse

    def __neg__(self) -> Carrier:
        return Carrier(self.cos, self.sin, self.rope, not self.inverse)

    def with_rows(self, change: Callable[[Tensor], Tensor]) -> Carrier:
        """The same rotation by changed rows, such as those of tokens in another order."""
        return Carrier(change(self.cos), change(self.sin), self.rope, self.inverse)

    def __getitem__(self, key: Any) -> Carrier:
        """``cos[..., :n]`` where ``n`` is at least the whole width, as an indexer takes it."""
        match key:
            case (e, slice(start=None, stop=int(stop), step=None)) if e is Ellipsis:
                if stop >= read_rope(self.rope.text).rotary_dim:
                    return self
            case _:
                pass
        raise TensorError(
            f"cosines of a patched model are of half width and cannot be cut, got {key}"
        )

    def to(self, *args: Any, **kwargs: Any) -> Carrier:
        """Move to another device; a change of dtype is ignored, for rows keep their own."""
        device = kwargs.get("device", args[0] if args else None)
        if isinstance(device, (str, int, torch.device)):
            return self.with_rows(lambda row: row.to(device))
        return self

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a model patched by phasor.torch.hf carries rows of half width here, "
            f"and its code asked for .{name}; unpatch it and report its architecture"
        )


class CarrierTable:
    """Stands for the table of sines in GPT-J's and CodeGen's attention, and for rows of it.

    Their code looks rows up by positions and splits them into sines and cosines. ``carrier`` stands
    for rows that were looked up; it is None for the table itself.
    """

    def __init__(
        self, rope: CarriedRope, device: torch.device, carrier: Carrier | None = None
    ) -> None:
        self.rope, self.device, self.carrier = rope, device, carrier
        self.shape = (2,)

    def repeat(self, *sizes: int) -> CarrierTable:
        """The same table for every row of the batch."""
        del sizes
        return self

    def to(self, *args: Any) -> CarrierTable:
        """Rows are not cast."""
        del args
        return self

    def __getitem__(self, position_ids: Tensor) -> CarrierTable:
        carrier = carry_positions(self.rope, position_ids, torch.float64)
        return CarrierTable(self.rope, self.device, carrier)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.gather:
            return args[0][args[2][..., 0]]
        if func is torch.split and args[0].carrier is not None:
            return args[0].carrier, args[0].carrier
        raise TensorError(f"a table of a patched model holds no sines for {func}")


def carry_positions(rope: CarriedRope, position_ids: Tensor, dtype: torch.dtype) -> Carrier:
    """The carrier for a model's ``position_ids``.

    They are ``[batch, seq]``, or as ``rope.layout`` says where positions have axes; a single
    coordinate stands for all of them. The rows are for hidden states of ``dtype``.
    """
    positions, layout = position_ids, rope.layout
    n_axes = count_axes(rope.text)
    if n_axes > 1 and not layout.axes_last:
        # [axes, batch, seq] -> [batch, seq, axes]
        positions = (positions[None] if positions.dim() == 2 else positions).movedim(0, -1)
        if positions.shape[-1] == 1:
            positions = positions.expand(*positions.shape[:-1], n_axes)
    if layout.axis_order:
        positions = positions[..., list(layout.axis_order)]
    dtype = compute_dtype(dtype)
    with torch.no_grad():
        if rope.rule is not None:
            return Carrier(*_rule_rows(rope.rule, rope.text, positions, dtype), rope)
        cos, sin = cos_sin(positions, rope.text, dtype)
        return Carrier(cos * rope.gain, sin * rope.gain, rope)


def rotate_by_carrier(
    xs: Sequence[Tensor], carrier: Any, form: Form, heads_first: bool
) -> list[Tensor]:
    """``xs``, ``[..., seq, heads, head_dim]``, rotated as a function of that form rotates them.

    With ``heads_first`` they are ``[..., heads, seq, head_dim]``.
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
    head_dim = xs[0].shape[-1]
    text = rows_text(carrier.rope.text, head_dim, form)
    ys = ops.apply(xs, [carrier.cos, carrier.sin], text, inverse, 1.0, "auto")
    return [y.transpose(-3, -2) if heads_first else y for y in ys]


@cached_constant
def rope_of_heads(text: str, head_dim: int, form: Form) -> str:
    """The text of the Rope that rotates heads of that width as the foreign function does."""
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
    """The layout of `rope_of_heads` as text, which the operator takes beside rows."""
    start = read_rope(rope_of_heads(text, head_dim, form)).rotary_start
    return layout_text(form.pairing, form.pairing_out, start)


# ---- rows under a rule ----


def _rule_rows(
    rule: Rule, text: str, positions: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Rows ``[..., seq, num_pairs]`` of cos and sin, with gain, under the law for these positions.

    The law is that of ``rope.at(max(positions) + 1)``. Where the rule has `at_lengths`, the rows
    are made by tensor operations alone, which a compiler can follow and no device waits for.
    """
    length = (positions.max() + 1).double()
    # numbers, not tensors: a compiler takes only one tensor as a constant from one function
    spectra = [length.new_tensor(spectrum) for spectrum in _plain_spectra(text)]
    scaled = [rule.at_lengths(length, spectrum, torch) for spectrum in spectra]
    if scaled[0] is None:
        inv_freq, gain = _law_outside_graph(text, length)
    else:
        inv_freq, gain = torch.cat([first for first, _ in cast(Any, scaled)], -1), scaled[0][1]
        if _rounds_to_float32(text):
            inv_freq = inv_freq.float().double()
    angles = positions_of_pairs(positions, text).double() * inv_freq
    return (angles.cos() * gain).to(dtype), (angles.sin() * gain).to(dtype)


def _law_at_length(text: str, length: Tensor) -> tuple[Tensor, float]:
    rope = read_rope(text).at(max(1, math.ceil(length)))
    return length.new_tensor(rope.inv_freq.tolist()), rope.attention_factor


# a rule without at_lengths needs the length as a number, which no graph holds
_law_outside_graph = cast(
    Callable[[str, Tensor], tuple[Tensor, float]],
    torch.compiler.disable(_law_at_length, reason="the rule has no at_lengths: its length is read"),
)


@cached_constant
def _plain_spectra(text: str) -> tuple[tuple[float, ...], ...]:
    """The frequencies of every spectrum before the rule."""
    rope = read_rope(text)
    widths = rope.axes.spectra(rope.num_pairs)
    plain = [Rope(head_dim=2 * n, pairing="half", base=rope.base) for n in widths]
    return tuple(tuple(spectrum.inv_freq.tolist()) for spectrum in plain)


@cached_constant
def _rounds_to_float32(text: str) -> bool:
    return read_rope(text).inv_freq_dtype == "float32"


# ---- foreign rotation functions ----


def tensor_parameters(function: Any) -> tuple[str, ...]:
    """The parameters of a rotation function that it rotates: all but its rows and options."""
    not_rotated = (*ROWS, TABLE_ROWS, *_OPTIONS)
    return tuple(name for name in parameters(function) if name not in not_rotated)


def substitute(function: Any, batched: bool = True) -> Callable[..., Any]:
    """The replacement of ``function`` in a patched model: it takes carriers instead of cosines."""
    form = measure_form(function, batched)
    if form is None or form.width == "table":
        raise TensorError(f"{function} must be a rotation that phasor understands")
    names, tensors = tuple(parameters(function)), tensor_parameters(function)
    # the carrier stands for cosines as well, but only the sine's may be negative
    row = next(name for name in ("sin", *COMPLEX_ROWS) if name in names)

    def rotation(*args: Any, **kwargs: Any) -> Any:
        values = {**dict(zip(names, args, strict=False)), **kwargs}
        carrier, unsqueeze_dim = values[row], values.get("unsqueeze_dim")
        heads_first = form.heads_first
        if unsqueeze_dim is not None:
            rank = carrier.cos.dim() if isinstance(carrier, Carrier) else 3
            heads_first = heads_come_first(unsqueeze_dim, rank)
        xs = [values[name] for name in tensors]
        # a key may be None, where only queries are rotated
        ys = rotate_by_carrier([x for x in xs if x is not None], carrier, form, heads_first)
        if len(xs) == 1:
            return ys[0]
        return ys[0], (ys[1] if len(ys) > 1 else None)

    return rotation


def heads_come_first(unsqueeze_dim: int, rank: int) -> bool:
    """Whether ``unsqueeze_dim`` puts heads before tokens in cosines ``[..., seq, width]``."""
    axis = unsqueeze_dim % (rank + 1)
    if axis not in (rank - 2, rank - 1):
        raise TensorError(
            f"unsqueeze_dim must be {rank - 2} or {rank - 1} in a patched model, "
            f"got {unsqueeze_dim}"
        )
    return axis == rank - 2


@lru_cache(maxsize=256)
def measure_form(function: Any, batched: bool = True) -> Form | None:
    """The geometry of a rotation function; None where it is not understood.

    The function is called with random tensors and angles on the CPU, and some form must explain
    what it returns. Its cosines are ``[batch, seq, width]``, or ``[seq, width]`` where they are not
    ``batched``.
    """
    names = parameters(function)
    rows = {*names} & {*ROWS, TABLE_ROWS}
    takes_rows = rows == {"cos", "sin"} or len(rows) == 1
    if not takes_rows or len(tensor_parameters(function)) not in (1, 2):
        return None
    widths: tuple[RowWidth, ...] = ("twice", "repeated", "half")
    if len(rows) == 1:
        widths = ("table",) if TABLE_ROWS in rows else ("complex",)
    shape = (1, 3, _PAIRS) if batched else (3, _PAIRS)
    orders = (True, False)
    if "unsqueeze_dim" in names:
        orders = (heads_come_first(names["unsqueeze_dim"].default, len(shape)),)
    with torch.device("cpu"), torch.no_grad():
        phases = torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 6
        for width, heads_first in itertools.product(widths, orders):
            # a wider head shows which slice is rotated, if the function takes one
            sample = _sample_rotation(function, phases, width, heads_first, _SPARE)
            sample = sample or _sample_rotation(function, phases, width, heads_first, 0)
            geometry = sample and _find_geometry(*sample, phases)
            if geometry:
                return Form(*geometry, width, heads_first)
    return None


def call_rotation(function: Any, x: Tensor, rows: Any) -> Tensor:
    """``x`` rotated by ``function``, with rows ``(cos, sin)`` or one tensor for both."""
    cos, sin = (rows, rows) if isinstance(rows, Tensor) else rows
    by_name = {"cos": cos, "sin": sin} | dict.fromkeys((*COMPLEX_ROWS, TABLE_ROWS), cos)
    # a copy for each parameter, because a function may write into its arguments
    names = [name for name in parameters(function) if name not in _OPTIONS]
    y = function(*(by_name[name] if name in by_name else x.clone() for name in names))
    return cast(Tensor, y[0] if isinstance(y, tuple) else y)


def _make_rows(phases: Tensor, width: RowWidth) -> Any:
    cos, sin = phases.cos(), phases.sin()
    match width:
        case "twice":
            return tuple(torch.cat((row, row), -1) for row in (cos, sin))
        case "repeated":
            return tuple(row.repeat_interleave(2, -1) for row in (cos, sin))
        case "half":
            return cos, sin
        case "complex":
            return torch.complex(cos, sin)
        case "table":
            return torch.cat((sin, cos), -1)


def _sample_rotation(
    function: Any, phases: Tensor, width: RowWidth, heads_first: bool, spare: int
) -> tuple[Tensor, Tensor] | None:
    """A random tensor and the rotated one, ``[..., seq, heads, head_dim]``; None if it fails."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*phases.shape[:-1], 2, 2 * _PAIRS + spare, generator=generator)
    try:
        argument = x.transpose(-3, -2) if heads_first else x
        y = call_rotation(function, argument, _make_rows(phases, width))
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None  # the function does not take these shapes
    y = y.transpose(-3, -2) if heads_first else y
    return (x, y) if y.shape == x.shape else None


def _find_geometry(
    x: Tensor, y: Tensor, phases: Tensor
) -> tuple[Pairing, Pairing, int, RotatedSlice] | None:
    """The pairings, direction and slice of the rotation that makes ``y`` of ``x``, if one does."""
    spare = x.shape[-1] - 2 * _PAIRS
    starts: dict[RotatedSlice, int] = {"start": 0, "end": spare} if spare else {"exact": 0}
    for rotated, source, target in itertools.product(starts, PAIRINGS, PAIRINGS):
        for direction in (1, -1) if source == target else (1,):
            expected = rotate_by(
                x, phases.cos(), direction * phases.sin(),
                pairing=source, pairing_out=target, rotary_start=starts[rotated], backend="eager",
            )  # fmt: skip
            if torch.allclose(expected, y, atol=_TOLERANCE, rtol=0):
                return source, target, direction, rotated
    return None
