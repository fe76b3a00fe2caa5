"""TorchScript is refused: it would compile half a rotation, or keep what one call saw."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, TypeVar

import torch

from phasor.errors import BackendError
from phasor.torch._internals import tracing

_F = TypeVar("_F", bound=Callable[..., object])


def refuse() -> NoReturn:
    """Always.

    Raises:
        BackendError: Naming the way out.
    """
    raise BackendError(
        "phasor has no form in TorchScript (torch.jit.script, torch.jit.trace, torch.onnx.export "
        "with dynamo=False); use torch.export.export(model, args), torch.compile(model), or "
        "phasor.torch.export.export(model, args)"
    )


def unscriptable(verb: _F) -> _F:
    """``verb``, which ``torch.jit.script`` finds refused when it comes to compile it."""
    vars(verb)["__prepare_scriptable__"] = refuse
    return verb


def refuse_tracing() -> None:
    """An error while ``torch.jit.trace`` records, nothing otherwise."""
    if not torch.compiler.is_compiling() and tracing():
        refuse()
