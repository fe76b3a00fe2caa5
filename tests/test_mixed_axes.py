"""Axes that mix: a pair's angle is a sum over axes, exact at every position in every backend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phasor import Rope, diff, identify, preset, translate, verify
from phasor.angles import COS_SIN_ERROR, COS_SIN_ERROR_FLOAT32, cos_sin
from phasor.axes import Axial, Mixed, Sectioned
from phasor.describe import pair_rows, sentences
from phasor.errors import PhasorError, SpecError
from phasor.extending.laws import extended_ropes
from phasor.extending.planning import plan_extension
from phasor.numpy import rotate
from phasor.papers import angle_errors
from phasor.torch import Rotation, rotate_
from phasor.torch import rotate as torch_rotate
from phasor.torch.export import export

from . import oracle
from .each import each

FREQUENCIES = np.random.default_rng(0).standard_normal((2, 6)).round(6)
ROPE = Rope(head_dim=14, rotary_dim=12, pairing="half", axes=Mixed(FREQUENCIES))
FAR = [[0, 0], [3, -5], [2**62, -(2**61)], [-(2**63), 2**63 - 1], [2**63 - 1, 2**63 - 1]]
# whole turns are left out by each term, or by the sum alone
NEAR = [[p, q] for p in (0, 1, -7, 1000) for q in (0, 2, 31)]


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=3, max_size=3), st.randoms())
def test_the_sum_of_angles_is_exact(position: list[int], random: Any) -> None:
    """At every int64 position on three axes, with frequencies of either sign."""
    rows = [[random.uniform(-9, 9) for _ in range(3)] for _ in range(3)]
    rope = Rope(head_dim=6, pairing="half", axes=Mixed(rows), direction=random.choice([1, -1]))
    cos, sin = oracle.cos_sin(rope, position)
    for found, exact in zip(cos_sin(position, rope), (cos, sin), strict=True):
        assert max(abs(f - e) for f, e in zip(found.tolist(), exact, strict=True)) < COS_SIN_ERROR


def test_angles_that_cancel_leave_nothing() -> None:
    """In integers p f - p f is 0, where floats leave the rounding of each."""
    rope = Rope(head_dim=4, pairing="half", axes=Mixed([[1e5, 0.1], [-1e5, 0.1]]))
    cos, sin = cos_sin([[2**61 + 1] * 2, [-(2**63)] * 2], rope)
    assert cos[:, 0].tolist() == [1, 1]
    # each product is less than four units of 2**-64 turns too small
    assert np.abs(sin[:, 0]).max() < 4 * 2 * np.pi * 2.0**-64


def test_one_frequency_a_pair_is_a_layout_of_its_own() -> None:
    """With zeros elsewhere it turns as sectioned axes do, bit by bit."""
    sectioned = Rope(head_dim=8, pairing="half", axes=Sectioned((1, 3)))
    axes = sectioned.axes.axis_of_pair(4)
    rows = [[f * (axis == own) for f, own in zip(sectioned.inv_freq, axes, strict=True)]
            for axis in (0, 1)]  # fmt: skip
    mixed = Rope(head_dim=8, pairing="half", axes=Mixed(rows))
    explicit = Rope(
        head_dim=8,
        pairing="half",
        axes=Sectioned((1, 3)),
        explicit_inv_freq=tuple(sectioned.inv_freq),
    )
    for found, exact in zip(cos_sin(FAR, mixed), cos_sin(FAR, explicit), strict=True):
        np.testing.assert_array_equal(found, exact)
    np.testing.assert_allclose(mixed.inv_freq, explicit.inv_freq, rtol=2.0**-52)


@each("backend, dtype, places", [
    (backend, dtype, places)
    for backend in ("auto", "cpu", "eager")
    for dtype in (torch.float64, torch.float32)
    for places in (FAR, (np.array(NEAR) / 4).tolist())
])  # fmt: skip
def test_torch_turns_as_numpy_does(backend: Any, dtype: torch.dtype, places: Any) -> None:
    """In new tensors and in place, at whole positions and between; and back."""
    x = torch.randn(len(places), 3, 14, dtype=dtype, generator=torch.Generator().manual_seed(0))
    exact = rotate(x.double().numpy(), places, ROPE)
    bound = COS_SIN_ERROR if dtype == torch.float64 else COS_SIN_ERROR_FLOAT32 + 6e-9
    # two products and their sum, each rounded once
    allowed = 2 * float(x.abs().max()) * (bound + 2 * torch.finfo(dtype).eps)
    positions = torch.tensor(places)
    y = torch_rotate(x, positions, ROPE, backend=backend)
    assert np.abs(y.double().numpy() - exact).max() < allowed
    assert torch.equal(rotate_(x.clone(), positions, ROPE, backend=backend), y)
    back = torch_rotate(y, positions, ROPE, inverse=True, backend=backend)
    assert (back - x).abs().max() < 2 * allowed


def test_gradients_caches_and_transformations_know_axes_that_mix() -> None:
    """The backward pass is the inverse; torch.func, and NaN, which no sum hides."""
    x = torch.randn(4, 2, 14, dtype=torch.float64, requires_grad=True)
    positions = torch.tensor(NEAR[:4])
    assert torch.autograd.gradcheck(lambda x: torch_rotate(x, positions, ROPE), x)
    turned = torch.func.vmap(lambda x: torch_rotate(x, positions, ROPE))(x.detach()[None])
    torch.testing.assert_close(turned[0], torch_rotate(x.detach(), positions, ROPE))
    lost = positions.double().masked_fill(
        torch.tensor([[True, False]] + [[False] * 2] * 3), torch.nan
    )
    y = torch.func.vmap(lambda x: torch_rotate(x, lost, ROPE))(x.detach()[None])[0]
    assert y[0, :, :12].isnan().all()
    assert not y[1:].isnan().any()


@pytest.mark.slow
@pytest.mark.compile
def test_compilers_are_given_the_sum() -> None:
    """Inductor's code is right as well."""
    x = torch.randn(5, 3, 14)
    compiled = torch.compile(lambda x, p: torch_rotate(x, p, ROPE), fullgraph=True)
    y = compiled(x, torch.tensor(FAR))
    assert np.abs(y.numpy() - rotate(x.numpy(), FAR, ROPE)).max() < 2e-6


@pytest.mark.slow
@pytest.mark.onnx
@each("scale", [1, 2**55, 0.25])
def test_onnx_is_given_the_sum(tmp_path: Path, scale: float) -> None:
    """At positions as large as they come, and between them."""
    runtime = pytest.importorskip("onnxruntime")

    class Turn(torch.nn.Module):
        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return torch_rotate(x, positions, ROPE)

    x, positions = torch.randn(1, len(NEAR), 3, 14), torch.tensor(NEAR) * scale
    export(Turn(), (x, positions)).save(tmp_path / "turn.onnx")
    session = runtime.InferenceSession(tmp_path / "turn.onnx")
    names = [value.name for value in session.get_inputs()]
    (y,) = session.run(None, dict(zip(names, (x.numpy(), positions.numpy()), strict=True)))
    exact = rotate(x.numpy(), positions.numpy(), ROPE)
    assert np.abs(y - exact).max() < 2 * float(x.abs().max()) * (COS_SIN_ERROR_FLOAT32 + 5e-7)


@pytest.mark.slow
def test_jax_and_mlx_turn_as_numpy_does() -> None:
    """At positions that int32 holds, of their own arrays and of NumPy's, and between them."""
    import jax.numpy as jnp
    import mlx.core as mx

    import phasor.jax
    import phasor.mlx

    x = np.random.default_rng(0).standard_normal((12, 3, 14)).astype(np.float32)
    ways = ((phasor.jax, jnp.asarray), (phasor.mlx, mx.array))
    for places in (np.array(NEAR, np.int32) * 100_003, np.array(NEAR, np.float32) / 4):
        exact = rotate(x, places, ROPE)
        for library, array in ways:
            for given_places in (places, array(places)):
                y = np.asarray(library.rotate(array(x), given_places, ROPE))
                assert np.abs(y - exact).max() < 2 * np.abs(x).max() * (
                    COS_SIN_ERROR_FLOAT32 + 5e-7
                )


@pytest.mark.slow
@pytest.mark.parametrize("indexing", ["ij", "xy"])
def test_it_is_timms_mixed_embedding(indexing: str) -> None:
    """By head, with frequencies of each; and shared by all heads where these are equal."""
    mixed = pytest.importorskip("timm.layers.pos_embed_sincos")
    depth, heads, width, shape = 2, 4, 16, [5, 7]
    torch.manual_seed(0)
    embedding = mixed.RotaryEmbeddingMixed(
        heads * width, depth, heads, feat_shape=shape, grid_indexing=indexing
    )
    theirs = embedding.get_embed(shape).detach()  # [depth, heads, seq, 2 * width]
    rows, columns = np.indices(shape)
    if indexing == "xy":
        rows, columns = columns, rows
    positions = np.stack((rows.ravel(), columns.ravel()), -1)
    x = torch.randn(1, heads, 35, width)
    for block in range(depth):
        expected = mixed.apply_rot_embed_cat(x, theirs[block])
        ropes = [
            Rope(head_dim=width, pairing="interleaved", axes=Mixed(own.tolist()))
            for own in embedding.freqs.detach()[:, block].unbind(1)
        ]
        parts = zip(*(cos_sin(positions, rope) for rope in ropes), strict=True)
        # [seq, heads, num_pairs]
        cos, sin = (torch.tensor(np.stack(part, 1)).float() for part in parts)
        y = Rotation(cos[None], sin[None], pairing="interleaved")(x, heads_first=True)
        torch.testing.assert_close(y, expected, rtol=0, atol=4e-6)
        for head, rope in enumerate(ropes):
            sin_cos = np.concatenate(
                [side.repeat(2, -1) for side in cos_sin(positions, rope)[::-1]], -1
            )
            np.testing.assert_allclose(sin_cos, theirs[block, head], rtol=0, atol=1e-6)
            alone = torch_rotate(x[:, [head]], torch.tensor(positions), rope, heads_first=True)
            torch.testing.assert_close(alone, expected[:, [head]], rtol=0, atol=4e-6)


def test_it_is_a_value_like_any_rope() -> None:
    """Equal after JSON, with one zero and one text; float32 frequencies are rounded each."""
    assert Rope.from_json(ROPE.to_json()) == ROPE == Rope.from_dict(ROPE.to_dict())
    assert json.loads(ROPE.to_json())["axes"] == {
        "layout": "mixed", "inv_freq": FREQUENCIES.tolist(),
    }  # fmt: skip
    zeros = [Rope(head_dim=2, pairing="half", axes=Mixed([[z], [1]])) for z in (0.0, -0.0)]
    assert hash(zeros[0]) == hash(zeros[1])
    assert zeros[0] == zeros[1]
    assert np.allclose(ROPE.inv_freq, np.hypot(*FREQUENCIES))
    rounded = Rope(
        head_dim=12, pairing="half", axes=ROPE.axes, inv_freq_dtype="float32", direction=-1
    )
    cos, sin = cos_sin([12345, -777], rounded)
    exact = oracle.cos_sin(rounded, [12345, -777])
    assert (
        max(abs(f - e) for f, e in zip([*cos, *sin], [*exact[0], *exact[1]], strict=True)) < 1e-15
    )


@each("fields, message", [
    ({"axes": [[1.0] * 6]}, "a row for each of two axes or more"),
    ({"axes": [[1.0] * 6, [1.0] * 5]}, "with a number for each pair"),
    ({"axes": [[1.0] * 6, [float("nan")] * 6]}, r"inv_freq\[1\]\[0\] must be a finite number"),
    ({"axes": 3}, "a row for each of two axes or more, .* got 3"),
    ({"axes": [[1.0] * 5] * 2}, "must hold one number per pair .* = 6., got 5"),
    ({"axes": [[1.0] * 6] * 2, "base": 1e4}, "holds the frequencies: drop base"),
    ({"axes": [[1.0] * 6] * 2, "explicit_inv_freq": (1.0,) * 6}, "drop explicit_inv_freq"),
])  # fmt: skip
def test_what_is_no_such_layout_is_refused(fields: dict[str, Any], message: str) -> None:
    """Rows that are missing, uneven or no numbers, and frequencies said twice."""
    with pytest.raises(SpecError, match=message):
        Rope(head_dim=12, pairing="half", **fields | {"axes": Mixed(fields["axes"])})


def test_learned_frequencies_are_asked_for_as_numbers() -> None:
    """What follows the error's advice is taken."""
    learned = torch.nn.Parameter(torch.tensor(FREQUENCIES))
    with pytest.raises(
        SpecError, match=r"^inv_freq\[0\]\[0\] must .* call \.tolist\(\) on tensors and arrays$"
    ):
        Mixed(learned)  # pyright: ignore[reportArgumentType]
    assert Mixed(learned.tolist()) == ROPE.axes


def test_pages_and_comparisons_say_what_mixes() -> None:
    """In sentences, in differences; no other program has it, and every axis turns every pair."""
    assert "2 position axes drive 6, 6 pairs, each turned by the sum over all axes." in sentences(
        ROPE, None
    )
    assert {row.axis for row in pair_rows(ROPE, None)} == {None}
    swapped = Rope(head_dim=14, rotary_dim=12, pairing="half", axes=Mixed(FREQUENCIES[::-1]))
    assert not diff(ROPE, ROPE)
    assert set(diff(ROPE, swapped).fields) == {"axes"}
    assert diff(ROPE, Rope(head_dim=14, rotary_dim=12, pairing="half", axes=Axial((3, 3))))
    with pytest.raises(SpecError, match="every axis turns every pair"):
        ROPE.axes.axis_of_pair(6)
    # what pairs would be without their frequencies is not near
    with pytest.raises(PhasorError, match=r"positions of 2 axes .Mixed., and nothing .* is near"):
        translate(ROPE, "vllm", context=64)
    assert preset("llama-3-8b")


def test_of_axes_that_mix_no_pair_is_said_to_part() -> None:
    """A pair has no one frequency to compare, and a page no room for all numbers."""
    wide = [
        Rope(head_dim=128, pairing="half", axes=Mixed(np.random.default_rng(i).random((3, 64))))
        for i in range(2)
    ]
    found = diff(*wide)
    assert found.earliest is None
    assert len(str(found)) < 200
    rounded = Rope(head_dim=128, pairing="half", axes=wide[0].axes, inv_freq_dtype="float32")
    assert diff(wide[0], rounded, context=10**6).pairs > 32


def test_a_longer_context_divides_every_frequency() -> None:
    """Linear interpolation is the one law that such a Rope can hold."""
    unchanged, linear = extended_ropes(ROPE, 100, 400).values()
    assert unchanged == ROPE
    assert linear.axes == Mixed(FREQUENCIES / 4)
    assert plan_extension(ROPE, 400, context=100).options["linear"].resolution < 1


def test_common_recipes_are_measured_on_the_sum() -> None:
    """In float64 they are nearly right, in bfloat16 they are not."""
    errors = [angle_errors(ROPE, NEAR, way).max() for way in ("float64 angle", "bfloat16 table")]
    assert errors[0] < 1e-11
    assert 1e-3 < errors[1] < 1e-2


def test_identify_and_verify_know_axes_that_mix() -> None:
    """No Rope is made up for such a function; a recording is compared with the one it is of."""
    found = identify(lambda x, p: rotate(x, p, ROPE), head_dim=14, n_axes=2)
    assert found.rope is None
    assert "more than one axis" in found.why_no_rope
    rng = np.random.default_rng(0)
    q, positions = rng.standard_normal((64, 2, 14)), rng.integers(0, 30, (64, 2))
    recording = {"positions": positions, "q": q, "q_rotated": rotate(q, positions, ROPE)}
    assert not verify(ROPE, recording)
    exchanged = recording | {"q_rotated": rotate(q, positions[:, ::-1], ROPE)}
    (side,) = verify(ROPE, exchanged).sides
    assert [change.name for change in side.changes] == ["axes"]
    for rope in (ROPE, Rope(head_dim=14, pairing="half", axes=Sectioned((3, 4)))):
        (side,) = verify(rope, recording | {"q_rotated": q}).sides
        assert [change.name for change in side.changes] == ["not-turned"]
