"""The rotation in NumPy float64, in each form the papers write it: a readable reference.

`rotate` is what kernels do, `rotate_complex` and `matrix` are the same map as a complex product
and as a matrix, `score` is the relative kernel, and `change_pairing` re-orders coordinates from
one pairing to the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phasor._checks import boolean, number, unmasked, whole
from phasor._tensors import LAYOUTS, misfit, swap_heads, undone_gain
from phasor.angles import as_positions, cos_sin
from phasor.errors import PositionError, TensorError
from phasor.pairings import Pairing, checked_pairing, slices
from phasor.rope import Rope


def pair_indices(rope: Rope, pairing: Pairing) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Indices of the first and of the second coordinate of each pair in a head.

    >>> pair_indices(Rope(head_dim=6, pairing="half", rotary_dim=4), "half")
    (array([0, 1]), array([2, 3]))
    """
    first, second = slices(pairing, rope.num_pairs, rope.rotary_start)
    coordinates = np.arange(rope.head_dim)
    return coordinates[first], coordinates[second]


def rotate(
    x: ArrayLike,
    positions: ArrayLike,
    rope: Rope,
    *,
    inverse: bool = False,
    gain: float | None = None,
    heads_first: bool = False,
) -> NDArray[np.float64]:
    """``R(p) x`` for every token, element by element (RoFormer 2104.09864, eq. 34).

    ``y0 = x0 cos - x1 sin``, ``y1 = x0 sin + x1 cos`` for each pair; other coordinates stay.

    Args:
        x: ``[..., seq, heads, head_dim]``; with a scalar position, any ``[..., head_dim]``.
        positions: Integers or floats ``[..., seq]``, broadcast against the leading dimensions of
            ``x``; ``[..., seq, n_axes]`` for several axes. A scalar is every token's position.
        rope: The rope.
        inverse: Undo the rotation that the same arguments make, its gain included.
        gain: Multiplied into cos and sin; ``rope.attention_factor`` if None, and 1.0 leaves it out.
        heads_first: Whether ``x`` is ``[..., heads, seq, head_dim]``; ``positions`` keep their
            shape.

    Returns:
        float64, the shape of ``x``.

    >>> rope = Rope(head_dim=4, pairing="interleaved", base=100.0)
    >>> rotate([1.0, 0.0, 1.0, 0.0], 1, rope).round(4)
    array([0.5403, 0.8415, 0.995 , 0.0998])
    """
    vectors = _checked_vectors("x", x, rope)
    gain = _rope_gain(rope, gain)
    source, target = rope.pairing, rope.output_pairing
    if boolean("inverse", inverse):
        gain, source, target = undone_gain(gain), target, source
    cos, sin = _cos_sin_of_tokens(positions, rope, gain, vectors.shape, heads_first)
    sin = -sin if inverse else sin
    first, second = pair_indices(rope, source)
    to_first, to_second = pair_indices(rope, target)
    # [..., head_dim] -> twice [..., num_pairs]
    x0, x1 = vectors[..., first], vectors[..., second]
    y = vectors.copy()
    y[..., to_first] = x0 * cos - x1 * sin
    y[..., to_second] = x0 * sin + x1 * cos
    return y


def rotate_complex(
    x: ArrayLike,
    positions: ArrayLike,
    rope: Rope,
    *,
    gain: float | None = None,
    heads_first: bool = False,
) -> NDArray[np.float64]:
    """`rotate` as a product of complex numbers, ``(x0 + i x1) exp(i p inv_freq)`` (eq. 12).

    Arguments and errors are those of `rotate`.

    >>> rope = Rope(head_dim=4, pairing="half")
    >>> x = np.array([1.0, 2.0, 3.0, 4.0])
    >>> bool(np.allclose(rotate_complex(x, 7, rope), rotate(x, 7, rope), rtol=0, atol=1e-15))
    True
    """
    vectors = _checked_vectors("x", x, rope)
    gain = _rope_gain(rope, gain)
    cos, sin = _cos_sin_of_tokens(positions, rope, gain, vectors.shape, heads_first)
    first, second = pair_indices(rope, rope.pairing)
    to_first, to_second = pair_indices(rope, rope.output_pairing)
    rotated = (vectors[..., first] + 1j * vectors[..., second]) * (cos + 1j * sin)
    y = vectors.copy()
    y[..., to_first], y[..., to_second] = rotated.real, rotated.imag
    return y


def every_axis_of(rope: Rope, positions: ArrayLike) -> NDArray[Any]:
    """Positions ``[...]`` of text in the form that ``rope`` takes: the same on every axis.

    The result is ``[..., n_axes]``, or ``[...]`` if the rope has one axis.

    >>> every_axis_of(Rope(head_dim=4, pairing="half"), [0, 1, 5])
    array([0, 1, 5])
    """
    unmasked("positions", positions, PositionError)
    array, n_axes = np.asarray(positions), rope.axes.n_axes
    return array if n_axes == 1 else np.repeat(array[..., None], n_axes, axis=-1)


def phasors(rope: Rope, positions: ArrayLike) -> NDArray[np.complex128]:
    """``exp(1j * direction * p * inv_freq[k])`` at positions ``[P]`` of text: ``[P, num_pairs]``.

    >>> print(phasors(Rope(head_dim=2, pairing="half"), [1]).round(4))
    [[0.5403+0.8415j]]
    """
    cos, sin = cos_sin(every_axis_of(rope, positions), rope)
    return cos + 1j * sin


def blocks(position: ArrayLike, rope: Rope, *, gain: float | None = None) -> NDArray[np.float64]:
    """The 2x2 rotation of every pair (Round and Round We Go 2410.06205, eq. 2).

    Args:
        position: Positions of any shape ``[...]``, or ``[..., n_axes]``.
        rope: The rope.
        gain: As for `rotate`.

    Returns:
        float64 ``[..., num_pairs, 2, 2]``, each ``[[cos, -sin], [sin, cos]]`` times the gain.

    >>> blocks(1, Rope(head_dim=2, pairing="half")).round(4)
    array([[[ 0.5403, -0.8415],
            [ 0.8415,  0.5403]]])
    """
    cos, sin = cos_sin(position, rope)
    return _rope_gain(rope, gain) * np.stack(
        (np.stack((cos, -sin), -1), np.stack((sin, cos), -1)), -2
    )


def matrix(position: ArrayLike, rope: Rope, *, gain: float | None = None) -> NDArray[np.float64]:
    """``R(p)`` as a matrix that acts on one head's vector (RoFormer eq. 15).

    If the result has the same pairing and the gain is 1, it is orthogonal and ``R(m) R(n) = R(m +
    n)``.

    Args:
        position: One position: a number, or ``[n_axes]`` numbers.
        rope: The rope.
        gain: As for `rotate`.

    Returns:
        float64 ``[head_dim, head_dim]``.

    >>> rope = Rope(head_dim=4, pairing="interleaved", base=100.0)
    >>> bool(np.allclose(matrix(2, rope) @ matrix(3, rope), matrix(5, rope), rtol=0, atol=1e-15))
    True
    """
    if as_positions(position).ndim > (rope.axes.n_axes > 1):
        raise PositionError(
            f"position must be a single position, got shape {list(np.shape(position))}; "
            "for several positions use phasor.numpy.blocks"
        )
    # its columns are the rotated basis vectors; adding 0.0 turns -0.0 into 0.0
    return rotate(np.eye(rope.head_dim), position, rope, gain=gain).T + 0.0


def score(
    q: ArrayLike,
    k: ArrayLike,
    distance: ArrayLike,
    rope: Rope,
    *,
    gain: float | None = None,
) -> NDArray[np.float64]:
    """``q^T R(distance) k``: the score of a query and a key ``distance`` positions after it.

    With the query at ``m`` and the key at ``n`` it equals ``(R(m) q)^T (R(n) k)`` for
    ``distance = n - m`` (RoFormer eq. 16 and 35; Round and Round We Go eq. 3), without any
    softmax scale.

    Args:
        q: ``[..., head_dim]``, before rotation.
        k: ``[..., head_dim]``, before rotation.
        distance: Key position minus query position, broadcast against the leading dimensions;
            ``[..., n_axes]`` for several axes.
        rope: The rope.
        gain: As for `rotate`, which multiplies the query and the key by it.

    Returns:
        float64, the broadcast shape.

    >>> rope = Rope(head_dim=2, pairing="half")
    >>> print(score([1.0, 0.0], [0.0, 1.0], -1, rope).round(4))
    0.8415
    """
    turning, unrotated = pair_products(q, k, rope, gain=gain)
    cos, sin = cos_sin(distance, rope)
    return np.asarray((turning.real * cos + turning.imag * sin).sum(-1) + unrotated)


def pair_products(
    q: ArrayLike, k: ArrayLike, rope: Rope, *, gain: float | None = None
) -> tuple[NDArray[np.complex128], NDArray[np.float64]]:
    """``q_k conj(k_k)`` of every pair as complex numbers, and ``q . k`` of unrotated coordinates.

    The products of pairs include the square of the gain, which is on the query and on the key.
    """
    query, key = _checked_vectors("q", q, rope), _checked_vectors("k", k, rope)
    first, second = pair_indices(rope, rope.pairing)
    turning = query[..., first] + 1j * query[..., second]
    turning = turning * (key[..., first] - 1j * key[..., second]) * _rope_gain(rope, gain) ** 2
    unrotated = np.delete(query * key, np.concatenate((first, second)), axis=-1)
    return turning, unrotated.sum(-1)


def change_pairing(
    x: ArrayLike,
    source: Pairing,
    target: Pairing,
    *,
    head_dim: int | None = None,
    rotary_dim: int | None = None,
    rotary_start: int = 0,
    axis: int = -1,
) -> NDArray[Any]:
    """``x`` with the coordinates of every head reordered from one pairing to the other.

    Applied to the rows of both the query and the key projection it converts a checkpoint from one
    convention to the other; applied to vectors it converts activations. Pairs keep their
    frequencies, so scores do not change.

    Args:
        x: Any array whose ``axis`` is one head, or several of ``head_dim`` each.
        source: The pairing of ``x``.
        target: The pairing of the result.
        head_dim: Width of one head; the whole axis by default.
        rotary_dim: Rotated coordinates of a head; ``head_dim - rotary_start`` by default.
        rotary_start: Where the rotated coordinates begin.
        axis: The axis that holds the heads: -1 for vectors, 0 for a ``[out, in]`` weight.

    Returns:
        A new array of the same shape and dtype.

    >>> change_pairing([0, 1, 2, 3, 4, 5], "interleaved", "half")
    array([0, 2, 4, 1, 3, 5])
    """
    for name, value in (("source", source), ("target", target)):
        checked_pairing(name, value)
    array = np.asarray(unmasked("x", x, TensorError))
    if not -array.ndim <= axis < array.ndim:
        raise TensorError(f"axis must be one of the {array.ndim} axes of x, got {axis}")
    length = array.shape[axis]
    width = length if head_dim is None else whole("head_dim", head_dim, least=2)
    rotated = width - rotary_start if rotary_dim is None else rotary_dim
    rope = Rope(head_dim=width, pairing=source, rotary_dim=rotated, rotary_start=rotary_start)
    if length % width:
        raise TensorError(
            f"axis {axis} of x must hold whole heads of head_dim {width}, got length {length}"
        )
    order = np.arange(width)
    order[np.concatenate(pair_indices(rope, target))] = np.concatenate(pair_indices(rope, source))
    indices = [head + i for head in range(0, length, width) for i in order.tolist()]
    return np.take(array, indices, axis=axis)


def real_array(name: str, value: ArrayLike) -> NDArray[Any]:
    """``value`` as an array, if it holds integers or floats."""
    array = np.asarray(unmasked(name, value, TensorError))
    if array.dtype.kind not in "iuf":
        raise TensorError(f"{name} must hold real numbers, got {array.dtype}")
    return array


def _checked_vectors(name: str, x: ArrayLike, rope: Rope) -> NDArray[np.float64]:
    vectors = real_array(name, x)
    if vectors.ndim == 0 or vectors.shape[-1] != rope.head_dim:
        raise TensorError(
            f"{name} must end in head_dim ({rope.head_dim}), got shape {list(vectors.shape)}"
        )
    return vectors.astype(np.float64)


def _rope_gain(rope: Rope, gain: float | None) -> float:
    return rope.attention_factor if gain is None else number("gain", gain)


def _cos_sin_of_tokens(
    positions: ArrayLike, rope: Rope, gain: float, shape: Sequence[int], heads_first: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Cosines and sines times the gain, which broadcast against ``x`` of the given shape."""
    if boolean("heads_first", heads_first) and len(shape) < 3:
        raise TensorError(f"x must be {LAYOUTS[True]}, got shape {list(shape)}")
    cos, sin = (gain * row for row in cos_sin(positions, rope))
    if cos.ndim == 1:
        return cos, sin
    problem = misfit(cos.shape[:-1], swap_heads(shape) if heads_first else shape, heads_first)
    if problem:
        raise PositionError(f"positions must be a scalar or broadcast to {problem}")
    # a dimension of length 1 for heads
    heads_dim = -3 if heads_first else -2
    return np.expand_dims(cos, heads_dim), np.expand_dims(sin, heads_dim)
