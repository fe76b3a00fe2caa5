"""The rotation in JAX, as pure functions: exact at every position, without tables.

They can be compiled, differentiated, batched, scanned and sharded; the backward pass keeps
positions and computes cos and sin again. Arrays are ``[..., seq, heads, head_dim]``, or ``[...,
heads, seq, head_dim]`` with ``heads_first=True``. A Rope is hashable: it can be a static argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast, overload

import numpy as np

from phasor import _angle_words, _tensors
from phasor._checks import number
from phasor._rotation import RotationOf
from phasor.angles import as_positions, axes_of, pair_coordinates
from phasor.errors import PositionError, SpecError, missing
from phasor.pairings import Pairing, by_pairing
from phasor.rope import Rope

try:
    import jax
    import jax.numpy as jnp
    from jax import Array
except ModuleNotFoundError as error:
    raise missing("jax", error) from None

# JAX's own types are partly unknown
_compile, _checkpoint = cast(Any, jax.jit), cast(Any, jax.checkpoint)
# one function for all words
_multiply = _compile(_angle_words.fixed_point_product, static_argnums=3)
_widened = partial(
    jnp.promote_types, jnp.float32
)  # the dtype in which cos and sin are computed and applied


def rotate(
    x: Array,
    positions: Any,
    rope: Rope,
    *,
    inverse: bool = False,
    gain: float | None = None,
    heads_first: bool = False,
) -> Array:
    """``R(p) x`` for every token (RoFormer 2104.09864, eq. 34), like `phasor.torch.rotate`.

    Cos and sin are within `phasor.angles.COS_SIN_ERROR_FLOAT32` at every position. Arithmetic is
    float32 (float64 for float64 arrays) with one rounding at the end.

    Args:
        x: ``[..., seq, heads, head_dim]``: float64, float32, bfloat16 or float16; so is the result.
        positions: ``[..., seq]`` or ``[..., seq, n_axes]``: integers, float32 or float64, as arrays
            of JAX or NumPy, lists or numbers. Floats that are not in a JAX array keep all 64 bits.
            In a JAX array, a float that is NaN or beyond int64 makes its token NaN; elsewhere it is
            refused.
        rope: The rope; its scaling must be a law, not a rule. Ropes of the same layout share one
            compiled program, which takes frequencies as an argument.
        inverse: Undo the rotation with the same arguments instead, its gain included.
        gain: Multiplied into cos and sin; ``rope.attention_factor`` if None, and 1.0 leaves it out.
        heads_first: Whether ``x`` is ``[..., heads, seq, head_dim]``.

    Raises:
        PositionError: As in `phasor.torch.rotate`; and if an integer that is not in a JAX array is
            beyond int32 while ``jax_enable_x64`` is off.

    >>> rope = Rope(head_dim=64, pairing="half", base=500_000.0)
    >>> q = jnp.ones((2, 16, 8, 64))
    >>> y = jax.jit(rotate, static_argnums=2)(q, jnp.arange(16), rope)
    >>> bool(jnp.allclose(rotate(y, jnp.arange(16), rope, inverse=True), q, atol=1e-6))
    True
    """
    return _rotate([x], positions, rope, inverse, gain, heads_first)[0]


def rotate_qk(
    q: Array,
    k: Array,
    positions: Any,
    rope: Rope,
    *,
    inverse: bool = False,
    gain: float | None = None,
    heads_first: bool = False,
) -> tuple[Array, Array]:
    """Query and key rotated at their tokens' positions, by the same cos and sin.

    ``q`` is ``[..., seq, num_heads, head_dim]`` and ``k`` ``[..., seq, num_kv_heads, head_dim]``;
    both must have the same tokens. All else is as in `rotate`.

    >>> rope, ones = Rope(head_dim=8, pairing="half"), jnp.ones((5, 4, 8))
    >>> q, k = rotate_qk(ones, ones[:, :2], 3, rope)
    >>> bool((q[:, :2] == k).all())
    True
    """
    q, k = _rotate([q, k], positions, rope, inverse, gain, heads_first)
    return q, k


class Rotation(RotationOf[Array]):
    """The rotation ``R(p)`` of each token of a sequence, like `phasor.torch.Rotation`; a pytree.

    `at` makes one from positions, once in a forward pass; every layer calls it.

    Args:
        cos: By token, ``[..., seq, num_pairs]``, or by head, ``[..., seq, heads or 1, num_pairs]``,
            also with heads first. Rounded to float32, unless the rotated array is float64;
            gradients reach it.
        sin: The same shape.
        pairing: ``"half"`` or ``"interleaved"``.
        pairing_out: Pairing of the result if it differs.
        rotary_start: Where the rotated slice begins inside the head.

    >>> rope = Rope(head_dim=64, pairing="half", base=500_000.0)
    >>> rotation = Rotation.at(jnp.arange(16), rope)
    >>> q, k = rotation(jnp.ones((2, 16, 8, 64)), jnp.ones((2, 16, 2, 64)))
    >>> bool(jnp.allclose(rotation.inverse()(q), 1.0, atol=1e-5))
    True
    >>> x = jnp.array([1.0, 0.0]).reshape(1, 1, 2)
    >>> print(Rotation(jnp.array([[0.6]]), jnp.array([[0.8]]), pairing="half")(x))
    [[[0.6 0.8]]]
    """

    __slots__ = ()

    def __init__(
        self,
        cos: Array,
        sin: Array,
        *,
        pairing: str,
        pairing_out: str | None = None,
        rotary_start: int = 0,
    ) -> None:
        _ARRAYS.check_rows(cos, sin)
        layout: dict[str, Any] = {"pairing": pairing, "pairing_out": pairing_out}
        super().__init__(cos, sin, rotary_start=rotary_start, **layout)

    @classmethod
    def at(
        cls, positions: Any, rope: Rope, *, gain: float | None = None, dtype: Any = jnp.float32
    ) -> Rotation:
        """The rotation of tokens at ``positions`` by ``rope``, its attention factor included.

        Args:
            positions: As for `rotate`, with the same errors.
            rope: The rope; its scaling must be a law, not a rule.
            gain: Multiplied into cos and sin; ``rope.attention_factor`` if None.
            dtype: float32, or float64 for arrays that are float64.

        >>> print(Rotation.at([0, 1, 2**31 - 1], Rope(head_dim=4, pairing="half")).cos[2])
        [-0.6888367 -0.7128175]
        """
        _tensors.check_rope(rope, positions=positions)
        if dtype not in (jnp.float32, jax.dtypes.canonicalize_dtype(np.float64)):
            raise SpecError(
                f"dtype must be float32 (float64 with jax_enable_x64), got {dtype!r:.80}"
            )
        gain = rope.attention_factor if gain is None else number("gain", gain)
        places, dtype = _ARRAYS.read_positions(positions, rope), np.dtype(dtype)
        options = axes_of(rope), gain, False
        rows = _rows(places, _angle_words.limbs_of(rope, dtype), dtype, options)
        cos, sin = jnp.split(rows, 2, -1)
        return cls.of_rope(cos, sin, rope)

    @overload
    def __call__(self, x: Array, /, *, heads_first: bool = False) -> Array: ...

    @overload
    def __call__(
        self, q: Array, k: Array, /, *, heads_first: bool = False
    ) -> tuple[Array, Array]: ...

    def __call__(self, *xs: Array, heads_first: bool = False) -> Array | tuple[Array, Array]:
        """Rotate one array, or a query and a key of the same tokens.

        Raises:
            TensorError: If an array does not fit the rotation.
        """
        has_heads = _ARRAYS.check_turn(xs, self.cos, self.rotary_start, self.head_dim, heads_first)
        cos, sin = self.cos, self.sin
        if not has_heads:
            cos, sin = cos[..., None, :], sin[..., None, :]
        if heads_first and cos.ndim > 2:
            cos, sin = cos.swapaxes(-2, -3), sin.swapaxes(-2, -3)
        layout: Any = (self.pairing, self.pairing_out, self.rotary_start)
        ys: list[Array] = []
        for x in xs:
            dtype = _widened(x.dtype)
            ys.append(_turn(x, cos.astype(dtype), sin.astype(dtype), *layout))
        return ys[0] if len(xs) == 1 else (ys[0], ys[1])


def _flatten(rotation: Rotation) -> tuple[tuple[Array, Array], Any]:
    return (rotation.cos, rotation.sin), rotation.layout()


def _flatten_with_keys(rotation: Rotation) -> tuple[Any, Any]:
    key = jax.tree_util.GetAttrKey
    return ((key("cos"), rotation.cos), (key("sin"), rotation.sin)), rotation.layout()


def _unflatten(layout: Any, rows: Any) -> Rotation:
    cos, sin = rows
    return Rotation.make(cos, sin, layout)


jax.tree_util.register_pytree_with_keys(Rotation, _flatten_with_keys, _unflatten, _flatten)


def _rotate(
    xs: Sequence[Array],
    positions: Any,
    rope: Rope,
    inverse: bool,
    gain: float | None,
    heads_first: bool,
) -> Sequence[Array]:
    places, gain, source, target = _ARRAYS.check_call(
        xs, positions, rope, inverse, gain, heads_first
    )
    options, layout = (axes_of(rope), gain, inverse), (source, target, rope.rotary_start)
    # arguments, so that ropes of all frequencies share the compiled program
    limbs = {dtype: _angle_words.limbs_of(rope, dtype) for dtype in {_widened(x.dtype) for x in xs}}
    return _rotate_checked(xs, places, limbs, options, layout, heads_first)


@partial(_compile, static_argnums=(3, 4, 5), inline=True)
@partial(_checkpoint, static_argnums=(3, 4, 5))  # the backward pass keeps positions only
def _rotate_checked(
    xs: Sequence[Array], positions: Any, limbs: Any, options: Any, layout: Any, heads_first: bool
) -> Sequence[Array]:
    rows = dict[Any, Any]()
    for dtype in limbs:
        cos_sin: Any = _rows(positions, limbs[dtype], dtype, options)
        if cos_sin.ndim > 1:  # to broadcast over heads
            cos_sin = jnp.expand_dims(cos_sin, -3 if heads_first else -2)
        # behind a barrier, or the compiler may compute an angle again for every head
        rows[dtype] = jnp.split(jax.lax.optimization_barrier(cos_sin), 2, -1)
    return [_turn(x, *rows[_widened(x.dtype)], *layout) for x in xs]


@partial(_compile, static_argnums=(2, 3), inline=True)
def _rows(positions: Any, limbs: Array, dtype: np.dtype[Any], options: Any) -> Array:
    """Cos and sin ``[..., seq, 2 * num_pairs]`` in one array: two would slow down decoding."""
    axes, *gain_and_inverse = options
    if isinstance(positions, _angle_words.Words):
        words = jax.tree.map(partial(pair_coordinates, axes=axes), positions)
    else:
        words = _angle_words.words_of(pair_coordinates(positions, axes), dtype, jnp)
    make = partial(_angle_words.cos_sin_of_words, multiply=_multiply)
    return jnp.concatenate(make(words, limbs, dtype, jnp, *gain_and_inverse), -1)


def _turn(x: Array, cos: Array, sin: Array, source: Pairing, target: Pairing, start: int) -> Array:
    pairs = cos.shape[-1]
    lead, is_whole = x.shape[:-1], 2 * pairs == x.shape[-1]
    rotary = x if is_whole else jax.lax.slice_in_dim(x, start, start + 2 * pairs, axis=-1)
    # [..., head_dim] -> [..., 2, num_pairs] or [..., num_pairs, 2]
    axis, axis_out = (by_pairing(p, half=-2, interleaved=-1) for p in (source, target))
    shape = by_pairing(source, half=(2, pairs), interleaved=(pairs, 2))
    halves = jnp.split(rotary.astype(cos.dtype).reshape(*lead, *shape), 2, axis)
    x0, x1 = (half.reshape(*lead, pairs) for half in halves)
    cos, sin = (jnp.broadcast_to(row, x0.shape) for row in (cos, sin))
    # stacked, not concatenated, so that XLA computes and rounds in one loop
    y = jnp.stack([x0 * cos - x1 * sin, x0 * sin + x1 * cos], axis_out)
    y = y.reshape(rotary.shape).astype(x.dtype)
    return y if is_whole else jax.lax.dynamic_update_slice_in_dim(x, y, start, -1)


@jax.custom_jvp
def _stop_gradient(positions: Array) -> Array:
    return positions


@partial(_stop_gradient.defjvp, symbolic_zeros=True)
def _refuse_gradient(primals: tuple[Array], tangents: tuple[Any]) -> tuple[Array, Any]:
    if not isinstance(tangents[0], jax.custom_derivatives.SymbolicZero):
        raise _tensors.position_gradient_error()
    return primals[0], tangents[0]


def _read_host(positions: Any, _device: None) -> Any:
    """A JAX array, or words for floats that JAX would round; integers must fit its int dtype."""
    host = as_positions(positions)
    if jax.dtypes.canonicalize_dtype(np.int64) == np.int64:
        return jnp.asarray(host)
    if host.dtype.kind == "f":
        return _angle_words.words_of(host, np.dtype(np.float32), np)
    far = host[host != host.astype(np.int32)]
    if far.size:
        raise PositionError(
            f"positions must fit int32, got {far[0]}, because jax_enable_x64 is off; "
            'call jax.config.update("jax_enable_x64", True) first'
        )
    return jnp.asarray(host.astype(np.int32))


_ARRAYS = _tensors.Arrays(
    kind=Array,
    name="a jax.Array",
    dtypes=[jnp.dtype(name) for name in _tensors.DTYPES],
    position_dtypes=[jnp.dtype(name) for name in _tensors.POSITION_DTYPES],
    stop_gradient=_stop_gradient,
    read_host=_read_host,
)
