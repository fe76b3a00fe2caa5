"""What torch's verbs refuse, JAX's do, in the same words; and what JAX would cut without one."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from phasor import LayerRopes, Rope
from phasor.errors import PhasorError, PositionError, SpecError, TensorError

from ..rotation_cases import RULE, THREE

HALF = Rope(head_dim=8, pairing="half")
LAYERS = LayerRopes(name="two", layer_kinds=("a", "a"), kinds={"a": HALF})
LEADING = "must broadcast to the leading dimensions [4] of x [..., seq, heads, head_dim], got"
NUMBERS = "positions must be integers, float32 or float64, got"

REFUSALS: dict[str, tuple[type[PhasorError], dict[str, Any]]] = {
    "x must be a jax.Array, got ndarray": (TensorError, {"x": np.zeros((4, 2, 8))}),
    "x must be float64, float32, bfloat16 or float16, got int32": (
        TensorError,
        {"x": ("zeros", (4, 2, 8), "int32")},
    ),
    "x must be [..., seq, heads, head_dim], got shape [4, 8]": (
        TensorError,
        {"x": ("zeros", (4, 8), "float32")},
    ),
    "x must end in head_dim (8), got 6": (TensorError, {"x": ("zeros", (4, 2, 6), "float32")}),
    f"{NUMBERS} bool: this is a mask": (PositionError, {"positions": ("ones", 4, "bool")}),
    f"{NUMBERS} bfloat16: bfloat16 cannot tell 256 from 257": (
        PositionError,
        {"positions": ("ones", 4, "bfloat16")},
    ),
    f"{NUMBERS} complex64: a position is a real number": (
        PositionError,
        {"positions": ("ones", 4, "complex64")},
    ),
    f"positions {LEADING} [5]": (PositionError, {"positions": ("ones", 5, "int32")}),
    f"positions {LEADING} [1, 4]": (PositionError, {"positions": np.zeros((1, 4), int)}),
    "positions must end in one coordinate per axis (3) for Sectioned axes, got shape [4]": (
        PositionError,
        {"rope": THREE, "positions": ("ones", 4, "int32")},
    ),
    "positions must be finite and below 2**63, got nan": (
        PositionError,
        {"positions": [0.0, float("nan"), 1.0, 2.0]},
    ),
    "positions must fit int32, got 1099511627781, because jax_enable_x64 is off": (
        PositionError,
        {"positions": np.array([1, 2**40 + 5, 2**33, 2])},
    ),
    "positions must fit int32, got -2147483649, because": (
        PositionError,
        {"positions": -(2**31) - 1},
    ),
    "rope must be a phasor.Rope, got LayerRopes, the ropes of 2 layers: take ropes[0]": (
        SpecError,
        {"rope": LAYERS},
    ),
    "use rope.at(seq_len)": (SpecError, {"rope": RULE}),
    "inverse must be True or False, got 'no'": (SpecError, {"inverse": "no"}),
    "heads_first must be True or False, got 1": (SpecError, {"heads_first": 1}),
    "gain must be a finite number, got nan": (SpecError, {"gain": float("nan")}),
}


@pytest.mark.parametrize("text", REFUSALS)
def test_what_does_not_fit_is_refused(text: str) -> None:
    """With the argument's name, what was expected and what came."""
    import jax.numpy as jnp

    from phasor.jax import rotate

    error, changed = REFUSALS[text]
    given: dict[str, Any] = {"x": jnp.zeros((4, 2, 8)), "positions": [0, 1, 2, 3], "rope": HALF}
    for name, value in changed.items():
        if isinstance(value, tuple):
            make, shape, dtype = value
            value = getattr(jnp, make)(shape, dtype)
        given[name] = value
    with pytest.raises(error, match=re.escape(text)):
        rotate(**given)


def test_query_and_key_share_their_tokens() -> None:
    """Where they would with heads first, that is said."""
    import jax.numpy as jnp

    from phasor.jax import rotate_qk

    q, k = jnp.zeros((2, 5, 8)), jnp.zeros((1, 5, 8))
    with pytest.raises(TensorError, match=r"share their tokens .* pass heads_first=True"):
        rotate_qk(q, k, 3, HALF)


def test_rows_that_do_not_fit_are_refused() -> None:
    """By their dtype, shape, width and pairing."""
    import jax.numpy as jnp

    from phasor.jax import Rotation

    x, row = jnp.zeros((4, 2, 8)), jnp.zeros((4, 4))
    for rows, more, text in (
        ((row, np.zeros((4, 4))), {}, "sin must be a jax.Array, got ndarray"),
        ((row, row[0]), {}, "sin must have the shape of cos [4, 4], got [4]"),
        ((row, row), {"rotary_start": 1}, "cos must hold one entry per pair"),
        ((row[:3], row[:3]), {}, "cos and sin must broadcast to the leading dimensions [4]"),
        ((row, row), {"pairing": "neox"}, "pairing must be 'half' or 'interleaved', got 'neox'"),
    ):
        with pytest.raises(PhasorError, match=re.escape(text)):
            Rotation(*rows, **{"pairing": "half", **more})(x)
    for dtype in (jnp.bfloat16, jnp.float64):
        with pytest.raises(SpecError, match=r"dtype must be float32 \(float64 with jax_enable_x64"):
            Rotation.at([1], HALF, dtype=dtype)


def test_positions_want_no_gradient() -> None:
    """Silence would be a gradient of zero."""
    import jax
    import jax.numpy as jnp

    from phasor.jax import rotate

    x, places = jnp.ones((4, 2, 8)), jnp.arange(4.0)
    with pytest.raises(
        PositionError, match="must not require a gradient, because none is computed"
    ):
        jax.jit(jax.grad(lambda p: rotate(x, p, HALF).sum()))(places)
    with pytest.raises(
        PositionError, match="must not require a gradient, because none is computed"
    ):
        jax.jvp(lambda p: rotate(x, p, HALF), (places,), (places,))
