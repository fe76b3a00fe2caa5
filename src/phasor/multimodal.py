"""Where image and video tokens stand: three coordinates (t, h, w) for every token.

In comes a sequence as a list of `Text`, `Image` and `Video` segments; out comes an array
``[seq, 3]``. Grid sizes count the tokens that the language model sees, so after the vision
tower has merged patches; markers around an image are tokens of text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasor._checks import number, shown, whole
from phasor.errors import PositionError
from phasor.positions import Positions, every_axis, grid, span


@dataclass(frozen=True)
class Text:
    """A run of ``length`` text tokens, which stand at ``t = h = w``.

    Args:
        length: How many, at least 0.

    Raises:
        PositionError: If ``length`` is not such a whole number.
    """

    length: int

    def __post_init__(self) -> None:
        _set_whole(self, "length", least=0)


@dataclass(frozen=True, kw_only=True)
class Image:
    """An image of ``height * width`` tokens, row by row.

    Args:
        height: Rows of tokens, at least 1.
        width: Tokens in a row, at least 1.

    Raises:
        PositionError: If a size is not such a whole number.
    """

    height: int
    width: int

    def __post_init__(self) -> None:
        for field in ("height", "width"):
            _set_whole(self, field, least=1)


@dataclass(frozen=True, kw_only=True)
class Video:
    """A video of ``frames`` grids of ``height * width`` tokens, frame by frame.

    With neither ``seconds_per_frame`` nor ``tokens_per_second`` frames are one position apart
    (Qwen2-VL); with both they are ``seconds_per_frame * tokens_per_second`` apart (Qwen2.5-VL).

    Args:
        frames: Steps in time that the model sees, at least 1. One step is often several frames
            of the file merged: Qwen2.5-VL merges two.
        height: Rows of tokens in a frame, at least 1.
        width: Tokens in a row, at least 1.
        seconds_per_frame: Seconds from one step to the next; for Qwen2.5-VL 2 divided by the
            frames sampled per second.
        tokens_per_second: Positions that one second spans.

    Raises:
        PositionError: If a size is not such a whole number, one of the last two is given without
            the other or is not positive, or the last frame would stand beyond int64.
    """

    frames: int
    height: int
    width: int
    seconds_per_frame: float | None = None
    tokens_per_second: float | None = None

    def __post_init__(self) -> None:
        for field in ("frames", "height", "width"):
            _set_whole(self, field, least=1)
        if self.seconds_per_frame is None and self.tokens_per_second is None:
            return
        if self.seconds_per_frame is None or self.tokens_per_second is None:
            raise PositionError(
                "seconds_per_frame and tokens_per_second go together, got "
                f"{self.seconds_per_frame} and {self.tokens_per_second}; give both, or neither "
                "for frames one position apart"
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


Segment = Text | Image | Video


def multimodal(segments: Iterable[Segment]) -> Positions:
    """Positions of text, images and videos as Qwen2-VL, 2.5-VL and 3-VL number them (M-RoPE).

    With ``start`` one more than the largest coordinate so far, on any axis, and 0 at first:

    * text token ``j`` stands at ``start + j`` on all three axes;
    * the patch of an image in row ``i``, column ``j`` at ``(start, start + i, start + j)``;
    * that of frame ``k`` of a video at ``(start + time[k], start + i, start + j)``, where
      ``time[k]`` is ``k``, or ``k * seconds_per_frame * tokens_per_second`` cut to a whole number.

    The cut is taken on a float32 product, as the reference code takes it: a time just below a
    whole number may be rounded up to it first. Qwen3-VL writes a time stamp as text before every
    frame: give it each frame as ``Text`` and ``Image``. The next token of an answer stands at
    ``positions.max() + 1``.

    transformers 5.23 goes on after a video at ``start + max(height, width)`` however long the
    video lasts, so text repeats the times of its late frames; there the two differ. The paper
    and transformers 4 follow the rule above.

    Args:
        segments: The sequence from its beginning, in order.

    Returns:
        int64 array ``[seq, 3]``, axis order t, h, w.

    Raises:
        PositionError: If something in ``segments`` is not a `Text`, `Image` or `Video`.

    Source: Qwen2-VL (2409.12191), section 2.1; Qwen2.5-VL (2502.13923), section 2.1.

    >>> multimodal([Text(2), Image(height=2, width=2), Text(1)]).T
    array([[0, 1, 2, 2, 2, 2, 4],
           [0, 1, 2, 2, 3, 3, 4],
           [0, 1, 2, 3, 2, 3, 4]])
    """
    placed, start = [np.empty((0, 3), dtype=np.int64)], 0
    for segment in _checked(segments):
        if isinstance(segment, Text):
            block = every_axis(span(segment.length), 3)
        else:
            block = _cells(segment)
            if isinstance(segment, Video):
                block[:, 0] = _times(segment)[block[:, 0]]
        placed.append(start + block)
        start += int(block.max(initial=-1)) + 1
    return np.concatenate(placed)


def videorope(segments: Iterable[Segment], *, delta: float = 2.0) -> NDArray[np.float64]:
    """Positions of text, images and videos as VideoRoPE numbers them, on the diagonal of time.

    With ``start`` one more than the last ``t`` so far, and 0 at first:

    * text token ``j`` stands at ``start + j`` on all three axes;
    * the patch of frame ``k``, row ``i``, column ``j`` at ``t = start + k * delta``,
      ``h = t + i - floor((height - 1) / 2)`` and ``w = t + j - floor((width - 1) / 2)``;
      an image is one frame.

    So the middle of a frame stands where text of that time would, rows above it and columns to
    its left come out smaller than ``t`` (negative in an image that opens the sequence), and text
    after a frame may repeat coordinates that the far corner of the frame has. The next token of
    an answer stands at ``positions[-1, 0] + 1``.

    Args:
        segments: The sequence from its beginning, in order. Videos without seconds: here
            ``delta`` alone says how far apart frames are.
        delta: Positions from one frame to the next, positive; the paper uses 2.

    Returns:
        float64 array ``[seq, 3]``, axis order t, h, w; float64 whatever the value of ``delta``.

    Raises:
        PositionError: If ``delta`` is not a positive number, a video says its seconds, or
            something in ``segments`` is not a `Text`, `Image` or `Video`.

    Source: VideoRoPE (2502.05173), with the centre as the authors' code rounds it.

    >>> videorope([Text(1), Video(frames=2, height=1, width=3), Text(1)]).T
    array([[0., 1., 1., 1., 3., 3., 3., 4.],
           [0., 1., 1., 1., 3., 3., 3., 4.],
           [0., 0., 1., 2., 2., 3., 4., 4.]])
    """
    delta = number("delta", delta, above=0, error=PositionError)
    placed, start = [np.empty((0, 3))], 0.0
    for i, segment in enumerate(_checked(segments)):
        if isinstance(segment, Text):
            block = every_axis(span(segment.length), 3).astype(np.float64)
        elif isinstance(segment, Video) and segment.seconds_per_frame is not None:
            raise PositionError(
                f"segments[{i}] must be a video without seconds_per_frame, got "
                f"{shown(segment)}; in videorope frames are delta apart"
            )
        else:
            frame, row, column = _cells(segment).T
            time = delta * frame
            middle_row, middle_column = (segment.height - 1) // 2, (segment.width - 1) // 2
            block = np.stack(
                [time, time + row - middle_row, time + column - middle_column], axis=-1
            )
        placed.append(start + block)
        start += float(block[:, 0].max(initial=-1.0)) + 1.0
    return np.concatenate(placed)


def _set_whole(segment: Segment, field: str, *, least: int) -> None:
    value = whole(field, getattr(segment, field), least=least, error=PositionError)
    object.__setattr__(segment, field, value)


def _checked(segments: Any) -> list[Segment]:
    if not hasattr(segments, "__iter__"):
        raise PositionError(
            f"segments must be a list of Text, Image and Video, got {shown(segments)}"
        )
    items: list[Any] = list(segments)
    for i, item in enumerate(items):
        if not isinstance(item, Segment):
            raise PositionError(
                f"segments[{i}] must be a Text, an Image or a Video, got {shown(item)}"
            )
    return items


def _cells(segment: Image | Video) -> Positions:
    frames = segment.frames if isinstance(segment, Video) else 1
    return grid(frames, segment.height, segment.width)


def _times(video: Video) -> Positions:
    frames = span(video.frames)
    if video.seconds_per_frame is None or video.tokens_per_second is None:
        return frames
    step = np.float32(video.tokens_per_second) * np.float32(video.seconds_per_frame)
    return (frames.astype(np.float32) * step).astype(np.int64)
