"""The kernels of others for GPUs through their public interfaces, one builder each.

Their tables are made beforehand by the recipe that each package brings or asks its caller for:
float32 positions times float32 frequencies. A caller may hand most of them the rows of its own
tokens in their order, and that is how packed sequences and several axes reach them here.
"""

from __future__ import annotations

import torch
from foreign import transformers_rows, usual_inv_freq
from torch import Tensor

from phasor.bench import Case, Rotation, UnableError


def _place(case: Case, positions: Tensor) -> Tensor:
    """``[B]`` position of each sequence of a decode step; its axes agree on text."""
    return positions[:, 0, 0] if case.sections else positions[:, 0]


def _angles(case: Case, positions: Tensor) -> Tensor:
    """Float32 angles of positions, ``[..., N]``, on one axis."""
    return positions.float()[..., None] * usual_inv_freq(case, positions.device)


def _table(case: Case, positions: Tensor) -> Tensor:
    """Angles ``[L, N]``: of every position up to the last in decode, else of the tokens in turn."""
    if case.seq == 1:
        longest = int(positions.max()) + 1
        return _angles(case, torch.arange(longest, device=positions.device))
    if case.sections:
        inv_freq = usual_inv_freq(case, positions.device)
        axis = torch.from_numpy(case.rope("half").axes.axis_of_pair(len(inv_freq)))
        return positions.float()[:, axis.to(positions.device)] * inv_freq
    return _angles(case, positions)


def liger(case: Case, positions: Tensor) -> Rotation:
    """`liger_rotary_pos_emb`, which takes the place of transformers' function and its rows."""
    from liger_kernel.transformers.rope import liger_rotary_pos_emb

    if case.rotary_dim is not None:
        raise UnableError("rotates whole heads (parts since 0.8.5; earlier ones read beyond rows)")
    cos, sin = transformers_rows(case, positions)
    return lambda q, k: liger_rotary_pos_emb(q, k, cos, sin)


def flash_attention(
    case: Case, positions: Tensor, *, interleaved: bool, in_place: bool
) -> Rotation:
    """`flash_attn.layers.rotary.apply_rotary_emb`, a Triton kernel for one tensor, called twice."""
    from flash_attn.layers.rotary import apply_rotary_emb

    angles, kind = _table(case, positions), getattr(torch, case.dtype)
    cos, sin = angles.cos().to(kind), angles.sin().to(kind)
    offsets = _place(case, positions).int() if case.seq == 1 else 0

    def turned(x: Tensor) -> Tensor:
        return apply_rotary_emb(x, cos, sin, interleaved, in_place, offsets)

    return lambda q, k: (turned(q), turned(k))


def flashinfer_table(case: Case, positions: Tensor, *, interleaved: bool) -> Rotation:
    """`apply_rope_with_cos_sin_cache_inplace`, with the float32 table of serving engines."""
    from flashinfer.rope import apply_rope_with_cos_sin_cache_inplace

    if case.backward:
        raise UnableError("no backward pass")
    if case.rows is not None:
        raise UnableError("reads whole rows only")
    angles = _table(case, positions)
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    # the rows of a prefill stand in the order of its tokens
    place = (
        _place(case, positions)
        if case.seq == 1
        else torch.arange(case.seq, device=positions.device).repeat(case.batch)
    )

    def rotation(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        apply_rope_with_cos_sin_cache_inplace(
            place, q.flatten(2).flatten(0, 1), k.flatten(2).flatten(0, 1), case.head_dim, table,
            is_neox=not interleaved,
        )  # fmt: skip
        return q, k

    return rotation


def flashinfer_computed(case: Case, positions: Tensor, *, interleaved: bool) -> Rotation:
    """`apply_rope_pos_ids`, which computes its angles in the kernel."""
    from flashinfer.rope import apply_rope_pos_ids

    if case.backward:
        raise UnableError("no backward pass")
    if case.sections and case.seq > 1:
        raise UnableError("one position axis only")
    place = _place(case, positions) if case.seq == 1 else positions
    place, width = place.int(), case.rotary_dim or case.head_dim

    def rotation(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        new_q, new_k = apply_rope_pos_ids(
            q.flatten(0, 1), k.flatten(0, 1), place, width, interleaved, 1.0, case.base
        )
        return new_q.view(q.shape), new_k.view(k.shape)

    return rotation


def transformer_engine(case: Case, positions: Tensor, *, interleaved: bool) -> Rotation:
    """`apply_rotary_pos_emb` with `fused=True`, which takes angles and one tensor, called twice."""
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    angles = _table(case, positions)
    wide = angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles, angles], -1)
    wide = wide[:, None, None, :].contiguous()
    starts = _place(case, positions).int() if case.seq == 1 else None

    def turned(x: Tensor) -> Tensor:
        return apply_rotary_pos_emb(
            x, wide, "bshd", start_positions=starts, interleaved=interleaved, fused=True
        )

    return lambda q, k: (turned(q), turned(k))


def transformers_qwen3(case: Case, positions: Tensor) -> Rotation:
    """Qwen3's norm of query and key, and the rotation that follows it there."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

    from phasor.bench import EPSILON

    cos, sin = transformers_rows(case, positions)
    norm = Qwen3RMSNorm(case.head_dim, EPSILON)

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(norm, {"weight": weight}, (x,))

    return lambda q, k, q_weight, k_weight: apply_rotary_pos_emb(
        normed(q, q_weight), normed(k, k_weight), cos, sin
    )
