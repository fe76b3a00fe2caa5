"""`RotaryEmbedding`: a module that rotates and counts positions, without weights or tables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple, NoReturn, cast, overload

import torch
from torch import Tensor, nn

from phasor._checks import boolean, number, whole
from phasor._tensors import LAYOUTS, check_counts_tokens, check_no_other, check_rope
from phasor.errors import PositionError, SpecError, TensorError
from phasor.rope import Rope
from phasor.torch import positions as torch_positions
from phasor.torch._operator.arguments import ARRAYS
from phasor.torch._operator.internals import dispatch_is_plain, refuse_torchscript, refuse_tracing
from phasor.torch._operator.text import compute_dtype
from phasor.torch.functional import rotate, rotate_qk
from phasor.torch.rotation import Rotation

#: Names under which other modules save frequencies and tables, which are not state.
_TABLES = frozenset(
    (
        *("inv_freq", "original_inv_freq", "freqs", "freqs_cis", "theta", "cos", "sin", "cache"),
        *("cos_cached", "sin_cached", "cos_cache", "sin_cache", "cos_sin_cache"),
    )
)


class RotaryModule(nn.Module):
    """A module that rotates and counts positions: its call, whose types are written once."""

    heads_first: bool

    @overload
    def forward(
        self,
        q: Tensor,
        k: None = None,
        positions: Any = None,
        *,
        offset: int | Tensor = 0,
        cu_seqlens: Sequence[int] | Tensor | None = None,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        positions: Any = None,
        *,
        offset: int | Tensor = 0,
        cu_seqlens: Sequence[int] | Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...

    def forward(
        self,
        q: Tensor,
        k: Tensor | None = None,
        positions: Any = None,
        *,
        offset: int | Tensor = 0,
        cu_seqlens: Sequence[int] | Tensor | None = None,
        **others: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The rotated query and key, or one rotated tensor.

        Args:
            q: ``[..., seq, num_heads, head_dim]``, or ``[..., num_heads, seq, head_dim]`` with
                ``heads_first``.
            k: The same tokens, with as many heads or fewer; None to rotate one tensor.
            positions: As for `phasor.torch.rotate`, or a `Rotation`. If None, each row (with
                ``cu_seqlens`` each sequence) starts at ``offset``, 0 by default. A Rope of several
                axes needs them.
            offset: Position of the first token: a whole number, or an integer tensor with one
                number per row (the leading dimensions, ``[batch]``) or per packed sequence.
            cu_seqlens: Boundaries of packed sequences, the same in every row. Either whole numbers
                ``[0, ..., seq]``, or a tensor ``[n_sequences + 1]`` on the device of ``q``, whose
                values are checked in CPU memory only; tokens after the last boundary are padding.
            others: Unknown names; they raise an error with a hint.

        Returns:
            New tensors of the shapes, dtypes and strides of ``q`` and ``k``.

        Raises:
            TensorError: As for `phasor.torch.rotate_qk`.
            PositionError: If positions are given together with ``offset`` or ``cu_seqlens``, are
                missing for a Rope of several axes, or if one of the three has a wrong shape, dtype,
                device or value.
        """
        return self._rotate(q, k, Where(positions, offset, cu_seqlens, others))

    def _rotate(self, q: Tensor, k: Tensor | None, where: Where) -> Tensor | tuple[Tensor, Tensor]:
        """``q`` rotated, and ``k`` if it is not None."""
        raise NotImplementedError

    def __prepare_scriptable__(self) -> NoReturn:
        refuse_torchscript()


class RotaryEmbedding(RotaryModule):
    """The rotation of a Rope as a module that counts positions.

    It has no parameters or buffers, so nothing is cast by ``.half()``, lost on the meta device,
    sharded, or saved in a ``state_dict``. When it loads a ``state_dict``, it drops frequencies and
    tables that other modules saved there. No call depends on earlier calls, and the host never
    waits for a device. A model with many layers calls `at` once and passes the `Rotation` to each.

    Args:
        rope: The rope; its scaling must be a law. For a rule, ``rope.at(n)`` picks one.
        heads_first: Whether tensors are ``[..., heads, seq, head_dim]`` (True) or ``[..., seq,
            heads, head_dim]`` (False). No default, because counted positions fit both.
        gain: Multiplied into cos and sin; ``rope.attention_factor`` if None.

    Attributes:
        rope: The Rope; assign another for a longer context.
        gain: The factor on cos and sin.

    >>> import torch
    >>> from phasor import Rope
    >>> rotary = RotaryEmbedding(Rope(head_dim=64, pairing="half"), heads_first=False)
    >>> q, k = torch.randn(2, 5, 8, 64), torch.randn(2, 5, 2, 64)
    >>> prompt_q, prompt_k = rotary(q, k)  # positions 0 to 4
    >>> next_q, next_k = rotary(q, k, offset=5)  # 5 to 9
    >>> rows_q, rows_k = rotary(q, k, offset=torch.tensor([5, 0]))
    >>> torch.equal(rows_q[0], next_q[0]), torch.equal(rows_q[1], prompt_q[1])
    (True, True)
    >>> rotation = rotary.at(torch.arange(5))  # for all layers
    >>> torch.equal(rotary(q, positions=rotation), prompt_q)
    True
    """

    def __init__(
        self, rope: Rope, *, heads_first: bool | None = None, gain: float | None = None
    ) -> None:
        super().__init__()
        check_rope(rope)
        self.heads_first = checked_order(heads_first)
        self._chosen_gain = None if gain is None else number("gain", gain)
        self.rope = rope
        self.register_load_state_dict_pre_hook(drop_tables)

    @property
    def rope(self) -> Rope:
        """The rope."""
        return self._rope

    @rope.setter
    def rope(self, rope: Rope) -> None:
        check_rope(rope)
        self._rope = rope
        self.gain = rope.attention_factor if self._chosen_gain is None else self._chosen_gain

    def at(self, positions: Any, *, dtype: torch.dtype = torch.float32) -> Rotation:
        """`Rotation.at` with this module's Rope and gain."""
        return Rotation.at(positions, self.rope, gain=self.gain, dtype=dtype)

    def _rotate(self, q: Tensor, k: Tensor | None, where: Where) -> Tensor | tuple[Tensor, Tensor]:
        positions = read_positions(q, k, where, self.rope, self.heads_first)
        if isinstance(positions, Rotation):
            if k is None:
                return positions(q, heads_first=self.heads_first)
            return positions(q, k, heads_first=self.heads_first)
        options: dict[str, Any] = {"gain": self.gain, "heads_first": self.heads_first}
        if k is None:
            return rotate(q, positions, self.rope, **options)
        return rotate_qk(q, k, positions, self.rope, **options)

    def extra_repr(self) -> str:
        return f"gain={self.gain}, heads_first={self.heads_first}, rope={self.rope}"


def drop_tables(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_others: Any) -> None:
    """Remove tables that other modules saved from a state dict.

    A hook of ``load_state_dict``. Parameters and buffers of ``module`` itself are kept.
    """
    tensors = chain(module.named_parameters(), module.named_buffers())
    table_keys = {prefix + name for name, _ in tensors}
    for key in list(state_dict):
        is_table = key.startswith(prefix) and key.rpartition(".")[2] in _TABLES
        if is_table and key not in table_keys:
            del state_dict[key]


def checked_order(heads_first: bool | None) -> bool:
    """``heads_first`` of a module that counts positions, which has no default."""
    if heads_first is None:
        raise SpecError(
            "heads_first must be given, because counted positions fit either order: True for "
            f"tensors {LAYOUTS[True]}, False for {LAYOUTS[False]}"
        )
    return boolean("heads_first", heads_first)


class Where(NamedTuple):
    """The arguments of a module's call that state where its tokens are."""

    positions: Any
    offset: int | Tensor
    cu_seqlens: Sequence[int] | Tensor | None
    others: dict[str, Any]  # arguments with unknown names


def read_positions(q: Tensor, k: Tensor | None, where: Where, rope: Rope, heads_first: bool) -> Any:
    """The positions of a module's call, given or counted, or a `Rotation`."""
    refuse_tracing()  # under jit.trace lengths would be tensors
    if where.others:
        _refuse_names(where.others)
    _check_order(q, k, where.positions)
    if where.positions is not None:
        check_no_other(where.offset, where.cu_seqlens)
        return where.positions
    name = "x" if k is None else "q"
    shape = ARRAYS.check_heads(name, q, heads_first, rope.head_dim)
    check_counts_tokens(rope)
    return count_positions(shape[:-2], q.device, where.offset, where.cu_seqlens)


def as_rotation(x: Tensor, positions: Any, rope: Rope) -> Rotation:
    """``positions`` if they are a Rotation, else their Rotation for tensors like ``x``."""
    if isinstance(positions, Rotation):
        return positions
    positions = ARRAYS.fit_positions(positions, [x], rope)
    return Rotation.at(positions, rope, dtype=compute_dtype(x.dtype))


def _refuse_names(arguments: dict[str, Any]) -> NoReturn:
    name = next(iter(arguments))
    right_names = {
        **dict.fromkeys(("position_ids", "input_pos", "pos", "position"), "positions"),
        **dict.fromkeys(
            ("seqlen_offset", "seqlen_offsets", "start_pos", "cache_position"), "offset"
        ),
        **dict.fromkeys(("query", "x"), "q"),
        "key": "k",
    }
    hint = f"; write {right_names[name]}={name}" if name in right_names else ""
    raise SpecError(
        f"RotaryEmbedding has no argument {name!r}{hint}; it takes q, k, positions, offset and "
        "cu_seqlens"
    )


def _check_order(q: Any, k: Any, positions: Any) -> None:
    """Refuse positions passed as keys, and values passed as positions."""
    if isinstance(k, Rotation) or (isinstance(k, Tensor) and not k.is_floating_point()):
        got = "a Rotation" if isinstance(k, Rotation) else k.dtype
        raise TensorError(
            f"k must be a tensor of keys, got {got}; without a key, pass positions by keyword: "
            "positions=..."
        )
    is_tensor = isinstance(positions, Tensor) and isinstance(q, Tensor)
    if is_tensor and positions.is_floating_point() and positions.dim() >= q.dim() >= 3:
        raise PositionError(
            f"positions must be [..., seq], got a tensor of shape {list(positions.shape)} after q "
            "and k; values are not rotated: leave them out"
        )


def count_positions(
    tokens: Sequence[int],
    device: torch.device,
    offset: int | Tensor = 0,
    cu_seqlens: Sequence[int] | Tensor | None = None,
) -> Tensor:
    """Positions from ``offset`` on in every row, or in every sequence of ``cu_seqlens``.

    ``tokens`` is the shape ``[..., seq]``. The result is int64 ``[seq]``, or ``[..., seq]`` if each
    row has its own offset.
    """
    *rows, seq = tokens
    starts = None
    if isinstance(offset, Tensor):
        starts = torch_positions.as_int64("offset", offset)
        ARRAYS.check_device("offset", starts, device, PositionError)
    else:
        torch_positions.check_whole("offset", offset, least=-(2**63))
    if cu_seqlens is None:
        if starts is None:
            return torch_positions.span(seq, cast(int, offset), device=device)
        _check_one_for_each("row", starts, rows)
        # [...] -> [rows, seq] -> [..., seq]
        return torch_positions.cached(starts.flatten(), seq).view(*starts.shape, seq)
    if isinstance(cu_seqlens, Tensor):
        ARRAYS.check_device("cu_seqlens", cu_seqlens, device, PositionError)
        bounds = cu_seqlens
        if bounds.is_cpu and dispatch_is_plain([bounds]):
            _check_bounds(cast(list[Any], bounds.flatten().tolist()), seq, padded=True)
    else:
        # the host does not wait for this copy
        on_host = torch.tensor(read_bounds(cu_seqlens, seq), device="cpu")
        bounds = on_host.to(device, non_blocking=True)
    positions = torch_positions.packed(bounds, seq)
    if starts is not None:
        _check_one_for_each("sequence of cu_seqlens", starts, [bounds.shape[0] - 1])
        if starts.dim() == 1:
            # padding has no offset, so it gets 0
            starts = torch.cat((starts, starts.new_zeros(1)))
            starts = starts[torch_positions.sequence_indices(bounds, seq)]
        offset = starts
    shifted = positions + cast(Any, offset)
    # positions count up from the offset, so a smaller one has overflowed int64
    if shifted.is_cpu and dispatch_is_plain([shifted]) and bool((shifted < offset).any()):
        raise PositionError(
            "offset plus the positions of a sequence must be at most 2**63 - 1, got a sum above it"
        )
    return shifted


def _check_one_for_each(counted: str, offset: Tensor, shape: Sequence[int]) -> None:
    if offset.dim() and list(offset.shape) != list(shape):
        raise PositionError(
            f"offset must be a single value, or one per {counted} {list(shape)}, got shape "
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
    return _check_bounds(values, seq)


def _check_bounds(values: list[Any], seq: int, *, padded: bool = False) -> list[int]:
    """The boundaries, which end at ``seq`` tokens, or earlier if the rest is padding."""
    bounds = [whole("cu_seqlens", bound, least=0, error=PositionError) for bound in values]
    is_rising = all(a <= b for a, b in pairwise(bounds))
    ends = bounds[-1:] == [seq] or (padded and bounds[-1:] <= [seq])
    if not bounds or bounds[0] != 0 or not ends or not is_rising:
        raise PositionError(
            f"cu_seqlens must rise from 0 to the number of tokens ({seq}), got {bounds}; "
            "lengths become boundaries by a cumulative sum"
        )
    return bounds
