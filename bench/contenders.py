"""Who takes part: each through the interface it publishes, with its tables made beforehand.

A table that a model makes once for all its layers is not timed: cos and sin in transformers, the
complex table in Meta's form, the caches of torchtune and rotary-embedding-torch. phasor has none
and makes its rows from the positions within the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import foreign
import torch
from torch import Tensor

from phasor.bench import Case, Contender, Rotation, UnableError, ours
from phasor.pairings import Pairing
from phasor.torch import rotate_qk_
from phasor.torch._layout import layout_text
from phasor.torch.backends import cpu

PACKAGES = (
    "torch", "numpy", "transformers", "torchtune", "rotary-embedding-torch", "onnx", "onnxruntime"
)  # fmt: skip
_FAR = 2**40 - 2**16


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """What is installed of all that takes part."""
    found: dict[str, str] = {}
    for name in ("phasor", *packages):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def everyone() -> list[Contender]:
    """Phasor and all others, in the order of the tables."""
    return [*ours(), *others()]


def others() -> list[Contender]:
    """Everybody but phasor."""
    return [
        adapted("transformers", "half", foreign.transformers_half, heads_first=True),
        adapted("transformers, compiled", "half", compiled(foreign.transformers_half),
                heads_first=True),
        adapted("transformers", "interleaved", foreign.transformers_gptj),
        adapted("transformers, compiled", "interleaved", compiled(foreign.transformers_gptj)),
        adapted("transformers DeepSeek", "interleaved", foreign.transformers_deepseek,
                heads_first=True, pairing_out="half"),
        adapted("transformers DeepSeek, compiled", "interleaved",
                compiled(foreign.transformers_deepseek), heads_first=True, pairing_out="half"),
        adapted("Meta, complex", "interleaved", foreign.meta),
        adapted("torchtune", "interleaved", foreign.torchtune),
        adapted("rotary-embedding-torch", "interleaved", foreign.rotary_embedding_torch,
                heads_first=True),
        adapted("onnxruntime", "half", partial(foreign.onnxruntime, interleaved=False)),
        adapted("onnxruntime", "interleaved", partial(foreign.onnxruntime, interleaved=True)),
    ]  # fmt: skip


def probes(case: Case) -> list[Contender]:
    """Phasor again, in the ways that the targets ask about for this case."""
    found: list[Contender] = []
    if case.backward or case.sections or case.rotary_dim or case.rows:
        return found
    found.append(_probe("phasor, bare operator", _operator))
    found.append(_probe("phasor, positions near 2^40", _verb, shift=_FAR))
    found.append(_probe("phasor, rows of a table", _looked_up))
    here = [path for path in cpu.paths() if path != "portable"]
    return found + [_probe(f"phasor, {path}", partial(_on_path, path)) for path in here]


def adapted(
    name: str, pairing: Pairing, build: Callable[[Case, Tensor], Rotation], **options: Any
) -> Contender:
    """Another package's, left out where it is not installed."""

    def checked(case: Case, positions: Tensor) -> Rotation:
        try:
            return build(case, positions)
        except ImportError as missing:
            raise UnableError(f"not installed ({missing.name})") from None

    return Contender(name=name, pairing=pairing, build=checked, **options)


def compiled(build: Callable[[Case, Tensor], Rotation]) -> Callable[[Case, Tensor], Rotation]:
    """The same rotation, compiled for its shape when it is called first."""

    def built(case: Case, positions: Tensor) -> Rotation:
        return torch.compile(build(case, positions), dynamic=False)

    return built


def _probe(name: str, build: Callable[[Case, Tensor], Rotation], *, shift: int = 0) -> Contender:
    return Contender(name=name, pairing="half", build=build, in_place=True, shift=shift)


def _verb(case: Case, positions: Tensor) -> Rotation:
    rope = case.rope("half")
    return lambda q, k: rotate_qk_(q, k, positions, rope)


def _operator(case: Case, positions: Tensor) -> Rotation:
    operator: Any = torch.ops.phasor.rotate_.default
    text = case.rope("half").to_json()

    def rotation(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        operator([q, k], [positions], text, False, 1.0, "cpu")
        return q, k

    return rotation


def _looked_up(case: Case, positions: Tensor) -> Rotation:
    """The operator on rows read from tables of 2**15 positions."""
    operator: Any = torch.ops.phasor.rotate_.default
    cos, sin = (torch.from_numpy(x).float() for x in foreign.rows(case, torch.arange(2**15)))
    text = layout_text("half", "half", 0)

    def rotation(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        operator([q, k], [cos[positions], sin[positions]], text, False, 1.0, "cpu")
        return q, k

    return rotation


def _on_path(path: str, case: Case, positions: Tensor) -> Rotation:
    """One instruction set of the kernel, which only an environment variable picks for users."""
    rope = case.rope("half")
    native: Any = import_module("phasor._native")
    wanted = [name for name, _ in native.paths()].index(path)

    def rotation(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        usual, cpu._running = cpu._running, wanted
        try:
            return rotate_qk_(q, k, positions, rope)
        finally:
            cpu._running = usual

    return rotation
