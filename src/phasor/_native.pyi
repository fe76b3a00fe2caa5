"""The CPU kernel, compiled of csrc/module.cpp: what it offers to torch/_operator/cpu.py alone."""

from collections.abc import Callable, Sequence

from torch import Tensor

def connect(
    exchange: object,
    tensor_error: type[Exception],
    position_error: type[Exception],
    get_num_threads: Callable[[], int],
    /,
) -> None:
    """Read tensors by torch's DLPack functions, the capsule ``exchange``, from now on."""

def paths() -> dict[str, bool]:
    """By the name of each instruction set, the fastest first, whether this machine has it."""

def plan(
    head_dim: int,
    rotary_start: int,
    num_pairs: int,
    half_in: bool,
    half_out: bool,
    n_axes: int = ...,
    turn_limbs: bytes = ...,
    axis_of_pair: bytes = ...,
    /,
) -> bytes:
    """What is the same in every call for a Rope; without axes cos and sin have to be given."""

def apart(one: Tensor, other: Tensor, /) -> bool:
    """Whether two tensors surely share no memory."""

def rotate(
    plan: bytes,
    positions_or_cos: Tensor,
    sin: Tensor | None,
    transposed: bool,
    gain: float,
    path: int,
    raises: bool,
    xs: Sequence[Tensor] | None,
    outs: Sequence[Tensor],
    /,
) -> bool:
    """Turn one or two tensors into ``outs``; False instead of an error, if asked.

    Without ``xs``, the one of ``outs`` takes cos and sin themselves, ``[..., seq, 2, num_pairs]``.
    """
