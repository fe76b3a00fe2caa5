"""What phasor raises when it is given something it cannot use.

    ValueError
    └── PhasorError            catch this one to catch them all
        ├── SpecError          a field of a Rope, a scaling law or an axes layout
        ├── PositionError      where tokens stand
        ├── TensorError        shapes, dtypes and memory of what is to be rotated
        ├── BackendError       an implementation that cannot run here
        ├── ConfigError        a file or dictionary written by another program
        ├── CheckpointError    a file of weights that is damaged, or cannot be converted
        └── VerificationError  what was made is not what it had to be

Every message names the argument, says what was expected and what came, and gives the way out.
What it quotes of a file stands in it as `visible` writes it.
"""

from __future__ import annotations

DISTRIBUTION = "phasor-rope"  # what pip installs; its ``[project]`` name


def visible(text: str) -> str:
    r"""``text`` on one line, with every character that shows nothing written as its escape.

    These are the characters that ``repr`` escapes: control characters, which a terminal obeys,
    line breaks, marks that turn the direction of writing, halves of surrogate pairs, and every
    space but the usual one.

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


class PhasorError(ValueError):
    """Anything phasor refuses."""

    def __init__(self, message: str) -> None:
        super().__init__(visible(message))


class SpecError(PhasorError):
    """A description of a rotary embedding that means nothing."""


class PositionError(PhasorError):
    """Positions that no token can stand at, or that do not fit the tensors."""


class TensorError(PhasorError):
    """A tensor whose shape, dtype or memory does not fit the rotation."""


class BackendError(PhasorError):
    """A backend that was asked for by name and cannot do this work."""


class ConfigError(PhasorError):
    """A foreign configuration that is damaged, contradictory or not understood."""


class CheckpointError(PhasorError):
    """A file of weights that is damaged, not understood or cannot be written."""


class VerificationError(PhasorError):
    """A result that failed its check: what was made is not what it had to be."""


class PhasorWarning(UserWarning):
    """A number that phasor had to assume, and what it took."""
