"""Queries and keys as a model of transformers rotates them, recorded during one forward pass.

A recorder stands where `patch` would put phasor's operator. What is recorded is what the model's
own function was given and returned; phasor has no part in it.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phasor.errors import TensorError
from phasor.torch.transformers._methods import named_modules, rotations, with_methods

_ATTENTION = "eager_attention_forward"
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|layer|blocks)\.(\d+)(?=\.|$)")
_ROWS = ("cos", "sin", "freqs_cis", "sinusoidal_pos")


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
    """The model with recorders in the modules that rotate."""
    born: list[tuple[Any, type]] = []
    for path, module in named_modules(model):
        cls: Any = type(module)
        called, own = rotations(cls), _own_rotations(cls)
        if not called and not own:
            continue
        layer = next((int(number) for number in _LAYER.findall(path)[-1:]), 0)
        seen = {name: _rotation(function, tape, layer) for name, function in called.items()}
        attention = cls.forward.__globals__.get(_ATTENTION)
        if attention is not None:
            seen[_ATTENTION] = _attention(attention, tape, layer)
        more = {name: staticmethod(_rotation(one, tape, layer)) for name, one in own.items()}
        born.append((module, cls))
        module.__class__ = with_methods(cls, seen, _itself, more)
    try:
        yield
    finally:
        for module, cls in born:
            module.__class__ = cls


def _own_rotations(cls: type) -> dict[str, Any]:
    """Static methods that rotate."""
    return {
        name: value.__func__
        for base in reversed(cls.__mro__)
        for name, value in vars(base).items()
        if isinstance(value, staticmethod) and name.startswith("apply_rotary")
    }


def _itself(cls: type) -> type:
    return cls


def _rotation(function: Callable[..., Any], tape: _Tape, layer: int) -> Callable[..., Any]:
    parameters = inspect.signature(function)

    @functools.wraps(function)
    def seen(*args: Any, **kwargs: Any) -> Any:
        given = parameters.bind(*args, **kwargs).arguments
        # a function may write what it was given
        before = {
            name: value.clone()
            for name, value in given.items()
            if isinstance(value, Tensor) and name not in _ROWS
        }
        returned: Any = function(*args, **kwargs)
        tape.calls += 1
        results = [returned] if isinstance(returned, Tensor) else list(returned)
        turned = [one for one in results if isinstance(one, Tensor)]
        for (name, was), after in zip(before.items(), turned, strict=False):
            if was.shape != after.shape:
                raise TensorError(
                    f"{function.__name__} must return {name} in the shape it was given, "
                    f"{list(was.shape)}, got {list(after.shape)}"
                )
            both = (_tokens_first(one, tape.seq) for one in (was, after))
            tape.records.append(
                Recorded(
                    layer=layer, function=function.__name__, argument=name, call=tape.calls,
                    before=next(both), after=next(both),
                )
            )  # fmt: skip
        return returned

    return seen


def _attention(function: Callable[..., Any], tape: _Tape, layer: int) -> Callable[..., Any]:
    @functools.wraps(function)
    def seen(module: Any, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        ours = tape.heads.setdefault(layer, [])
        ours += [_tokens_first(one, tape.seq) for one in (query, key) if one.shape[2] == tape.seq]
        return function(module, query, key, *args, **kwargs)

    return seen


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
