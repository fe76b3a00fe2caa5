"""For the tests of other projects: `assert_rotates`."""

from __future__ import annotations

from typing import Any

from phasor.identification import diff, verify
from phasor.layers import LayerRopes
from phasor.rope import Rope


def assert_rotates(function_or_recording: Any, rope: Rope | LayerRopes, **options: Any) -> None:
    """Fail unless a function, or what was recorded of a program, rotates as ``rope`` says.

    Args:
        function_or_recording: A function or module that rotates, as `phasor.diff` takes them; or
            a recording as `phasor.verify` takes it.
        rope: What it is to do; of a function one layer's.
        options: Those of `phasor.diff` or of `phasor.verify`.

    Raises:
        AssertionError: With the report, if it rotates otherwise.

    >>> from phasor.numpy import rotate
    >>> rope = Rope(head_dim=64, pairing="half", base=10_000.0)
    >>> assert_rotates(lambda x, positions: rotate(x, positions, rope), rope)
    """
    __tracebackhide__ = True  # pytest shows the caller's line
    if callable(function_or_recording) and isinstance(rope, Rope):
        found = diff(rope, function_or_recording, **options)
    else:
        found = verify(rope, function_or_recording, **options)
    if found:
        raise AssertionError(str(found))
