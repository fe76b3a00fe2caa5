"""The programs that `phasor.translate` writes for, run with what it wrote.

``PROGRAMS[target](job)`` turns the tokens of a `Job` and returns float64 ``[seq, head_dim]``. For
programs that do not install here it calls functions of ``described.py``, written from their
documentation.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

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
        positions = torch.tensor(np.atleast_2d(job.positions).T)  # [seq, n_axes]
        names = {"torch": torch, "positions": positions, "offset": job.offset}
        turned = run_code(job.part, x=torch.tensor(x)[None, None], **names)
        return turned[0, 0].detach().double().numpy()

    return on_slice(job, turn)


def liger(job: Job) -> np.ndarray:
    """Its kernel, by Triton's interpreter, which is chosen where a kernel is imported."""
    import torch

    import phasor.angles
    import phasor.torch

    import_module("triton.experimental.gluon")  # all of Triton itself as it is elsewhere
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
        import_module("liger_kernel.ops.rope")

    def turn(x: np.ndarray) -> np.ndarray:
        positions = job.positions.T  # [seq, n_axes]
        q, k = (torch.tensor(x)[None, None] for _ in range(2))  # [batch, heads, seq, head_dim]
        names = {"phasor": phasor, "torch": torch, "positions": positions, "offset": job.offset}
        turned = run_code(job.part, q=q, k=k, **names)
        assert torch.equal(*turned)
        return turned[0][0, 0].double().numpy()

    return on_slice(job, turn)


#: Those that only the slow tests run.
IMPORT_LARGE_LIBRARIES = {"liger", "torchtune", "transformers"}

PROGRAMS: dict[str, Callable[[Job], np.ndarray]] = {
    "flash-attn": flash_attn,
    "liger": liger,
    "mlx": mlx,
    "rotary-embedding-torch": rotary_embedding_torch,
    "torchtune": torchtune,
    "transformers": transformers,
}
