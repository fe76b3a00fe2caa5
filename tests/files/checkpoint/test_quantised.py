"""Checkpoints that are already quantised: what their numbers mean moves, and nothing else.

Each weight is read back by a dequantisation that is written out here as the format's own package
does it, or by that package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest

from phasor import Rope
from phasor.files.checkpoint import Patterns, conversion, plan_conversion, verify, write

from ..refusals import refused
from .checkpoints import Tensors, contents, llama, load, save, save_folder, tensor
from .test_scores import CASES, OTHER, Heads, cut, scores, separate, short

INPUTS, GROUP = 64, 32
Arrays = Mapping[str, np.ndarray]
LAYER = "model.layers.0.self_attn."


class Format(NamedTuple):
    """Random tensors of a weight of ``[outputs, INPUTS]`` by suffix, and the weight they mean."""

    tensors: Callable[[np.random.Generator, int], dict[str, np.ndarray]]
    weight: Callable[[Arrays], np.ndarray]
    stays: tuple[str, ...] = ()


def words(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Elements of 32 random bits."""
    return rng.integers(-(2**31), 2**31, shape, dtype=np.int32)


def scales(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Scales that all differ."""
    return (rng.random(shape) + 0.5).astype(np.float16)


def numbers(line: np.ndarray, bits: int) -> list[int]:
    """The numbers in a run of words, the first in the lowest bits, across words."""
    stream = sum(int(np.uint32(word)) << 32 * i for i, word in enumerate(line.astype(np.uint32)))
    return [stream >> bits * i & 2**bits - 1 for i in range(32 * len(line) // bits)]


def gptq(bits: int, *, acts_in_order: bool = True) -> Format:
    """GPTQ (GPTQModel's TorchLinear): packed along the inputs, zeros along the outputs."""

    def tensors(rng: np.random.Generator, outputs: int) -> dict[str, np.ndarray]:
        made = {
            "qweight": words(rng, INPUTS * bits // 32, outputs),
            "qzeros": words(rng, INPUTS // GROUP, outputs * bits // 32),
            "scales": scales(rng, INPUTS // GROUP, outputs),
            "g_idx": np.arange(INPUTS, dtype=np.int32) // GROUP,
        }
        if not acts_in_order:
            made["g_idx"] = rng.permutation(made["g_idx"])
        return made

    def weight(t: Arrays) -> np.ndarray:
        codes = np.array([numbers(column, bits) for column in t["qweight"].T])  # [outputs, inputs]
        zeros = np.array([numbers(line, bits) for line in t["qzeros"]]).T + 1.0
        groups_of_inputs = t["g_idx"]
        scale = t["scales"].T.astype(float)
        return (codes - zeros[:, groups_of_inputs]) * scale[:, groups_of_inputs]

    return Format(tensors, weight, ("g_idx",))


def awq_tensors(rng: np.random.Generator, outputs: int) -> dict[str, np.ndarray]:
    """AWQ, version gemm: everything is packed along the outputs."""
    return {
        "qweight": words(rng, INPUTS, outputs // 8),
        "qzeros": words(rng, INPUTS // GROUP, outputs // 8),
        "scales": scales(rng, INPUTS // GROUP, outputs),
    }


def awq_weight(t: Arrays) -> np.ndarray:
    """AutoAWQ's ``dequantize_gemm``: unpacked by shifts, then put in order."""

    def unpack(packed: np.ndarray) -> np.ndarray:
        shifted = packed.view(np.uint32)[:, :, None] >> np.arange(0, 32, 4, dtype=np.uint32)
        return (shifted & 15)[:, :, [0, 4, 1, 5, 2, 6, 3, 7]].reshape(len(packed), -1)

    codes, zeros = unpack(t["qweight"]).astype(float), unpack(t["qzeros"]).astype(float)
    zeros, scale = (x.astype(float).repeat(GROUP, axis=0) for x in (zeros, t["scales"]))
    return ((codes - zeros) * scale).T


def mlx(bits: int) -> Format:
    """MLX, by its own functions."""

    def tensors(rng: np.random.Generator, outputs: int) -> dict[str, np.ndarray]:
        dense = mx.array(rng.standard_normal((outputs, INPUTS)).astype(np.float32))
        made = mx.quantize(dense, group_size=GROUP, bits=bits)
        return dict(zip(("weight", "scales", "biases"), map(np.array, made), strict=True))

    def weight(t: Arrays) -> np.ndarray:
        parts = [mx.array(t[name]) for name in ("weight", "scales", "biases")]
        return np.array(mx.dequantize(*parts, group_size=GROUP, bits=bits)).astype(float)

    return Format(tensors, weight)


def compressed(bits: int, *, has_zeros: bool) -> Format:
    """compressed-tensors, pack-quantized: zeros are packed along the outputs."""

    def tensors(rng: np.random.Generator, outputs: int) -> dict[str, np.ndarray]:
        made = {
            "weight_packed": words(rng, outputs, INPUTS * bits // 32),
            "weight_scale": scales(rng, outputs, INPUTS // GROUP),
            "weight_shape": np.array([outputs, INPUTS]),
        }
        if has_zeros:
            made["weight_zero_point"] = words(rng, outputs * bits // 32, INPUTS // GROUP)
        return made

    def weight(t: Arrays) -> np.ndarray:
        codes = np.array([numbers(row, bits) for row in t["weight_packed"]]) - 2.0 ** (bits - 1)
        scale = t["weight_scale"].astype(float)
        zeros = np.zeros(scale.shape)
        if has_zeros:
            columns = t["weight_zero_point"].T
            zeros = np.array([numbers(column, bits) for column in columns]).T - 2.0 ** (bits - 1)
        return (codes - zeros.repeat(GROUP, axis=1)) * scale.repeat(GROUP, axis=1)

    return Format(tensors, weight, ("weight_shape",))


def bytes_of_rows(*names: str, stays: Mapping[str, np.ndarray] | None = None) -> Format:
    """8-bit integers with one scale, and maybe one zero, for each row."""
    still = stays or {}

    def tensors(rng: np.random.Generator, outputs: int) -> dict[str, np.ndarray]:
        shape = (outputs,) if names == ("SCB",) else (outputs, 1)
        made = {"weight": rng.integers(-128, 128, (outputs, INPUTS), dtype=np.int8)}
        made[names[0]] = rng.random(shape).astype(np.float32) + 0.5
        made |= {name: rng.integers(-128, 128, shape, dtype=np.int8) for name in names[1:]}
        return made | dict(still)

    def weight(t: Arrays) -> np.ndarray:
        zeros = t[names[1]] if len(names) == 2 else np.zeros(1)
        # bitsandbytes' scale is that of 127
        scale = t[names[0]].reshape(-1, 1).astype(float) / (127 if names[0] == "SCB" else 1)
        return (t["weight"].astype(float) - zeros) * scale

    return Format(tensors, weight, tuple(still))


FORMATS = {
    "GPTQ, 4 bits": gptq(4),
    "GPTQ, 4 bits, inputs in order of their activations": gptq(4, acts_in_order=False),
    "GPTQ, 2 bits": gptq(2),
    "GPTQ, 8 bits": gptq(8),
    "AWQ": Format(awq_tensors, awq_weight),
    "MLX, 3 bits": mlx(3),
    "MLX, 4 bits": mlx(4),
    "MLX, 8 bits": mlx(8),
    "compressed-tensors, 4 bits": compressed(4, has_zeros=False),
    "compressed-tensors, 4 bits and zeros": compressed(4, has_zeros=True),
    "compressed-tensors, 8 bits and zeros": compressed(8, has_zeros=True),
    "compressed-tensors, bytes": bytes_of_rows("weight_scale", "weight_zero_point"),
    "bitsandbytes, 8 bits": bytes_of_rows("SCB", stays={"weight_format": np.array(np.uint8(0))}),
}
LATENT = {"model_type": "deepseek_v3", "qk_rope_head_dim": 8, "qk_nope_head_dim": 12}


def latent(t: dict[str, np.ndarray], x: np.ndarray) -> Heads:
    """DeepSeek: as in `CASES`, with as many inputs as other projections."""
    queries = cut(t["L.q_b_proj.weight"] @ x, 20)
    return [q[12:] for q in queries], [(t["L.kv_a_proj_with_mqa.weight"] @ x)[24:]]


# how heads are read, the config, the outputs of projections, the rope
Layout = tuple[Callable[..., Heads], dict[str, Any], dict[str, int], Rope]
LAYOUTS: dict[str, Layout] = {
    name: (CASES[name][0], CASES[name][1], rows, CASES[name][3])
    for name, rows in {
        "grouped-query heads and biases": {"q_proj": 32, "k_proj": 16, "v_proj": 16},
        "a part of the head": {"q_proj": 32, "k_proj": 16, "v_proj": 16},
        "gated queries": {"q_proj": 64, "k_proj": 16, "v_proj": 16},
        "fused in blocks": {"qkv_proj": 64},
        "fused in groups": {"wqkv": 64},
        "fused head by head": {"query_key_value": 96},
    }.items()
}
LAYOUTS["latent attention"] = (
    latent,
    LATENT,
    {"q_b_proj": 80, "kv_a_proj_with_mqa": 32},
    Rope(head_dim=8, pairing="interleaved", base=100.0),
)
# three bits of 16 outputs are no whole words
THREE_BITS = {"GPTQ, 3 bits": gptq(3)}
TRIED = [(name, layout) for layout in LAYOUTS for name in FORMATS]
TRIED += [("GPTQ, 3 bits", layout) for layout in LAYOUTS if layout.startswith("fused")]


def quantised_layer(form: Format, layout: Layout, seed: int = 0) -> Tensors:
    """One layer's tensors, and biases where the model has some."""
    rng = np.random.default_rng(seed)
    made: Tensors = {}
    for module, outputs in layout[2].items():
        for suffix, array in form.tensors(rng, outputs).items():
            made[f"{LAYER}{module}.{suffix}"] = tensor(array)
        if layout[0] is separate or module == "query_key_value":
            made[f"{LAYER}{module}.bias"] = tensor(rng.standard_normal(outputs))
    return made


def dense(form: Format, layout: Layout, path: Path) -> dict[str, np.ndarray]:
    """The weights that a file's tensors mean, and its biases."""
    stored = short(load(path))
    found = {name: array for name, array in stored.items() if name.endswith(".bias")}
    for module in layout[2]:
        start = f"L.{module}."
        own = {n.removeprefix(start): a for n, a in stored.items() if n.startswith(start)}
        found[f"{start}weight"] = form.weight(own)
    return found


@pytest.mark.parametrize(("name", "layout"), TRIED)
def test_scores_of_quantised_weights_stay_and_the_way_back_restores_every_byte(
    tmp_path: Path, name: str, layout: str
) -> None:
    """The weights that the tensors mean have the rows of the other pairing, exactly."""
    form, (heads, config, _, rope) = (FORMATS | THREE_BITS)[name], LAYOUTS[layout]
    config = llama(num_hidden_layers=1) | config
    made = quantised_layer(form, LAYOUTS[layout])
    folder = save_folder(tmp_path / "a", config, made)
    target: Any = OTHER[rope.pairing]
    write(plan_conversion(folder, target), tmp_path / "b", verified=True)
    files = [tmp_path / side / "model.safetensors" for side in "ab"]
    before, after = (dense(form, LAYOUTS[layout], file) for file in files)

    x = np.random.default_rng(1).standard_normal(INPUTS)
    plain = rope.to_dict() | {"pairing": target, "pairing_out": target}
    old, new = scores(heads(before, x), rope), scores(heads(after, x), Rope.from_dict(plain))
    # sums of at most 64 products of 64 terms, in another order: far below 2**-39 of their size
    np.testing.assert_allclose(new, old, rtol=0, atol=np.abs(old).max() * 2.0**-39)
    assert np.abs(scores(heads(after, x), rope) - old).max() > np.abs(old).max() * 1e-3
    for weight in before:  # every row is there still, in another place
        assert sorted(before[weight].tolist()) == sorted(after[weight].tolist())
    stored, moved = (load(file) for file in files)
    for stored_name, array in stored.items():
        still = ".v_proj." in stored_name or stored_name.endswith(form.stays or "nothing")
        assert np.array_equal(array, moved[stored_name]) == still, stored_name

    back = plan_conversion(tmp_path / "b", rope.pairing, source=target, model=config)
    write(back, tmp_path / "c", verified=True)
    assert (tmp_path / "c/model.safetensors").read_bytes() == files[0].read_bytes()


@pytest.mark.parametrize("name", FORMATS)
def test_verify_finds_one_wrong_bit(tmp_path: Path, name: str) -> None:
    """Of any tensor that moves, also where an item is a few bits."""
    made = quantised_layer(FORMATS[name], LAYOUTS["fused in blocks"])
    folder = save_folder(tmp_path / "a", llama(num_hidden_layers=1, model_type="phi3"), made)
    plan = plan_conversion(folder, "interleaved")
    write(plan, tmp_path / "b")
    path = tmp_path / "b/model.safetensors"
    good = path.read_bytes()
    start = len(good) - sum(len(data) for _, _, data in made.values())
    for _, _, data in made.values():
        spoiled = bytearray(good)
        spoiled[start + len(data) // 2] ^= 1
        start += len(data)
        path.write_bytes(spoiled)
        with refused("other_rows"):
            verify(plan, tmp_path / "b")


NO_FORMAT: dict[str, tuple[dict[str, Any], str]] = {
    "AWQ of the version gemv": (
        {"qweight": (32, 16), "qzeros": (32, 1), "scales": (32, 8)},
        "packed",
    ),
    "GPTQ without scales": ({"qweight": (8, 32), "qzeros": (2, 4)}, "packed"),
    "zeros of fewer outputs": (
        {"qweight": (8, 32), "qzeros": (2, 5), "scales": (2, 32)},
        "rows: it must hold 32 outputs",
    ),
    "zeros that straddle rows": (
        {"weight_packed": (32, 6), "weight_scale": (32, 2), "weight_zero_point": (3, 2)},
        "rows: it must hold 32 outputs",
    ),
    "another format of packed weights": ({"W_q": (32, 8), "meta": (1,)}, "rows: not known"),
    "sparse weights": (
        {"weight_packed": (32, 4), "meta": (8, 8), "scale_packed": (2, 64)},
        "rows: not known",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NO_FORMAT)
def test_what_is_packed_in_another_way_is_refused_by_name(tmp_path: Path, case: str) -> None:
    """Rather than moved as if it were known."""
    shapes, reason = NO_FORMAT[case]
    rng = np.random.default_rng(0)
    made = {f"{LAYER}q_proj.{name}": tensor(words(rng, *shape)) for name, shape in shapes.items()}
    folder = save_folder(tmp_path / "a", llama(num_hidden_layers=1), made)
    before = contents(tmp_path)
    with refused(reason):
        plan_conversion(folder, "interleaved")
    assert contents(tmp_path) == before


def test_a_lora_of_a_quantised_model_is_converted(tmp_path: Path) -> None:
    """An adapter beside its base, whose modules have one more word in their names."""
    layout = LAYOUTS["grouped-query heads and biases"]
    made = {
        name.replace("_proj.", "_proj.base_layer."): value
        for name, value in quantised_layer(FORMATS["AWQ"], layout).items()
    }
    rng = np.random.default_rng(3)
    for module, outputs in (("q_proj", 32), ("k_proj", 16)):
        made[f"{LAYER}{module}.lora_A.weight"] = tensor(rng.standard_normal((4, INPUTS)))
        made[f"{LAYER}{module}.lora_B.weight"] = tensor(rng.standard_normal((outputs, 4)))
    folder = save_folder(tmp_path / "a", llama(num_hidden_layers=1), made)
    write(plan_conversion(folder, "interleaved"), tmp_path / "b", verified=True)
    old, new = (load(tmp_path / side / "model.safetensors") for side in "ab")
    name, order = f"{LAYER}q_proj.lora_B.weight", [0, 4, 1, 5, 2, 6, 3, 7]
    assert np.array_equal(new[name][:8], old[name][order])
    name = f"{LAYER}q_proj.base_layer.scales"
    assert np.array_equal(new[name][:, :8], old[name][:, order])


def test_patterns_select_all_tensors_of_a_quantised_weight(tmp_path: Path) -> None:
    """Under names of one's own; a tensor that is left out is named."""
    rng = np.random.default_rng(0)
    made = {f"{c}.{n}": tensor(a) for c in "QK" for n, a in awq_tensors(rng, 16).items()}
    file, rope = save(tmp_path / "a.safetensors", made), Rope(head_dim=8, pairing="half")
    patterns = Patterns(query=(r"Q\..*",), key=(r"K\..*",))
    write(plan_conversion(file, "interleaved", model=rope, patterns=patterns), tmp_path / "b")
    old, new = load(file), load(tmp_path / "b")
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    for c in "QK":
        weights = [
            awq_weight({n.removeprefix(f"{c}."): a for n, a in t.items() if n.startswith(c)})
            for t in (old, new)
        ]
        assert np.array_equal(weights[1][:8], weights[0][order])
    with refused("companion", companion="Q.qzeros"):
        only = Patterns(query=(r"Q\.(qweight|scales)",))
        plan_conversion(file, "interleaved", model=rope, patterns=only)


@pytest.mark.parametrize("chunk", [1, 100])
@pytest.mark.parametrize("name", ["AWQ", "GPTQ, 3 bits", "compressed-tensors, 4 bits and zeros"])
def test_items_of_a_few_bits_are_read_in_any_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, chunk: int
) -> None:
    """The result is the same, even where less than an item is read at a time."""
    made = quantised_layer((FORMATS | THREE_BITS)[name], LAYOUTS["fused in groups"])
    config = llama(num_hidden_layers=1, model_type="internlm2")
    plan = plan_conversion(save_folder(tmp_path / "a", config, made), "interleaved")
    write(plan, tmp_path / "b")
    monkeypatch.setattr(conversion, "CHUNK", chunk)
    write(plan, tmp_path / "c", verified=True)
    assert contents(tmp_path / "b") == contents(tmp_path / "c")
