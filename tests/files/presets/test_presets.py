"""Published models: every table loads, and says what the model's makers and the survey say."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest

import phasor
from phasor import Rope
from phasor.errors import PhasorError, SpecError
from phasor.files.presets import preset, preset_names, preset_of_hub_id

from ...each import each
from ..configs.published_configs import cases
from ..refusals import refused

NAMES = preset_names()


def test_there_are_many_presets_in_alphabetical_order() -> None:
    """The names come sorted, without repeats, and cover the survey's families."""
    assert len(NAMES) >= 150
    assert list(NAMES) == sorted(set(NAMES))


@each("name", NAMES)
def test_every_preset_is_whole(name: str) -> None:
    """Each preset has a layer, a rope, its heads, a source, and notes in sentences."""
    ropes = preset(name)
    assert ropes.name == name
    assert len(ropes) >= 1
    assert any(rope is not None for rope in ropes)
    assert set(ropes.layer_kinds) == set(ropes.kinds), "no kind is described that no layer has"
    assert ropes.num_heads is not None
    assert ropes.num_kv_heads is not None
    assert ropes.num_heads % ropes.num_kv_heads == 0
    sources = [note for note in ropes.notes if note.startswith("Source: ")]
    assert len(sources) == 1
    assert len(sources[0]) > len("Source: .")
    assert all(note.endswith(".") and not note.endswith("..") for note in ropes.notes)


def test_no_preset_has_a_key_that_nothing_reads() -> None:
    """It would be passed over, and a size or a note with it."""
    known = {"like", "source", "uncertain", "hub", "extends", "rope", "size", "kinds", "prefix"}
    known |= {"pattern", "labels", "fixed", "notes", "query_factors", "auxiliary_ropes"}
    file = Path(phasor.__file__).parent / "files" / "presets.toml"
    for name, table in tomllib.loads(file.read_text("utf-8")).items():
        assert table.keys() <= known, name
        assert table.get("size", {}).keys() <= {"layers", "heads", "context"}, name


@each("name", NAMES)
def test_every_rope_survives_its_own_json(name: str) -> None:
    """Reading back what a preset's ropes write gives equal ropes."""
    for rope in preset(name).ropes:
        assert Rope.from_json(rope.to_json()) == rope


@each("name", NAMES)
def test_every_rope_has_frequencies_at_its_context(name: str) -> None:
    """Laws and sections fit their spectra, and no pair turns faster than one radian a position."""
    ropes = preset(name)
    for rope in ropes.ropes:
        turning = rope.at(ropes.context or 1).inv_freq
        assert turning.shape == (rope.num_pairs,)
        assert turning[0] > 0
        assert np.all((turning >= 0) & (turning <= 1))


@pytest.mark.parametrize(
    ("name", "head_dim", "pairing", "base", "rotary_dim"),
    [
        ("gpt-j-6b", 256, "interleaved", 1e4, 64),
        ("gpt-neox-20b", 96, "half", 1e4, 24),
        ("falcon-7b", 64, "half", 1e4, 64),
        ("llama-2-7b", 128, "half", 1e4, 128),
        ("llama-2-7b-meta", 128, "interleaved", 1e4, 128),
        ("llama-3-8b", 128, "half", 5e5, 128),
        ("mistral-7b-v0.1", 128, "half", 1e4, 128),
        ("mistral-small-3.1-24b", 128, "half", 1e9, 128),
        ("qwen2.5-7b-1m", 128, "half", 1e7, 128),
        ("qwen3-4b-2507", 128, "half", 5e6, 128),
        ("gemma-7b", 256, "half", 1e4, 256),
        ("phi-1.5", 64, "half", 1e4, 32),
        ("phi-2", 80, "half", 1e4, 32),
        ("stablelm-3b-4e1t", 80, "half", 1e4, 20),
        ("glm-4-9b", 128, "interleaved", 1e4, 64),
        ("glm-4.5-air", 128, "half", 1e6, 64),
        ("command-r-v01", 128, "interleaved", 8e6, 128),
        ("command-r-plus", 128, "interleaved", 7.5e7, 128),
        ("smollm2-1.7b", 64, "half", 1.3e5, 64),
        ("starcoder2-3b", 128, "half", 999999.4420358813, 128),
        ("nomic-embed-text-v1.5", 64, "half", 1e3, 64),
        ("minimax-m2", 128, "half", 5e6, 64),
        ("moonshine-tiny", 36, "interleaved", 1e4, 32),
    ],
)
def test_the_survey_s_table_is_what_the_preset_says(
    name: str, head_dim: int, pairing: str, base: float, rotary_dim: int
) -> None:
    """Width, pairing, base and rotated part of models that every layer of which is alike."""
    (rope,) = preset(name).ropes
    assert (rope.head_dim, rope.pairing, rope.base, rope.rotary_dim) == (
        head_dim,
        pairing,
        base,
        rotary_dim,
    )
    assert rope.scaling is None


@pytest.mark.parametrize(
    ("name", "silent"),
    [
        ("llama-4-scout", range(3, 48, 4)),
        ("llama-4-maverick", range(3, 48, 4)),
        ("smollm3-3b", range(3, 36, 4)),
        ("command-r7b", range(3, 32, 4)),
        ("tiny-aya", range(3, 36, 4)),
        ("exaone-4-32b", range(3, 64, 4)),
        ("exaone-4-1.2b", ()),
        ("qwen3-next-80b-a3b", [i for i in range(48) if i % 4 != 3]),
        ("recurrentgemma-2b", [i for i in range(26) if i % 3 != 2]),
        ("bamba-9b", [i for i in range(32) if i not in (9, 18, 27)]),
        ("lfm2-1.2b", [i for i in range(16) if i not in (2, 5, 8, 10, 12, 14)]),
    ],
)
def test_layers_without_rotation_are_named(name: str, silent: range | list[int]) -> None:
    """A layer that rotates nothing is None, at the published places only."""
    assert [i for i, rope in enumerate(preset(name)) if rope is None] == list(silent)


@pytest.mark.parametrize(
    ("name", "layers", "every"),
    [
        ("gemma-3-1b", 26, 6),
        ("gemma-3-4b", 34, 6),
        ("gemma-3-12b", 48, 6),
        ("gemma-3-27b", 62, 6),
        ("gemma-3n-e4b", 35, 5),
        ("gemma-4-e2b", 35, 5),
        ("gemma-4-31b", 60, 6),
        ("olmo-3-7b", 32, 4),
    ],
)
def test_every_nth_layer_is_full(name: str, layers: int, every: int) -> None:
    """Local layers come first and each group ends in one that sees everything."""
    kinds = preset(name).layer_kinds
    assert len(kinds) == layers
    assert [i for i, kind in enumerate(kinds) if kind == "full"] == list(
        range(every - 1, layers, every)
    )


@pytest.mark.parametrize(
    ("name", "counts", "beginning"),
    [
        ("qwen2-vl-7b", (16, 24, 24), (0,) * 16 + (1,) * 24),
        ("qwen3-vl-4b", (24, 20, 20), (0, 1, 2, 0, 1, 2)),
        ("qwen3.5-35b-a3b", (11, 11, 10), (0, 1, 2, 0, 1, 2)),
        ("glm-4.1v-9b", (8, 12, 12), (0,) * 8 + (1,) * 12),
        ("ernie-4.5-vl-28b-a3b", (20, 22, 22), (1, 2, 1, 2, 1, 2)),
        ("flux.1-dev", (8, 28, 28), (0,) * 8 + (1,) * 28),
        ("wan-2.1-14b", (22, 21, 21), (0,) * 22 + (1,) * 21),
    ],
)
def test_axes_share_the_pairs_as_published(
    name: str, counts: tuple[int, ...], beginning: tuple[int, ...]
) -> None:
    """How many pairs each axis has, and which axes have the first ones."""
    rope = preset(name).ropes[0]
    pairs = rope.axes.axis_of_pair(rope.num_pairs)
    assert tuple(pairs.count(axis) for axis in range(rope.axes.n_axes)) == counts
    assert pairs[: len(beginning)] == beginning


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3", "glm-5.1", "mistral-small-4-119b"])
def test_latent_attention_describes_its_rotated_slice(name: str) -> None:
    """The rope is that of the 64 coordinates a model rotates apart; its key is shared."""
    ropes = preset(name)
    assert {(rope.head_dim, rope.rotary_dim, rope.rotary_start) for rope in ropes.ropes} == {
        (64, 64, 0)
    }
    assert ropes.num_kv_heads == 1
    assert any("the last 64 of" in note for note in ropes.notes)


def test_deepseek_v4_rotates_the_end_of_its_head() -> None:
    """Coordinates 448 to 511 of 512 turn."""
    for rope in preset("deepseek-v4-flash").ropes:
        assert (rope.head_dim, rope.rotary_start, rope.rotary_dim) == (512, 448, 64)


@pytest.mark.parametrize("name", ["deepseek-v3", "kimi-k2", "glm-5.1", "longcat-flash"])
def test_some_models_read_interleaved_pairs_and_write_halves(name: str) -> None:
    """DeepSeek's third model and those built like it permute as they rotate."""
    (rope,) = preset(name).ropes
    assert (rope.pairing, rope.pairing_out) == ("interleaved", "half")


def test_only_nanochat_turns_the_other_way() -> None:
    """Its sine has the opposite sign."""
    backwards = [n for n in NAMES if any(rope.direction == -1 for rope in preset(n).ropes)]
    assert backwards == ["nanochat-d32"]


def test_the_makers_own_files_differ_from_hugging_face_in_pairing_alone() -> None:
    """Conversion re-pairs the weights and leaves the frequencies as they are."""
    for name in ("llama-2-7b", "llama-3.1-8b"):
        (theirs,), (stored,) = preset(f"{name}-meta").ropes, preset(name).ropes
        assert (theirs.pairing, stored.pairing) == ("interleaved", "half")
        assert np.array_equal(theirs.inv_freq, stored.inv_freq)


DOUBTED = """
    codegen-2b command-a deepseek-v4-flash hunyuan-7b apertus-8b olmo-3-32b
"""


@pytest.mark.parametrize("name", DOUBTED.split())
def test_what_no_source_settles_is_marked(name: str) -> None:
    """By a sentence in the notes that says which number it is."""
    assert any(note.startswith("Uncertain: ") for note in preset(name).notes)


@pytest.mark.parametrize("name", ["gpt-j-6b", "llama-3.1-8b", "deepseek-v3", "qwen2.5-vl-7b"])
def test_doubts_are_not_everywhere(name: str) -> None:
    """What sources confirm carries no mark, also where the table is like a doubtful one."""
    assert not any(note.startswith("Uncertain: ") for note in preset(name).notes)


@each("name", NAMES)
def test_capitals_and_punctuation_do_not_matter(name: str) -> None:
    """Each name is found as a person may write it, and never another one."""
    for spelling in (name.upper(), name.replace("-", "_"), f" {name.title()}", f"{name}!"):
        assert preset(spelling).name == name
    assert preset(name.replace("-", " ").replace(".", "-")).name == name


def test_an_unknown_name_is_answered_with_the_nearest_ones() -> None:
    """The error says what came, suggests names in spite of capitals, and tells where all are."""
    with pytest.raises(SpecError, match=r"got 'GEMMA_3_4'; did you mean 'gemma-3-4b'") as e:
        preset("GEMMA_3_4")
    assert isinstance(e.value, PhasorError)
    assert "preset_names()" in str(e.value)


@pytest.mark.parametrize("name", ["zzzz", "", None, 7], ids=repr)
def test_nonsense_is_answered_without_a_guess(name: object) -> None:
    """Nothing is near, so nothing is suggested."""
    with pytest.raises(SpecError, match=r"name must be one of the \d+ presets") as e:
        preset(name)  # type: ignore[arg-type]
    assert "did you mean" not in str(e.value)


def test_a_repository_of_the_hub_is_its_preset_whatever_its_capitals() -> None:
    """No id belongs to two presets, and none is a preset's name."""
    tables = tomllib.loads(
        Path(phasor.files.presets.__file__).with_name("presets.toml").read_text("utf-8")
    )
    ids = [one.lower() for table in tables.values() for one in table.get("hub", ())]
    assert len(ids) == len(set(ids)) > 150
    assert all(one.count("/") == 1 for one in ids)
    assert preset("META-LLAMA/llama-3.1-8b") == preset("llama-3.1-8b")
    assert phasor.load("Qwen/Qwen3-8B") == preset("qwen3-8b")


def test_a_preset_is_what_the_config_of_its_repository_says() -> None:
    """Layer by layer and in its sizes, for every published file that is named by its repository."""
    compared = 0
    for case in cases().values():
        name = re.search(r"([\w.-]+)--([\w.-]+)_config\.json$", case["source"])
        if name is None or preset_of_hub_id("/".join(name.groups())) is None:
            continue
        ours, theirs = preset("/".join(name.groups())), phasor.load(case["config"], strict=False)
        assert list(ours) == list(theirs), ours.name
        assert (ours.num_heads, ours.num_kv_heads) == (theirs.num_heads, theirs.num_kv_heads), (
            ours.name
        )
        assert ours.context == theirs.context, ours.name
        compared += 1
    assert compared > 15


def test_a_repository_that_is_no_preset_is_read_from_the_local_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And if it is not there, the error has the command that fetches it; no network is asked."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for arguments in ({}, {"part": "vision_config"}):
        with refused("not_file: hf download some/model ", path="some/model"):
            phasor.load("some/model", **arguments)
    repository = tmp_path / "models--some--model"
    snapshot = repository / "snapshots" / "1234"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("1234")
    keys = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64}
    config = keys | {"num_attention_heads": 4, "max_position_embeddings": 128}
    (snapshot / "config.json").write_text(json.dumps(config))
    assert phasor.load("some/model")[0] == Rope(head_dim=16, pairing="half")
