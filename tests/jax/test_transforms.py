"""Compiled, differentiated, batched, scanned, rematerialized: it is the same rotation."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from phasor import Rope
from phasor.axes import Sectioned

from .jax_arrays import assert_rotated, normal

ROPE = Rope(head_dim=8, pairing="interleaved", rotary_dim=4, rotary_start=2)
PLACES = np.array([3, 70_001, -5, 2**31 - 1])


def turn(x: Any) -> Any:
    """Rotated at `PLACES`."""
    import jax.numpy as jnp

    from phasor.jax import rotate

    return rotate(x, jnp.asarray(PLACES), ROPE)


@pytest.mark.slow
def test_gradients_turn_back_and_tangents_along() -> None:
    """In a compiled function."""
    import jax

    @jax.jit
    def both(x: Any, g: Any) -> Any:
        return jax.jvp(turn, (x,), (g,))[1], jax.vjp(turn, x)[1](g)[0]

    x, g = normal(4, 3, 8), normal(4, 3, 8, seed=1)
    along, back = both(x, g)
    assert_rotated(along, g, PLACES, ROPE)
    assert_rotated(back, g, PLACES, ROPE, inverse=True)


@pytest.mark.compile
def test_it_is_batched_scanned_and_rematerialized() -> None:
    """By tokens with their positions; and derivatives of derivatives are the same rotation."""
    import jax
    import jax.numpy as jnp

    from phasor.jax import rotate

    @jax.jit
    def everything(x: Any, g: Any) -> Any:
        by_token = jax.vmap(lambda x, p: rotate(x[None], p, ROPE)[0])
        shared = jax.vmap(turn, in_axes=1, out_axes=1)
        _, scanned = jax.lax.scan(lambda _, x: (None, turn(x)), None, jnp.stack([x, g]))
        _, pull = jax.vjp(jax.checkpoint(turn), x)
        # the tangent of the gradient, which is linear
        ((back,), (back_again,)) = jax.jvp(pull, (g,), (x,))
        along = [(by_token(x, jnp.asarray(PLACES)), x), (shared(x[:, None])[:, 0], x)]
        return [*along, (scanned[1], g)], [(back, g), (back_again, x)]

    along, back = everything(normal(4, 3, 8), normal(4, 3, 8, seed=1))
    for y, x in along:
        assert_rotated(y, x, PLACES, ROPE)
    for y, x in back:
        assert_rotated(y, x, PLACES, ROPE, inverse=True)


def test_positions_are_kept_and_no_cosines() -> None:
    """What the backward pass holds of tokens; besides, frequencies and two coefficients a step."""
    import jax
    import jax.numpy as jnp

    from phasor.jax import rotate_qk

    q, k = normal(4, 2, 8), normal(4, 1, 8)
    places = jnp.asarray(PLACES)
    _, pull = jax.vjp(lambda q, k: rotate_qk(q, k, places, ROPE), q, k)
    kept = {(a.shape, a.dtype.name) for a in jax.tree.leaves(pull)}
    assert kept == {((4,), "int32"), ((2, 4), "uint32"), ((2, 1, 1), "float32")}


SIXTY_FOUR_PAIRS = {
    "half": Rope(head_dim=128, pairing="half"),
    "interleaved": Rope(head_dim=128, pairing="interleaved"),
    "a slice": Rope(head_dim=256, pairing="interleaved", rotary_start=64, rotary_dim=128),
    "three axes": Rope(head_dim=128, pairing="interleaved", axes=Sectioned((16, 24, 24))),
}
SLOW = ("a slice", "three axes")
EACH = [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in SIXTY_FOUR_PAIRS]
NARROW = [("bfloat16", "int32"), ("float16", "uint32"), ("float32", "float32")]
WIDE = [
    ("bfloat16", "float64"),
    ("float64", "int64"),
    ("float64", "uint32"),
    ("float64", "float32"),
]


def undone(rope: Rope, dtype: str, of_positions: str) -> Any:
    """The inverse rotation of queries and keys with a gain, traced."""
    import jax

    from phasor.jax import rotate_qk

    n_axes = rope.axes.n_axes
    places = jax.ShapeDtypeStruct((8, 4096, n_axes) if n_axes > 1 else (8, 4096), of_positions)
    q, k = (jax.ShapeDtypeStruct((8, 4096, heads, rope.head_dim), dtype) for heads in (32, 8))
    return jax.jit(
        lambda q, k, places: rotate_qk(q, k, places, rope, inverse=True, gain=1.3)
    ).trace(q, k, places)


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize(("dtype", "of_positions"), [*NARROW, *WIDE])
def test_a_compiled_function_is_small_and_the_same_everywhere(
    dtype: str, of_positions: str, name: str
) -> None:
    """For 64 pairs at most 20 kB of StableHLO on every platform."""
    import jax

    with jax.enable_x64((dtype, of_positions) in WIDE):
        traced = undone(SIXTY_FOUR_PAIRS[name], dtype, of_positions)
        texts = {traced.lower(lowering_platforms=(p,)).as_text() for p in ("cpu", "cuda", "tpu")}
    assert max(map(len, texts)) <= 20_000
    assert not any("cosine" in text for text in texts)


@pytest.mark.parametrize("name", EACH)
def test_a_compiled_function_has_few_constants(name: str) -> None:
    """For 64 pairs at most 4 kB."""
    compiled = undone(SIXTY_FOUR_PAIRS[name], "float32", "float32").lower().compile().as_text()
    sizes = [
        int(np.prod([int(n) for n in shape.split(",") if n])) * int(bits) // 8
        for bits, shape in re.findall(r"[usf](\d+)\[([\d,]*)\]\S* constant\(", compiled)
    ]
    assert 0 < sum(sizes) <= 4096


def test_ropes_of_one_layout_share_what_is_compiled() -> None:
    """For frequencies are an argument of it."""
    from phasor import jax as verbs

    x = normal(2, 5, 8)
    turned = [
        verbs.rotate(x, [1, 2], Rope(head_dim=8, pairing="half", base=2.0**i)) for i in (3, 4)
    ]
    compiled = verbs._rotate_checked._cache_size()
    for base, direction in ((100.0, 1), (500_000.0, -1)):
        rope = Rope(head_dim=8, pairing="half", base=base, direction=direction)
        assert_rotated(verbs.rotate(x, [1, 2], rope), x, [1, 2], rope)
    assert verbs._rotate_checked._cache_size() == compiled
    assert not np.array_equal(*turned)


def test_a_rope_is_a_static_argument() -> None:
    """Equal ropes share what was compiled."""
    import jax

    from phasor.jax import rotate

    compiled = jax.jit(rotate, static_argnames=("rope", "heads_first"))
    x = normal(2, 4, 8)
    for _ in range(2):
        rope = Rope(head_dim=8, pairing="half")
        y = compiled(x, PLACES[:2].astype(np.int32), rope=rope, heads_first=False)
        assert_rotated(y, x, PLACES[:2], rope)
    assert compiled._cache_size() == 1


@pytest.mark.compile
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("heads_first", [False, True])
def test_gradients_turn_back_in_every_dtype(dtype: str, heads_first: bool) -> None:
    """With rows as well, whose gradients are those of a product."""
    import jax
    import jax.numpy as jnp

    from phasor.jax import Rotation, rotate

    with jax.enable_x64(dtype == "float64"):
        x, g = normal(4, 3, 8, dtype=dtype), normal(4, 3, 8, dtype=dtype, seed=1)
        turn = (lambda a: a.swapaxes(0, 1)) if heads_first else (lambda a: a)
        _, pull = jax.vjp(lambda x: rotate(x, PLACES, ROPE, heads_first=heads_first), turn(x))
        assert_rotated(turn(pull(turn(g))[0]), g, PLACES, ROPE, inverse=True)
        wide = jnp.float64 if dtype == "float64" else jnp.float32
        made = Rotation.at(PLACES, ROPE, dtype=wide)

        def by_rows(x: Any, cos: Any, sin: Any) -> Any:
            rotation = Rotation(cos, sin, pairing="interleaved", rotary_start=2)
            return rotation(x, heads_first=heads_first)

        _, pull = jax.vjp(by_rows, turn(x), made.cos, made.sin)
        of_x, of_cos, of_sin = pull(turn(g))
        assert_rotated(turn(of_x), g, PLACES, ROPE, inverse=True)
        x0, x1, g0, g1 = (np.asarray(a, float)[..., i:6:2] for a in (x, g) for i in (2, 3))
        room = 32 * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(of_cos, (x0 * g0 + x1 * g1).sum(-2), rtol=0, atol=room)
        np.testing.assert_allclose(of_sin, (x0 * g1 - x1 * g0).sum(-2), rtol=0, atol=room)
