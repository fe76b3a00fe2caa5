"""The exceptions and the warning of phasor.

    ValueError
    └── PhasorError            catch this to catch all of them
        ├── SpecError          a field of a Rope, a scaling law or of axes
        ├── PositionError      positions of tokens
        ├── TensorError        shapes, dtypes and memory of the tensors to rotate
        ├── BackendError       an implementation that cannot run here
        ├── ConfigError        a file or dictionary written by another program
        ├── CheckpointError    a file of weights that is damaged, or cannot be converted
        └── VerificationError  a written file or result that failed its check

Every message names the argument, the expected and the given value, and the way out.
Text that a message quotes from a file is escaped by `visible`.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

DISTRIBUTION = "phasor-rope"  # the name for pip, as in ``[project]``


def visible(text: str) -> str:
    r"""``text`` on one line, escaped as ``repr`` does, terminal codes included.

    >>> print(visible("Llama \x1b[2J 3"))
    Llama \x1b[2J 3
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def install_hint(extra: str) -> str:
    """The command that installs phasor with ``extra``, for messages.

    >>> install_hint("torch")
    "pip install 'phasor-rope[torch]'"
    """
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def missing(extra: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """``error``, or if the package of ``extra`` is missing an error that says how to install it.

    >>> print(missing("jax", ModuleNotFoundError("No module named 'jax'", name="jax")))
    phasor.jax needs jax, which is not installed: pip install 'phasor-rope[jax]'
    """
    if (error.name or "").partition(".")[0] != extra:
        return error
    message = f"phasor.{extra} needs {extra}, which is not installed: {install_hint(extra)}"
    return ModuleNotFoundError(message, name=error.name)


class PhasorError(ValueError):
    """Base class of all errors of phasor.

    Attributes:
        reason: The key of the message, if the error is about a file of another program; else "".
        facts: The values that the message contains, by name.
    """

    reason: str = ""
    facts: Mapping[str, object] = types.MappingProxyType({})

    # not in ``__init__``, because torch.compile cannot trace the constructor of an exception
    def __str__(self) -> str:
        return visible(super().__str__())


class SpecError(PhasorError):
    """An invalid field of a Rope, a scaling law or of axes."""


class PositionError(PhasorError):
    """Positions that are not numbers, are out of range, or do not fit the tensors."""


class TensorError(PhasorError):
    """A tensor whose shape, dtype or memory does not fit the rotation."""


class BackendError(PhasorError):
    """A backend that was requested by name and cannot run this call."""


class ConfigError(PhasorError):
    """A configuration of another program that is damaged, contradictory or not understood."""


class CheckpointError(PhasorError):
    """A weights file that is damaged, that phasor cannot read, or that cannot be written."""


class VerificationError(PhasorError):
    """A result that failed its check."""


class PhasorWarning(UserWarning):
    """A number that phasor assumed for a file, or a state that an edit leaves as it is."""
