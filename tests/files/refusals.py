"""Refusals by their reasons and facts, so that sentences are free to change."""

from __future__ import annotations

import tomllib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib import resources

import pytest

from phasor.errors import PhasorError


def sentences(error: type[Exception]) -> Mapping[str, str]:
    """The sentence of each reason for an error."""
    text = resources.files("phasor.files").joinpath("refusals.toml").read_text("utf-8")
    return tomllib.loads(text)[error.__name__]


@contextmanager
def refused(reason: str, /, **facts: object) -> Generator[pytest.ExceptionInfo[PhasorError]]:
    """A refusal for this reason, with these facts."""
    with pytest.raises(PhasorError) as caught:
        yield caught
    error = caught.value
    said = {name: error.facts.get(name) for name in facts}
    assert (error.reason, said) == (reason, facts), error


def outline(error: PhasorError) -> str:
    """The reason, and the key that the sentence begins with; of an argument's check the key alone.

    >>> outline(PhasorError("rope_theta must be a finite number > 1, got 1"))
    'rope_theta'
    """
    key = str(error).split()[0].rstrip(":")
    return f"{error.reason} {key}".strip()
