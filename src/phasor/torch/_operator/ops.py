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
from phasor.rope import Rope
from phasor.torch._operator import cpu, eager
from phasor.torch._operator import inductor as _inductor
from phasor.torch._operator import triton as triton_backend
from phasor.torch._operator.arguments import Call
from phasor.torch._operator.in_place import (
    check_copies,
    check_mutable,
    check_not_expanded,
    check_writable,
)
from phasor.torch._operator.internals import (
    below_autograd,
    count_writes,
    dispatch_is_plain,
    in_transform,
    mark_constant,
    may_write,
)
from phasor.torch._operator.text import count_own_dimensions

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
    if backend == "auto":
        return next(name for name, module in BACKENDS.items() if not module.unsupported_reason(x))
    if backend not in BACKENDS:
        known = ", ".join(repr(name) for name in BACKENDS)
        raise BackendError(f"backend must be 'auto' or one of {known}, got {backend!r}")
    reason = BACKENDS[backend].unsupported_reason(x)
    if reason:
        raise BackendError(f"backend={backend!r} cannot rotate x: {reason}")
    return backend


def try_kernel(
    xs: Sequence[Tensor],
    positions: Any,
    rope: Rope,
    inverse: bool,
    gain: float,
    backend: str,
    *,
    in_place: bool,
) -> list[Tensor] | None:
    """The tensors, rotated by a kernel without checks and dispatcher; None if that is not possible.

    For one token the dispatcher costs ten times the rotation. A kernel refuses arguments that it
    is not sure of; then the caller goes through the checks and the dispatcher.
    """
    if type(rope) is not Rope or type(positions) is not Tensor:
        return None
    if not dispatch_is_plain(xs) or positions.is_neg():
        return None
    if backend in ("auto", "cpu") and xs[0].is_cpu:
        kernel = cpu
    elif backend == "triton" or (backend == "auto" and xs[0].is_cuda):
        kernel = triton_backend
    else:
        return None
    if in_place and not may_write(xs):
        return None
    outs = xs if in_place else [torch.empty_like(x) for x in xs]
    if not kernel.try_kernel(xs, outs, positions, rope.to_json(), inverse, gain):
        return None
    if in_place:
        count_writes(xs)
    return list(outs)


def apply(call: Call) -> list[Tensor]:
    """The operator on checked arguments, or plain torch operations where those are needed.

    Plain operations are needed where the operator has no rule: for gradients of cos and sin, under
    ``torch.func``, and for compilers that are given ``backend="eager"``.
    """
    xs, source, *_, backend = call
    if _needs_no_dispatcher(xs, source):
        return _run_backend(call)
    backend_argument = _backend_argument(backend, xs[0])
    rows_want_grad = _wants_cos_sin_gradient(source)
    if rows_want_grad and len({hasattr(t, "device_mesh") for t in (*xs, *source)}) > 1:
        raise TensorError(
            "cos and sin must be DTensors exactly where x is one for a gradient of theirs, which "
            "would be summed over ranks; make them by DTensor.from_local or distribute_tensor"
        )
    if rows_want_grad or eager.needs_plain_ops(backend, [*xs, *source]):
        if backend not in ("auto", "eager"):
            what = "gradients for cos and sin" if rows_want_grad else "torch.func transformations"
            raise BackendError(f"backend={backend!r} has no {what}; use 'auto' or 'eager'")
        return eager.rotate_without_writes(call)
    return operator(*call[:-1], backend_argument)


def apply_(call: Call) -> None:
    """The in-place operator, or `apply` and a copy where a derivative has to be recorded."""
    xs, source, *_, backend = call
    check_not_expanded(xs)
    check_mutable(xs)
    if _needs_no_dispatcher(xs, source):
        _run_backend_(call)
        return
    rows_want_grad = _wants_cos_sin_gradient(source)
    is_recorded = rows_want_grad or any(map(_wants_gradient, xs))
    if is_recorded or eager.needs_plain_ops(backend, [*xs, *source]):
        if _have_addresses(xs):
            check_writable(xs)
        # the gradient of cos and sin needs the values that are about to be overwritten
        copies = [x.clone() for x in xs] if rows_want_grad else xs
        rotated = apply(call._replace(xs=copies))
        check_copies(xs, rotated)
        for x, y in zip(xs, rotated, strict=True):
            x.copy_(y)
    else:
        operator_(*call[:-1], _backend_argument(backend, xs[0]))


def _needs_no_dispatcher(xs: Sequence[Tensor], source: Sequence[Tensor]) -> bool:
    """Whether the backend may run at once, because nothing records, transforms or fakes these."""
    return dispatch_is_plain([*xs, *source]) and not xs[0].is_meta


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


def _find_backend(backend: str, x: Tensor) -> Any:
    """The implementation that the operator runs, given its argument."""
    return BACKENDS[resolve("auto" if _inductor.is_compiled_auto(backend) else backend, x)]


def _run_backend(call: Call) -> list[Tensor]:
    outs = [torch.empty_like(x) for x in call.xs]
    _find_backend(call.backend, call.xs[0]).rotate_into(call, outs)
    return outs


def _run_backend_(call: Call) -> None:
    check_mutable(call.xs)
    _find_backend(call.backend, call.xs[0]).rotate_into(call, call.xs)


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


def _wants_cos_sin_gradient(source: Sequence[Tensor]) -> bool:
    return len(source) == 2 and any(map(_wants_gradient, source))


def _have_addresses(xs: Sequence[Tensor]) -> bool:
    """Whether the tensors have addresses to compare: wrappers and traced tensors have none."""
    is_traced = torch.compiler.is_compiling() or in_transform()
    return not is_traced and all(type(x) is Tensor and x.device.type != "meta" for x in xs)


def _autograd(xs: list[Tensor], source: list[Tensor], *options: Any) -> list[Tensor]:
    wants_grad = tuple(map(_wants_gradient, xs))
    if any(wants_grad):
        return list(cast(tuple[Tensor, ...], _Rotation.apply(options, wants_grad, *xs, *source)))
    with below_autograd():
        return operator(xs, source, *options)


def _autograd_(xs: list[Tensor], source: list[Tensor], *options: Any) -> None:
    if any(map(_wants_gradient, xs)):
        raise RuntimeError(
            "phasor::rotate_ records no gradient; phasor.torch.rotate_ and rotate_qk_ do"
        )
    with below_autograd():
        operator_(xs, source, *options)


def _fake(xs: list[Tensor], *_: Any) -> list[Tensor]:
    return [torch.empty_like(x) for x in xs]


def _fake_(*_: Any) -> None:
    return None


def _vmap(
    info: Any, in_dims: Any, xs: list[Tensor], source: list[Tensor], text: str, *options: Any
) -> tuple[list[Tensor], list[int]]:
    batched = [_batch_first(x, dim, info.batch_size) for x, dim in zip(xs, in_dims[0], strict=True)]
    source = _batch_source(batched[0].dim(), source, in_dims[1], text)
    return operator(batched, source, text, *options), [0] * len(batched)


def _vmap_(
    info: Any, in_dims: Any, xs: list[Tensor], source: list[Tensor], text: str, *options: Any
) -> tuple[None, None]:
    if any(dim is None for dim in in_dims[0]):
        raise TensorError(
            "x must be batched to be rotated in place under vmap when anything else is: "
            "each batch entry would write the same memory; use rotate"
        )
    batched = [_batch_first(x, dim, info.batch_size) for x, dim in zip(xs, in_dims[0], strict=True)]
    operator_(batched, _batch_source(batched[0].dim(), source, in_dims[1], text), text, *options)
    return None, None


def _batch_first(x: Tensor, dim: int | None, size: int) -> Tensor:
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def _batch_source(
    rank: int, source: list[Tensor], in_dims: Sequence[int | None], text: str
) -> list[Tensor]:
    """The batched source with ones after the batch dimension, to broadcast against the tensors.

    The tensors ``[batch, ..., seq, heads, head_dim]`` have ``rank`` dimensions.
    """
    full_rank = rank - 2 + count_own_dimensions(source, text)
    batched: list[Tensor] = []
    for values, dim in zip(source, in_dims, strict=True):
        if dim is not None:
            values = values.movedim(dim, 0)
            # [batch, ...] -> [batch, 1, ..., 1, ...]
            ones = [1] * (full_rank - values.dim())
            values = values.reshape(values.shape[0], *ones, *values.shape[1:])
        batched.append(values)
    return batched


def _implement(name: str, run: Callable[[Call], Any], key: str) -> None:
    """Let the dispatcher run the operator of that name by ``run``."""

    def implementation(*arguments: Any) -> Any:
        return run(Call(*arguments))

    _LIBRARY.impl(name, implementation, key)


_implement("rotate", _run_backend, "CompositeExplicitAutograd")
_implement("rotate_", _run_backend_, "CompositeExplicitAutograd")
# autograd's is_grads_batched uses batching older than torch.func, which needs plain operations
_implement("rotate", eager.rotate_without_writes, "Batched")
_LIBRARY.impl("rotate", _autograd, "Autograd")
_LIBRARY.impl("rotate_", _autograd_, "Autograd")
torch.library.register_fake("phasor::rotate", _fake, lib=_LIBRARY)
torch.library.register_fake("phasor::rotate_", _fake_, lib=_LIBRARY)
torch.library.register_vmap("phasor::rotate", _vmap, lib=_LIBRARY)
torch.library.register_vmap("phasor::rotate_", _vmap_, lib=_LIBRARY)
