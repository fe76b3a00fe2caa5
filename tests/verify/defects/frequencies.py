"""Frequencies and factors that a program read wrongly, or did not read."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from .museum import (
    Part,
    angles_of,
    defect,
    link,
    llama3,
    mscale,
    powers,
    recorded,
    rows,
    to_bfloat16,
    turn_halves,
    turn_interleaved,
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


def laguna_queries(factor: float, gain: float) -> dict[str, np.ndarray]:
    """Both layers' queries; the full one's cos and sin have a gain."""
    x = vectors(1, 300, 2, 128)
    angles = angles_of(TOKENS, yarn(64, 500_000.0, factor, 4096, beta_fast=64.0))
    full = np.concatenate([turn_halves(x[..., :64], angles, gain), x[..., 64:]], -1)
    sliding = turn_halves(x, angles_of(TOKENS, powers(128, 10_000.0)))
    return recorded("layers.0.q", x, full, TOKENS) | recorded("layers.1.q", x, sliding, TOKENS)


@defect(
    link("PrimeIntellect-ai/prime-rl", 2802),
    program="vLLM, under prime-rl",
    symptom="The KL of trainer and rollout was 0.030 from the first step on, in place of 0.0015.",
    cause="The file's `attention_factor` of 1 was dropped; 0.1 ln(64) + 1 took its place.",
)
def yarn_factor_from_a_formula() -> Part:
    """The trainer read the file, the rollout did not."""
    recording = laguna_queries(64.0, mscale(64.0))
    says = ("Factor: 1.41589 in place of 1.",)
    return Part(laguna(64.0, 1.0), recording, {"layer 0, q": ("factor",)}, says)


@defect(
    link("sgl-project/sglang", 33558),
    program="sglang",
    symptom="GSM8K was about 20 points too low on Laguna S 2.1.",
    cause="The file's final factor was taken as one to multiply the formula's with: it is squared.",
)
def yarn_factor_twice() -> Part:
    """1.4852 became 2.2058."""
    factor = mscale(128.0)
    recording = laguna_queries(128.0, factor * factor)
    says = ("Factor: 1.485203 is multiplied twice.",)
    return Part(laguna(128.0, factor), recording, {"layer 0, q": ("factor-twice",)}, says)


@defect(
    link("NVIDIA/TensorRT-LLM", 16379),
    program="TensorRT-LLM",
    symptom="It hardly showed in the answers; the factor was 12 % too large.",
    cause="The final factor went through the formula once more: 0.1 m ln(64) + 1 with m = 1.4159.",
)
def yarn_factor_through_the_formula_twice() -> Part:
    """The logarithm was applied twice."""
    factor = mscale(64.0)
    recording = laguna_queries(64.0, 0.1 * factor * np.log(64.0) + 1)
    says = ("Factor: 1.58885 in place of 1.415888.",)
    return Part(laguna(64.0, factor), recording, {"layer 0, q": ("factor",)}, says)


@defect(
    link("ggml-org/llama.cpp", 22612),
    program="llama.cpp's converter",
    symptom="Answers were poor from a middle length of context on.",
    cause="`apply_scale` of Mistral's params.json was taken as false: cos and sin have no factor.",
)
def yarn_factor_never() -> Part:
    """YaRN's frequencies alone."""
    x = vectors(1, 300, 2, 128)
    turned = turn_interleaved(x, angles_of(TOKENS, yarn(128, 1e6, 16.0, 16_384)))
    block = {
        "original_max_position_embeddings": 16_384, "factor": 16, "apply_scale": True,
        "alpha": 1, "beta": 32,
    }  # fmt: skip
    params = {
        "dim": 4096, "n_layers": 2, "head_dim": 128, "hidden_dim": 14_336, "n_heads": 32,
        "n_kv_heads": 8, "norm_eps": 1e-5, "vocab_size": 131_072, "rope_theta": 1e6, "yarn": block,
        "max_position_embeddings": 262_144,
    }  # fmt: skip
    says = ("Factor: missing, cos and sin are to be multiplied by 1.277259.",)
    return Part(params, recorded("q", x, turned, TOKENS), {"q": ("factor-missing",)}, says)


@defect(
    link("kekzl/imp", 880),
    program="imp",
    symptom="Perplexity of DeepSeek-V2-Lite grew with the length of the text.",
    cause="cos and sin were multiplied by `mscale_all_dim`'s factor, not by the quotient, 1.",
)
def factor_of_the_softmax_on_cos_and_sin() -> Part:
    """1.26 in place of 1."""
    x = vectors(300, 1, 64)
    angles = angles_of(TOKENS, yarn(64, 10_000.0, 40.0, 4096))
    turned = turn_interleaved(x, angles, 0.1 * 0.707 * np.log(40.0) + 1)
    recording = recorded("k", x, turned, TOKENS)
    return Part(
        "deepseek-v2-lite", recording, {"k": ("factor",)}, ("Factor: 1.2608 in place of 1.",)
    )


@defect(
    link("sgl-project/sglang", 26187),
    program="sglang",
    symptom="LFM2 MoE differed from transformers beyond the first context.",
    cause="The class read `rope_scaling`, version 5 writes `rope_parameters`: YaRN was dropped.",
)
def yarn_never_read() -> Part:
    """Neither its frequencies nor its factor."""
    x = vectors(300, 4, 64)
    turned = turn_halves(x, angles_of(TOKENS, powers(64, 1e6)))
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
    recording = recorded("layers.1.q", x, turned, TOKENS)
    return Part(config, recording, {"layer 1, q": ("law-missing",)}, says)


@defect(
    link("sgl-project/sglang", 14745),
    program="sglang",
    symptom="Qwen3 computed wrongly, or not at all, after an update of transformers.",
    cause="`rope_theta` had moved into another block; where it was missed, 10000 is the default.",
)
def rope_theta_in_another_block() -> Part:
    """The base of the class in place of the file's."""
    x = vectors(300, 2, 128)
    turned = turn_halves(x, angles_of(TOKENS, powers(128, 10_000.0)))
    recording = recorded("k", x, turned, TOKENS)
    return Part("qwen3-8b", recording, {"k": ("base",)}, ("Base: 10000 in place of 1000000.",))


@defect(
    link("lablup/mlxcel", 1340, "issues"),
    program="mlxcel",
    symptom="Gemma 3 stayed fluent, but differed more from other programs the longer a text was.",
    cause="The block with `factor: 8` was parsed and never used: the global layers lack it.",
)
def gemma_3_without_its_factor() -> Part:
    """Positions eight times as far apart as the model knows."""
    x = vectors(300, 2, 256)
    local = turn_halves(x, angles_of(TOKENS, powers(256, 10_000.0)))
    full = turn_halves(x, angles_of(TOKENS, powers(256, 1e6)))
    recording = recorded("layers.4.q", x, local, TOKENS) | recorded("layers.5.q", x, full, TOKENS)
    says = ("Law: Linear is not applied, frequencies are the plain powers.",)
    return Part("gemma-3-4b", recording, {"layer 5, q": ("law-missing",)}, says)


@defect(
    link("antonellof/ferrox", 39, "issues"),
    program="ferrox",
    symptom="Gemma 3 of 4B and more differed from llama.cpp in its local layers.",
    cause="Bases were kept by layer, the factor for all layers: local ones were divided by 8 too.",
)
def gemma_3_with_its_factor_everywhere() -> Part:
    """The local layers' base, the global layers' law."""
    x = vectors(300, 2, 256)
    local = turn_halves(x, angles_of(TOKENS, powers(256, 10_000.0) / 8))
    full = turn_halves(x, angles_of(TOKENS, powers(256, 1e6) / 8))
    recording = recorded("layers.4.q", x, local, TOKENS) | recorded("layers.5.q", x, full, TOKENS)
    says = ("Law: Linear(factor=8.0) in place of no law.",)
    return Part("gemma-3-4b", recording, {"layer 4, q": ("law",)}, says)


@defect(
    link("meta-llama/llama-models", 241, "issues"),
    program="Meta's own code",
    symptom="Llama 3.2 of 1B and 3B wrote nonsense after 80,000 tokens.",
    cause="Llama 3.1's factor of 8 stood in the code; these two have 32.",
)
def llama_3_2_with_factor_8() -> Part:
    """Short texts show nothing of it to a reader, to numbers they do."""
    x = vectors(2000, 2, 64)
    tokens = np.arange(2000)
    turned = turn_halves(x, angles_of(tokens, llama3(64, 500_000.0, 8.0)))
    says = ("Law: Llama3 with factor 8 in place of 32.",)
    recording = recorded("q", x, turned, tokens)
    return Part("llama-3.2-1b", recording, {"q": ("law-parameter",)}, says)


@defect(
    link("unslothai/unsloth", 6197),
    program="unsloth",
    symptom="Llama 3.1 wrote gibberish after about 29,000 tokens.",
    cause="One path never applied Llama 3.1's law.",
)
def llama_3_1_without_its_law() -> Part:
    """The plain powers."""
    x = vectors(2000, 2, 128)
    tokens = np.arange(2000)
    turned = turn_halves(x, angles_of(tokens, powers(128, 500_000.0)))
    says = ("Law: Llama3 is not applied, frequencies are the plain powers.",)
    recording = recorded("k", x, turned, tokens)
    return Part("llama-3.1-8b", recording, {"k": ("law-missing",)}, says)


@defect(
    link("vllm-project/vllm", 27722, "issues"),
    program="vLLM",
    symptom="Logprobs of gpt-oss were off where a policy was trained.",
    cause="`truncate: false` was not read: YaRN's ramp began and ended at whole pairs.",
)
def yarn_ramp_at_whole_pairs() -> Part:
    """A few pairs in the middle turn otherwise."""
    x = vectors(2000, 2, 64)
    tokens = np.arange(2000)
    angles = angles_of(tokens, yarn(64, 150_000.0, 32.0, 4096))
    recording = recorded("q", x, turn_halves(x, angles, mscale(32.0)), tokens)
    says = ("Law: Yarn with truncate True in place of False.",)
    return Part("gpt-oss-20b", recording, {"q": ("law-parameter",)}, says)


@defect(
    link("lablup/mlxcel", 1324, "issues"),
    program="mlxcel, after mlx-lm",
    symptom="InternLM 3 rotated every query and key at twice its position, at every length.",
    cause="The factor of dynamic NTK was passed as the scale of positions.",
)
def positions_doubled() -> Part:
    """A law of 2 in place of one that does nothing at this length."""
    x = vectors(300, 2, 128)
    turned = turn_halves(x, angles_of(TOKENS * 2, powers(128, 1e6)))
    recording = recorded("q", x, turned, TOKENS)
    says = ("It is rotated twice: R(2p) in place of R(p).",)
    return Part("internlm2.5-7b", recording, {"q": ("twice",)}, says)


@defect(
    link("NVIDIA/TensorRT-LLM", 16378),
    program="TensorRT-LLM",
    symptom="Short answers were fine, long ones fell into fragments.",
    cause="Python rotated keys, and the C++ preprocessing rotated them again before the cache.",
)
def rotated_twice() -> Part:
    """Twice the angle, and the factor squared."""
    x = vectors(300, 2, 128)
    angles = angles_of(TOKENS, yarn(128, 1e6, 4.0, 32_768))
    turned = turn_halves(turn_halves(x, angles, mscale(4.0)), angles, mscale(4.0))
    recording = recorded("k", x, turned, TOKENS)
    says = (
        "It is rotated twice: R(2p) in place of R(p).",
        "Factor: 1.138629 is multiplied twice.",
    )
    return Part("qwen3-8b-yarn", recording, {"k": ("twice", "factor-twice")}, says)


@defect(
    link("NVIDIA-NeMo/Automodel", 2549),
    program="NeMo Automodel",
    symptom="A checkpoint loaded in transformers gave other logits: a KL of 0.011.",
    cause="A cast of the whole model rounded `inv_freq` to bfloat16.",
)
def frequencies_in_bfloat16() -> Part:
    """A later cast to float32 does not bring the digits back."""
    x = vectors(300, 2, 64)
    turned = turn_halves(x, angles_of(TOKENS, to_bfloat16(llama3(64, 500_000.0, 32.0))))
    says = ("Frequencies are rounded to bfloat16.",)
    recording = recorded("q", x, turned, TOKENS)
    return Part("llama-3.2-1b", recording, {"q": ("frequencies-in-bfloat16",)}, says)


@defect(
    link("deepspeedai/DeepSpeed", 4932, "issues"),
    program="DeepSpeed's zero.Init",
    symptom="Llama's tables were wrong from position 257 on.",
    cause="`arange` was made in bfloat16, which has no odd numbers beyond 256.",
)
def positions_in_bfloat16() -> Part:
    """A table, as the module keeps it: a row a position."""
    angles = angles_of(to_bfloat16(np.arange(600)), powers(128, 10_000.0))
    cos, sin = (np.concatenate([one[:, 0], one[:, 0]], -1) for one in rows(angles, 1.0))
    says = ("Positions are rounded to bfloat16: token 257 (position 257) is turned as 256.",)
    tables = {"cos_cached": cos, "sin_cached": sin}
    return Part("llama-2-7b", tables, {"tables": ("positions-in-bfloat16",)}, says)


@defect(
    link("huggingface/candle", 3520),
    program="candle",
    symptom="Embeddings of long texts were unlike those of transformers.",
    cause="Positions and frequencies were cast to bfloat16 before they were multiplied.",
)
def angles_in_bfloat16() -> Part:
    """Recorded in bfloat16, as the model runs."""
    x = vectors(600, 2, 128).astype(ml_dtypes.bfloat16)
    product = to_bfloat16(np.arange(600))[:, None] * to_bfloat16(powers(128, 1e6))
    wide = turn_halves(x.astype(np.float32), to_bfloat16(product))
    recording = recorded("q", x, wide.astype(ml_dtypes.bfloat16), np.arange(600))
    says = ("Positions, frequencies and angles are rounded to bfloat16.",)
    return Part("qwen2.5-7b", recording, {"q": ("angles-in-bfloat16",)}, says)


@defect(
    link("Synthyra/FastPLMs", 47),
    program="FastPLMs",
    symptom="ESM3 lost all sense of position, without an error.",
    cause="`inv_freq` was made on the meta device and then was whatever the memory held.",
)
def frequencies_from_empty_memory() -> Part:
    """What it held was nearly 0."""
    x = vectors(300, 2, 64)
    turned = turn_halves(x, angles_of(TOKENS, np.full(32, 6.93e-18)))
    says = ("It is not turned: every token is as at position 0.",)
    return Part("esmc-6b", recorded("q", x, turned, TOKENS), {"q": ("not-turned",)}, says)
