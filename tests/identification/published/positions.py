"""Wrong positions, or positions beyond a table."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import phasor

from .programs import (
    Part,
    Turn,
    angles_of,
    defect,
    halves,
    link,
    mscale,
    part,
    powers,
    recorded,
    rows,
    turn_halves,
    vectors,
    yarn,
)


def turned_as(map_position: Callable[[np.ndarray], np.ndarray], base: float = 10_000.0) -> Turn:
    """A program that takes positions for others."""
    return lambda x, p: turn_halves(x, angles_of(map_position(p), powers(128, base)))


def with_positions(turned: np.ndarray, base: float = 10_000.0) -> tuple[np.ndarray, np.ndarray]:
    """Vectors, and the same turned as at these positions, whichever theirs are."""
    x = vectors(len(turned), 2, 128)
    return x, turned_as(lambda p: p, base)(x, turned)


@defect(
    link("NVIDIA/Megatron-LM", 453, "issues"),
    program="Megatron-LM",
    symptom="`--reset-position-ids` changed nothing in the rotation.",
    cause="Packed documents were counted through, from 0 to the end of the sequence.",
)
def packed_documents_counted_through() -> Part:
    """Three documents in a row."""
    positions = np.concatenate([np.arange(90), np.arange(150), np.arange(60)])
    x, turned = with_positions(np.arange(300))
    recording = recorded("q", x, turned, positions)
    says = (
        "Positions count on through the recording and do not restart: "
        "token 90 (position 0) is turned as 90.",
    )
    return Part("llama-2-7b", recording, {"q": ("restart",)}, says)


@defect(
    link("lucidrains/rotary-embedding-torch", 11, "issues"),
    program="rotary-embedding-torch",
    symptom="Generation with a key cache went wrong after the first chunk.",
    cause="The cache of frequencies ignored `offset`: each chunk starts at 0.",
)
def chunks_that_start_at_0() -> Part:
    """Chunks of 100 tokens."""
    says = ("Up to position 99 it turns; from 100 on positions start again at 0 (modulo 100).",)
    changes = {"k": ("wrapped",)}
    turns = {"k": turned_as(lambda p: p % 100)}
    return part("llama-2-7b", turns, np.arange(300), 2, 128, changes=changes, says=says)


@defect(
    link("Blaizzy/mlx-vlm", 1983, "issues"),
    program="mlx-vlm",
    symptom="Qwen3-Omni gave a decoded token other states than the same token in a prompt.",
    cause="Positions were counted in each call from 0, and a call that decodes has one token.",
)
def decoded_at_position_0() -> Part:
    """A prompt of 100 tokens, then each token in its own call."""
    turns = {"q": turned_as(lambda p: np.where(p < 100, p, 0), 1e6)}
    says = ("Up to position 99 it turns; from 100 on it does not turn at all (identity).",)
    changes = {"q": ("table-end-identity",)}
    return part("qwen3-omni-30b-a3b", turns, np.arange(150), 2, 128, changes=changes, says=says)


@defect(
    link("fla-org/flash-linear-attention", 766, "issues"),
    program="flash-linear-attention",
    symptom="Decoding differed with and without a cache.",
    cause="The first layer had already counted the new token when the others asked for the length.",
)
def upper_layers_one_token_on() -> Part:
    """Layer 0 is right, layer 1 is one on."""
    turns = {"layers.0.q": turned_as(lambda p: p), "layers.1.q": turned_as(lambda p: p + 1)}
    says = ("Positions are off by +1.",)
    changes = {"layer 1, q": ("offset",)}
    return part("llama-2-7b", turns, np.arange(200, 260), 2, 128, changes=changes, says=says)


@defect(
    link("linkedin/Liger-Kernel", 477),
    program="Liger",
    symptom="Batch rows with different positions were rotated wrongly.",
    cause="The kernel read cos and sin of the first row of the batch for all rows.",
)
def cosines_of_the_first_row() -> Part:
    """A row that is padded on the left by 40 tokens, after one that is not."""
    positions = np.stack([np.arange(100), np.maximum(np.arange(100) - 40, 0)])
    x = vectors(2, 100, 2, 128)
    turned = turn_halves(x, angles_of(np.broadcast_to(np.arange(100), (2, 100)), powers(128, 1e4)))
    says = (
        "Positions: every row of the batch has those of the first: token 101 (position 0) is "
        "turned as 1.",
    )
    recording = recorded("q", x, turned, positions)
    return Part("llama-2-7b", recording, {"q": ("first-row",)}, says)


@defect(
    link("microsoft/onnxruntime", 27597),
    program="ONNX Runtime on CUDA",
    symptom="Positions beyond the table read the memory behind it; now they do not rotate.",
    cause="The table of cos and sin ends, and a kernel cannot raise an error.",
)
def table_that_ends() -> Part:
    """Vectors beyond it pass through."""
    turn = turned_as(lambda p: p)

    def ending(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return np.where((positions < 256)[..., None, None], turn(x, positions), x)

    says = ("Up to position 255 it turns; from 256 on it does not turn at all (identity).",)
    changes = {"k": ("table-end-identity",)}
    return part("llama-2-7b", {"k": ending}, np.arange(300), 2, 128, changes=changes, says=says)


@defect(
    link("sgl-project/sglang", 38786),
    program="sglang",
    symptom="A table that grew had different values from there on.",
    cause="The rows that were added had neither YaRN's frequencies nor its factor.",
)
def table_extended_without_its_law() -> Part:
    """The table's first rows are right."""
    positions = np.arange(400)
    scaled = rows(angles_of(positions, yarn(128, 1e6, 4.0, 32_768)), mscale(4.0))
    plain = rows(angles_of(positions, powers(128, 1e6)), 1.0)
    both = [np.where(positions[:, None] < 300, old[:, 0], new[:, 0])
            for old, new in zip(scaled, plain, strict=True)]  # fmt: skip
    tables = {"cos_sin_cache": np.concatenate(both, -1)}
    says = (
        "Only tokens from position 300 on are wrong.",
        "Law: Yarn is not applied, frequencies are the plain powers.",
    )
    return Part("qwen3-8b-yarn", tables, {"tables": ("tokens", "law-missing")}, says)


def phi_lists() -> tuple[np.ndarray, np.ndarray, float]:
    """Phi 3.5's frequencies by its short and long list, as its file gives them, and the factor."""
    law = phasor.preset("phi-3.5-mini").ropes[0].scaling
    plain = powers(96, 10_000.0)
    short, long = (np.float32(getattr(law, name)) for name in ("short_factors", "long_factors"))
    return plain / short, plain / long, float(np.sqrt(1 + np.log(32) / np.log(4096)))


@defect(
    link("lablup/mlxcel", 1358, "issues"),
    program="mlxcel, as mlx-lm",
    symptom="Every prompt of Phi 3.5 under 4096 tokens differed from transformers.",
    cause="Only the long list was used, at every length.",
)
def longrope_with_the_long_list() -> Part:
    """A short prompt."""
    _, long, gain = phi_lists()
    says = ("Length: its frequencies are chosen by its long list.",)
    changes = {"q": ("length",)}
    turns = {"q": halves(long, gain)}
    return part("phi-3.5-mini", turns, np.arange(300), 2, 96, changes=changes, says=says)


@defect(
    link("trymirai/uzu", 604),
    program="uzu",
    symptom="A prompt of 5511 tokens gave garbage.",
    cause="Each chunk of the prompt chose its list by its own end: the cache held both rotations.",
)
def longrope_list_chosen_by_chunk() -> Part:
    """The chunks that end before 4096 take the short list, the others the long one."""
    short, long, gain = phi_lists()
    x, at = vectors(5511, 1, 96), np.arange(5511)
    by_lists = halves(short, gain)(x, at), halves(long, gain)(x, at)
    recording = recorded("k", x, np.where((at < 4096)[:, None, None], *by_lists), at)
    says = (
        "Only some tokens, such as 1 at position 1, are wrong.",
        "Length: its frequencies are chosen by its short list.",
    )
    return Part("phi-3.5-mini", recording, {"k": ("tokens", "length")}, says)


@defect(
    link("vllm-project/vllm", 27431),
    program="vLLM",
    symptom="Random tokens appeared once a text exceeded the original context.",
    cause="The highest position of a batch chose the list for all of it, at each step anew.",
)
def longrope_list_chosen_by_the_batch() -> Part:
    """A short request beside a long one: the short one alone, with its own length."""
    _, long, gain = phi_lists()
    says = ("Length: its frequencies are chosen by its long list.",)
    changes = {"q": ("length",)}
    turns = {"q": halves(long, gain)}
    at = np.arange(200)
    return part("phi-3.5-mini", turns, at, 2, 96, changes=changes, says=says, seq_len=200)


@defect(
    link("hiyouga/LlamaFactory", 7754),
    program="LlamaFactory",
    symptom="The second text in a packed row was learned without its order.",
    cause="Only tokens whose mask is 1 were counted; the second text's mask is 2.",
)
def second_document_at_position_1() -> Part:
    """Its tokens keep the number that the tensor was made with."""
    positions = np.concatenate([np.arange(90), np.arange(110)])
    x, turned = with_positions(np.concatenate([np.arange(90), np.ones(110)]), 1e6)
    recording = recorded("q", x, turned, np.stack([positions] * 3))
    says = ("Positions restart elsewhere: token 90 (position 0) is turned as 1.",)
    return Part("qwen2.5-vl-7b", recording, {"q": ("restart",)}, says)
