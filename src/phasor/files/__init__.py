"""Files and settings of other programs: presets, configs, checkpoints and translations.

This module has the errors for all of them; their messages are in ``refusals.toml``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from string import Formatter
from typing import Any

from phasor._checks import short_repr
from phasor.errors import CheckpointError, ConfigError, PhasorError, VerificationError

#: The beginning of notes and warnings about keys that were ignored instead of refused.
LEFT_ASIDE = "Left aside"
_ERRORS = (ConfigError, CheckpointError, VerificationError)


class _Sentence(Formatter):
    """Fills in a message; long quoted values are shortened."""

    def convert_field(self, value: Any, conversion: Any) -> Any:
        return short_repr(value) if conversion == "r" else super().convert_field(value, conversion)


def refusal(
    reason: str, as_type: type[PhasorError] | None = None, /, **facts: object
) -> PhasorError:
    """The error for a reason, a key of ``refusals.toml``, with these facts.

    Its class is the table of that file with the reason, unless ``as_type`` is given.

    >>> print(refusal("is_index", path="model.safetensors.index.json"))
    model.safetensors.index.json is an index; pass its folder
    """
    error_type, sentence = _sentences()[reason]
    error = (as_type or error_type)(_Sentence().format(sentence, **facts))
    error.reason, error.facts = reason, facts
    return error


@lru_cache(maxsize=1)
def _sentences() -> Mapping[str, tuple[type[PhasorError], str]]:
    tables = tomllib.loads(Path(__file__).with_name("refusals.toml").read_text("utf-8"))
    return {
        reason: (error, sentence)
        for error in _ERRORS
        for reason, sentence in tables[error.__name__].items()
    }
