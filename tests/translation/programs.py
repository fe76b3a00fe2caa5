"""The programs that `phasor.translate` writes for, run with what it wrote.

``PROGRAMS[target](job)`` turns the tokens of a `Job` and returns float64 ``[seq, head_dim]``. For
programs that do not install here it calls functions of ``described.py``, written from their
documentation.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import shlex
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from phasor import LayerRopes
from phasor.pairings import by_pairing
from phasor.translation import Part

from . import described


@dataclass(frozen=True)
class Job:
    """Tokens to turn with what was written.

    Attributes:
        ropes: The model's.
        part: What was written for some of its layers.
        kind: The kind of layer to perform.
        x: float32 ``[seq, head_dim]``, with pairs as the program reads them.
        offset: Position of the first token.
        coordinates: Those of the tokens on each axis, ``[n_axes, seq]``, in place of the offset.
    """

    ropes: LayerRopes
    part: Part
    kind: str
    x: np.ndarray
    offset: int
    coordinates: np.ndarray | None = None

    @property
    def positions(self) -> np.ndarray:
        """``[seq]``, or ``[n_axes, seq]`` for a model with several axes."""
        if self.coordinates is not None:
            return self.coordinates
        line = np.arange(self.offset, self.offset + len(self.x))
        n_axes = self.part.ropes[self.kind].axes.n_axes
        return line if n_axes == 1 else np.tile(line, (n_axes, 1))


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


def flashinfer(job: Job) -> np.ndarray:
    """The three functions, as they are documented."""
    import torch

    import phasor.torch

    program = SimpleNamespace(
        apply_rope_pos_ids=described.apply_rope_pos_ids,
        apply_llama31_rope_pos_ids=described.apply_llama31_rope_pos_ids,
        apply_rope_with_cos_sin_cache=described.apply_rope_with_cos_sin_cache,
    )

    def turn(x: np.ndarray) -> np.ndarray:
        tokens = torch.tensor(x)[:, None]  # [seq, heads, head_dim]
        names = {"phasor": phasor, "flashinfer": program, "q": tokens, "k": tokens}
        q, k = run_code(job.part, positions=torch.tensor(job.positions), **names)
        assert torch.equal(q, k)
        return q.flatten(1).double().numpy()

    return on_slice(job, turn)


def transformer_engine(job: Job) -> np.ndarray:
    """The class and the function, as they are documented."""
    import torch

    import phasor.torch

    rope = SimpleNamespace(apply_rotary_pos_emb=described.apply_rotary_pos_emb)
    pytorch = SimpleNamespace(
        RotaryPositionEmbedding=described.RotaryPositionEmbedding,
        attention=SimpleNamespace(rope=rope),
    )
    program = SimpleNamespace(pytorch=pytorch)

    def turn(x: np.ndarray) -> np.ndarray:
        names = {"phasor": phasor, "torch": torch, "transformer_engine": program}
        turned = run_code(
            job.part,
            t=torch.tensor(x)[:, None, None],  # [seq, batch, heads, head_dim]
            tensor_format="sbhd",
            start_positions=torch.tensor([job.offset]),
            **names,
        )
        return turned[:, 0, 0].double().numpy()

    return on_slice(job, turn)


def vllm(job: Job) -> np.ndarray:
    """``get_rope`` as it is documented, and the same block in the command."""
    arguments = job.part.settings["get_rope"][job.kind]
    assert in_command(job, "--hf-overrides") in (None, arguments["rope_parameters"])
    return by_factory(job, described.vllm_get_rope(**arguments))


def sglang(job: Job) -> np.ndarray:
    """``get_rope`` as it is documented, and the same block in the command."""
    arguments = job.part.settings["get_rope"][job.kind]
    assert in_command(job, "--json-model-override-args") in (None, arguments["rope_scaling"])
    return by_factory(job, described.sglang_get_rope(**arguments))


def in_command(job: Job, option: str) -> Any:
    """The block of a kind of layer that the command overrides; None where it does not."""
    if job.ropes.in_config.fixed:
        assert option not in job.part.code
        return None
    words = shlex.split(job.part.code)
    override = json.loads(words[words.index(option) + 1])
    for name in filter(None, job.ropes.in_config.inside.split(".")):
        override = override[name]
    assert job.offset < override["max_position_embeddings"]
    blocks = override["rope_parameters"]
    return blocks if "rope_type" in blocks else blocks[job.ropes.in_config.label(job.kind)]


def by_factory(job: Job, rotate: described.Rotate) -> np.ndarray:
    """The tokens turned by a module of a serving engine."""
    import torch

    def turn(x: np.ndarray) -> np.ndarray:
        return rotate(torch.tensor(job.positions), torch.tensor(x)).double().numpy()

    return on_slice(job, turn)


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
    parser.add_argument("--position-embedding-type", choices=kinds, default="rope")
    parser.add_argument("--rope-type", choices=kinds[:2])
    for name in ("kv-channels", "qk-pos-emb-head-dim", "yarn-original-max-position-embeddings",
                 "rotary-base", "rotary-seq-len-interpolation-factor"):  # fmt: skip
        parser.add_argument(f"--{name}", type=int)
    for name, default in {"rotary-percent": 1.0, "rope-scaling-factor": 8.0, "mscale": 1.0,
                          "mscale-all-dim": 0.0, "rotary-scaling-factor": 1.0,
                          "yarn-beta-fast": None, "yarn-beta-slow": None}.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=float, default=default)
    rounded = "yarn-correction-range-round-to-int"
    for name in ("multi-latent-attention", "rotary-interleaved", "use-rope-scaling", rounded):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument(f"--no-{rounded}", action="store_false", dest=rounded.replace("-", "_"))
    parser.add_argument("--mrope-section", type=int, nargs="+")
    parser.add_argument("--no-rope-freq")
    return parser.parse_args(code.split())


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


PROGRAMS: dict[str, Callable[[Job], np.ndarray]] = {
    "flash-attn": flash_attn,
    "flashinfer": flashinfer,
    "megatron": megatron,
    "mlx": mlx,
    "sglang": sglang,
    "transformer-engine": transformer_engine,
    "transformers": transformers,
    "vllm": vllm,
}
