"""The public verbs: rotate one tensor, or a query and a key, by positions.

Tensors are ``[..., seq, heads, head_dim]`` with any strides; a ``[batch, heads, seq, dim]`` caller
passes ``x.transpose(1, 2)``, a view. Verbs with a trailing underscore write their arguments,
the others never do.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from phasor.rope import Rope
from phasor.torch import ops
from phasor.torch._arguments import checked_options, checked_positions
from phasor.torch._torchscript import unscriptable
from phasor.torch.backends import cpu
from phasor.torch.backends import triton as triton_backend


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
    either way. Beyond, they are exact on the CPU and NaN where nothing can look at positions:
    elsewhere, inside ``torch.func`` transformations and in a compiler's plain operations.
    Arithmetic is float32 (float64 for float64 tensors) with one rounding at the end.
    Differentiable in ``x`` any number of times; what is kept for the backward pass is
    ``positions``.

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
        A tensor of the shape, dtype and strides of ``x``; contiguous inside ``torch.func``
        transformations and where a compiler is given plain operations.

    Raises:
        TensorError: If ``x`` does not fit the Rope, or has a dtype that cannot be rotated.
        PositionError: If the positions are bools, 16-bit floats, want a gradient, or do not fit
            ``x``.
        SpecError: If ``rope.scaling`` is a rule: use ``rope.at(seq_len)``; if ``inverse`` is no
            bool or ``gain`` no number.
        BackendError: If the named backend does not exist, or cannot rotate ``x``.

    >>> import torch
    >>> from phasor import Rope
    >>> rope = Rope(head_dim=64, pairing="half", base=500_000.0)
    >>> q = torch.randn(2, 16, 8, 64, dtype=torch.bfloat16)
    >>> turned = rotate(q, torch.arange(16), rope)
    >>> back = rotate(turned, torch.arange(16), rope, inverse=True)
    >>> bool(torch.allclose(back.float(), q.float(), atol=0.05))
    True
    """
    done = cpu.quick((x,), positions, rope, inverse, gain, backend)
    if done is None:
        done = triton_backend.quick((x,), positions, rope, inverse, gain, backend)
    if done is None:
        angles = [checked_positions(positions, [x], rope)]
        options = checked_options(inverse, gain)
        done = ops.apply([x], angles, rope.to_json(), *options, backend)
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
        TensorError: As `rotate`, and if ``q`` and ``k`` differ in tokens or device.

    >>> import torch
    >>> from phasor import Rope
    >>> q, k = torch.randn(5, 4, 8), torch.randn(5, 2, 8)
    >>> q2, k2 = rotate_qk(q, k, 3, Rope(head_dim=8, pairing="half"))
    >>> torch.equal(k2, rotate(k, 3, Rope(head_dim=8, pairing="half")))
    True
    """
    done = cpu.quick((q, k), positions, rope, inverse, gain, backend)
    if done is None:
        done = triton_backend.quick((q, k), positions, rope, inverse, gain, backend)
    if done is None:
        angles = [checked_positions(positions, [q, k], rope)]
        options = checked_options(inverse, gain)
        done = ops.apply([q, k], angles, rope.to_json(), *options, backend)
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

    Args:
        x: As for `rotate`; written. Nothing else of its storage is touched.
        positions: As for `rotate`.
        rope: As for `rotate`.
        inverse: As for `rotate`.
        gain: As for `rotate`.
        backend: As for `rotate`.

    Raises:
        TensorError: As `rotate`, and if elements of ``x`` share memory (an expanded view).

    >>> import torch
    >>> from phasor import Rope
    >>> x = torch.ones(1, 1, 2, dtype=torch.float64)
    >>> rotate_(x, 0.25, Rope(head_dim=2, pairing="half")) is x
    True
    >>> x.flatten().tolist()  # cos 1/4 - sin 1/4, cos 1/4 + sin 1/4
    [0.7215084624561218, 1.2163163809651676]
    """
    if not (
        cpu.quick_((x,), positions, rope, inverse, gain, backend)
        or triton_backend.quick_((x,), positions, rope, inverse, gain, backend)
    ):
        angles = [checked_positions(positions, [x], rope)]
        options = checked_options(inverse, gain)
        ops.apply_([x], angles, rope.to_json(), *options, backend)
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

    They may be slices of one projection; nothing else of its storage is touched.

    Args:
        q: ``[..., seq, query_heads, head_dim]``; written.
        k: ``[..., seq, key_heads, head_dim]``, the same leading dimensions; written.
        positions: As for `rotate`.
        rope: As for `rotate`.
        inverse: As for `rotate`.
        gain: As for `rotate`.
        backend: As for `rotate`.

    Raises:
        TensorError: As `rotate_qk`, and if an element of either is another element of them.

    >>> import torch
    >>> from phasor import Rope
    >>> rope = Rope(head_dim=8, pairing="half")
    >>> fused = torch.randn(5, 6, 8)
    >>> wanted = rotate(fused[:, :4], torch.arange(5), rope)
    >>> q, k = rotate_qk_(fused[:, :4], fused[:, 4:], torch.arange(5), rope)
    >>> torch.equal(fused[:, :4], wanted)
    True
    """
    if not (
        cpu.quick_((q, k), positions, rope, inverse, gain, backend)
        or triton_backend.quick_((q, k), positions, rope, inverse, gain, backend)
    ):
        angles = [checked_positions(positions, [q, k], rope)]
        options = checked_options(inverse, gain)
        ops.apply_([q, k], angles, rope.to_json(), *options, backend)
    return q, k


def chosen_backend(x: Tensor) -> str:
    """The backend that ``backend="auto"`` takes for ``x``.

    ``"cpu"``, the kernel in C++, for tensors in the CPU's memory where its extension was built;
    ``"triton"``, one launch a call, for tensors on a GPU where Triton can be imported; else
    ``"eager"``, plain torch operations.

    >>> import torch
    >>> chosen_backend(torch.zeros(1, 1, 2, device="meta"))
    'eager'
    """
    return ops.resolve("auto", x)
