"""The one operator: its schema, its fake, its derivatives, its batching rule and its dispatch.

    phasor::rotate (xs, angles, rope, inverse, gain, backend) -> ys
    phasor::rotate_(xs, angles, rope, inverse, gain, backend) -> ()

``xs`` are tensors ``[..., seq, heads, head_dim]`` that share their tokens; ``angles`` is
``[positions]``, or ``[cos, sin]`` rows; ``rope`` is the text of `_layout`. The derivative of a
rotation is the inverse rotation, so backward and forward mode call the operator again, and what
is saved is ``angles`` alone.

Registered through the low-level ``Library``: the ``custom_op`` decorator costs several
microseconds a call, which is more than a decode step's rotation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from phasor.errors import BackendError, TensorError
from phasor.torch._internals import below_autograd, in_transform
from phasor.torch._layout import count_axes
from phasor.torch._written import check_copies, check_distinct, check_mutable, check_writable
from phasor.torch.backends import cpu, eager
from phasor.torch.backends import triton as triton_backend

Angles = Sequence[Tensor]

#: The implementations by name, best first: "auto" is the first that does not refuse the tensor.
BACKENDS = {"cpu": cpu, "triton": triton_backend, "eager": eager}

_LIBRARY = torch.library.Library("phasor", "DEF")
_ARGUMENTS = "Tensor[] angles, str rope, bool inverse, float gain, str backend"
_LIBRARY.define(f"rotate(Tensor[] xs, {_ARGUMENTS}) -> Tensor[]")
_LIBRARY.define(f"rotate_(Tensor(a!)[] xs, {_ARGUMENTS}) -> ()")
rotate: Callable[..., list[Tensor]] = torch.ops.phasor.rotate.default
rotate_: Callable[..., None] = torch.ops.phasor.rotate_.default


def resolve(backend: str, x: Tensor) -> str:
    """The name of the backend that rotates ``x``.

    Raises:
        BackendError: If the named one does not exist or cannot; it is never replaced by another.
    """
    if backend == "auto":
        return next(name for name, module in BACKENDS.items() if not module.refusal(x))
    if backend not in BACKENDS:
        known = ", ".join(repr(name) for name in BACKENDS)
        raise BackendError(f"backend must be 'auto' or one of {known}, got {backend!r}")
    refusal = BACKENDS[backend].refusal(x)
    if refusal:
        raise BackendError(f"backend={backend!r} cannot rotate x: {refusal}")
    return backend


def apply(
    xs: list[Tensor], angles: list[Tensor], rope: str, inverse: bool, gain: float, backend: str
) -> list[Tensor]:
    """The operator on checked arguments, or its definition where that must be followed.

    Learned rows want a derivative that the operator does not have; they go through plain torch
    operations, as does what is followed step by step.
    """
    name = resolve(backend, xs[0])
    learned = len(angles) == 2 and any(map(_differentiable, angles))
    if learned or eager.is_followed(backend, [*xs, *angles]):
        if backend not in ("auto", "eager"):
            what = "torch.func transformations" if not learned else "gradients for cos and sin"
            raise BackendError(f"backend={backend!r} has no {what}; use 'auto' or 'eager'")
        return eager.composite(xs, angles, rope, inverse, gain)
    return rotate(xs, angles, rope, inverse, gain, name)


def apply_(
    xs: list[Tensor], angles: list[Tensor], rope: str, inverse: bool, gain: float, backend: str
) -> None:
    """The in-place operator, or a copy of `apply` where a derivative has to be recorded."""
    check_distinct(xs)
    learned = len(angles) == 2 and any(map(_differentiable, angles))
    if learned or any(map(_differentiable, xs)) or eager.is_followed(backend, [*xs, *angles]):
        if _addressed(xs):
            check_mutable(xs)
            check_writable(xs)
        # a derivative in the rows needs the values that are about to be overwritten
        given = [x.clone() for x in xs] if learned else xs
        turned = apply(given, angles, rope, inverse, gain, backend)
        check_copies(xs, turned)
        for x, y in zip(xs, turned, strict=True):
            x.copy_(y)
    else:
        rotate_(xs, angles, rope, inverse, gain, resolve(backend, xs[0]))


def _run(
    xs: list[Tensor], angles: list[Tensor], rope: str, inverse: bool, gain: float, backend: str
) -> list[Tensor]:
    return BACKENDS[backend].rotate(xs, angles, rope, inverse, gain)


def _run_plain(
    xs: list[Tensor], angles: list[Tensor], rope: str, inverse: bool, gain: float, _backend: str
) -> list[Tensor]:
    return eager.composite(xs, angles, rope, inverse, gain)


def _run_(
    xs: list[Tensor], angles: list[Tensor], rope: str, inverse: bool, gain: float, backend: str
) -> None:
    check_mutable(xs)
    BACKENDS[backend].rotate_(xs, angles, rope, inverse, gain)


class _Rotation(torch.autograd.Function):
    """Linear in ``xs``; the adjoint is the inverse rotation with the same gain."""

    @staticmethod
    def forward(
        options: tuple[Any, ...], active: tuple[bool, ...], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        xs, angles = tensors[: len(active)], tensors[len(active) :]
        with below_autograd():
            return tuple(rotate(list(xs), list(angles), *options))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.options, active, *tensors = inputs
        ctx.n_xs = len(active)
        ctx.save_for_backward(*tensors[len(active) :])
        ctx.save_for_forward(*tensors[len(active) :])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(y for y, on in zip(output, active, strict=True) if not on))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        rope, inverse, gain, backend = ctx.options
        angles = ctx.saved_tensors  # once: checkpointing recomputes them, and refuses a second look
        back = _where_given(grads, angles, rope, not inverse, gain, backend)
        return (None, None, *back, *[None] * len(angles))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return _where_given(tangents[2 : 2 + ctx.n_xs], ctx.saved_tensors, *ctx.options)


def _where_given(
    tensors: Sequence[Tensor | None], angles: Angles, *options: Any
) -> tuple[Tensor | None, ...]:
    """The operator on those that are there; None stays None."""
    given = [t for t in tensors if t is not None]
    turned = iter(rotate(given, list(angles), *options) if given else ())
    return tuple(None if t is None else next(turned) for t in tensors)


def _differentiable(x: Tensor) -> bool:
    recorded = x.requires_grad and torch.is_grad_enabled()
    return recorded or forward_ad.unpack_dual(x).tangent is not None


def _addressed(xs: list[Tensor]) -> bool:
    """Whether these have addresses that can be compared: no wrappers, no tracing."""
    hidden = torch.compiler.is_compiling() or in_transform()
    return not hidden and all(type(x) is Tensor and x.device.type != "meta" for x in xs)


def _recorded(xs: list[Tensor], angles: list[Tensor], *options: Any) -> list[Tensor]:
    active = tuple(map(_differentiable, xs))
    if any(active):
        return list(cast(tuple[Tensor, ...], _Rotation.apply(options, active, *xs, *angles)))
    with below_autograd():
        return rotate(xs, angles, *options)


def _recorded_(xs: list[Tensor], angles: list[Tensor], *options: Any) -> None:
    if any(_differentiable(x) for x in xs):
        raise RuntimeError(
            "phasor::rotate_ records no gradient; phasor.torch.rotate_ and rotate_qk_ do"
        )
    with below_autograd():
        rotate_(xs, angles, *options)


def _shaped(xs: list[Tensor], *_: Any) -> list[Tensor]:
    return [torch.empty_like(x) for x in xs]


def _shaped_(*_: Any) -> None:
    return None


def _batched(
    info: Any, in_dims: Any, xs: list[Tensor], angles: list[Tensor], rope: str, *options: Any
) -> tuple[list[Tensor], list[int]]:
    front = [_in_front(x, at, info.batch_size) for x, at in zip(xs, in_dims[0], strict=True)]
    angles = _batched_angles(front[0].dim(), angles, in_dims[1], rope)
    return rotate(front, angles, rope, *options), [0] * len(front)


def _batched_(
    info: Any, in_dims: Any, xs: list[Tensor], angles: list[Tensor], rope: str, *options: Any
) -> tuple[None, None]:
    if any(at is None for at in in_dims[0]):
        raise TensorError(
            "x must be batched to be rotated in place under vmap when anything else is: "
            "each batch entry would write the same memory; use rotate"
        )
    front = [_in_front(x, at, info.batch_size) for x, at in zip(xs, in_dims[0], strict=True)]
    rotate_(front, _batched_angles(front[0].dim(), angles, in_dims[1], rope), rope, *options)
    return None, None


def _in_front(x: Tensor, at: int | None, size: int) -> Tensor:
    return x.expand(size, *x.shape) if at is None else x.movedim(at, 0)


def _batched_angles(
    rank: int, angles: list[Tensor], in_dims: Sequence[int | None], rope: str
) -> list[Tensor]:
    """Batched angles with ones between the batch and their own dimensions, to broadcast right.

    Args:
        rank: Dimensions of the tensors, ``[batch, ..., seq, heads, head_dim]``.
        angles: Positions or rows.
        in_dims: Where each one's batch dimension is, if any.
        rope: The operator's text.
    """
    inner = 1 if len(angles) == 2 or count_axes(rope) > 1 else 0
    wanted = rank - 2 + inner
    placed: list[Tensor] = []
    for a, at in zip(angles, in_dims, strict=True):
        front = a if at is None else a.movedim(at, 0)
        ones = [1] * (wanted - front.dim()) if at is not None else []
        placed.append(front.reshape(*front.shape[:1], *ones, *front.shape[1:]) if ones else front)
    return placed


_LIBRARY.impl("rotate", _run, "CompositeExplicitAutograd")
_LIBRARY.impl("rotate_", _run_, "CompositeExplicitAutograd")
# the batching of autograd's is_grads_batched is older than torch.func and follows plain operations
_LIBRARY.impl("rotate", _run_plain, "Batched")
_LIBRARY.impl("rotate", _recorded, "Autograd")
_LIBRARY.impl("rotate_", _recorded_, "Autograd")
torch.library.register_fake("phasor::rotate", _shaped, lib=_LIBRARY)
torch.library.register_fake("phasor::rotate_", _shaped_, lib=_LIBRARY)
torch.library.register_vmap("phasor::rotate", _batched, lib=_LIBRARY)
torch.library.register_vmap("phasor::rotate_", _batched_, lib=_LIBRARY)
