"""Positions of text, images, videos and sound in one sequence (M-RoPE, TMRoPE, VideoRoPE)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phasor._checks import boolean, number, short_repr, whole
from phasor.errors import PositionError
from phasor.positions.omni import (
    Markers,
    Omni,
    TimedVideo,
    VideoWithAudio,
    audio_lengths,
    check_omni,
    read_paces,
    text_between,
    timed_videos,
)
from phasor.positions.segments import Audio, Image, Segment, Text, Video
from phasor.positions.tokens import Positions, every_axis, grid, integers, packed, read_mask, span

_Placed = Segment | VideoWithAudio


def multimodal(segments: Iterable[Segment]) -> Positions:
    """Positions of text, images, videos and audio as in Qwen2-VL, 2.5-VL, 3-VL and Omni.

    ``start`` is one more than the largest coordinate so far on any axis, and 0 at first:

    * token ``j`` of text or audio is at ``start + j`` on all three axes;
    * a patch of an image in row ``i``, column ``j`` is at ``(start, start + i, start + j)``;
    * a patch of a video in frame ``k`` is at ``(start + time[k], start + i, start + j)``, where
      ``time[k]`` is ``k``, or ``k * seconds_per_frame * tokens_per_second`` truncated.

    The product is computed in float32, as in the reference code, so a time just below a whole
    number may be rounded up to it before truncation. Qwen3-VL writes a time stamp as text before
    every frame: pass each frame as ``Text`` and ``Image``. The next token of an answer is at
    ``positions.max() + 1``.

    transformers 5.23 continues after a video at ``start + max(height, width)`` however long the
    video lasts, so text after a long video repeats the times of its late frames. The paper and
    transformers 4 continue as above; `processed` supports both.

    Args:
        segments: The whole sequence, in order.

    Returns:
        int64 array ``[seq, 3]``, axis order t, h, w.

    Source: Qwen2-VL (2409.12191), section 2.1; Qwen2.5-VL (2502.13923), section 2.1.

    >>> multimodal([Text(2), Image(height=2, width=2), Text(1)]).T
    array([[0, 1, 2, 2, 2, 2, 4],
           [0, 1, 2, 2, 3, 3, 4],
           [0, 1, 2, 3, 2, 3, 4]])
    """
    return _place(_check_segments(segments), "time")


def _place(segments: Iterable[_Placed], after_video: str) -> Positions:
    blocks, start = [np.empty((0, 3), dtype=np.int64)], 0
    for segment in segments:
        block = _cells(segment)
        blocks.append(start + block)
        counted = block if after_video == "time" else block[:, 1:]
        if isinstance(segment, VideoWithAudio):
            # text continues after the row's last segment, which need not be the last in time
            is_last = segment.is_audio == segment.is_audio[-1]
            media = np.flatnonzero(~is_last)
            counted = block[media[-1] + 1 if len(media) else 0 :]
        start += counted.max(initial=-1).item() + 1
    return np.concatenate(blocks)


def processed(
    token_types: ArrayLike,
    image_grid_thw: ArrayLike | None = None,
    video_grid_thw: ArrayLike | None = None,
    *,
    mask: ArrayLike | None = None,
    cu_seqlens: ArrayLike | None = None,
    spatial_merge: int = 2,
    temporal_merge: int = 1,
    tokens_per_second: float | None = None,
    second_per_grid_ts: ArrayLike | None = None,
    after_video: Literal["size", "time"] | None = None,
    omni: Omni | None = None,
    use_audio_in_video: bool = False,
    audio_seqlens: ArrayLike | None = None,
    second_per_grids: ArrayLike | None = None,
) -> NDArray[Any]:
    """The positions of `multimodal` for a batch that a processor of transformers returned.

    Equal to ``get_rope_index`` of Qwen2-VL, Qwen2.5-VL, Qwen3-VL, GLM-4.1V and ERNIE 4.5 VL in
    transformers 5.23, and correct in two cases where that is wrong: adjacent images without a token
    in between keep their own grids, and each of several sequences packed into a row starts at 0.
    Frames separated by time stamps (Qwen3-VL, GLM-4.1V) count as images; their tokens show it.

    Pass ``omni`` for Qwen2.5-Omni or Qwen3-Omni (TMRoPE), which differ: the first truncates the
    times of frames to whole numbers and gives the two markers before a video with sound, and the
    two after it, one position; the second does neither. Results equal their ``get_rope_index``.

    Args:
        token_types: ``mm_token_type_ids`` ``[batch, seq]`` or ``[seq]``: 0 for text, 1 for an
            image, 2 for a video, 3 for audio. From ids: ``(ids == image_id) + 2 * (ids == video_id)
            + 3 * (ids == audio_id)``, unless videos use the image token, as in GLM.
        image_grid_thw: ``[images, 3]``: frames, rows and columns of patches, in the order of their
            tokens, row after row of the batch; None without images.
        video_grid_thw: ``[videos, 3]``, the same for videos.
        mask: ``[batch, seq]``: 1 for a token, 0 for padding on either side; padding is at 0.
        cu_seqlens: Boundaries of sequences packed into one row.
        spatial_merge: Patches that the vision tower merges into a token, per side.
        temporal_merge: Frames of a video merged into one: 2 in ERNIE 4.5 VL.
        tokens_per_second: As in `Video`, for Qwen2.5-VL; Omni models call it
            ``position_id_per_seconds`` (25 in Qwen2.5-Omni, 13 in Qwen3-Omni).
        second_per_grid_ts: Seconds between time steps ``[videos]``; 1 by default.
        after_video: Where text after a video continues: "size", after its rows and columns, as in
            transformers 5.23; or "time", also after its last frame, as in the papers, transformers
            4 and vLLM. They differ if a video lasts longer than it is wide. None is "size"; for
            Omni models it is "time", the only choice.
        omni: ``"qwen2.5"`` or ``"qwen3"`` for a model with sound; None for the others.
        use_audio_in_video: Whether alternating video and audio tokens are a video and its sound,
            which start at the same position.
        audio_seqlens: Frames of each audio's features ``[audios]``, in the order of their tokens.
            Optional; used to check the number of audio tokens.
        second_per_grids: Seconds between time steps ``[videos]`` in an Omni model.

    Returns:
        int64 ``[batch, seq, 3]`` or ``[seq, 3]``, axis order t, h, w; float64 where times are not
        truncated (``omni="qwen3"``). The next token of an answer is at the largest coordinate of
        its row + 1.

    Raises:
        PositionError: If tokens of an image, a video or audio are missing, or their number differs
            from the grids.

    >>> processed([[0, 1, 1, 1, 1, 0]], [[1, 4, 4]])[0].T
    array([[0, 1, 1, 1, 1, 3],
           [0, 1, 1, 2, 2, 3],
           [0, 1, 2, 1, 2, 3]])
    """
    types = integers("token_types", token_types, "[..., seq]")
    real = np.ones_like(types) if mask is None else read_mask(mask)
    if types.ndim > 2 or real.shape != types.shape:
        raise PositionError(
            f"token_types must be [batch, seq] or [seq], and mask the same, got {list(types.shape)}"
            f" and {list(real.shape)}"
        )
    if not ((types >= 0) & (types <= 3)).all():
        raise PositionError(
            f"token_types must hold 0 (text), 1 (image), 2 (video) and 3 (audio), got "
            f"{types[(types < 0) | (types > 3)][0]}; a processor returns them as mm_token_type_ids"
        )
    if after_video not in ("size", "time", None):
        raise PositionError(f"after_video must be 'size' or 'time', got {short_repr(after_video)}")
    joins = boolean("use_audio_in_video", use_audio_in_video)
    check_omni(omni, after_video, joins, audio_seqlens, second_per_grids, second_per_grid_ts)
    after_video = "time" if omni else after_video or "size"
    merges = [
        whole("temporal_merge", temporal_merge, least=1, error=PositionError),
        *[whole("spatial_merge", spatial_merge, least=1, error=PositionError)] * 2,
    ]
    grids = _grids("video_grid_thw", video_grid_thw, merges)
    if omni:
        videos = timed_videos(grids, tokens_per_second, second_per_grids, omni)
    else:
        videos = _videos(grids, tokens_per_second, second_per_grid_ts)
    grids = _grids("image_grid_thw", image_grid_thw, [1, *merges[1:]])
    # frames of an image are one position apart, or one second
    images = [Video(frames=frames, height=height, width=width) for frames, height, width in grids]
    if omni and any(image.frames > 1 for image in images):
        images = timed_videos(grids, tokens_per_second, np.ones(len(grids)), omni)
    lengths = audio_lengths(audio_seqlens, omni)
    waiting: dict[str, Iterator[Any]] = {"image": iter(images), "video": iter(videos)}
    if audio_seqlens is not None:
        waiting["audio"] = iter(lengths)
    rows = np.atleast_2d(types)
    placed = np.zeros((*rows.shape, 3), dtype=np.float64 if omni == "qwen3" else np.int64)
    for row, tokens in enumerate(real.reshape(rows.shape)):
        for begin, end in _bounds(cu_seqlens, rows.shape):
            places = begin + np.flatnonzero(tokens[begin:end])
            segments = _read_segments(rows[row], places, waiting, omni, joins)
            placed[row, places] = _place(segments, after_video)
    for kind, count in (("image", len(images)), ("video", len(videos)), ("audio", len(lengths))):
        rest = len(list(waiting.get(kind, ())))
        if rest:
            name = "audio_seqlens" if kind == "audio" else f"{kind}_grid_thw"
            raise PositionError(
                f"{name} must hold the {kind}s that have tokens in token_types ({count - rest}), "
                f"got {count}; was the sequence cut, or its padding masked too far?"
            )
    return placed.reshape(*types.shape, 3)


def _grids(name: str, grids: ArrayLike | None, merges: Sequence[int]) -> list[list[int]]:
    """Frames, rows and columns of tokens, computed from the numbers of patches."""
    patches = integers(name, () if grids is None else grids, "[..., seq]")
    if patches.size == 0:
        return []
    if patches.ndim != 2 or patches.shape[1] != 3:
        raise PositionError(f"{name} must be [{name[:5]}s, 3], got {list(patches.shape)}")
    merged = patches // merges
    is_bad = (merged < 1).any(1) | (patches % merges)[:, 1:].any(1)
    if is_bad.any():
        raise PositionError(
            f"{name} must hold at least {merges[0]} frames, and rows and columns in multiples of "
            f"{merges[1]} patches, got {patches[is_bad][0].tolist()}"
        )
    return merged.tolist()


def _videos(
    grids: Sequence[Sequence[int]], tokens_per_second: float | None, seconds: ArrayLike | None
) -> list[Video]:
    paces: list[Any] = [*read_paces("second_per_grid_ts", seconds, len(grids))]
    if paces and tokens_per_second is None:
        raise PositionError("tokens_per_second must be given with second_per_grid_ts, got None")
    paces = paces or [None if tokens_per_second is None else 1.0] * len(grids)
    settings = {"tokens_per_second": tokens_per_second}
    return [
        Video(frames=frames, height=height, width=width, seconds_per_frame=pace, **settings)
        for (frames, height, width), pace in zip(grids, paces, strict=True)
    ]


def _bounds(cu_seqlens: ArrayLike | None, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """The bounds of each sequence in a row."""
    if cu_seqlens is None:
        return [(0, shape[1])]
    length = len(packed(cu_seqlens))
    if shape != (1, length):
        raise PositionError(
            f"cu_seqlens must be the boundaries of one row of token_types, got {length} tokens for "
            f"{list(shape)}"
        )
    return list(itertools.pairwise(np.asarray(cu_seqlens).tolist()))


def _read_segments(
    types: Positions,
    places: Positions,
    waiting: dict[str, Iterator[Any]],
    omni: Omni | None,
    joins: bool,
) -> Iterator[_Placed]:
    """The segments of one sequence; ``places`` are the indices of its tokens in the row."""
    frame, left = (
        Image(height=1, width=1),
        0,
    )  # the remaining frames of a video with time stamps between its frames
    kinds = types[places]
    if joins:
        kinds = np.where(kinds == 3, 2, kinds)
    runs = np.split(places, np.flatnonzero(np.diff(kinds)) + 1)
    mixed = [joins and {2, 3} <= set(types[run].tolist()) for run in runs]
    shared = [omni == "qwen2.5" and is_mixed for is_mixed in (False, *mixed, False)]
    for i, run in enumerate(runs):
        kind = ("text", "image", "video", "audio")[types[run[0]]] if len(run) else "text"
        if kind == "text":
            yield text_between(len(run), shared[i], shared[i + 2])
            continue
        count = int((types[run] == 3).sum())
        if count and "audio" in waiting and next(waiting["audio"], 0) != count:
            raise PositionError(
                f"audio_seqlens must match the audio at token {run[0]}, which has {count} "
                "tokens; was the sequence cut?"
            )
        if kind == "audio" and not mixed[i]:
            yield Audio(count)
            continue
        if mixed[i]:
            video, frames = next(waiting["video"], None), len(run) - count
            if video is None or math.prod(_sizes(video)) != frames:
                raise PositionError(
                    f"video_grid_thw must match the video with sound at token {run[0]}, which "
                    f"has {frames} tokens of video; was the sequence cut?"
                )
            yield VideoWithAudio(video, types[run] == 3)
            continue
        while len(run):
            if kind == "video" and left:
                segment, left = frame, left - 1
            elif (segment := next(waiting[kind], None)) is None:
                raise PositionError(
                    f"{kind}_grid_thw must hold every {kind}, but has no row for the {kind} at "
                    f"token {run[0]}"
                )
            count, area = math.prod(_sizes(segment)), segment.height * segment.width
            if kind == "video" and len(run) == area < count:
                frame, left = Image(height=segment.height, width=segment.width), count // area
                continue
            if len(run) < count:
                raise PositionError(
                    f"token_types must hold all {count} tokens of the {kind} at token {run[0]}, "
                    f"got {len(run)}; was the sequence cut?"
                )
            yield segment
            run = run[count:]
    if left:
        raise PositionError(
            f"token_types must hold every frame of a video, but the last {left} frames of the "
            "last video are missing; was the sequence cut?"
        )


def videorope(segments: Iterable[Segment], *, delta: float = 2.0) -> NDArray[np.float64]:
    """Positions of text, images and videos as in VideoRoPE, centred on the diagonal of time.

    ``start`` is one more than the last ``t`` so far, and 0 at first:

    * text token ``j`` is at ``start + j`` on all three axes;
    * the patch in frame ``k``, row ``i``, column ``j`` is at ``t = start + k * delta``,
      ``h = t + i - floor((height - 1) / 2)`` and ``w = t + j - floor((width - 1) / 2)``;
      an image is one frame.

    So the middle of a frame has the position of text at that time. Rows above and columns to the
    left are smaller than ``t`` (negative in an image that opens the sequence), and text after a
    frame may repeat coordinates of the frame's far corner. The next token of an answer is at
    ``positions[-1, 0] + 1``.

    Args:
        segments: The whole sequence, in order. Videos must not have seconds: ``delta`` alone sets
            the distance between frames.
        delta: Positions from one frame to the next, positive; the paper uses 2.

    Returns:
        float64 array ``[seq, 3]``, axis order t, h, w; float64 whatever the value of ``delta``.

    Source: VideoRoPE (2502.05173), with the centre rounded as in the authors' code.

    >>> videorope([Text(1), Video(frames=2, height=1, width=3), Text(1)]).T
    array([[0., 1., 1., 1., 3., 3., 3., 4.],
           [0., 1., 1., 1., 3., 3., 3., 4.],
           [0., 0., 1., 2., 2., 3., 4., 4.]])
    """
    delta = number("delta", delta, above=0, error=PositionError)
    blocks, start = [np.empty((0, 3))], 0.0
    for i, segment in enumerate(_check_segments(segments)):
        block = _cells(segment).astype(np.float64)
        if isinstance(segment, Video) and segment.seconds_per_frame is not None:
            raise PositionError(
                f"segments[{i}] must be a video without seconds_per_frame, got "
                f"{short_repr(segment)}; in videorope frames are delta apart"
            )
        if not isinstance(segment, Text | Audio):
            block[:, 0] *= delta
            middle = (segment.height - 1) // 2, (segment.width - 1) // 2
            block[:, 1:] = block[:, :1] + block[:, 1:] - middle
        blocks.append(start + block)
        start += float(block[:, 0].max(initial=-1.0)) + 1.0
    return np.concatenate(blocks)


def _check_segments(segments: Any) -> list[Segment]:
    expected = "a list of Text, Image, Video and Audio", "a Text, an Image, a Video or an Audio"
    if not hasattr(segments, "__iter__"):
        raise PositionError(f"segments must be {expected[0]}, got {short_repr(segments)}")
    items: list[Any] = list(segments)
    for i, item in enumerate(items):
        if not isinstance(item, Segment):
            raise PositionError(f"segments[{i}] must be {expected[1]}, got {short_repr(item)}")
    return items


def _sizes(segment: Image | Video) -> tuple[int, int, int]:
    frames = segment.frames if isinstance(segment, Video) else 1
    return frames, segment.height, segment.width


def _cells(segment: _Placed) -> NDArray[Any]:
    """Coordinates of every token, from 0 on: (time, row, column), ``[tokens, 3]``."""
    if isinstance(segment, VideoWithAudio):
        video_cells = _cells(segment.video)
        cells = np.empty((len(segment.is_audio), 3), dtype=video_cells.dtype)
        cells[~segment.is_audio] = video_cells
        cells[segment.is_audio] = every_axis(span(int(segment.is_audio.sum())), 3)
        return cells
    if isinstance(segment, Text | Audio):
        tokens = span(segment.length)
        if isinstance(segment, Markers):
            tokens = tokens - segment.first_twice * (tokens > 0)
            tokens[-1] -= segment.last_twice
        return every_axis(tokens, 3)
    cells = grid(*_sizes(segment))
    if isinstance(segment, TimedVideo):
        dtype = np.float32 if segment.is_cut else np.float64
        seconds, pace = dtype(segment.seconds_per_frame), dtype(segment.tokens_per_second)
        times = cells[:, 0].astype(dtype) * seconds * pace
        if segment.is_cut:
            cells[:, 0] = times.astype(np.int64)
            return cells
        return np.column_stack((times, cells[:, 1:]))
    if isinstance(segment, Video) and segment.seconds_per_frame is not None:
        step = np.float32(segment.tokens_per_second) * np.float32(segment.seconds_per_frame)
        cells[:, 0] = (cells[:, 0].astype(np.float32) * step).astype(np.int64)
    return cells
