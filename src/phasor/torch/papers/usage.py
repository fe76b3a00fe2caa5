"""The frequencies that a running model uses: mean norms of pairs in queries, keys and values.

Supported: `phasor.torch.RotaryAttention`, and attention modules with projections called ``q_proj``,
``k_proj`` and ``v_proj`` (or ``query``, ``key`` and ``value``), one head after the other, with any
norms called ``q_norm`` and ``k_norm``. The results were compared with the norms of rotated vectors
for these models of transformers 5.23: Llama, Mistral, Qwen 2, 3, 3-MoE and 3-Next, Gemma 3, OLMo 1
and 2, Cohere, Granite, GLM-4, SmolLM3.

Not supported: fused projections (``qkv_proj`` in Phi-3, ``query_key_value`` in GPT-NeoX), latent
attention (DeepSeek), norms with other names (``q_layernorm`` in Phi, ``qk_norm`` in Llama 4, which
follows the rotation), layers that reuse the keys of another layer, and an output gate packed into a
``q_proj`` without a norm. For those, pass queries and keys to `phasor.papers.pair_norms`.

A rotation does not change the norm of a pair, so the norms are measured before it.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from phasor.errors import ConfigError, SpecError, TensorError
from phasor.layers import LayerRopes, check_rope, summarize
from phasor.numpy import pair_indices
from phasor.rope import Rope
from phasor.torch.attention import RotaryAttention

# names of the projections to queries, to keys and to values
_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"))
# a projection, and its norm or None
_Source = tuple[nn.Module, nn.Module | None]


@dataclass(eq=False)
class PairNorms:
    """Running means of the norm of every pair, for one layer's queries, keys or values."""

    tokens: int = 0  # number of tokens so far, over all sequences
    _total: Tensor | None = field(default=None, repr=False)

    @property
    def mean(self) -> NDArray[np.float64]:
        """float64 ``[heads, num_pairs]``, equal to `phasor.papers.pair_norms` of all tokens."""
        if self._total is None:
            raise TensorError(
                "no token has passed through this layer; run the model inside the with block"
            )
        return (self._total / self.tokens).numpy()

    def add(self, x: Tensor, rope: Rope) -> None:
        """Add the tokens of ``x``, ``[..., seq, heads, head_dim]``, without keeping it."""
        x = x.detach() if x.dtype == torch.float64 else x.detach().float()
        first, second = (indices.tolist() for indices in pair_indices(rope, rope.pairing))
        # [..., seq, heads, head_dim] -> [tokens, heads, num_pairs]
        norms = torch.hypot(x[..., first], x[..., second]).flatten(0, -3)
        total = norms.sum(0).to("cpu", torch.float64)
        self._total = total if self._total is None else self._total + total
        self.tokens += len(norms)


@dataclass(frozen=True, eq=False)
class LayerUsage:
    """Frequency usage of an attention layer: norms of pairs in its query, key and value heads.

    Values do not rotate; their coordinates are paired like those of keys, for comparison (figure
    13). ``values`` is None if a layer has no separate projection for them, or if their heads have
    another width.
    """

    name: str  # name of the module in the model
    queries: PairNorms = field(default_factory=PairNorms)
    keys: PairNorms = field(default_factory=PairNorms)
    values: PairNorms | None = None


@contextmanager
def watch_usage(
    model: nn.Module, ropes: LayerRopes | Rope | None = None
) -> Generator[tuple[LayerUsage | None, ...]]:
    """Frequency usage of every layer while the model runs (Round and Round We Go, section 4).

    The mean over tokens of ``|q_k|``, ``|k_k|`` and ``|v_k|`` for each pair, head and layer
    (2410.06205, figures 3 and 13), taken by hooks from the projections, or from the norms after
    them. Each call of the model adds its tokens, padding included, so leave padding out of the
    input. No activations are kept, and the hooks are removed when the block ends. The docstring of
    this module lists supported models. Compiled models do not call hooks: measure before compiling.

    Args:
        model: The model, or the submodule whose layers ``ropes`` describes.
        ropes: One Rope per attention layer, in the order of the modules, or one Rope for all. By
            default the ropes of the model's `phasor.torch.RotaryAttention` layers, or for a model
            of transformers those that `phasor.torch.live.from_model` reads.

    Yields:
        The usage of every layer, None for a layer without Rope.

    >>> from torch import nn
    >>> attention = nn.ModuleDict({"q_proj": nn.Linear(8, 16), "k_proj": nn.Linear(8, 8)})
    >>> with watch_usage(attention, Rope(head_dim=8, pairing="half")) as layers:
    ...     for projection in attention.values():
    ...         _ = projection(torch.zeros(1, 5, 8))
    >>> layers[0].queries.mean.shape, layers[0].keys.mean.shape, layers[0].keys.tokens
    ((2, 4), (1, 4), 5)
    """
    sources = dict(_find_attention(model))
    try:
        model_ropes = _read_ropes(model, sources)
    except ConfigError:  # a model that phasor cannot read is measured with the caller's ropes
        if ropes is None:
            raise
        model_ropes = None
    used_ropes = model_ropes if ropes is None else ropes
    if used_ropes is None:
        raise SpecError(
            "ropes must be given for a model without phasor.torch.RotaryAttention that is not from "
            f"transformers, got None for a {type(model).__name__}"
        )
    per_layer = (used_ropes,) * len(sources) if isinstance(used_ropes, Rope) else tuple(used_ropes)
    for rope in filter(None, per_layer):
        check_rope("ropes", rope)
    if not sources or len(per_layer) != len(sources):
        raise SpecError(
            f"model must have {len(per_layer) or 'some'} modules with q_proj and k_proj (or query "
            f"and key), one for each layer of ropes, got {len(sources)}; pass the "
            "submodule that ropes describes, or use phasor.papers.pair_norms on queries and keys"
        )
    if model_ropes is not None and len(model_ropes) == len(per_layer):
        _check_pairs(sources, per_layer, tuple(model_ropes))
    num_heads, num_kv_heads = (getattr(used_ropes, n, None) for n in ("num_heads", "num_kv_heads"))
    usage: list[LayerUsage | None] = []
    with ExitStack() as hooks:
        for (name, (queries, keys, values)), rope in zip(sources.items(), per_layer, strict=True):
            has_pairs = rope is not None and _shares_pairs(values, keys)
            layer = (
                None
                if rope is None
                else LayerUsage(name, values=PairNorms() if has_pairs else None)
            )
            usage.append(layer)
            if rope is not None and layer is not None:
                _watch(hooks, queries, name, rope, num_heads, layer.queries)
                _watch(hooks, keys, name, rope, num_kv_heads, layer.keys)
                if layer.values is not None and values is not None:
                    _watch(hooks, (values, None), name, rope, num_kv_heads, layer.values)
        yield tuple(usage)


def _read_ropes(
    model: nn.Module, names: Iterable[str]
) -> LayerRopes | tuple[Rope | None, ...] | None:
    """The ropes that the model itself states; None if it has none."""
    layers = [model.get_submodule(name) for name in names]
    if layers and all(isinstance(layer, RotaryAttention) for layer in layers):
        return tuple(cast(RotaryAttention, layer).rope for layer in layers)
    # a process with a model of transformers has already imported it
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return None
    from phasor.torch.live import from_model

    return from_model(model)


def _check_pairs(
    names: Iterable[str], ropes: Sequence[Rope | None], model_ropes: Sequence[Rope | None]
) -> None:
    """Refuse ropes whose pairs differ from the model's, because norms would mix pairs."""
    for name, rope, model_rope in zip(names, ropes, model_ropes, strict=True):
        if rope is not None and _layout(rope) != _layout(model_rope):
            raise SpecError(
                f"ropes must pair the coordinates that {name or 'model'} pairs "
                f"({'none' if model_rope is None else summarize(model_rope)}), got "
                f"{summarize(rope)}; leave ropes out to use the model's own: another file of "
                "this model may have reordered weights"
            )


def _layout(rope: Rope | None) -> tuple[Any, ...]:
    if rope is None:
        return ()
    return rope.pairing, rope.rotary_start, rope.rotary_dim, rope.head_dim


def _shares_pairs(values: nn.Module | None, keys: _Source) -> bool:
    """Whether the projection to values has as many coordinates as the one to keys."""
    widths = [getattr(part, "out_features", None) for part in (values, keys[0])]
    return values is not None and widths[0] == widths[1]


def _find_attention(
    model: nn.Module,
) -> Iterator[tuple[str, tuple[_Source, _Source, nn.Module | None]]]:
    """The name of each attention module, and the sources of its queries, keys and values."""
    modules = cast(Iterator[tuple[str, nn.Module]], model.named_modules())
    for name, module in modules:
        parts = dict(module.named_children())
        for q, k, v in _PROJECTIONS:
            if q not in parts or k not in parts:
                continue
            norms = {part for part in parts if "norm" in part and part[0] in "qk"}
            unknown = sorted(norms - {"q_norm", "k_norm"})
            if unknown:
                raise SpecError(
                    f"{name or 'model'} has norms that are not watched ({', '.join(unknown)}; "
                    "known: q_norm, k_norm); pass queries and keys to pair_norms"
                )
            queries, keys = (parts[q], parts.get("q_norm")), (parts[k], parts.get("k_norm"))
            yield name, (queries, keys, parts.get(v))


def _watch(
    hooks: ExitStack, source: _Source, name: str, rope: Rope, heads: int | None, norms: PairNorms
) -> None:
    """Add the norms of heads in the output of a projection, or of its norm."""
    projection, norm = source
    norm = None if isinstance(norm, nn.Identity) else norm
    seq = 0

    def add(x: Tensor, *, split: bool = True) -> None:
        if split:
            # [..., seq, heads * head_dim] -> [..., seq, heads, head_dim], or a single wrong head
            is_whole = x.shape[-1] % rope.head_dim == 0
            x = x.reshape(*x.shape[:-1], -1, rope.head_dim if is_whole else x.shape[-1])
        if x.shape[-1] != rope.head_dim or heads not in (None, x.shape[-2]):
            raise TensorError(
                f"{name} must have {heads or 'some'} heads of head_dim {rope.head_dim}, got "
                f"{x.shape[-2]} of {x.shape[-1]}; its projection has other outputs than heads, or "
                f"ropes describe another model"
            )
        norms.add(x, rope)

    def after_projection(_module: nn.Module, _inputs: Any, x: Tensor) -> None:
        nonlocal seq
        seq = x.shape[-2]
        if norm is None:
            add(x)

    def after_norm(_module: nn.Module, inputs: tuple[Tensor, ...], x: Tensor) -> None:
        # the norm may act on whole projections, or on heads before or after the tokens
        if x.ndim < 4:
            add(x)
            return
        heads_first = x.shape[-2] == seq
        if x.shape[-3] == x.shape[-2]:
            # if heads are as many as tokens: in memory the heads of a token are adjacent
            heads_first = inputs[0].stride(-2) > inputs[0].stride(-3)
        add(x.transpose(-3, -2) if heads_first else x, split=False)

    hooks.enter_context(projection.register_forward_hook(after_projection))
    if norm is not None:
        hooks.enter_context(norm.register_forward_hook(after_norm))
