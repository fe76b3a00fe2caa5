"""Which frequencies a running model uses: mean norms of pairs of its queries, keys and values.

Supported: `phasor.torch.RotaryAttention`, and attention modules with projections called
``q_proj``, ``k_proj`` and ``v_proj`` (or ``query``, ``key`` and ``value``), one head after the
other, and norms called ``q_norm`` and ``k_norm`` where they have norms. The norms were compared
with those of the rotated vectors for these models of transformers 5.23: Llama, Mistral, Qwen 2, 3,
3-MoE and 3-Next, Gemma 3, OLMo 1 and 2, Cohere, Granite, GLM-4, SmolLM3.

Not supported: fused projections (``qkv_proj`` of Phi-3, ``query_key_value`` of GPT-NeoX), latent
attention (DeepSeek), norms of another name (``q_layernorm`` of Phi, ``qk_norm`` of Llama 4, which
comes after the rotation), layers that use the keys of another, and an output gate packed into a
``q_proj`` without a norm. For those, give queries and keys to `phasor.papers.pair_norms`.

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
# a projection, and the norm after it if there is one
_Source = tuple[nn.Module, nn.Module | None]


@dataclass(eq=False)
class PairNorms:
    """Running means of the norms of every pair: one layer's queries, keys or values."""

    tokens: int = 0  # seen so far, over all sequences
    _total: Tensor | None = field(default=None, repr=False)

    @property
    def mean(self) -> NDArray[np.float64]:
        """float64 ``[heads, num_pairs]``, as `phasor.papers.pair_norms` of all tokens at once."""
        if self._total is None:
            raise TensorError("no token has passed this layer; run the model inside the context")
        return (self._total / self.tokens).numpy()

    def add(self, x: Tensor, rope: Rope) -> None:
        """Add the tokens of ``x``, ``[..., seq, heads, head_dim]``, which is not kept."""
        x = x.detach() if x.dtype == torch.float64 else x.detach().float()
        first, second = (indices.tolist() for indices in pair_indices(rope, rope.pairing))
        # [..., seq, heads, head_dim] -> [tokens, heads, num_pairs]
        norms = torch.hypot(x[..., first], x[..., second]).flatten(0, -3)
        total = norms.sum(0).to("cpu", torch.float64)
        self._total = total if self._total is None else self._total + total
        self.tokens += len(norms)


@dataclass(frozen=True, eq=False)
class LayerUsage:
    """What one attention layer used: norms of the pairs of its query, key and value heads.

    A value has no pairs of its own: its coordinates are taken as its key's are, to compare (figure
    13). ``values`` is None where a layer has no projection of its own to them, or to heads of
    another width.
    """

    name: str  # of the module in the model
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
    them. Each call of the model adds its tokens, padding included: leave padding out of the input.
    No activation is kept, and the hooks are removed when the context ends. The docstring of this
    module says which models can be measured. Compiled models call no hooks: measure before
    compiling.

    Args:
        model: The model, or the part of it whose layers ``ropes`` describes.
        ropes: One Rope per attention layer, in the order of the modules, or one Rope for all. If
            None, the model's own: those of its `phasor.torch.RotaryAttention` layers, or of a model
            of transformers as `phasor.torch.live.from_model` reads them.

    Yields:
        For every layer its usage, None where the layer has no Rope.

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
        own = _own_ropes(model, sources)
    except ConfigError:  # a model that phasor cannot read is measured by ropes that are given
        if ropes is None:
            raise
        own = None
    given = own if ropes is None else ropes
    if given is None:
        raise SpecError(
            "ropes must be given for a model that is neither of transformers nor made of "
            f"phasor.torch.RotaryAttention, got None for a {type(model).__name__}"
        )
    per_layer = (given,) * len(sources) if isinstance(given, Rope) else tuple(given)
    for rope in filter(None, per_layer):
        check_rope("ropes", rope)
    if not sources or len(per_layer) != len(sources):
        raise SpecError(
            f"model must have {len(per_layer) or 'some'} modules with q_proj and k_proj (or query "
            f"and key), one for each layer of ropes, got {len(sources)}; give the part of the "
            "model that ropes describes, or use phasor.papers.pair_norms on queries and keys"
        )
    if own is not None and len(own) == len(per_layer):
        _check_pairs(sources, per_layer, tuple(own))
    num_heads, num_kv_heads = (getattr(given, n, None) for n in ("num_heads", "num_kv_heads"))
    usage: list[LayerUsage | None] = []
    with ExitStack() as hooks:
        for (name, (queries, keys, values)), rope in zip(sources.items(), per_layer, strict=True):
            has_pairs = rope is not None and _has_pairs_of(values, keys)
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


def _own_ropes(
    model: nn.Module, names: Iterable[str]
) -> LayerRopes | tuple[Rope | None, ...] | None:
    """The ropes that the model itself says its layers rotate with; None if it says none."""
    layers = [model.get_submodule(name) for name in names]
    if layers and all(isinstance(layer, RotaryAttention) for layer in layers):
        return tuple(cast(RotaryAttention, layer).rope for layer in layers)
    # a process with a model of transformers has imported it
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return None
    from phasor.torch.live import from_model

    return from_model(model)


def _check_pairs(
    names: Iterable[str], given: Sequence[Rope | None], own: Sequence[Rope | None]
) -> None:
    """Refuse ropes of other pairs than the model rotates: their norms would be of no pair."""
    for name, rope, model_rope in zip(names, given, own, strict=True):
        found, expected = (
            None if one is None else (one.pairing, one.rotary_start, one.rotary_dim, one.head_dim)
            for one in (rope, model_rope)
        )
        if rope is not None and found != expected:
            raise SpecError(
                f"ropes must pair the coordinates that {name or 'model'} pairs "
                f"({'none' if model_rope is None else summarize(model_rope)}), got "
                f"{summarize(rope)}; leave ropes out to take the model's own: another file of it "
                "may have reordered weights"
            )


def _has_pairs_of(values: nn.Module | None, keys: _Source) -> bool:
    """Whether a projection to values makes as many coordinates as the one to keys."""
    widths = [getattr(part, "out_features", None) for part in (values, keys[0])]
    return values is not None and widths[0] == widths[1]


def _find_attention(
    model: nn.Module,
) -> Iterator[tuple[str, tuple[_Source, _Source, nn.Module | None]]]:
    """Each attention module's name, and where its queries, keys and values come from."""
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
                    "known: q_norm, k_norm); give queries and keys to pair_norms"
                )
            queries, keys = (parts[q], parts.get("q_norm")), (parts[k], parts.get("k_norm"))
            yield name, (queries, keys, parts.get(v))


def _watch(
    hooks: ExitStack, source: _Source, name: str, rope: Rope, heads: int | None, norms: PairNorms
) -> None:
    """Add the norms of the heads that a projection, or the norm after it, makes."""
    projection, norm = source
    norm = None if isinstance(norm, nn.Identity) else norm
    seq = 0

    def add(x: Tensor, *, split: bool = True) -> None:
        if split:
            # [..., seq, heads * head_dim] -> [..., seq, heads, head_dim], or one head that is wrong
            is_whole = x.shape[-1] % rope.head_dim == 0
            x = x.reshape(*x.shape[:-1], -1, rope.head_dim if is_whole else x.shape[-1])
        if x.shape[-1] != rope.head_dim or heads not in (None, x.shape[-2]):
            raise TensorError(
                f"{name} must have {heads or 'some'} heads of head_dim {rope.head_dim}, got "
                f"{x.shape[-2]} of {x.shape[-1]}; its projection holds more than heads, or ropes "
                "describe another model"
            )
        norms.add(x, rope)

    def after_projection(_module: nn.Module, _inputs: Any, x: Tensor) -> None:
        nonlocal seq
        seq = x.shape[-2]
        if norm is None:
            add(x)

    def after_norm(_module: nn.Module, inputs: tuple[Tensor, ...], x: Tensor) -> None:
        # the norm may be over whole projections, or over heads before or after the tokens
        if x.ndim < 4:
            add(x)
            return
        heads_first = x.shape[-2] == seq
        if x.shape[-3] == x.shape[-2]:
            # as many heads as tokens: in memory the heads of a token are next to each other
            heads_first = inputs[0].stride(-2) > inputs[0].stride(-3)
        add(x.transpose(-3, -2) if heads_first else x, split=False)

    hooks.enter_context(projection.register_forward_hook(after_projection))
    if norm is not None:
        hooks.enter_context(norm.register_forward_hook(after_norm))
