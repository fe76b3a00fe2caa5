"""`assert_rotates`, for the tests of other projects."""

from __future__ import annotations

from typing import Any

from phasor.errors import TensorError
from phasor.identification.calling import Calling, RefusedError, find_caller
from phasor.identification.verifying import verify
from phasor.layers import LayerRopes
from phasor.rope import Rope


def assert_rotates(
    function_or_recording: Any,
    rope: Rope | LayerRopes,
    *,
    max_position: int = 4095,
    **options: Any,
) -> None:
    """Fail unless a function, or a recording of a program, rotates by ``rope``.

    Cos and sin must be multiplied by the rope's ``attention_factor``, as most programs do.

    Args:
        function_or_recording: A function or module that rotates, as `phasor.identify` takes it; or
            a recording as `phasor.verify` takes it.
        rope: The expected rotation; if the layers of a model differ, pass one layer's for a
            function.
        max_position: The highest position to call a function with.
        options: For a function how to call it: ``table``, ``takes``, ``dims``, ``arrays`` and
            ``dtype`` of `phasor.identify`; for a recording the options of `phasor.verify`.

    Raises:
        AssertionError: With the report, if it rotates differently.
        TensorError: If no way of calling the function works, or it refuses a position.

    >>> from phasor.numpy import rotate
    >>> rope = Rope(head_dim=64, pairing="half", base=10_000.0)
    >>> assert_rotates(lambda x, positions: rotate(x, positions, rope), rope)
    """
    __tracebackhide__ = True  # pytest shows the caller's line
    recording = function_or_recording
    if callable(recording):
        single = rope if isinstance(rope, Rope) else rope.ropes[0]
        calling = Calling(n_axes=single.axes.n_axes, **options)
        caller = find_caller(recording, single.head_dim, calling)
        try:
            recording, options = caller.record(max_position), {}
        except RefusedError as error:
            raise TensorError(
                f"function must accept positions 0 to {max_position}, but raised: "
                f"{error}; pass its highest position as max_position"
            ) from error
    report = verify(rope, recording, **options)
    if report:
        raise AssertionError(str(report))
