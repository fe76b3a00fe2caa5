"""Conversion of checkpoints: bytes that change, bytes that must not, and their verification."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from phasor.files.checkpoint import conversion, plan_conversion, verify, write
from phasor.files.checkpoint.conversion import compare_scores
from phasor.files.tensors import read_header

from ..refusals import refused
from .checkpoints import (
    Tensors,
    header_of,
    in_file,
    llama,
    llama_tensors,
    load,
    save_folder,
    tensor,
)


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
    write(plan_conversion(folder, "interleaved"), tmp_path / "b", verified=True)
    data = (tmp_path / "b/model.safetensors").read_bytes()
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    wanted = rows["q"][order].tobytes() + rows["k"][order].tobytes() + rows["v"].tobytes()
    assert data.endswith(wanted)
    assert data[: -len(wanted)] == (folder / "model.safetensors").read_bytes()[: -len(wanted)]


@pytest.mark.parametrize(
    "chunk", [*(pytest.param(size, marks=pytest.mark.slow) for size in (1, 64)), 300, 5000]
)
def test_the_size_of_what_is_read_at_a_time_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """Not even where it is smaller than a row."""
    folder = save_folder(tmp_path / "a", llama(), llama_tensors())
    write(plan_conversion(folder, "interleaved"), tmp_path / "whole")
    monkeypatch.setattr(conversion, "CHUNK", chunk)
    write(plan_conversion(folder, "interleaved"), tmp_path / "b", verified=True)
    whole, b = (tmp_path / side / "model.safetensors" for side in ("whole", "b"))
    assert whole.read_bytes() == b.read_bytes()


def test_shards_and_their_index_become_shards_and_their_index(tmp_path: Path) -> None:
    """Each under its old name, with its old header; nothing else is in the folder."""
    tensors = llama_tensors()
    names = list(tensors)
    shards = [{n: tensors[n] for n in names[:4]}, {n: tensors[n] for n in names[4:]}]
    folder = save_folder(tmp_path / "a", llama(), *shards)
    write(plan_conversion(folder, "interleaved"), tmp_path / "b", verified=True)
    assert {path.name for path in (tmp_path / "b").iterdir()} == {
        "model-1-of-2.safetensors",
        "model-2-of-2.safetensors",
        "model.safetensors.index.json",
    }
    index = "model.safetensors.index.json"
    assert (tmp_path / "b" / index).read_bytes() == (folder / index).read_bytes()

    whole = save_folder(tmp_path / "whole", llama(), tensors)
    write(plan_conversion(whole, "interleaved"), tmp_path / "c")
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
        plan_conversion(tmp_path / "a.safetensors", "interleaved", model=llama()),
        tmp_path / "b.safetensors",
    )
    begin = 8 + len(text.encode())
    old, new = ((tmp_path / f"{c}.safetensors").read_bytes() for c in "ab")
    assert new[:begin] == old[:begin]
    assert new[begin:] != old[begin:]


def test_the_library_of_the_format_reads_the_result(tmp_path: Path) -> None:
    """It opens, and holds the arrays that were meant."""
    import safetensors.numpy as library

    folder = save_folder(tmp_path / "a", llama(), llama_tensors(dtype=np.float32))
    write(plan_conversion(folder, "interleaved"), tmp_path / "b")
    before = library.load_file(folder / "model.safetensors")
    after = library.load_file(tmp_path / "b/model.safetensors")
    assert before.keys() == after.keys()
    order = [8 * head + place for head in range(4) for place in (0, 4, 1, 5, 2, 6, 3, 7)]
    name = "model.layers.1.self_attn.q_proj.weight"
    assert np.array_equal(after[name], before[name][order])


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
        changes = plan_conversion(folder, "interleaved").changes
        assert {name.split(".", 4)[4] for name in changes} == {"q_proj.weight", "k_proj.weight"}
    else:
        with refused(f"rows: blocks of {block}"):
            plan_conversion(folder, "interleaved")


def test_scales_of_rows_move_with_their_rows(tmp_path: Path) -> None:
    """And a scale of the whole tensor stays."""
    tensors = llama_tensors()
    numbers = np.arange(32, dtype=np.float32)[:, None]
    for c, count in (("q", 32), ("k", 16)):
        name = f"model.layers.0.self_attn.{c}_proj."
        tensors[f"{name}weight_scale"] = tensor(numbers[:count])
        tensors[f"{name}input_scale"] = tensor(np.float32(3))
    folder = save_folder(tmp_path / "a", llama(), tensors)
    write(plan_conversion(folder, "interleaved"), tmp_path / "b", verified=True)
    found = load(tmp_path / "b/model.safetensors")
    scale = found["model.layers.0.self_attn.q_proj.weight_scale"][:, 0]
    assert scale[:10].tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12]
    assert found["model.layers.0.self_attn.q_proj.input_scale"] == 3


@pytest.mark.parametrize("spoil", ["a row", "an untouched tensor", "the header"])
def test_verify_finds_one_wrong_byte(tmp_path: Path, spoil: str) -> None:
    """Wherever it is."""
    folder = save_folder(tmp_path / "a", llama(), llama_tensors())
    conversion = plan_conversion(folder, "interleaved")
    write(conversion, tmp_path / "b")
    verify(conversion, tmp_path / "b")
    path = tmp_path / "b/model.safetensors"
    data = bytearray(path.read_bytes())
    header = read_header(path)
    begin, tensors = len(header.data), header.tensors
    at = {
        "a row": tensors["model.layers.1.self_attn.k_proj.weight"].begin + 300,
        "an untouched tensor": tensors["model.layers.1.self_attn.v_proj.weight"].begin,
        "the header": data.index(b'"pt"') + 1,
    }[spoil]
    assert (at < begin) == (spoil == "the header")
    data[at] ^= 1
    path.write_bytes(data)
    with refused("other_header" if spoil == "the header" else "other_rows"):
        verify(conversion, tmp_path / "b")


def test_progress_is_every_byte_written_and_compared(tmp_path: Path) -> None:
    """Once for each side."""
    folder = save_folder(tmp_path / "a", llama(), llama_tensors())
    size = (folder / "model.safetensors").stat().st_size
    counts: list[int] = []
    write(plan_conversion(folder, "interleaved"), tmp_path / "b", advance=counts.append)
    assert sum(counts) == size
    counts.clear()
    write(
        plan_conversion(folder, "interleaved"), tmp_path / "c", verified=True, advance=counts.append
    )
    assert sum(counts) == 2 * size


def test_verify_finds_an_order_that_changes_scores(tmp_path: Path) -> None:
    """The certificate looks at the order itself as well as at the bytes."""
    folder = save_folder(tmp_path / "a", llama(), llama_tensors())
    conversion = plan_conversion(folder, "interleaved")
    write(conversion, tmp_path / "b")
    for change in conversion.changes.values():
        change.order[[0, 1]] = change.order[[1, 0]]
    with refused("other_scores"):
        compare_scores(conversion)
