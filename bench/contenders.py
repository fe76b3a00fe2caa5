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
from typing import Any

import numpy as np
import torch
from cases import Case
from measure import Build, Contender, Rotation, UnableError
from torch import Tensor

from phasor.angles import cos_sin, turn_limbs
from phasor.errors import DISTRIBUTION
from phasor.pairings import PAIRINGS, Pairing
from phasor.torch import rotate_qk, rotate_qk_
from phasor.torch._operator import cpu
from phasor.torch._operator.text import layout_text

_PACKAGES = (
    *("torch", "triton", "numpy", "transformers", "torchtune", "rotary-embedding-torch", "onnx"),
    *("onnxruntime", "liger-kernel", "flash-attn", "flashinfer-python", "transformer-engine"),
)
_LONGEST = 2**15  # positions of every case that is timed
#: Forms that the report and the targets speak of.
IN_PLACE, NEW = "phasor, in place", "phasor, new output"
_PLAIN = "phasor, plain torch"
#: How the keys of phasor's other ways begin, which have a table of their own.
PROBES = ("phasor, bare", "phasor, positions", "phasor, rows", "phasor, avx")


def versions() -> dict[str, str]:
    """What is installed of all that takes part."""
    found: dict[str, str] = {}
    for name in (DISTRIBUTION, *_PACKAGES):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def everyone(case: Case, device: str) -> list[Contender]:
    """Who is asked for this case on a ``"cpu"`` or ``"cuda"``, in the order of the tables."""
    models = [_LLAMA]
    if case.rotary_dim is not None:
        models.append(_GPT_J)
    if case.rows is not None:
        models.append(_DEEPSEEK)
    found = [contender for one in models for contender in (one, _compiled(one))]
    if device == "cuda":
        found = [_compiled(one) for one in ours() if one.name == _PLAIN] + found
    return [*ours(), *found, *_OTHERS[device]]


def ours() -> list[Contender]:
    """Phasor's verbs: in place, with new outputs, and in plain torch operations."""
    builds = {IN_PLACE: _in_place, NEW: partial(_new, "auto"), _PLAIN: partial(_new, "eager")}
    return [
        Contender(name=name, pairing=p, build=partial(build, p), in_place=name == IN_PLACE)
        for p in PAIRINGS
        for name, build in builds.items()
    ]


def _in_place(pairing: Pairing, case: Case, positions: Tensor) -> Rotation:
    rope = case.rope(pairing)
    return lambda q, k: rotate_qk_(q, k, positions, rope)


def _new(backend: str, pairing: Pairing, case: Case, positions: Tensor) -> Rotation:
    rope = case.rope(pairing)
    return lambda q, k: rotate_qk(q, k, positions, rope, backend=backend)


def _compiled(one: Contender) -> Contender:
    """The same rotation, compiled for its shape when it is called first."""

    def build(case: Case, positions: Tensor) -> Rotation:
        return torch.compile(one.build(case, positions), dynamic=False)

    return replace(one, name=f"{one.name}, compiled", build=build)


def probes(case: Case) -> list[Contender]:
    """Phasor on a CPU again, in the ways that the targets ask about for this case."""
    if case.backward or case.sections or case.rotary_dim or case.rows:
        return []

    def probe(name: str, build: Build, *, shift: int = 0) -> Contender:
        return Contender(name=name, pairing="half", build=build, in_place=True, shift=shift)

    return [
        probe("phasor, bare operator", _bare_operator),
        probe("phasor, positions near 2^62", partial(_in_place, "half"), shift=2**62),
        probe("phasor, rows of a table", _rows_of_table),
        *(probe(f"phasor, {p}", partial(_on_path, p)) for p in cpu.paths() if p != "portable"),
    ]


def _bare_operator(case: Case, positions: Tensor) -> Rotation:
    """The operator without the checks that stand before it."""
    return _operator(case.rope("half").to_json(), lambda: [positions])


def _rows_of_table(case: Case, positions: Tensor) -> Rotation:
    """The operator on rows read from tables of positions."""
    cos, sin = (
        torch.from_numpy(x).float() for x in cos_sin(case.rope("half"), np.arange(_LONGEST))
    )
    return _operator(layout_text("half", "half", 0), lambda: [cos[positions], sin[positions]])


def _operator(text: str, angles: Callable[[], Sequence[Tensor]]) -> Rotation:
    operator: Any = torch.ops.phasor.rotate_.default

    def rotation(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        operator([q, k], angles(), text, False, 1.0, "cpu")
        return q, k

    return rotation


def _on_path(path: str, case: Case, positions: Tensor) -> Rotation:
    """One instruction set of the kernel, which only an environment variable picks for users."""
    native: Any = cpu._native
    wanted, usual_rotation = [*native.paths()].index(path), _in_place("half", case, positions)

    def rotation(q: Tensor, k: Tensor) -> Any:
        usual, cpu._path_index = cpu._path_index, wanted
        try:
            return usual_rotation(q, k)
        finally:
            cpu._path_index = usual

    return rotation


# The others' public interfaces


def usual_angles(case: Case, positions: Tensor) -> Tensor:
    """Angles as everybody makes them, in float32: ``[..., N]``, or ``[..., axes, N]``."""
    width, device = case.rotary_dim or case.head_dim, positions.device
    inv_freq = 1.0 / case.base ** (torch.arange(0, width, 2, device=device).float() / width)
    return positions.float()[..., None] * inv_freq


def _refuse(unable: object, why: str) -> None:
    if unable:
        raise UnableError(why)


def _whole_heads_of_one_axis(case: Case) -> None:
    _refuse(case.rotary_dim is not None, "rotates whole heads only")
    _refuse(case.sections, "one position axis only")


def _by_sequence(case: Case, positions: Tensor) -> Tensor:
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
    return embedding.to(positions.device)(like, _by_sequence(case, positions))


def transformers_half(case: Case, positions: Tensor) -> Rotation:
    """`apply_rotary_pos_emb` of Llama, and of nearly every other model there."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    _refuse(case.rotary_dim is not None, "this function rotates whole heads only")
    cos, sin = transformers_rows(case, positions)
    return lambda q, k: apply_rotary_pos_emb(q, k, cos, sin)


def transformers_gptj(case: Case, positions: Tensor) -> Rotation:
    """GPT-J's, with the cutting and joining of heads that its attention does around it."""
    from transformers.models.gptj.modeling_gptj import (
        apply_rotary_pos_emb,
        create_sinusoidal_positions,
    )

    width, longest = case.rotary_dim, max(_LONGEST, int(positions.max()) + 1)
    assert width is not None, "asked for cases of GPT-J alone"
    table = create_sinusoidal_positions(longest, width).to(positions.device)
    rows_of = table[_by_sequence(case, positions)].to(getattr(torch, case.dtype))
    sin, cos = rows_of.split(width // 2, dim=-1)

    def partly(x: Tensor) -> Tensor:
        turned = apply_rotary_pos_emb(x[..., :width], sin, cos)
        return torch.cat([turned, x[..., width:]], dim=-1)

    return lambda q, k: (partly(q), partly(k))


def transformers_deepseek(case: Case, positions: Tensor) -> Rotation:
    """DeepSeek V3's `apply_rotary_pos_emb_interleave`, which writes halves."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
        apply_rotary_pos_emb_interleave,
    )

    cos, sin = transformers_rows(case, positions)
    return lambda q, k: apply_rotary_pos_emb_interleave(q, k, cos, sin)


def meta_turns(case: Case, positions: Tensor) -> Tensor:
    """Meta's table: float32 angles as complex numbers."""
    angles = usual_angles(case, _by_sequence(case, positions))
    return torch.polar(torch.ones_like(angles), angles)


def meta(case: Case, positions: Tensor) -> Rotation:
    """The product of complex numbers in float32, as in Meta's and DeepSeek's own model code."""
    _whole_heads_of_one_axis(case)
    turns = meta_turns(case, positions).unsqueeze(-2)

    def turned(x: Tensor) -> Tensor:
        z = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(z * turns).flatten(-2).type_as(x)

    return lambda q, k: (turned(q), turned(k))


def torchtune_module(case: Case, longest: int) -> Any:
    """The module with its table."""
    from torchtune.modules import RotaryPositionalEmbeddings

    return RotaryPositionalEmbeddings(case.head_dim, longest, case.base)  # pyright: ignore


def torchtune(case: Case, positions: Tensor) -> Rotation:
    """`torchtune.modules.RotaryPositionalEmbeddings`, told positions that are not 0 on."""
    _whole_heads_of_one_axis(case)
    module = torchtune_module(case, max(_LONGEST, int(positions.max()) + 1))
    given = None if case.seq > 1 and case.first == 0 else _by_sequence(case, positions)
    return lambda q, k: (module(q, input_pos=given), module(k, input_pos=given))


def rotary_embedding_torch(case: Case, positions: Tensor) -> Rotation:
    """`RotaryEmbedding.rotate_queries_or_keys`; its `apply_rotary_emb` where sequences differ."""
    from rotary_embedding_torch import RotaryEmbedding, apply_rotary_emb

    _refuse(case.sections, "one position axis only, with a spectrum of its own")
    module = RotaryEmbedding(
        case.rotary_dim or case.head_dim, theta=case.base, cache_max_seq_len=_LONGEST
    )
    if case.seq == 1:
        angles = module(positions.float()).unsqueeze(1)
        return lambda q, k: (apply_rotary_emb(angles, q), apply_rotary_emb(angles, k))
    turned = module.rotate_queries_or_keys
    return lambda q, k: (turned(q, offset=case.first), turned(k, offset=case.first))


def onnxruntime(pairing: Pairing, case: Case, positions: Tensor) -> Rotation:
    """Operator RotaryEmbedding of opset 23, q and k in one graph, on memory that is not copied."""
    import onnx.parser
    import onnxruntime as ort

    _refuse(case.dtype != "float32", "no bfloat16 on the CPU")
    _refuse(case.backward, "no backward pass")
    _refuse(case.rows is not None, "reads contiguous memory only")
    axes = "b, {0}_heads, s, d" if case.heads_first else "b, s, {0}_width"
    q, k = (f"float[{axes.format(x)}]" for x in "qk")
    nodes = " ".join(
        f"{x}2 = RotaryEmbedding<interleaved = {int(pairing == 'interleaved')}, "
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
    cos, sin = (x.astype(np.float32) for x in cos_sin(case.rope("half"), positions.numpy()))
    if positions.dim() != 2 or case.sections:
        cos, sin = (np.broadcast_to(x, (case.batch, *x.shape)).copy() for x in (cos, sin))

    def rotation(*xs: Tensor) -> Sequence[Tensor]:
        given = [x.transpose(1, 2) if case.heads_first else x.flatten(2) for x in xs]
        feed = {"q": given[0].numpy(), "k": given[1].numpy(), "cos": cos, "sin": sin}
        ys = (torch.from_numpy(y) for y in session.run(None, feed))
        if case.heads_first:
            return [y.transpose(1, 2) for y in ys]
        return [y.view_as(x) for x, y in zip(xs, ys, strict=True)]

    return rotation


def _last(case: Case, positions: Tensor) -> Tensor:
    """``[B]`` position of each sequence of a decode step; its axes agree on text."""
    return positions[:, 0, 0] if case.sections else positions[:, 0]


def _table(case: Case, positions: Tensor) -> Tensor:
    """Angles ``[L, N]``: of every position up to the last in decode, else of the tokens in turn."""
    if case.seq == 1:
        return usual_angles(case, torch.arange(int(positions.max()) + 1, device=positions.device))
    angles = usual_angles(case, positions)
    if not case.sections:
        return angles
    pairs = torch.arange(angles.shape[-1])
    return angles[:, torch.from_numpy(case.rope("half").axes.axis_of_pair(len(pairs))), pairs]


def liger(case: Case, positions: Tensor) -> Rotation:
    """`liger_rotary_pos_emb`, which takes the place of transformers' function and its rows."""
    from liger_kernel.transformers.rope import liger_rotary_pos_emb

    partial = "rotates whole heads (parts since 0.8.5; earlier ones read beyond rows)"
    _refuse(case.rotary_dim is not None, partial)
    cos, sin = transformers_rows(case, positions)
    return lambda q, k: liger_rotary_pos_emb(q, k, cos, sin)


def flash_attention(in_place: bool, pairing: Pairing, case: Case, positions: Tensor) -> Rotation:
    """`flash_attn.layers.rotary.apply_rotary_emb`, a Triton kernel for one tensor, called twice."""
    from flash_attn.layers.rotary import apply_rotary_emb

    angles, kind = _table(case, positions), getattr(torch, case.dtype)
    cos, sin = angles.cos().to(kind), angles.sin().to(kind)
    offsets = _last(case, positions).int() if case.seq == 1 else 0

    def turned(x: Tensor) -> Tensor:
        return apply_rotary_emb(x, cos, sin, pairing == "interleaved", in_place, offsets)

    return lambda q, k: (turned(q), turned(k))


def flashinfer(pairing: Pairing, case: Case, positions: Tensor) -> Rotation:
    """`apply_rope_with_cos_sin_cache_inplace`, with the float32 table of serving engines."""
    from flashinfer.rope import apply_rope_with_cos_sin_cache_inplace

    _refuse(case.backward, "no backward pass")
    _refuse(case.rows is not None, "reads whole rows only")
    angles = _table(case, positions)
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    # the rows of a prefill stand in the order of its tokens
    rows_of = (
        _last(case, positions)
        if case.seq == 1
        else torch.arange(case.seq, device=positions.device).repeat(case.batch)
    )

    def rotation(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        apply_rope_with_cos_sin_cache_inplace(
            rows_of, q.flatten(2).flatten(0, 1), k.flatten(2).flatten(0, 1), case.head_dim, table,
            is_neox=pairing == "half",
        )  # fmt: skip
        return q, k

    return rotation


def transformer_engine(pairing: Pairing, case: Case, positions: Tensor) -> Rotation:
    """`apply_rotary_pos_emb` with `fused=True`, which takes angles and one tensor, called twice."""
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    angles = _table(case, positions)
    interleaved = pairing == "interleaved"
    wide = angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles, angles], -1)
    wide = wide[:, None, None, :].contiguous()
    starts = _last(case, positions).int() if case.seq == 1 else None

    def turned(x: Tensor) -> Tensor:
        return apply_rotary_pos_emb(
            x, wide, "bshd", start_positions=starts, interleaved=interleaved, fused=True
        )

    return lambda q, k: (turned(q), turned(k))


_LLAMA = Contender(name="transformers", pairing="half", build=transformers_half,
                   heads_first=True)  # fmt: skip
_GPT_J = Contender(name="transformers", pairing="interleaved", build=transformers_gptj)
_DEEPSEEK = Contender(name="transformers DeepSeek", pairing="interleaved", pairing_out="half",
                      build=transformers_deepseek, heads_first=True)  # fmt: skip
_OTHERS = {
    "cpu": [
        Contender(name="Meta, complex", pairing="interleaved", build=meta),
        Contender(name="torchtune", pairing="interleaved", build=torchtune),
        Contender(name="rotary-embedding-torch", pairing="interleaved",
                  build=rotary_embedding_torch, heads_first=True),
        *(Contender(name="onnxruntime", pairing=p, build=partial(onnxruntime, p))
          for p in PAIRINGS),
    ],
    "cuda": [
        Contender(name="Liger, in place", pairing="half", build=liger, heads_first=True,
                  in_place=True, trains_in_place=True),
        *(Contender(name=name, pairing=p, build=partial(build, p), in_place="in place" in name)
          for p in PAIRINGS
          for name, build in (
              ("flash-attention, in place", partial(flash_attention, True)),
              ("flash-attention", partial(flash_attention, False)),
              ("flashinfer, in place", flashinfer),
              ("Transformer Engine", transformer_engine),
          )),
    ],
}  # fmt: skip


def table_recipes(case: Case, device: torch.device) -> dict[str, Callable[[], Sequence[Tensor]]]:
    """The tables of the case's positions; phasor's constants are the same for every position."""
    positions, constants = case.positions(device), turn_limbs.__wrapped__

    def rows(dtype: torch.dtype) -> Sequence[Tensor]:
        angles = usual_angles(case, positions)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    return {
        "transformers, Liger": lambda: transformers_rows(case, positions),
        "Meta, complex": lambda: [meta_turns(case, positions)],
        "torchtune": lambda: [torchtune_module(case, case.seq).cache],
        "flash-attention": lambda: rows(torch.bfloat16),
        "flashinfer, in place": lambda: rows(torch.float32),
        "Transformer Engine": lambda: [torch.cat([*rows(torch.float32)], -1)],
        "phasor": lambda: [torch.tensor(constants(case.rope("half"))).to(device)],
    }
