"""Feature maps of linear attention: what stands for queries and keys in sums of products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from phasor._checks import shown
from phasor.errors import SpecError, TensorError
from phasor.rope import Rope

FeatureMap = Callable[[Tensor], Tensor]
FeatureMaps = str | FeatureMap | tuple[FeatureMap, FeatureMap]


def _elu_plus_one(x: Tensor) -> Tensor:
    # elu(x) + 1 as it is written is 0 in float32 from -17 on; this is positive down to -103
    return x.clamp(max=0).exp() + x.relu()


def _over_features(x: Tensor) -> Tensor:
    return x.softmax(-1)


def _over_tokens(x: Tensor) -> Tensor:
    return x.softmax(-3)


#: What is applied to queries and what to keys, by name.
FEATURE_MAPS: dict[str, tuple[FeatureMap, FeatureMap]] = {
    "elu": (_elu_plus_one, _elu_plus_one),
    "softmax": (_over_features, torch.exp),
    "shen": (_over_features, _over_tokens),
}


def feature_maps(given: object, causal: bool) -> tuple[FeatureMap, FeatureMap]:
    """What ``given`` says to apply to queries and to keys, or an error that says why not."""
    if isinstance(given, str) and given in FEATURE_MAPS:
        if given == "shen" and causal:
            raise SpecError(
                "feature_map='shen' divides every key by a sum over all tokens, later ones too, "
                "and cannot be causal; use 'softmax', or causal=False"
            )
        return FEATURE_MAPS[given]
    pair = cast(tuple[Any, ...], given if isinstance(given, tuple) else (given, given))
    if len(pair) == 2 and all(map(callable, pair)):
        return pair[0], pair[1]
    known = ", ".join(repr(name) for name in FEATURE_MAPS)
    raise SpecError(
        f"feature_map must be {known}, a callable or a pair of callables, "
        f"got {shown(cast(object, given))}"
    )


def check_features(features: Any, x: Tensor, rope: Rope) -> None:
    """Refuse features of ``x`` that ``rope`` does not fit."""
    if not isinstance(cast(object, rope), Rope):
        raise SpecError(f"rope must be a phasor.Rope, got {type(rope).__name__}")
    wanted = [*x.shape[:-1], rope.head_dim]
    shape = list(features.shape) if isinstance(features, Tensor) else type(features).__name__
    if shape != wanted:
        raise TensorError(
            f"feature_map must make features {wanted}, the last of them rope.head_dim, of a "
            f"tensor {list(x.shape)}, got {shape}"
        )
