"""The public verbs that rotate by given rows of cos and sin, for bridges and learned rotations."""

from __future__ import annotations

from torch import Tensor

from phasor.torch import ops
from phasor.torch._arguments import checked_options, checked_rows
from phasor.torch._torchscript import unscriptable


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
            in the half pairing. Of any floating dtype; unless ``x`` is float64, the arithmetic is
            float32, and wider rows are rounded to it first.
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
        SpecError: For a pairing that does not exist, or an ``inverse`` that is no bool.
        BackendError: As for `rotate`.

    >>> import torch
    >>> from phasor import Rope
    >>> from phasor.angles import cos_sin
    >>> from phasor.torch import rotate
    >>> rope = Rope(head_dim=8, pairing="interleaved")
    >>> cos, sin = (torch.from_numpy(row) for row in cos_sin(rope, range(5)))
    >>> x = torch.randn(5, 2, 8, dtype=torch.float64)
    >>> y = rotate_by(x, cos, sin, pairing="interleaved")
    >>> bool(torch.allclose(y, rotate(x, range(5), rope), atol=1e-14))
    True
    """
    text = checked_rows(x, cos, sin, pairing, pairing_out, rotary_start)
    return ops.apply([x], [cos, sin], text, *checked_options(inverse, 1.0), backend)[0]


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
    """`rotate_by`, written into ``x``, which is returned.

    Args:
        x: As for `rotate_by`; written. Nothing else of its storage is touched.
        cos: As for `rotate_by`.
        sin: As for `rotate_by`.
        pairing: As for `rotate_by`.
        pairing_out: As for `rotate_by`.
        rotary_start: As for `rotate_by`.
        inverse: As for `rotate_by`.
        backend: As for `rotate_by`.

    Raises:
        TensorError: As `rotate_by`, and if elements of ``x`` share memory, with each other or
            with ``cos`` or ``sin``.

    >>> import torch
    >>> x = torch.tensor([1.0, 0.0]).reshape(1, 1, 2)
    >>> rotate_by_(x, torch.tensor([[0.6]]), torch.tensor([[0.8]]), pairing="half").flatten()
    tensor([0.6000, 0.8000])
    """
    text = checked_rows(x, cos, sin, pairing, pairing_out, rotary_start)
    ops.apply_([x], [cos, sin], text, *checked_options(inverse, 1.0), backend)
    return x
