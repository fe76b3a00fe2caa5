"""The programs that `phasor.translate` writes for, run with what it wrote.

``PROGRAMS[target](job)`` turns the tokens of a `Job` and returns float64 ``[seq, head_dim]``. For
programs that do not install here it calls functions of ``described.py``, written from their
documentation.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from phasor import LayerRopes
from phasor.pairings import by_pairing
from phasor.translation import Part

from . import described, described_ggml


@dataclass(frozen=True)
class Job:
    """Tokens to turn with what was written.

    Attributes:
        ropes: The model's.
        part: What was written for some of its layers.
        kind: The kind of layer to perform.
        x: float32 ``[seq, head_dim]``, with pairs as the program reads them.
        offset: Position of the first token.
    """

    ropes: LayerRopes
    part: Part
    kind: str
    x: np.ndarray
    offset: int


def run_code(part: Part, **names: Any) -> Any:
    """The value of the last line of ``part.code``, with the settings and ``names`` as variables."""
    *before, last = ast.parse(part.code).body
    assert isinstance(last, ast.Expr), "the code ends in a call"
    scope = {**part.settings, **names}
    exec(compile(ast.Module(before, []), "<code>", "exec"), scope)
    return eval(compile(ast.Expression(last.value), "<code>", "eval"), scope)


def on_slice(job: Job, turn: Callable[[np.ndarray], Any]) -> np.ndarray:
    """The tokens with what ``turn`` makes of the slice of a head that its program is given."""
    start = job.part.ropes[job.kind].rotary_start
    turned = np.asarray(turn(job.x[:, start:]), dtype=np.float64)
    return np.concatenate([job.x[:, :start], turned], axis=-1)


def mlx(job: Job) -> np.ndarray:
    """``mlx.core.fast.rope`` on the CPU."""
    import mlx.core as mx

    def turn(x: np.ndarray) -> np.ndarray:
        heads = mx.array(x)[None]  # [batch, seq, head_dim]
        return np.array(run_code(job.part, mx=mx, x=heads, offset=job.offset))[0]

    return on_slice(job, turn)


def transformers(job: Job) -> np.ndarray:
    """A class of the pairing: Phi's and GLM's turn a part of a head, Llama's and Cohere's all."""
    from importlib import import_module

    import torch

    rope = job.part.ropes[job.kind]
    whole = rope.rotary_dim == rope.head_dim
    name = by_pairing(
        rope.pairing,
        half="Llama" if whole else "Phi",
        interleaved="Cohere" if whole else "Glm",
    )
    module = import_module(f"transformers.models.{name.lower()}.modeling_{name.lower()}")
    keys = dict(job.part.settings)
    if "rope_type" not in keys["rope_parameters"]:
        keys["rope_parameters"] = keys["rope_parameters"][job.ropes.in_config.label(job.kind)]
    config = getattr(module, f"{name}Config")(
        hidden_size=rope.head_dim, num_attention_heads=1, head_dim=rope.head_dim, **keys
    )
    rotary = getattr(module, f"{name}RotaryEmbedding")(config)

    def turn(x: np.ndarray) -> np.ndarray:
        tokens = torch.tensor(x)[None, None]  # [batch, heads, seq, head_dim]
        cos, sin = rotary(tokens, torch.arange(job.offset, job.offset + len(x))[None])
        first, rest = tokens[..., : cos.shape[-1]], tokens[..., cos.shape[-1] :]
        turned, _ = module.apply_rotary_pos_emb(first, first, cos, sin)
        return torch.cat((turned, rest), -1)[0, 0].double().numpy()

    return on_slice(job, turn)


def flash_attn(job: Job) -> np.ndarray:
    """What ``apply_rotary_emb`` is documented to do, with the code that calls it."""
    import torch

    import phasor.torch

    program = SimpleNamespace(
        layers=SimpleNamespace(rotary=SimpleNamespace(apply_rotary_emb=described.apply_rotary_emb))
    )

    def turn(x: np.ndarray) -> np.ndarray:
        tokens = torch.tensor(x)[None, :, None]  # [batch, seq, heads, head_dim]
        names = {"phasor": phasor, "flash_attn": program, "x": tokens, "offset": job.offset}
        return run_code(job.part, **names)[0, :, 0].double().numpy()

    return on_slice(job, turn)


def onnx(job: Job) -> np.ndarray:
    """A model of the one node, run by onnxruntime."""
    import onnx
    import onnxruntime
    import torch

    import phasor.torch

    tables: dict[str, Any] = {}

    def cos_sin_cache(*given: Any, **options: Any) -> dict[str, torch.Tensor]:
        tables.update(phasor.torch.cos_sin_cache(*given, **options))
        return tables

    ours = SimpleNamespace(torch=SimpleNamespace(cos_sin_cache=cos_sin_cache))
    node = run_code(job.part, phasor=ours, onnx=onnx, dtype=torch.float32)

    def turn(x: np.ndarray) -> np.ndarray:
        heads = x[None, None]  # [batch, heads, seq, head_dim]
        positions = np.arange(job.offset, job.offset + len(x))[None]
        info = onnx.helper.make_tensor_value_info
        graph = onnx.helper.make_graph(
            [node],
            "rotary",
            [
                info("x", onnx.TensorProto.FLOAT, heads.shape),
                info("position_ids", onnx.TensorProto.INT64, positions.shape),
            ],
            [info("turned", onnx.TensorProto.FLOAT, heads.shape)],
            [
                onnx.numpy_helper.from_array(tables[name].numpy(), f"{name}_cache")
                for name in ("cos", "sin")
            ],
        )
        opset = onnx.helper.make_opsetid("", 23)
        model = onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10)
        onnx.checker.check_model(model)
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), providers=["CPUExecutionProvider"]
        )
        return session.run(None, {"x": heads, "position_ids": positions})[0][0, 0]

    return on_slice(job, turn)


def meta(job: Job) -> np.ndarray:
    """The functions of llama_models: those of Llama 3 where they read all the keys."""
    import torch

    keys, rope = job.part.settings, job.part.ropes[job.kind]
    scaling = keys.get("rope_scaling_factor"), keys.get("rope_high_freq_factor")
    old = scaling in ((None, None), (8.0, 4.0)) and "nope_layer_interval" not in keys
    sizes = {"dim": rope.head_dim, "n_heads": 1}
    if old:
        args, model = llama_models("llama3")
        read = args.ModelArgs(**sizes, **keys)
        arguments = read.rope_theta, read.use_scaled_rope
    else:
        args, model = llama_models("llama4")
        read = args.ModelArgs(**sizes, n_kv_heads=1, **keys)
        arguments = (
            read.rope_theta, read.use_scaled_rope,
            read.rope_scaling_factor, read.rope_high_freq_factor,
        )  # fmt: skip
        for layer, kind in enumerate(job.ropes.layer_kinds):
            interval = read.nope_layer_interval
            turns = interval is None or (layer + 1) % interval != 0
            assert turns == (job.ropes.kinds[kind] is not None)
    end = job.offset + len(job.x)
    freqs_cis = model.precompute_freqs_cis(read.dim // read.n_heads, end, *arguments)

    def turn(x: np.ndarray) -> np.ndarray:
        tokens = torch.tensor(x)[None, :, None]  # [batch, seq, heads, head_dim]
        turned, _ = model.apply_rotary_emb(tokens, tokens, freqs_cis[job.offset :])
        return turned[0, :, 0].double().numpy()

    return on_slice(job, turn)


@functools.cache
def llama_models(name: str) -> tuple[Any, Any]:
    """The modules ``args`` and ``model``; the latter imports parallel layers from fairscale."""
    from importlib import import_module
    from unittest.mock import MagicMock

    root = "fairscale.nn.model_parallel"
    parts = ("fairscale", "fairscale.nn", root, f"{root}.initialize", f"{root}.layers",
             f"{root}.mappings")  # fmt: skip
    sys.modules.update({part: MagicMock() for part in parts})
    try:
        package = f"llama_models.{name}"
        return import_module(f"{package}.args"), import_module(f"{package}.model")
    finally:
        for part in parts:
            del sys.modules[part]


def gguf(job: Job) -> np.ndarray:
    """What ggml is documented to do with the file, in a layer of this kind."""
    keys = {key.removeprefix("{arch}."): value for key, value in job.part.settings.items()}
    return by_ggml(job, keys, {})


def llama_cpp(job: Job) -> np.ndarray:
    """What the flags are documented to do to a file without scaling."""
    rope = job.part.ropes[job.kind]
    keys: dict[str, Any] = {
        "rope.freq_base": 10_000.0,
        "rope.dimension_count": rope.rotary_dim,
    }
    if rope.axes.n_axes > 1:
        keys["rope.dimension_sections"] = rope.axes.sections
    return by_ggml(job, keys, job.part.settings)


def by_ggml(job: Job, keys: dict[str, Any], flags: dict[str, Any]) -> np.ndarray:
    """The slice turned in the mode that a note says, with a context that ends at the last token."""
    (mode,) = {mode for note in job.part.notes for mode in re.findall(r"rope type (\w+)", note)}
    to = described_ggml.llama_rope(
        keys,
        flags,
        mode=mode,
        n_ctx=job.offset + len(job.x),
        swa="sliding" in job.kind,
        scale_swa=not any("layers alone" in note for note in job.part.notes),
    )
    positions = described_ggml.text_positions(job.offset, len(job.x))
    return on_slice(job, lambda x: described_ggml.ggml_rope(x, positions, to))


PROGRAMS: dict[str, Callable[[Job], np.ndarray]] = {
    "flash-attn": flash_attn,
    "gguf": gguf,
    "llama.cpp": llama_cpp,
    "meta": meta,
    "mlx": mlx,
    "onnx": onnx,
    "transformers": transformers,
}
