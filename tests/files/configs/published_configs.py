"""Configurations as people have them, each with its source and an independent reading.

``published/cases.jsonl`` holds the fields that bear on size and rotation. A reading was made by
running the model's class in transformers, or by hand from the model's own code (``by`` says which).
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from phasor import LayerRopes, Rope
from phasor.angles import cos_sin

_FILES = sorted((Path(__file__).parent / "published").glob("*.jsonl"))


@cache
def cases() -> dict[str, dict[str, Any]]:
    """Every case by its name."""
    lines = [line for file in _FILES for line in file.read_text("utf-8").splitlines()]
    found = [json.loads(line) for line in lines]
    return {case["name"]: case for case in found}


def turning_at_one(rope: Rope) -> tuple[np.ndarray, float]:
    """Angle of every pair at position 1 of the shortest sequence, and the factor on cos and sin."""
    one = rope.at(1)
    # one on all axes: each pair turns by its own frequency, whichever axis drives it
    position = np.ones((1, rope.axes.n_axes), int) if rope.axes.n_axes > 1 else np.array([1])
    cos, sin = cos_sin(position, one)
    return np.arctan2(sin[0], cos[0]), one.attention_factor


def differences(ropes: LayerRopes, reading: dict[str, Any]) -> list[str]:
    """Where ``ropes`` are not what the independent reading says."""
    turning = sum(rope is not None for rope in ropes)
    if not reading["rotates"]:
        return [f"{turning} layers rotate"] if turning else []
    found = []
    if reading.get("layers") not in (None, len(ropes)):
        found.append(f"{len(ropes)} layers for {reading['layers']}")
    elif reading.get("layers") and reading.get("rope_layers") not in (None, turning):
        found.append(f"{turning} rotating layers for {reading['rope_layers']}")
    for kind, rope in ropes.kinds.items():
        if rope is not None:
            label = ropes.in_config.labels.get(kind, kind)
            readings = reading["ropes"]
            wanted = readings.get("*") or readings.get(kind) or readings.get(label)
            found += [f"{kind}: no reading"] if wanted is None else _rope(kind, rope, wanted)
    return found


def _rope(kind: str, rope: Rope, wanted: dict[str, Any]) -> list[str]:
    found = [
        f"{kind}: {name} {value} for {wanted[name]}"
        for name, value in (
            ("pairing", rope.pairing),
            ("pairing_out", rope.output_pairing),
            ("head_dim", rope.head_dim),
            ("rotary_dim", rope.rotary_dim),
            ("rotary_start", rope.rotary_start),
            ("direction", rope.direction),
        )
        if wanted.get(name) not in (None, value)
    ]
    angles, gain = turning_at_one(rope)
    for pair, frequency in wanted["inv_freq"].items():
        got = float(angles[int(pair)]) if int(pair) < len(angles) else None
        # readings have seven digits, of float32 frequencies
        if got is None or abs(got - frequency) > 1e-6 * frequency + 1e-9:
            found.append(f"{kind}: inv_freq[{pair}] {got} for {frequency}")
    if abs(gain - wanted["gain"]) > 5e-6 * gain:
        found.append(f"{kind}: gain {gain} for {wanted['gain']}")
    if wanted.get("axes") and rope.axes.n_axes == 1:
        found.append(f"{kind}: one axis for {wanted['axes']}")
    return found
