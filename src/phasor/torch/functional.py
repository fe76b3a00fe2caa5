"""Functions that rotate one tensor, or a query and a key, at given positions.

Tensors are ``[..., seq, heads, head_dim]`` with any strides, or ``[..., heads, seq, head_dim]``
with ``heads_first=True``. Functions with a trailing underscore work in place; the others never
change their arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from phasor._tensors import check_rope, undone_gain
from phasor.rope import Rope
from phasor.torch._operator import ops
from phasor.torch._operator.arguments import ARRAYS, Layout, TurnAt, tokens_first
from phasor.torch._operator.in_place import check_different
from phasor.torch._operator.inductor import keeps_operator
from phasor.torch._operator.internals import refuse_tracing, unscriptable
from phasor.torch._operator.text import attention_factor


@unscriptable
def rotate(
    x: Tensor,
    positions: Any,
    rope: Rope,
    *,
    inverse: bool = False,
    gain: float | None = None,
    heads_first: bool = False,
    backend: str = "auto",
) -> Tensor:
    """``R(p) x`` for every token (RoFormer 2104.09864, eq. 34), as a new tensor.

    Cos and sin are within `phasor.angles.COS_SIN_ERROR_FLOAT32` at every int64 position, on every
    device, compiled or not. Arithmetic is float32 (float64 for float64 tensors) with one rounding
    at the end. Differentiable in ``x`` any number of times; the backward pass needs only
    ``positions``. If many layers share positions, make one `Rotation`; its results are identical.

    Args:
        x: ``[..., seq, heads, head_dim]``: float64, float32, bfloat16 or float16, any strides.
        positions: Integers of any dtype, float32 or float64, of shape ``[..., seq]``, broadcast
            against the leading dimensions of ``x``; ``[..., seq, n_axes]`` for a Rope of several
            axes. A scalar is the position of every token. Tensors, NumPy arrays and numbers are
            accepted.
        rope: The rope; its scaling must be a law, not a rule.
        inverse: Undo the rotation that the same arguments make, its gain included.
        gain: Multiplied into cos and sin; ``rope.attention_factor`` if None, and 1.0 leaves it out.
        heads_first: Whether ``x`` and the result are ``[..., heads, seq, head_dim]``, without a
            copy. The shape of ``positions`` stays ``[..., seq]``.
        backend: ``"auto"``, or an implementation without any fallback: ``"cpu"``, ``"triton"`` or
            ``"eager"`` (plain torch operations).

            A compiler or exporter sees plain torch operations with ``"eager"`` and custom operators
            otherwise. With ``"auto"`` Inductor decomposes these into operations that it can fuse,
            if `chosen_backend` says so.

    Returns:
        A tensor with the shape, dtype and strides of ``x``; contiguous inside ``torch.func``
        transformations and where a compiler sees plain operations.

    Raises:
        TensorError: If ``x`` does not fit the Rope, or has a dtype that cannot be rotated.
        PositionError: If positions are bools or 16-bit floats, require a gradient, or do not fit
            ``x``; or if a float is NaN or beyond int64 and can be read without waiting or tracing.
            Otherwise its token becomes NaN.
        SpecError: If ``rope.scaling`` is a rule (use ``rope.at(seq_len)``); if ``inverse`` or
            ``heads_first`` is not a bool; if ``gain`` is not a number, or is 0 with ``inverse``.
        BackendError: If the named backend does not exist, or cannot rotate ``x``.

    >>> import torch
    >>> from phasor import Rope
    >>> rope = Rope(head_dim=64, pairing="half", base=500_000.0)
    >>> q = torch.randn(2, 16, 8, 64, dtype=torch.bfloat16)
    >>> y = rotate(q, torch.arange(16), rope)
    >>> back = rotate(y, torch.arange(16), rope, inverse=True)
    >>> bool(torch.allclose(back.float(), q.float(), atol=0.05))
    True
    >>> heads = rotate(q.transpose(1, 2), torch.arange(16), rope, heads_first=True)
    >>> torch.equal(heads, y.transpose(1, 2))
    True
    """
    return _rotate([x], positions, rope, inverse, gain, heads_first, backend)[0]


@unscriptable
def rotate_qk(
    q: Tensor,
    k: Tensor,
    positions: Any,
    rope: Rope,
    *,
    inverse: bool = False,
    gain: float | None = None,
    heads_first: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Query and key rotated at their tokens' positions, as new tensors, in one kernel launch.

    Both become ``R(p) x`` (RoFormer 2104.09864, eq. 34), so their scores depend on distances only.
    ``q`` is ``[..., seq, num_heads, head_dim]`` and ``k`` ``[..., seq, num_kv_heads, head_dim]``,
    of the same tokens; everything else is as in `rotate`.

    Raises:
        TensorError: As for `rotate`, or if ``q`` and ``k`` differ in tokens or device.

    >>> import torch
    >>> from phasor import Rope
    >>> q, k = torch.randn(5, 4, 8), torch.randn(5, 2, 8)
    >>> q2, k2 = rotate_qk(q, k, 3, Rope(head_dim=8, pairing="half"))
    >>> torch.equal(k2, rotate(k, 3, Rope(head_dim=8, pairing="half")))
    True
    """
    q, k = _rotate([q, k], positions, rope, inverse, gain, heads_first, backend)
    return q, k


@unscriptable
def rotate_(
    x: Tensor,
    positions: Any,
    rope: Rope,
    *,
    inverse: bool = False,
    gain: float | None = None,
    heads_first: bool = False,
    backend: str = "auto",
) -> Tensor:
    """`rotate` in place: returns ``x``, and changes nothing else in its storage.

    If a gradient must be recorded, new values are computed separately and copied in.

    Raises:
        TensorError: As for `rotate`, or if elements of ``x`` share memory (an expanded view).

    >>> import torch
    >>> from phasor import Rope
    >>> x = torch.ones(1, 1, 2, dtype=torch.float64)
    >>> rotate_(x, 0.25, Rope(head_dim=2, pairing="half")) is x
    True
    >>> x.flatten().tolist()  # cos 1/4 - sin 1/4, cos 1/4 + sin 1/4
    [0.7215084624561218, 1.2163163809651676]
    """
    return _rotate([x], positions, rope, inverse, gain, heads_first, backend, in_place=True)[0]


@unscriptable
def rotate_qk_(
    q: Tensor,
    k: Tensor,
    positions: Any,
    rope: Rope,
    *,
    inverse: bool = False,
    gain: float | None = None,
    heads_first: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`rotate_qk` in place: returns ``q`` and ``k``, which may be slices of one projection.

    Nothing else in their storage changes, and nothing at all if there is an error.

    Raises:
        TensorError: As for `rotate_`, or if the two share an element or are the same tensor.

    >>> import torch
    >>> from phasor import Rope
    >>> rope = Rope(head_dim=8, pairing="half")
    >>> fused = torch.randn(5, 6, 8)
    >>> expected = rotate(fused[:, :4], torch.arange(5), rope)
    >>> q, k = rotate_qk_(fused[:, :4], fused[:, 4:], torch.arange(5), rope)
    >>> torch.equal(fused[:, :4], expected)
    True
    """
    check_different((q, k))
    _rotate([q, k], positions, rope, inverse, gain, heads_first, backend, in_place=True)
    return q, k


def chosen_backend(x: Tensor, *more: Tensor, compiled_for: Rope | None = None) -> str:
    """The backend that ``backend="auto"`` chooses for ``x``, or for a query and a key.

    ``"cpu"``, the C++ kernel, for tensors in CPU memory if the extension was built; ``"triton"``,
    one launch per call, for tensors on a GPU if Triton can be imported; otherwise ``"eager"``,
    plain torch operations.

    Args:
        x: ``[..., seq, heads, head_dim]``.
        more: Other tensors in the same call.
        compiled_for: A Rope: the answer is then how ``torch.compile`` with Inductor runs its
            rotation, ``"inductor"`` if it fuses the operations with their neighbours, else the
            backend of the operator that it keeps. This depends on the pairing, the dtype and the
            number of elements of all tensors together.

    >>> import torch
    >>> chosen_backend(torch.zeros(1, 1, 2, device="meta"))
    'eager'
    >>> rope = Rope(head_dim=64, pairing="half")
    >>> chosen_backend(torch.zeros(1, 8, 64), compiled_for=rope)
    'inductor'
    """
    backend = ops.resolve("auto", x.device, x.shape[-1])
    if compiled_for is None:
        return backend
    check_rope(compiled_for, "compiled_for")
    pairings = compiled_for.pairing, compiled_for.output_pairing
    is_operator_kept = keeps_operator(backend, [x, *more], *pairings)
    return backend if is_operator_kept else "inductor"


def _rotate(
    xs: Sequence[Tensor],
    positions: Any,
    rope: Rope,
    inverse: bool,
    gain: float | None,
    heads_first: bool,
    backend: str,
    *,
    in_place: bool = False,
) -> Sequence[Tensor]:
    """New tensors in the caller's layout; in place, the given tensors."""
    views, outs = tokens_first(xs, heads_first), None
    if type(rope) is Rope and type(positions) is Tensor and backend in ("auto", "cpu"):
        text = rope.to_json()
        applied = attention_factor(text) if gain is None else gain
        if inverse is True and isinstance(applied, float) and applied not in (0.0, 1.0):
            applied = undone_gain(applied)
        outs = ops.try_turn_at(views, positions, text, inverse, applied, in_place)
    if outs is None:
        refuse_tracing()
        checked = ARRAYS.check_call(xs, positions, rope, inverse, gain, heads_first)
        layout = Layout(rope.pairing, rope.output_pairing, rope.rotary_start)
        call = TurnAt(views, checked[0], rope.to_json(), layout, inverse, checked[1], backend)
        outs = ops.turn_at(call, in_place=in_place)
    if in_place:
        return xs
    # [..., seq, heads, head_dim] -> [..., heads, seq, head_dim]
    return [y.transpose(-3, -2) for y in outs] if heads_first else outs
