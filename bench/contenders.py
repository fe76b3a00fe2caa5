"""Who takes part: each through the interface it publishes, with its tables made beforehand.

A table that a model makes once for all its layers is not timed: cos and sin in transformers, the
complex table in Meta's form, the caches of torchtune and rotary-embedding-torch. phasor has none
and makes its rows from the positions within the time. Every other package is imported when it is
asked for. A caller may hand most kernels for GPUs the rows of its own tokens in their order, and
that is how packed sequences and several axes reach them here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
from cases import Case
from measure import Build, Contender, Rotation, UnableError
from torch import Tensor

from phasor import torch as phasor_torch
from phasor.angles import cos_sin
from phasor.errors import DISTRIBUTION
from phasor.pairings import PAIRINGS
from phasor.rope import Rope
from phasor.torch import rotate_qk, rotate_qk_
from phasor.torch._operator import cpu

_PACKAGES = (
    *("torch", "triton", "numpy", "transformers", "torchtune", "rotary-embedding-torch", "onnx"),
    *("onnxruntime", "liger-kernel", "flash-attn", "flashinfer-python", "transformer-engine"),
    *("jax", "mlx"),
)
_LONGEST = 2**15  # positions of every case that is timed
#: Forms that the report and the targets speak of.
IN_PLACE, NEW = "phasor, in place", "phasor, new output"
_PLAIN = "phasor, plain torch"
#: How the keys begin of what only the targets ask about.
PROBES = ("phasor, positions", "phasor, rows", "phasor, avx")


def versions() -> dict[str, str]:
    """What is installed of all that takes part."""
    numbers: dict[str, str] = {}
    for name in (DISTRIBUTION, *_PACKAGES):
        with suppress(PackageNotFoundError):
            numbers[name] = version(name)
    return numbers


def everyone(case: Case, device: str) -> list[Contender]:
    """Who is asked for this case on a ``"cpu"`` or ``"cuda"``, in the order of the tables."""
    models = [_LLAMA]
    if case.rotary_dim is not None:
        models.append(_GPT_J)
    if case.rows is not None:
        models.append(_DEEPSEEK)
    contenders = [contender for entry in models for contender in (entry, _compiled(entry))]
    if device == "cuda":
        contenders = [*(_compiled(entry) for entry in ours() if entry.name == _PLAIN), *contenders]
    elif case.asks == "times":
        contenders += probes(case)
    return [*ours(), *contenders, *_OTHERS[device]]


_FORMS: dict[str, Build] = {
    IN_PLACE: lambda case, rope, positions: lambda q, k: rotate_qk_(q, k, positions, rope),
    NEW: lambda case, rope, positions: lambda q, k: rotate_qk(q, k, positions, rope),
    _PLAIN: lambda case, rope, positions: (
        lambda q, k: rotate_qk(q, k, positions, rope, backend="eager")
    ),
}


def ours() -> list[Contender]:
    """Phasor's verbs: in place, with new outputs, and in plain torch operations."""
    return [
        Contender(name=name, pairing=pairing, build=build, in_place=name == IN_PLACE)
        for pairing in PAIRINGS
        for name, build in _FORMS.items()
    ]


def _compiled(contender: Contender) -> Contender:
    """The same rotation, compiled for its shape when it is called first."""
    name = f"{contender.name}, compiled"
    return replace(
        contender, name=name, build=lambda *x: torch.compile(contender.build(*x), dynamic=False)
    )


def probes(case: Case) -> list[Contender]:
    """Phasor on a CPU again, in the ways that the targets ask about for this case."""
    if case.backward or case.sections or case.rotary_dim or case.rows:
        return []
    builds: dict[str, Build] = {
        "phasor, positions near 2^62": _FORMS[IN_PLACE],
        "phasor, rows of a table": _rows_of_table,
        **{f"phasor, {p}": partial(_on_path, p) for p in cpu.paths() if p != "portable"},
    }
    return [
        Contender(name=name, pairing="half", build=build, in_place=True,
                  shift=2**62 if "2^62" in name else 0)
        for name, build in builds.items()
    ]  # fmt: skip


def _rows_of_table(case: Case, rope: Rope, positions: Tensor) -> Rotation:
    """A Rotation of rows that are read from tables of positions."""
    cos, sin = (torch.from_numpy(x).float() for x in cos_sin(np.arange(_LONGEST), rope))

    def rotation(q: Tensor, k: Tensor) -> Sequence[Tensor]:
        rows = cos[positions], sin[positions]
        return phasor_torch.Rotation(*rows, pairing="half").rotate_(q, k)

    return rotation


def _on_path(path: str, case: Case, rope: Rope, positions: Tensor) -> Rotation:
    """One instruction set of the kernel, which only an environment variable picks for users."""
    native: Any = cpu._native
    index = [*native.paths()].index(path)

    def rotation(q: Tensor, k: Tensor) -> Any:
        usual, cpu._path_index = cpu._path_index, index
        try:
            return rotate_qk_(q, k, positions, rope)
        finally:
            cpu._path_index = usual

    return rotation


# The others' public interfaces


def usual_angles(rope: Rope, positions: Tensor) -> Tensor:
    """Angles as everybody makes them, in float32: ``[..., N]``, or ``[..., axes, N]``."""
    exponents = torch.arange(0, rope.rotary_dim, 2, device=positions.device) / rope.rotary_dim
    return positions.float()[..., None] * (1.0 / rope.base**exponents)


def _refuse(unable: object, reason: str) -> None:
    if unable:
        raise UnableError(reason)


def _one_by_one(turn: Callable[[Tensor], Tensor]) -> Rotation:
    """A function of one tensor, called for both."""
    return lambda q, k: (turn(q), turn(k))


def _sequence_positions(case: Case, positions: Tensor) -> Tensor:
    """Positions ``[batch or 1, seq]``, or ``[axes, 1, seq]``."""
    batched = positions if positions.dim() == 2 + bool(case.sections) else positions.unsqueeze(0)
    return batched.movedim(-1, 0) if case.sections else batched


def transformers_rows(case: Case, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cos and sin as the model makes them for all its layers, in the dtype of its activations."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

    settings: dict[str, Any] = {"rope_type": "default", "rope_theta": case.base}
    kind, config = LlamaRotaryEmbedding, LlamaConfig
    if case.sections:
        settings |= {"mrope_section": list(case.sections), "mrope_interleaved": True}
        kind, config = Qwen3VLTextRotaryEmbedding, Qwen3VLTextConfig
    like = torch.empty(0, dtype=getattr(torch, case.dtype), device=positions.device)
    embedding = kind(config(head_dim=case.head_dim, rope_parameters=settings))
    return embedding.to(positions.device)(like, _sequence_positions(case, positions))


def on_rows(function: str, case: Case, rope: Rope, positions: Tensor) -> Rotation:
    """A function of this name of a query, a key and a model's rows, which rotates whole heads."""
    rotate_both = resolve_name(function)
    _refuse(case.rotary_dim is not None, "rotates whole heads only")
    cos, sin = transformers_rows(case, positions)
    return lambda q, k: rotate_both(q, k, cos, sin)


def transformers_gptj(case: Case, rope: Rope, positions: Tensor) -> Rotation:
    """GPT-J's, with the cutting and joining of heads that its attention does around it."""
    from transformers.models.gptj.modeling_gptj import (
        apply_rotary_pos_emb,
        create_sinusoidal_positions,
    )

    width, longest = case.rotary_dim, max(_LONGEST, int(positions.max()) + 1)
    assert width is not None, "asked for cases of GPT-J alone"
    table = create_sinusoidal_positions(longest, width).to(positions.device)
    token_rows = table[_sequence_positions(case, positions)].to(getattr(torch, case.dtype))
    sin, cos = token_rows.split(width // 2, dim=-1)

    def partly(x: Tensor) -> Tensor:
        turned = apply_rotary_pos_emb(x[..., :width], sin, cos)
        return torch.cat([turned, x[..., width:]], dim=-1)

    return _one_by_one(partly)


def meta(case: Case, rope: Rope, positions: Tensor) -> Rotation:
    """The product of complex numbers in float32, as in Meta's and DeepSeek's own model code."""
    _refuse(case.rotary_dim is not None, "rotates whole heads only")
    _refuse(case.sections, "one position axis only")
    angles = usual_angles(rope, positions).unsqueeze(-2)
    turns = torch.polar(torch.ones_like(angles), angles)

    def turned(x: Tensor) -> Tensor:
        z = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(z * turns).flatten(-2).type_as(x)

    return _one_by_one(turned)


def torchtune(case: Case, rope: Rope, positions: Tensor) -> Rotation:
    """`torchtune.modules.RotaryPositionalEmbeddings`, told positions that are not 0 on."""
    from torchtune.modules import RotaryPositionalEmbeddings

    _refuse(case.rotary_dim is not None, "rotates whole heads only")
    _refuse(case.sections, "one position axis only")
    longest = max(_LONGEST, int(positions.max()) + 1)
    module: Any = RotaryPositionalEmbeddings(case.head_dim, longest, case.base)
    rows = None if case.seq > 1 and case.first == 0 else _sequence_positions(case, positions)
    return _one_by_one(lambda x: module(x, input_pos=rows))


def rotary_embedding_torch(case: Case, rope: Rope, positions: Tensor) -> Rotation:
    """`RotaryEmbedding.rotate_queries_or_keys`; its `apply_rotary_emb` where sequences differ."""
    from rotary_embedding_torch import RotaryEmbedding, apply_rotary_emb

    _refuse(case.sections, "one position axis only, with a spectrum of its own")
    module = RotaryEmbedding(rope.rotary_dim, theta=rope.base, cache_max_seq_len=_LONGEST)
    if case.seq == 1:
        angles = module(positions.float()).unsqueeze(1)
        return _one_by_one(lambda x: apply_rotary_emb(angles, x))
    return _one_by_one(lambda x: module.rotate_queries_or_keys(x, offset=case.first))


def onnxruntime(case: Case, rope: Rope, positions: Tensor) -> Rotation:
    """Operator RotaryEmbedding of opset 23, q and k in one graph, on memory that is not copied."""
    import onnx.parser
    import onnxruntime as ort

    _refuse(case.dtype != "float32", "no bfloat16 on the CPU")
    _refuse(case.backward, "no backward pass")
    _refuse(case.rows is not None, "reads contiguous memory only")
    axes = "b, {0}_heads, s, d" if case.heads_first else "b, s, {0}_width"
    q, k = (f"float[{axes.format(x)}]" for x in "qk")
    nodes = " ".join(
        f"{x}2 = RotaryEmbedding<interleaved = {int(rope.pairing == 'interleaved')}, "
        f"num_heads = {heads}, rotary_embedding_dim = {case.rotary_dim or 0}>({x}, cos, sin)"
        for x, heads in (("q", case.q_heads), ("k", case.k_heads))
    )
    graph = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 23]> rope ({q} q, {k} k, float[b, s, n] cos, '
        f"float[b, s, n] sin) => ({q} q2, {k} k2) {{ {nodes} }}"
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # threads that wait by spinning would take the next contender's processors
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = ort.InferenceSession(
        graph.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    cos, sin = (x.astype(np.float32) for x in cos_sin(positions.numpy(), rope))
    if positions.dim() != 2 or case.sections:
        cos, sin = (np.broadcast_to(x, (case.batch, *x.shape)).copy() for x in (cos, sin))

    def rotation(*xs: Tensor) -> Sequence[Tensor]:
        inputs = [x.transpose(1, 2) if case.heads_first else x.flatten(2) for x in xs]
        feed = {"q": inputs[0].numpy(), "k": inputs[1].numpy(), "cos": cos, "sin": sin}
        ys = (torch.from_numpy(y) for y in session.run(None, feed))
        if case.heads_first:
            return [y.transpose(1, 2) for y in ys]
        return [y.view_as(x) for x, y in zip(xs, ys, strict=True)]

    return rotation


def _table(case: Case, rope: Rope, positions: Tensor) -> tuple[Tensor, Tensor | None]:
    """Angles ``[L, N]`` of the tokens in turn; in decode of every position, and each sequence's."""
    if case.seq == 1:
        starts = positions[:, 0, 0] if case.sections else positions[:, 0]  # axes agree on text
        positions = torch.arange(int(positions.max()) + 1, device=positions.device)
        return usual_angles(rope, positions), starts
    angles = usual_angles(rope, positions)
    if case.sections:
        pairs = range(angles.shape[-1])
        angles = angles[:, rope.axes.axis_of_pair(len(pairs)), pairs]
    return angles, None


def flash_attention(in_place: bool, case: Case, rope: Rope, positions: Tensor) -> Rotation:
    """`flash_attn.layers.rotary.apply_rotary_emb`, a Triton kernel for one tensor, called twice."""
    from flash_attn.layers.rotary import apply_rotary_emb

    angles, starts = _table(case, rope, positions)
    rows = [x.to(getattr(torch, case.dtype)) for x in (angles.cos(), angles.sin())]
    options = rope.pairing == "interleaved", in_place, 0 if starts is None else starts.int()
    return _one_by_one(lambda x: apply_rotary_emb(x, *rows, *options))


def flashinfer(case: Case, rope: Rope, positions: Tensor) -> Rotation:
    """`apply_rope_with_cos_sin_cache_inplace`, with the float32 table of serving engines."""
    from flashinfer.rope import apply_rope_with_cos_sin_cache_inplace

    _refuse(case.backward, "no backward pass")
    _refuse(case.rows is not None, "reads whole rows only")
    angles, rows = _table(case, rope, positions)
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    if rows is None:
        rows = torch.arange(case.seq, device=positions.device).repeat(case.batch)

    def rotation(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        apply_rope_with_cos_sin_cache_inplace(
            rows, q.flatten(2).flatten(0, 1), k.flatten(2).flatten(0, 1), case.head_dim, table,
            is_neox=rope.pairing == "half",
        )  # fmt: skip
        return q, k

    return rotation


def transformer_engine(case: Case, rope: Rope, positions: Tensor) -> Rotation:
    """`apply_rotary_pos_emb` with `fused=True`, which takes angles and one tensor, called twice."""
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    angles, starts = _table(case, rope, positions)
    interleaved = rope.pairing == "interleaved"
    wide = angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles, angles], -1)
    wide = wide[:, None, None, :].contiguous()
    starts = None if starts is None else starts.int()
    options = {"start_positions": starts, "interleaved": interleaved, "fused": True}
    return _one_by_one(lambda x: apply_rotary_pos_emb(x, wide, "bshd", **options))


_MODELS = "transformers.models."
_LLAMA = Contender(
    name="transformers", pairing="half", heads_first=True,
    build=partial(on_rows, f"{_MODELS}llama.modeling_llama:apply_rotary_pos_emb"),
)  # fmt: skip
_GPT_J = Contender(name="transformers", pairing="interleaved", build=transformers_gptj)
_DEEPSEEK = Contender(
    name="transformers DeepSeek", pairing="interleaved", pairing_out="half", heads_first=True,
    build=partial(
        on_rows, f"{_MODELS}deepseek_v3.modeling_deepseek_v3:apply_rotary_pos_emb_interleave"
    ),
)  # fmt: skip
# in the place of transformers' function; before 0.8.5 it reads beyond rows of a part of a head
_LIGER = Contender(
    name="Liger, in place", pairing="half", heads_first=True, in_place=True, trains_in_place=True,
    build=partial(on_rows, "liger_kernel.transformers.rope:liger_rotary_pos_emb"),
)  # fmt: skip
_OTHERS = {
    "cpu": [
        Contender(name="Meta, complex", pairing="interleaved", build=meta),
        Contender(name="torchtune", pairing="interleaved", build=torchtune),
        Contender(name="rotary-embedding-torch", pairing="interleaved",
                  build=rotary_embedding_torch, heads_first=True),
        *(Contender(name="onnxruntime", pairing=p, build=onnxruntime) for p in PAIRINGS),
    ],
    "cuda": [
        _LIGER,
        *(Contender(name=name, pairing=p, build=build, in_place="in place" in name)
          for p in PAIRINGS
          for name, build in (
              ("flash-attention, in place", partial(flash_attention, True)),
              ("flash-attention", partial(flash_attention, False)),
              ("flashinfer, in place", flashinfer),
              ("Transformer Engine", transformer_engine),
          )),
    ],
}  # fmt: skip
