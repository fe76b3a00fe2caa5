"""Who takes part on a GPU: phasor in its forms, and the kernels of others where they import."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import foreign
import gpu_foreign
import torch
from contenders import adapted, compiled
from torch import Tensor

from phasor.bench import EPSILON, Call, Case, Contender, Rotation, ours
from phasor.pairings import PAIRINGS, Pairing
from phasor.torch import rotate_qk
from phasor.torch.backends import eager
from phasor.torch.fused import norm_rotate_qk, rotate_and_cache_

PACKAGES = (
    "torch", "triton", "numpy", "transformers", "liger-kernel", "flash-attn", "flashinfer-python",
    "transformer-engine",
)  # fmt: skip
#: Forms that the report and the targets speak of.
NORM, NORM_APART = "phasor, fused norm", "phasor, norm then rotate"
_QWEN3 = "transformers Qwen3"
#: How the keys of those begin who do the norm as well.
NORMED = (NORM, NORM_APART, _QWEN3)


def everyone(case: Case) -> list[Contender]:
    """Who is asked for this case, in the order of the tables."""
    return [*ours(), *_compiled_ours(), *(_normed() if case.norm else ()), *others(case)]


def others(case: Case) -> list[Contender]:
    """Everybody but phasor; DeepSeek's function and GPT-J's are asked in their own cases only."""
    llama = foreign.transformers_half
    found = [
        _other("transformers", "half", llama, heads_first=True),
        _other("transformers, compiled", "half", compiled(llama), heads_first=True),
        _other("Liger, in place", "half", gpu_foreign.liger, heads_first=True, in_place=True,
               trains_in_place=True),
    ]  # fmt: skip
    if case.rotary_dim is not None:
        gptj = foreign.transformers_gptj
        found.append(_other("transformers", "interleaved", gptj))
        found.append(_other("transformers, compiled", "interleaved", compiled(gptj)))
    if case.rows is not None:
        deepseek = foreign.transformers_deepseek
        for name, build in (("", deepseek), (", compiled", compiled(deepseek))):
            found.append(_other(f"transformers DeepSeek{name}", "interleaved", build,
                                heads_first=True, pairing_out="half"))  # fmt: skip
    if case.norm:
        qwen3 = gpu_foreign.transformers_qwen3
        for name, build in (("", qwen3), (", compiled", compiled(qwen3))):
            found.append(_other(f"{_QWEN3}{name}", "half", build, heads_first=True, norm=True))
    for pairing in PAIRINGS:
        kind = {"interleaved": pairing == "interleaved"}
        flash = partial(gpu_foreign.flash_attention, **kind)
        found += [
            _other("flash-attention, in place", pairing, partial(flash, in_place=True),
                   in_place=True),
            _other("flash-attention", pairing, partial(flash, in_place=False)),
            _other("flashinfer, in place", pairing, partial(gpu_foreign.flashinfer_table, **kind),
                   in_place=True),
            _other("flashinfer, angles computed", pairing,
                   partial(gpu_foreign.flashinfer_computed, **kind)),
            _other("Transformer Engine", pairing, partial(gpu_foreign.transformer_engine, **kind)),
        ]  # fmt: skip
    return found


def fused_calls(case: Case, positions: Tensor) -> Mapping[str, Call]:
    """What phasor does beside the rotation in one call, on the tensors of ``case``."""
    q, k = case.tensors(device=positions.device)
    rope, weight = case.rope("half"), q.new_ones(case.head_dim)
    slots = torch.arange(k.shape[:-2].numel(), device=k.device).view(k.shape[:-2])
    keys, values = (k.new_zeros(1, slots.numel(), *k.shape[-2:]) for _ in range(2))
    return {
        "phasor, norm and rotation": lambda: norm_rotate_qk(
            q, k, weight, weight, positions, rope, epsilon=EPSILON
        ),
        "phasor, rotation and cache write": lambda: rotate_and_cache_(
            q, k, k, positions, rope, slots, keys, values
        ),
    }


def _other(
    name: str, pairing: Pairing, build: Callable[[Case, Tensor], Rotation], **options: Any
) -> Contender:
    # their interfaces were read, and could not be run, where this was written
    return adapted(name, pairing, build, may_raise=(Exception,), **options)


def _compiled_ours() -> list[Contender]:
    """What inductor makes of the rotation where it sees its operations."""

    def traced(pairing: Pairing) -> Callable[[Case, Tensor], Rotation]:
        def build(case: Case, positions: Tensor) -> Rotation:
            text = case.rope(pairing).to_json()
            return lambda q, k: eager.composite([q, k], [positions], text, False, 1.0)

        return build

    name = "phasor, plain torch, compiled"
    return [Contender(name=name, pairing=p, build=compiled(traced(p))) for p in PAIRINGS]


def _normed() -> list[Contender]:
    def fused(pairing: Pairing) -> Callable[[Case, Tensor], Rotation]:
        def build(case: Case, positions: Tensor) -> Rotation:
            rope = case.rope(pairing)

            def rotation(q: Tensor, k: Tensor, qw: Tensor, kw: Tensor) -> tuple[Tensor, Tensor]:
                return norm_rotate_qk(q, k, qw, kw, positions, rope, epsilon=EPSILON)

            return rotation

        return build

    def apart(pairing: Pairing) -> Callable[[Case, Tensor], Rotation]:
        def build(case: Case, positions: Tensor) -> Rotation:
            rope = case.rope(pairing)

            def rotation(q: Tensor, k: Tensor, qw: Tensor, kw: Tensor) -> tuple[Tensor, Tensor]:
                normed = (
                    torch.nn.functional.rms_norm(x, (case.head_dim,), weight, EPSILON)
                    for x, weight in ((q, qw), (k, kw))
                )
                return rotate_qk(*normed, positions, rope)

            return rotation

        return build

    return [
        Contender(name=name, pairing=p, build=build(p), norm=True)
        for p in PAIRINGS
        for name, build in ((NORM, fused), (NORM_APART, apart))
    ]
