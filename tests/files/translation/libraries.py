"""Programs that install here, run with what was written for them."""

from __future__ import annotations

import argparse
import functools
import inspect
import os
import shlex
import sys
import warnings
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from phasor.pairings import by_pairing

from .jobs import Job, on_slice, own_block, run_all, run_code


def mlx(job: Job) -> np.ndarray:
    """``mlx.core.fast.rope`` on the CPU."""
    import mlx.core as mx

    def turn(x: np.ndarray) -> np.ndarray:
        heads = mx.array(x)[None]  # [batch, seq, head_dim]
        return np.array(run_code(job.part, x=heads, offset=job.offset))[0]

    return on_slice(job, turn)


def mlx_lm(job: Job) -> np.ndarray:
    """``initialize_rope``, which its classes call with the block of a kind of layer."""
    import mlx.core as mx

    keys, rope = own_block(job), job.part.ropes[job.kind]
    block = keys["rope_parameters"]
    width = rope.head_dim - rope.rotary_start
    proportional = block["rope_type"] == "proportional"
    fraction = 1.0 if proportional else block.get("partial_rotary_factor", 1.0)
    module = mlx_lm_ropes().initialize_rope(
        int(width * fraction),
        block["rope_theta"],
        keys["rope_traditional"],
        block,
        keys["max_position_embeddings"],
    )

    def turn(x: np.ndarray) -> np.ndarray:
        heads = mx.array(x)[None, None]  # [batch, heads, seq, head_dim]
        return np.array(module(heads, offset=job.offset))[0, 0]

    return on_slice(job, turn)


@functools.cache
def mlx_lm_ropes() -> Any:
    """Its module ``rope_utils`` alone: the package imports transformers."""
    package = find_spec("mlx_lm")
    assert package is not None
    path = Path(str(package.origin)).parent / "models" / "rope_utils.py"
    spec = spec_from_file_location("mlx_lm_rope_utils", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def transformers(job: Job) -> np.ndarray:
    """A class of the pairing: Phi's and GLM's turn a part of a head, Llama's and Cohere's all.

    A function of DeepSeek's reads interleaved pairs and writes halves; NanoChat's turns clockwise.
    """
    import torch

    rope = job.part.ropes[job.kind]
    whole = rope.rotary_dim == rope.head_dim
    name = by_pairing(
        rope.output_pairing,
        half="Llama" if whole else "Phi",
        interleaved="Cohere" if whole else "Glm",
    )
    if rope.direction < 0:
        assert any("that of nanochat does" in note for note in job.part.notes)
        name = "NanoChat"
    module = import_module(f"transformers.models.{name.lower()}.modeling_{name.lower()}")
    keys = dict(job.part.settings)
    if "rope_type" not in keys["rope_parameters"]:
        keys["rope_parameters"] = keys["rope_parameters"][job.ropes.in_config.label(job.kind)]
    config = getattr(module, f"{name}Config")(
        hidden_size=rope.head_dim, num_attention_heads=1, head_dim=rope.head_dim, **keys
    )
    rotary = getattr(module, f"{name}RotaryEmbedding")(config)

    apply = module.apply_rotary_pos_emb
    if rope.pairing != rope.output_pairing == "half":
        deepseek = import_module("transformers.models.deepseek_v3.modeling_deepseek_v3")
        apply = deepseek.apply_rotary_pos_emb_interleave

    def turn(x: np.ndarray) -> np.ndarray:
        tokens = torch.tensor(x)[None, None]  # [batch, heads, seq, head_dim]
        cos, sin = rotary(tokens, torch.arange(job.offset, job.offset + len(x))[None])
        first, rest = tokens[..., : cos.shape[-1]], tokens[..., cos.shape[-1] :]
        if rope.pairing != rope.output_pairing == "interleaved":  # as no class does
            first = first.unflatten(-1, (2, -1)).mT.flatten(-2)
        turned, _ = apply(first, first, cos, sin)
        return torch.cat((turned, rest), -1)[0, 0].double().numpy()

    return on_slice(job, turn)


def torchtune(job: Job) -> np.ndarray:
    """The module that attention calls with all of a head."""
    import torch

    tokens = torch.tensor(job.x)[None, :, None]  # [batch, seq, heads, head_dim]
    positions = torch.tensor(job.positions)[None]
    turned = run_code(job.part, x=tokens, positions=positions)
    return turned[0, :, 0].double().numpy()


def rotary_embedding_torch(job: Job) -> np.ndarray:
    """Its class or, for positions of several axes, its function."""
    import torch

    def turn(x: np.ndarray) -> np.ndarray:
        names = {"positions": job.positions.T, "offset": job.offset}  # [seq, n_axes]
        turned = run_code(job.part, x=torch.tensor(x)[None, None], **names)
        return turned[0, 0].detach().double().numpy()

    return on_slice(job, turn)


def liger(job: Job) -> np.ndarray:
    """Its kernel, by Triton's interpreter, which is chosen where a kernel is imported."""
    import torch

    import_module("triton.experimental.gluon")  # all of Triton itself as it is elsewhere
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
        import_module("liger_kernel.ops.rope")

    def turn(x: np.ndarray) -> np.ndarray:
        positions = job.positions.T  # [seq, n_axes]
        q, k = (torch.tensor(x)[None, None] for _ in range(2))  # [batch, heads, seq, head_dim]
        turned = run_code(job.part, q=q, k=k, positions=positions, offset=job.offset)
        assert torch.equal(*turned)
        return turned[0][0, 0].double().numpy()

    return on_slice(job, turn)


def onnx(job: Job) -> np.ndarray:
    """A model of the one node, run by onnxruntime."""
    import onnx
    import onnxruntime
    import torch

    node, scope = run_all(job.part, dtype=torch.float32, positions=job.positions.T)
    tables = scope.get("tables", scope)
    first = job.offset if "tables" in scope else 0  # else a row for each token

    def turn(x: np.ndarray) -> np.ndarray:
        heads = x[None, None]  # [batch, heads, seq, head_dim]
        positions = np.arange(first, first + len(x))[None]
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
    root = "fairscale.nn.model_parallel"
    parts = ("fairscale", "fairscale.nn", root, f"{root}.initialize", f"{root}.layers",
             f"{root}.mappings")  # fmt: skip
    sys.modules.update({part: mock.MagicMock() for part in parts})
    try:
        package = f"llama_models.{name}"
        return import_module(f"{package}.args"), import_module(f"{package}.model")
    finally:
        for part in parts:
            del sys.modules[part]


def megatron(job: Job) -> np.ndarray:
    """Megatron's classes on the CPU, made as its training command makes them of the flags."""
    import torch

    warned = warnings.catch_warnings(action="ignore")  # of TransformerEngine, which is not here
    with warned, mock.patch("torch.cuda.current_device", return_value="cpu"):
        pytest.importorskip("megatron.core", reason="megatron-core has no wheel here")
        embeddings = "megatron.core.models.common.embeddings"
        rotary = import_module(f"{embeddings}.rotary_pos_embedding")
        flags = megatron_flags(job.part.code)
        positions = torch.tensor(job.positions)
        freqs, mscale = megatron_angles(flags, rotary, positions)
        latent = flags.multi_latent_attention
        config = SimpleNamespace(
            apply_rope_fusion=False,
            rotary_interleaved=flags.rotary_interleaved,
            multi_latent_attention=latent,
        )
        apply = rotary.apply_rotary_pos_emb
        given = {"mscale": mscale, "cp_group": object()}
        if "mla_rotary_interleaved" in inspect.signature(apply).parameters:
            given["mla_rotary_interleaved"] = latent
        # [seq, batch, heads, head_dim]
        return apply(torch.tensor(job.x)[:, None, None], freqs, config, **given)[
            :, 0, 0
        ].double().numpy()  # fmt: skip


def megatron_flags(code: str) -> argparse.Namespace:
    """The flags with the types that Megatron-LM's arguments.py gives them."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    kinds = ["rope", "yarn", "mrope"]
    parser.add_argument("--position-embedding-type", choices=kinds, required=True)  # else learned
    parser.add_argument("--rope-type", choices=kinds[:2])
    for name in ("kv-channels", "qk-pos-emb-head-dim", "yarn-original-max-position-embeddings",
                 "rotary-base", "rotary-seq-len-interpolation-factor"):  # fmt: skip
        parser.add_argument(f"--{name}", type=int)
    for name, default in {"rotary-percent": 1.0, "rope-scaling-factor": 8.0, "mscale": 1.0,
                          "mscale-all-dim": 0.0, "rotary-scaling-factor": 1.0,
                          "yarn-beta-fast": None, "yarn-beta-slow": None}.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=float, default=default)
    rounded = "yarn-correction-range-round-to-int"
    for name in ("multi-latent-attention", "rotary-interleaved", "use-rope-scaling"):
        parser.add_argument(f"--{name}", action="store_true")
    # without a flag None, of which argument_utils.py makes true
    parser.add_argument(f"--{rounded}", action="store_true", default=True)
    parser.add_argument(f"--no-{rounded}", action="store_false", dest=rounded.replace("-", "_"))
    parser.add_argument("--mrope-section", type=int, nargs="+")
    parser.add_argument("--no-rope-freq")
    return parser.parse_args(shlex.split(code))


def megatron_angles(flags: argparse.Namespace, rotary: Any, positions: Any) -> tuple[Any, float]:
    """Angles ``[seq, 1, 1, rotary_dim]``, and the factor on their cosines and sines."""
    yarn = import_module("megatron.core.models.common.embeddings.yarn_rotary_pos_embedding")
    first, seq = int(positions.flatten()[0]), positions.shape[-1]
    base = {"rotary_base": flags.rotary_base}
    if flags.multi_latent_attention and flags.rope_type == "rope":
        module = rotary.RotaryEmbedding(
            flags.qk_pos_emb_head_dim, 1.0, use_cpu_initialization=True, **base
        )
        return module(seq, first), 1.0
    scaling = {
        "scaling_factor": flags.rotary_scaling_factor,
        "mscale": flags.mscale,
        "mscale_all_dim": flags.mscale_all_dim,
        "use_cpu_initialization": True,
    }
    if flags.multi_latent_attention:
        # the other defaults are those of MLATransformerConfig
        return yarn.YarnRotaryEmbedding(flags.qk_pos_emb_head_dim, **base, **scaling)(seq, first)
    usual = {
        "kv_channels": flags.kv_channels,
        "rotary_percent": flags.rotary_percent,
        "rotary_interleaved": flags.rotary_interleaved,
        "seq_len_interpolation_factor": flags.rotary_seq_len_interpolation_factor,
        **base,
    }
    if flags.position_embedding_type == "yarn":
        module = yarn.YarnRotaryEmbedding(
            **usual,
            **scaling,
            original_max_position_embeddings=flags.yarn_original_max_position_embeddings,
            beta_fast=flags.yarn_beta_fast,
            beta_slow=flags.yarn_beta_slow,
            correction_range_round_to_int=flags.yarn_correction_range_round_to_int,
        )
        return module(seq, first)
    if flags.position_embedding_type == "mrope":
        # position_ids [3, batch, seq]
        return rotary.MultimodalRotaryEmbedding(**usual)(positions[:, None], flags.mrope_section), 1
    module = rotary.RotaryEmbedding(
        **usual,
        rope_scaling=flags.use_rope_scaling,
        rope_scaling_factor=flags.rope_scaling_factor,
        use_cpu_initialization=True,
    )
    return module(seq, first), 1.0
