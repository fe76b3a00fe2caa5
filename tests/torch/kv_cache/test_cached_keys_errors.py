"""What cannot be done to a whole cache is refused in words, before anything is written."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from phasor import PhasorError, PositionError, Rope, SpecError, TensorError
from phasor.axes import Axial, Sectioned
from phasor.scaling import DynamicNTK
from phasor.torch.kv_cache import CachedKeys, KVCache

from ..attention_reference import HALF
from .filled_caches import ROPES, empty, filled, layered


class RecurrentLayer(transformers.DynamicLayer):
    """A layer of a kind that is not known, as those of linear attention in newer versions."""


def own(lengths: list[int], capacity: int = 8) -> KVCache:
    """A cache of ours whose rows hold so many tokens."""
    cache, seq = KVCache(len(lengths), capacity, 3, 8), max(lengths)
    k = torch.ones(len(lengths), seq, 3, 8)
    cache.append(k, k, torch.arange(seq) < torch.tensor(lengths)[:, None])
    return cache


def of_layers(*layers: Any) -> Any:
    """A DynamicCache of given layers, 4 tokens in each."""
    cache = transformers.DynamicCache()
    cache.layers = list(layers)
    for index in range(len(layers)):
        k = torch.ones(2, 3, 4, 8)
        cache.update(k, k, index)
    return cache


def offloaded() -> Any:
    """One that says so; where there is no accelerator, none can be filled."""
    cache = of_layers(transformers.DynamicLayer())
    cache.offloading = True
    return cache


def of_integers() -> Any:
    """Two layers, one of which was quantised."""
    cache = of_layers(transformers.DynamicLayer(), transformers.DynamicLayer())
    cache.layers[1].keys = cache.layers[1].keys.to(torch.int8)
    return cache


def uneven() -> Any:
    """Two layers, one of which was given a token more."""
    cache = of_layers(transformers.DynamicLayer(), transformers.DynamicLayer())
    cache.update(torch.ones(2, 3, 1, 8), torch.ones(2, 3, 1, 8), 1)
    return cache


RULE = Rope(head_dim=8, pairing="half", scaling=DynamicNTK(factor=2.0, original_max_positions=64))
MANY_AXES = Rope(head_dim=8, pairing="half", axes=Sectioned((2, 1, 1)))
REFUSED: dict[str, tuple[Callable[[], Any], type[PhasorError], str]] = {
    "a tensor": (
        lambda: CachedKeys(torch.ones(2, 3, 4, 8), HALF), TensorError,
        "cache must be a phasor KVCache.*got Tensor"),
    "a cache of another class": (
        lambda: CachedKeys(transformers.EncoderDecoderCache(
            transformers.DynamicCache(), transformers.DynamicCache()), HALF),
        TensorError, "got EncoderDecoderCache"),
    "an empty cache": (
        lambda: CachedKeys(transformers.DynamicCache(), HALF), TensorError, "run the prompt first"),
    "an empty layer": (
        lambda: CachedKeys(empty("static"), HALF), TensorError, "none in layer 0"),
    "an empty cache of ours": (
        lambda: CachedKeys(KVCache(1, 4, 1, 8), HALF), TensorError, "run the prompt first"),
    "an offloaded cache": (
        lambda: CachedKeys(offloaded(), HALF), TensorError, "must not be offloaded"),
    "a recurrent layer": (
        lambda: CachedKeys(of_layers(RecurrentLayer()), HALF),
        TensorError, "got a RecurrentLayer as layer 0"),
    "a rule": (
        lambda: CachedKeys(filled("dynamic"), [HALF, None, RULE]), SpecError,
        r"rope\.at\(seq_len\)"),
    "too few Ropes": (
        lambda: CachedKeys(filled("dynamic"), [HALF, HALF]), SpecError,
        r"one per layer of the cache \(3\), got 2"),
    "no Ropes": (
        lambda: CachedKeys(filled("dynamic"), [3, HALF, HALF]), SpecError,
        r"ropes\[0\] must be a phasor.Rope, got int"),
    "heads of another width": (
        lambda: CachedKeys(filled("dynamic"), Rope(head_dim=16, pairing="half")), TensorError,
        r"layer 0 .* \(16\)"),
    "keys of integers": (
        lambda: CachedKeys(of_integers(), HALF), TensorError,
        "scales must be given for keys of layer 1 in int8, got None"),
    "scales of a cache of ours": (
        lambda: CachedKeys(own([2]), HALF, scales=[torch.ones(())]), TensorError,
        "scales must be None for a KVCache"),
    "scales of a layer too few": (
        lambda: CachedKeys(filled("dynamic"), ROPES, scales=[None, None]), TensorError,
        r"scales must be one tensor or None for each layer \(3\), got 2"),
    "scales of keys that have none": (
        lambda: CachedKeys(filled("dynamic"), ROPES, scales=[torch.ones(())] * 3), TensorError,
        r"except for keys of layer 0 in int8 or float8, got .* in torch.float64"),
    "scales of other tokens": (
        lambda: CachedKeys(of_integers(), HALF, scales=[None, torch.ones(2, 3, 5, 1)]), TensorError,
        r"scales\[1\] must be .* for each of the 4 columns"),
    "keys without scales for keys with": (
        lambda: CachedKeys(of_integers(), HALF, scales=[None, torch.ones(2, 3, 4, 1)]).insert_(
            1, of_layers(transformers.DynamicLayer(), transformers.DynamicLayer())),
        TensorError, "other must hold keys in torch.int8 with the same kind of scales"),
    "Ropes of different axes": (
        lambda: CachedKeys(filled("dynamic"), [HALF, HALF, MANY_AXES]), SpecError,
        r"number of axes, got \[1, 3\]"),
    "layers of different lengths": (
        lambda: len(CachedKeys(uneven(), HALF)), TensorError, "same rows and tokens"),
    "no room in ours": (
        lambda: CachedKeys(own([5, 5]), HALF).insert_(0, own([4, 4])), TensorError,
        "room for 9 tokens, got 8"),
    "no room in theirs": (
        lambda: CachedKeys(filled("static", seq=18), ROPES).insert_(0, filled("dynamic", seq=3)),
        TensorError, "room for 21 tokens, got 20"),
    "a place behind the end of a row": (
        lambda: CachedKeys(own([5, 2]), HALF).insert_(3, own([1, 1])), TensorError,
        "and the shortest holds 2 tokens, got 3"),
    "a place that is no number": (
        lambda: CachedKeys(own([5, 2]), HALF).insert_("1", own([1, 1])), PositionError,
        "at must be a whole number from 0 to 5, got '1'"),
    "rows of different lengths put in": (
        lambda: CachedKeys(own([2, 2]), HALF).insert_(0, own([3, 2])), TensorError,
        r"3 tokens in every row, got \[3, 2\]"),
    "another number of layers": (
        lambda: CachedKeys(filled("dynamic"), ROPES).insert_(0, own([1, 1])), TensorError,
        r"layers of the cache \(3\), got 1"),
    "other Ropes": (
        lambda: CachedKeys(own([2]), HALF).insert_(0, CachedKeys(own([2]), RULE.at(99))),
        SpecError, "other must be rotated by the same ropes"),
    "another dtype": (
        lambda: CachedKeys(filled("dynamic", ropes=[HALF]), HALF).insert_(0, own([1, 1])),
        TensorError, "keys of other must be .* torch.float64.* torch.float32"),
    "a Rope for a layer without": (
        lambda: CachedKeys(filled("dynamic"), ROPES).retune_(range(9), HALF), SpecError,
        "layer 1, whose Rope is None"),
    "another pairing": (
        lambda: CachedKeys(filled("dynamic"), HALF).retune_(
            range(9), Rope(head_dim=8, pairing="interleaved")), SpecError, "output_pairing of old"),
    "a range beyond the tokens": (
        lambda: CachedKeys(own([4, 2]), HALF).evict_(1, 5), PositionError, "stop must be"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_refused_in_words(case: str) -> None:
    """The argument, what it must be, and what came."""
    call, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        call()


def test_nothing_is_written_where_the_last_layer_does_not_fit() -> None:
    """All layers or none."""
    k = torch.ones(2, 3, 4, 8)
    cache, other = transformers.DynamicCache(), transformers.DynamicCache()
    for index in range(2):
        cache.update(k, k, index)
        other.update(k, k[..., : 8 - index], index)
    with pytest.raises(TensorError, match="values of other must be"):
        CachedKeys(cache, HALF).insert_(0, other)
    assert cache.get_seq_length(0) == cache.get_seq_length(1) == 4


@pytest.mark.processes
def test_transformers_is_not_imported_for_a_cache_of_ours() -> None:
    """In a fresh interpreter, where any other cache is refused all the same."""
    program = """
import sys
from phasor import Rope, TensorError
from phasor.torch.kv_cache import CachedKeys
from phasor.torch.kv_cache import KVCache
import torch
cache, k = KVCache(1, 4, 1, 8), torch.ones(1, 3, 1, 8)
cache.append(k, k)
CachedKeys(cache, Rope(head_dim=8, pairing="half")).evict_(0, 1)
try:
    CachedKeys([k, k], Rope(head_dim=8, pairing="half"))
except TensorError as error:
    print(error)
print("transformers" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    refusal, imported = done.stdout.splitlines()
    assert refusal.endswith("got list")
    assert imported == "False"


@pytest.mark.parametrize("verb", ["evict_", "insert_"])
def test_a_missing_gap_is_found_before_the_first_layer_is_written(verb: str) -> None:
    """The layer that needs it comes last."""
    cache = layered(6)
    keys = CachedKeys(cache, [None, Rope(head_dim=4, pairing="half", axes=Axial((1, 1)))])
    with pytest.raises(PositionError, match="must be given for a Rope of 2 axes"):
        keys.evict_(1, 3) if verb == "evict_" else keys.insert_(1, layered(2))
    assert len(keys) == 6
