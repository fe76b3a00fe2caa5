"""The reasons of refusals, by their sentences."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from string import Formatter


def sentences(error: type[Exception]) -> Mapping[str, str]:
    """The sentence of each reason for an error."""
    text = resources.files("phasor.files").joinpath("refusals.toml").read_text("utf-8")
    return tomllib.loads(text)[error.__name__]


def reason_of(error: Exception) -> str:
    """The reason whose sentence an error says; the longest, as one may begin as another does."""
    found: list[tuple[int, str]] = []
    for reason, sentence in sentences(type(error)).items():
        fields = Formatter().parse(sentence)
        pattern = "".join(re.escape(words) + ".*" * bool(field) for words, field, *_ in fields)
        if re.fullmatch(pattern, str(error), re.DOTALL):
            found.append((len(sentence), reason))
    return max(found)[1]
