"""Sequences of the Omni models, placed as the models' own classes place them."""

from __future__ import annotations

import importlib
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from phasor.errors import PositionError
from phasor.positions import Audio, Image, Text, multimodal, processed

CLASSES = {
    "qwen2.5": ("qwen2_5_omni", "Qwen2_5OmniPreTrainedModelForConditionalGeneration", 25),
    "qwen3": ("qwen3_omni_moe", "Qwen3OmniMoePreTrainedModelForConditionalGeneration", 13),
}
TEXT, IMAGE, VIDEO, AUDIO, VISION_START, VISION_END, AUDIO_START, AUDIO_END = range(8)


class Class:
    """A class with ``get_rope_index``, as much of a model as that needs."""

    def __init__(self, omni: str) -> None:
        module, name, self.pace = CLASSES[omni]
        place = f"transformers.models.{module}.modeling_{module}"
        self.omni, self.module = omni, importlib.import_module(place)
        self.cls = getattr(self.module, name)
        self.model = SimpleNamespace(
            spatial_merge_size=2,
            config=SimpleNamespace(
                image_token_id=IMAGE,
                video_token_id=VIDEO,
                audio_token_id=AUDIO,
                vision_start_token_id=VISION_START,
                audio_start_token_id=AUDIO_START,
                position_id_per_seconds=self.pace,
                seconds_per_chunk=2,
                audio_config=SimpleNamespace(n_window=50),
            ),
            get_llm_pos_ids_for_vision=partial(self.cls.get_llm_pos_ids_for_vision, None),
            get_chunked_index=partial(self.cls.get_chunked_index, None),
        )

    def audio_tokens(self, frames: int) -> int:
        """Tokens of that many frames of features."""
        if self.omni == "qwen2.5":
            return ((frames - 1) // 2 + 1 - 2) // 2 + 1
        return int(self.module._get_feat_extract_output_lengths(frames))

    def mix(self, times: np.ndarray, sound: int) -> list[int]:
        """Tokens of a video with sound in the processor's order; ``times`` of those of video."""
        import torch

        if self.omni == "qwen2.5":
            of_time = torch.tensor(times.astype(np.int64)), torch.arange(sound)
            chunks = [self.model.get_chunked_index(t, 2 * self.pace, 0) for t in of_time]
            mixed: list[int] = []
            for i in range(max(map(len, chunks))):
                for kind, of_kind in zip((VIDEO, AUDIO), chunks, strict=True):
                    if i < len(of_kind):
                        mixed += [kind] * (of_kind[i][1] - of_kind[i][0])
            return mixed
        # where both are due the video comes first
        order = [(time, 0, VIDEO) for time in times] + [(time, 1, AUDIO) for time in range(sound)]
        return [kind for *_, kind in sorted(order, key=lambda one: one[:2])]

    def own_positions(self, ids: np.ndarray, mask: np.ndarray, **more: Any) -> np.ndarray:
        """Of the class itself, ``[batch, seq, 3]``."""
        import torch

        tensors = {name: torch.tensor(value) for name, value in more.items() if np.size(value)}
        found, _ = self.cls.get_rope_index(
            self.model, torch.tensor(ids), attention_mask=torch.tensor(mask), **tensors
        )
        return found.movedim(0, -1).numpy()


def random_row(
    draw: np.random.Generator, owner: Class, joins: bool, given: dict[str, Any]
) -> list[int]:
    """The ids of one sequence, whose grids, seconds and lengths are added to ``given``."""
    ids = [TEXT] * draw.integers(1, 5)
    for _ in range(draw.integers(0, 5)):
        kind = draw.choice([IMAGE, VIDEO, AUDIO])
        height, width = (2 * draw.integers(1, 5, size=2)).tolist()
        frames, seconds = int(draw.integers(1, 6)), np.float32(draw.uniform(0.1, 3))
        sound = int(draw.integers(8, 250))
        if kind == IMAGE:
            given["image_grid_thw"].append([1, height, width])
            ids += [VISION_START] + [IMAGE] * (height * width // 4) + [VISION_END]
        elif kind == AUDIO:
            given["audio_seqlens"].append(sound)
            ids += [AUDIO_START] + [AUDIO] * owner.audio_tokens(sound) + [AUDIO_END]
        else:
            given["video_grid_thw"].append([frames, height, width])
            given["second_per_grids"].append(seconds)
            times = np.arange(frames, dtype=np.float32) * seconds * np.float32(owner.pace)
            times = np.repeat(times, height * width // 4)
            if joins:
                given["audio_seqlens"].append(sound)
                mixed = owner.mix(times, owner.audio_tokens(sound))
                ids += [VISION_START, AUDIO_START, *mixed, AUDIO_END, VISION_END]
            else:
                ids += [VISION_START] + [VIDEO] * len(times) + [VISION_END]
        ids += [TEXT] * draw.integers(0, 5)
    return ids


@pytest.mark.transformers
@pytest.mark.parametrize("joins", [False, True], ids=["apart", "sound in videos"])
@pytest.mark.parametrize("omni", CLASSES)
@pytest.mark.parametrize("count", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_every_batch_is_placed_as_the_class_places_it(omni: Any, joins: bool, count: int) -> None:
    """So many random batches, padded left or right; float32 rounds each of some pieces."""
    owner = Class(omni)
    for seed in range(count):
        draw = np.random.default_rng(seed)
        given: dict[str, Any] = {
            name: []
            for name in ("image_grid_thw", "video_grid_thw", "audio_seqlens", "second_per_grids")
        }
        rows = [random_row(draw, owner, joins, given) for _ in range(draw.integers(1, 4))]
        longest, side = max(map(len, rows)), draw.integers(0, 2)
        ids, mask = np.zeros((2, len(rows), longest), dtype=np.int64)
        for row, own in enumerate(rows):
            place = slice(longest - len(own), None) if side else slice(len(own))
            ids[row, place], mask[row, place] = own, 1
        given["second_per_grids"] = np.array(given["second_per_grids"], np.float32)
        expected = owner.own_positions(ids, mask, **given, use_audio_in_video=joins)
        types = np.where(ids <= AUDIO, ids, 0)
        actual = processed(
            types, mask=mask, omni=omni, tokens_per_second=owner.pace,
            use_audio_in_video=joins, **given,
        )  # fmt: skip
        assert actual.dtype == (np.int64 if omni == "qwen2.5" else np.float64)
        pieces = 64  # of text, markers, images, videos and audio in a row, and of their products
        room = 0 if omni == "qwen2.5" else pieces * 2.0**-24 * expected.max()
        is_token = mask == 1
        np.testing.assert_allclose(
            actual[is_token], expected[is_token], rtol=0, atol=room, err_msg=str(seed)
        )


def test_audio_stands_as_text_does() -> None:
    """In a list of segments, and in a batch of token types, without further arguments."""
    segments = [Text(2), Audio(5), Image(height=1, width=2), Audio(3), Text(1)]
    as_text = [Text(7), Image(height=1, width=2), Text(4)]
    np.testing.assert_array_equal(multimodal(segments), multimodal(as_text))
    types = [0, 0, 3, 3, 3, 3, 3, 1, 1, 3, 3, 3, 0]
    np.testing.assert_array_equal(processed(types, [[1, 2, 4]]), multimodal(as_text))


VIDEO_WITH_SOUND: Any = {
    "video_grid_thw": [[2, 2, 2]], "second_per_grids": [1.0], "tokens_per_second": 25,
    "use_audio_in_video": True,
}  # fmt: skip
TYPES = [0, 0, 0, 2, 3, 2, 3, 3, 0, 0, 0]


def test_a_video_and_its_sound_begin_together() -> None:
    """Frames a second apart, three tokens of audio; the markers of one model share a position."""
    first = processed(TYPES, omni="qwen2.5", **VIDEO_WITH_SOUND)
    assert first[:, 0].tolist() == [0, 1, 1, 2, 2, 27, 3, 4, 5, 5, 6]
    second = processed(TYPES, omni="qwen3", **VIDEO_WITH_SOUND)
    assert second[:, 0].tolist() == [0, 1, 2, 3, 3, 28, 4, 5, 6, 7, 8]


REFUSED: dict[str, dict[str, Any]] = {
    "omni must be 'qwen2.5', 'qwen3' or None, got 'qwen2'": {"omni": "qwen2"},
    "omni must be 'qwen2.5' or 'qwen3' with use_audio_in_video": {"omni": None},
    "after_video='size' and second_per_grid_ts are for models": {"after_video": "size"},
    "second_per_grids must be given where there are videos, got None": {"second_per_grids": None},
    "second_per_grids[0] must be a finite number > 0": {"second_per_grids": [0.0]},
    "and <= 1e+09, got [1, 2]": {"second_per_grids": [1.0, [1, 2]]},
    "tokens_per_second must be given where there are videos": {"tokens_per_second": None},
    "second_per_grids must hold a number for each video, got 2 for 1": {"second_per_grids": [1, 1]},
    "audio_seqlens must match the audio at token 3, which has 3": {"audio_seqlens": [50]},
    "hold the audios that have tokens in token_types (1), got 2": {"audio_seqlens": [12, 12]},
    "match the video with sound at token 3, which has 2": {"video_grid_thw": [[1, 2, 2]]},
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused(message: str) -> None:
    """Each error names the argument and what came."""
    given = {"omni": "qwen2.5", **VIDEO_WITH_SOUND, **REFUSED[message]}
    with pytest.raises(PositionError) as caught:
        processed(TYPES, **given)
    assert message in str(caught.value)


def test_a_video_with_sound_has_its_markers() -> None:
    """Two on each side, which share a position."""
    with pytest.raises(PositionError, match="two markers on each side"):
        processed([0, 2, 3, 2, 0, 0], omni="qwen2.5", **VIDEO_WITH_SOUND)
