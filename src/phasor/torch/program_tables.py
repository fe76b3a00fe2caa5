"""`cos_sin_cache`: tables of cos and sin in the formats of other programs."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phasor._checks import choice, number, short_repr, whole
from phasor._tensors import check_rope
from phasor.angles import cos_sin
from phasor.errors import SpecError, TensorError
from phasor.pairings import Pairing, by_pairing
from phasor.rope import Rope
from phasor.torch._operator.arguments import DTYPES

_Program = Literal["vllm", "flash-attn", "transformers", "meta", "megatron"]
_Array = NDArray[Any]

# numbers computed at a time, so that temporaries stay small
_CHUNK_SIZE = 1 << 20
_REAL_DTYPES = {dtype: dtype for dtype in DTYPES}
#: Accepted dtypes and the dtypes stored for them; `_REAL_DTYPES` for all other programs.
_DTYPES: Mapping[_Program, Mapping[torch.dtype, torch.dtype]] = {
    "meta": {
        torch.float32: torch.complex64,
        torch.complex64: torch.complex64,
        torch.float64: torch.complex128,
        torch.complex128: torch.complex128,
    },
    "megatron": {dtype: dtype for dtype in (torch.float64, torch.float32)},
}


def _full_width(values: _Array, pairing: Pairing) -> _Array:
    """``[n, num_pairs]`` to ``[n, rotary_dim]``: each pair's value for both coordinates."""
    return by_pairing(
        pairing, half=np.concatenate((values, values), -1), interleaved=np.repeat(values, 2, -1)
    )


def _arrange(program: _Program, cos: _Array, sin: _Array, pairing: Pairing) -> dict[str, _Array]:
    """A program's arrays by name, made from cos and sin ``[n, num_pairs]``."""
    match program:
        case "vllm":
            return {"cos_sin": np.concatenate((cos, sin), -1)}
        case "flash-attn":
            return {"cos": cos, "sin": sin}
        case "transformers":
            return {"cos": _full_width(cos, pairing), "sin": _full_width(sin, pairing)}
        case "meta":
            return {"freqs_cis": cos + 1j * sin}
        case "megatron":
            # [n, rotary_dim] -> [n, 1, 1, rotary_dim]
            return {"angles": _full_width(np.arctan2(sin, cos), pairing)[:, None, None]}


def cos_sin_cache(
    rope: Rope,
    max_positions: int,
    *,
    program: _Program,
    gain: float = 1.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> dict[str, Tensor]:
    """The table of positions 0 to ``max_positions - 1`` in another program's format.

    | ``program`` | tensors, ``n`` is ``rope.num_pairs`` | for |
    |---|---|---|
    | ``"vllm"`` | ``cos_sin`` ``[max_positions, 2 n]``, cosines first | vLLM, sglang, flashinfer |
    | ``"flash-attn"`` | ``cos``, ``sin`` ``[max_positions, n]`` | flash-attention, ONNX |
    | ``"transformers"`` | ``cos``, ``sin`` ``[max_positions, 2 n]``, widened | transformers |
    | ``"meta"`` | ``freqs_cis``, complex ``[max_positions, n]`` | Meta's code |
    | ``"megatron"`` | ``angles`` ``[max_positions, 1, 1, 2 n]``, widened | Megatron, TE |

    Widened: for the pairing ``"half"`` the ``n`` values are followed by a copy; for
    ``"interleaved"`` each value is repeated. Angles are in radians. TE is TransformerEngine.

    Every number is computed to 1e-15 and rounded once. Angles are reduced to ``[-π, π]`` before
    rounding, so they are as accurate at the last position as at the first. Sines and angles have
    the sign of ``rope.direction``. No table contains the start of the rotated slice or the pairing
    of the result.

    Args:
        rope: One axis; its scaling must be a law.
        max_positions: Number of rows.
        program: One of the above.
        gain: Multiplied into cos and sin. There is no default of ``rope.attention_factor``, because
            some programs multiply by it themselves.
        dtype: Dtype of the table. ``"meta"`` takes float32 or complex64, float64 or complex128;
            ``"megatron"`` takes float32 or float64, because a 16-bit angle is off by a hundredth.
        device: Device of the table; torch's default if None.

    Raises:
        SpecError: If the Rope has a rule (use ``rope.at(n)``) or several axes.
        TensorError: If the table does not fit in memory; the message has the number of bytes.

    >>> from phasor import Rope
    >>> rope = Rope(head_dim=4, pairing="interleaved", base=100.0)
    >>> cos_sin_cache(rope, 2, program="vllm")["cos_sin"]
    tensor([[1.0000, 1.0000, 0.0000, 0.0000],
            [0.5403, 0.9950, 0.8415, 0.0998]])
    >>> cos_sin_cache(rope, 2, program="megatron")["angles"][1, 0, 0]
    tensor([1.0000, 1.0000, 0.1000, 0.1000])
    """
    check_rope(rope)
    if rope.axes.n_axes > 1:
        raise SpecError(
            f"rope must have one axis for a table of positions, got {rope.axes.n_axes} axes; "
            "use phasor.angles.cos_sin or phasor.torch.rotate, which take coordinates"
        )
    rows = whole("max_positions", max_positions, least=1)
    program = choice("program", program, get_args(_Program))
    dtypes, gain = _DTYPES.get(program, _REAL_DTYPES), number("gain", gain)
    if program == "megatron" and gain != 1:
        raise SpecError(
            f"gain must be 1 for program={program!r}, because angles cannot contain a factor, got "
            f"{gain}; pass it to the function that rotates, such as Megatron's mscale"
        )
    if dtype not in dtypes:
        names = ", ".join(map(str, dtypes))
        raise SpecError(f"dtype must be {names} for program={program!r}, got {short_repr(dtype)}")
    stored_dtype = dtypes[dtype]
    # arrays without rows, for names and widths
    no_rows = np.empty((0, rope.num_pairs))
    empty_arrays = _arrange(program, no_rows, no_rows, rope.pairing)
    shapes = {name: [rows, *array.shape[1:]] for name, array in empty_arrays.items()}
    tables = _allocate(shapes, stored_dtype, device)
    if next(iter(tables.values())).is_meta:
        return tables
    chunk = max(1, _CHUNK_SIZE // rope.num_pairs)
    for start in range(0, rows, chunk):
        positions = np.arange(start, min(start + chunk, rows))
        cos, sin = (gain * part for part in cos_sin(positions, rope))
        for name, array in _arrange(program, cos, sin, rope.pairing).items():
            tables[name][start : start + chunk] = _round_once(array, stored_dtype)
    return tables


def _round_once(values: _Array, dtype: torch.dtype) -> Tensor:
    """``values`` as a tensor of ``dtype``; torch would round float64 to 32 bits, then to 16."""
    if dtype in (torch.bfloat16, torch.float16):
        # rounded to odd: towards zero, with the last bit set if that was inexact. Rounding this to
        # the nearest 16-bit number gives the same result as rounding float64
        single = values.astype(np.float32)
        bits = single.view(np.int32)
        bits -= np.abs(single.astype(np.float64)) > np.abs(values)
        bits |= single.astype(np.float64) != values
        values = single
    return torch.from_numpy(np.ascontiguousarray(values)).to(dtype)


def _allocate(
    shapes: dict[str, list[int]], dtype: torch.dtype, device: torch.device | str | None
) -> dict[str, Tensor]:
    """Empty tensors, or an error with their size if they do not fit in memory."""
    device = torch.empty(0, device=device).device
    size = sum(map(math.prod, shapes.values())) * dtype.itemsize
    too_large = TensorError(
        f"max_positions must be few enough for the memory of {device}, got a table of {size} "
        "bytes; phasor.torch.rotate needs none"
    )
    if device.type == "cpu" and size > _memory_bytes():
        raise too_large
    try:
        return {
            name: torch.empty(shape, dtype=dtype, device=device) for name, shape in shapes.items()
        }
    except RuntimeError:  # the allocator has not enough memory, or the size is beyond int64
        raise too_large from None


def _memory_bytes() -> float:
    """The machine's memory; infinite if the system does not report it."""
    names = cast(dict[str, int], getattr(os, "sysconf_names", {}))
    if "SC_PHYS_PAGES" not in names:
        return math.inf
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
