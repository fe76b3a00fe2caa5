"""The feature maps of linear attention: named, random, or user-defined."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from phasor._checks import boolean, short_repr, whole
from phasor._tensors import check_rope
from phasor.errors import SpecError, TensorError
from phasor.rope import Rope

FeatureMap = Callable[[Tensor], Tensor]
FeatureMaps = str | FeatureMap | tuple[FeatureMap, FeatureMap]


class PositiveRandomFeatures(nn.Module):
    """FAVOR+: features whose products estimate ``exp(q · k / sqrt(head_dim))``.

    ``φ(x) = exp(w · y - |y|² / 2) / sqrt(num_features)`` with ``y = x / head_dim**0.25`` for every
    row ``w`` of ``projection`` (Performer 2009.14794, lemma 1). The estimate has no bias; its
    relative standard deviation is about ``exp(|y_q + y_k|² / 2) / sqrt(num_features)`` (lemma 2).
    Rotated, the features give RoFormer's eq. 19, which is not an estimate of the softmax of rotated
    queries and keys.

    As a ``feature_map``, features of a query are also divided by the largest in its head, which
    does not change the output and prevents underflow in float32. Keys with ``|y|²`` above 170 still
    underflow to zero.

    Args:
        head_dim: Width of a head.
        num_features: Number of features per head.
        seed: Seed of the random rows, which are orthogonal in blocks of ``head_dim`` and have the
            lengths of normal vectors.
        device: Device of the rows; torch's default if None.

    Attributes:
        projection: Buffer ``[num_features, head_dim]``, float32, in the ``state_dict``.

    >>> features = PositiveRandomFeatures(head_dim=16, num_features=20_000)
    >>> q, k = torch.randn(2, 1, 1, 16, generator=torch.Generator().manual_seed(0)) / 2
    >>> estimate, exact = (features(q) * features(k)).sum(), ((q * k).sum() / 4).exp()
    >>> bool((estimate / exact - 1).abs() < 0.1)
    True
    """

    projection: Tensor

    def __init__(
        self,
        head_dim: int,
        num_features: int,
        *,
        seed: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = whole("head_dim", head_dim, least=1)
        self.num_features = whole("num_features", num_features, least=1)
        generator = torch.Generator().manual_seed(whole("seed", seed, least=0))
        # a square matrix of random rows for each block of head_dim features, the last one truncated
        blocks = -(-self.num_features // self.head_dim)
        shape = (blocks, self.head_dim, self.head_dim)
        normal = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        orthogonal, upper = cast(tuple[Tensor, Tensor], torch.linalg.qr(normal))
        # without these signs the directions would not be uniform
        orthogonal = orthogonal * upper.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
        normal = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        lengths = normal.square().sum(-1, keepdim=True).sqrt()
        rows = (orthogonal * lengths).flatten(0, 1)[: self.num_features].float()
        self.register_buffer("projection", rows.to(torch.empty(0, device=device).device))

    def forward(self, x: Tensor) -> Tensor:
        """Features ``[..., num_features]`` of ``x`` ``[..., head_dim]``, in its dtype."""
        return self._exponents(x).exp() * self.num_features**-0.5

    def of_queries(self, x: Tensor) -> Tensor:
        """The features of queries, each divided by the largest of its ``num_features``."""
        exponents = self._exponents(x)
        return (exponents - exponents.amax(-1, keepdim=True).detach()).exp()

    def _exponents(self, x: Tensor) -> Tensor:
        y = x * self.head_dim**-0.25
        return y @ self.projection.to(y.dtype).T - y.square().sum(-1, keepdim=True) / 2

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, num_features={self.num_features}"


def _elu_plus_one(x: Tensor) -> Tensor:
    # elu(x) + 1 in float32 is 0 below -17; this form is positive down to -103
    positive = x.relu()
    return (x - positive).exp() + positive


#: The maps of queries and of keys [..., seq, heads, head_dim], by name.
_FEATURE_MAPS: dict[str, tuple[FeatureMap, FeatureMap]] = {
    "elu": (_elu_plus_one, _elu_plus_one),
    "softmax": (partial(torch.softmax, dim=-1), torch.exp),
    "shen": (partial(torch.softmax, dim=-1), partial(torch.softmax, dim=-3)),
}


def find_feature_maps(feature_map: object, causal: bool) -> tuple[FeatureMap, FeatureMap]:
    """The maps of queries and of keys for ``feature_map``: a name, a callable or a pair of them."""
    boolean("causal", causal)
    if feature_map == "shen" and causal:
        raise SpecError(
            "feature_map='shen' divides every key by a sum over all tokens, later ones included, "
            "so it cannot be causal; use 'softmax', or causal=False"
        )
    if isinstance(feature_map, str) and feature_map in _FEATURE_MAPS:
        return _FEATURE_MAPS[feature_map]
    if isinstance(feature_map, PositiveRandomFeatures):
        return feature_map.of_queries, feature_map
    is_pair = isinstance(feature_map, tuple)
    pair = cast(tuple[Any, ...], feature_map if is_pair else (feature_map, feature_map))
    if len(pair) == 2 and all(map(callable, pair)):
        return pair[0], pair[1]
    names = ", ".join(repr(name) for name in _FEATURE_MAPS)
    raise SpecError(
        f"feature_map must be {names}, a callable or a pair of callables, "
        f"got {short_repr(cast(object, feature_map))}"
    )


def maps_each_token(feature_map: object) -> bool:
    """Whether a map treats each token separately, and has no trainable parameters."""
    if isinstance(feature_map, PositiveRandomFeatures):
        return not feature_map.projection.requires_grad
    return isinstance(feature_map, str) and feature_map != "shen"


def number_of_features(feature_map: object, head_dim: int) -> int | None:
    """The number of features per head; None if only a call of the map shows it."""
    if isinstance(feature_map, str):
        return head_dim
    if not isinstance(feature_map, PositiveRandomFeatures):
        return None
    if feature_map.head_dim != head_dim:
        raise SpecError(
            f"feature_map must be for heads of width {head_dim}, got {feature_map.head_dim}; this "
            f"is the layer's head_dim, while the Rope's head_dim is the number of features"
        )
    return feature_map.num_features


def check_features(features: Any, x: Tensor, rope: Rope | None, width: int | None) -> None:
    """Refuse features that do not fit ``rope``, or ``width`` if given."""
    if rope is not None:
        check_rope(rope)
        width = rope.head_dim
    same_heads = isinstance(features, Tensor) and features.shape[:-1] == x.shape[:-1]
    if not same_heads or width not in (None, features.shape[-1]):
        last = "the number of features" if rope is None else "rope.head_dim"
        actual = list(features.shape) if isinstance(features, Tensor) else type(features).__name__
        expected = [*x.shape[:-1], "features" if width is None else width]
        raise TensorError(
            f"feature_map must make features {expected}, the last of them {last}, of a "
            f"tensor {list(x.shape)}, got {actual}"
        )
