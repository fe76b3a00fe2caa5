"""A slip in a table of model types is told with its file and line."""

from __future__ import annotations

from importlib import resources

import pytest

from phasor import ConfigError
from phasor.configs import diffusers, facts, unread_keys

SLIPS = {
    "an unknown fact": ("huggingface.toml", "cohere2_moe", "pairing =", "pairings =", "pairings"),
    "a pairing that is none": (
        "huggingface.toml",
        "mixtral",
        'mixtral = { pairing = "half"',
        'mixtral = { pairing = "halves"',
        "halves",
    ),
    "a model type that is none": (
        "huggingface.toml",
        "aria",
        'aria = { like = "aria_text"',
        'aria = { like = "arya"',
        "arya",
    ),
    "a variant without a value": (
        "huggingface.toml",
        "falcon",
        'key = "alibi", is = true, uses',
        'key = "alibi", uses',
        "variant",
    ),
    "an unknown meaning": (
        "keys.toml",
        "use_rope",
        'use_rope = { means = "rotates"',
        'use_rope = { means = "spins"',
        "must mean one of",
    ),
    "an unknown split": (
        "diffusers.toml",
        "WanTransformer3DModel",
        'split = "wan"',
        'split = "van"',
        "van",
    ),
}


@pytest.mark.parametrize("name", SLIPS)
def test_a_slip_is_told_with_its_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line of the entry, or of the fact in it."""
    file, entry, right, wrong, says = SLIPS[name]
    text = resources.files("phasor.configs").joinpath(file).read_text("utf-8")
    start = text.index(f"\n[model_types.{entry}]") if right.endswith("=") else 0
    assert right in text[start:]
    damaged = text[:start] + text[start:].replace(right, wrong, 1)
    line = next(i for i, one in enumerate(damaged.splitlines(), 1) if wrong in one)
    monkeypatch.setattr(facts, "_text", lambda asked: damaged if asked == file else _own(asked))
    reads = {
        "huggingface.toml": facts.table,
        "keys.toml": unread_keys.meanings,
        "diffusers.toml": diffusers._classes,
    }
    with pytest.raises(ConfigError, match=rf"{file}:{line}: {entry} .*{says}"):
        reads[file].__wrapped__()


def _own(name: str) -> str:
    return resources.files("phasor.configs").joinpath(name).read_text("utf-8")
