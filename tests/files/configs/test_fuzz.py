"""Whatever is done to a config, `load` gives LayerRopes or a ConfigError."""

from __future__ import annotations

import copy
import json
import math
import tempfile
import warnings
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phasor import ConfigError, LayerRopes, PhasorWarning
from phasor.files.reading import load

from .config_files import CONFIGS

VALID = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(CONFIGS.glob("*.json"))}
_PROGRAMS = (CONFIGS / "published" / "programs.jsonl").read_text("utf-8").splitlines()
PROGRAMS = {case["name"]: case["config"] for case in map(json.loads, _PROGRAMS)}

_NUMBERS = st.sampled_from(
    [0, 1, -1, 2, 3, 0.5, -0.5, 1.5, 64, 1e-300, 1e300, 2**63, 10**400, -(10**30)]
)
_ODD = st.one_of(
    st.none(),
    st.booleans(),
    _NUMBERS,
    st.sampled_from([math.nan, math.inf, -math.inf]),
    st.text(max_size=4),
    st.sampled_from(["yarn", "linear", "dynamic", "longrope", "llama3", "proportional", "mrope"]),
    st.lists(_NUMBERS, max_size=4),
    st.dictionaries(st.sampled_from(["rope_type", "factor", "rope_theta", "x"]), _NUMBERS),
)
_KEYS = st.sampled_from(
    [
        "rope_theta",
        "rope_type",
        "factor",
        "rope_parameters",
        "rope_scaling",
        "partial_rotary_factor",
        "rotary_dim",
        "layer_types",
        "head_dim",
        "attention_factor",
        "mscale",
        "mrope_section",
        "no_rope_layers",
        "sliding_window_pattern",
        "text_config",
        "model_type",
        "yarn",
        "rope_x",
    ]
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    found: list[tuple[Any, ...]] = []
    for key, item in inner:
        found.append((*path, key))
        if isinstance(item, (dict, list)):
            found += _places(item, (*path, key))
    return found


@st.composite
def damaged(draw: st.DrawFn, valid: dict[str, Any] = VALID) -> dict[str, Any]:
    """A valid config with up to four things deleted, replaced, negated, nested or added."""
    config = copy.deepcopy(valid[draw(st.sampled_from(sorted(valid)))])
    for _ in range(draw(st.integers(1, 4))):
        places = _places(config)
        if not places:
            break
        *way, last = draw(st.sampled_from(places))
        holder = config
        for key in way:
            holder = holder[key]
        match draw(st.sampled_from(["delete", "replace", "negate", "nest", "list", "add"])):
            case "delete":
                del holder[last]
            case "negate" if isinstance(holder[last], (int, float)):
                holder[last] = -holder[last]
            case "nest":
                holder[last] = {last: holder[last]}
            case "list":
                holder[last] = [holder[last]]
            case "add" if isinstance(holder, dict):
                holder[draw(_KEYS)] = draw(_ODD)
            case _:
                holder[last] = draw(_ODD)
    return config


def loads_or_refuses(source: Any) -> None:
    """Fail unless loading ends in ropes or in a ConfigError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PhasorWarning)
            ropes = load(source)
    except ConfigError:
        return
    assert isinstance(ropes, LayerRopes)
    assert len(ropes) >= 1


@settings(max_examples=4 * settings().max_examples, derandomize=True)
@given(damaged())
def test_a_damaged_dictionary_loads_or_is_refused(config: dict[str, Any]) -> None:
    """Deleted, retyped, negative, not finite or nested values: never another exception."""
    loads_or_refuses(config)


@settings(max_examples=4 * settings().max_examples, derandomize=True)
@given(damaged(PROGRAMS))
def test_a_damaged_file_of_another_program_loads_or_is_refused(config: dict[str, Any]) -> None:
    """The same of the programs that train and serve."""
    loads_or_refuses(config)


@settings(derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(damaged(), st.integers(0, 400), st.binary(max_size=3))
def test_a_damaged_file_loads_or_is_refused(
    config: dict[str, Any], place: int, bytes_there: bytes
) -> None:
    """The same through a file, with a few bytes overwritten."""
    text = json.dumps(config).encode()
    text = text[:place] + bytes_there + text[place + len(bytes_there) :]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "config.json"
        path.write_bytes(text)
        loads_or_refuses(path)
