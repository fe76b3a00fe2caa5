"""A rope as a static field of an Equinox module."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import phasor
from phasor.jax import rotate


class Layer(eqx.Module):
    """A projection, rotated."""

    linear: eqx.nn.Linear
    rope: phasor.Rope = eqx.field(static=True)

    def __call__(self, x: jax.Array, start: jax.Array) -> jax.Array:
        """``x`` of shape ``[seq, dim]``, which stands from ``start`` on."""
        heads = jax.vmap(self.linear)(x).reshape(len(x), -1, self.rope.head_dim)
        return rotate(heads, start + jnp.arange(len(x)), self.rope)


def test_a_compiled_module_rotates_and_its_rope_has_no_gradient() -> None:
    """The same in two calls as in one, and `None` is all that a gradient has for no array."""
    linear = eqx.nn.Linear(64, 64, use_bias=False, key=jax.random.key(1))
    layer = Layer(linear, phasor.Rope(head_dim=16, pairing="half"))
    x = jax.random.normal(jax.random.key(0), (10, 64))
    step = eqx.filter_jit(lambda layer, x, start: layer(x, start))
    whole, last = step(layer, x, jnp.array(0)), step(layer, x[9:], jnp.array(9))
    np.testing.assert_allclose(last, whole[9:], atol=1e-5)
    loss = eqx.filter_grad(lambda layer: jnp.sum(layer(x, jnp.array(0)) ** 2))
    assert [leaf.shape for leaf in jax.tree.leaves(loss(layer))] == [(64, 64)]
