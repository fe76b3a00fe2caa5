"""Where tokens stand: integer positions for every way a batch is laid out.

In come lengths, boundaries, masks and grid sizes; out come int64 arrays ``[..., seq]``, or
``[..., seq, n_axes]`` where a token has several coordinates (axis order t, h, w). The same names
for tensors, on their device, are in `phasor.torch.positions`.

A sequence of text, images and videos is a list of `Text`, `Image` and `Video`, whose grid sizes
count the tokens that the language model sees, so after the vision tower has merged patches;
markers around an image are tokens of text.

Arguments that are not whole numbers, out of range or of another shape raise `PositionError`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phasor._checks import number, short_repr, whole
from phasor.errors import PositionError

Positions = NDArray[np.int64]

_FIRST, _LAST = -(2**63), 2**63 - 1
_MOST_POSITIONS = _LAST // 8  # bytes are counted in int64 too


def span(length: int, start: int = 0) -> Positions:
    """Consecutive positions ``start, start + 1, ..., start + length - 1`` of one sequence.

    Args:
        length: How many tokens, at least 0.
        start: Position of the first one; any int64, negative ones too.

    Returns:
        int64 array ``[length]``.

    >>> span(4, start=10)
    array([10, 11, 12, 13])
    """
    length = whole("length", length, least=0, error=PositionError)
    start = whole("start", start, least=_FIRST, error=PositionError)
    return _count_from("start", start, "length", length)


def packed(cu_seqlens: ArrayLike) -> Positions:
    """Positions of sequences packed end to end, counted from 0 again in each of them.

    Token ``j`` of the pack stands at ``j - cu_seqlens[i]``, where ``i`` is the sequence it is in.

    Args:
        cu_seqlens: Boundaries ``[n_sequences + 1]`` as the variable-length kernels take them: 0
            first, never decreasing, the total number of tokens last.

    Returns:
        int64 array ``[cu_seqlens[-1]]``.

    >>> packed([0, 3, 5])
    array([0, 1, 2, 0, 1])
    """
    bounds = _integers("cu_seqlens", cu_seqlens, "[n_sequences + 1]")
    if bounds.size == 0 or bounds[0] != 0:
        first = bounds[0] if bounds.size else "none"
        raise PositionError(f"cu_seqlens must start with 0, got {first}")
    falls = np.flatnonzero(bounds[1:] < bounds[:-1])
    if falls.size:
        i = int(falls[0])
        raise PositionError(
            f"cu_seqlens must never decrease, got {bounds[i]} and then {bounds[i + 1]} "
            f"at index {i + 1}; lengths become boundaries by a cumulative sum"
        )
    tokens = _consecutive("cu_seqlens[-1]", int(bounds[-1]))
    return tokens - np.repeat(bounds[:-1], np.diff(bounds))


def padded(mask: ArrayLike) -> Positions:
    """Positions of padded rows: the real tokens of each are at 0, 1, 2, ..., padding is at 0.

    Padding may be on the left, on the right or in between. Its position is there to fill the
    array and means nothing: attention never reads it.

    Args:
        mask: Attention mask ``[..., seq]``, bools or integers: 1 a token, 0 padding. A mask that
            is added to scores (0 and -inf, floats) says the opposite and is refused.

    Returns:
        int64 array of the shape of ``mask``.

    >>> padded([[0, 0, 1, 1, 1], [1, 1, 0, 0, 0]])
    array([[0, 0, 0, 1, 2],
           [0, 1, 0, 0, 0]])
    """
    tokens = _integers("mask", mask, "[..., seq]", kinds="biu")
    invalid = tokens[(tokens != 0) & (tokens != 1)]
    if invalid.size:
        raise PositionError(f"mask must hold only 0 (padding) and 1 (token), got {invalid[0]}")
    return (np.cumsum(tokens, axis=-1) - 1) * tokens


def cached(lengths: ArrayLike, new_tokens: int) -> Positions:
    """Positions of the tokens that follow caches of different lengths.

    New token ``j`` of row ``i`` stands at ``lengths[i] + j``.

    Args:
        lengths: Tokens already in each row's cache ``[batch]``. Where a row begins with padding,
            its first real token stands at 0 if its length is what is cached less the padding,
            which is negative as long as padding is all there is.
        new_tokens: How many are added to every row.

    Returns:
        int64 array ``[batch, new_tokens]``.

    >>> cached([7, 0], new_tokens=3)
    array([[7, 8, 9],
           [0, 1, 2]])
    >>> cached([-2], new_tokens=4)  # the first four columns of a row that two pads begin
    array([[-2, -1,  0,  1]])
    """
    starts = _integers("lengths", lengths, "[batch]")
    new_tokens = whole("new_tokens", new_tokens, least=0, error=PositionError)
    longest = int(starts.max(initial=0))
    return starts[:, None] + (_count_from("lengths", longest, "new_tokens", new_tokens) - longest)


def grid(*sizes: int) -> Positions:
    """Coordinates of every cell of a grid in row-major order, the last axis running fastest.

    Args:
        sizes: Cells along each axis: ``grid(h, w)`` of an image, ``grid(t, h, w)`` of a video.

    Returns:
        int64 array ``[prod(sizes), len(sizes)]``.

    >>> grid(2, 3).T
    array([[0, 0, 0, 1, 1, 1],
           [0, 1, 2, 0, 1, 2]])
    """
    if not sizes:
        raise PositionError("sizes must name at least one axis, got none")
    shape = [whole(f"sizes[{i}]", n, least=0, error=PositionError) for i, n in enumerate(sizes)]
    cells = _consecutive("the product of sizes", math.prod(shape))
    return np.stack(np.unravel_index(cells, shape), axis=-1)


def every_axis(positions: ArrayLike, n_axes: int) -> Positions:
    """The same position on every axis: how a rope of several axes sees text.

    Args:
        positions: Whole numbers ``[..., seq]``.
        n_axes: How many axes the rope has, at least 1.

    Returns:
        int64 array ``[..., seq, n_axes]``.

    >>> every_axis([0, 1, 5], n_axes=2)
    array([[0, 0],
           [1, 1],
           [5, 5]])
    """
    coordinates = _integers("positions", positions, "[..., seq]")
    n_axes = whole("n_axes", n_axes, least=1, error=PositionError)
    return np.repeat(coordinates[..., None], n_axes, axis=-1)


def context_parallel(
    length: int, rank: int, world_size: int, layout: Literal["contiguous", "zigzag"]
) -> Positions:
    """Positions of the tokens that one rank holds when a sequence is shared between ranks.

    ``"contiguous"`` cuts the sequence into ``world_size`` chunks and gives rank ``r`` chunk
    ``r``. ``"zigzag"`` cuts ``2 * world_size`` chunks and gives it chunks ``r`` and
    ``2 * world_size - 1 - r``, an early one and a late one, so that every rank has the same
    share of a causal mask (Llama 3, 2407.21783, section 3.3.2).

    The result also indexes the sequence: ``x[positions]`` are the tokens of this rank.

    Args:
        length: Tokens of the whole sequence, a multiple of the number of chunks.
        rank: This rank, from 0.
        world_size: How many ranks share the sequence.
        layout: ``"contiguous"`` or ``"zigzag"``.

    Returns:
        int64 array ``[length // world_size]``, increasing.

    >>> context_parallel(8, rank=0, world_size=2, layout="zigzag")
    array([0, 1, 6, 7])
    """
    chunks = chunks_of_rank(length, rank, world_size, layout)
    return np.concatenate([span(len(chunk), chunk.start) for chunk in chunks])


def chunks_of_rank(length: int, rank: int, world_size: int, layout: str) -> list[range]:
    """The pieces of a sequence that `context_parallel` gives to one rank, with its errors.

    >>> chunks_of_rank(8, 0, 2, "zigzag")
    [range(0, 2), range(6, 8)]
    """
    length = whole("length", length, least=0, error=PositionError)
    world_size = whole("world_size", world_size, least=1, error=PositionError)
    rank = whole("rank", rank, least=0, error=PositionError)
    if rank >= world_size:
        raise PositionError(f"rank must be below world_size ({world_size}), got {rank}")
    if layout == "contiguous":
        n_chunks, chunks = world_size, [rank]
    elif layout == "zigzag":
        n_chunks, chunks = 2 * world_size, [rank, 2 * world_size - 1 - rank]
    else:
        raise PositionError(f"layout must be 'contiguous' or 'zigzag', got {short_repr(layout)}")
    size, rest = divmod(length, n_chunks)
    if rest:
        raise PositionError(
            f"length must be a multiple of {n_chunks}, the chunks of the {layout} layout on "
            f"{world_size} ranks, got {length}; pad the sequence to {length - rest + n_chunks}"
        )
    return [range(chunk * size, (chunk + 1) * size) for chunk in chunks]


class _Segment:
    def _check_sizes(self, *names: str, least: int = 1) -> None:
        for name in names:
            value = whole(name, getattr(self, name), least=least, error=PositionError)
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class Text(_Segment):
    """A run of ``length`` text tokens, which stand at ``t = h = w``.

    Args:
        length: How many, at least 0.
    """

    length: int

    def __post_init__(self) -> None:
        self._check_sizes("length", least=0)


@dataclass(frozen=True, kw_only=True)
class Image(_Segment):
    """An image of ``height * width`` tokens, row by row.

    Args:
        height: Rows of tokens, at least 1.
        width: Tokens in a row, at least 1.
    """

    height: int
    width: int

    def __post_init__(self) -> None:
        self._check_sizes("height", "width")


@dataclass(frozen=True, kw_only=True)
class Video(_Segment):
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
    """

    frames: int
    height: int
    width: int
    seconds_per_frame: float | None = None
    tokens_per_second: float | None = None

    def __post_init__(self) -> None:
        self._check_sizes("frames", "height", "width")
        pace = (self.seconds_per_frame, self.tokens_per_second)
        if pace == (None, None):
            return
        if None in pace:
            raise PositionError(
                f"seconds_per_frame and tokens_per_second go together, got {pace[0]} and "
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

    Source: Qwen2-VL (2409.12191), section 2.1; Qwen2.5-VL (2502.13923), section 2.1.

    >>> multimodal([Text(2), Image(height=2, width=2), Text(1)]).T
    array([[0, 1, 2, 2, 2, 2, 4],
           [0, 1, 2, 2, 3, 3, 4],
           [0, 1, 2, 3, 2, 3, 4]])
    """
    blocks, start = [np.empty((0, 3), dtype=np.int64)], 0
    for segment in _check_segments(segments):
        if isinstance(segment, Text):
            block = every_axis(span(segment.length), 3)
        else:
            block = _cells(segment)
            if isinstance(segment, Video) and segment.seconds_per_frame is not None:
                step = np.float32(segment.tokens_per_second) * np.float32(segment.seconds_per_frame)
                block[:, 0] = (block[:, 0].astype(np.float32) * step).astype(np.int64)
        blocks.append(start + block)
        start += int(block.max(initial=-1)) + 1
    return np.concatenate(blocks)


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

    Source: VideoRoPE (2502.05173), with the centre as the authors' code rounds it.

    >>> videorope([Text(1), Video(frames=2, height=1, width=3), Text(1)]).T
    array([[0., 1., 1., 1., 3., 3., 3., 4.],
           [0., 1., 1., 1., 3., 3., 3., 4.],
           [0., 0., 1., 2., 2., 3., 4., 4.]])
    """
    delta = number("delta", delta, above=0, error=PositionError)
    blocks, start = [np.empty((0, 3))], 0.0
    for i, segment in enumerate(_check_segments(segments)):
        if isinstance(segment, Text):
            block = every_axis(span(segment.length), 3).astype(np.float64)
        elif isinstance(segment, Video) and segment.seconds_per_frame is not None:
            raise PositionError(
                f"segments[{i}] must be a video without seconds_per_frame, got "
                f"{short_repr(segment)}; in videorope frames are delta apart"
            )
        else:
            frame, row, column = _cells(segment).T
            time = delta * frame
            middle_row, middle_column = (segment.height - 1) // 2, (segment.width - 1) // 2
            axes = time, time + row - middle_row, time + column - middle_column
            block = np.stack(axes, axis=-1)
        blocks.append(start + block)
        start += float(block[:, 0].max(initial=-1.0)) + 1.0
    return np.concatenate(blocks)


def _check_segments(segments: Any) -> list[Segment]:
    if not hasattr(segments, "__iter__"):
        what = "segments must be a list of Text, Image and Video"
        raise PositionError(f"{what}, got {short_repr(segments)}")
    items: list[Any] = list(segments)
    for i, item in enumerate(items):
        if not isinstance(item, Segment):
            what = f"segments[{i}] must be a Text, an Image or a Video"
            raise PositionError(f"{what}, got {short_repr(item)}")
    return items


def _cells(segment: Image | Video) -> Positions:
    """(frame, row, column) of every token, ``[frames * height * width, 3]``."""
    frames = segment.frames if isinstance(segment, Video) else 1
    return grid(frames, segment.height, segment.width)


def _consecutive(name: str, count: int) -> Positions:
    """0, 1, ..., count - 1."""
    if count > _MOST_POSITIONS:
        raise PositionError(
            f"{name} must be at most {_MOST_POSITIONS}, as many positions as an array holds, "
            f"got {count}"
        )
    return np.arange(count, dtype=np.int64)


def _count_from(name: str, start: int, unit: str, count: int) -> Positions:
    """start, start + 1, ..., start + count - 1."""
    if start + count - 1 > _LAST:
        what = f"{name} + {unit} - 1 must be at most 2**63 - 1"
        raise PositionError(f"{what}, got {start} + {count} - 1")
    return _consecutive(unit, count) + start


def _integers(name: str, values: Any, shape: str, kinds: str = "iu") -> Positions:
    """``values`` as an array ``[..., seq]`` or, of another ``shape``, of one dimension."""
    if any(kind.__module__ == "torch" for kind in type(values).__mro__):
        raise PositionError(
            f"{name} must be an array or a list, got a torch tensor; phasor.torch.positions has "
            "the same functions for tensors, on their device"
        )
    try:
        array = np.asarray(values)
    except ValueError:
        raise PositionError(f"{name} must be rectangular, got {short_repr(values)}") from None
    # NumPy makes an empty list float64
    if array.size and (array.dtype.kind not in kinds or int(array.max()) > _LAST):
        raise PositionError(
            f"{name} must hold whole numbers that fit in int64, got dtype {array.dtype}"
        )
    if array.ndim == 0 or (array.ndim > 1 and shape != "[..., seq]"):
        got = list(array.shape) if array.ndim else "a single value"
        raise PositionError(f"{name} must have the shape {shape}, got {got}")
    return array.astype(np.int64)
