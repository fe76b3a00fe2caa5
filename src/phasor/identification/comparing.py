"""`diff`: where two Ropes, two models or two functions differ, and why."""

from __future__ import annotations

from typing import Any, TypedDict, Unpack, overload

from phasor._checks import number, whole
from phasor.errors import SpecError
from phasor.identification.differences import (
    ModelDifference,
    RopeDifference,
    diff_models,
    diff_ropes,
)
from phasor.identification.map_differences import Function, MapDifference, diff_functions
from phasor.layers import LayerRopes
from phasor.rope import Rope

_CONTEXT = 1 << 20  # positions compared if no model has a context


class _Compared(TypedDict, total=False):
    context: int | None
    tolerance: float | None


@overload
def diff(a: Rope, b: Rope, **options: Unpack[_Compared]) -> RopeDifference: ...


@overload
def diff(
    a: LayerRopes, b: LayerRopes, *, seq_len: int | None = None, **options: Unpack[_Compared]
) -> ModelDifference: ...


# all other options control how functions are called
@overload
def diff(a: Function, b: Rope | Function, **options: Any) -> MapDifference | None: ...


@overload
def diff(a: Rope, b: Function, **options: Any) -> MapDifference | None: ...


@overload
def diff(
    a: Rope | Function, b: Rope | Function, **options: Any
) -> RopeDifference | MapDifference | None: ...


def diff(
    a: Rope | LayerRopes | Function, b: Rope | LayerRopes | Function, *, context: int | None = None,
    tolerance: float | None = None, seq_len: int | None = None, head_dim: int | None = None,
    **calling: Any,
) -> RopeDifference | ModelDifference | MapDifference | None:  # fmt: skip
    """How two Ropes, two models or two functions differ; falsy if they agree within the context.

    Two Ropes differ from the first position where ``exp(i p f_a)`` and ``exp(i p f_b)`` of a pair
    are more than ``tolerance`` apart; this position is computed from the frequencies. Models are
    compared layer by layer, up to the last layer of the shorter model. A function is compared at
    positions 0 to 16 and around every power of two below the context; bisection between the last of
    these that agrees and the first that does not then finds the first difference.

    Args:
        a: A Rope with a static law, the ropes of a model, or a function as `identify` takes it.
        b: The same.
        context: Positions 0 to ``context - 1`` are compared. By default the longer of two models'
            contexts, otherwise 2**20.
        tolerance: How far apart two unit vectors may be, and two factors relative to each other.
            1e-6 by default, 1e-3 for functions; must be below 2 except for functions.
        seq_len: The length for which the rules of models pick their law; by default ``context``.
        head_dim: Width of a head, for two functions.
        calling: How functions are called, as for `identify`.

    Returns:
        For Ropes, the fields, pairs and factors that differ; for models, the same for each kind of
        layers; for functions, the position of the first difference, its size and the change of a
        score there, or None if they agree.

    Raises:
        TensorError: If no way of calling a function works.

    >>> from phasor.scaling import Linear, NTK
    >>> a = Rope(head_dim=64, pairing="half", scaling=Linear(factor=2.0))
    >>> b = Rope(head_dim=64, pairing="half", scaling=NTK(factor=2.0))
    >>> found = diff(a, b)
    >>> found.first_pair.pair, found.first_pair.position, found.pairs
    (0, 1, 31)

    >>> from phasor import preset
    >>> compared = diff(preset("llama-3-8b"), preset("llama-3.1-8b"), context=8192)
    >>> [(kind.layers, kind.difference.pairs) for kind in compared.layers]
    [('0-31', 35)]

    >>> from phasor.numpy import rotate
    >>> late = diff(a, lambda x, p: rotate(x, p + 1, a))
    >>> late.position, late.pair, round(late.size, 3)
    (0, 0, 0.495)
    """
    has_function = callable(a) or callable(b)
    call_options = calling | ({} if head_dim is None else {"head_dim": head_dim})
    if call_options and not has_function:
        raise SpecError(
            f"{next(iter(call_options))} controls how a function is called, but neither a nor b is "
            "a function"
        )
    if seq_len is not None and not (isinstance(a, LayerRopes) and isinstance(b, LayerRopes)):
        raise SpecError("seq_len picks the laws of models: give the ropes as rope.at(seq_len)")
    whole("context", 1 if context is None else context, least=1)
    checked_tolerance = 1 if tolerance is None else tolerance
    number("tolerance", checked_tolerance, above=0, most=None if has_function else 2)
    if isinstance(a, LayerRopes) and isinstance(b, LayerRopes):
        context = context or max(a.context or 0, b.context or 0) or _CONTEXT
        return diff_models(a, b, seq_len or context, context, tolerance or 1e-6)
    context = context or _CONTEXT
    if isinstance(a, Rope) and isinstance(b, Rope):
        return diff_ropes(a, b, context, tolerance or 1e-6)
    if isinstance(a, LayerRopes) or isinstance(b, LayerRopes):
        raise SpecError("a model is compared with a model: take one of its ropes, as ropes[0]")
    return diff_functions(a, b, context, tolerance, head_dim, calling)
