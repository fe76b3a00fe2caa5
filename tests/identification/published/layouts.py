"""Wrong pairs, slices and axes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

import phasor

from .programs import (
    Part,
    defect,
    halves,
    interleaved,
    link,
    mscale,
    part,
    powers,
    turn_halves,
    turn_interleaved,
    yarn,
)

TOKENS = np.arange(300)


@defect(
    link("NVIDIA/TensorRT-LLM", 16378),
    program="TensorRT-LLM",
    symptom="gpt-oss wrote fragments if the rotation was not fused.",
    cause="The model was declared as GPT-J's, and its checkpoint is for halves.",
)
def gpt_oss_with_interleaved_pairs() -> Part:
    """Everything is right but the pairs."""
    turn = interleaved(yarn(64, 150_000.0, 32.0, 4096, truncate=False), mscale(32.0))
    says = ("Pairing: interleaved instead of half.",)
    return part("gpt-oss-20b", {"q": turn}, TOKENS, 2, 64, changes={"q": ("pairing",)}, says=says)


@defect(
    link("huggingface/nanotron", 427),
    program="nanotron's converter",
    symptom="A converted model computed something else, without an error.",
    cause="The flag for interleaved pairs was ignored: weights and pairs disagree.",
)
def weights_permuted_and_pairs_kept() -> Part:
    """Both sides."""
    turn = interleaved(powers(128, 500_000.0))
    changes = {"q": ("pairing",), "k": ("pairing",)}
    says = ("Pairing: interleaved instead of half.",)
    turns = {"q": turn, "k": turn}
    return part("llama-3-8b", turns, TOKENS, 4, 128, changes=changes, says=says)


@defect(
    link("vllm-project/vllm", 28968),
    program="vLLM, after DeepSeek's own release",
    symptom="DeepSeek-V3.2 chose wrong keys in long texts, also in DeepSeek's own release.",
    cause="The indexer was rotated in its attention's pairing; it has halves.",
)
def indexer_in_its_attentions_pairing() -> list[Part]:
    """Two recordings: the attention is right, the indexer is not."""
    turn = interleaved(yarn(64, 10_000.0, 40.0, 4096))

    def written_as_halves(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        turned = turn(x, positions)
        return np.concatenate([turned[..., ::2], turned[..., 1::2]], -1)

    attention = phasor.preset("deepseek-v3.2").ropes[0]
    indexer = replace(attention, pairing="half", pairing_out=None)
    says = ("Pairing: interleaved instead of half.",)
    changes = {"q": ("pairing",)}
    return [
        part("deepseek-v3.2", {"q": written_as_halves}, TOKENS, 1, 64, changes={}),
        part(indexer, {"q": turn}, TOKENS, 1, 64, changes=changes, says=says),
    ]


@defect(
    link("AI-Hypercomputer/maxtext", 4616, "issues"),
    program="MaxText",
    symptom="Nothing: every shape fits.",
    cause="The class for M-RoPE ignores `partial_rotary_factor`: all 256 coordinates turn, not 64.",
)
def partial_rotation_over_the_whole_head() -> Part:
    """A text, so that all axes have one position."""
    turns = {"layers.3.q": halves(powers(256, 1e7))}
    says = ("Slice: coordinates 0 to 255 turn, instead of 0 to 63.",)
    changes = {"layer 3, q": ("slice",)}
    return part("qwen3.5-35b-a3b", turns, TOKENS, 2, 256, changes=changes, says=says)


@defect(
    link("pie-project/pie", 603),
    program="pie",
    symptom="Accuracy fell with context length for every model that rotates part of a head.",
    cause="Pairs and frequencies were those of the whole head, cut off after the rotated part.",
)
def partial_rotation_by_the_heads_width() -> Part:
    """Pairs ``(i, i + 128)`` with the head's exponents, for the first 32."""
    turns = {"layers.3.q": halves(np.where(np.arange(128) < 32, powers(256, 1e7), 0))}
    says = (
        "Slice: coordinates 0 to 255 turn, instead of 0 to 63.",
        "Frequencies differ from pair 32 on: pairs 32-127.",
    )
    changes = {"layer 3, q": ("slice", "frequencies")}
    return part("qwen3.5-35b-a3b", turns, TOKENS, 2, 256, changes=changes, says=says)


def image_positions() -> np.ndarray:
    """Time, height and width ``[1, tokens, 3]`` of text, an image of 8 by 6 patches, and text."""
    text = np.arange(20)
    rows, columns = np.divmod(np.arange(48), 6)
    image = np.stack([np.zeros(48, int), rows, columns], -1) + 20
    return np.concatenate([np.stack([text] * 3, -1), image, np.stack([text + 28] * 3, -1)])[None]


@defect(
    link("Blaizzy/mlx-vlm", 576),
    program="mlx-vlm",
    symptom="Qwen2.5-VL rotated images differently after Qwen3-VL was added.",
    cause="Qwen3-VL's interleaved sections were used for it too; it has them one after another.",
)
def sections_interleaved() -> Part:
    """T, H, W, T, H, W instead of 16 T, 24 H, 24 W."""
    axes = np.zeros(64, int)
    axes[1 : 24 * 3 : 3], axes[2 : 24 * 3 : 3] = 1, 2

    def turn(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return turn_halves(x, positions[..., axes].astype(np.float32) * powers(128, 1e6))

    says = (
        "Axes: InterleavedSections(sections=(16, 24, 24)) instead of "
        "Sectioned(sections=(16, 24, 24)).",
    )
    changes = {"q": ("axes",)}
    at = image_positions()
    return part("qwen2.5-vl-7b", {"q": turn}, at, 2, 128, changes=changes, says=says)


@defect(
    link("ggml-org/llama.cpp", 13282),
    program="llama.cpp, when Llama 4's vision was added",
    symptom="Descriptions of images were incoherent.",
    cause="Height and width came in Pixtral's order; Llama 4's is the other.",
)
def height_and_width_exchanged() -> Part:
    """Columns where rows belong."""
    axes, inv_freq = np.repeat([1, 0], 22), np.tile(powers(44, 1e4), 2)

    def turn(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return turn_interleaved(x, positions[..., axes].astype(np.float32) * inv_freq)

    says = ("Axes: coordinates (1, 0) are taken as (0, 1).",)
    changes = {"q": ("axes",)}
    at = np.stack(np.divmod(np.arange(96), 12), -1)[None]
    return part("llama-4-vision", {"q": turn}, at, 2, 88, changes=changes, says=says)
