"""The public verbs: rotate one tensor, or a query and a key, by positions or by given rows.

Tensors are ``[..., seq, heads, head_dim]`` with any strides; a ``[batch, heads, seq, dim]`` caller
passes ``x.transpose(1, 2)``, a view. Verbs with a trailing underscore write their arguments,
the others never do.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from phasor.spec import Rope
from phasor.torch import _cpu, _ops, _triton
from phasor.torch._arguments import checked_positions, checked_rows
from phasor.torch._torchscript import unscriptable


@unscriptable
def rotate(
    x: Tensor,
    positions: Any,
    rope: Rope,
    *,
    inverse: bool = False,
    gain: float = 1.0,
    backend: str = "auto",
) -> Tensor:
    """``R(p) x`` for every token (RoFormer 2104.09864, eq. 34), as a new tensor.

    Rows of cos and sin are within `phasor.angles.ROW_ERROR_40` at every position below 2**40
    either way. Beyond, they are exact on the CPU and NaN elsewhere and inside ``torch.func``
    transformations, where looking at positions is not possible. Arithmetic is float32 (float64
    for float64 tensors) with one rounding at the end. Differentiable in ``x`` any number of
    times; what is kept for the backward pass is ``positions``.

    Args:
        x: ``[..., seq, heads, head_dim]``: float64, float32, bfloat16 or float16, any strides.
        positions: Integers (any), or float32 or float64, of shape ``[..., seq]``, broadcast
            against the leading dimensions of ``x``; ``[..., seq, n_axes]`` for a Rope of several
            axes. A scalar stands for every token. Tensors, NumPy arrays and numbers are taken.
        rope: What rotates; its scaling must be a law, not a rule.
        inverse: Undo the rotation instead, from ``rope.output_pairing`` back to ``pairing``.
        gain: Multiplied into cos and sin, for models that want ``rope.attention_factor`` there.
        backend: ``"auto"``, or the name of one implementation, which is then never replaced.
            Named to a compiler or an exporter, ``"eager"`` is plain torch operations in its graph,
            to be fused with their neighbours; any other is one operator there.

    Returns:
        A tensor of the shape, dtype and strides of ``x``.

    Raises:
        TensorError: If ``x`` does not fit the Rope, or has a dtype that cannot be rotated.
        PositionError: If the positions are bools, 16-bit floats, or do not fit ``x``.
        SpecError: If ``rope.scaling`` is a rule: use ``rope.at(seq_len)``.
        BackendError: If the named backend does not exist.

    >>> import torch
    >>> from phasor import Rope
    >>> rope = Rope(head_dim=64, pairing="half", base=500_000.0)
    >>> q = torch.randn(2, 16, 8, 64, dtype=torch.bfloat16)
    >>> turned = rotate(q, torch.arange(16), rope)
    >>> back = rotate(turned, torch.arange(16), rope, inverse=True)
    >>> bool(torch.allclose(back.float(), q.float(), atol=0.05))
    True
    """
    done = _cpu.quick((x,), positions, rope, inverse, gain, backend)
    if done is None:
        done = _triton.quick((x,), positions, rope, inverse, gain, backend)
    if done is None:
        angles = [checked_positions(positions, [x], rope)]
        done = _ops.apply([x], angles, rope.to_json(), inverse, gain, backend)
    return done[0]


@unscriptable
def rotate_qk(
    q: Tensor,
    k: Tensor,
    positions: Any,
    rope: Rope,
    *,
    inverse: bool = False,
    gain: float = 1.0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`rotate` of a query and a key that share their tokens, in one launch.

    Args:
        q: ``[..., seq, query_heads, head_dim]``.
        k: ``[..., seq, key_heads, head_dim]``, the same leading dimensions.
        positions: As for `rotate`.
        rope: As for `rotate`.
        inverse: As for `rotate`.
        gain: As for `rotate`.
        backend: As for `rotate`.

    Returns:
        The new query and the new key.

    Raises:
        TensorError: Also if ``q`` and ``k`` differ in tokens or device.

    >>> import torch
    >>> from phasor import Rope
    >>> q, k = torch.randn(5, 4, 8), torch.randn(5, 2, 8)
    >>> q2, k2 = rotate_qk(q, k, 3, Rope(head_dim=8, pairing="half"))
    >>> torch.equal(k2, rotate(k, 3, Rope(head_dim=8, pairing="half")))
    True
    """
    done = _cpu.quick((q, k), positions, rope, inverse, gain, backend)
    if done is None:
        done = _triton.quick((q, k), positions, rope, inverse, gain, backend)
    if done is None:
        angles = [checked_positions(positions, [q, k], rope)]
        done = _ops.apply([q, k], angles, rope.to_json(), inverse, gain, backend)
    return done[0], done[1]


@unscriptable
def rotate_(
    x: Tensor,
    positions: Any,
    rope: Rope,
    *,
    inverse: bool = False,
    gain: float = 1.0,
    backend: str = "auto",
) -> Tensor:
    """`rotate`, written into ``x``, which is returned.

    Where a gradient has to be recorded, the new values are made aside and copied in.

    Raises:
        TensorError: Also if elements of ``x`` share memory (an expanded view).

    >>> import torch
    >>> from phasor import Rope
    >>> x = torch.ones(1, 1, 2, dtype=torch.float64)
    >>> rotate_(x, 0.25, Rope(head_dim=2, pairing="half")) is x
    True
    >>> x.flatten().tolist()  # cos 1/4 - sin 1/4, cos 1/4 + sin 1/4
    [0.7215084624561218, 1.2163163809651676]
    """
    if not (
        _cpu.quick_((x,), positions, rope, inverse, gain, backend)
        or _triton.quick_((x,), positions, rope, inverse, gain, backend)
    ):
        angles = [checked_positions(positions, [x], rope)]
        _ops.apply_([x], angles, rope.to_json(), inverse, gain, backend)
    return x


@unscriptable
def rotate_qk_(
    q: Tensor,
    k: Tensor,
    positions: Any,
    rope: Rope,
    *,
    inverse: bool = False,
    gain: float = 1.0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`rotate_qk`, written into ``q`` and ``k``, which are returned.

    Raises:
        TensorError: Also if elements of either share memory, or both are one tensor.
    """
    if not (
        _cpu.quick_((q, k), positions, rope, inverse, gain, backend)
        or _triton.quick_((q, k), positions, rope, inverse, gain, backend)
    ):
        angles = [checked_positions(positions, [q, k], rope)]
        _ops.apply_([q, k], angles, rope.to_json(), inverse, gain, backend)
    return q, k


@unscriptable
def rotate_by(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    pairing: str,
    pairing_out: str | None = None,
    rotary_start: int = 0,
    inverse: bool = False,
    backend: str = "auto",
) -> Tensor:
    """``x`` rotated by given rows of cos and sin, one entry per pair.

    Args:
        x: ``[..., seq, heads, head_dim]``, as for `rotate`.
        cos: ``[..., seq, num_pairs]``, broadcast against the leading dimensions of ``x``. Half
            width: a full-width table that says everything twice is ``cos[..., :num_pairs]``
            in the half pairing.
        sin: The same shape.
        pairing: ``"half"`` or ``"interleaved"``.
        pairing_out: Pairing of the result where it differs.
        rotary_start: Where the rotated slice begins inside the head.
        inverse: Undo it instead: ``sin`` changes sign, and the pairings change places.
        backend: As for `rotate`.

    Returns:
        A tensor of the shape, dtype and strides of ``x``. Differentiable in ``x``, and in ``cos``
        and ``sin`` where they require it.

    Raises:
        TensorError: If a shape or dtype does not fit.
        SpecError: For a pairing that does not exist.

    >>> import torch
    >>> from phasor import Rope
    >>> from phasor.angles import cos_sin
    >>> rope = Rope(head_dim=8, pairing="interleaved")
    >>> cos, sin = (torch.from_numpy(row) for row in cos_sin(rope, range(5)))
    >>> x = torch.randn(5, 2, 8, dtype=torch.float64)
    >>> y = rotate_by(x, cos, sin, pairing="interleaved")
    >>> bool(torch.allclose(y, rotate(x, range(5), rope), atol=1e-14))
    True
    """
    text = checked_rows(x, cos, sin, pairing, pairing_out, rotary_start)
    return _ops.apply([x], [cos, sin], text, inverse, 1.0, backend)[0]


@unscriptable
def rotate_by_(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    pairing: str,
    pairing_out: str | None = None,
    rotary_start: int = 0,
    inverse: bool = False,
    backend: str = "auto",
) -> Tensor:
    """`rotate_by`, written into ``x``, which is returned."""
    text = checked_rows(x, cos, sin, pairing, pairing_out, rotary_start)
    _ops.apply_([x], [cos, sin], text, inverse, 1.0, backend)
    return x


def chosen_backend(x: Tensor) -> str:
    """The backend that ``backend="auto"`` takes for ``x``.

    ``"cpu"``, the kernel in C++, for tensors in the CPU's memory where its extension was built;
    ``"triton"``, one launch a call, for tensors on a GPU where Triton can be imported; else
    ``"eager"``, plain torch operations.

    >>> import torch
    >>> chosen_backend(torch.zeros(1, 1, 2, device="meta"))
    'eager'
    """
    return _ops.resolve("auto", x)
