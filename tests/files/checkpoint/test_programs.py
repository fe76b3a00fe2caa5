"""A Llama between Meta's files and transformers': the same bits after the way back, and errors.

`test_models` runs the results.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from phasor import CheckpointError, SpecError, VerificationError, load
from phasor.files.checkpoint import conversion, plan_conversion, verify, write

from ..refusals import refused
from .checkpoints import contents
from .metas_llama import PARAMS, random_weights, save_meta


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("chunk", [64, 8 * 2**20])
def test_there_and_back_is_the_same_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, dtype: torch.dtype, chunk: int
) -> None:
    """From one rank and from two, and from the joined file once more; in small pieces too."""
    monkeypatch.setattr(conversion, "CHUNK", chunk)
    weights = {name: weight.to(dtype) for name, weight in random_weights(PARAMS).items()}
    save_meta(tmp_path / "a", PARAMS, weights, ranks)
    steps = [("a", "b", "transformers"), ("b", "c", "meta"), ("c", "d", "transformers")]
    for source, result, program in steps:
        planned, counts = plan_conversion(tmp_path / source, program), list[int]()
        write(planned, tmp_path / result, verified=True, advance=counts.append)
        assert sum(counts) == 2 * planned.size
    back = load_file(tmp_path / "c/consolidated.safetensors")
    assert set(back) == set(weights)
    for name, weight in weights.items():
        assert back[name].dtype == dtype
        assert torch.equal(back[name].view(torch.uint8), weight.view(torch.uint8)), name
    assert contents(tmp_path / "b") == contents(tmp_path / "d")
    assert load(tmp_path / "c")[0] == load(tmp_path / "a")[0]


def test_the_config_says_what_params_said(tmp_path: Path) -> None:
    """And Llama 2's, which say neither scaling nor key heads nor a context."""
    config = json.loads(
        plan_conversion(meta(tmp_path / "a"), "transformers").other_files["config.json"]
    )
    law = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert config.pop("rope_scaling") == law
    assert config.pop("rope_parameters") == law | {"rope_theta": config.pop("rope_theta")}
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 20,
        "hidden_size": 32,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "max_position_embeddings": 131072,
        "dtype": "float32",
    }
    params = PARAMS | {"n_kv_heads": 4, "rope_theta": 10000.0}
    del params["use_scaled_rope"], params["rope_scaling_factor"]
    weights = random_weights(params)
    del params["n_kv_heads"]
    planned = plan_conversion(save_meta(tmp_path / "b", params, weights, 2), "transformers")
    config = json.loads(planned.other_files["config.json"])
    assert config["num_key_value_heads"] == 4
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert "max_position_embeddings" not in config
    assert "params.json does not state the context: add max_position_embeddings." in planned.notes


def meta(folder: Path, ranks: int = 1) -> Path:
    """A small model in Meta's files."""
    return save_meta(folder, PARAMS, random_weights(PARAMS), ranks)


def edit(folder: Path, rank: int = 0, **changes: Any) -> None:
    """Replace tensors of a rank; None takes one away, __ stands for a dot."""
    path = folder / f"consolidated.{rank:02}.pth"
    tensors = torch.load(path, weights_only=True)
    for name, value in changes.items():
        name = name.replace("__", ".")
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    path.unlink()
    torch.save(tensors, path)


def cut(folder: Path) -> None:
    """The second half of a rank is lost."""
    path = folder / "consolidated.01.pth"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def set_param(folder: Path, key: str, value: Any) -> None:
    """Another value in params.json."""
    path = folder / "params.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))


class Bomb:
    """What a pickle would run as it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("ran"),)


WRONG: dict[str, tuple[Any, str]] = {
    "a damaged file": (cut, "pickle: 01.pth"),
    "no file of torch": (
        lambda a: (a / "consolidated.00.pth").write_bytes(b"nothing"),
        "pickle: torch.",
    ),
    "code in the pickle": (
        lambda a: torch.save(Bomb(), a / "consolidated.00.pth"),
        "pickle: 00.pth",
    ),
    "a list": (lambda a: torch.save([1], a / "consolidated.00.pth"), "no_tensors: a list"),
    "a number": (lambda a: edit(a, norm__weight=1), "no_tensor: norm.weight"),
    "a quantised tensor": (
        lambda a: edit(a, norm__weight=torch.ones(32, dtype=torch.int8)),
        "dense: float64",
    ),
    "the first rank missing": (
        lambda a: (a / "consolidated.00.pth").unlink(),
        "rank_missing: consolidated.0",
    ),
    "a rank in the middle missing": (
        lambda a: (a / "consolidated.01.pth").rename(a / "consolidated.02.pth"),
        "rank_missing: consolidated.02.pth",
    ),
    "the last rank missing": (
        lambda a: (a / "consolidated.01.pth").unlink(),
        "shape: wq.weight",
    ),
    "no weights": (
        lambda a: [path.unlink() for path in a.glob("*.pth")],
        "consolidated: neither",
    ),
    "weights in two forms": (
        lambda a: (a / "consolidated.safetensors").touch(),
        "consolidated: both",
    ),
    "no params": (lambda a: (a / "params.json").unlink(), "no_sizes: params.json"),
    "a tensor on one rank only": (
        lambda a: edit(a, 1, norm__weight=None),
        "rank_names: consolidated.00.pth",
    ),
    "ranks of two shapes": (
        lambda a: edit(a, 1, norm__weight=torch.ones(31)),
        "ranks_differ: norm.weight",
    ),
    "ranks of two models": (
        lambda a: edit(a, 1, norm__weight=torch.ones(32)),
        "copies_differ: norm.weight",
    ),
    "a tensor missing": (
        lambda a: [edit(a, rank, layers__1__ffn_norm__weight=None) for rank in (0, 1)],
        "missing: layers.*.ffn_norm.weight (1)",
    ),
    "an unknown tensor": (
        lambda a: [edit(a, rank, layers__1__attention__wq__bias=torch.ones(9)) for rank in (0, 1)],
        "unknown: layers.*.attention.wq.bias (1)",
    ),
    "a layer too many": (
        lambda a: set_param(a, "n_layers", 1),
        "unknown: layers",
    ),
    "heads that ranks cut": (
        lambda a: [set_param(a, "n_heads", 1), set_param(a, "n_kv_heads", 1)],
        "split_heads: 32",
    ),
    "experts": (
        lambda a: set_param(a, "moe_args", {"num_experts": 2}),
        "params: moe_args",
    ),
    "an unknown factor": (
        lambda a: set_param(a, "rope_scaling_factor", None),
        "params_factor: use_scaled_rope",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_wrong_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """No pickle runs either."""
    monkeypatch.chdir(tmp_path)
    spoil, message = WRONG[kind]
    spoil(meta(tmp_path / "a", 2))
    with refused(message):
        plan_conversion(tmp_path / "a", "transformers")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("kind", ["transposed", "empty"])
def test_tensors_as_torch_can_store_them(tmp_path: Path, kind: str) -> None:
    """A transposed storage reads as its tensor; one without rows is refused."""
    weights = random_weights(PARAMS)
    wanted = weights["output.weight"]
    folder = save_meta(tmp_path / "a", PARAMS, weights)
    edit(folder, output__weight=wanted.t().contiguous().t() if kind == "transposed" else wanted[:0])
    if kind == "empty":
        with refused("dense"):
            plan_conversion(folder, "transformers")
        return
    write(plan_conversion(folder, "transformers"), tmp_path / "b", verified=True)
    assert torch.equal(load_file(tmp_path / "b/model.safetensors")["lm_head.weight"], wanted)


def test_mistrals_file_is_read_as_metas(tmp_path: Path) -> None:
    """It has the same names, in one safetensors file, and says how wide heads and layers are."""
    params = PARAMS | {"head_dim": 8, "hidden_dim": 112, "rope_theta": 1e6}
    del params["use_scaled_rope"], params["rope_scaling_factor"]
    weights = random_weights(params)
    (tmp_path / "a").mkdir()
    save_file(weights, tmp_path / "a/consolidated.safetensors")
    (tmp_path / "a/params.json").write_text(json.dumps(params))
    planned = plan_conversion(tmp_path / "a", "transformers")
    config = json.loads(planned.other_files["config.json"])
    assert (config["head_dim"], config["intermediate_size"]) == (8, 112)
    set_param(tmp_path / "a", "sliding_window", 4096)
    with refused("params", keys="sliding_window"):
        plan_conversion(tmp_path / "a", "transformers")


def test_without_torch_the_way_to_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only files of torch.save need it."""
    meta(tmp_path / "a")
    monkeypatch.setitem(sys.modules, "torch", None)
    with refused("no_torch"):
        plan_conversion(tmp_path / "a", "transformers")


HF: dict[str, tuple[dict[str, Any], str]] = {
    "another class": ({"model_type": "qwen2"}, "value: model_type"),
    "another activation": ({"hidden_act": "gelu"}, "value: hidden_act"),
    "wide heads": ({"head_dim": 16}, "widths: 16"),
    "another law": (
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
        "law: Linear",
    ),
    "no config": ({}, "no_sizes: config.json"),
}


@pytest.mark.parametrize("kind", HF)
def test_what_metas_code_cannot_compute_is_refused(tmp_path: Path, kind: str) -> None:
    """A config says it; nothing is written in its place."""
    write(plan_conversion(meta(tmp_path / "a"), "transformers"), tmp_path / "b")
    changes, message = HF[kind]
    path = tmp_path / "b/config.json"
    of_old = ("rope_scaling", "rope_theta") if "rope_parameters" in changes else ()
    config = {k: v for k, v in json.loads(path.read_text()).items() if k not in of_old} | changes
    path.write_text(json.dumps(config)) if changes else path.unlink()
    with refused(message):
        plan_conversion(tmp_path / "b", "meta")


def test_there_are_two_programs(tmp_path: Path) -> None:
    """Whose config says all, and a source is a folder."""
    with pytest.raises(SpecError, match=r"'transformers' or 'meta', must be .*, got 'vllm'"):
        plan_conversion(meta(tmp_path / "a"), "vllm")  # pyright: ignore
    with pytest.raises(SpecError, match="no other argument goes with the program meta"):
        plan_conversion(tmp_path / "a", "meta", source="half")
    with refused("no_folder"):
        plan_conversion(tmp_path / "a/params.json", "transformers")


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_wrong_byte_is_found(tmp_path: Path, ranks: int) -> None:
    """One bit of the config, of the header and of each tensor in turn."""
    planned = plan_conversion(meta(tmp_path / "a", ranks), "transformers")
    write(planned, tmp_path / "b")
    verify(planned, tmp_path / "b")
    path = tmp_path / "b/model.safetensors"
    (file,) = planned.files.values()
    at = len(file.header)
    places = [at - 3]  # in the padding or the last bracket of the header
    for tensor in file.tensors.values():
        places.append(at + tensor.size // 2)
        at += tensor.size
    for place in places:
        whole = path.read_bytes()
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises((VerificationError, CheckpointError)):
            verify(planned, tmp_path / "b")
        path.write_bytes(whole)
    config = tmp_path / "b/config.json"
    # what a note of the plan says to add
    config.write_text(config.read_text().replace('"bos_token_id": null', '"bos_token_id": 1'))
    verify(planned, tmp_path / "b")
    config.write_text(config.read_text().replace("131072", "131073"))
    with refused("other_value", key="max_position_embeddings", value=131072):
        verify(planned, tmp_path / "b")
    config.unlink()
    with refused("not_compared"):
        verify(planned, tmp_path / "b")


def test_one_chunk_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large the tensors are: writing and verifying hold a few chunks and heads."""
    import tracemalloc

    params = PARAMS | {"vocab_size": 40_000}  # 5 MB each for embeddings and output
    save_meta(tmp_path / "a", params, random_weights(params), 2)
    monkeypatch.setattr(conversion, "CHUNK", 2**16)
    planned = plan_conversion(tmp_path / "a", "transformers")
    tracemalloc.start()
    write(planned, tmp_path / "b", verified=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * 2**16
