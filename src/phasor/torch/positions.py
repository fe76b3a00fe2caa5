"""`phasor.positions` for tensors: the same functions on their device, without waiting for it.

They raise the same errors. `sequence_indices` exists only here, for masks of packed sequences.

Values of tensors in CPU memory are checked: for example, boundaries must never decrease. On other
devices, under a compiler and for fake tensors, values are not read. Coordinates of images and
videos are made on the host: ``torch.from_numpy(phasor.positions.multimodal(...))``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from phasor import positions as numpy_positions
from phasor._checks import whole
from phasor.errors import PositionError
from phasor.torch._operator.internals import dispatch_is_plain

_INT64_MAX = 2**63 - 1
_Device = torch.device | str | None


def span(length: int, start: int = 0, *, device: _Device = None) -> Tensor:
    """`phasor.positions.span` on ``device``: int64 ``[length]``.

    ``length`` may be a compiler's symbol.

    >>> span(4, start=10)
    tensor([10, 11, 12, 13])
    """
    check_whole("length", length, least=0)
    check_whole("start", start, least=-_INT64_MAX - 1)
    if start + length - 1 > _INT64_MAX:
        raise PositionError(
            f"start + length - 1 must be at most 2**63 - 1, got {start} + {length} - 1"
        )
    return torch.arange(length, device=device) + start


def packed(cu_seqlens: Tensor, total_tokens: int | None = None) -> Tensor:
    """`phasor.positions.packed`: packed sequences, int64 ``[total_tokens]``.

    ``total_tokens`` is the length of the packed tensor; tokens after the last boundary are padding
    and count from there. By default it is the last boundary, which is read only in CPU memory.

    >>> packed(torch.tensor([0, 3, 5], dtype=torch.int32), total_tokens=6)
    tensor([0, 1, 2, 0, 1, 0])
    """
    bounds = as_int64("cu_seqlens", cu_seqlens, "[n_sequences + 1]")
    host_positions = _read_on_host(numpy_positions.packed, cu_seqlens)
    last = total_tokens if host_positions is None else host_positions.shape[0]
    total_tokens = last if total_tokens is None else total_tokens
    if total_tokens is None or last is None:
        raise PositionError(
            f"total_tokens must be given for cu_seqlens on {cu_seqlens.device}, so that the host "
            f"does not wait for it; it is the length of the packed tensor, x.shape[0]"
        )
    if total_tokens < last:
        raise PositionError(
            f"total_tokens must be at least cu_seqlens[-1] ({last}), got {total_tokens}"
        )
    sequences = sequence_indices(bounds, total_tokens)
    return torch.arange(total_tokens, device=bounds.device) - bounds[sequences]


def sequence_indices(cu_seqlens: Tensor, total_tokens: int) -> Tensor:
    """The index of the sequence that each token of a pack belongs to, to build masks from.

    The arguments are those of `packed`, but are not checked. The result is int64
    ``[total_tokens]``; padding after the last boundary gets ``n_sequences``.

    >>> sequence_indices(torch.tensor([0, 3, 5], dtype=torch.int32), total_tokens=6)
    tensor([0, 0, 0, 1, 1, 2])
    """
    bounds = as_int64("cu_seqlens", cu_seqlens)
    check_whole("total_tokens", total_tokens, least=0)
    tokens = torch.arange(total_tokens, device=bounds.device)
    return torch.searchsorted(bounds, tokens, right=True) - 1


def padded(mask: Tensor) -> Tensor:
    """`phasor.positions.padded`: tokens at 0, 1, 2, ... in each row, padding at 0.

    ``mask`` is ``[..., seq]``, bools or integers; positions are int64 of the same shape.

    >>> padded(torch.tensor([[False, True, True], [True, False, False]]))
    tensor([[0, 0, 1],
            [0, 0, 0]])
    """
    tokens = as_int64("mask", mask, "[..., seq]", bools=True)
    _read_on_host(numpy_positions.padded, mask)
    return (tokens.cumsum(-1) - 1) * tokens


def cached(lengths: Tensor, new_tokens: int) -> Tensor:
    """`phasor.positions.cached`: tokens that follow caches, int64 ``[batch, new_tokens]``.

    ``lengths`` are the positions of the next tokens, ``[batch]``, negative if a row has padding on
    the left; ``new_tokens`` may be a compiler's symbol.

    >>> cached(torch.tensor([7, -2], dtype=torch.int32), new_tokens=3)
    tensor([[ 7,  8,  9],
            [-2, -1,  0]])
    """
    starts = as_int64("lengths", lengths, "[batch]")
    check_whole("new_tokens", new_tokens, least=0)
    _read_on_host(numpy_positions.cached, lengths, new_tokens)
    # [batch, 1] + [new_tokens] -> [batch, new_tokens]
    return starts[:, None] + torch.arange(new_tokens, device=starts.device)


def grid(*sizes: int, device: _Device = None) -> Tensor:
    """`phasor.positions.grid` on ``device``: int64 ``[prod(sizes), len(sizes)]``, row-major.

    >>> grid(2, 3).T
    tensor([[0, 0, 0, 1, 1, 1],
            [0, 1, 2, 0, 1, 2]])
    """
    if not sizes:
        raise PositionError("sizes must name at least one axis, got none")
    for i, size in enumerate(sizes):
        check_whole(f"sizes[{i}]", size, least=0)
    axes = torch.meshgrid(*(torch.arange(n, device=device) for n in sizes), indexing="ij")
    # n_axes times [*sizes] -> [*sizes, n_axes] -> [prod(sizes), n_axes]
    return torch.stack(axes, -1).flatten(0, -2)


def every_axis(positions: Tensor, n_axes: int) -> Tensor:
    """`phasor.positions.every_axis`: int64 ``[..., seq, n_axes]`` from positions ``[..., seq]``.

    >>> every_axis(torch.tensor([0, 1, 5]), n_axes=2).T
    tensor([[0, 1, 5],
            [0, 1, 5]])
    """
    positions = as_int64("positions", positions, "[..., seq]")
    return torch.stack([positions] * whole("n_axes", n_axes, least=1, error=PositionError), -1)


def context_parallel(
    length: int,
    rank: int,
    world_size: int,
    layout: Literal["contiguous", "zigzag"],
    *,
    device: _Device = None,
) -> Tensor:
    """`phasor.positions.context_parallel` on ``device``: int64 ``[length // world_size]``.

    >>> context_parallel(8, rank=0, world_size=2, layout="zigzag")
    tensor([0, 1, 6, 7])
    """
    chunks = numpy_positions.chunks_of_rank(length, rank, world_size, layout)
    return torch.cat([span(len(chunk), chunk.start, device=device) for chunk in chunks])


def check_whole(name: str, value: Any, *, least: int) -> None:
    """Refuse anything but a whole number. A compiler's symbol passes, without a guard."""
    is_valid = type(value) is int and least <= value <= _INT64_MAX
    if type(value) is not torch.SymInt and not is_valid:
        whole(name, value, least=least, most=_INT64_MAX, error=PositionError)


def as_int64(name: str, values: Any, shape: str = "", *, bools: bool = False) -> Tensor:
    """``values`` as int64, or an error."""
    if not isinstance(values, Tensor):
        raise PositionError(
            f"{name} must be a torch.Tensor, got {type(values).__name__}; phasor.positions takes "
            "lists and arrays"
        )
    numbers = not values.is_floating_point() and not values.is_complex()
    if not numbers or (values.dtype == torch.bool and not bools):
        raise PositionError(f"{name} must hold whole numbers, got dtype {values.dtype}")
    fits = {
        "[..., seq]": values.dim() > 0,
        "[batch]": values.dim() == 1,
        "[n_sequences + 1]": values.dim() == 1 and values.shape[0] > 0,
    }
    if not fits.get(shape, True):
        got = list(values.shape) or "a single value"
        raise PositionError(f"{name} must have the shape {shape}, got {got}")
    return values.long()


def _read_on_host(function: Callable[..., Any], values: Tensor, *rest: Any) -> Any:
    """The result or error of ``function``; None if values cannot be read without waiting."""
    if dispatch_is_plain([values]) and values.is_cpu:
        return function(values.numpy(), *rest)
    return None
