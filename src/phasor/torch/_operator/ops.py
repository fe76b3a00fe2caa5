"""The two operators: their schemas, fakes, derivatives, batching rules and dispatch.

    phasor::cos_sin(positions, text, gain, dtype, backend) -> (cos, sin)
    phasor::turn (xs, cos, sin, pairing, pairing_out, rotary_start, transposed, backend) -> ys
    phasor::turn_(xs, cos, sin, pairing, pairing_out, rotary_start, transposed, backend) -> ()

``cos_sin`` computes cos and sin ``[..., seq, num_pairs]`` of a Rope given as `_operator.text`.
``turn`` rotates tensors ``[..., seq, heads, head_dim]`` that share their tokens. The derivative of
a rotation is its transpose, so backward and forward mode call the operator again, and only cos and
sin are saved, or only the positions if one call does both steps (`turn_at`).

They are registered through the low-level ``Library``, because the ``custom_op`` decorator takes
several microseconds a call, which is more than the rotation in a decode step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, cast

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from phasor.errors import BackendError, TensorError
from phasor.torch._operator import cpu, eager
from phasor.torch._operator import inductor as _inductor
from phasor.torch._operator import triton as triton_backend
from phasor.torch._operator.angles import check_has_angles
from phasor.torch._operator.arguments import Rows, Turn, TurnAt
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
    has_storage,
    is_direct,
    is_exporting,
    mark_constant,
    may_write,
)
from phasor.torch._operator.text import compute_dtype, count_axes, count_pairs

#: The implementations by name, best first: "auto" is the first that supports the tensor.
BACKENDS = {"cpu": cpu, "triton": triton_backend, "eager": eager}

_LIBRARY = torch.library.Library("phasor", "DEF")
_ROWS = "Tensor positions, str text, float gain, ScalarType dtype, str backend"
_LAYOUT = "str pairing, str pairing_out, int rotary_start"
_REST = f"Tensor cos, Tensor sin, {_LAYOUT}, bool transposed, str backend"
_LIBRARY.define(f"cos_sin({_ROWS}) -> (Tensor, Tensor)")
_LIBRARY.define(f"turn(Tensor[] xs, {_REST}) -> Tensor[]")
_LIBRARY.define(f"turn_(Tensor(a!)[] xs, {_REST}) -> ()")
cos_sin_operator: Callable[..., tuple[Tensor, Tensor]] = torch.ops.phasor.cos_sin.default
operator: Callable[..., list[Tensor]] = torch.ops.phasor.turn.default
operator_: Callable[..., None] = torch.ops.phasor.turn_.default


def resolve(backend: str, device: torch.device, width: int) -> str:
    """The backend that rotates heads of this width. A named one is never replaced by another."""
    if backend == "auto" or _inductor.is_compiled_auto(backend):
        for name, entry in BACKENDS.items():
            if not entry.unsupported_reason(device, width):
                return name
    if backend not in BACKENDS:
        names = ", ".join(repr(name) for name in BACKENDS)
        raise BackendError(f"backend must be 'auto' or one of {names}, got {backend!r}")
    reason = BACKENDS[backend].unsupported_reason(device, width)
    if reason:
        raise BackendError(f"backend={backend!r} cannot rotate x: {reason}")
    return backend


def cos_sin(
    positions: Tensor, text: str, gain: float, dtype: torch.dtype, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Cos and sin of checked positions, by the operator or by plain torch operations."""
    if dispatch_is_plain([positions]) and not positions.is_meta:
        return _make_rows(positions, text, gain, dtype, backend)
    if eager.needs_plain_ops(backend, [positions]):
        return eager.cos_sin(positions, text, gain, dtype)
    backend = _backend_argument(backend, positions.device, _width_of_rows(text))
    return cos_sin_operator(positions, text, gain, dtype, backend)


def try_rows(positions: Tensor, text: str, gain: float, dtype: torch.dtype) -> Rows | None:
    """Cos and sin of unchecked positions by the C++ kernel; None if it cannot take them."""
    if not dispatch_is_plain([positions]) or not positions.is_cpu:
        return None
    return cpu.try_rows(positions, text, gain, dtype)


def try_turn(
    xs: Sequence[Tensor], rows: Rows, backend: str, in_place: bool
) -> Sequence[Tensor] | None:
    """Rotate unchecked tensors by a kernel, bypassing the dispatcher; None if it refuses them.

    For one token the dispatcher takes ten times as long as the rotation. A kernel refuses arguments
    that might be wrong; then the caller goes through the checks and the dispatcher.
    """
    recording = torch.is_grad_enabled()
    if not rows.are_plain or (recording and (rows.cos.requires_grad or rows.sin.requires_grad)):
        return None
    if (kernel := _direct_kernel(backend, rows.device_type)) is None:
        return None
    is_recorded = recording and (xs[0].requires_grad or xs[-1].requires_grad)
    if is_recorded and (in_place or kernel is triton_backend):
        return None
    if in_place and not may_write(xs):
        return None
    try:
        outs = xs if in_place else list(map(torch.empty_like, xs))
    except NotImplementedError:  # some layouts without strides
        return None
    if not kernel.try_turn(xs, rows, outs):
        return None
    if in_place:
        count_writes(xs)
    if not is_recorded:
        return outs
    wants_grad = tuple(x.requires_grad for x in xs)
    options = *rows.layout, rows.transposed, backend
    return _record(options, wants_grad, outs, rows.cos, rows.sin, xs, rows)


@lru_cache(maxsize=32)
def _direct_kernel(backend: str, device_type: str) -> Any:
    """The backend for `try_turn` on this type of device; None if the call must be checked."""
    if backend == "triton" or (backend == "auto" and device_type == "cuda"):
        return triton_backend
    if device_type != "cpu":
        return None
    if backend == "auto":
        return eager if cpu.absence() else cpu
    return {"eager": eager, "cpu": cpu}.get(backend)


def try_turn_at(
    xs: Sequence[Tensor],
    positions: Tensor,
    text: str,
    transposed: bool,
    gain: float,
    in_place: bool,
) -> Sequence[Tensor] | None:
    """`try_turn` at positions, in a single pass on the CPU."""
    if not dispatch_is_plain(xs) or positions.is_neg() or not xs[0].is_cpu:
        return None
    if in_place and not may_write(xs):
        return None
    try:
        outs = xs if in_place else list(map(torch.empty_like, xs))
    except NotImplementedError:  # some layouts without strides
        return None
    if not cpu.try_turn_at(xs, positions, text, transposed, gain, outs):
        return None
    if in_place:
        count_writes(xs)
    return outs


def turn(call: Turn, *, in_place: bool = False) -> Sequence[Tensor]:
    """Rotate by the operator, or by plain torch operations if it has no rule for the call.

    It has no rule for gradients of cos and sin, under ``torch.func``, and for compilers that are
    given ``backend="eager"``. If a derivative of an in-place rotation is recorded, new values are
    computed first and then copied in.
    """
    xs, cos, sin, *options, backend = call
    if in_place:
        check_no_self_overlap(xs)
        check_mutable(xs)
        check_batched(xs, (cos, sin))
    if dispatch_is_plain([*xs, cos, sin]) and not xs[0].is_meta:
        return _run_backend(call, in_place=in_place)
    if in_place:
        check_writable(xs)
    backend_argument = _backend_argument(backend, xs[0].device, xs[0].shape[-1])
    rows_want_grad = _wants_gradient(cos) or _wants_gradient(sin)
    needs_plain_ops = rows_want_grad or eager.needs_plain_ops(backend, [*xs, cos, sin])
    if in_place and (needs_plain_ops or any(map(_wants_gradient, xs))):
        # the gradient of cos and sin needs the values that are about to be overwritten
        copies = [x.clone() for x in xs] if rows_want_grad else xs
        return _copy_into(xs, turn(call._replace(xs=copies)))
    if in_place:
        operator_(xs, cos, sin, *options, backend_argument)
        return xs
    if not needs_plain_ops:
        return operator(xs, cos, sin, *options, backend_argument)
    if rows_want_grad and len({hasattr(t, "device_mesh") for t in (*xs, cos, sin)}) > 1:
        raise TensorError(
            "cos and sin must be DTensors if and only if x is one, because their gradient "
            "would be summed over ranks; make them with DTensor.from_local or distribute_tensor"
        )
    if backend not in ("auto", "eager"):
        feature = "gradients for cos and sin" if rows_want_grad else "torch.func transformations"
        raise BackendError(f"backend={backend!r} has no {feature}; use 'auto' or 'eager'")
    return eager.run_without_writes(call)


def turn_at(call: TurnAt, *, in_place: bool = False) -> Sequence[Tensor]:
    """Compute cos and sin and rotate by them; the backward pass computes both again."""
    xs = call.xs
    if compute_dtype(xs[0].dtype) != compute_dtype(xs[-1].dtype):
        if in_place:
            check_writable(xs)  # raise all errors before the first write
            check_mutable(xs)
            check_copies(xs, xs)
        results = [turn_at(call._replace(xs=[x]), in_place=in_place) for x in xs]
        return [y for (y,) in results]
    is_kept = not torch.compiler.is_compiling() and not eager.needs_plain_ops(call.backend, xs)
    wants_grad = tuple(map(_wants_gradient, xs))
    if not (is_kept and any(wants_grad)):
        return _turn_by_new_rows(call, in_place=in_place)
    if in_place:
        check_no_self_overlap(xs)
        check_mutable(xs)
        check_writable(xs)
    options = call._replace(xs=())
    ys = cast(tuple[Tensor, ...], _RotationAt.apply(options, wants_grad, call.positions, *xs))
    return _copy_into(xs, ys) if in_place else ys


def _turn_by_new_rows(call: TurnAt, *, in_place: bool) -> Sequence[Tensor]:
    xs, positions, text, layout, transposed, gain, backend = call
    if dispatch_is_plain([positions]) and backend in ("auto", "cpu"):
        outs = try_turn_at(xs, positions, text, transposed, gain, in_place)
        if outs is not None:
            return outs
    cos, sin = cos_sin(positions, text, gain, compute_dtype(xs[0].dtype), backend)
    return turn(Turn(xs, cos, sin, *layout, transposed, backend), in_place=in_place)


def _turn_by_operators(call: TurnAt) -> Sequence[Tensor]:
    """`turn_at` for gradients, which may be tensors of any kind."""
    xs, positions, text, layout, transposed, gain, backend = call
    cos, sin = cos_sin(positions, text, gain, compute_dtype(xs[0].dtype), backend)
    backend = _backend_argument(backend, xs[0].device, xs[0].shape[-1])
    return _turn_any(Turn(list(xs), cos, sin, *layout, transposed, backend))


def _turn_any(call: Turn) -> Sequence[Tensor]:
    """Call the operator, bypassing the dispatcher for plain tensors."""
    xs, cos, sin, *_ = call
    if _are_in_memory(xs) and dispatch_is_plain([*xs, cos, sin]):
        return _run_backend(call, in_place=False)
    return operator(*call)


def _are_in_memory(xs: Sequence[Tensor]) -> bool:
    # gradients batched by the mechanism before torch.func have no memory
    return all(map(has_storage, xs)) and not xs[0].is_meta


def _copy_into(xs: Sequence[Tensor], values: Sequence[Tensor]) -> Sequence[Tensor]:
    check_copies(xs, values)
    for x, y in zip(xs, values, strict=True):
        x.copy_(y)
    return xs


def _width_of_rows(text: str) -> int:
    return 2 * count_pairs(text)


def _backend_argument(backend: str, device: torch.device, width: int) -> str:
    """The operator's argument. An exported program resolves "auto" on the machine that runs it."""
    if backend != "auto":
        return resolve(backend, device, width)
    compiling = torch.compiler.is_compiling() and not is_exporting()
    return _describe_compiled_auto() if compiling else backend


@mark_constant
def _describe_compiled_auto() -> str:
    """The argument that replaces "auto" when compiling, so that Inductor may decompose the call."""
    _inductor.register(cos_sin_operator, operator, resolve)
    return _inductor.describe_rule()


def _make_rows(
    positions: Tensor, text: str, gain: float, dtype: torch.dtype, backend: str
) -> tuple[Tensor, Tensor]:
    check_has_angles(positions)
    name = resolve(backend, positions.device, _width_of_rows(text))
    return BACKENDS[name].cos_sin(positions, text, gain, dtype)


def _run_backend(call: Turn, *, in_place: bool) -> Sequence[Tensor]:
    """Run a query and a key in one pass if they have the same dtype, else in one pass each."""
    xs = call.xs
    backend = BACKENDS[resolve(call.backend, xs[0].device, xs[0].shape[-1])]
    if in_place:
        check_mutable(xs)
    outs = xs if in_place else [torch.empty_like(x) for x in xs]
    if xs[0].dtype == xs[-1].dtype:
        backend.run_into(call, outs)
        return outs
    if in_place:
        check_writable(xs)  # raise all errors before the first write
    for x, out in zip(xs, outs, strict=True):
        single = [x]
        backend.run_into(call._replace(xs=single), single if in_place else [out])
    return outs


class _Rotation(torch.autograd.Function):
    """A function linear in ``xs``; its adjoint is the transpose, with the same cos and sin."""

    # without `setup_context`, because torch would then inspect the signature in every call
    @staticmethod
    def forward(
        ctx: Any,
        options: tuple[Any, ...],  # layout, transposed, backend
        wants_grad: tuple[bool, ...],
        ys: Sequence[Tensor],  # already rotated, without an autograd history
        rows: Rows | None,  # if the call bypassed the dispatcher
        cos: Tensor,
        sin: Tensor,
        *_: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.options, ctx.rows = options, rows
        _set_up(ctx, wants_grad, (cos, sin), ys)
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *layout, transposed, backend = ctx.options
        # read saved tensors only once, because checkpointing refuses a second read
        rest: Any = (*ctx.saved_tensors, *layout, not transposed, backend)
        rows: Rows | None = ctx.rows

        def turn_back(gradients: list[Tensor]) -> Sequence[Tensor]:
            if rows is not None and _are_in_memory(gradients) and is_direct(gradients):
                turned = try_turn(gradients, rows.for_gradients(), backend, in_place=False)
                if turned is not None:
                    return turned
            return _turn_any(Turn(gradients, *rest))

        return (None,) * 6 + _apply_to_present(turn_back, grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _apply_to_present(lambda xs: operator(xs, cos, sin, *ctx.options), tangents[6:])


class _RotationAt(torch.autograd.Function):
    """`_Rotation` for `turn_at`, which saves positions instead of cos and sin."""

    @staticmethod
    def forward(
        ctx: Any, call: TurnAt, wants_grad: tuple[bool, ...], positions: Tensor, *xs: Tensor
    ) -> tuple[Tensor, ...]:
        with below_autograd():
            saved_call = call._replace(xs=list(xs), positions=positions)
            ys = tuple(_turn_by_new_rows(saved_call, in_place=False))
        ctx.call = call._replace(positions=None)
        _set_up(ctx, wants_grad, (positions,), ys)
        return ys

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (positions,) = ctx.saved_tensors
        call = ctx.call._replace(positions=positions, transposed=not ctx.call.transposed)
        x_grads = _apply_to_present(lambda xs: _turn_by_operators(call._replace(xs=xs)), grads)
        return (None, None, None, *x_grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        (positions,) = ctx.saved_tensors
        call = ctx.call._replace(positions=positions)
        return _apply_to_present(lambda xs: _turn_by_operators(call._replace(xs=xs)), tangents[3:])


def _set_up(
    ctx: Any, wants_grad: Sequence[bool], saved_tensors: Sequence[Tensor], output: Sequence[Tensor]
) -> None:
    ctx.save_for_backward(*saved_tensors)
    ctx.save_for_forward(*saved_tensors)
    ctx.set_materialize_grads(False)
    unwanted = [y for y, needs_grad in zip(output, wants_grad, strict=True) if not needs_grad]
    ctx.mark_non_differentiable(*unwanted)


def _apply_to_present(
    function: Callable[[list[Tensor]], Sequence[Tensor]], tensors: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Apply ``function`` to the tensors that are not None; None stays None."""
    present = [t for t in tensors if t is not None]
    results = iter(function(present) if present else ())
    return tuple(None if t is None else next(results) for t in tensors)


def _wants_gradient(x: Tensor) -> bool:
    is_recorded = x.requires_grad and torch.is_grad_enabled()
    return is_recorded or forward_ad.unpack_dual(x).tangent is not None


def _autograd(xs: list[Tensor], cos: Tensor, sin: Tensor, *options: Any) -> Sequence[Tensor]:
    with below_autograd():
        ys = _turn_any(Turn(xs, cos, sin, *options))
    wants_grad = tuple(map(_wants_gradient, xs))
    return _record(options, wants_grad, ys, cos, sin, xs) if any(wants_grad) else ys


def _record(
    options: tuple[Any, ...],
    wants_grad: tuple[bool, ...],
    ys: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    xs: Sequence[Tensor],
    rows: Rows | None = None,
) -> list[Tensor]:
    """``ys`` with the autograd history of ``xs`` rotated by cos and sin; ``rows`` holds both."""
    recorded = cast(Any, _Rotation.apply(options, wants_grad, ys, rows, cos, sin, *xs))
    return list(recorded)


def _autograd_(xs: list[Tensor], *rest: Any) -> None:
    if any(map(_wants_gradient, xs)):
        raise RuntimeError(
            "phasor::turn_ cannot record a gradient; phasor.torch.rotate_ and Rotation.rotate_ can"
        )
    with below_autograd():
        operator_(xs, *rest)


def _batched_(*arguments: Any) -> None:
    call = Turn(*arguments)
    check_batched(call.xs, (call.cos, call.sin))
    for x, y in zip(call.xs, eager.run_without_writes(call), strict=True):
        x.copy_(y)


def _run(*arguments: Any) -> Sequence[Tensor]:
    return _run_backend(Turn(*arguments), in_place=False)


def _run_(*arguments: Any) -> None:
    _run_backend(Turn(*arguments), in_place=True)


def _batched(*arguments: Any) -> list[Tensor]:
    return eager.run_without_writes(Turn(*arguments))


def _fake(xs: list[Tensor], *_: Any) -> list[Tensor]:
    return [torch.empty_like(x) for x in xs]


def _fake_(*_: Any) -> None:
    return None


def _run_rows(*arguments: Any) -> tuple[Tensor, Tensor]:
    cos, sin = _make_rows(*arguments)
    # an operator must return tensors that share no memory, laid out like those of its fake
    layout = torch.contiguous_format
    return cos.clone(memory_format=layout), sin.clone(memory_format=layout)


def _rows_batched(positions: Tensor, text: str, gain: float, dtype: torch.dtype, _: str) -> Any:
    return eager.cos_sin(positions, text, gain, dtype)


def _rows_fake(positions: Tensor, text: str, _: float, dtype: torch.dtype, __: str) -> Any:
    tokens = positions.shape[:-1] if count_axes(text) > 1 else positions.shape
    shape = *tokens, count_pairs(text)
    return positions.new_empty(shape, dtype=dtype), positions.new_empty(shape, dtype=dtype)


_BATCHED = "FuncTorchBatchedDecomposition"  # vmap has rules for plain operations
for _key, _function, _function_, _rows in (
    ("CompositeExplicitAutograd", _run, _run_, _run_rows),
    ("Autograd", _autograd, _autograd_, torch.library.fallthrough_kernel),
    (_BATCHED, _batched, _batched_, _rows_batched),
):
    _LIBRARY.impl("turn", _function, _key)
    _LIBRARY.impl("turn_", _function_, _key)
    _LIBRARY.impl("cos_sin", _rows, _key)
# autograd's is_grads_batched uses the batching mechanism before torch.func
_LIBRARY.impl("turn", _batched, "Batched")
torch.library.register_fake("phasor::turn", _fake, lib=_LIBRARY)
torch.library.register_fake("phasor::turn_", _fake_, lib=_LIBRARY)
torch.library.register_fake("phasor::cos_sin", _rows_fake, lib=_LIBRARY)
