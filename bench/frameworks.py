"""phasor in JAX and in MLX, beside what programs write there; each compiled, in one process.

In JAX that is a function of float32 angles, whose cos and sin are float32, or rounded to bfloat16
as those of MaxText and keras-hub are. In MLX it is ``mx.fast.rope``. Llama 3.1 8B's queries and
keys, decode with a position for each sequence; a gradient is forward and backward of a prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from report import Section
from timing import Times, interleave

from phasor import Rope
from phasor.numpy import rotate

#: By name, what returns when the work is done; and how NumPy reads the first of its results.
Calls = tuple[dict[str, Callable[[], Any]], Callable[[Any], Any]]
OURS, NAIVE, NARROW, FAST = "phasor", "float32 cosines", "bfloat16 cosines", "`mx.fast.rope`"
#: Batch and length of each work, and what phasor's time over another's is to be at most.
WORKS: dict[str, tuple[int, int, dict[str, float]]] = {
    "prefill": (1, 2048, {NAIVE: 0.75, NARROW: 1.2, FAST: 0.9}),
    "decode": (8, 1, {NAIVE: 0.5, NARROW: 1.2, FAST: 0.9}),
    "gradient": (1, 2048, {NAIVE: 1.0, NARROW: 1.2}),
}
QUICK = ("*, decode, float32",)
ROPE = Rope(head_dim=128, pairing="half", base=500_000.0)
HEADS = (32, 8)
_NOTE = """\
Milliseconds of phasor's call, and its time divided by the others' of the same run, with what is
promised: below 1, phasor is faster. Angles of float32 are off by 1e-2 at position 131,072, phasor's
by 1.3e-7 everywhere."""


def time_jax(work: str, dtype: str, inputs: list[Any], first: Any) -> Calls:
    """Compiled functions of JAX; results are read as they are."""
    import jax
    import jax.numpy as jnp

    from phasor.jax import rotate_qk

    inv_freq = jnp.asarray(ROPE.inv_freq, jnp.float32)
    q, k = (jnp.asarray(x, dtype) for x in inputs)
    positions = jnp.asarray(first[:, None] + np.arange(q.shape[1]), jnp.int32)

    def plain(q: Any, k: Any, positions: Any, *, narrow: bool) -> Any:
        angle = positions[..., None, None].astype(jnp.float32) * inv_freq
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        if narrow:
            cos, sin = cos.astype(q.dtype), sin.astype(q.dtype)
        rotated: list[Any] = []
        for x in (q, k):
            x0, x1 = jnp.split(x.astype(cos.dtype), 2, axis=-1)
            rotated.append(jnp.concatenate([x0 * cos - x1 * sin, x1 * cos + x0 * sin], -1))
        return [y.astype(q.dtype) for y in rotated]

    ways: dict[str, Any] = {
        OURS: lambda q, k, positions: rotate_qk(q, k, positions, ROPE),
        NAIVE: partial(plain, narrow=False),
    }
    if dtype == "bfloat16":
        ways[NARROW] = partial(plain, narrow=True)

    def call(way: Any) -> Callable[[], Any]:
        def step(q: Any, k: Any, positions: Any) -> Any:
            if work != "gradient":
                return way(q, k, positions)
            ys, pull = jax.vjp(lambda *xs: tuple(way(*xs, positions)), q, k)
            return *ys, *pull((q, k))

        compiled = jax.jit(step)
        return lambda: jax.block_until_ready(compiled(q, k, positions))

    return {name: call(way) for name, way in ways.items()}, partial(np.asarray, dtype=np.float32)


def time_mlx(work: str, dtype: str, inputs: list[Any], first: Any) -> Calls:
    """Compiled functions of MLX; results are read with tokens first."""
    import mlx.core as mx

    from phasor.mlx import RotaryEmbedding

    q, k = (mx.contiguous(mx.array(x).swapaxes(1, 2).astype(getattr(mx, dtype))) for x in inputs)
    offset = mx.array(first.astype(np.int32))
    mx.eval(q, k, offset)
    plain: Any = {"traditional": False, "base": ROPE.base, "scale": 1.0}
    ways: dict[str, Any] = {
        OURS: RotaryEmbedding(ROPE, heads_first=False),
        FAST: lambda x, offset: mx.fast.rope(x, 128, offset=offset, **plain),
    }

    def call(way: Any) -> Callable[[], Any]:
        def step(q: Any, k: Any, offset: Any) -> Any:
            if work != "gradient":
                return way(q, offset), way(k, offset)
            ys, grads = mx.vjp(lambda *xs: [way(x, offset) for x in xs], [q, k], [q, k])
            return *ys, *grads

        compiled = mx.compile(step)

        def run() -> Any:
            outputs = compiled(q, k, offset)
            mx.eval(outputs)
            return outputs

        return run

    def to_numpy(y: Any) -> Any:
        return np.array(y.swapaxes(1, 2).astype(mx.float32))

    return {name: call(way) for name, way in ways.items()}, to_numpy


def time_work(make: Any, work: str, dtype: str, seconds: float) -> dict[str, list[float]]:
    """Times of each function, whose results are right."""
    batch, seq, _ = WORKS[work]
    draw = np.random.default_rng(0)
    inputs = [draw.standard_normal((batch, seq, n, 128), np.float32) for n in HEADS]
    first = 997 * np.arange(batch)
    calls, to_numpy = make(work, dtype, inputs, first)
    positions = first[:, None] + np.arange(seq)
    # the query, and its gradient where there is one
    exact = [rotate(inputs[0], positions, ROPE, inverse=inverse) for inverse in (False, True)]
    for name, call in calls.items():
        for result, y in zip(call()[::2], exact, strict=False):
            error = np.abs(to_numpy(result) - y).max()
            assert error < 2.0**-2, (
                name,
                error,
            )  # of bfloat16 cosines, products and sums, up to 12
    return interleave(calls, seconds=3 * seconds, warm=seq == 1, rounds=(5, 400))


def steps(device: Any, seconds: float) -> dict[str, Callable[[], Any]]:
    """Every work in both frameworks and dtypes."""
    return {
        f"{title}, {work}, {dtype}": partial(time_work, make, work, dtype, seconds)
        for title, make in (("JAX", time_jax), ("MLX", time_mlx))
        for work in WORKS
        for dtype in ("float32", "bfloat16")
    }


def sections(results: Mapping[str, Any], device: str) -> Iterator[Section]:
    """A table for each framework."""
    for title in ("JAX", "MLX"):
        rows: dict[str, dict[str, str]] = {}
        for name, plain in results.items():
            framework, work, dtype = name.split(", ")
            if framework != title:
                continue
            times, limits = Times(plain), WORKS[work][2]
            row = rows[f"{work}, {dtype}"] = {"phasor, ms": f"{1e3 * times.median(OURS):.3f}"}
            for rival in (label for label in times if label != OURS):
                ratio, limit = times.ratio(OURS, rival), limits.get(rival)
                verdict = "held" if limit is None or ratio.median <= limit else "**short**"
                row[f"phasor / {rival}"] = str(ratio) + (f", {verdict}: ≤ {limit}" if limit else "")
        yield Section(title, _NOTE if title == "JAX" else "", rows, corner="work, dtype of q and k")
