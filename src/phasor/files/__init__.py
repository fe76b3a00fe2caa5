"""What other programs wrote and read: presets, configs, checkpoints and translations.

Why a file of theirs is refused is here, for all of them; the sentences are in ``refusals.toml``.
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

#: What notes and warnings about refused keys begin with, where they were read past.
LEFT_ASIDE = "Left aside"
_ERRORS = (ConfigError, CheckpointError, VerificationError)


class _Sentence(Formatter):
    """Fills a sentence; what is quoted in it is cut where it is long."""

    def convert_field(self, value: Any, conversion: Any) -> Any:
        return short_repr(value) if conversion == "r" else super().convert_field(value, conversion)


def refusal(reason: str, /, **facts: object) -> PhasorError:
    """The error for a reason, a key of ``refusals.toml``, about these facts.

    >>> print(refusal("is_index", path="model.safetensors.index.json"))
    model.safetensors.index.json is an index; give the folder it lies in
    """
    error, sentence = _sentences()[reason]
    return error(_Sentence().format(sentence, **facts))


@lru_cache(maxsize=1)
def _sentences() -> Mapping[str, tuple[type[PhasorError], str]]:
    tables = tomllib.loads(Path(__file__).with_name("refusals.toml").read_text("utf-8"))
    return {
        reason: (error, sentence)
        for error in _ERRORS
        for reason, sentence in tables[error.__name__].items()
    }
