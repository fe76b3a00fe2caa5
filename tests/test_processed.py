"""What a processor of transformers returns, placed as the model's own class places it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from phasor.errors import PositionError
from phasor.positions import Image, Text, Video, multimodal, processed


@dataclass(frozen=True)
class Family:
    """A class with ``get_rope_index``, and what its processor does with a video."""

    module: str
    name: str
    frames_apart: bool = False  # a time stamp before each
    temporal_merge: int = 1
    tokens_per_second: int | None = None

    def own_positions(self, arguments: dict[str, Any]) -> Any:
        """Of the class itself, ``[batch, seq, 3]``."""
        import torch

        place = f"transformers.models.{self.module}.modeling_{self.module}"
        cls = getattr(importlib.import_module(place), self.name)
        vision = SimpleNamespace(
            spatial_merge_size=2,
            temporal_merge_size=self.temporal_merge,
            tokens_per_second=self.tokens_per_second,
        )
        model = SimpleNamespace(
            config=SimpleNamespace(vision_config=vision),
            get_vision_position_ids=partial(cls.get_vision_position_ids, None),
        )
        tensors = {name: torch.tensor(value) for name, value in arguments.items() if len(value)}
        types = tensors.pop("mm_token_type_ids")
        found, _ = cls.get_rope_index(model, torch.zeros_like(types), types, **tensors)
        return found.movedim(0, -1).numpy()


FAMILIES = [
    Family("qwen2_vl", "Qwen2VLModel"),
    Family("qwen2_5_vl", "Qwen2_5_VLModel", tokens_per_second=2),
    Family("qwen3_vl", "Qwen3VLModel", frames_apart=True),
    Family("glm4v", "Glm4vModel", frames_apart=True),
    Family("ernie4_5_vl_moe", "Ernie4_5_VLMoeModel", temporal_merge=2),
]


def random_sequence(
    draw: np.random.Generator, family: Family
) -> tuple[list[int], list[Any], list[Any]]:
    """Token types of one sequence, its image grids and its video grids."""
    types: list[int] = [0] * draw.integers(1, 6)
    grids: dict[int, list[Any]] = {1: [], 2: []}
    for _ in range(draw.integers(0, 5)):
        kind = int(draw.integers(1, 3))
        frames = int(draw.integers(1, 7)) * family.temporal_merge
        # images have one frame, nearly always
        frames = frames if kind == 2 else 1 + int(frames > 5)
        height, width = 2 * draw.integers(1, 5, size=2)
        grids[kind].append([frames, int(height), int(width)])
        tokens = [kind] * int(height * width // 4)
        steps = frames // family.temporal_merge if kind == 2 else frames
        if kind == 2 and family.frames_apart:
            for _ in range(steps):
                types += [0] * draw.integers(1, 4) + tokens
        else:
            types += tokens * steps
        types += [0] * draw.integers(1, 6)  # a marker at least
    return types, grids[1], grids[2]


@pytest.mark.transformers
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.module)
def test_every_batch_is_placed_as_the_class_places_it(family: Family) -> None:
    """A hundred random batches, padded left, right or not at all, videos with their seconds."""
    for seed in range(100):
        draw = np.random.default_rng(seed)
        rows = [random_sequence(draw, family) for _ in range(draw.integers(1, 4))]
        longest = max(len(types) for types, _, _ in rows)
        types, mask = np.zeros((2, len(rows), longest), dtype=np.int64)
        side = draw.integers(0, 2)
        for row, (own, _, _) in enumerate(rows):
            place = slice(longest - len(own), None) if side else slice(len(own))
            types[row, place], mask[row, place] = own, 1
        images = [grid for _, grids, _ in rows for grid in grids]
        videos = [grid for _, _, grids in rows for grid in grids]
        arguments: dict[str, Any] = {
            "mm_token_type_ids": types,
            "image_grid_thw": images,
            "video_grid_thw": videos,
            "attention_mask": mask,
        }
        seconds: Any = ()
        if family.tokens_per_second and seed % 2:
            seconds = draw.uniform(0.1, 3, len(videos)).astype(np.float32)
            arguments["second_per_grid_ts"] = seconds
        actual = processed(
            types,
            images,
            videos,
            mask=mask,
            temporal_merge=family.temporal_merge,
            tokens_per_second=family.tokens_per_second,
            second_per_grid_ts=seconds,
        )
        np.testing.assert_array_equal(actual, family.own_positions(arguments), str(seed))


def test_packed_sequences_begin_at_zero_each() -> None:
    """As if each had a row of its own, with its own images."""
    draw = np.random.default_rng(3)
    for _ in range(20):
        rows = [random_sequence(draw, FAMILIES[0]) for _ in range(3)]
        packed = np.array([[one for types, _, _ in rows for one in types]])
        bounds = np.cumsum([0, *(len(types) for types, _, _ in rows)])
        images, videos = ([grid for row in rows for grid in row[i]] for i in (1, 2))
        actual = processed(packed, images, videos, cu_seqlens=bounds)
        alone = [processed(np.array(types), *grids) for types, *grids in rows]
        np.testing.assert_array_equal(actual[0], np.concatenate(alone))


def test_images_that_follow_each_other_keep_their_own_grids() -> None:
    """No token stands between them, and their sizes differ."""
    types = [0] + [1] * 6 + [0]
    expected = multimodal([Text(1), Image(height=1, width=2), Image(height=2, width=2), Text(1)])
    np.testing.assert_array_equal(processed(types, [[1, 2, 4], [1, 4, 4]]), expected)


@pytest.mark.parametrize(("after", "then"), [("size", 4), ("time", 9)])
def test_text_goes_on_after_a_video_where_it_is_told_to(after: Any, then: int) -> None:
    """A video of eight frames that is three tokens wide."""
    types = [0] + [2] * 24 + [0]
    actual = processed(types, (), [[8, 2, 6]], after_video=after)
    assert actual[-1].tolist() == [then] * 3
    video = Video(frames=8, height=1, width=3)
    np.testing.assert_array_equal(actual[:-1], multimodal([Text(1), video]))


BOTH: Any = {"tokens_per_second": 2, "second_per_grid_ts": [1.0, 2.0]}
REFUSED: dict[str, Callable[[], Any]] = {
    "but the last 999999999999 frames of": lambda: processed([0, 2, 0], (), [[10**12, 2, 2]]),
    "all 3 tokens of the image at token 1, got 1": lambda: processed([0, 1, 0], [[3, 2, 2]]),
    "tokens_per_second must be a finite number > 0 and <= 1e+09, got array([], dtype=float64)": (
        lambda: processed([0, 2], (), [[1, 2, 2]], tokens_per_second=np.zeros(0))  # pyright: ignore
    ),
    "all 4 tokens of the image at token 1, got 3; was the sequence cut": (
        lambda: processed([0, 1, 1, 1], [[1, 4, 4]])
    ),
    "all 4 tokens of the video at token 1, got 3": (
        lambda: processed([0, 2, 2, 2], (), [[4, 2, 2]])
    ),
    "the last 2 frames of the last video are": lambda: processed([0, 2, 0], (), [[3, 2, 2]]),
    "every image, but has no row for the image at": lambda: processed([0, 0, 1, 0]),
    "tokens in token_types (1), got 2": lambda: processed([0, 1, 0], [[1, 2, 2], [1, 2, 2]]),
    "0 (text), 1 (image), 2 (video) and 3 (audio), got 4": lambda: processed([0, 4]),
    "image_grid_thw must be [images, 3], got [3]": lambda: processed([0, 1], [1, 2, 2]),
    "at least 1 frames, and rows and columns in multiples of 2 patches, got [1, 1, 2]": lambda: (
        processed([0, 1], [[1, 1, 2]])
    ),
    "in multiples of 2 patches, got [1, 5, 4]": lambda: processed([0, 1], [[1, 5, 4]]),
    "second_per_grid_ts[0] must be a finite number > 0": (
        lambda: processed([0, 2], (), [[1, 2, 2]], tokens_per_second=2, second_per_grid_ts=[0])
    ),
    "and <= 1e+09, got [1]": (
        lambda: processed([0], tokens_per_second=2, second_per_grid_ts=[[1], [1, 2]])  # pyright: ignore
    ),
    "mask the same, got [2] and [1]": lambda: processed([0, 1], [[1, 2, 2]], mask=[1]),
    "mask must hold only 0 (padding) and 1 (token), got 2; if it numbers packed sequences, give "
    "their boundaries instead, as cu_seqlens": lambda: processed([[0] * 4], mask=[[1, 1, 2, 2]]),
    "'size' or 'time', got 'end'": lambda: processed([0], after_video="end"),  # pyright: ignore
    "the boundaries of one row of token_types, got 3 tokens for [1, 2]": (
        lambda: processed([[0, 0]], cu_seqlens=[0, 3])
    ),
    "a number for each video, got 2 for 1": lambda: processed([0, 2], (), [[1, 2, 2]], **BOTH),
    "tokens_per_second must be given with second_per_grid_ts, got None": (
        lambda: processed([0, 2], (), [[1, 2, 2]], second_per_grid_ts=[1.0])
    ),
}


def test_a_batch_of_no_tokens_has_no_positions() -> None:
    """As `multimodal` of no segments."""
    assert processed(np.zeros((2, 0), int)).shape == (2, 0, 3)
    assert processed(np.zeros(0, int)).shape == (0, 3)


def test_what_a_batch_does_not_have_may_be_none() -> None:
    """As in the classes, so that ``inputs.get`` of a processor's output can be passed on."""
    types, grids = [[0, 1, 0]], [[1, 2, 2]]
    expected = processed(types, grids, ())
    np.testing.assert_array_equal(processed(types, grids, None, second_per_grid_ts=None), expected)
    np.testing.assert_array_equal(processed([[0, 0]], None), processed([[0, 0]], ()))


@pytest.mark.parametrize("says", REFUSED)
def test_what_does_not_fit_is_refused(says: str) -> None:
    """Rather than placed somewhere."""
    with pytest.raises(PositionError) as error:
        REFUSED[says]()
    assert says in str(error.value)
