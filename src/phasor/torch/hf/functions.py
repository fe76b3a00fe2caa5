"""What a foreign rotation function does, measured by calling it, and what to put in its place."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from phasor.errors import TensorError
from phasor.pairings import PAIRINGS, Pairing, slices
from phasor.torch.hf.carriers import Carrier, Form, RowWidth, rotate_by_carrier
from phasor.torch.hf.methods import COMPLEX_ROWS, ROWS, parameters

#: What RoFormer calls its sines and cosines, which are one tensor.
TABLE_ROWS = "sinusoidal_pos"
_ROW_WIDTHS: tuple[RowWidth, ...] = ("twice", "repeated", "half", "complex", "table")
_OPTIONS = ("position_ids", "unsqueeze_dim", "value_layer")
_PAIRS = 4
_SPARE = 6
_TOLERANCE = 1e-6


def tensor_parameters(function: Any) -> tuple[str, ...]:
    """The parameters of a rotation function that it rotates: all but its rows and options."""
    others = (*ROWS, TABLE_ROWS, *_OPTIONS)
    return tuple(name for name in parameters(function) if name not in others)


def substitute(function: Any, batched: bool = True) -> Callable[..., Any]:
    """What takes the place of ``function`` in a patched model: the same call, given carriers."""
    form = measure_form(function, batched)
    if form is None or form.width == "table":
        raise TensorError(f"{function} must be a rotation that phasor understands")
    names, tensors = tuple(parameters(function)), tensor_parameters(function)
    # the carrier stands for cosines as well, but the sine's sign says which way to turn
    row = next(name for name in ("sin", *COMPLEX_ROWS) if name in names)

    def rotation(*args: Any, **words: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **words}
        carrier, unsqueeze_dim = given[row], given.get("unsqueeze_dim")
        heads_first = form.heads_first
        if unsqueeze_dim is not None:
            rank = carrier.rank if isinstance(carrier, Carrier) else 3
            heads_first = heads_come_first(unsqueeze_dim, rank)
        xs = [given[name] for name in tensors]
        # a key may be None, where only queries are rotated
        done = rotate_by_carrier([x for x in xs if x is not None], carrier, form, heads_first)
        if len(xs) == 1:
            return done[0]
        return done[0], (done[1] if len(done) > 1 else None)

    return rotation


def heads_come_first(unsqueeze_dim: int, rank: int) -> bool:
    """Whether cosines ``[..., seq, width]`` get their axis of heads before that of tokens."""
    axis = unsqueeze_dim % (rank + 1)
    if axis not in (rank - 2, rank - 1):
        raise TensorError(
            f"unsqueeze_dim must be {rank - 2} or {rank - 1} in a patched model, "
            f"got {unsqueeze_dim}"
        )
    return axis == rank - 2


@lru_cache(maxsize=256)
def measure_form(function: Any, batched: bool = True) -> Form | None:
    """The geometry of a rotation function, or None where it is none that is understood.

    It is called with tensors and angles of its own, on the CPU, and one form of all that there
    are must explain what it returns.

    Args:
        function: Of queries and keys, cosines and sines.
        batched: Whether it is given cosines ``[batch, seq, width]``, and not ``[seq, width]``.
    """
    rows = {*parameters(function)} & {*ROWS, TABLE_ROWS}
    if (rows != {"cos", "sin"} and len(rows) != 1) or len(tensor_parameters(function)) not in (
        1,
        2,
    ):
        return None
    with torch.device("cpu"), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        phases = torch.rand((1, 3, _PAIRS) if batched else (3, _PAIRS), generator=generator) * 6
        for width, heads_first in itertools.product(_ROW_WIDTHS, (True, False)):
            called = _call_measured(function, phases, width, heads_first, spare=0)
            form = None if called is None else _form_of(*called, phases, width, heads_first)
            if form is not None:
                return _with_slice(function, phases, form)
    return None


def call_rotation(function: Any, x: Tensor, rows: Any) -> Tensor:
    """What ``function`` makes of ``x``, given ``(cos, sin)`` or one tensor for both."""
    cos, sin = (rows, rows) if isinstance(rows, Tensor) else rows
    by_name = {"cos": cos, "sin": sin} | dict.fromkeys((*COMPLEX_ROWS, TABLE_ROWS), cos)
    # a copy of each, for a function may write into what it is given
    names = [name for name in parameters(function) if name not in _OPTIONS]
    done = function(*(by_name[name] if name in by_name else x.clone() for name in names))
    return cast(Tensor, done[0] if isinstance(done, tuple) else done)


def _rows(phases: Tensor, width: RowWidth) -> Any:
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


def _call_measured(
    function: Any, phases: Tensor, width: RowWidth, heads_first: bool, spare: int
) -> tuple[Tensor, Tensor] | None:
    """A tensor and what the function makes of it, both ``[..., seq, heads, head_dim]``."""
    names = parameters(function)
    if (width == "complex") is not any(name in names for name in COMPLEX_ROWS):
        return None
    if (width == "table") is not (TABLE_ROWS in names):
        return None
    default = names.get("unsqueeze_dim")
    if default is not None and heads_first is not heads_come_first(default.default, phases.dim()):
        return None
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*phases.shape[:-1], 2, 2 * _PAIRS + spare, generator=generator)
    try:
        given = x.transpose(-3, -2) if heads_first else x
        y = call_rotation(function, given, _rows(phases, width))
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None  # tensors of these shapes do not go together in it
    y = y.transpose(-3, -2) if heads_first else y
    return (x, y) if y.shape == x.shape else None


def _complex_pairs(x: Tensor, pairing: Pairing) -> Tensor:
    first, second = slices(pairing, x.shape[-1] // 2)
    return torch.complex(x[..., first].contiguous(), x[..., second].contiguous())


def _form_of(
    x: Tensor, y: Tensor, phases: Tensor, width: RowWidth, heads_first: bool
) -> Form | None:
    for source, target, direction in itertools.product(PAIRINGS, PAIRINGS, (1, -1)):
        # [..., seq, pairs] -> [..., seq, 1, pairs]
        spin = torch.polar(torch.ones_like(phases), direction * phases).unsqueeze(-2)
        expected = _complex_pairs(x, source) * spin
        if torch.allclose(expected, _complex_pairs(y, target), atol=_TOLERANCE, rtol=0):
            if direction < 0 and source != target:
                return None
            return Form(source, target, direction, "exact", width, heads_first)
    return None


def _with_slice(function: Any, phases: Tensor, form: Form) -> Form | None:
    """The form with the slice that turns in a wider head, or None if something else happens."""
    called = _call_measured(function, phases, form.width, form.heads_first, spare=_SPARE)
    if called is None:
        return form
    x, y = called
    low, high = slice(None, 2 * _PAIRS), slice(2 * _PAIRS, None)
    if _has_form(x[..., low], y[..., low], phases, form) and torch.equal(
        x[..., high], y[..., high]
    ):
        return form._replace(slice="start")
    low, high = slice(None, _SPARE), slice(_SPARE, None)
    if _has_form(x[..., high], y[..., high], phases, form) and torch.equal(
        x[..., low], y[..., low]
    ):
        return form._replace(slice="end")
    return None


def _has_form(x: Tensor, y: Tensor, phases: Tensor, form: Form) -> bool:
    return _form_of(x, y, phases, form.width, form.heads_first) == form
