"""Who takes part: each through the interface it publishes, with its tables made beforehand.

A table that a model makes once for all its layers is not timed: cos and sin in transformers, the
complex table in Meta's form, the caches of torchtune and rotary-embedding-torch. phasor has none
and makes its rows from the positions within the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import others
import torch
from cases import Case
from measure import Contender, Rotation, UnableError
from torch import Tensor

from phasor.errors import DISTRIBUTION
from phasor.pairings import PAIRINGS, Pairing
from phasor.torch import rotate_qk, rotate_qk_
from phasor.torch._operator import cpu, eager
from phasor.torch._operator.text import layout_text

_PACKAGES = (
    *("torch", "triton", "numpy", "transformers", "torchtune", "rotary-embedding-torch", "onnx"),
    *("onnxruntime", "liger-kernel", "flash-attn", "flashinfer-python", "transformer-engine"),
)
_FAR = 2**62
#: Forms that the report and the targets speak of.
IN_PLACE, NEW = "phasor, in place", "phasor, new output"
#: How the keys of phasor's other ways begin, which have a table of their own.
PROBES = ("phasor, bare", "phasor, positions", "phasor, rows", "phasor, avx")
Build = Callable[[Case, Tensor], Rotation]


def versions() -> dict[str, str]:
    """What is installed of all that takes part."""
    found: dict[str, str] = {}
    for name in (DISTRIBUTION, *_PACKAGES):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def everyone(case: Case, device: str) -> list[Contender]:
    """Who is asked for this case on a ``"cpu"`` or ``"cuda"``, in the order of the tables."""
    found = ours()
    if device == "cuda":
        name = "phasor, plain torch, compiled"
        found += [Contender(name=name, pairing=p, build=_compiled(_traced(p))) for p in PAIRINGS]
    found += _with_compiled("transformers", "half", others.transformers_half, heads_first=True)
    if case.rotary_dim is not None:
        found += _with_compiled("transformers", "interleaved", others.transformers_gptj)
    if case.rows is not None:
        found += _with_compiled("transformers DeepSeek", "interleaved",
                                others.transformers_deepseek, heads_first=True,
                                pairing_out="half")  # fmt: skip
    if device == "cpu":
        return [
            *found,
            adapted("Meta, complex", "interleaved", others.meta),
            adapted("torchtune", "interleaved", others.torchtune),
            adapted("rotary-embedding-torch", "interleaved", others.rotary_embedding_torch,
                    heads_first=True),
            *(adapted("onnxruntime", p, partial(others.onnxruntime, p)) for p in PAIRINGS),
        ]  # fmt: skip
    found.append(adapted("Liger, in place", "half", others.liger, heads_first=True, in_place=True,
                         trains_in_place=True))  # fmt: skip
    for p in PAIRINGS:
        flash = others.flash_attention
        found += [
            adapted("flash-attention, in place", p, partial(flash, p, True), in_place=True),
            adapted("flash-attention", p, partial(flash, p, False)),
            adapted("flashinfer, in place", p, partial(others.flashinfer_table, p), in_place=True),
            adapted("flashinfer, angles computed", p, partial(others.flashinfer_computed, p)),
            adapted("Transformer Engine", p, partial(others.transformer_engine, p)),
        ]
    return found


def ours() -> list[Contender]:
    """Phasor's verbs: in place, with new outputs, and in plain torch operations."""

    def new(pairing: Pairing, backend: str, case: Case, positions: Tensor) -> Rotation:
        rope = case.rope(pairing)
        return lambda q, k: rotate_qk(q, k, positions, rope, backend=backend)

    return [
        contender
        for p in PAIRINGS
        for contender in (
            Contender(name=IN_PLACE, pairing=p, build=partial(_in_place, p), in_place=True),
            Contender(name=NEW, pairing=p, build=partial(new, p, "auto")),
            Contender(name="phasor, plain torch", pairing=p, build=partial(new, p, "eager")),
        )
    ]


def _in_place(pairing: Pairing, case: Case, positions: Tensor) -> Rotation:
    rope = case.rope(pairing)
    return lambda q, k: rotate_qk_(q, k, positions, rope)


def _traced(pairing: Pairing) -> Build:
    """The operations that inductor sees, where it sees them."""

    def build(case: Case, positions: Tensor) -> Rotation:
        text = case.rope(pairing).to_json()
        return lambda q, k: eager.rotate_without_writes([q, k], [positions], text, False, 1.0)

    return build


def _compiled(build: Build) -> Build:
    """The same rotation, compiled for its shape when it is called first."""
    return lambda case, positions: torch.compile(build(case, positions), dynamic=False)


def _with_compiled(name: str, pairing: Pairing, build: Build, **options: Any) -> list[Contender]:
    return [
        adapted(name, pairing, build, **options),
        adapted(f"{name}, compiled", pairing, _compiled(build), **options),
    ]


def adapted(name: str, pairing: Pairing, build: Build, **options: Any) -> Contender:
    """Another package's, left out where it is not installed or its interface has changed."""

    def checked(case: Case, positions: Tensor) -> Rotation:
        try:
            return build(case, positions)
        except ImportError as missing:
            raise UnableError(f"not installed ({missing.name})") from None

    return Contender(name=name, pairing=pairing, build=checked, may_raise=(Exception,), **options)


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
