"""Configurations as people have them, read and compared with independent readings."""

from __future__ import annotations

import warnings

import pytest

from phasor import PhasorWarning
from phasor.files.reading import load

from ...each import each
from ..refusals import refused
from .published_configs import cases, differences

#: Why a file is refused, which is true of it.
REFUSED = {
    "chatglm-6b": "type_unread: rotates the two halves of a head by two positions",
    "llada-reasoning-yarn": "type_unread: asks for YaRN by a switch",
    # a vision tower's fields under the type of the whole model
    "diffsynth-qwen-image-text-encoder": "sections: rope_parameters.mrope_section",
    # transformers refuses it for the same reason
    "neuron-test-integration-config-gemma3-4layers": "kinds: 62",
}


@each("name", sorted(cases().keys() - REFUSED.keys()))
def test_a_published_file_is_read_as_its_model_rotates(name: str) -> None:
    """Pairing, widths, frequencies, factor and rotating layers are those of the reading."""
    case = cases()[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PhasorWarning)
        ropes = load(case["config"])
    reading = case["expect"]
    if reading is not None and not reading.get("ambiguous"):
        assert differences(ropes, reading) == []


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_with_the_reason(name: str) -> None:
    """Few files are, and each says what is true of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PhasorWarning)
        with refused(REFUSED[name]):
            load(cases()[name]["config"])


def test_a_reading_finds_another_base_another_pairing_and_a_layer_too_many() -> None:
    """What compares can fail."""
    case = cases()["llada-8b"]
    for change in ({"rope_theta": 1e4}, {"n_layers": 31}, {"rope": False}):
        assert differences(load(case["config"] | change), case["expect"])


def test_two_meanings_of_one_key_are_noted() -> None:
    """ChatGLM2-32k's first code divides positions by what later code multiplies the base by."""
    (note,) = [n for n in load(cases()["chatglm2-6b-32k"]["config"]).notes if "rope_ratio" in n]
    assert "divides positions" in note
