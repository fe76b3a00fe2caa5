"""Image and video tokens stand where the papers and the reference models put them."""

from __future__ import annotations

import struct
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasor.errors import PositionError
from phasor.positions import Image, Segment, Text, Video, multimodal, videorope

Cell = tuple[float, float, float]

TEXTS = st.builds(Text, st.integers(0, 6))
SIZES = st.integers(1, 5)
IMAGES = st.builds(Image, height=SIZES, width=SIZES)
FRAMES = st.builds(Video, frames=SIZES, height=SIZES, width=SIZES)
TIMED = st.builds(
    Video,
    frames=st.integers(1, 60),
    height=st.integers(1, 2),
    width=st.integers(1, 2),
    seconds_per_frame=st.sampled_from([2 / fps for fps in (1, 2, 3, 8, 12, 24, 25, 29.97, 60)])
    | st.floats(0.01, 5.0),
    tokens_per_second=st.sampled_from([2, 4, 25]) | st.integers(1, 60),
)
UNTIMED_SEQUENCES = st.lists(TEXTS | IMAGES | FRAMES, max_size=6)
SEQUENCES = st.lists(TEXTS | IMAGES | FRAMES | TIMED, max_size=6)
# eighths are exact in float64, and so is every sum of them in these tests
EIGHTHS = st.integers(1, 40).map(lambda n: Fraction(n, 8))


def float32(value: float) -> float:
    """The float32 nearest to ``value``, without NumPy."""
    return struct.unpack("f", struct.pack("f", value))[0]


def shape(segment: Image | Video) -> tuple[int, int, int]:
    """Frames, rows and columns of what is not text."""
    frames = segment.frames if isinstance(segment, Video) else 1
    return frames, segment.height, segment.width


def mrope_oracle(segments: list[Segment]) -> list[Cell]:
    """M-RoPE token by token, in Python numbers."""
    placed: list[Cell] = []
    for segment in segments:
        start = max((max(cell) for cell in placed), default=-1) + 1
        if isinstance(segment, Text):
            placed += [(start + j,) * 3 for j in range(segment.length)]
            continue
        step = 1.0
        if isinstance(segment, Video) and segment.seconds_per_frame is not None:
            # a product of two float32 is exact in float64, so this rounds once, as float32 does
            step = float32(float32(segment.tokens_per_second) * float32(segment.seconds_per_frame))
        frames, height, width = shape(segment)
        for k in range(frames):
            for i in range(height):
                for j in range(width):
                    placed.append((start + int(float32(k * step)), start + i, start + j))
    return placed


def videorope_oracle(segments: list[Segment], delta: Fraction) -> list[Cell]:
    """VideoRoPE token by token, in exact fractions."""
    placed: list[Cell] = []
    for segment in segments:
        start = placed[-1][0] + 1 if placed else Fraction(0)
        if isinstance(segment, Text):
            placed += [(start + j,) * 3 for j in range(segment.length)]
            continue
        frames, height, width = shape(segment)
        for k in range(frames):
            for i in range(height):
                for j in range(width):
                    t = start + k * delta
                    placed.append((t, t + i - (height - 1) // 2, t + j - (width - 1) // 2))
    return placed


# a case: the rule, its segments, and where they stand on each axis
WRITTEN: dict[str, tuple[Any, list[Segment], list[list[float]]]] = {
    "an image holds its time still; text goes on after its longest side": (
        multimodal,
        [Text(2), Image(height=2, width=3), Text(2)],
        [
            [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
            [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
            [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
        ],
    ),
    "Qwen2-VL's reference code puts frames one position apart": (
        multimodal,
        [Video(frames=3, height=2, width=2), Text(5)],
        [
            [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 4, 5, 6, 7],
            [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 3, 4, 5, 6, 7],
            [0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 3, 4, 5, 6, 7],
        ],
    ),
    "Qwen2.5-VL's puts frames of 2 seconds 50 apart, 25 positions a second": (
        multimodal,
        [Video(frames=3, height=2, width=2, seconds_per_frame=2.0, tokens_per_second=25), Text(5)],
        [
            [0, 0, 0, 0, 50, 50, 50, 50, 100, 100, 100, 100, 101, 102, 103, 104, 105],
            [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 101, 102, 103, 104, 105],
            [0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 101, 102, 103, 104, 105],
        ],
    ),
    "Qwen3-VL sees a video as images, each after a time stamp of two tokens": (
        multimodal,
        [*[Text(2), Image(height=1, width=2)] * 2, Text(1)],
        [[0, 1, 2, 2, 4, 5, 6, 6, 8], [0, 1, 2, 2, 4, 5, 6, 6, 8], [0, 1, 2, 3, 4, 5, 6, 7, 8]],
    ),
    "VideoRoPE has times 1 and 3 after one token, centred on row 0 and column 1": (
        videorope,
        [Text(1), Video(frames=2, height=2, width=3), Text(2)],
        [
            [0, 1, 1, 1, 1, 1, 1, 3, 3, 3, 3, 3, 3, 4, 5],
            [0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 4, 5],
            [0, 0, 1, 2, 0, 1, 2, 2, 3, 4, 2, 3, 4, 4, 5],
        ],
    ),
    "VideoRoPE puts rows above the centre of a first image before time 0": (
        videorope,
        [Image(height=3, width=3), Text(1)],
        [
            [0, 0, 0, 0, 0, 0, 0, 0, 0, 1],
            [-1, -1, -1, 0, 0, 0, 1, 1, 1, 1],
            [-1, 0, 1, -1, 0, 1, -1, 0, 1, 1],
        ],
    ),
}


@pytest.mark.parametrize(("place", "segments", "axes"), WRITTEN.values(), ids=WRITTEN)
def test_segments_stand_as_written(
    place: Any, segments: list[Segment], axes: list[list[float]]
) -> None:
    """By the papers and the reference code, one axis a line."""
    assert place(segments).T.tolist() == axes


@pytest.mark.parametrize(
    ("seconds", "per_second", "expected"),
    [
        pytest.param(0.5, 2, {1: 1, 2: 2, 3: 3}, id="half seconds"),
        pytest.param(0.75, 2, {1: 1, 2: 3, 3: 4, 4: 6}, id="fractions are cut"),
        pytest.param(0.01, 2, {1: 0, 49: 0, 50: 1}, id="frames may share a time"),
        pytest.param(0.7, 2, {5: 7, 44: 61, 45: 63, 46: 64}, id="float64 would say 62 at 45"),
        pytest.param(2 / 3, 25, {1: 16, 3: 50, 27: 450}, id="float64 would say 49 at 3"),
    ],
)
def test_times_are_cut_from_a_float32_product(
    seconds: float, per_second: int, expected: dict[int, int]
) -> None:
    """Times that transformers 5.23 gives to these frames."""
    video = Video(
        frames=60, height=1, width=1, seconds_per_frame=seconds, tokens_per_second=per_second
    )
    times = multimodal([Text(3), video])[3:, 0] - 3
    assert {k: times[k] for k in expected} == expected


@given(segments=SEQUENCES)
def test_every_token_stands_where_a_plain_loop_puts_it(segments: list[Segment]) -> None:
    """Any mixture of segments, empty text included, and no segments at all."""
    actual = multimodal(segments)
    assert actual.dtype == np.int64
    assert actual.shape[1] == 3
    assert [tuple(cell) for cell in actual.tolist()] == mrope_oracle(segments)


@given(segments=UNTIMED_SEQUENCES, delta=EIGHTHS)
def test_every_videorope_token_stands_where_fractions_put_it(
    segments: list[Segment], delta: Fraction
) -> None:
    """Exactly so where float64 holds the spacing exactly."""
    actual = videorope(segments, delta=float(delta))
    assert actual.shape[1] == 3
    assert [tuple(cell) for cell in actual.tolist()] == videorope_oracle(segments, delta)


@given(segments=UNTIMED_SEQUENCES, delta=st.floats(0.01, 10.0))
def test_any_spacing_is_right_to_a_few_roundings(segments: list[Segment], delta: float) -> None:
    """One rounding a product or sum: 3 inside a segment, 2 more for every segment before it."""
    exact = videorope_oracle(segments, Fraction(delta))
    reach = max((abs(float(value)) for cell in exact for value in cell), default=0.0)
    bound = (3 + 2 * len(segments)) * 2.0**-53 * (reach + 10)
    error = [
        abs(Fraction(ours) - value)
        for row, cell in zip(videorope(segments, delta=delta).tolist(), exact, strict=True)
        for ours, value in zip(row, cell, strict=True)
    ]
    assert max(error, default=0) <= bound


@pytest.mark.parametrize("delta", [2, 2.0, 1.5, np.float32(0.5), Fraction(1, 2)])
def test_videorope_is_float64_whatever_the_spacing(delta: float) -> None:
    """The dtype never depends on a value."""
    assert videorope([Text(1), Video(frames=2, height=1, width=1)], delta=delta).dtype == np.float64
    assert videorope([], delta=delta).dtype == np.float64


def test_segments_keep_plain_numbers() -> None:
    """A NumPy size is stored as an int, so equal segments are equal and hash alike."""
    segment = Video(frames=np.int32(2), height=np.int64(3), width=4)
    assert segment == Video(frames=2, height=3, width=4)
    assert type(segment.frames) is int
    assert hash(segment) == hash(Video(frames=2, height=3, width=4))


def frame(**said: Any) -> Video:
    """A video of one cell, but for what is said."""
    return Video(**{"frames": 1, "height": 1, "width": 1} | said)


TOGETHER = "give both, or neither for frames one position apart"
SECONDS = "must be a finite number > 0 and <= 1e+09, got"
SEGMENT = "must be a Text, an Image, a Video or an Audio, got"
ERRORS = {
    "length must be a whole number >= 0, got -3": lambda: Text(-3),
    "length must be a whole number >= 0, got True": lambda: Text(True),
    "height must be a whole number >= 1, got 0": lambda: Image(height=0, width=2),
    "width must be a whole number >= 1, got 1.5": lambda: Image(height=2, width=1.5),
    "frames must be a whole number >= 1, got 0": lambda: frame(frames=0),
    f"seconds_per_frame and tokens_per_second belong together, got 0.5 and None; {TOGETHER}": (
        lambda: frame(seconds_per_frame=0.5)
    ),
    f"seconds_per_frame and tokens_per_second belong together, got None and 4; {TOGETHER}": (
        lambda: frame(tokens_per_second=4)
    ),
    f"seconds_per_frame {SECONDS} 0": lambda: frame(seconds_per_frame=0, tokens_per_second=4),
    f"tokens_per_second {SECONDS} nan": (
        lambda: frame(seconds_per_frame=1, tokens_per_second=float("nan"))
    ),
    "frames * seconds_per_frame * tokens_per_second must stay below 2**63, "
    "got 10 * 1e+09 * 1e+09": (
        lambda: frame(frames=10, seconds_per_frame=1e9, tokens_per_second=1e9)
    ),
    "segments must be a list of Text, Image, Video and Audio, got Text(length=5)": (
        lambda: multimodal(Text(5))
    ),
    f"segments[1] {SEGMENT} 3": lambda: multimodal([Text(5), 3]),
    f"segments[0] {SEGMENT} <class 'phasor.positions.segments.Text'>": lambda: videorope([Text]),
    "segments[1] must be a video without seconds_per_frame, "
    "got Video(frames=1, height=1, width=1, seconds_per_frame=1.0, tokens_per_second=2.0); "
    "in videorope frames are delta apart": (
        lambda: videorope([Text(1), frame(seconds_per_frame=1.0, tokens_per_second=2)])
    ),
    "delta must be a finite number > 0, got -2.0": lambda: videorope([], delta=-2.0),
    "delta must be a finite number > 0, got True": lambda: videorope([], delta=True),
}


@pytest.mark.parametrize("message", ERRORS)
def test_an_argument_that_means_nothing_is_refused_by_name(message: str) -> None:
    """Each error names the argument, what was expected and what came."""
    with pytest.raises(PositionError) as caught:
        ERRORS[message]()
    assert str(caught.value) == message
