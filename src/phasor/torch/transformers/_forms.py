"""What a foreign rotation function does, measured by calling it, and what to put in its place."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from phasor.errors import TensorError
from phasor.pairings import PAIRINGS, Pairing, slices
from phasor.torch.transformers._carriers import Carrier, Form, Width, turned

Rotation = Callable[..., Any]
_WIDTHS: tuple[Width, ...] = ("twice", "repeated", "half", "complex")
#: What functions call cosines and sines as complex numbers.
COMPLEX = ("freqs_cis", "freqs_ci")
_OPTIONS = ("position_ids", "unsqueeze_dim")
_PAIRS = 4
_SPARE = 6
_TOLERANCE = 1e-6


def _together(form: Form) -> Rotation:
    def rotation(
        q: Tensor, k: Tensor | None, cos: Any, sin: Any, unsqueeze_dim: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        heads_first = _heads_first(form, sin, unsqueeze_dim)
        if k is None:
            return turned([q], sin, form, heads_first)[0], None
        done = turned([q, k], sin, form, heads_first)
        return done[0], done[1]

    return rotation


def _with_ids(form: Form) -> Rotation:
    together = _together(form)

    def rotation(
        q: Tensor,
        k: Tensor | None,
        cos: Any,
        sin: Any,
        position_ids: Any = None,
        unsqueeze_dim: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        return together(q, k, cos, sin, unsqueeze_dim)

    return rotation


def _alone(form: Form) -> Rotation:
    def rotation(x: Tensor, cos: Any, sin: Any, unsqueeze_dim: int | None = None) -> Tensor:
        return turned([x], sin, form, _heads_first(form, sin, unsqueeze_dim))[0]

    return rotation


def _sine_first(form: Form) -> Rotation:
    def rotation(tensor: Tensor, sin: Any, cos: Any) -> Tensor:
        return turned([tensor], sin, form, form.heads_first)[0]

    return rotation


def _complex(form: Form) -> Rotation:
    def rotation(xq: Tensor, xk: Tensor, freqs_cis: Any) -> tuple[Tensor, Tensor]:
        done = turned([xq, xk], freqs_cis, form, form.heads_first)
        return done[0], done[1]

    return rotation


def _complex_grid(form: Form) -> Rotation:
    def rotation(query: Tensor, key: Tensor, freqs_ci: Any) -> tuple[Tensor, Tensor]:
        done = turned([query, key], freqs_ci, form, form.heads_first)
        return done[0], done[1]

    return rotation


#: What may stand in for a function with parameters of these names.
_BY_PARAMETERS: dict[tuple[str, ...], Callable[[Form], Rotation]] = {
    ("q", "k", "cos", "sin"): _together,
    ("q", "k", "cos", "sin", "unsqueeze_dim"): _together,
    ("q", "k", "cos", "sin", "position_ids", "unsqueeze_dim"): _with_ids,
    ("x", "cos", "sin", "unsqueeze_dim"): _alone,
    ("tensor", "sin", "cos"): _sine_first,
    ("xq", "xk", "freqs_cis"): _complex,
    ("query", "key", "freqs_ci"): _complex_grid,
}


def _heads_first(form: Form, carrier: Any, unsqueeze_dim: int | None) -> bool:
    """Whether the cosines get their axis of heads before that of tokens."""
    if unsqueeze_dim is None:
        return form.heads_first
    return heads_come_first(unsqueeze_dim, carrier.rank if isinstance(carrier, Carrier) else 3)


def heads_come_first(unsqueeze_dim: int, rank: int) -> bool:
    """Whether cosines ``[..., seq, width]`` get their axis of heads before that of tokens."""
    place = unsqueeze_dim % (rank + 1)
    if place not in (rank - 2, rank - 1):
        raise TensorError(
            f"unsqueeze_dim must be {rank - 2} or {rank - 1} in a patched model, "
            f"got {unsqueeze_dim}"
        )
    return place == rank - 2


def parameters(function: Any) -> tuple[str, ...]:
    """The names of a function's parameters."""
    return tuple(_signature(function))


def _signature(function: Any) -> Mapping[str, inspect.Parameter]:
    # the kernels package makes a module of a function
    plain = function.forward if isinstance(function, torch.nn.Module) else function
    return inspect.signature(plain).parameters


def substitute(function: Any, batched: bool = True) -> Rotation:
    """What takes the place of ``function`` in a patched model: the same call, given carriers."""
    form = measured(function, batched)
    if form is None:
        raise TensorError(f"{function} must be a rotation that phasor understands")
    return _BY_PARAMETERS[parameters(function)](form)


@lru_cache(maxsize=256)
def measured(function: Any, batched: bool = True) -> Form | None:
    """The geometry of a rotation function, or None where it is none that is understood.

    It is called with tensors and angles of its own, on the CPU, and one form of all that there
    are must explain what it returns.

    Args:
        function: Of queries and keys, cosines and sines.
        batched: Whether it is given cosines ``[batch, seq, width]``, and not ``[seq, width]``.
    """
    if parameters(function) not in _BY_PARAMETERS:
        return None
    with torch.device("cpu"), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        phases = torch.rand((1, 3, _PAIRS) if batched else (3, _PAIRS), generator=generator) * 6
        for width, heads_first in itertools.product(_WIDTHS, (True, False)):
            seen = _seen(function, phases, width, heads_first, spare=0)
            form = None if seen is None else _explained(*seen, phases, width, heads_first)
            if form is not None:
                return _with_slice(function, phases, form)
    return None


def called_with(function: Any, x: Tensor, rows: Any) -> Tensor:
    """What ``function`` makes of ``x``, given ``(cos, sin)`` or one complex tensor."""
    names = parameters(function)
    cos, sin = (rows, rows) if isinstance(rows, Tensor) else rows
    rest: dict[str, Any] = {"cos": cos, "sin": sin} | {str(name): cos for name in COMPLEX}
    given = [rest.get(name, x) for name in names if name not in _OPTIONS]
    done = function(*given)
    return cast(Tensor, done[0] if isinstance(done, tuple) else done)


def _rows(phases: Tensor, width: Width) -> Any:
    cos, sin = phases.cos(), phases.sin()
    if width == "twice":
        return tuple(torch.cat((row, row), -1) for row in (cos, sin))
    if width == "repeated":
        return tuple(row.repeat_interleave(2, -1) for row in (cos, sin))
    return torch.complex(cos, sin) if width == "complex" else (cos, sin)


def _seen(
    function: Any, phases: Tensor, width: Width, heads_first: bool, spare: int
) -> tuple[Tensor, Tensor] | None:
    """A tensor and what the function makes of it, both ``[..., seq, heads, head_dim]``."""
    names = parameters(function)
    if (width == "complex") is not any(name in names for name in COMPLEX):
        return None
    default = _signature(function).get("unsqueeze_dim")
    if default is not None and heads_first is not heads_come_first(default.default, phases.dim()):
        return None
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*phases.shape[:-1], 2, 2 * _PAIRS + spare, generator=generator)
    try:
        y = called_with(function, x.transpose(-3, -2) if heads_first else x, _rows(phases, width))
    except (RuntimeError, ValueError, IndexError):
        return None  # tensors of these shapes do not go together in it
    y = y.transpose(-3, -2) if heads_first else y
    return (x, y) if y.shape == x.shape else None


def _pairs(x: Tensor, pairing: Pairing) -> Tensor:
    first, second = slices(pairing, x.shape[-1] // 2)
    return torch.complex(x[..., first].contiguous(), x[..., second].contiguous())


def _explained(
    x: Tensor, y: Tensor, phases: Tensor, width: Width, heads_first: bool
) -> Form | None:
    for source, target, direction in itertools.product(PAIRINGS, PAIRINGS, (1, -1)):
        spin = torch.polar(torch.ones_like(phases), direction * phases).unsqueeze(-2)
        if torch.allclose(_pairs(x, source) * spin, _pairs(y, target), atol=_TOLERANCE, rtol=0):
            if direction < 0 and source != target:
                return None
            return Form(source, target, direction, "exact", width, heads_first)
    return None


def _with_slice(function: Any, phases: Tensor, form: Form) -> Form | None:
    """The form with the slice that turns in a wider head, or None if something else happens."""
    seen = _seen(function, phases, form.width, form.heads_first, spare=_SPARE)
    if seen is None:
        return form
    x, y = seen
    low, high = slice(None, 2 * _PAIRS), slice(2 * _PAIRS, None)
    if _is_form(x[..., low], y[..., low], phases, form) and torch.equal(x[..., high], y[..., high]):
        return form._replace(slice="start")
    low, high = slice(None, _SPARE), slice(_SPARE, None)
    if _is_form(x[..., high], y[..., high], phases, form) and torch.equal(x[..., low], y[..., low]):
        return form._replace(slice="end")
    return None


def _is_form(x: Tensor, y: Tensor, phases: Tensor, form: Form) -> bool:
    return _explained(x, y, phases, form.width, form.heads_first) == form
