"""Queries and keys as a model of transformers rotates them, recorded during one forward pass.

What is recorded is what the model's own function was given and returned; phasor has no part in it.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phasor.errors import TensorError

_ROTATION = re.compile(r"_?(vision_)?apply_(\w*rotary|rope)\w*|apply_multidimensional_rope")
_ATTENTION = "eager_attention_forward"
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|layer|blocks)\.(\d+)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """Vectors that one call of the model's rotation turned.

    Attributes:
        layer: Whose they are.
        function: What the model calls its rotation.
        argument: What the function calls these vectors.
        call: The number of the call.
        before: float64 ``[batch, seq, heads, width]``.
        after: The same after the rotation.
        slice_start: Where the vectors stand in the heads that attention is given; None if they are
            not seen there.
        head_dim: The width of those heads; None if they are not seen there.
    """

    layer: int
    function: str
    argument: str
    call: int
    before: NDArray[np.float64]
    after: NDArray[np.float64]
    slice_start: int | None = None
    head_dim: int | None = None


@dataclass(slots=True)
class _Tape:
    seq: int
    layer: int = 0
    depth: int = 0
    calls: int = 0
    records: list[Recorded] = field(default_factory=list[Recorded])
    heads: dict[int, list[NDArray[np.float64]]] = field(
        default_factory=dict[int, list[NDArray[np.float64]]]
    )


def record(model: Any, inputs: dict[str, Tensor]) -> list[Recorded]:
    """Every call of the model's rotation during ``model(**inputs)``, in order.

    Args:
        model: Of transformers, on the CPU.
        inputs: Its keyword arguments; ``input_ids`` tells the length of the sequence.

    Raises:
        TensorError: If what was returned has not the shape of what went in, or there are as many
            tokens as heads, so that one is not told from the other.
    """
    tape = _Tape(inputs["input_ids"].shape[1])
    with _watched(model, tape), torch.no_grad():
        model(**inputs)
    return [_placed(one, tape.heads.get(one.layer, [])) for one in tape.records]


def _placed(one: Recorded, heads: list[NDArray[np.float64]]) -> Recorded:
    """The record with its place in the heads of its layer's attention."""
    width = one.after.shape[-1]
    mine = one.after[:, :, 0]
    for whole in heads:
        for start in range(whole.shape[-1] - width + 1):
            if np.array_equal(whole[:, :, 0, start : start + width], mine):
                return replace(one, slice_start=start, head_dim=whole.shape[-1])
    return one


@contextmanager
def _watched(model: Any, tape: _Tape) -> Generator[None]:
    """The model with its rotation, its attention and its layers telling the tape."""
    code = sys.modules[type(model).__module__]
    undo: list[Callable[[], object]] = []
    own = [
        one
        for one in vars(code).values()
        if isinstance(one, type) and one.__module__ == code.__name__
    ]
    for holder in (code, *own):
        for name, function in list(vars(holder).items()):
            plain = function.__func__ if isinstance(function, staticmethod) else function
            if not inspect.isfunction(plain):
                continue
            if _ROTATION.fullmatch(name):
                seen: Any = _rotation(plain, tape)
            elif name == _ATTENTION:
                seen = _attention(plain, tape)
            else:
                continue
            undo.append(functools.partial(setattr, holder, name, function))
            setattr(holder, name, staticmethod(seen) if plain is not function else seen)
    for name, module in model.named_modules():
        found = _LAYER.search(name)
        if found is not None:
            handle = module.register_forward_pre_hook(_enters(tape, int(found[1])))
            undo.append(handle.remove)
    try:
        yield
    finally:
        for one in reversed(undo):
            one()


def _enters(tape: _Tape, layer: int) -> Callable[..., None]:
    def entered(*_: Any) -> None:
        tape.layer = layer

    return entered


def _rotation(function: Callable[..., Any], tape: _Tape) -> Callable[..., Any]:
    parameters = inspect.signature(function)

    @functools.wraps(function)
    def seen(*args: Any, **kwargs: Any) -> Any:
        given = parameters.bind(*args, **kwargs).arguments
        # a function may write what it was given
        before = {name: v.clone() for name, v in given.items() if isinstance(v, Tensor)}
        tape.depth += 1
        try:
            returned = function(*args, **kwargs)
        finally:
            tape.depth -= 1
        if tape.depth == 0:
            tape.calls += 1
            _keep(tape, function.__name__, before, returned)
        return returned

    return seen


def _keep(tape: _Tape, function: str, before: dict[str, Tensor], returned: Any) -> None:
    results = [one for one in _listed(returned) if isinstance(one, Tensor)]
    names = [name for name in before if name not in ("cos", "sin", "freqs_cis", "sinusoidal_pos")]
    for name, after in zip(names, results, strict=False):
        if before[name].shape != after.shape:
            raise TensorError(
                f"{function} must return {name} in the shape it was given, "
                f"{list(before[name].shape)}, got {list(after.shape)}"
            )
        tape.records.append(
            Recorded(
                layer=tape.layer,
                function=function,
                argument=name,
                call=tape.calls,
                before=_tokens_first(before[name], tape.seq),
                after=_tokens_first(after, tape.seq),
            )
        )


def _attention(function: Callable[..., Any], tape: _Tape) -> Callable[..., Any]:
    @functools.wraps(function)
    def seen(module: Any, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        ours = tape.heads.setdefault(tape.layer, [])
        ours += [_tokens_first(one, tape.seq) for one in (query, key) if one.shape[2] == tape.seq]
        return function(module, query, key, *args, **kwargs)

    return seen


def _listed(returned: Any) -> list[Any]:
    return list(cast(Any, returned)) if isinstance(returned, (tuple, list)) else [returned]


def _tokens_first(x: Tensor, seq: int) -> NDArray[np.float64]:
    """``[batch, seq, heads, width]`` from whichever order the model has."""
    x = x.detach()
    if x.ndim == 3:
        x = x[:, :, None] if x.shape[1] == seq else x[None]
    if x.ndim != 4:
        raise TensorError(f"a rotation must be given three or four dimensions, got {list(x.shape)}")
    if x.shape[1] == x.shape[2] == seq:
        raise TensorError(
            f"a sequence must not be as long as there are heads, got {list(x.shape)}: which is "
            "which cannot be seen; give another number of tokens"
        )
    if x.shape[1] != seq:
        x = x.transpose(1, 2)
    return x.to(torch.float64).numpy().copy()
