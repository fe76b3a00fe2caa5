"""Every model type beside every key: nothing about a rope or a size is passed over in silence."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from phasor import ConfigError, LayerRopes, PhasorWarning
from phasor.files.configs.facts import table
from phasor.files.reading import load

from .config_files import small
from .transformers_frequencies import frequencies

KNOWN = table().huggingface
#: What a file that rotates says of it, in the words of many programs; none of these is neutral.
ROPE_KEYS: dict[str, Any] = {
    "rope_theta": 500000.0,
    "rotary_emb_base": 10000,
    "rope_base": 1e6,
    "rotary_dim": 32,
    "partial_rotary_factor": 0.5,
    "rotary_pct": 0.25,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "use_rope": True,
    "rope_interleaved": True,
    "rope_of_another_program": 3,
}
#: What says nothing, in any file.
NEUTRAL: dict[str, Any] = {
    "rope_theta": None,
    "rope_scaling": {},
    "rope_parameters": {"rope_type": "default"},
    "use_rope": False,
}
WITHOUT_ROTATION = sorted(
    name for name, facts in KNOWN.items() if facts.other_positions is not None
)
ROTATING = sorted(
    name for name, facts in KNOWN.items() if facts.other_positions is None and facts.refused is None
)
#: The config of a model, as programs nest it; of no size is it the class's own.
INNER = {"hidden_size": 1536, "num_hidden_layers": 7, "num_attention_heads": 12, "rope_theta": 7e5}


def read(config: Mapping[str, Any], **options: Any) -> LayerRopes | str:
    """The ropes, or the error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PhasorWarning)
        try:
            return load(config, **options)
        except ConfigError as error:
            return str(error)


def test_a_type_without_rotation_swallows_no_key_of_a_rope() -> None:
    """Each is refused by its name, but for the ones that such files are known to carry."""
    for name in WITHOUT_ROTATION:
        plain = {"model_type": name}
        for key, value in ROPE_KEYS.items():
            found = read(plain | {key: value})
            carries = key in KNOWN[name].unused_keys or (
                key == "rope_parameters" and "rope_theta" in KNOWN[name].unused_keys
            )
            if carries:
                assert not isinstance(found, str)
                assert any(key in note for note in found.notes)
            else:
                assert isinstance(found, str), (name, key, found)
                assert key in found
        for key, value in NEUTRAL.items():
            found = read(plain | {key: value})
            assert not isinstance(found, str), (name, key, found)
            assert not any(found)


def test_a_type_takes_no_size_for_granted_beside_an_object_that_nothing_reads() -> None:
    """A class's own sizes are no reading of a file that has others; bases are none either."""
    for name in sorted(KNOWN):
        for key in ("model", "config", "backbone", "arch", "net.config"):
            inner: Any = INNER
            for word in reversed(key.split(".")):
                inner = {word: inner}
            found = read({"model_type": name} | inner)
            assert isinstance(found, str), (name, key, found)
        for key in ("n_heads", "num_layers", "dim", "d_model", "model_dim", "head_size"):
            found = read({"model_type": name, key: 11})
            if not isinstance(found, str) and any(found):
                # then the type reads it
                assert found.num_heads == 11 or found != read({"model_type": name}), key


def test_a_base_in_an_object_that_nothing_reads_is_refused() -> None:
    """Also where every size stands where it is read."""
    for name in ROTATING:
        sizes = small(name) | {
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_hidden_layers": 4,
        }
        plain = read(sizes)
        for inner in (
            {"rope_theta": 7e5},
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        ):
            found = read(sizes | {"attention": inner})
            if not isinstance(plain, str) and any(plain):
                assert isinstance(found, str), found
                assert "attention.rope" in found


def hints(error: str) -> list[dict[str, Any]]:
    """The calls that an error recommends, as options of load."""
    calls = [
        {name: value} for name, value in re.findall(r"load\(\.\.\., (\w+)='([\w.]+)'\)", error)
    ]
    return calls + [{"strict": False}] * ("--no-strict" in error)


@pytest.mark.transformers
def test_a_class_of_transformers_is_proposed_for_its_own_type_alone() -> None:
    """Or for one that rotates alike: every class that transformers' own tables name."""
    from transformers.models.auto import modeling_auto

    sizes = {"num_hidden_layers": 2, "hidden_size": 512, "num_attention_heads": 8, "head_dim": 64}
    proposed: set[str] = set()
    for table_name in (name for name in dir(modeling_auto) if name.endswith("_MAPPING_NAMES")):
        for model_type, classes in getattr(modeling_auto, table_name).items():
            for cls in (classes,) if isinstance(classes, str) else classes:
                file = small("of-a-stranger") | sizes | {"architectures": [cls]}
                error = read(file)
                assert isinstance(error, str)
                if model_type not in KNOWN or "Decision" in cls:
                    continue
                own = read(file | {"model_type": model_type})
                without_type = read({key: file[key] for key in file if key != "model_type"})
                assert isinstance(own, str) or isinstance(without_type, str) or without_type == own
                for options in hints(error):
                    proposed.add(options["like"])
                    assert isinstance(own, str) or read(file, **options) == own, (cls, options)
    assert len(proposed) > 100


HINTED: dict[str, tuple[dict[str, Any], list[dict[str, Any]], LayerRopes | None]] = {
    "nothing is known": (small("of-a-stranger"), [], None),
    "code of its own": (
        small("of-a-stranger", architectures=["LlamaForCausalLM"], auto_map={"AutoModel": "x.Y"}),
        [{"like": "llama"}],
        load(small()),
    ),
    "no size": ({"model_type": "of-a-stranger", "architectures": ["LlamaForCausalLM"]}, [], None),
    "a nested config,": (
        {"model_type": "of-a-stranger", "brain": small("qwen2")},
        [{"part": "brain"}],
        load(small("qwen2")),
    ),
    "two configs inside": (
        {"model_type": "of-a-stranger", "brain": small("qwen2"), "other": small("llama")},
        [],
        None,
    ),
    "a law without a type": (
        small(rope_scaling={"factor": 2.0}),
        [{"strict": False}],
        load(small()),
    ),
    "a key of another program": (small(rope_interleaved=True), [], None),
}


@pytest.mark.parametrize("name", HINTED)
def test_a_hint_is_given_where_following_it_reads_the_file_rightly(name: str) -> None:
    """And nowhere else: a wrong reading costs more than none."""
    config, options, ropes = HINTED[name]
    error = read(config)
    assert isinstance(error, str)
    assert hints(error) == options
    for each in options:
        assert read(config, **each) == ropes


def test_the_sizes_of_a_class_are_not_those_of_a_file_read_like_it() -> None:
    """They are another model's."""
    for model_type in ("llama", "qwen3", "deepseek_v3"):
        found = read({"model_type": "of-a-stranger", "rope_theta": 1e6}, like=model_type)
        assert isinstance(found, str)
        assert "absent; add it" in found


@pytest.mark.transformers
def test_where_lenient_is_recommended_the_class_rotates_as_without_the_key() -> None:
    """Every type of transformers with an unknown key, and with a factor of a law without a name."""
    compared: set[str] = set()
    for name in ROTATING:
        config = small(name) | {"hidden_size": 512, "num_attention_heads": 8}
        plain = frequencies(config)
        for stray in ({"rope_zoom": 2.0}, {"rope_scaling": {"factor": 2.0}}):
            error = read(config | stray)
            if plain is None or not isinstance(error, str) or "--no-strict" not in error:
                continue
            found = frequencies(config | stray)
            assert found is not None, name
            for (here, factor), (there, other) in zip(plain, found, strict=True):
                assert np.array_equal(here, there), (name, stray)
                assert factor == other
            compared.add(name)
            assert read(config | stray, strict=False) == read(config), (name, stray)
    assert len(compared) > 40
