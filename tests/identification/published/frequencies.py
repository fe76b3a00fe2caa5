"""Wrong or missing frequencies and factors."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from .programs import (
    Part,
    Turn,
    angles_of,
    defect,
    halves,
    interleaved,
    link,
    llama3,
    mscale,
    part,
    powers,
    recorded,
    rows,
    to_bfloat16,
    turn_halves,
    vectors,
    yarn,
)

TOKENS = np.arange(300)


def laguna(factor: float, attention_factor: float) -> dict[str, Any]:
    """A config of Laguna: YaRN on its full layers, with the factor of cos and sin in the file."""
    full = {
        "rope_type": "yarn", "factor": factor, "attention_factor": attention_factor,
        "partial_rotary_factor": 0.5, "rope_theta": 500_000.0, "beta_fast": 64.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
    }  # fmt: skip
    sliding = {"rope_type": "default", "rope_theta": 10_000.0}
    return {
        "model_type": "laguna", "num_hidden_layers": 2, "head_dim": 128, "hidden_size": 2048,
        "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 262_144,
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {"full_attention": full, "sliding_attention": sliding},
    }  # fmt: skip


def laguna_queries(factor: float, gain: float) -> dict[str, Turn]:
    """Both layers' queries; the full one's cos and sin have a gain."""
    turn = halves(yarn(64, 500_000.0, factor, 4096, beta_fast=64.0), gain)

    def full(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return np.concatenate([turn(x[..., :64], positions), x[..., 64:]], -1)

    return {"layers.0.q": full, "layers.1.q": halves(powers(128, 10_000.0))}


@defect(
    link("PrimeIntellect-ai/prime-rl", 2802),
    program="vLLM, under prime-rl",
    symptom="The KL between trainer and rollout was 0.030 from the start, instead of 0.0015.",
    cause="The file's `attention_factor` of 1 was dropped; 0.1 ln(64) + 1 took its place.",
)
def yarn_factor_from_a_formula() -> Part:
    """The trainer read the file, the rollout did not."""
    turns = laguna_queries(64.0, mscale(64.0))
    says = ("Factor: 1.41589 instead of 1.",)
    changes = {"layer 0, q": ("factor",)}
    return part(laguna(64.0, 1.0), turns, TOKENS, 2, 128, changes=changes, says=says)


@defect(
    link("sgl-project/sglang", 33558),
    program="sglang",
    symptom="GSM8K was about 20 points too low on Laguna S 2.1.",
    cause="The file's final factor was taken as one to multiply the formula's with: it is squared.",
)
def yarn_factor_twice() -> Part:
    """1.4852 became 2.2058."""
    factor = mscale(128.0)
    turns = laguna_queries(128.0, factor * factor)
    says = ("Factor: 1.485203 is multiplied twice.",)
    changes = {"layer 0, q": ("factor-twice",)}
    return part(laguna(128.0, factor), turns, TOKENS, 2, 128, changes=changes, says=says)


@defect(
    link("NVIDIA/TensorRT-LLM", 16379),
    program="TensorRT-LLM",
    symptom="Answers hardly changed; the factor was 12 % too large.",
    cause="The final factor went through the formula once more: 0.1 m ln(64) + 1 with m = 1.4159.",
)
def yarn_factor_through_the_formula_twice() -> Part:
    """The logarithm was applied twice."""
    factor = mscale(64.0)
    turns = laguna_queries(64.0, 0.1 * factor * np.log(64.0) + 1)
    says = ("Factor: 1.58885 instead of 1.415888.",)
    changes = {"layer 0, q": ("factor",)}
    return part(laguna(64.0, factor), turns, TOKENS, 2, 128, changes=changes, says=says)


@defect(
    link("ggml-org/llama.cpp", 22612),
    program="llama.cpp's converter",
    symptom="Answers were poor from a medium context length on.",
    cause="`apply_scale` of Mistral's params.json was taken as false: cos and sin have no factor.",
)
def yarn_factor_never() -> Part:
    """YaRN's frequencies alone."""
    turn = interleaved(yarn(128, 1e6, 16.0, 16_384))
    block = {
        "original_max_position_embeddings": 16_384, "factor": 16, "apply_scale": True,
        "alpha": 1, "beta": 32,
    }  # fmt: skip
    params = {
        "dim": 4096, "n_layers": 2, "head_dim": 128, "hidden_dim": 14_336, "n_heads": 32,
        "n_kv_heads": 8, "norm_eps": 1e-5, "vocab_size": 131_072, "rope_theta": 1e6, "yarn": block,
        "max_position_embeddings": 262_144,
    }  # fmt: skip
    says = ("Factor: missing, cos and sin should be multiplied by 1.277259.",)
    changes = {"q": ("factor-missing",)}
    return part(params, {"q": turn}, TOKENS, 2, 128, changes=changes, says=says)


@defect(
    link("kekzl/imp", 880),
    program="imp",
    symptom="Perplexity of DeepSeek-V2-Lite grew with text length.",
    cause="cos and sin were multiplied by `mscale_all_dim`'s factor, not by the quotient, 1.",
)
def factor_of_the_softmax_on_cos_and_sin() -> Part:
    """1.26 instead of 1."""
    gain = 0.1 * 0.707 * np.log(40.0) + 1
    turn = interleaved(yarn(64, 10_000.0, 40.0, 4096), gain)
    says = ("Factor: 1.2608 instead of 1.",)
    changes = {"k": ("factor",)}
    return part("deepseek-v2-lite", {"k": turn}, TOKENS, 1, 64, changes=changes, says=says)


@defect(
    link("sgl-project/sglang", 26187),
    program="sglang",
    symptom="LFM2 MoE differed from transformers beyond the first context.",
    cause="The class read `rope_scaling`, version 5 writes `rope_parameters`: YaRN was dropped.",
)
def yarn_never_read() -> Part:
    """Neither its frequencies nor its factor."""
    turn = halves(powers(64, 1e6))
    config = {
        "model_type": "lfm2_moe", "hidden_size": 2048, "num_attention_heads": 32,
        "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"],
        "max_position_embeddings": 256_000,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 2.0, "rope_theta": 1e6,
            "original_max_position_embeddings": 128_000,
        },
    }  # fmt: skip
    says = ("Law: Yarn is not applied, frequencies are the plain powers.",)
    changes = {"layer 1, q": ("law-missing",)}
    return part(config, {"layers.1.q": turn}, TOKENS, 4, 64, changes=changes, says=says)


@defect(
    link("sgl-project/sglang", 14745),
    program="sglang",
    symptom="Qwen3 computed wrongly, or not at all, after an update of transformers.",
    cause="`rope_theta` had moved into another block; where it was missed, 10000 is the default.",
)
def rope_theta_in_another_block() -> Part:
    """The base of the class instead of the file's."""
    turn = halves(powers(128, 10_000.0))
    says = ("Base: 10000 instead of 1000000.",)
    changes = {"k": ("base",)}
    return part("qwen3-8b", {"k": turn}, TOKENS, 2, 128, changes=changes, says=says)


@defect(
    link("lablup/mlxcel", 1340, "issues"),
    program="mlxcel",
    symptom="Gemma 3 stayed fluent, but differed from other programs, more so in longer texts.",
    cause="The block with `factor: 8` was parsed and never used: the global layers lack it.",
)
def gemma_3_without_its_factor() -> Part:
    """Positions eight times as far apart as the model knows."""
    turns = {"layers.4.q": halves(powers(256, 10_000.0)), "layers.5.q": halves(powers(256, 1e6))}
    says = ("Law: Linear is not applied, frequencies are the plain powers.",)
    changes = {"layer 5, q": ("law-missing",)}
    return part("gemma-3-4b", turns, TOKENS, 2, 256, changes=changes, says=says)


@defect(
    link("antonellof/ferrox", 39, "issues"),
    program="ferrox",
    symptom="Gemma 3 from 4B on differed from llama.cpp in local layers.",
    cause="Bases were kept by layer, the factor for all layers: local ones were divided by 8 too.",
)
def gemma_3_with_its_factor_everywhere() -> Part:
    """The local layers' base, the global layers' law."""
    of_layers = {"layers.4.q": powers(256, 10_000.0), "layers.5.q": powers(256, 1e6)}
    turns = {side: halves(inv_freq / 8) for side, inv_freq in of_layers.items()}
    says = ("Law: Linear(factor=8.0) instead of no law.",)
    changes = {"layer 4, q": ("law",)}
    return part("gemma-3-4b", turns, TOKENS, 2, 256, changes=changes, says=says)


@defect(
    link("meta-llama/llama-models", 241, "issues"),
    program="Meta's own code",
    symptom="Llama 3.2 1B and 3B wrote nonsense after 80,000 tokens.",
    cause="Llama 3.1's factor of 8 stood in the code; these two have 32.",
)
def llama_3_2_with_factor_8() -> Part:
    """Short texts show nothing of it to a reader, to numbers they do."""
    turn = halves(llama3(64, 500_000.0, 8.0))
    says = ("Law: Llama3 with factor 8 instead of 32.",)
    changes = {"q": ("law-parameter",)}
    return part("llama-3.2-1b", {"q": turn}, np.arange(2000), 2, 64, changes=changes, says=says)


@defect(
    link("unslothai/unsloth", 6197),
    program="unsloth",
    symptom="Llama 3.1 wrote gibberish after about 29,000 tokens.",
    cause="One path never applied Llama 3.1's law.",
)
def llama_3_1_without_its_law() -> Part:
    """The plain powers."""
    turn = halves(powers(128, 500_000.0))
    says = ("Law: Llama3 is not applied, frequencies are the plain powers.",)
    changes = {"k": ("law-missing",)}
    return part("llama-3.1-8b", {"k": turn}, np.arange(2000), 2, 128, changes=changes, says=says)


@defect(
    link("vllm-project/vllm", 27722, "issues"),
    program="vLLM",
    symptom="Logprobs of gpt-oss were off in policy training.",
    cause="`truncate: false` was not read: YaRN's ramp began and ended at whole pairs.",
)
def yarn_ramp_at_whole_pairs() -> Part:
    """A few pairs in the middle turn otherwise."""
    turn = halves(yarn(64, 150_000.0, 32.0, 4096), mscale(32.0))
    says = ("Law: Yarn with truncate True instead of False.",)
    changes = {"q": ("law-parameter",)}
    return part("gpt-oss-20b", {"q": turn}, np.arange(2000), 2, 64, changes=changes, says=says)


@defect(
    link("lablup/mlxcel", 1324, "issues"),
    program="mlxcel, after mlx-lm",
    symptom="InternLM 3 rotated every query and key at twice its position, at every length.",
    cause="The factor of dynamic NTK was passed as the scale of positions.",
)
def positions_doubled() -> Part:
    """A law of 2 instead of one that does nothing at this length."""

    def turn(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return turn_halves(x, angles_of(positions * 2, powers(128, 1e6)))

    says = ("It is rotated twice: R(2p) instead of R(p).",)
    changes = {"q": ("twice",)}
    return part("internlm2.5-7b", {"q": turn}, TOKENS, 2, 128, changes=changes, says=says)


@defect(
    link("NVIDIA/TensorRT-LLM", 16378),
    program="TensorRT-LLM",
    symptom="Short answers were fine, long ones fell into fragments.",
    cause="Python rotated keys, and the C++ preprocessing rotated them again before the cache.",
)
def rotated_twice() -> Part:
    """Twice the angle, and the factor squared."""
    once = halves(yarn(128, 1e6, 4.0, 32_768), mscale(4.0))

    def turn(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return once(once(x, positions), positions)

    says = (
        "It is rotated twice: R(2p) instead of R(p).",
        "Factor: 1.138629 is multiplied twice.",
    )
    changes = {"k": ("twice", "factor-twice")}
    return part("qwen3-8b-yarn", {"k": turn}, TOKENS, 2, 128, changes=changes, says=says)


@defect(
    link("NVIDIA-NeMo/Automodel", 2549),
    program="NeMo Automodel",
    symptom="A checkpoint gave different logits in transformers: a KL of 0.011.",
    cause="A cast of the whole model rounded `inv_freq` to bfloat16.",
)
def frequencies_cast_with_the_model() -> Part:
    """A later cast to float32 does not bring the digits back."""
    turn = halves(to_bfloat16(llama3(64, 500_000.0, 32.0)))
    says = ("Frequencies are rounded to bfloat16.",)
    changes = {"q": ("frequencies-in-bfloat16",)}
    return part("llama-3.2-1b", {"q": turn}, TOKENS, 2, 64, changes=changes, says=says)


@defect(
    link("deepspeedai/DeepSpeed", 4932, "issues"),
    program="DeepSpeed's zero.Init",
    symptom="Llama's tables were wrong from position 257 on.",
    cause="`arange` was made in bfloat16, which has no odd numbers beyond 256.",
)
def positions_made_in_bfloat16() -> Part:
    """A table, as the module keeps it: a row a position."""
    angles = angles_of(to_bfloat16(np.arange(600)), powers(128, 10_000.0))
    cos, sin = (np.concatenate([one[:, 0], one[:, 0]], -1) for one in rows(angles, 1.0))
    says = ("Positions are rounded to bfloat16: token 257 (position 257) is turned as 256.",)
    tables = {"cos_cached": cos, "sin_cached": sin}
    return Part("llama-2-7b", tables, {"tables": ("positions-in-bfloat16",)}, says)


@defect(
    link("huggingface/candle", 3520),
    program="candle",
    symptom="Embeddings of long texts differed from those of transformers.",
    cause="Positions and frequencies were cast to bfloat16 before they were multiplied.",
)
def angles_multiplied_in_bfloat16() -> Part:
    """Recorded in bfloat16, as the model runs."""

    def turn(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        product = to_bfloat16(positions)[..., None] * to_bfloat16(powers(128, 1e6))
        return turn_halves(x.astype(np.float32), to_bfloat16(product)).astype(x.dtype)

    x = vectors(600, 2, 128).astype(ml_dtypes.bfloat16)
    recording = recorded("q", x, turn(x, np.arange(600)), np.arange(600))
    says = ("Positions, frequencies and angles are rounded to bfloat16.",)
    changes = {"q": ("angles-in-bfloat16",)}
    return Part("qwen2.5-7b", recording, changes, says, turns={"q": turn})


@defect(
    link("Synthyra/FastPLMs", 47),
    program="FastPLMs",
    symptom="ESM3 lost all sense of position, without an error.",
    cause="`inv_freq` was made on the meta device and then was whatever the memory held.",
)
def frequencies_from_empty_memory() -> Part:
    """What it held was nearly 0."""
    turn = halves(np.full(32, 6.93e-18))
    says = ("It is not turned: every token is as at position 0.",)
    changes = {"q": ("not-turned",)}
    return part("esmc-6b", {"q": turn}, TOKENS, 2, 64, changes=changes, says=says)
