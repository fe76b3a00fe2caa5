"""`identify`: which rotation is this function?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from phasor._checks import whole
from phasor.errors import TensorError
from phasor.identification.calling import Calling, RefusedError, find_caller
from phasor.identification.expecting import find_differences
from phasor.identification.functions import SMALL_POSITIONS, measure
from phasor.identification.report import Identification


def identify(
    function: Callable[..., Any],
    head_dim: int,
    *,
    table: Callable[..., Any] | None = None,
    takes: str | None = None,
    dims: str | None = None,
    arrays: str | None = None,
    dtype: str = "float32",
    n_axes: int = 1,
    max_position: int = 1 << 20,
) -> Identification:
    """Which rotation ``function`` does: pairing, slice, sign, frequencies, law, limits, mistakes.

    Unit vectors go in at chosen positions, and what comes out is read as a linear map, block by
    block. Frequencies are found from the lowest positions first and refined at growing ones.

    Args:
        function: Rotates: ``(x, positions)``, ``(q, k, positions)``, ``(q, k, cos, sin)`` or
            ``(x)`` alone; a function, a method or a module. Not changed, only called.
        head_dim: Width of one head.
        table: Makes ``cos, sin`` (or whatever rows ``function`` takes) from positions, or from
            ``(x, positions)``.
        takes: The arguments in order, if they cannot be guessed: words of ``x``, ``q``, ``k``,
            ``positions``, ``offset`` (one whole number per call), ``cos``, ``sin``, ``rows``; one
            is passed by keyword as ``name=word``.
        dims: The order of the vectors' dimensions, such as ``"bhsd"``; tried in turn unless
            given.
        arrays: ``"numpy"``, ``"torch"`` or ``"jax"``; NumPy's, then torch's, unless given.
        dtype: Of the vectors: ``"float64"``, ``"float32"``, ``"float16"`` or ``"bfloat16"``.
        n_axes: Coordinates of a position.
        max_position: The highest position to look at.

    Returns:
        The report; ``report.rope`` is the Rope that does the same, ``str(report)`` a text.

    Raises:
        TensorError: If no way of calling ``function`` works.

    >>> from phasor import Rope
    >>> from phasor.numpy import rotate
    >>> rope = Rope(head_dim=8, pairing="interleaved", base=500.0)
    >>> found = identify(lambda x, p: rotate(x, p, rope), 8, dtype="float64")
    >>> found.rope == rope, found.base, found.known_law
    (True, 500.0, True)
    """
    whole("head_dim", head_dim, least=2)
    whole("n_axes", n_axes, least=1)
    whole("max_position", max_position, least=64)
    caller = find_caller(function, head_dim, Calling(table, takes, dims, arrays, dtype, n_axes))
    called = f"{caller.arrays.name} arrays {caller.dims} in {dtype} as ({caller.takes})"
    try:
        measured = measure(caller, max_position)
        findings = find_differences(caller, measured)
        return replace(measured.report, called=called, findings=findings)
    except RefusedError as error:
        raise TensorError(
            f"function must turn positions 0 to {max(SMALL_POSITIONS)}, whenever it is asked to, "
            f"and says of some of them: {error}"
        ) from error
