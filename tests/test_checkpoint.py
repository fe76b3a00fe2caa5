"""Conversion of checkpoints: which tensors change, and the bytes that must not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phasor.checkpoint import CheckpointError, Patterns, _verify, _write, plan, verify, write
from phasor.checkpoint._names import known_part
from phasor.checkpoint._verify import compare_scores

from .checkpoints import (
    Tensors,
    header_of,
    in_file,
    llama,
    llama_tensors,
    load,
    save,
    save_folder,
    tensor,
)

LATENT = {"model_type": "deepseek_v3", "qk_rope_head_dim": 8, "qk_nope_head_dim": 12}


def latent_layer(layer: int) -> Tensors:
    """Queries of 20 rows a head, and a key of 8 after a latent vector of 10."""
    name = f"model.layers.{layer}.self_attn."
    return {
        f"{name}q_b_proj.weight": tensor(np.zeros((80, 6))),
        f"{name}kv_a_proj_with_mqa.weight": tensor(np.zeros((18, 32))),
    }


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [("F64", 64), ("F32", 32), ("BF16", 16), ("F16", 16), ("F8_E4M3", 8), ("F8_E5M2", 8), ("I8", 8),
     ("F4", 4)],
)  # fmt: skip
def test_every_dtype_moves_as_bytes(tmp_path: Path, dtype: str, bits: int) -> None:
    """Rows move whole, whatever a number is: NaN payloads and all."""
    rng = np.random.default_rng(0)
    rows = {c: rng.integers(0, 256, (8, 6 * bits // 8), dtype=np.uint8) for c in "qkv"}
    folder = save_folder(
        tmp_path / "a",
        llama(num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=8),
        {
            f"model.layers.0.self_attn.{c}_proj.weight": (dtype, [8, 6], rows[c].tobytes())
            for c in "qkv"
        },
    )
    write(plan(folder, "interleaved"), tmp_path / "b", verified=True)
    data = (tmp_path / "b/model.safetensors").read_bytes()
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    wanted = rows["q"][order].tobytes() + rows["k"][order].tobytes() + rows["v"].tobytes()
    assert data.endswith(wanted)
    assert data[: -len(wanted)] == (folder / "model.safetensors").read_bytes()[: -len(wanted)]


@pytest.mark.parametrize("chunk", [1, 64, 300, 5000])
def test_the_size_of_what_is_read_at_a_time_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """Not even where it is smaller than a row."""
    folder = save_folder(tmp_path / "a", llama(), llama_tensors())
    write(plan(folder, "interleaved"), tmp_path / "whole")
    for module in (_write, _verify):
        monkeypatch.setattr(module, "CHUNK", chunk)
    write(plan(folder, "interleaved"), tmp_path / "b", verified=True)
    whole, b = (tmp_path / side / "model.safetensors" for side in ("whole", "b"))
    assert whole.read_bytes() == b.read_bytes()


def test_shards_and_their_index_become_shards_and_their_index(tmp_path: Path) -> None:
    """Each under its old name, with its old header; nothing else is in the folder."""
    tensors = llama_tensors()
    names = list(tensors)
    shards = [{n: tensors[n] for n in names[:4]}, {n: tensors[n] for n in names[4:]}]
    folder = save_folder(tmp_path / "a", llama(), *shards)
    write(plan(folder, "interleaved"), tmp_path / "b", verified=True)
    assert {path.name for path in (tmp_path / "b").iterdir()} == {
        "model-1-of-2.safetensors",
        "model-2-of-2.safetensors",
        "model.safetensors.index.json",
    }
    index = "model.safetensors.index.json"
    assert (tmp_path / "b" / index).read_bytes() == (folder / index).read_bytes()

    whole = save_folder(tmp_path / "whole", llama(), tensors)
    write(plan(whole, "interleaved"), tmp_path / "c")
    together = load(tmp_path / "c/model.safetensors")
    for shard in ("model-1-of-2.safetensors", "model-2-of-2.safetensors"):
        for name, array in load(tmp_path / "b" / shard).items():
            assert np.array_equal(array, together[name])


def test_the_header_stays_with_its_padding_and_order(tmp_path: Path) -> None:
    """Metadata, spaces and the order of names are the source's."""
    tensors = llama_tensors()
    data = b"".join(data for _, _, data in tensors.values())
    said = header_of(tensors, {"format": "pt", "what": "Grüße"})
    text = json.dumps(dict(reversed(said.items())), indent=1, ensure_ascii=False) + " " * 7
    (tmp_path / "a.safetensors").write_bytes(in_file(text, data))
    write(
        plan(tmp_path / "a.safetensors", "interleaved", model=llama()), tmp_path / "b.safetensors"
    )
    begin = 8 + len(text.encode())
    old, new = ((tmp_path / f"{c}.safetensors").read_bytes() for c in "ab")
    assert new[:begin] == old[:begin]
    assert new[begin:] != old[begin:]


def test_the_library_of_the_format_reads_the_result(tmp_path: Path) -> None:
    """It opens, and holds the arrays that were meant."""
    import safetensors.numpy as library

    folder = save_folder(tmp_path / "a", llama(), llama_tensors(dtype=np.float32))
    write(plan(folder, "interleaved"), tmp_path / "b")
    before = library.load_file(folder / "model.safetensors")
    after = library.load_file(tmp_path / "b/model.safetensors")
    assert before.keys() == after.keys()
    order = [8 * head + place for head in range(4) for place in (0, 4, 1, 5, 2, 6, 3, 7)]
    name = "model.layers.1.self_attn.q_proj.weight"
    assert np.array_equal(after[name], before[name][order])


def test_layers_without_rotation_keep_every_byte(tmp_path: Path) -> None:
    """There is nothing to re-pair where nothing turns."""
    config = llama(model_type="smollm3", no_rope_layers=[1, 0])
    folder = save_folder(tmp_path / "a", config, llama_tensors())
    assert {name.split(".")[2] for name in plan(folder, "interleaved").changes} == {"0"}


def test_towers_for_pictures_are_left_alone_and_named(tmp_path: Path) -> None:
    """Their heads and their rotation are other ones."""
    tower = "vision_tower.encoder.layers.0.self_attn.q_proj.weight"
    tensors = llama_tensors() | {tower: tensor(np.zeros((6, 6)))}
    config = {"model_type": "llava", "text_config": llama()}
    found = plan(save_folder(tmp_path / "a", config, tensors), "interleaved")
    assert tower not in found.changes
    assert dict(found.alike) == {"vision_tower.encoder.layers.*.self_attn.q_proj.weight": 1}


def test_layers_for_several_tokens_take_the_one_rope(tmp_path: Path) -> None:
    """DeepSeek's stand after the layers that the config counts."""
    tensors = latent_layer(0) | latent_layer(1)
    config = llama(num_hidden_layers=1) | LATENT
    found = plan(save_folder(tmp_path / "a", config, tensors), "half")
    assert sorted(name.split(".")[2] for name in found.changes) == ["0", "0", "1", "1"]


OWN_FILES: dict[str, tuple[dict[str, Any], dict[str, tuple[int, int]], list[str]]] = {
    "Meta's": (
        {"dim": 32, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "rope_theta": 100.0},
        {"attention.wq": (32, 32), "attention.wk": (16, 32), "attention.wv": (16, 32)},
        ["wq", "wk"],
    ),
    "DeepSeek's": (
        {"dim": 32, "n_layers": 1, "n_heads": 4, "inter_dim": 8, "qk_rope_head_dim": 8},
        {"attn.wq_b": (80, 6), "attn.wkv_a": (18, 32), "attn.wkv_b": (24, 10)},
        ["wq_b", "wkv_a"],
    ),
}


@pytest.mark.parametrize("author", OWN_FILES)
def test_files_of_a_models_authors_are_interleaved(tmp_path: Path, author: str) -> None:
    """Their configs say so by their form, and their tensors have other names."""
    config, shapes, changed = OWN_FILES[author]
    tensors = {f"layers.0.{name}.weight": tensor(np.zeros(s)) for name, s in shapes.items()}
    found = plan(save(tmp_path / "a.safetensors", tensors), "half", model=config)
    assert found.source == "interleaved"
    assert [name.split(".")[3] for name in found.changes] == changed


def test_a_module_for_several_tokens_counts_its_layers_anew(tmp_path: Path) -> None:
    """Qwen3-Next's layer 0 does not rotate; the layer 0 of its other module does."""
    config = llama(model_type="qwen3_next", layer_types=["linear_attention", "full_attention"])
    config |= {"head_dim": 8, "partial_rotary_factor": 0.5}
    kept = {n: t for n, t in llama_tensors().items() if ".1.self_attn" in n}
    extra = {n.replace("model.layers.1", "mtp.layers.0"): t for n, t in kept.items()}
    found = plan(save_folder(tmp_path / "a", config, kept | extra), "interleaved")
    assert {name.split(".self_attn")[0] for name in found.changes} == {
        "model.layers.1",
        "mtp.layers.0",
    }


def test_a_layer_beyond_the_config_is_refused_where_ropes_differ(tmp_path: Path) -> None:
    """Which of the ropes turns it is not known."""
    config = llama(model_type="gemma3_text", head_dim=8, rope_local_base_freq=10.0)
    config |= {"layer_types": ["full_attention", "sliding_attention"]}
    tensors = llama_tensors()
    assert plan(save_folder(tmp_path / "a", config, tensors), "interleaved").changes
    beyond = {n.replace("layers.1", "layers.2"): t for n, t in tensors.items()}
    with pytest.raises(CheckpointError, match=r"'model.layers.2\S*' is in none of the 2 layers"):
        plan(save_folder(tmp_path / "b", config, beyond), "interleaved")


@pytest.mark.parametrize(
    ("block", "head_dim", "fits"), [(8, 8, True), (16, 8, True), (4, 8, False), (12, 8, False)]
)
def test_scales_of_blocks_stay_only_where_rows_stay_in_them(
    tmp_path: Path, block: int, head_dim: int, fits: bool
) -> None:
    """A weight quantised in blocks converts exactly, or not at all."""
    rows = {"q": 32, "k": 16, "v": 16}
    tensors: Tensors = {}
    for c, count in rows.items():
        name = f"model.layers.0.self_attn.{c}_proj.weight"
        tensors[name] = ("F8_E4M3", [count, 4], bytes(range(count)) * 4)
        tensors[f"{name}_scale_inv"] = tensor(np.ones((-(-count // block), 1), np.float32))
    config = llama(
        num_hidden_layers=1,
        head_dim=head_dim,
        quantization_config={"quant_method": "fp8", "weight_block_size": [block, block]},
    )
    folder = save_folder(tmp_path / "a", config, tensors)
    if fits:
        assert {name.split(".")[4] for name in plan(folder, "interleaved").changes} == {
            "q_proj",
            "k_proj",
        }
        assert not any("scale" in name for name in plan(folder, "interleaved").changes)
    else:
        with pytest.raises(CheckpointError, match=f"blocks of {block}"):
            plan(folder, "interleaved")


def test_scales_of_rows_move_with_their_rows(tmp_path: Path) -> None:
    """And a scale of the whole tensor stays."""
    tensors = llama_tensors()
    numbers = np.arange(32, dtype=np.float32)[:, None]
    for c, count in (("q", 32), ("k", 16)):
        name = f"model.layers.0.self_attn.{c}_proj."
        tensors[f"{name}weight_scale"] = tensor(numbers[:count])
        tensors[f"{name}input_scale"] = tensor(np.float32(3))
    folder = save_folder(tmp_path / "a", llama(), tensors)
    write(plan(folder, "interleaved"), tmp_path / "b", verified=True)
    found = load(tmp_path / "b/model.safetensors")
    scale = found["model.layers.0.self_attn.q_proj.weight_scale"][:, 0]
    assert scale[:10].tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12]
    assert found["model.layers.0.self_attn.q_proj.input_scale"] == 3


NAMES = {
    "model.layers.0.self_attn.q_proj.weight": "query",  # Llama and most others
    "language_model.model.layers.0.self_attn.k_proj.bias": "key",
    "base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight": "query",
    "backbone_model.layers.0.self_attn.q_proj.weight": "query",  # CSM
    "model.layers.0.self_attn.q_proj.linear.weight": "query",  # Moshi
    "transformer.h.0.attn.attention.k_proj.weight": "key",  # EXAONE
    "transformer.h.0.attn.q_proj.weight": "query",  # GPT-J
    "roformer.encoder.layer.0.attention.self.key.weight": "key",
    "layers.0.attention.wq.weight": "query",  # Meta's and Mistral's own files
    "layers.0.attention.wkv_a_with_mqa.weight": "latent key",  # Mistral's own files
    "layers.0.attn.wq_b.weight": "query",  # DeepSeek's own files
    "layers.0.attn.wkv_a.weight": "latent key",
    "model.layers.0.self_attn.1.kv_a_proj_with_mqa.weight": "latent key",  # LongCat
    "transformer.encoder.layers.0.self_attention.query_key_value.weight": "fused",  # ChatGLM
    "encoder.layers.0.attn.Wqkv.weight": "fused",  # Nomic
    "model.layers.0.self_attn.key_layernorm.weight": "vectors",  # Hunyuan
    "mtp.layers.0.self_attn.q_norm.weight": "vectors",  # Qwen3-Next
    "model.layers.0.self_attn.v_proj.weight": None,
    "model.layers.0.self_attn.q_a_proj.weight": None,
    "model.layers.0.self_attn.kv_a_layernorm.weight": None,
    "model.layers.0.self_attn.kv_b_proj.weight": None,
    "model.layers.0.cross_attn.q_proj.weight": None,
    "model.layers.0.linear_attn.q_proj.weight": None,
    "model.layers.0.self_attn.q_proj_like.weight": None,
    "model.vision_tower.encoder.layers.0.self_attn.q_proj.weight": None,
    "visual.blocks.0.attn.qkv.weight": None,
    "depth_decoder.model.layers.0.self_attn.q_proj.weight": None,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_says_what_a_tensor_is(name: str) -> None:
    """By the names that model classes and their authors' files use."""
    part = known_part(name)
    assert (None if part is None else part.role) == NAMES[name]


@pytest.mark.parametrize("spoil", ["a row", "an untouched tensor", "the header"])
def test_verify_finds_one_wrong_byte(tmp_path: Path, spoil: str) -> None:
    """Wherever it is."""
    folder = save_folder(tmp_path / "a", llama(), llama_tensors())
    conversion = plan(folder, "interleaved")
    write(conversion, tmp_path / "b")
    verify(conversion, tmp_path / "b")
    path = tmp_path / "b/model.safetensors"
    data = bytearray(path.read_bytes())
    begin = conversion.checkpoint.files["model.safetensors"].begin
    tensors = conversion.checkpoint.files["model.safetensors"].tensors
    at = {
        "a row": tensors["model.layers.1.self_attn.k_proj.weight"].begin + 300,
        "an untouched tensor": tensors["model.layers.1.self_attn.v_proj.weight"].begin,
        "the header": data.index(b'"pt"') + 1,
    }[spoil]
    assert (at < begin) == (spoil == "the header")
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"not what|has another"):
        verify(conversion, tmp_path / "b")


def test_progress_is_every_byte_written_and_compared(tmp_path: Path) -> None:
    """Once for each side."""
    folder = save_folder(tmp_path / "a", llama(), llama_tensors())
    size = (folder / "model.safetensors").stat().st_size
    counts: list[int] = []
    write(plan(folder, "interleaved"), tmp_path / "b", advance=counts.append)
    assert sum(counts) == size
    counts.clear()
    write(plan(folder, "interleaved"), tmp_path / "c", verified=True, advance=counts.append)
    assert sum(counts) == 2 * size


def test_verify_finds_an_order_that_changes_scores(tmp_path: Path) -> None:
    """The certificate looks at the order itself as well as at the bytes."""
    folder = save_folder(tmp_path / "a", llama(), llama_tensors())
    conversion = plan(folder, "interleaved")
    write(conversion, tmp_path / "b")
    for change in conversion.changes.values():
        change.reorder.order[[0, 1]] = change.reorder.order[[1, 0]]
    with pytest.raises(CheckpointError, match="changes its scores"):
        compare_scores(conversion)


@pytest.mark.parametrize(
    ("config", "target", "last"),
    [
        (llama(), "interleaved", "means half pairing and has no word for another"),
        (llama() | LATENT, "half", "must say rope_interleave: false."),
    ],
    ids=["no word", "a switch"],
)
def test_the_plan_says_what_the_config_would_get_wrong(
    tmp_path: Path, config: dict[str, Any], target: Any, last: str
) -> None:
    """The result's pairing is stated, and what a config can or cannot say about it."""
    tensors = latent_layer(0) if "qk_rope_head_dim" in config else llama_tensors()
    folder = save_folder(tmp_path / "a", config, tensors)
    notes = plan(folder, target).notes
    assert notes[0] == f"The result is in {target} pairing."
    assert last in notes[-1]


@pytest.mark.parametrize("matched", ["q", "[qk]"])
def test_patterns_that_leave_queries_or_keys_do_not_make_a_whole(
    tmp_path: Path, matched: str
) -> None:
    """The result has a pairing where both were matched, and is not said to have one otherwise."""
    folder = save_folder(tmp_path / "a", llama(), llama_tensors())
    patterns = Patterns(query=(rf".*{matched}_proj\.(weight|bias)",))
    found = plan(folder, "interleaved", patterns=patterns)
    half_done = matched == "q"
    assert bool(found.alike) is half_done
    assert ("The result is in interleaved pairing." in found.notes) is not half_done
    assert ("and nothing else" in found.notes[0]) is half_done


@pytest.mark.parametrize("shared", [1, 0])
def test_a_layer_may_use_the_keys_of_an_earlier_one(tmp_path: Path, shared: int) -> None:
    """Gemma 3n's last layers have queries alone, as its config says, and then only."""
    config = llama(
        model_type="gemma3n_text",
        head_dim=8,
        num_kv_shared_layers=shared,
        layer_types=["full_attention", "full_attention"],
    )
    tensors = {
        name: one
        for name, one in llama_tensors().items()
        if not name.startswith(("model.layers.1.self_attn.k", "model.layers.1.self_attn.v"))
    }
    folder = save_folder(tmp_path / "a", config, tensors)
    if shared:
        changes = plan(folder, "interleaved").changes
        assert [name for name in changes if "layers.1" in name and "q_proj" not in name] == []
        assert "model.layers.1.self_attn.q_proj.weight" in changes
    else:
        with pytest.raises(CheckpointError, match="got only query"):
            plan(folder, "interleaved")


def test_the_source_may_differ_from_its_config(tmp_path: Path) -> None:
    """Meta's rows under transformers' names: the result is what the config describes."""
    folder = save_folder(tmp_path / "a", llama(), llama_tensors())
    found = plan(folder, "half", source="interleaved")
    assert found.source == "interleaved"
    assert found.notes[-1] == "That is what the config describes."
    with pytest.raises(CheckpointError, match="half pairing already; if they have"):
        plan(folder, "half")
