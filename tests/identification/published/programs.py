"""What a defect of the museum is, and the rotation as programs write it.

Nothing here is of phasor but the checkpoint's rope. A faulty program's own arithmetic is written
out in NumPy: frequencies, cos and sin in float32, as such programs keep them, the vectors too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import phasor
from phasor import LayerRopes, Rope
from phasor.errors import PhasorWarning

Recording = dict[str, np.ndarray]


# vectors and positions to what the faulty program makes of them
Turn = Callable[[np.ndarray, np.ndarray], np.ndarray]


class Part(NamedTuple):
    """One recording with its rope, and what is said of it.

    Attributes:
        model: What the checkpoint says: a preset, the content of a config file, or a rope.
        recording: What the faulty program did.
        changes: The names of changes, by side; sides that rotate rightly are left out.
        says: The sentences of these changes.
        seq_len: The length at which a rule picks its law.
        turns: The faulty program by side, where it turns a vector by its position alone.
    """

    model: str | Mapping[str, Any] | Rope
    recording: Recording
    changes: dict[str, tuple[str, ...]]
    says: tuple[str, ...] = ()
    seq_len: int | None = None
    turns: Mapping[str, Turn] = {}

    def rope(self) -> Rope | LayerRopes:
        """The checkpoint's rope."""
        if isinstance(self.model, Rope):
            return self.model
        if isinstance(self.model, str):
            return phasor.preset(self.model)
        # files that contradict themselves are not what is asked here
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PhasorWarning)
            return phasor.load(dict(self.model))


class Defect(NamedTuple):
    """A published defect: where it was discussed, how it showed, and what made it."""

    name: str
    program: str
    thread: str
    symptom: str
    cause: str
    replay: Callable[[], list[Part]]


def defect(
    thread: str, *, program: str, symptom: str, cause: str
) -> Callable[[Callable[[], Part | list[Part]]], Defect]:
    """Make a defect of the function below, which does again what the program did."""

    def make(replay: Callable[[], Part | list[Part]]) -> Defect:
        def parts() -> list[Part]:
            made = replay()
            return [made] if isinstance(made, Part) else made

        return Defect(replay.__name__.replace("_", "-"), program, thread, symptom, cause, parts)

    return make


def link(repository: str, number: int, kind: str = "pull") -> str:
    """A thread on GitHub."""
    return f"https://github.com/{repository}/{kind}/{number}"


# ---- the rotation ----


def powers(dim: int, base: float) -> np.ndarray:
    """The plain frequencies ``[dim / 2]``."""
    return (1.0 / base ** (np.arange(0, dim, 2, dtype=np.float64) / dim)).astype(np.float32)


def yarn(
    dim: int, base: float, factor: float, original: int,
    beta_fast: float = 32.0, beta_slow: float = 1.0, *, truncate: bool = True,
) -> np.ndarray:  # fmt: skip
    """YaRN's frequencies ``[dim / 2]``."""

    def pair_of(turns: float) -> float:
        return dim * np.log(original / (turns * 2 * np.pi)) / (2 * np.log(base))

    low, high = pair_of(beta_fast), pair_of(beta_slow)
    if truncate:
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    plain = 1.0 / base ** (np.arange(0, dim, 2) / dim)
    return (plain / factor * ramp + plain * (1 - ramp)).astype(np.float32)


def llama3(dim: int, base: float, factor: float, original: int = 8192) -> np.ndarray:
    """Llama 3.1's frequencies ``[dim / 2]``, between 1 and 4 turns of the original context."""
    plain = 1.0 / base ** (np.arange(0, dim, 2) / dim)
    smooth = np.clip((original * plain / (2 * np.pi) - 1) / 3, 0, 1)
    return ((1 - smooth) * plain / factor + smooth * plain).astype(np.float32)


def mscale(factor: float) -> float:
    """YaRN's factor of cos and sin."""
    return float(0.1 * np.log(factor) + 1.0)


def angles_of(positions: np.ndarray, inv_freq: np.ndarray) -> np.ndarray:
    """``[..., pairs]`` in float32."""
    return positions[..., None].astype(np.float32) * inv_freq.astype(np.float32)


def turn_halves(x: np.ndarray, angles: np.ndarray, gain: float = 1.0) -> np.ndarray:
    """Pairs ``(i, i + n)`` of all coordinates turned; ``[..., heads, dim]`` by ``[..., pairs]``."""
    cos, sin = rows(angles, gain)
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return np.concatenate(turned, -1).astype(x.dtype)


def turn_interleaved(x: np.ndarray, angles: np.ndarray, gain: float = 1.0) -> np.ndarray:
    """Pairs ``(2i, 2i + 1)`` of all coordinates turned."""
    cos, sin = rows(angles, gain)
    turned = np.empty_like(x)
    turned[..., ::2] = x[..., ::2] * cos - x[..., 1::2] * sin
    turned[..., 1::2] = x[..., 1::2] * cos + x[..., ::2] * sin
    return turned


def rows(angles: np.ndarray, gain: float) -> tuple[np.ndarray, np.ndarray]:
    """Cos and sin ``[..., 1, pairs]`` for tensors with heads."""
    cos, sin = (np.float32(gain) * function(angles)[..., None, :] for function in (np.cos, np.sin))
    return cos, sin


# ---- what is recorded ----


def part(
    model: str | Mapping[str, Any] | Rope, turns: Mapping[str, Turn], at: np.ndarray,
    *heads_and_dim: int, changes: dict[str, tuple[str, ...]], says: tuple[str, ...] = (),
    seq_len: int | None = None,
) -> Part:  # fmt: skip
    """What programs do to vectors at positions ``[seq]``, or ``[batch, seq, n_axes]``, by side."""
    recording: Recording = {}
    for side, turn in turns.items():
        x = vectors(*at.shape[:2], *heads_and_dim)
        recording |= recorded(side, x, turn(x, at), at)
    return Part(model, recording, changes, says, seq_len, turns)


def halves(inv_freq: np.ndarray, gain: float = 1.0) -> Turn:
    """A program that turns halves by these frequencies."""
    return lambda x, positions: turn_halves(x, angles_of(positions, inv_freq), gain)


def interleaved(inv_freq: np.ndarray, gain: float = 1.0) -> Turn:
    """A program that turns neighbours."""
    return lambda x, positions: turn_interleaved(x, angles_of(positions, inv_freq), gain)


def vectors(*shape: int) -> np.ndarray:
    """Queries or keys ``[..., heads, dim]`` before they are turned; bfloat16 holds them too."""
    return to_bfloat16(np.random.default_rng(shape).standard_normal(shape))


def recorded(side: str, x: np.ndarray, turned: np.ndarray, positions: np.ndarray) -> Recording:
    """A recording of one side; ``side`` is such as ``q`` or ``layers.3.k``."""
    before, dot, _ = side.rpartition(".")
    return {f"{before}{dot}positions": positions, side: x, f"{side}_rotated": turned}


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Rounded to bfloat16, still float32."""
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)
