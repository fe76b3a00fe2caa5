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
def refused(expected: str, /, **facts: object) -> Generator[pytest.ExceptionInfo[PhasorError]]:
    """A refusal with these facts, for the reason that ``expected`` is.

    After it and a colon may stand words of a fact. Without a reason (``": rope_theta"``) it is the
    check of an argument, whose sentence begins with the argument's name.
    """
    with pytest.raises(PhasorError) as caught:
        yield caught
    reason, _, words = expected.partition(": ")
    error = caught.value
    assert (error.reason, {name: error.facts.get(name) for name in facts}) == (reason, facts), error
    if reason:
        assert not words or any(words in str(fact) for fact in error.facts.values()), error
    else:
        assert str(error).startswith(words), error
