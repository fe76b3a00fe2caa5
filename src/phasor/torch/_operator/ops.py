"""The one operator: its schema, its fake, its derivatives, its batching rule and its dispatch.

    phasor::rotate (xs, source, text, inverse, gain, backend) -> ys
    phasor::rotate_(xs, source, text, inverse, gain, backend) -> ()

``xs`` are tensors ``[..., seq, heads, head_dim]`` that share their tokens. ``source`` is where cos
and sin come from: ``[positions]``, or ``[cos, sin]``. ``text`` is of `_operator.text`. The
derivative of a rotation is the inverse rotation, so backward and forward mode call the operator
again, and only ``source`` is saved.

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
from phasor.torch._operator import cpu, eager
from phasor.torch._operator import inductor as _inductor
from phasor.torch._operator import triton as triton_backend
from phasor.torch._operator.arguments import Call, Unchecked
from phasor.torch._operator.in_place import (
    check_batched,
    check_copies,
    check_mutable,
    check_no_self_overlap,
    check_writable,
)
from phasor.torch._operator.internals import (
    below_autograd,
    count_writes,
    dispatch_is_plain,
    mark_constant,
    may_write,
)

#: The implementations by name, best first: "auto" is the first that does not refuse the tensor.
BACKENDS = {"cpu": cpu, "triton": triton_backend, "eager": eager}

_LIBRARY = torch.library.Library("phasor", "DEF")
_ARGUMENTS = "Tensor[] source, str text, bool inverse, float gain, str backend"
_LIBRARY.define(f"rotate(Tensor[] xs, {_ARGUMENTS}) -> Tensor[]")
_LIBRARY.define(f"rotate_(Tensor(a!)[] xs, {_ARGUMENTS}) -> ()")
operator: Callable[..., list[Tensor]] = torch.ops.phasor.rotate.default
operator_: Callable[..., None] = torch.ops.phasor.rotate_.default


def resolve(backend: str, x: Tensor) -> str:
    """The name of the backend that rotates ``x``. A named one is never replaced by another."""
    if backend == "auto" or _inductor.is_compiled_auto(backend):
        return next(name for name, module in BACKENDS.items() if not module.unsupported_reason(x))
    if backend not in BACKENDS:
        known = ", ".join(repr(name) for name in BACKENDS)
        raise BackendError(f"backend must be 'auto' or one of {known}, got {backend!r}")
    reason = BACKENDS[backend].unsupported_reason(x)
    if reason:
        raise BackendError(f"backend={backend!r} cannot rotate x: {reason}")
    return backend


def try_kernel(arguments: Unchecked, in_place: bool) -> Sequence[Tensor] | None:
    """What a kernel makes of them without dispatcher; None if that is not possible.

    For one token the dispatcher costs ten times the rotation. A kernel refuses arguments that it
    is not sure of; then the caller goes through the checks and the dispatcher.
    """
    xs, source, _, _, _, backend = arguments
    if not dispatch_is_plain(xs) or source[0].is_neg():
        return None
    if backend in ("auto", "cpu") and xs[0].is_cpu:
        kernel = cpu
    elif backend == "triton" or (backend == "auto" and xs[0].is_cuda):
        kernel = triton_backend
    else:
        return None
    if in_place and not may_write(xs):
        return None
    try:
        outs = xs if in_place else [torch.empty_like(x) for x in xs]
    except NotImplementedError:  # of layouts without strides
        return None
    if not kernel.try_kernel(arguments, outs):
        return None
    if in_place:
        count_writes(xs)
    return outs


def apply(call: Call, *, in_place: bool = False) -> Sequence[Tensor]:
    """The operator on checked arguments, or plain torch operations where those are needed.

    Plain operations are needed where the operator has no rule: for gradients of cos and sin, under
    ``torch.func``, and for compilers that are given ``backend="eager"``. In place, new values that
    have a derivative are copied in.
    """
    xs, source, *options, backend = call
    if in_place:
        check_no_self_overlap(xs)
        check_mutable(xs)
        check_batched(xs, source)
    if dispatch_is_plain([*xs, *source]) and not xs[0].is_meta:
        return _run_backend(call, in_place=in_place)
    if in_place:
        check_writable(xs)
    backend_argument = _backend_argument(backend, xs[0])
    rows_want_grad = len(source) == 2 and any(map(_wants_gradient, source))
    needs_plain_ops = rows_want_grad or eager.needs_plain_ops(backend, [*xs, *source])
    if in_place and (needs_plain_ops or any(map(_wants_gradient, xs))):
        # the gradient of cos and sin needs the values that are about to be overwritten
        copies = [x.clone() for x in xs] if rows_want_grad else xs
        rotated = apply(call._replace(xs=copies))
        check_copies(xs, rotated)
        for x, y in zip(xs, rotated, strict=True):
            x.copy_(y)
    elif in_place:
        operator_(xs, source, *options, backend_argument)
    elif not needs_plain_ops:
        return operator(xs, source, *options, backend_argument)
    else:
        if rows_want_grad and len({hasattr(t, "device_mesh") for t in (*xs, *source)}) > 1:
            raise TensorError(
                "cos and sin must be DTensors exactly where x is one for a gradient of theirs, "
                "which would be summed over ranks; make them by DTensor.from_local or "
                "distribute_tensor"
            )
        if backend not in ("auto", "eager"):
            what = "gradients for cos and sin" if rows_want_grad else "torch.func transformations"
            raise BackendError(f"backend={backend!r} has no {what}; use 'auto' or 'eager'")
        return eager.run_without_writes(call)
    return xs


def _backend_argument(backend: str, x: Tensor) -> str:
    """The operator's argument. "auto" is resolved where it runs, as a program may be exported."""
    if backend != "auto":
        return resolve(backend, x)
    compiling = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    return _describe_compiled_auto() if compiling else backend


@mark_constant
def _describe_compiled_auto() -> str:
    """The argument for "auto" inside ``torch.compile``, where Inductor may decompose it."""
    _inductor.register(operator, resolve)
    return _inductor.describe_rule()


def _run_backend(call: Call, *, in_place: bool) -> Sequence[Tensor]:
    """One pass for tensors of one dtype, which share cos and sin; else one for each."""
    xs, backend = call.xs, BACKENDS[resolve(call.backend, call.xs[0])]
    if in_place:
        check_mutable(xs)
    outs = xs if in_place else [torch.empty_like(x) for x in xs]
    if xs[0].dtype == xs[-1].dtype:
        backend.run_into(call, outs)
        return outs
    if in_place:
        check_writable(xs)  # every error comes before the first write
    for x, out in zip(xs, outs, strict=True):
        alone = [x]
        backend.run_into(call._replace(xs=alone), alone if in_place else [out])
    return outs


class _Rotation(torch.autograd.Function):
    """Linear in ``xs``; the adjoint is the inverse rotation with the same gain."""

    @staticmethod
    def forward(
        options: tuple[Any, ...], wants_grad: tuple[bool, ...], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        xs, source = tensors[: len(wants_grad)], tensors[len(wants_grad) :]
        with below_autograd():
            return tuple(operator(list(xs), list(source), *options))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.options, wants_grad, *tensors = inputs
        ctx.n_xs = len(wants_grad)
        ctx.save_for_backward(*tensors[len(wants_grad) :])
        ctx.save_for_forward(*tensors[len(wants_grad) :])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(y for y, wanted in zip(output, wants_grad, strict=True) if not wanted)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        text, inverse, gain, backend = ctx.options
        source = ctx.saved_tensors  # read once: checkpointing refuses a second read
        x_grads = _rotate_present(grads, source, text, not inverse, gain, backend)
        return (None, None, *x_grads, *[None] * len(source))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return _rotate_present(tangents[2 : 2 + ctx.n_xs], ctx.saved_tensors, *ctx.options)


def _rotate_present(
    tensors: Sequence[Tensor | None], source: Sequence[Tensor], *options: Any
) -> tuple[Tensor | None, ...]:
    """The operator on the tensors that are not None; None stays None."""
    present = [t for t in tensors if t is not None]
    rotated = iter(operator(present, list(source), *options) if present else ())
    return tuple(None if t is None else next(rotated) for t in tensors)


def _wants_gradient(x: Tensor) -> bool:
    is_recorded = x.requires_grad and torch.is_grad_enabled()
    return is_recorded or forward_ad.unpack_dual(x).tangent is not None


def _autograd(xs: list[Tensor], source: list[Tensor], *options: Any) -> list[Tensor]:
    wants_grad = tuple(map(_wants_gradient, xs))
    if any(wants_grad):
        return list(cast(tuple[Tensor, ...], _Rotation.apply(options, wants_grad, *xs, *source)))
    with below_autograd():
        return operator(xs, source, *options)


def _autograd_(xs: list[Tensor], *rest: Any) -> None:
    if any(map(_wants_gradient, xs)):
        raise RuntimeError(
            "phasor::rotate_ records no gradient; phasor.torch.rotate_ and rotate_qk_ do"
        )
    with below_autograd():
        operator_(xs, *rest)


def _batched_(*arguments: Any) -> None:
    call = Call(*arguments)
    check_batched(call.xs, call.source)
    for x, y in zip(call.xs, eager.run_without_writes(call), strict=True):
        x.copy_(y)


def _run(*arguments: Any) -> Sequence[Tensor]:
    return _run_backend(Call(*arguments), in_place=False)


def _run_(*arguments: Any) -> None:
    _run_backend(Call(*arguments), in_place=True)


def _batched(*arguments: Any) -> list[Tensor]:
    return eager.run_without_writes(Call(*arguments))


def _fake(xs: list[Tensor], *_: Any) -> list[Tensor]:
    return [torch.empty_like(x) for x in xs]


def _fake_(*_: Any) -> None:
    return None


_BATCHED = "FuncTorchBatchedDecomposition"  # under vmap, where plain operations have rules
for _key, _function, _function_ in (
    ("CompositeExplicitAutograd", _run, _run_),
    ("Autograd", _autograd, _autograd_),
    (_BATCHED, _batched, _batched_),
):
    _LIBRARY.impl("rotate", _function, _key)
    _LIBRARY.impl("rotate_", _function_, _key)
# autograd's is_grads_batched uses batching older than torch.func
_LIBRARY.impl("rotate", _batched, "Batched")
torch.library.register_fake("phasor::rotate", _fake, lib=_LIBRARY)
torch.library.register_fake("phasor::rotate_", _fake_, lib=_LIBRARY)
