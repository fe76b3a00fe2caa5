"""`RotaryEmbedding`: the rotation of queries and keys as a module, without weights or tables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from phasor._checks import boolean, number, whole
from phasor._tensors import check_counts_tokens, check_no_other, check_rope
from phasor.errors import PositionError
from phasor.rope import Rope
from phasor.torch import positions as torch_positions
from phasor.torch._operator.arguments import check_device, check_heads, tokens_first
from phasor.torch._operator.internals import dispatch_is_plain, refuse_torchscript, refuse_tracing
from phasor.torch.functional import rotate_qk


class RotaryEmbedding(nn.Module):
    """`rotate_qk` as a module that knows its Rope and counts positions.

    It has no parameters and no buffers: nothing is cast by ``.half()``, lost on the meta device,
    sharded, or saved in a ``state_dict``. No call depends on the calls before it, and the host
    never waits for a device. Cos and sin are computed in each call; a model of many layers makes
    them once with `cos_sin` and gives them to `rotate_by` in each.

    Args:
        rope: What rotates; its scaling must be a law. Of a rule ``rope.at(n)`` picks one.
        gain: Multiplied into cos and sin; ``rope.attention_factor`` if None.
        heads_first: Whether tensors are ``[..., heads, seq, head_dim]``.

    Attributes:
        rope: Can be replaced, for a longer context.
        gain: What is multiplied into cos and sin.

    >>> import torch
    >>> from phasor import Rope
    >>> rotary = RotaryEmbedding(Rope(head_dim=64, pairing="half"))
    >>> q, k = torch.randn(2, 5, 8, 64), torch.randn(2, 5, 2, 64)
    >>> prompt_q, prompt_k = rotary(q, k)  # positions 0 to 4
    >>> next_q, next_k = rotary(q, k, offset=5)  # 5 to 9
    >>> rows_q, rows_k = rotary(q, k, offset=torch.tensor([5, 0]))
    >>> torch.equal(rows_q[0], next_q[0]), torch.equal(rows_q[1], prompt_q[1])
    (True, True)
    """

    def __init__(self, rope: Rope, *, gain: float | None = None, heads_first: bool = False) -> None:
        super().__init__()
        self.heads_first = boolean("heads_first", heads_first)
        self._chosen_gain = None if gain is None else number("gain", gain)
        self.rope = rope

    @property
    def rope(self) -> Rope:
        """What rotates."""
        return self._rope

    @rope.setter
    def rope(self, rope: Rope) -> None:
        check_rope(rope)
        self._rope = rope
        self.gain = rope.attention_factor if self._chosen_gain is None else self._chosen_gain

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        positions: Any = None,
        *,
        offset: int | Tensor = 0,
        cu_seqlens: Sequence[int] | Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The rotated query and key.

        Args:
            q: ``[..., seq, num_heads, head_dim]``, or ``[..., num_heads, seq, head_dim]`` with
                ``heads_first``.
            k: The same tokens, with as many heads or fewer.
            positions: As for `phasor.torch.rotate`. If None, each row starts at 0, or with
                ``cu_seqlens`` each sequence does, plus ``offset``. A Rope of several axes needs
                them.
            offset: Position of the first token: a whole number, or an integer tensor with one for
                each row (the leading dimensions, ``[batch]``) or each packed sequence.
            cu_seqlens: Boundaries of sequences packed end to end, in every row alike. A tensor
                ``[n_sequences + 1]`` on the device of ``q``: its values are read in the CPU's
                memory only, and tokens after the last boundary are padding. Or whole numbers
                ``[0, ..., seq]``.

        Returns:
            New tensors of the shapes, dtypes and strides of ``q`` and ``k``.

        Raises:
            TensorError: As for `phasor.torch.rotate_qk`.
            PositionError: If positions are given together with ``offset`` or ``cu_seqlens``, are
                missing for a Rope of several axes, or if one of the three has a wrong shape, dtype,
                device or value.
        """
        refuse_tracing()  # lengths would be tensors
        if positions is None:
            (rows,) = tokens_first([q], self.heads_first)
            check_heads("q", rows, self.rope, self.heads_first)
            check_counts_tokens(self.rope)
            positions = count_positions(rows.shape[:-2], q.device, offset, cu_seqlens)
        else:
            check_no_other(offset, cu_seqlens)
        options: dict[str, Any] = {"gain": self.gain, "heads_first": self.heads_first}
        return rotate_qk(q, k, positions, self.rope, **options)

    def __prepare_scriptable__(self) -> NoReturn:
        refuse_torchscript()

    def extra_repr(self) -> str:
        return f"gain={self.gain}, heads_first={self.heads_first}, rope={self.rope}"


def count_positions(
    tokens: Sequence[int],
    device: torch.device,
    offset: int | Tensor = 0,
    cu_seqlens: Sequence[int] | Tensor | None = None,
) -> Tensor:
    """Positions from ``offset`` on in every row, or in every sequence of ``cu_seqlens``.

    The ``tokens`` are ``[..., seq]``. The result is int64 ``[seq]``, or ``[..., seq]`` where each
    row has an offset of its own.
    """
    *rows, seq = tokens
    starts = None
    if isinstance(offset, Tensor):
        starts = torch_positions.as_int64("offset", offset)
        check_device("offset", starts, device, PositionError)
    else:
        torch_positions.check_whole("offset", offset, least=-(2**63))
    if cu_seqlens is None:
        if starts is None:
            return torch_positions.span(seq, cast(int, offset), device=device)
        _check_one_for_each("row", starts, rows)
        # [...] -> [rows, seq] -> [..., seq]
        return torch_positions.cached(starts.flatten(), seq).view(*starts.shape, seq)
    if isinstance(cu_seqlens, Tensor):
        check_device("cu_seqlens", cu_seqlens, device, PositionError)
        bounds = cu_seqlens
    else:
        # the host does not wait for this copy
        on_host = torch.tensor(read_bounds(cu_seqlens, seq), device="cpu")
        bounds = on_host.to(device, non_blocking=True)
    positions = torch_positions.packed(bounds, seq)
    if starts is not None:
        _check_one_for_each("sequence of cu_seqlens", starts, [bounds.shape[0] - 1])
        if starts.dim() == 1:
            # padding has no offset of its own, so it gets 0
            starts = torch.cat((starts, starts.new_zeros(1)))
            starts = starts[torch_positions.sequence_indices(bounds, seq)]
        offset = starts
    moved = positions + cast(Any, offset)
    # they count up from the offset, so one that is smaller has left int64
    if moved.is_cpu and dispatch_is_plain([moved]) and bool((moved < offset).any()):
        raise PositionError(
            "offset plus the positions of a sequence must be at most 2**63 - 1, got a sum above it"
        )
    return moved


def _check_one_for_each(counted: str, offset: Tensor, shape: Sequence[int]) -> None:
    if offset.dim() and list(offset.shape) != list(shape):
        raise PositionError(
            f"offset must be a single value, or one for each {counted} {list(shape)}, got shape "
            f"{list(offset.shape)}; give positions where it differs from token to token"
        )


def read_bounds(cu_seqlens: Sequence[int] | Tensor, seq: int) -> list[int]:
    """The boundaries as a list, or an error if they do not divide ``seq`` tokens."""
    if isinstance(cu_seqlens, Tensor):
        values = cast(list[Any], cu_seqlens.flatten().tolist())
    elif isinstance(cast(object, cu_seqlens), Sequence):
        values = list(cu_seqlens)
    else:
        kind = type(cu_seqlens).__name__
        raise PositionError(f"cu_seqlens must be whole numbers [0, ..., {seq}], got {kind}")
    bounds = [whole("cu_seqlens", bound, least=0, error=PositionError) for bound in values]
    is_rising = all(a <= b for a, b in pairwise(bounds))
    if not bounds or bounds[0] != 0 or bounds[-1] != seq or not is_rising:
        raise PositionError(
            f"cu_seqlens must rise from 0 to the number of tokens ({seq}), got {bounds}; "
            "lengths become boundaries by a cumulative sum"
        )
    return bounds
