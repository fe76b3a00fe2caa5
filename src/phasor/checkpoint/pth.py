"""Reads files of torch.save, such as Meta's ``consolidated.00.pth``, without running them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from phasor._checks import short_repr
from phasor.checkpoint.files import FLOATS, Rows
from phasor.errors import CheckpointError, install_hint

if TYPE_CHECKING:
    import torch

_DTYPES = {f"torch.{theirs}": ours for ours, theirs in FLOATS.items()}


def open_pth(path: Path) -> dict[str, Rows]:
    """The tensors of a file of torch.save, by name. It is mapped into memory, not read.

    torch's loader runs with ``weights_only=True``: only tensors and plain containers are made of
    the pickle, and nothing in it is executed.

    Raises:
        CheckpointError: If torch is not installed, the file is damaged, holds anything else than
            named tensors of one or more axes, or a dtype that is no plain floating-point one.
    """
    try:
        import torch
    except ImportError:
        raise CheckpointError(
            f"{path} is a file of torch.save and needs torch to read: {install_hint('torch')}"
        ) from None
    try:
        state: object = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch raises what its unpickler and its zip reader happen to raise
        first_line = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"{path} cannot be read by torch.load(mmap=True, weights_only=True); it is damaged, "
            f"was written by torch before 1.6, or holds more than tensors: {short_repr(first_line)}"
        ) from None
    if not isinstance(state, dict) or not state:
        kind = "an empty one" if isinstance(state, dict) else f"a {type(state).__name__}"
        raise CheckpointError(f"{path} must hold a dictionary of tensors, got {kind}")
    return {str(name): _rows(path, str(name), t) for name, t in cast(dict[Any, Any], state).items()}


def _rows(path: Path, name: str, tensor: object) -> Rows:
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(f"{path}: {short_repr(name)} must be a tensor, got {type(tensor)}")
    dtype = _DTYPES.get(str(tensor.dtype))
    if dtype is None or not tensor.ndim or not tensor.numel() or tensor.layout != torch.strided:
        raise CheckpointError(
            f"{path}: {short_repr(name)} must be a dense tensor of {', '.join(FLOATS.values())} "
            f"with rows, got {tensor.dtype} {list(tensor.shape)}; convert before quantising"
        )
    row_bytes = tensor.element_size() * tensor[:1].numel()

    def read(first: int, count: int) -> NDArray[np.uint8]:
        # contiguous before the view as bytes: a copy of these rows at most
        rows: torch.Tensor = tensor[first : first + count].contiguous()
        return rows.view(torch.uint8).reshape(count, row_bytes).numpy()

    return Rows(dtype, tuple(tensor.shape), row_bytes, read)
