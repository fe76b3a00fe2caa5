"""Who takes part: each through the interface it publishes, with its tables made beforehand.

A table that a model makes once for all its layers is not timed: cos and sin in transformers, the
complex table in Meta's form, the caches of torchtune and rotary-embedding-torch. phasor has none
and makes its rows from the positions within the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import others
import torch
from cases import Case
from measure import Build, Contender, Rotation
from torch import Tensor

from phasor.errors import DISTRIBUTION
from phasor.pairings import PAIRINGS, Pairing
from phasor.torch import rotate_qk, rotate_qk_
from phasor.torch._operator import cpu
from phasor.torch._operator.text import layout_text

_PACKAGES = (
    *("torch", "triton", "numpy", "transformers", "torchtune", "rotary-embedding-torch", "onnx"),
    *("onnxruntime", "liger-kernel", "flash-attn", "flashinfer-python", "transformer-engine"),
)
_FAR = 2**62
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


_LLAMA = Contender(name="transformers", pairing="half", build=others.transformers_half,
                   heads_first=True)  # fmt: skip
_GPT_J = Contender(name="transformers", pairing="interleaved", build=others.transformers_gptj)
_DEEPSEEK = Contender(name="transformers DeepSeek", pairing="interleaved", pairing_out="half",
                      build=others.transformers_deepseek, heads_first=True)  # fmt: skip
_OTHERS = {
    "cpu": [
        Contender(name="Meta, complex", pairing="interleaved", build=others.meta),
        Contender(name="torchtune", pairing="interleaved", build=others.torchtune),
        Contender(name="rotary-embedding-torch", pairing="interleaved",
                  build=others.rotary_embedding_torch, heads_first=True),
        *(Contender(name="onnxruntime", pairing=p, build=partial(others.onnxruntime, p))
          for p in PAIRINGS),
    ],
    "cuda": [
        Contender(name="Liger, in place", pairing="half", build=others.liger, heads_first=True,
                  in_place=True, trains_in_place=True),
        *(Contender(name=name, pairing=p, build=partial(build, p), in_place="in place" in name)
          for p in PAIRINGS
          for name, build in (
              ("flash-attention, in place", partial(others.flash_attention, True)),
              ("flash-attention", partial(others.flash_attention, False)),
              ("flashinfer, in place", others.flashinfer),
              ("Transformer Engine", others.transformer_engine),
          )),
    ],
}  # fmt: skip


def probes(case: Case) -> list[Contender]:
    """Phasor on a CPU again, in the ways that the targets ask about for this case."""
    if case.backward or case.sections or case.rotary_dim or case.rows:
        return []

    def probe(name: str, build: Build, *, shift: int = 0) -> Contender:
        return Contender(name=name, pairing="half", build=build, in_place=True, shift=shift)

    return [
        probe("phasor, bare operator", _bare_operator),
        probe("phasor, positions near 2^62", partial(_in_place, "half"), shift=_FAR),
        probe("phasor, rows of a table", _rows_of_table),
        *(probe(f"phasor, {p}", partial(_on_path, p)) for p in cpu.paths() if p != "portable"),
    ]


def _bare_operator(case: Case, positions: Tensor) -> Rotation:
    """The operator without the checks that stand before it."""
    return _operator(case.rope("half").to_json(), lambda: [positions])


def _rows_of_table(case: Case, positions: Tensor) -> Rotation:
    """The operator on rows read from tables of 2**15 positions."""
    cos, sin = (torch.from_numpy(x).float() for x in others.rows(case, torch.arange(2**15)))
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
