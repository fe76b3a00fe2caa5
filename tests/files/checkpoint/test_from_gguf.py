"""GGUF files for transformers: the tensors that its own loader makes of the same file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from phasor import Rope, SpecError
from phasor.files.checkpoint import plan_conversion, verify, write
from phasor.scaling import Llama3

from ..refusals import refused
from .checkpoints import contents
from .test_gguf_files import SIZES, Kind, Stored, random_rows, save_gguf

WIDTH, HIDDEN, VOCABULARY = 256, 512, 16
MORE = SIZES | {
    "block_count": 2,
    "vocab_size": VOCABULARY,
    "feed_forward_length": HIDDEN,
    "attention.head_count": 8,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "rope.dimension_count": 32,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
# transformers' loader takes the width of Qwen 3's heads to be 128, whatever the file states
MORE_OF = {
    "qwen3": {
        "attention.head_count": 2,
        "attention.head_count_kv": 2,
        "attention.key_length": 128,
        "attention.value_length": 128,
        "rope.dimension_count": 128,
    }
}
SHAPES = {"attn_q": (256, 256), "attn_k": (64, 256), "attn_v": (64, 256)}
SHAPES |= {"attn_output": (256, 256), "ffn_gate": (512, 256), "ffn_up": (512, 256)}
SHAPES |= {"ffn_down": (256, 512)}


def model(architecture: str, *, has_head: bool = True) -> dict[str, tuple[np.ndarray, Any]]:
    """The tensors of a small model, of several quantisations."""
    rng = np.random.default_rng(0)
    kinds = [Kind.Q4_K, Kind.Q6_K, Kind.Q8_0, Kind.F16, Kind.Q4_0]

    def floats(*shape: int) -> tuple[np.ndarray, Any]:
        return rng.standard_normal(shape).astype(np.float32), Kind.F32

    def weight(rows: int, inputs: int, number: int) -> tuple[np.ndarray, Any]:
        kind = kinds[number % len(kinds)]
        return random_rows(rng, kind, rows, inputs), kind

    made = {"token_embd.weight": weight(VOCABULARY, WIDTH, 0), "output_norm.weight": floats(WIDTH)}
    if has_head:
        made["output.weight"] = weight(VOCABULARY, WIDTH, 1)
    for i in range(2):
        for number, (name, (rows, inputs)) in enumerate(SHAPES.items()):
            rows = 256 if architecture == "qwen3" and rows == 64 else rows
            made[f"blk.{i}.{name}.weight"] = weight(rows, inputs, i + number)
        for name in ("attn_norm", "ffn_norm"):
            made[f"blk.{i}.{name}.weight"] = floats(WIDTH)
        if architecture == "qwen2":
            for name in ("attn_q", "attn_k", "attn_v"):
                made[f"blk.{i}.{name}.bias"] = floats(SHAPES[name][0])
        if architecture == "qwen3":
            made[f"blk.{i}.attn_q_norm.weight"] = floats(128)
            made[f"blk.{i}.attn_k_norm.weight"] = floats(128)
    return made


def save_model(path: Path, architecture: str, stored: Stored, **metadata: Any) -> Path:
    """The file of a small model."""
    return save_gguf(path, architecture, MORE | MORE_OF.get(architecture, {}) | metadata, stored)


@pytest.mark.transformers
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("architecture", "has_head"),
    [("llama", True), ("llama", False), ("qwen2", True), ("qwen3", False)],
)
def test_transformers_reads_the_model_that_its_own_loader_makes(
    tmp_path: Path, architecture: str, has_head: bool, dtype: Any
) -> None:
    """Every parameter is equal, and so are the logits."""
    file = save_model(tmp_path / "a.gguf", architecture, model(architecture, has_head=has_head))
    plan = plan_conversion(file, "transformers", dtype=dtype)
    write(plan, tmp_path / "b", verified=True)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="a.gguf", dtype=getattr(torch, dtype)
    )
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert type(ours) is type(theirs)
    expected, found = theirs.state_dict(), ours.state_dict()
    assert expected.keys() == found.keys()
    for name, parameter in expected.items():
        assert parameter.dtype == found[name].dtype == getattr(torch, dtype)
        assert torch.equal(parameter, found[name]), name
    tokens = torch.arange(VOCABULARY)[None]
    with torch.no_grad():
        expected_logits, logits = theirs(tokens).logits, ours(tokens).logits
    # states of random weights are beyond float16
    if dtype != "float16":
        assert logits.isfinite().all()
        assert torch.equal(expected_logits, logits)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_divisors_of_a_llama_3_become_its_law(tmp_path: Path, factor: float) -> None:
    """Their frequencies are Llama 3's own."""
    law = Llama3(factor=factor, low_freq_factor=1, high_freq_factor=4, original_max_positions=8192)
    plain = Rope(head_dim=32, pairing="half", base=500000.0)
    scaled = Rope(head_dim=32, pairing="half", base=500000.0, scaling=law)
    divisors = (plain.inv_freq / scaled.inv_freq).astype(np.float32)
    stored = model("llama") | {"rope_freqs.weight": (divisors, Kind.F32)}
    keys = {"rope.freq_base": 500000.0, "context_length": 131072}
    file = save_model(tmp_path / "a.gguf", "llama", stored, **keys)
    write(plan_conversion(file, "transformers", dtype="bfloat16"), tmp_path / "b")
    config = json.loads((tmp_path / "b/config.json").read_text())
    assert config["rope_parameters"]["rope_type"] == "llama3"
    assert config["rope_parameters"]["factor"] == factor
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "b").model.rotary_emb.inv_freq
    np.testing.assert_allclose(found.double().numpy(), scaled.inv_freq, rtol=2.0**-21)


def test_what_cannot_be_a_model_of_transformers_is_refused(tmp_path: Path) -> None:
    """Unknown architectures, keys and tensors, by name; nothing is written."""
    file = save_model(tmp_path / "a.gguf", "llama", model("llama"))
    with refused("gguf_program"):
        plan_conversion(file, "transformers")
    with refused("gguf_program"):
        plan_conversion(file, "meta", dtype="float16")
    with pytest.raises(SpecError, match="dtype must be one of"):
        plan_conversion(file, "transformers", dtype="int8")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="dtype is for a GGUF file"):
        plan_conversion(file, "half", source="interleaved", dtype="float16")
    gemma = save_model(tmp_path / "gemma.gguf", "gemma2", model("llama"))
    with refused("gguf_class", architecture="gemma2"):
        plan_conversion(gemma, "transformers", dtype="float16")
    scaled = save_model(tmp_path / "scaled.gguf", "llama", model("llama"), logit_scale=0.5)
    with refused("gguf_keys", keys="logit_scale"):
        plan_conversion(scaled, "transformers", dtype="float16")
    for more, less in ((["blk.0.ffn_gate_inp.weight"], []), ([], ["blk.1.ffn_up.weight"])):
        stored = {n: t for n, t in model("llama").items() if n not in less}
        stored |= {name: (np.ones((4, 256), np.float32), Kind.F32) for name in more}
        odd = save_model(tmp_path / "odd.gguf", "llama", stored)
        with refused(f"gguf_tensors: {'gate_inp' if more else 'ffn_up'}"):
            plan_conversion(odd, "transformers", dtype="float16")
    stored = model("llama") | {"output_norm.weight": (np.ones(WIDTH), Kind.F64)}
    with refused("gguf_kind", name="output_norm.weight", kind="F64"):
        odd = save_model(tmp_path / "double.gguf", "llama", stored)
        plan_conversion(odd, "transformers", dtype="float16")
    assert {name.rpartition(".")[2] for name in contents(tmp_path)} == {"gguf"}


def test_numbers_beyond_a_float_type_are_refused_while_writing(tmp_path: Path) -> None:
    """Nothing is left of a result that would hold infinities."""
    stored = model("llama") | {"output_norm.weight": (np.full(WIDTH, 1e6, np.float32), Kind.F32)}
    file = save_model(tmp_path / "a.gguf", "llama", stored)
    for dtype in ("float32", "bfloat16"):
        write(plan_conversion(file, "transformers", dtype=dtype), tmp_path / dtype)  # type: ignore[arg-type]
    before = contents(tmp_path)
    with refused("gguf_overflow", name="output_norm.weight"):
        write(plan_conversion(file, "transformers", dtype="float16"), tmp_path / "c")
    assert contents(tmp_path) == before


def test_verify_finds_one_wrong_byte_of_a_dequantised_model(tmp_path: Path) -> None:
    """In the weights, and in the config."""
    file = save_model(tmp_path / "a.gguf", "llama", model("llama"))
    plan = plan_conversion(file, "transformers", dtype="bfloat16")
    write(plan, tmp_path / "b")
    path = tmp_path / "b/model.safetensors"
    good = path.read_bytes()
    spoiled = bytearray(good)
    spoiled[len(good) // 2] ^= 1
    path.write_bytes(spoiled)
    with refused("other_rows"):
        verify(plan, tmp_path / "b")
    path.write_bytes(good)
    config = tmp_path / "b/config.json"
    config.write_text(config.read_text().replace('"silu"', '"gelu"'))
    with refused("other_value", key="hidden_act"):
        verify(plan, tmp_path / "b")


def test_names_are_those_of_the_gguf_package() -> None:
    """Its own map leads from each name of transformers to the one in the file."""
    from phasor.files.checkpoint.from_gguf import _CLASSES, _names

    for architecture, known in _CLASSES.items():
        number = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture)
        names = gguf.get_tensor_name_map(number, 2)
        for stored, theirs in _names(known, 2, has_head=True).items():
            assert names.get_name(theirs, (".weight", ".bias")) == stored
