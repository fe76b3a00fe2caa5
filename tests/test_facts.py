"""Numbers in prose are those of the registries and the results."""

from __future__ import annotations

import pytest
from tools import facts
from tools.facts import FACTS, Fact, find_wrong

from phasor.scaling import REGISTRY


def test_every_number_is_right() -> None:
    """As ``python -m tools.facts`` prints them."""
    assert list(find_wrong()) == []


@pytest.mark.parametrize(
    ("sentence", "said"),
    [
        ("slices, {} laws and rules", f"says “slices, {len(REGISTRY)} laws and rules”"),
        ("slices, {} kinds of law", "has no such sentence"),
    ],
)
def test_a_wrong_number_is_told(sentence: str, said: str) -> None:
    """With the page, what it says and what it should say."""
    fact = Fact("README.md", sentence, lambda: 0, "the tests")
    (fault,) = find_wrong((fact,))
    assert fault == f"README.md {said}; by the tests it is “{sentence.format(0)}”"


def test_a_wrong_number_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the right ones are printed."""
    monkeypatch.setattr(facts, "find_wrong", lambda: iter(["a page"]))
    assert facts.main() == 1
    assert capsys.readouterr().out == "wrong: a page\n"


def test_no_sentence_is_checked_twice() -> None:
    """Each has one source."""
    assert len({(fact.page, fact.sentence) for fact in FACTS}) == len(FACTS)
