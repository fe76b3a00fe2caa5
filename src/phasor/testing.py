"""For the tests of other projects: `assert_rotates`."""

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
    """Fail unless a function, or what was recorded of a program, rotates as ``rope`` says.

    Cos and sin have to be multiplied by the rope's ``attention_factor``, as the field does.

    Args:
        function_or_recording: A function or module that rotates, as `phasor.identify` takes it; or
            a recording as `phasor.verify` takes it.
        rope: What it is to do; of a model whose layers differ a function is given one layer's.
        max_position: The highest position that a function is asked for.
        options: How a function is called: ``table``, ``takes``, ``dims``, ``arrays`` and ``dtype``,
            as for `phasor.identify`; of a recording those of `phasor.verify`.

    Raises:
        AssertionError: With the report, if it rotates otherwise.
        TensorError: If no way of calling a function works, or it refuses a position.

    >>> from phasor.numpy import rotate
    >>> rope = Rope(head_dim=64, pairing="half", base=10_000.0)
    >>> assert_rotates(lambda x, positions: rotate(x, positions, rope), rope)
    """
    __tracebackhide__ = True  # pytest shows the caller's line
    recording = function_or_recording
    if callable(recording):
        some = rope if isinstance(rope, Rope) else rope.ropes[0]
        caller = find_caller(recording, some.head_dim, Calling(n_axes=some.axes.n_axes, **options))
        try:
            recording, options = caller.record(max_position), {}
        except RefusedError as error:
            raise TensorError(
                f"function must turn positions 0 to {max_position}, and says of some of them: "
                f"{error}; give the highest as max_position"
            ) from error
    found = verify(rope, recording, **options)
    if found:
        raise AssertionError(str(found))
