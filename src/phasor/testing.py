"""For the tests of other projects: `assert_rotates`."""

from __future__ import annotations

from typing import Any

import numpy as np

from phasor.identification import verify
from phasor.identification.calling import Calling, find_caller
from phasor.layers import LayerRopes
from phasor.rope import Rope

# positions that functions are asked for: the first, and ones that are far apart
_POSITIONS = (*range(17), 31, 63, 64, 127, 255, 257, 511, 1023, 2047, 4095)


def assert_rotates(function_or_recording: Any, rope: Rope | LayerRopes, **options: Any) -> None:
    """Fail unless a function, or what was recorded of a program, rotates as ``rope`` says.

    Cos and sin have to be multiplied by the rope's ``attention_factor``, as the field does.

    Args:
        function_or_recording: A function or module that rotates, as `phasor.identify` takes it; or
            a recording as `phasor.verify` takes it.
        rope: What it is to do; of a function one layer's.
        options: How a function is called: ``table``, ``takes``, ``dims``, ``arrays`` and ``dtype``,
            as for `phasor.identify`; of a recording those of `phasor.verify`.

    Raises:
        AssertionError: With the report, if it rotates otherwise.

    >>> from phasor.numpy import rotate
    >>> rope = Rope(head_dim=64, pairing="half", base=10_000.0)
    >>> assert_rotates(lambda x, positions: rotate(x, positions, rope), rope)
    """
    __tracebackhide__ = True  # pytest shows the caller's line
    recording = function_or_recording
    if callable(recording) and isinstance(rope, Rope):
        recording, options = _record(recording, rope, options), {}
    found = verify(rope, recording, **options)
    if found:
        raise AssertionError(str(found))


def _record(function: Any, rope: Rope, options: dict[str, Any]) -> dict[str, Any]:
    """What the function makes of random vectors; of queries and keys if it turns both."""
    n_axes = rope.axes.n_axes
    caller = find_caller(function, rope.head_dim, Calling(n_axes=n_axes, **options))
    positions = np.array([p for p in _POSITIONS if p <= caller.max_position])
    if n_axes > 1:  # other coordinates on every axis
        positions = np.stack([np.roll(positions, 3 * axis) for axis in range(n_axes)], axis=-1)
    x = np.random.default_rng(0).standard_normal((4, rope.head_dim))
    x = caller.arrays.read(caller.arrays.make(x, caller.arrays.dtype))
    turned = caller.turn(x, positions)  # [outputs, P, heads, head_dim]
    recording: dict[str, Any] = {"positions": positions}
    for name, y in zip(("q", "k"), turned, strict=False):
        recording |= {name: np.broadcast_to(x, y.shape), f"{name}_rotated": y}
    return recording
