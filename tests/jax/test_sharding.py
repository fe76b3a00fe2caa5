"""Over four devices: no communication, and the bits of one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

PROGRAM = """
import numpy as np, jax, jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from phasor import Rope
from phasor.jax import rotate, rotate_qk

assert len(jax.devices()) == 4
rope = Rope(head_dim=64, pairing="half", rotary_dim=32, rotary_start=16)
make = np.random.default_rng(0).standard_normal
q, k = (jnp.asarray(make((2, 32, heads, 64)), jnp.float32) for heads in (8, 4))
places = jnp.arange(32) * 70_001
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))


def turn(q, k, places):
    return rotate_qk(q, k, places, rope)


def both(q, k, places):
    made, pull = jax.vjp(lambda q, k: turn(q, k, places), q, k)
    return made, pull(made)


expected = jax.jit(both)(q, k, places)
specs = {
    "batch and sequence": (P("a", "b"), P("b")),
    "sequence, its positions everywhere": (P(None, ("a", "b")), P()),
    "heads": (P(None, None, ("a", "b")), P()),
    "batch and heads": (P("a", None, "b"), P()),
}
for name, (spec, spec_of_places) in specs.items():
    put = [jax.device_put(x, NamedSharding(mesh, spec)) for x in (q, k)]
    put.append(jax.device_put(places, NamedSharding(mesh, spec_of_places)))
    compiled = jax.jit(both).lower(*put).compile()
    text = compiled.as_text()
    for word in ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"):
        assert word not in text, (name, word)
    found = compiled(*put)
    for y, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert y.sharding.is_equivalent_to(NamedSharding(mesh, spec), y.ndim), name
        assert np.array_equal(y, right), name

spec = P("a", "b")
mapped = jax.shard_map(both, mesh=mesh, in_specs=(spec, spec, P("b")), out_specs=spec)
text = jax.jit(mapped).lower(q, k, places).compile().as_text()
assert "collective" not in text and "all-" not in text
for y, right in zip(jax.tree.leaves(jax.jit(mapped)(q, k, places)), jax.tree.leaves(expected)):
    assert np.array_equal(y, right)
print("right")
"""


def test_shards_do_not_communicate_and_keep_their_bits() -> None:
    """Forwards and back, under jit over sharded arrays and in `shard_map`."""
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    command = [sys.executable, "-W", "error", "-c", PROGRAM]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert ran.stdout == "right\n", ran.stderr
