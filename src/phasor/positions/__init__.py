"""Positions of tokens: integers for every way a batch is laid out.

In come lengths, boundaries, masks and grid sizes; out come int64 arrays ``[..., seq]``, or
``[..., seq, n_axes]`` where a token has several coordinates (axis order t, h, w). The same names
for tensors, on their device, are in `phasor.torch.positions`.

A sequence of text, images and videos is a list of `Text`, `Image` and `Video`, whose grid sizes
count the tokens that the language model sees, so after the vision tower has merged patches;
markers around an image are tokens of text. `processed` reads it off what a processor returns.

Arguments that are not whole numbers, out of range or of another shape raise `PositionError`.
"""

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
from phasor.positions.vision import Image, Segment, Text, Video, multimodal, processed, videorope

__all__ = [
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
