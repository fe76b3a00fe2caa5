"""`identify`: which rotation does this function perform?"""

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
    """The rotation of ``function``: pairing, slice, sign, frequencies, law, limits and mistakes.

    The function is called with unit vectors at chosen positions, and its results are read as linear
    maps, block by block. The lowest positions give the frequencies, growing ones refine them.

    Args:
        function: A function, method or module that takes ``(x, positions)``, ``(q, k, positions)``,
            ``(q, k, cos, sin)`` or ``(x)`` and returns the rotated vectors. It is only called.
        head_dim: Width of one head.
        table: A function that makes ``cos, sin`` (or the rows that ``function`` takes) from
            positions, or from ``(x, positions)``.
        takes: The arguments in order, if they cannot be guessed: ``x``, ``q``, ``k``,
            ``positions``, ``offset`` (one whole number per call), ``cos``, ``sin`` and ``rows``,
            separated by spaces; ``name=positions`` passes an argument by keyword.
        dims: The order of the vectors' dimensions, such as ``"bhsd"``; by default all are tried.
        arrays: ``"numpy"``, ``"torch"`` or ``"jax"``; by default NumPy, then torch.
        dtype: The vectors' dtype: ``"float64"``, ``"float32"``, ``"float16"`` or ``"bfloat16"``.
        n_axes: How many coordinates a position has.
        max_position: The highest position to call the function at.

    Returns:
        The report; ``report.rope`` is the Rope with the same rotation, ``str(report)`` its text.

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
            f"function must rotate positions 0 to {max(SMALL_POSITIONS)} whenever it is called, "
            f"and fails for some of them: {error}"
        ) from error
