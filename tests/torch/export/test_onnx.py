"""Every layout of a rotation becomes the standard's operator; two engines give the true numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from phasor import Rope
from phasor.axes import Sectioned
from phasor.torch import Rotation, rotate
from phasor.torch import export as bridge

from ..torch_arrays import normal
from .onnx_engines import (
    PLACES,
    PLAIN,
    WAYS,
    Turner,
    by_onnxruntime,
    by_reference,
    exported,
    operators,
    room,
    truth,
)

ROPES = {
    "half": PLAIN,
    "interleaved": Rope(head_dim=8, pairing="interleaved"),
    "part": Rope(head_dim=12, rotary_dim=8, pairing="half"),
    "interleaved part": Rope(head_dim=12, rotary_dim=4, pairing="interleaved"),
    "in the middle": Rope(head_dim=12, rotary_dim=6, rotary_start=3, pairing="half"),
    "reads one, writes the other": Rope(head_dim=8, pairing="interleaved", pairing_out="half"),
    "all at once": Rope(
        head_dim=12,
        rotary_dim=8,
        rotary_start=2,
        pairing="half",
        pairing_out="interleaved",
        direction=-1,
    ),
}


@pytest.mark.parametrize(
    ("name", "way"),
    [*((name, "table") for name in ROPES), ("half", "formula"), ("all at once", "formula")],
)
def test_every_layout_becomes_the_standards_operator(name: str, way: str) -> None:
    """Named once for each tensor; both engines within a row's error of the truth."""
    rope = ROPES[name]
    x = normal(2, 5, 3, rope.head_dim)
    program = exported(
        lambda x, p: rotate(x, p, rope), x, torch.from_numpy(PLACES), longest=WAYS[way]
    )
    assert operators(program)["RotaryEmbedding"] == 1
    expected = truth(x.numpy(), PLACES, rope)
    for engine in (by_reference, by_onnxruntime):
        found = engine(program)(x.numpy(), PLACES)[0]
        assert found.dtype == np.float32
        assert np.abs(found - expected).max() <= room(x.numpy())
        # other sizes than those of the example
        found = engine(program)(x.numpy()[:1, :1], PLACES[:1, 3:4])[0]
        other = truth(x.numpy()[:1, :1], PLACES[:1, 3:4], rope)
        assert np.abs(found - other).max() <= room(x.numpy())


def test_the_file_names_the_operator_of_opset_23_and_its_attributes() -> None:
    """A checker of the standard accepts it."""
    import onnx

    rope = ROPES["interleaved part"]
    x, places = normal(2, 5, 3, 12), torch.from_numpy(PLACES)
    program = exported(lambda x, p: rotate(x, p, rope), x, places, longest=64)
    model = program.model_proto
    onnx.checker.check_model(model, full_check=True)
    assert [opset.version for opset in model.opset_import if not opset.domain] == [23]
    (node,) = (node for node in model.graph.node if node.op_type == "RotaryEmbedding")
    said = {attribute.name: attribute.i for attribute in node.attribute}
    assert said == {"interleaved": 1, "num_heads": 3, "rotary_embedding_dim": 4}
    stored = {one.name: list(one.dims) for one in model.graph.initializer}
    # cos and sin of the tokens, which are rows of tables
    assert len(node.input) == 3
    looked_up = [one.input[0] for one in model.graph.node if one.op_type == "Gather"]
    assert [stored[name] for name in looked_up if name in stored].count([64, 2]) == 2


@pytest.mark.parametrize("way", WAYS)
def test_inverse_and_gain_are_in_the_rows(way: str) -> None:
    """A sign of sin, and a factor on both; coordinates that do not turn are left alone."""
    rope = ROPES["all at once"]
    x = normal(2, 5, 3, 12)
    program = exported(
        lambda x, p: rotate(x, p, rope, inverse=True, gain=1.25),
        x,
        torch.from_numpy(PLACES),
        longest=WAYS[way],
    )
    expected = truth(x.numpy(), PLACES, rope, inverse=True)
    expected[..., 2:10] /= 1.25
    for engine in (by_reference, by_onnxruntime):
        found = engine(program)(x.numpy(), PLACES)[0]
        assert np.abs(found - expected).max() <= 1.25 * room(x.numpy()) * 2


def test_the_formula_reaches_where_no_table_does() -> None:
    """Every int64 position; a float without an angle is NaN."""
    far = np.array(
        [[2**63 - 1, -(2**63), 123_456_789_012, -1, 0], [2**31, 2**32, -(2**31), -1025, 4]]
    )
    x = normal(2, 5, 2, 8)
    program = exported(lambda x, p: rotate(x, p, PLAIN), x, torch.from_numpy(far))
    for engine in (by_reference, by_onnxruntime):
        found = engine(program)(x.numpy(), far)[0]
        assert np.abs(found - truth(x.numpy(), far, PLAIN)).max() <= room(x.numpy())
    none = torch.tensor([[torch.nan, 2.0**63, -torch.inf, 0.5, 7.0]] * 2)
    program = exported(lambda x, p: rotate(x, p, PLAIN), x, none)
    found = np.isnan(by_onnxruntime(program)(x.numpy(), none.numpy())[0])
    assert found.all((-1, -2)).tolist() == [[True, True, True, False, False]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fractions_of_positions_are_turned_by(dtype: torch.dtype) -> None:
    """Halves and eighths, which float32 holds too."""
    places = torch.tensor([[0.5, 1.125, -3.25, 1000.75, 2.0]] * 2, dtype=dtype)
    rope = ROPES["all at once"]
    x = normal(2, 5, 2, 12)
    program = exported(lambda x, p: rotate(x, p, rope), x, places)
    expected = truth(x.numpy(), places.numpy(), rope)
    for engine in (by_reference, by_onnxruntime):
        found = engine(program)(x.numpy(), places.numpy())[0]
        assert np.abs(found - expected).max() <= 2 * room(x.numpy())


def test_several_axes_become_rows_of_their_own() -> None:
    """Each pair follows its axis."""
    rope = Rope(head_dim=8, pairing="half", axes=Sectioned((2, 1, 1)))
    places = np.random.default_rng(0).integers(0, 5000, (2, 5, 3))
    x = normal(2, 5, 3, 8)
    program = exported(lambda x, p: rotate(x, p, rope), x, torch.from_numpy(places))
    for engine in (by_reference, by_onnxruntime):
        found = engine(program)(x.numpy(), places)[0]
        assert np.abs(found - truth(x.numpy(), places, rope)).max() <= room(x.numpy())


@pytest.mark.parametrize(
    ("lead", "places"),
    [((5,), (5,)), ((2, 5), (5,)), ((2, 5), (2, 1)), ((2, 3, 5), (3, 5)), ((2, 5), ())],
    ids=str,
)
def test_positions_broadcast_against_any_leading_dimensions(
    lead: tuple[int, ...], places: tuple[int, ...]
) -> None:
    """The operator knows one batch; the file has the shapes that came."""
    at = np.random.default_rng(0).integers(0, 64, places)
    x = normal(*lead, 3, 8)
    for longest in (None, 64):
        program = bridge.export(
            Turner(lambda x, p: rotate(x, p, PLAIN)).eval(),
            (x, torch.from_numpy(np.asarray(at))),
            longest=longest,
        )
        found = by_onnxruntime(program)(x.numpy(), np.asarray(at))[0]
        expected = truth(x.numpy(), np.broadcast_to(at, lead), PLAIN)
        assert found.shape == expected.shape
        assert np.abs(found - expected).max() <= room(x.numpy())


def test_rows_that_are_given_are_its_inputs() -> None:
    """rotate_by, with rows made in the graph."""

    def turned(x: Tensor, p: Tensor) -> Tensor:
        angles = p[..., None] * torch.tensor([1.0, 0.5])
        return Rotation(angles.cos(), angles.sin(), pairing="half", rotary_start=1)(x)

    x, places = normal(2, 5, 3, 8), normal(2, 5)
    program = exported(turned, x, places)
    angles = places.numpy()[..., None, None] * np.array([1.0, 0.5], dtype=np.float32)
    a, b = x.numpy()[..., 1:3], x.numpy()[..., 3:5]
    expected = x.numpy().copy()
    expected[..., 1:3] = a * np.cos(angles) - b * np.sin(angles)
    expected[..., 3:5] = a * np.sin(angles) + b * np.cos(angles)
    for engine in (by_reference, by_onnxruntime):
        assert np.abs(engine(program)(x.numpy(), places.numpy())[0] - expected).max() <= 1e-5
