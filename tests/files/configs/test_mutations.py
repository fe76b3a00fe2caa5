"""Published configs with one key about the rope changed: the answer follows, is noted or refused.

Transformers' own class is the oracle: what is read in silence turns by its frequencies.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from phasor import ConfigError, LayerRopes, PhasorWarning
from phasor.angles import cos_sin
from phasor.files.reading import load
from phasor.scaling import LongRope

from ...sampling import SHARES
from .published_configs import cases
from .transformers_frequencies import frequencies

#: Keys about ropes that are put beside those of a file, with what they stand for.
ALIASES = {
    "rope_theta": ("rotary_emb_base", "rope_embedding_base", "rotary_embedding_base", "rope_base"),
    "partial_rotary_factor": ("rotary_pct", "rope_pct", "rope_percent", "rotary_emb_fraction"),
    "rotary_dim": ("rotary_emb_dim", "qk_rope_head_dim"),
    "rope_scaling": ("rope_parameters",),
    "rope_parameters": ("rope_scaling",),
}
#: Values for keys that a file has not.
ADDED = {
    "rope_theta": 77_777.0,
    "rotary_emb_base": 77_777.0,
    "rope_embedding_base": 77_777.0,
    "rotary_pct": 0.5,
    "rope_pct": 0.5,
    "rope_percent": 0.5,
    "partial_rotary_factor": 0.5,
    "rotary_dim": 16,
    "rope_interleaved": True,
    "alibi": True,
    "use_mrope": True,
}
_INSIDE = (
    "rope_theta",
    "factor",
    "rope_type",
    "type",
    "partial_rotary_factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
    "truncate",
)


def places(config: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The way to every key about the rope."""
    for key, value in config.items():
        about = any(word in key for word in ("rope", "rotary")) or key in _INSIDE
        if about:
            yield (*path, key)
        if isinstance(value, dict):
            yield from places(value, (*path, key))


def at(config: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """The object that holds the last key of ``path``."""
    for key in path[:-1]:
        config = config[key]
    return config


def mutants(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The config with one key dropped, null, a string, negated, under another name, or added."""
    for path in places(config):
        name, value = ".".join(path), at(config, path)[path[-1]]
        changes: dict[str, Any] = {"null": None, "string": str(value)}
        if isinstance(value, (int, float)):
            changes["negated"] = not value if isinstance(value, bool) else -value
        for what, new in changes.items():
            changed = copy.deepcopy(config)
            at(changed, path)[path[-1]] = new
            yield f"{name} {what}", changed
        changed = copy.deepcopy(config)
        del at(changed, path)[path[-1]]
        yield f"{name} dropped", changed
        for other in ALIASES.get(path[-1], ()):
            if isinstance(value, (int, float, dict)):
                changed = copy.deepcopy(config)
                at(changed, path)[other] = value if isinstance(value, dict) else value * 2
                yield f"{other} beside {name}", changed
                changed = copy.deepcopy(changed)
                del at(changed, path)[path[-1]]
                yield f"{other} for {name}", changed
    for key, value in ADDED.items():
        inner = config.get("text_config", config)
        if isinstance(inner, dict) and key not in inner:
            changed = copy.deepcopy(config)
            changed.get("text_config", changed)[key] = value
            yield f"{key} added", changed


def frequencies_of_ropes(ropes: LayerRopes) -> list[tuple[np.ndarray, float]]:
    """Frequencies and factor of every rope, at the shortest length."""
    found = []
    for rope in ropes.ropes:
        static = rope.at(1)
        axes = rope.axes.n_axes
        cos, sin = cos_sin(np.ones((1, axes), int) if axes > 1 else np.array([1]), static)
        found.append((rope.direction * np.arctan2(sin[0], cos[0]), static.attention_factor))
    return found


def same_frequencies(of_rope: tuple[np.ndarray, float], of_class: tuple[np.ndarray, float]) -> bool:
    """Whether two frequencies are the same but for float32."""
    if len(of_rope[0]) > len(of_class[0]):
        return False
    # a class may pad with pairs that stand still
    rest = of_class[0][len(of_rope[0]) :]
    close = np.allclose(of_rope[0], of_class[0][: len(of_rope[0])], rtol=2e-5, atol=1e-12)
    return bool(close) and not rest.any() and bool(np.isclose(of_rope[1], of_class[1], rtol=1e-6))


def silently_wrong(config: dict[str, Any]) -> str | None:
    """The rope that `load` reads without a note though transformers has another; in words."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PhasorWarning)
        try:
            ropes = load(copy.deepcopy(config))
        except ConfigError:
            return None
    of_class = frequencies(config)
    if of_class is None or any(isinstance(rope.scaling, LongRope) for rope in ropes.ropes):
        return None
    strange = [
        of_rope
        for of_rope in frequencies_of_ropes(ropes)
        if not any(same_frequencies(of_rope, one) for one in of_class)
    ]
    if not strange or any("class default" not in note for note in ropes.notes):
        return None
    return f"{ropes} turns by {strange[0][0][:3]}, transformers by {of_class[0][0][:3]}"


#: Files of code of their own, whose inner configs or sizes transformers' class does not look at.
OTHER_CODE = (
    "tpu-qwen3_asr",
    "mlx-llama-first",
    "mlx-mistral-first",
    "mlx-mixtral-first",
    "mlx-tinyllama-first",
    "type-fla-bitnet",
    "type-kyutai-moshi",
)


def found(names: list[str]) -> list[str]:
    """Every mutant of these cases that is silently wrong."""
    wrong = []
    for name in names:
        if name in OTHER_CODE or silently_wrong(cases()[name]["config"]):
            # transformers itself does not read this file as its model is: no oracle
            continue
        for what, mutant in mutants(cases()[name]["config"]):
            said = silently_wrong(mutant)
            wrong += [] if said is None else [f"{name}, {what}: {said}"]
    return wrong


EVERYDAY = random.Random(0).sample(sorted(cases()), 4)


def test_a_changed_key_is_never_silently_another_rotation() -> None:
    """Four published files, each with every key about its rope changed in turn."""
    assert found(EVERYDAY) == []


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
def test_no_changed_key_of_any_published_file_is_silently_another_rotation(share: int) -> None:
    """The same for all of them."""
    assert found(sorted(cases())[share::SHARES]) == []


def test_the_oracle_sees_another_base() -> None:
    """Transformers' frequencies of a config follow its base, or the tests above test nothing."""
    config = cases()["llama-3.1-8b"]["config"] if "llama-3.1-8b" in cases() else None
    config = config or next(
        c["config"] for c in cases().values() if c["config"].get("model_type") == "llama"
    )
    of_class = frequencies(config)
    assert of_class is not None
    other = frequencies(config | {"rope_theta": 77_777.0, "rope_scaling": None})
    assert other is not None
    assert not same_frequencies(of_class[0], other[0])
