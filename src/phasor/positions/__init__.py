"""Positions of tokens: integers for every way a batch is laid out.

In come lengths, boundaries, masks and grid sizes; out come int64 arrays ``[..., seq]``, or
``[..., seq, n_axes]`` where a token has several coordinates (axis order t, h, w). The same names
for tensors, on their device, are in `phasor.torch.positions`.

A sequence of text, images, videos and sound is a list of `Text`, `Image`, `Video` and `Audio`. Grid
sizes count the tokens that the language model sees, so after the vision tower has merged patches;
markers around an image are tokens of text. `processed` reads it off what a processor returns.

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
    packed,
    padded,
    span,
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
    "multimodal",
    "packed",
    "padded",
    "processed",
    "span",
    "videorope",
]
