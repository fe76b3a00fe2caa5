"""Conversion of checkpoints: heads score after it as they did before, in every layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasor import Rope
from phasor.files.checkpoint import Patterns, plan_conversion, write

from ... import oracle
from .checkpoints import Tensors, llama, load, save, save_folder, tensor

Heads = tuple[list[np.ndarray], list[np.ndarray]]
OTHER = {"half": "interleaved", "interleaved": "half"}
QUERY, KEY = 7, 3  # positions


def cut(vector: np.ndarray, width: int) -> list[np.ndarray]:
    """One head after the other."""
    return [vector[i : i + width] for i in range(0, len(vector), width)]


def scores(heads: Heads, rope: Rope) -> np.ndarray:
    """Of every query head at one position with every key at another, by complex numbers."""
    queries, keys = heads
    return np.array(
        [
            [oracle.turned(q, QUERY, rope) @ oracle.turned(k, KEY, rope) for k in keys]
            for q in queries
        ]
    )


def separate(t: dict[str, np.ndarray], x: np.ndarray) -> Heads:
    """Llama: a projection each, with biases."""
    q, k = (t[f"L.{c}_proj.weight"] @ x + t[f"L.{c}_proj.bias"] for c in "qk")
    return cut(q, 8), cut(k, 8)


def normed(t: dict[str, np.ndarray], x: np.ndarray) -> Heads:
    """Qwen 3: every head is multiplied by a scale."""
    queries, keys = (cut(t[f"L.{c}_proj.weight"] @ x, 8) for c in "qk")
    return [q * t["L.q_norm.weight"] for q in queries], [k * t["L.k_norm.weight"] for k in keys]


def normed_whole(t: dict[str, np.ndarray], x: np.ndarray) -> Heads:
    """OLMo 2: the scale is as wide as all heads."""
    q, k = (t[f"L.{c}_proj.weight"] @ x * t[f"L.{c}_norm.weight"] for c in "qk")
    return cut(q, 8), cut(k, 8)


def normed_apart(t: dict[str, np.ndarray], x: np.ndarray) -> Heads:
    """StableLM: every head has a scale of its own."""
    queries, keys = (cut(t[f"L.{c}_proj.weight"] @ x, 8) for c in "qk")
    for c, heads in (("q", queries), ("k", keys)):
        for i, head in enumerate(heads):
            head *= t[f"L.{c}_layernorm.norms.{i}.weight"]
    return queries, keys


def gated(t: dict[str, np.ndarray], x: np.ndarray) -> Heads:
    """Qwen3-Next: rows of a gate follow those of every query head."""
    both = cut(t["L.q_proj.weight"] @ x, 16)
    return [head[:8] for head in both], cut(t["L.k_proj.weight"] @ x, 8)


def blocks(t: dict[str, np.ndarray], x: np.ndarray) -> Heads:
    """Phi-3: all queries, all keys, all values."""
    qkv = t["L.qkv_proj.weight"] @ x
    return cut(qkv[:32], 8), cut(qkv[32:48], 8)


def groups(t: dict[str, np.ndarray], x: np.ndarray) -> Heads:
    """InternLM 2: two queries, their key, their value, and again."""
    heads = cut(t["L.wqkv.weight"] @ x, 8)
    return [heads[0], heads[1], heads[4], heads[5]], [heads[2], heads[6]]


def triples(t: dict[str, np.ndarray], x: np.ndarray) -> Heads:
    """GPT-NeoX: query, key and value of every head."""
    heads = cut(t["L.query_key_value.weight"] @ x + t["L.query_key_value.bias"], 8)
    return heads[0::3], heads[1::3]


def latent(t: dict[str, np.ndarray], x: np.ndarray) -> Heads:
    """DeepSeek: the end of every query head, and a key of its own after the latent vector."""
    queries = cut(t["L.q_b_proj.weight"] @ x[:6], 20)
    return [q[12:] for q in queries], [(t["L.kv_a_proj_with_mqa.weight"] @ x)[10:]]


def lora(t: dict[str, np.ndarray], x: np.ndarray) -> Heads:
    """What a LoRA adds to queries and keys."""
    q, k = (t[f"L.{c}_proj.lora_B.weight"] @ (t[f"L.{c}_proj.lora_A.weight"] @ x) for c in "qk")
    return cut(q, 8), cut(k, 8)


LATENT = {"model_type": "deepseek_v3", "qk_rope_head_dim": 8, "qk_nope_head_dim": 12}
GROUPED = {"q_proj.weight": (32, 32), "k_proj.weight": (16, 32), "v_proj.weight": (16, 32)}
# how the heads are read; config; shapes; width that is rotated, and where it begins
CASES: dict[str, tuple[Callable[..., Heads], dict[str, Any], dict[str, Any], Rope]] = {
    "grouped-query heads and biases": (
        separate,
        {},
        GROUPED | {"q_proj.bias": (32,), "k_proj.bias": (16,)},
        Rope(head_dim=8, pairing="half", base=100.0),
    ),
    "a single key head": (
        separate,
        {"num_key_value_heads": 1},
        {"q_proj.weight": (32, 32), "k_proj.weight": (8, 32), "v_proj.weight": (8, 32)}
        | {"q_proj.bias": (32,), "k_proj.bias": (8,)},
        Rope(head_dim=8, pairing="half", base=100.0),
    ),
    "a part of the head": (
        separate,
        {"model_type": "stablelm", "partial_rotary_factor": 0.5},
        GROUPED | {"q_proj.bias": (32,), "k_proj.bias": (16,)},
        Rope(head_dim=8, pairing="half", base=100.0, rotary_dim=4),
    ),
    "proportional": (
        normed,
        {
            "model_type": "gemma4_text",
            "head_dim": 8,
            "layer_types": ["sliding_attention"],
            "rope_theta": None,
            "rope_parameters": {
                "sliding_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.5,
                    "rope_theta": 100.0,
                }
            },
        },
        GROUPED | {"q_norm.weight": (8,), "k_norm.weight": (8,)},
        Rope(head_dim=8, pairing="half", explicit_inv_freq=(1.0, 100 ** (-1 / 4), 0.0, 0.0)),
    ),
    "scales of a head": (
        normed,
        {"model_type": "qwen3", "head_dim": 8},
        GROUPED | {"q_norm.weight": (8,), "k_norm.weight": (8,)},
        Rope(head_dim=8, pairing="half", base=100.0),
    ),
    "scales of all heads": (
        normed_whole,
        {"model_type": "olmo2"},
        GROUPED | {"q_norm.weight": (32,), "k_norm.weight": (16,)},
        Rope(head_dim=8, pairing="half", base=100.0),
    ),
    "scales of each head": (
        normed_apart,
        {"model_type": "stablelm", "partial_rotary_factor": 0.5},
        GROUPED
        | {f"q_layernorm.norms.{i}.weight": (8,) for i in range(4)}
        | {f"k_layernorm.norms.{i}.weight": (8,) for i in range(2)},
        Rope(head_dim=8, pairing="half", base=100.0, rotary_dim=4),
    ),
    "gated queries": (
        gated,
        {"model_type": "qwen3_next", "head_dim": 8, "layer_types": ["full_attention"]}
        | {"partial_rotary_factor": 0.5},
        GROUPED | {"q_proj.weight": (64, 32)},
        Rope(head_dim=8, pairing="half", base=100.0, rotary_dim=4),
    ),
    "fused in blocks": (
        blocks,
        {"model_type": "phi3"},
        {"qkv_proj.weight": (64, 32)},
        Rope(head_dim=8, pairing="half", base=100.0),
    ),
    "fused in groups": (
        groups,
        {"model_type": "internlm2"},
        {"wqkv.weight": (64, 32)},
        Rope(head_dim=8, pairing="half", base=100.0),
    ),
    "fused head by head": (
        triples,
        {"model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 100.0, "rope_theta": None},
        {"query_key_value.weight": (96, 32), "query_key_value.bias": (96,)},
        Rope(head_dim=8, pairing="half", base=100.0, rotary_dim=4),
    ),
    "latent attention": (
        latent,
        LATENT,
        {"q_b_proj.weight": (80, 6), "kv_a_proj_with_mqa.weight": (18, 32)}
        | {"q_a_proj.weight": (6, 32), "kv_a_layernorm.weight": (10,)},
        Rope(head_dim=8, pairing="interleaved", base=100.0),
    ),
    "a LoRA": (
        lora,
        {},
        {"q_proj.lora_A.weight": (3, 32), "q_proj.lora_B.weight": (32, 3)}
        | {"k_proj.lora_A.weight": (3, 32), "k_proj.lora_B.weight": (16, 3)},
        Rope(head_dim=8, pairing="half", base=100.0),
    ),
}
UNTOUCHED = ("v_proj", "q_a_proj", "kv_a_layernorm")


def random_layer(shapes: dict[str, Any], seed: int = 0) -> Tensors:
    """One layer's tensors."""
    rng = np.random.default_rng(seed)
    return {
        f"model.layers.0.self_attn.{name}": tensor(rng.standard_normal(shape))
        for name, shape in shapes.items()
    }


def short(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The layer's name abbreviated."""
    return {name.replace("model.layers.0.self_attn.", "L."): a for name, a in arrays.items()}


@pytest.mark.parametrize("case", CASES)
def test_scores_stay_and_the_way_back_restores_every_byte(tmp_path: Path, case: str) -> None:
    """Complex arithmetic in the old pairing before and in the new one after gives one score."""
    heads, config, shapes, rope = CASES[case]
    config = llama(num_hidden_layers=1) | config
    folder = save_folder(tmp_path / "a", config, random_layer(shapes))
    target: Any = OTHER[rope.pairing]
    there = plan_conversion(folder, target)
    write(there, tmp_path / "b", verified=True)
    before, after = (short(load(tmp_path / side / "model.safetensors")) for side in "ab")

    x = np.random.default_rng(1).standard_normal(32)
    plain = rope.to_dict() | {"pairing": target, "pairing_out": target}
    old, new = scores(heads(before, x), rope), scores(heads(after, x), Rope.from_dict(plain))
    # sums of at most 32 products of 32 terms, in another order: far below 2**-40 of their size
    np.testing.assert_allclose(new, old, rtol=0, atol=np.abs(old).max() * 2.0**-40)
    wrong = scores(heads(after, x), rope)
    assert np.abs(wrong - old).max() > np.abs(old).max() * 1e-3

    for name in shapes:
        same = np.array_equal(before[f"L.{name}"], after[f"L.{name}"])
        assert same == (name.startswith(UNTOUCHED) or "lora_A" in name), name

    back = plan_conversion(tmp_path / "b", rope.pairing, source=target, model=config)
    write(back, tmp_path / "c", verified=True)
    assert (tmp_path / "c/model.safetensors").read_bytes() == (
        tmp_path / "a/model.safetensors"
    ).read_bytes()


# rows that are neither queries nor keys, or do not turn
STILL = {
    "gated queries": ("q_proj.weight", [*range(8, 16), *range(56, 64)]),
    "fused in blocks": ("qkv_proj.weight", [*range(48, 64)]),
    "fused in groups": ("wqkv.weight", [*range(24, 32), *range(56, 64)]),
    "fused head by head": ("query_key_value.weight", [*range(4, 8), *range(16, 24), 36, 94]),
    "latent attention": ("q_b_proj.weight", [*range(12), *range(20, 32)]),
    "a part of the head": ("q_proj.weight", [4, 5, 6, 7, 12]),
}


@pytest.mark.parametrize("case", STILL)
def test_what_shares_a_tensor_with_queries_and_keys_stays(tmp_path: Path, case: str) -> None:
    """Gates, values and what carries no position."""
    _, config, shapes, rope = CASES[case]
    folder = save_folder(tmp_path / "a", llama(num_hidden_layers=1) | config, random_layer(shapes))
    target: Any = OTHER[rope.pairing]
    write(plan_conversion(folder, target), tmp_path / "b")
    before, after = (short(load(tmp_path / side / "model.safetensors")) for side in "ab")
    name, rows = STILL[case]
    assert np.array_equal(before[f"L.{name}"][rows], after[f"L.{name}"][rows])


@given(
    pairs=st.integers(1, 5),
    start=st.integers(0, 3),
    tail=st.integers(0, 3),
    heads=st.integers(1, 3),
    width=st.integers(1, 4),
    pairing=st.sampled_from(["half", "interleaved"]),
)
def test_any_slice_of_a_head_keeps_its_scores(
    tmp_path_factory: pytest.TempPathFactory,
    pairs: int,
    start: int,
    tail: int,
    heads: int,
    width: int,
    pairing: Any,
) -> None:
    """Wherever the rotated slice lies and however wide it is."""
    rope = Rope(
        head_dim=start + 2 * pairs + tail,
        pairing=pairing,
        rotary_dim=2 * pairs,
        rotary_start=start,
        base=10.0,
    )
    folder = tmp_path_factory.mktemp("slices")
    rng = np.random.default_rng(0)
    rows = heads * rope.head_dim
    file = save(
        folder / "a.safetensors",
        {name: tensor(rng.standard_normal((rows, width))) for name in ("Q", "K")},
    )
    target: Any = OTHER[pairing]
    write(
        plan_conversion(file, target, model=rope, patterns=Patterns(query=("Q",), key=("K",))),
        folder / "b.safetensors",
        verified=True,
    )
    x = rng.standard_normal(width)

    def of(path: Path) -> Heads:
        arrays = load(path)
        return cut(arrays["Q"] @ x, rope.head_dim), cut(arrays["K"] @ x, rope.head_dim)

    changed = Rope.from_dict(rope.to_dict() | {"pairing": target, "pairing_out": target})
    old, new = scores(of(file), rope), scores(of(folder / "b.safetensors"), changed)
    np.testing.assert_allclose(new, old, rtol=0, atol=1e-12 * (1 + np.abs(old).max()))


def test_cached_keys_are_converted_on_their_last_axis(tmp_path: Path) -> None:
    """A key that was rotated in one pairing and cached is the key of the other, re-ordered."""
    rope = Rope(head_dim=8, pairing="interleaved", base=100.0)
    half = Rope(head_dim=8, pairing="half", base=100.0)
    keys = np.random.default_rng(0).standard_normal((3, 5, 2, 8))  # batch, seq, heads, head_dim
    turned = np.zeros_like(keys)
    wanted = np.zeros_like(keys)
    pairs = [0, 2, 4, 6, 1, 3, 5, 7]
    for place in np.ndindex(3, 5, 2):
        turned[place] = oracle.turned(keys[place], place[1], rope)
        wanted[place] = oracle.turned(keys[place][pairs], place[1], half)
    file = save(tmp_path / "a.safetensors", {"cache.0.keys": tensor(turned)})
    patterns = Patterns(vectors=(r"cache\.\d+\.keys",))
    write(plan_conversion(file, "half", model=rope, patterns=patterns), tmp_path / "b.safetensors")
    found = load(tmp_path / "b.safetensors")["cache.0.keys"]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-14)
