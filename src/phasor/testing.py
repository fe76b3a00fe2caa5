"""For the tests of other projects: `assert_rotates`."""

from __future__ import annotations

from typing import Any

import numpy as np

from phasor.errors import TensorError
from phasor.identification import verify
from phasor.identification.calling import Calling, RefusedError, find_caller
from phasor.layers import LayerRopes
from phasor.rope import Rope

# positions that functions are asked for: the first, and ones that are far apart
_POSITIONS = (*range(17), 31, 63, 64, 127, 255, 257, 511, 1023, 2047, 4095)


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
        rope: What it is to do; of a function one layer's.
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
    if callable(recording) and isinstance(rope, Rope):
        recording, options = _record(recording, rope, max_position, options), {}
    found = verify(rope, recording, **options)
    if found:
        raise AssertionError(str(found))


def _record(
    function: Any, rope: Rope, max_position: int, options: dict[str, Any]
) -> dict[str, Any]:
    """What the function makes of random vectors; of queries and keys if it turns both."""
    n_axes = rope.axes.n_axes
    caller = find_caller(function, rope.head_dim, Calling(n_axes=n_axes, **options))
    positions = np.array([p for p in _POSITIONS if p <= min(max_position, caller.max_position)])
    if n_axes > 1:  # other coordinates on every axis
        positions = np.stack([np.roll(positions, 3 * axis) for axis in range(n_axes)], axis=-1)
    try:
        x, turned = caller.turn_random(positions)
    except RefusedError as error:
        raise TensorError(
            f"function must turn positions 0 to {positions.max()}, and says of some of them: "
            f"{error}; give the highest as max_position"
        ) from error
    recording: dict[str, Any] = {"positions": positions}
    for name, y in zip(("q", "k"), turned, strict=False):
        recording |= {name: np.broadcast_to(x, y.shape), f"{name}_rotated": y}
    return recording
