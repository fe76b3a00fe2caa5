"""Functions of programs that do not install here, written from their documentation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def turned(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """The first ``2 * cos.shape[-1]`` coordinates of ``x`` turned; the rest as it is."""
    width = 2 * cos.shape[-1]
    if interleaved:
        first, second = x[..., 0:width:2], x[..., 1:width:2]
    else:
        first, second = x[..., : width // 2], x[..., width // 2 : width]
    one, two = first * cos - second * sin, first * sin + second * cos
    both = torch.stack((one, two), -1).flatten(-2) if interleaved else torch.cat((one, two), -1)
    return torch.cat((both, x[..., width:]), -1)


def plain(rotary_dim: int, base: float) -> Tensor:
    """``base ** (-2k / rotary_dim)`` in float32."""
    return 1 / base ** (torch.arange(0, rotary_dim, 2).float() / rotary_dim)


def llama3(freqs: Tensor, factor: float, low: float, high: float, original: float) -> Tensor:
    """Llama 3.1's blend by turns over the original context; a step where ``low`` is ``high``."""
    turns = original * freqs / (2 * math.pi)
    kept = (turns > high).float() if low == high else ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * freqs / factor + kept * freqs


def yarn(
    freqs: Tensor,
    base: float,
    factor: float,
    original: float,
    *,
    beta_fast: float,
    beta_slow: float,
    truncate: bool = True,
) -> Tensor:
    """YaRN's blend by the index of the pair."""
    width = 2 * len(freqs)

    def index(turns: float) -> float:
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = index(beta_fast), index(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high += 0.001 * (low == high)
    divided = ((torch.arange(len(freqs)) - low) / (high - low)).clamp(0, 1)
    return freqs / factor * divided + freqs * (1 - divided)


def yarn_multiplier(factor: float, coefficient: float = 1.0) -> float:
    """``0.1 coefficient ln(factor) + 1`` beyond the original context."""
    return 0.1 * coefficient * math.log(factor) + 1 if factor > 1 else 1.0


# flash-attention


def apply_rotary_emb(
    x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, seqlen_offsets: int = 0
) -> Tensor:
    """flash-attention's: the first ``2 * cos.shape[1]`` of ``x`` ``[batch, seq, heads, head_dim]``.

    Token ``i`` uses row ``i + seqlen_offsets`` of ``cos`` and ``sin`` ``[max, rotary_dim / 2]``,
    which have the dtype of ``x``.
    """
    assert x.shape[-1] <= 256, "Only support headdim <= 256"
    assert cos.dtype == sin.dtype == x.dtype, "flash-attention refuses other dtypes"
    rows = slice(seqlen_offsets, seqlen_offsets + x.shape[1])
    assert len(cos) >= rows.stop, "flash-attention refuses tokens beyond the table"
    return turned(x, cos[rows, None], sin[rows, None], interleaved=interleaved)


# flashinfer


def apply_rope_pos_ids(
    q: Tensor,
    k: Tensor,
    pos_ids: Tensor,
    rotary_dim: int,
    interleave: bool = False,
    rope_scale: float = 1.0,
    rope_theta: float = 1e4,
) -> tuple[Tensor, Tensor]:
    """flashinfer's, for q and k ``[tokens, heads, head_dim]``: every frequency over the scale."""
    freqs = plain(rotary_dim, rope_theta) / rope_scale
    return _by_positions(q, k, pos_ids, freqs, interleave)


def apply_llama31_rope_pos_ids(
    q: Tensor,
    k: Tensor,
    pos_ids: Tensor,
    rotary_dim: int,
    interleave: bool = False,
    rope_scale: float = 8.0,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    old_context_len: int = 8192,
) -> tuple[Tensor, Tensor]:
    """flashinfer's; the two factors must differ, for it divides by their difference."""
    assert low_freq_factor != high_freq_factor
    freqs = llama3(
        plain(rotary_dim, rope_theta),
        rope_scale,
        low_freq_factor,
        high_freq_factor,
        old_context_len,
    )
    return _by_positions(q, k, pos_ids, freqs, interleave)


def _by_positions(
    q: Tensor, k: Tensor, pos_ids: Tensor, freqs: Tensor, interleave: bool
) -> tuple[Tensor, Tensor]:
    assert q.shape[-1] in (64, 128, 256, 512), "flashinfer refuses other widths here"
    assert_whole_vectors(q.shape[-1], 2 * len(freqs), interleave=interleave)
    angles = pos_ids[:, None, None].float() * freqs
    cos, sin = angles.cos(), angles.sin()
    return (
        turned(q, cos, sin, interleaved=interleave),
        turned(k, cos, sin, interleaved=interleave),
    )


def assert_whole_vectors(width: int, rotary_dim: int, *, interleave: bool) -> None:
    """A thread of its kernels turns one vector of 16-bit numbers, and looks at its start only."""
    vector = {64: 8, 128: 8, 256: 8, 512: 16}.get(width, 16)
    assert (rotary_dim if interleave else rotary_dim // 2) % vector == 0
    assert width % 8 == 0, "heads begin at 16 bytes"


def apply_rope_with_cos_sin_cache(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
) -> tuple[Tensor, Tensor]:
    """flashinfer's: rows of cosines, then sines, in float32; query ``[tokens, heads * width]``."""
    assert cos_sin_cache.dtype == torch.float32, "flashinfer refuses other dtypes"
    assert_whole_vectors(head_size, cos_sin_cache.shape[1], interleave=not is_neox)
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)
    query, key = (
        turned(x.unflatten(1, (-1, head_size)), cos, sin, interleaved=not is_neox).flatten(1)
        for x in (query, key)
    )
    return query, key


# TransformerEngine


class RotaryPositionEmbedding:
    """TransformerEngine's: angles ``[seq, 1, 1, dim]``; both lengths together divide positions."""

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: int | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10_000.0,
        interleaved: bool = False,
    ) -> None:
        self.freqs = plain(int(dim * rotary_percent), rotary_base)
        self.factor, self.pretrained = (
            seq_len_interpolation_factor,
            pretrained_max_position_embeddings,
        )
        self.interleaved = interleaved

    def __call__(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """The angles of so many positions; of more than pretrained times factor, squeezed."""
        positions = torch.arange(max_seq_len).float() + offset
        if self.factor is not None and self.pretrained is not None:
            positions /= max(self.factor, max_seq_len / self.pretrained)
        angles = positions[:, None] * self.freqs
        wide = (
            angles.repeat_interleave(2, -1) if self.interleaved else torch.cat((angles, angles), -1)
        )
        return wide[:, None, None]


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
) -> Tensor:
    """TransformerEngine's for ``sbhd``: t ``[seq, batch, heads, width]``, angles for each token."""
    assert tensor_format == "sbhd"
    starts = [0] * t.shape[1] if start_positions is None else start_positions.tolist()
    angles = torch.cat([freqs[start : start + len(t)] for start in starts], dim=1)
    halves = angles[..., ::2] if interleaved else angles[..., : angles.shape[-1] // 2]
    return turned(t, halves.cos(), halves.sin(), interleaved=interleaved)


# vLLM and sglang

Rotate = Callable[[Tensor, Tensor], Tensor]


def _module(
    freqs: Tensor,
    rows: float,
    neox: bool,
    *,
    gain: float = 1.0,
    block: Mapping[str, Any],
    head_size: int,
) -> Rotate:
    """What both engines' modules do: rows of a table for positions ``[tokens]``, or ``[3, tokens]``
    where sections of pairs belong to axes; x is ``[tokens, head_size]``.
    """

    def rotate(positions: Tensor, x: Tensor) -> Tensor:
        assert x.shape[-1] == head_size
        assert positions.max() < rows, "beyond the table"
        angles = angles_by_sections(positions, freqs, block)
        return turned(x, gain * angles.cos(), gain * angles.sin(), interleaved=not neox)

    return rotate


def angles_by_sections(positions: Tensor, freqs: Tensor, block: Mapping[str, Any]) -> Tensor:
    """Angles ``[tokens, pairs]`` at positions ``[tokens]`` or, in sections, ``[3, tokens]``."""
    angles = positions[..., None].float() * freqs
    if positions.ndim == 1:
        return angles
    sections: Sequence[int] = block["mrope_section"]
    assert len(sections) == 3
    if block.get("mrope_interleaved"):
        pairs = torch.arange(len(freqs))
        axes = pairs % 3
        axes[pairs >= 3 * torch.tensor(sections)[axes]] = 0
    else:
        assert sum(sections) == len(freqs)
        axes = torch.repeat_interleave(torch.arange(3), torch.tensor(sections))
    return torch.stack([angles[axis, :, k] for k, axis in enumerate(axes.tolist())], -1)


def _static(
    block: Mapping[str, Any], rotary_dim: int, base: float, head_size: int
) -> tuple[Tensor, float] | None:
    """Frequencies, and by how much the table is longer, of the types that both treat alike."""
    freqs = plain(rotary_dim, base)
    if block["rope_type"] == "default":
        return freqs, 1
    assert "mrope_section" not in block or block["rope_type"] == "yarn", "sections are ignored"
    if block["rope_type"] == "linear":
        return freqs / block["factor"], block["factor"]
    if block["rope_type"] == "llama3":
        original = block["original_max_position_embeddings"]
        low, high = block["low_freq_factor"], block["high_freq_factor"]
        return llama3(freqs, block["factor"], low, high, original), 1
    if block["rope_type"] == "proportional":
        # the exponents count the whole head, and what is beyond rotary_dim stands still
        freqs = plain(head_size, base)
        freqs[rotary_dim // 2 :] = 0
        return freqs, 1
    return None


def _ramp(block: Mapping[str, Any], rotary_dim: int, base: float) -> Tensor:
    return yarn(
        plain(rotary_dim, base),
        base,
        block["factor"],
        block["original_max_position_embeddings"],
        beta_fast=block.get("beta_fast", 32),
        beta_slow=block.get("beta_slow", 1),
        truncate=block.get("truncate", True),
    )


def _longrope(
    block: Mapping[str, Any], rotary_dim: int, base: float, *, longer: bool
) -> tuple[Tensor, float]:
    which = "long" if longer else "short"
    divisors = torch.tensor(block[f"{which}_factor"])
    return plain(rotary_dim, base) / divisors, block[f"{which}_mscale"]


def vllm_get_rope(
    head_size: int, max_position: int, is_neox_style: bool, rope_parameters: Mapping[str, Any]
) -> Rotate:
    """The factory of vLLM for a server whose max_model_len is ``max_position``."""
    block = rope_parameters
    base, kind = block["rope_theta"], block["rope_type"]
    rotary_dim = int(head_size * block.get("partial_rotary_factor", 1.0))
    gain, rows = 1.0, float(max_position)
    shared = _static(block, rotary_dim, base, head_size)
    if shared is not None:
        freqs, longer = shared
        rows *= longer
    elif kind == "ntk" and "mixed_b" in block:
        n, b = rotary_dim // 2, block["mixed_b"]
        a = math.log(block["factor"]) / n**b
        freqs = plain(rotary_dim, base) / (a * torch.arange(1, n + 1).float() ** b).exp()
    elif kind == "ntk":
        freqs = plain(rotary_dim, base * block["factor"]) / block["factor"] ** (2 / rotary_dim)
    elif kind == "yarn":
        assert "mrope_section" not in block, "its ramp starts from another context there"
        freqs = _ramp(block, rotary_dim, base)
        rows = block["original_max_position_embeddings"] * block["factor"]
        own, every = block.get("mscale"), block.get("mscale_all_dim")
        if block.get("attention_factor") is not None:
            gain = block["attention_factor"]
        elif own and every:
            gain = yarn_multiplier(block["factor"], own) / yarn_multiplier(block["factor"], every)
        else:
            gain = yarn_multiplier(block["factor"])
    else:
        assert kind == "longrope", "vLLM knows no other"
        assert is_neox_style, "vLLM refuses others"
        longer_context = max_position > block["original_max_position_embeddings"]
        freqs, gain = _longrope(block, rotary_dim, base, longer=longer_context)
    return _module(freqs, rows, is_neox_style, gain=gain, block=block, head_size=head_size)


def sglang_get_rope(
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: float,
    is_neox_style: bool,
    rope_scaling: Mapping[str, Any],
) -> Rotate:
    """The factory of sglang; its tables for YaRN grow with the positions."""
    block = rope_scaling
    gain, rows = 1.0, float(max_position)
    shared = _static(block, rotary_dim, base, head_size)
    if shared is not None:
        freqs, longer = shared
        rows *= longer
    elif block["rope_type"] == "yarn":
        freqs, rows = _ramp(block, rotary_dim, base), math.inf
        own, every = block.get("mscale"), block.get("mscale_all_dim")
        gain = yarn_multiplier(block["factor"])
        if own is not None and every is not None:
            assert "mrope_section" not in block, "sglang's class with sections takes neither"
            gain = yarn_multiplier(block["factor"], own) / yarn_multiplier(block["factor"], every)
        gain *= block.get("attn_factor", 1)
    else:
        assert block["rope_type"] == "longrope", "sglang knows no other"
        assert is_neox_style, "sglang refuses others"
        # one list or the other by the batch: the same twice here
        assert block["short_factor"] == block["long_factor"]
        assert block["short_mscale"] == block["long_mscale"]
        freqs, gain = _longrope(block, rotary_dim, base, longer=False)
    return _module(freqs, rows, is_neox_style, gain=gain, block=block, head_size=head_size)
