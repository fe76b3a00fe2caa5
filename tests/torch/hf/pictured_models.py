"""Tiny random models of text and pictures, with prompts that hold a picture, and without."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

IMAGE, START, END, VIDEO = 190, 191, 192, 193
TEXT: dict[str, Any] = {
    "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 64,
    "num_key_value_heads": 1, "intermediate_size": 64, "vocab_size": 200, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 199, "max_position_embeddings": 512,
}  # fmt: skip
MARKS = {
    "image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END,
    "video_token_id": VIDEO,
}  # fmt: skip
# a picture of 4 rows and 6 columns of patches, merged by 2: 6 tokens
GRID = torch.tensor([[1, 4, 6]])


def _rope(**more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **more}}


def _patches(width: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"pixel_values": torch.randn(24, width, generator=generator), "image_grid_thw": GRID}


def _ids(picture: int) -> Tensor:
    """A prompt around that many tokens of a picture."""
    generator = torch.Generator().manual_seed(2)
    words = torch.randint(3, 180, (1, 11), generator=generator)
    marks = torch.tensor([[START] + [IMAGE] * picture + [END]])
    return torch.cat((words[:, :5], marks, words[:, 5:]), 1)


def _merged(model: Any, ids: Tensor, width: int) -> dict[str, Any]:
    kinds = (ids == IMAGE).int()
    return {"input_ids": ids, "mm_token_type_ids": kinds, **_patches(width)}


def qwen2_vl() -> tuple[Any, dict[str, Any]]:
    """Sections of time, height and width; a tower of its own arithmetic."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    config = Qwen2VLConfig(
        text_config=TEXT | _rope(mrope_section=[8, 12, 12]),
        vision_config={"depth": 2, "embed_dim": 64, "hidden_size": 128, "num_heads": 2},
        **MARKS,
    )
    model = Qwen2VLForConditionalGeneration(config)
    return model, _merged(model, _ids(6), 3 * 2 * 14 * 14)


def qwen2_5_vl() -> tuple[Any, dict[str, Any]]:
    """Windows: its tower deals the tokens' cosines out anew."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    config = Qwen2_5_VLConfig(
        text_config=TEXT | _rope(mrope_section=[8, 12, 12]),
        vision_config={
            "depth": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 64,
            "out_hidden_size": 128, "window_size": 56, "fullatt_block_indexes": [1],
        },
        **MARKS,
    )  # fmt: skip
    model = Qwen2_5_VLForConditionalGeneration(config)
    return model, _merged(model, _ids(6), 3 * 2 * 14 * 14)


def qwen3_vl() -> tuple[Any, dict[str, Any]]:
    """Axes dealt out in turn, and features of the tower's layers in those of the text."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    config = Qwen3VLConfig(
        text_config=TEXT | _rope(mrope_section=[12, 10, 10], mrope_interleaved=True),
        vision_config={
            "depth": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 64,
            "out_hidden_size": 128, "deepstack_visual_indexes": [0],
            "num_position_embeddings": 64,
        },
        **MARKS,
    )  # fmt: skip
    model = Qwen3VLForConditionalGeneration(config)
    return model, _merged(model, _ids(6), 3 * 2 * 16 * 16)


def glm4v() -> tuple[Any, dict[str, Any]]:
    """Neighbours in the text, halves in the tower."""
    from transformers import Glm4vConfig, Glm4vForConditionalGeneration

    config = Glm4vConfig(
        text_config=TEXT | _rope(mrope_section=[4, 6, 6], partial_rotary_factor=0.5),
        vision_config={
            "depth": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 64,
            "out_hidden_size": 128, "image_size": 112,
        },
        image_token_id=IMAGE, image_start_token_id=START, image_end_token_id=END,
        video_token_id=VIDEO, video_start_token_id=194, video_end_token_id=195,
    )  # fmt: skip
    model = Glm4vForConditionalGeneration(config)
    return model, _merged(model, _ids(6), 3 * 2 * 14 * 14)


PIXTRAL: dict[str, Any] = {
    "model_type": "pixtral", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "head_dim": 32, "intermediate_size": 64, "image_size": 64, "patch_size": 8,
}  # fmt: skip


def _pixels(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def llava() -> tuple[Any, dict[str, Any]]:
    """Pixtral's tower before Mistral."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(
        text_config=TEXT | _rope() | {"model_type": "mistral"}, vision_config=PIXTRAL,
        image_token_index=IMAGE, vision_feature_layer=-1, vision_feature_select_strategy="full",
    )  # fmt: skip
    model = LlavaForConditionalGeneration(config)
    pixels = {"pixel_values": _pixels(1, 3, 32, 48), "image_sizes": torch.tensor([[32, 48]])}
    return model, {"input_ids": _ids(24), **pixels}


def mistral3() -> tuple[Any, dict[str, Any]]:
    """The same tower with its patches merged."""
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    config = Mistral3Config(
        text_config=TEXT | _rope() | {"model_type": "mistral"}, vision_config=PIXTRAL,
        image_token_index=IMAGE, spatial_merge_size=2, vision_feature_layer=-1,
    )  # fmt: skip
    model = Mistral3ForConditionalGeneration(config)
    pixels = {"pixel_values": _pixels(1, 3, 32, 48), "image_sizes": torch.tensor([[32, 48]])}
    return model, {"input_ids": _ids(6), **pixels}


def llama4() -> tuple[Any, dict[str, Any]]:
    """Complex rows in both; those of the tower from a table of all its patches."""
    from transformers import Llama4Config, Llama4ForConditionalGeneration

    config = Llama4Config(
        text_config=TEXT | _rope() | {
            "intermediate_size_mlp": 64, "num_local_experts": 2, "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0], "attn_temperature_tuning": False,
        },
        vision_config={
            "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32,
            "intermediate_size": 256, "patch_size": 4, "vision_output_dim": 64,
            "projector_input_dim": 64, "projector_output_dim": 64, "pixel_shuffle_ratio": 0.5,
        },
        image_token_index=IMAGE,
    )  # fmt: skip
    model = Llama4ForConditionalGeneration(config)
    return model, {"input_ids": _ids(16), "pixel_values": _pixels(1, 3, 32, 32)}


def gemma3() -> tuple[Any, dict[str, Any]]:
    """A tower that adds its positions, and two bases in the text."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    config = Gemma3Config(
        text_config=TEXT | {"sliding_window": 16},
        vision_config={
            "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
            "intermediate_size": 64, "image_size": 32, "patch_size": 8,
        },
        mm_tokens_per_image=4, image_token_index=IMAGE, boi_token_index=START, eoi_token_index=END,
    )  # fmt: skip
    model = Gemma3ForConditionalGeneration(config)
    ids = _ids(4)
    return model, {
        "input_ids": ids, "token_type_ids": (ids == IMAGE).int(),
        "pixel_values": _pixels(1, 3, 32, 32),
    }  # fmt: skip


def gemma4() -> tuple[Any, dict[str, Any]]:
    """A tower that turns each half of a head by a coordinate, and heads after tokens everywhere."""
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    config = Gemma4Config(
        text_config=TEXT | {
            "global_head_dim": 32, "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 16, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
        },
        vision_config={
            "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32,
            "num_key_value_heads": 2, "intermediate_size": 64, "patch_size": 4,
            "pooling_kernel_size": 2, "position_embedding_size": 16,
        },
        image_token_id=IMAGE, boi_token_id=START, eoi_token_id=END, video_token_id=VIDEO,
        audio_token_id=196,
    )  # fmt: skip
    model = Gemma4ForConditionalGeneration(config)
    ids = _ids(6)
    # columns and rows of 4 by 6 patches, pooled by 2
    places = torch.cartesian_prod(torch.arange(4), torch.arange(6)).flip(-1)[None]
    return model, {
        "input_ids": ids, "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": _pixels(1, 24, 48), "image_position_ids": places,
    }  # fmt: skip


BUILT: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    one.__name__: one
    for one in (qwen2_vl, qwen2_5_vl, qwen3_vl, glm4v, llava, mistral3, llama4, gemma3, gemma4)
}


def pictured(name: str) -> tuple[Any, dict[str, Any]]:
    """A model in evaluation mode, and the arguments of a prompt with a picture.

    Weights are large enough for attention to look somewhere, so that a wrong angle shows.
    """
    torch.manual_seed(0)
    model, prompt = BUILT[name]()
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if weight.dim() > 1 and any(word in path for word in ("q_proj", "k_proj", "qkv")):
                weight *= 8
    return model.eval(), prompt


def without_picture(prompt: dict[str, Any]) -> dict[str, Any]:
    """The words of a prompt alone."""
    ids = prompt["input_ids"]
    return {"input_ids": ids[(ids < START - 1) | (ids > VIDEO)][None]}
