"""Positions of tokens, for every way to lay out a batch.

The functions take lengths, boundaries, masks and grid sizes, and return int64 arrays ``[...,
seq]``, or ``[..., seq, n_axes]`` where a token has several coordinates (axis order t, h, w).
`phasor.torch.positions` has the same functions for tensors, on their device.

A sequence of text, images, videos and sound is a list of `Text`, `Image`, `Video` and `Audio`. Grid
sizes count the tokens that the language model sees, after the vision tower has merged patches;
markers around an image are text tokens. `processed` takes the output of a processor instead.

Arguments that are not whole numbers, out of range or of another shape raise `PositionError`.
"""

from phasor.positions.segments import Audio, Image, Segment, Text, Video
from phasor.positions.tokens import (
    Positions,
    cached,
    chunks_of_rank,
    context_parallel,
    every_axis,
    grid,
    layered,
    packed,
    padded,
    span,
    text_behind,
)
from phasor.positions.vision import multimodal, processed, videorope

__all__ = [
    "Audio",
    "Image",
    "Positions",
    "Segment",
    "Text",
    "Video",
    "cached",
    "chunks_of_rank",
    "context_parallel",
    "every_axis",
    "grid",
    "layered",
    "multimodal",
    "packed",
    "padded",
    "processed",
    "span",
    "text_behind",
    "videorope",
]
