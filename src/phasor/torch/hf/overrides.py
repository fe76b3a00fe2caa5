"""Methods of single classes of transformers that need a tensor where others pass cosines on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from phasor.torch.hf.deferred import DeferredCosSin, defer_cos_sin
from phasor.torch.hf.methods import copy_function

#: The attribute in which a patched module that makes cosines keeps the rope of each kind of layer.
ROPES_OF_KINDS = "_phasor_ropes"
_Functions = Mapping[str, Any]
_Split = Callable[[Any, Tensor], tuple[Tensor, ...]]


def overrides_of(cls: type, rotations: _Functions) -> dict[str, Any]:
    """The methods that a subclass of ``cls`` needs in order to call ``rotations``."""
    forward: Any = getattr(cls, "forward", None)
    make = _FORWARDS.get(getattr(forward, "__qualname__", ""))
    return {} if make is None else {"forward": make(forward, rotations)}


def _attend_by_table(split: _Split) -> Callable[[Any, _Functions], Any]:
    """Attention that looks its sines up in a table, which positions have no end in."""

    def make(original: Any, rotations: _Functions) -> Any:
        del original
        (rotate,) = rotations.values()

        def forward(
            self: Any,
            hidden_states: Tensor,
            layer_past: Any = None,
            attention_mask: Tensor | None = None,
            position_ids: Any = None,
            **_: Any,
        ) -> tuple[Tensor, Tensor]:
            rope = getattr(self, ROPES_OF_KINDS)[None]
            rows = defer_cos_sin(rope, position_ids, hidden_states.dtype)
            # [batch, seq, heads, head_dim], of which rotary_dim coordinates are rotated
            q, k, v = split(self, hidden_states)
            width = 2 * rows.cos.shape[-1]
            k, q = (
                torch.cat((rotate(x[..., :width], rows, rows), x[..., width:]), -1) for x in (k, q)
            )
            # [batch, heads, seq, head_dim]
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            if layer_past is not None:
                k, v = layer_past.update(k, v, self.layer_idx)
            mixed, weights = self._attn(q, k, v, attention_mask)
            mixed = self._merge_heads(mixed, self.num_attention_heads, self.head_dim)
            return self.resid_dropout(self.out_proj(mixed)), weights

        return forward

    return make


def _split_gptj(self: Any, hidden_states: Tensor) -> tuple[Tensor, ...]:
    heads = self.num_attention_heads, self.head_dim
    projections = self.q_proj, self.k_proj, self.v_proj
    return tuple(project(hidden_states).unflatten(-1, heads) for project in projections)


def _split_codegen(self: Any, hidden_states: Tensor) -> tuple[Tensor, ...]:
    # four blocks, as of four devices, each with its heads' queries, values and keys
    blocks = self.qkv_proj(hidden_states).unflatten(-1, (4, 3, -1))
    heads = self.num_attention_heads, self.head_dim
    # [batch, seq, 4, width / 4] -> [batch, seq, heads, head_dim]
    q, v, k = (part.flatten(-2).unflatten(-1, heads) for part in blocks.unbind(-2))
    return q, k, v


def _cut_tensors(original: Any, rotations: _Functions) -> Any:
    """An indexer that cuts cosines to its heads' width: it is given tensors of full width."""
    (name, rotate), *_ = rotations.items()

    def rotate_by_tensors(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        # [batch, seq, 2 * num_pairs] -> [batch, seq, num_pairs]
        rows = DeferredCosSin(cos.chunk(2, -1)[0], sin.chunk(2, -1)[0])
        return rotate(q, k, rows, rows)

    by_tensors = copy_function(original, {name: rotate_by_tensors})

    def forward(self: Any, hidden_states: Tensor, position_embeddings: Any, *args: Any) -> Any:
        rows = position_embeddings[0]
        wide = [torch.cat((row, row), -1) for row in (rows.cos, rows.sin)]
        return by_tensors(self, hidden_states, wide, *args)

    return forward


_FORWARDS: Mapping[str, Callable[[Any, _Functions], Any]] = {
    "GPTJAttention.forward": _attend_by_table(_split_gptj),
    "CodeGenAttention.forward": _attend_by_table(_split_codegen),
    "MiniMaxM3VLIndexer.forward": _cut_tensors,
}
