"""The segments of a sequence: text, images, videos and sound."""

from __future__ import annotations

from dataclasses import dataclass

from phasor._checks import number, whole
from phasor.errors import PositionError


class _Segment:
    def __post_init__(self) -> None:
        for name, least in {"length": 0, "frames": 1, "height": 1, "width": 1}.items():
            if hasattr(self, name):
                value = whole(name, getattr(self, name), least=least, error=PositionError)
                object.__setattr__(self, name, value)


@dataclass(frozen=True)
class Text(_Segment):
    """A run of ``length`` text tokens, with ``t = h = w``.

    Args:
        length: Number of tokens, at least 0.
    """

    length: int


@dataclass(frozen=True)
class Audio(_Segment):
    """A run of ``length`` audio tokens, with ``t = h = w`` as in text.

    Args:
        length: Number of tokens, at least 0.
    """

    length: int


@dataclass(frozen=True, kw_only=True)
class Image(_Segment):
    """An image of ``height * width`` tokens, row by row.

    Args:
        height: Rows of tokens, at least 1.
        width: Tokens in a row, at least 1.
    """

    height: int
    width: int


@dataclass(frozen=True, kw_only=True)
class Video(_Segment):
    """A video of ``frames`` grids of ``height * width`` tokens, frame by frame.

    Without ``seconds_per_frame`` and ``tokens_per_second`` frames are one position apart
    (Qwen2-VL); with both they are ``seconds_per_frame * tokens_per_second`` apart (Qwen2.5-VL).

    Args:
        frames: Time steps that the model sees, at least 1. A step is often several merged frames of
            the file: Qwen2.5-VL merges two.
        height: Rows of tokens in a frame, at least 1.
        width: Tokens in a row, at least 1.
        seconds_per_frame: Seconds from one step to the next; for Qwen2.5-VL 2 divided by the
            frames sampled per second.
        tokens_per_second: Positions that one second spans.
    """

    frames: int
    height: int
    width: int
    seconds_per_frame: float | None = None
    tokens_per_second: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        pace = (self.seconds_per_frame, self.tokens_per_second)
        is_given = [value is not None for value in pace]
        if not any(is_given):
            return
        if not all(is_given):
            raise PositionError(
                f"seconds_per_frame and tokens_per_second belong together, got {pace[0]} and "
                f"{pace[1]}; give both, or neither for frames one position apart"
            )
        longest = float(self.frames)
        for field in ("seconds_per_frame", "tokens_per_second"):
            value = number(field, getattr(self, field), above=0, most=1e9, error=PositionError)
            object.__setattr__(self, field, value)
            longest *= value
        if longest >= 2.0**63:
            raise PositionError(
                "frames * seconds_per_frame * tokens_per_second must stay below 2**63, got "
                f"{self.frames} * {self.seconds_per_frame:g} * {self.tokens_per_second:g}"
            )


Segment = Text | Image | Video | Audio
