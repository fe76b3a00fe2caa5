"""Sequences of Qwen2.5-Omni and Qwen3-Omni, whose videos have times and sound (TMRoPE)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phasor._checks import number, short_repr
from phasor.errors import PositionError
from phasor.positions.segments import Text, Video
from phasor.positions.tokens import integers

#: The models with sound in their sequences; they number tokens differently.
Omni = Literal["qwen2.5", "qwen3"]


@dataclass(frozen=True)
class Markers(Text):
    """Text next to a video with sound; the two markers on that side share one position."""

    first_twice: bool
    last_twice: bool


@dataclass(frozen=True, kw_only=True)
class TimedVideo(Video):
    """A video of an Omni model: each frame has its own time, truncated to an integer or not."""

    is_cut: bool


@dataclass(frozen=True)
class VideoWithAudio:
    """A video and its sound, which start at the same position."""

    video: Video
    is_audio: NDArray[np.bool_]  # one for each token


def read_paces(name: str, seconds: ArrayLike | None, count: int) -> list[float]:
    """Seconds between time steps, one number per video; an empty list if ``paces`` is None."""
    if seconds is None:
        return []
    # dtype object, because rows of different lengths do not make an array of numbers
    values = np.array(seconds, object, ndmin=1).tolist()
    paces = [
        number(f"{name}[{i}]", pace, above=0, most=1e9, error=PositionError)
        for i, pace in enumerate(values)
    ]
    if paces and len(paces) != count:
        raise PositionError(
            f"{name} must hold a number for each video, got {len(paces)} for {count}"
        )
    return paces


def timed_videos(
    grids: Sequence[Sequence[int]], tokens_per_second: float | None, seconds: Any, omni: Omni
) -> list[Video]:
    """The videos of an Omni model; each needs its seconds per step."""
    paces = read_paces("second_per_grids", seconds, len(grids))
    if grids and not paces:
        raise PositionError(
            f"second_per_grids must be given where there are videos, got {short_repr(seconds)}"
        )
    if grids and tokens_per_second is None:
        raise PositionError(
            "tokens_per_second must be given where there are videos, got None; it is "
            "position_id_per_seconds of the model's config"
        )
    return [
        TimedVideo(
            frames=frames,
            height=height,
            width=width,
            seconds_per_frame=pace,
            tokens_per_second=tokens_per_second,
            is_cut=omni == "qwen2.5",
        )
        for (frames, height, width), pace in zip(grids, paces, strict=True)
    ]


def check_omni(
    omni: Any, after_video: Any, joins: bool, audio_seqlens: Any, seconds: Any, seconds_vl: Any
) -> None:
    """Refuse an unknown model, and arguments that belong to other models."""
    if omni not in ("qwen2.5", "qwen3", None):
        raise PositionError(f"omni must be 'qwen2.5', 'qwen3' or None, got {short_repr(omni)}")
    if omni is None and (joins or audio_seqlens is not None or seconds is not None):
        raise PositionError(
            "omni must be 'qwen2.5' or 'qwen3' with use_audio_in_video, audio_seqlens or "
            "second_per_grids, got None; the two models number tokens differently"
        )
    if omni is not None and (after_video == "size" or seconds_vl is not None):
        raise PositionError(
            "after_video='size' and second_per_grid_ts are for models without omni; Omni models "
            "continue after a video's time, and take second_per_grids"
        )


def audio_lengths(seqlens: ArrayLike | None, omni: Omni | None) -> list[int]:
    """Tokens per audio, from the frames of its features: two layers of stride 2, or three."""
    frames = integers("audio_seqlens", () if seqlens is None else seqlens, "[audios]")
    if omni == "qwen2.5":
        return (((frames - 1) // 2 + 1 - 2) // 2 + 1).reshape(-1).tolist()
    # 13 tokens for each whole chunk of 100 frames
    rest = (frames % 100 - 1) // 2 + 1
    rest = ((rest - 1) // 2 + 1 - 1) // 2 + 1
    return (rest + frames // 100 * 13).reshape(-1).tolist()


def text_between(length: int, first_twice: bool, last_twice: bool) -> Text:
    """Text, including text next to videos with sound, whose two markers share one position."""
    if not (first_twice or last_twice):
        return Text(length)
    markers = 2 * (first_twice + last_twice)
    if length < markers:
        raise PositionError(
            f"token_types must have two markers on each side of a video with sound, got {length} "
            f"tokens of text for {markers}"
        )
    return Markers(length, first_twice, last_twice)
