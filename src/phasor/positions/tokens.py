"""Positions of text and of grids, from lengths, boundaries, masks and sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phasor._checks import number, short_repr, unmasked, whole
from phasor.errors import PositionError

Positions = NDArray[np.int64]

_FIRST, _LAST = -(2**63), 2**63 - 1
_MOST_POSITIONS = _LAST // 8  # its size in bytes must fit in int64 too


def span(length: int, start: int = 0) -> Positions:
    """Consecutive positions ``start, start + 1, ..., start + length - 1`` of one sequence.

    Args:
        length: Number of tokens, at least 0.
        start: Position of the first token; any int64, also negative.

    Returns:
        int64 array ``[length]``.

    >>> span(4, start=10)
    array([10, 11, 12, 13])
    """
    length = whole("length", length, least=0, error=PositionError)
    start = whole("start", start, least=_FIRST, error=PositionError)
    return _count_from("start", start, "length", length)


def packed(cu_seqlens: ArrayLike) -> Positions:
    """Positions of packed sequences: each sequence starts at 0 again.

    Token ``j`` of the pack is at position ``j - cu_seqlens[i]`` if it belongs to sequence ``i``.

    Args:
        cu_seqlens: Boundaries ``[n_sequences + 1]`` as for variable-length attention: 0 first,
            never decreasing, the total number of tokens last.

    Returns:
        int64 array ``[cu_seqlens[-1]]``.

    >>> packed([0, 3, 5])
    array([0, 1, 2, 0, 1])
    """
    bounds = integers("cu_seqlens", cu_seqlens, "[n_sequences + 1]")
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
    """Positions of padded rows: tokens of a row are at 0, 1, 2, ..., padding is at 0.

    Padding may be on the left, on the right or in between. Its position only fills the array:
    attention never reads it.

    Args:
        mask: Attention mask ``[..., seq]``, bools or integers: 1 for a token, 0 for padding. A mask
            to be added to scores (floats, 0 and -inf) means the opposite and is refused.

    Returns:
        int64 array of the shape of ``mask``.

    >>> padded([[0, 0, 1, 1, 1], [1, 1, 0, 0, 0]])
    array([[0, 0, 0, 1, 2],
           [0, 1, 0, 0, 0]])
    """
    tokens = read_mask(mask)
    return (np.cumsum(tokens, axis=-1) - 1) * tokens


def read_mask(mask: ArrayLike) -> Positions:
    """An attention mask of bools or integers, ``[..., seq]``, as 0 and 1."""
    tokens = integers("mask", mask, "[..., seq]", kinds="biu")
    invalid = tokens[(tokens != 0) & (tokens != 1)]
    if invalid.size:
        raise PositionError(
            f"mask must hold only 0 (padding) and 1 (token), got {invalid[0]}; if it numbers "
            "packed sequences, give their boundaries instead, as cu_seqlens"
        )
    return tokens


def cached(lengths: ArrayLike, new_tokens: int) -> Positions:
    """Positions of the tokens that follow caches of different lengths.

    New token ``j`` of row ``i`` is at position ``lengths[i] + j``.

    Args:
        lengths: Tokens already in each row's cache ``[batch]``. For a row with padding on the left,
            subtract the padding, so that its first real token is at 0; the length is negative while
            only padding is cached.
        new_tokens: Number of tokens added to every row.

    Returns:
        int64 array ``[batch, new_tokens]``.

    >>> cached([7, 0], new_tokens=3)
    array([[7, 8, 9],
           [0, 1, 2]])
    >>> cached([-2], new_tokens=4)  # first four columns, two of them padding
    array([[-2, -1,  0,  1]])
    """
    starts = integers("lengths", lengths, "[batch]")
    new_tokens = whole("new_tokens", new_tokens, least=0, error=PositionError)
    longest = int(starts.max(initial=0))
    return starts[:, None] + (_count_from("lengths", longest, "new_tokens", new_tokens) - longest)


def grid(*sizes: int, start: Sequence[float] = (), step: Sequence[float] = ()) -> NDArray[Any]:
    """Coordinates of every cell of a grid in row-major order, the last axis varying fastest.

    Cell ``i`` along an axis is at ``start + i * step``.

    Args:
        sizes: Cells along each axis: ``grid(h, w)`` for an image, ``grid(t, h, w)`` for a video.
        start: The first coordinate of each axis; 0 unless given. Text before an image, or a
            reference image, moves it.
        step: The distance between cells along each axis; 1 unless given. Frames at another rate
            are ``rate that was trained / rate`` apart, and cells at another resolution may keep the
            range that was trained: ``trained size / size``.

    Returns:
        ``[prod(sizes), len(sizes)]``: int64, or float64 if a start or a step is a fraction.

    >>> grid(2, 3).T
    array([[0, 0, 0, 1, 1, 1],
           [0, 1, 2, 0, 1, 2]])
    >>> grid(2, 2, start=(5, 0), step=(1, 0.5)).T
    array([[5. , 5. , 6. , 6. ],
           [0. , 0.5, 0. , 0.5]])
    """
    if not sizes:
        raise PositionError("sizes must name at least one axis, got none")
    shape = [whole(f"sizes[{i}]", n, least=0, error=PositionError) for i, n in enumerate(sizes)]
    first = _axis_values("start", start, len(shape), default=0)
    steps = _axis_values("step", step, len(shape), default=1)
    cells = _consecutive("the product of sizes", math.prod(shape))
    coordinates = np.stack(np.unravel_index(cells, shape), axis=-1)
    return coordinates if not start and not step else first + coordinates * steps


def _axis_values(name: str, values: Sequence[float], n_axes: int, default: int) -> NDArray[Any]:
    """A number for each axis, as int64 if all are whole."""
    items: list[Any] = list(values) if hasattr(values, "__iter__") else [values]
    items = items or [default] * n_axes
    if len(items) != n_axes:
        raise PositionError(
            f"{name} must have a number for each of {n_axes} axes, got {short_repr(values)}"
        )
    checked = [number(f"{name}[{i}]", x, error=PositionError) for i, x in enumerate(items)]
    is_whole = all(x % 1 == 0 and abs(x) < 2**53 for x in checked)
    return np.array(checked, dtype=np.int64 if is_whole else np.float64)


def layered(
    sizes: Iterable[tuple[int, int]], *, layers: Iterable[int] | None = None, centred: bool = False
) -> Positions:
    """Coordinates of several images: the layer, the row and the column of every patch.

    Image models tell images of one sequence apart by the first axis: an image and its references
    (FLUX.1 Kontext: layers 0, 1; FLUX.2: 0, 10, 20, ...), or transparent layers
    (Qwen-Image-Layered: 0, 1, ..., and -1 for the image that they add up to).

    Args:
        sizes: Rows and columns of patches of each image, in the order of their tokens.
        layers: The first coordinate of each image; 0, 1, 2, ... unless given.
        centred: Whether rows and columns are counted from the middle of each image, as in
            Qwen-Image: ``h`` rows are ``-(h - h // 2)`` to ``h // 2 - 1``.

    Returns:
        int64 array ``[seq, 3]``, image after image, each in row-major order.

    >>> layered([(1, 3), (1, 2)], layers=[0, -1], centred=True).T
    array([[ 0,  0,  0, -1, -1],
           [-1, -1, -1, -1, -1],
           [-2, -1,  0, -1,  0]])
    """
    images: list[Any] = list(sizes) if hasattr(sizes, "__iter__") else [sizes]
    for i, size in enumerate(images):
        if not hasattr(size, "__len__") or len(size) != 2:
            raise PositionError(
                f"sizes[{i}] must be the rows and columns of an image, such as (32, 32), got "
                f"{short_repr(size)}"
            )
    first = integers("layers", range(len(images)) if layers is None else [*layers], "[images]")
    if len(first) != len(images):
        raise PositionError(
            f"layers must name a layer for each of {len(images)} images, got {len(first)}"
        )
    if not isinstance(cast(object, centred), bool):
        raise PositionError(f"centred must be True or False, got {short_repr(centred)}")
    blocks = [np.empty((0, 3), np.int64)]
    for layer, size in zip(first, images, strict=True):
        rows_and_columns = grid(*size)
        if centred:
            rows_and_columns -= [n - n // 2 for n in size]
        block = np.empty((len(rows_and_columns), 3), np.int64)
        block[:, 0], block[:, 1:] = layer, rows_and_columns
        blocks.append(block)
    return np.concatenate(blocks)


def text_behind(positions: ArrayLike, length: int) -> Positions:
    """Positions of text behind images: the same on every axis, after the largest coordinate.

    As in Qwen-Image and Qwen-Image-Layered. The text of FLUX and HunyuanVideo is at 0 on every axis
    instead, or is not rotated.

    Args:
        positions: Coordinates of the images, whole numbers ``[seq, n_axes]``.
        length: Number of text tokens.

    Returns:
        int64 array ``[length, n_axes]``.

    >>> text_behind(layered([(4, 6)], centred=True), 2)
    array([[3, 3, 3],
           [4, 4, 4]])
    """
    before = integers("positions", positions, "[..., seq]")
    if before.ndim != 2:
        raise PositionError(
            f"positions must be [seq, n_axes], the coordinates of images, got {list(before.shape)}"
        )
    return every_axis(span(length, start=int(before.max(initial=-1)) + 1), before.shape[1])


def every_axis(positions: ArrayLike, n_axes: int) -> Positions:
    """The same position on every axis, as text has in a rope of several axes.

    Args:
        positions: Whole numbers ``[..., seq]``.
        n_axes: Number of axes of the rope, at least 1.

    Returns:
        int64 array ``[..., seq, n_axes]``.

    >>> every_axis([0, 1, 5], n_axes=2)
    array([[0, 0],
           [1, 1],
           [5, 5]])
    """
    coordinates = integers("positions", positions, "[..., seq]")
    n_axes = whole("n_axes", n_axes, least=1, error=PositionError)
    return np.repeat(coordinates[..., None], n_axes, axis=-1)


def context_parallel(
    length: int, rank: int, world_size: int, layout: Literal["contiguous", "zigzag"]
) -> Positions:
    """Positions of the tokens that one rank holds when a sequence is shared between ranks.

    ``"contiguous"`` splits the sequence into ``world_size`` chunks; rank ``r`` holds chunk
    ``r``. ``"zigzag"`` splits it into ``2 * world_size`` chunks; rank ``r`` holds chunk ``r`` and
    chunk ``2 * world_size - 1 - r``, an early and a late one, so that all ranks do the same work
    under a causal mask (Llama 3, 2407.21783, section 3.3.2).

    The result also indexes the sequence: ``x[positions]`` are the tokens of this rank.

    Args:
        length: Tokens in the whole sequence, a multiple of the number of chunks.
        rank: This rank, from 0.
        world_size: Number of ranks that share the sequence.
        layout: ``"contiguous"`` or ``"zigzag"``.

    Returns:
        int64 array ``[length // world_size]``, increasing.

    >>> context_parallel(8, rank=0, world_size=2, layout="zigzag")
    array([0, 1, 6, 7])
    """
    chunks = chunks_of_rank(length, rank, world_size, layout)
    return np.concatenate([span(len(chunk), chunk.start) for chunk in chunks])


def chunks_of_rank(length: int, rank: int, world_size: int, layout: str) -> list[range]:
    """The chunks of a sequence that a rank holds, with the errors of `context_parallel`.

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
        limit = f"{name} + {unit} - 1 must be at most 2**63 - 1"
        raise PositionError(f"{limit}, got {start} + {count} - 1")
    return _consecutive(unit, count) + start


def integers(name: str, values: Any, shape: str, kinds: str = "iu") -> Positions:
    """``values`` as an array ``[..., seq]``, or with another ``shape`` of one dimension."""
    if any(kind.__module__ == "torch" for kind in type(values).__mro__):
        raise PositionError(
            f"{name} must be an array or a list, got a torch tensor; phasor.torch.positions has "
            f"packed, padded, cached and every_axis for tensors; otherwise pass tensor.numpy()"
        )
    unmasked(name, values, PositionError)
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
