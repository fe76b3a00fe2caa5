"""The memory for the keys and values of a sequence, computed from a model's config."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from phasor.layers import LayerRopes

#: Kinds of layers that keep only the latest tokens, and the key with their number.
_WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
_ALL_TOKENS = frozenset({"attention", "full", "full_attention", "nope", "rope"})
#: Kinds that keep nothing, or a state of one size, whatever the length.
_STATES = frozenset(
    {"conv", "linear", "linear_attention", "mamba", "mamba2", "mlp", "moe", "no_op", "recurrent"}
)
#: Keys that give some layers other sizes.
_OTHER_SIZES = (
    *("attention_k_eq_v", "block_configs", "num_global_key_value_heads", "per_layer_config"),
    *("swa_head_dim", "swa_num_key_value_heads", "swa_v_head_dim"),
)


class CacheSize(NamedTuple):
    """The keys and values of one sequence, in all layers."""

    bytes: tuple[int, ...] | None  # for each number of tokens; None if it is not known
    formula: str  # the factors in words, or the reason why ``bytes`` is None


def cache_size(ropes: LayerRopes, *tokens: int) -> CacheSize:
    """The memory for the keys and values of a sequence of ``tokens`` tokens.

    A layer keeps ``key heads * (key width + value width)`` numbers of a token, of the config's
    dtype or else 2 bytes, and with a window no more tokens than that. Latent attention (DeepSeek)
    keeps ``kv_lora_rank`` numbers and one rotated key. States of linear attention and of
    convolutions, and the keys of indexers, are not counted.

    >>> from phasor import preset
    >>> size = cache_size(preset("llama-3-8b"), 8192, 131_072)
    >>> [count / 2**30 for count in size.bytes]
    [1.0, 16.0]
    >>> print(size.formula.split(",")[0])
    2 bytes x 32 rope layers x tokens x 8 key heads x (128 + 128)
    """
    config = ropes.in_config.values
    way_out = "" if config else "; give the path of a config.json"
    numbers = _count_numbers(ropes, config)
    if isinstance(numbers, str):
        return CacheSize(None, numbers + way_out)
    count, counted = numbers
    listed = config.get("layer_types")
    kinds = list(map(str, cast(list[object], listed))) if isinstance(listed, list) else []
    kinds = kinds if len(kinds) == len(ropes) else list(ropes.layer_kinds)
    # the last layers of Gemma 3n use the keys and values of earlier layers
    layers = Counter(kinds[: len(kinds) - (_whole(config, "num_kv_shared_layers") or 0)])
    dtype = re.search(r"float(\d+)", str(config.get("dtype") or config.get("torch_dtype")))
    size = int(dtype[1]) // 8 if dtype else 2
    totals, terms = [0] * len(tokens), list[str]()
    for kind, number in layers.items():
        if kind in _STATES:
            continue
        window = _whole(config, _WINDOWS.get(kind))
        if window is None and kind not in _ALL_TOKENS:
            return CacheSize(
                None, f"the number of tokens that {kind} layers keep is unknown{way_out}"
            )
        for i, length in enumerate(tokens):
            totals[i] += size * number * count * min(length, window or length)
        token_text = "tokens" if window is None else f"min(tokens, {window})"
        terms.append(f"{number} {kind} layers x {token_text} x {counted}")
    formula = f"{size} bytes x " + (terms[0] if len(terms) == 1 else f"({' + '.join(terms)})")
    return CacheSize(tuple(totals), formula + _doubt(config, layers))


def _whole(config: Mapping[str, Any], key: str | None) -> int | None:
    """The number at ``key``, if it is one above 0."""
    value = None if key is None else config.get(key)
    return value if type(value) is int and value > 0 else None


def _count_numbers(ropes: LayerRopes, config: Mapping[str, Any]) -> tuple[int, str] | str:
    """The numbers that a layer keeps for a token, and the formula; or why they are unknown."""
    widths = {rope.head_dim for rope in ropes.ropes}
    size_keys = [key for key in _OTHER_SIZES if config.get(key)]
    heads = ropes.num_kv_heads or ropes.num_heads
    if size_keys or len(widths) != 1:
        return f"layers keep keys of different sizes{f' ({size_keys[0]})' if size_keys else ''}"
    (width,) = widths
    if rank := _whole(config, "kv_lora_rank"):
        return rank + width, f"({rank} of the latent vector + {width} of the rotated key)"
    if heads is None or isinstance(config.get("num_key_value_heads"), list):
        return "the number of key heads is unknown"
    if not config and heads == 1:
        return "a single key head may mean latent attention"
    value_width = _whole(config, "v_head_dim") or width
    return heads * (width + value_width), f"{heads} key heads x ({width} + {value_width})"


def _doubt(config: Mapping[str, Any], kinds: Counter[str]) -> str:
    """The end of a formula that may be too large, because some layers may keep fewer tokens."""
    if not config:
        return ", assuming no layer has a sliding window (only a config.json says)"
    unplaced = [key for key in _WINDOWS.values() if _whole(config, key)]
    if unplaced and config.get("use_sliding_window") is not False and not {*_WINDOWS} & {*kinds}:
        key = unplaced[0]
        return f", or less: the config does not say which layers have the {key} of {config[key]}"
    return ""
