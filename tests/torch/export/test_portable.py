"""Exported graphs hold what every engine has, and engines other than onnxruntime turn alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from onnxruntime.transformers import float16

from phasor import Rope
from phasor.axes import Mixed, Sectioned
from phasor.errors import SpecError
from phasor.torch import export as bridge
from phasor.torch import rotate

from ..torch_arrays import normal
from .onnx_engines import (
    FAR,
    LLAMA,
    PLAIN,
    Turner,
    by_onnxruntime,
    by_openvino,
    by_reference,
    exported,
    operators,
    room,
    truth,
)

SLICE = Rope(
    head_dim=12,
    rotary_dim=8,
    rotary_start=2,
    pairing="half",
    pairing_out="interleaved",
    direction=-1,
)
# what integers become, and what floats need besides
OF_INTEGERS = {"Div", "Mul", "Sub", "Add", "Cast", "Abs", "Unsqueeze"}
OF_FLOATS = OF_INTEGERS | {"Round", "Less", "Where"}
AROUND = {"Gather", "Concat", "Reshape", "Expand", "Shape", "RotaryEmbedding", "Neg"}


ENGINES = {"reference": by_reference, "onnxruntime": by_onnxruntime, "OpenVINO": by_openvino}


@pytest.mark.parametrize("opset_version", [18, 23])
@pytest.mark.parametrize("rope", [LLAMA, SLICE], ids=["llama", "slice"])
def test_every_engine_turns_alike_at_far_positions(rope: Rope, opset_version: int) -> None:
    """With the operator of opset 23 and in plain products, at lengths of two kinds."""
    x = normal(2, 5, 3, rope.head_dim)
    program = exported(
        lambda x, p: rotate(x, p, rope), x, torch.from_numpy(FAR), opset_version=opset_version
    )
    for start in ENGINES.values():
        run = start(program)
        for rows in (np.s_[:, :], np.s_[:1, 1:3]):
            found = run(x.numpy()[rows], FAR[rows])[0]
            expected = truth(x.numpy()[rows], FAR[rows], rope)
            assert np.abs(found - expected).max() <= room(x.numpy())


@pytest.mark.parametrize(
    ("axes", "dtype", "options"),
    [
        (None, torch.int64, {}),
        (None, torch.int64, {"reach": 2**31}),
        (Sectioned((2, 1, 1)), torch.int32, {}),
        (Mixed(((1.0, 0.5, 0.25, 2.0), (0.5, -1.0, 0.0, 0.1))), torch.int64, {}),
        (Mixed(((1.0, 0.5, 0.25, 2.0), (0.5, -1.0, 0.0, 0.1))), torch.float32, {}),
        (None, torch.float64, {"reach": 2**31}),
    ],
    ids=str,
)
def test_no_graph_holds_what_engines_narrow_or_refuse(
    axes: Any, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """No shift, nothing bitwise, no unsigned number; of integers seven operators make the angle."""
    rope = Rope(head_dim=8, pairing="half", axes=axes) if axes else PLAIN
    shape = (2, 5) if rope.axes.n_axes == 1 else (2, 5, rope.axes.n_axes)
    places = torch.ones(shape, dtype=dtype)
    program = exported(
        lambda x, p: rotate(x, p, rope), normal(2, 5, 3, 8), places, opset_version=18, **options
    )
    allowed = OF_FLOATS if dtype.is_floating_point else OF_INTEGERS
    assert set(operators(program)) - AROUND <= allowed
    kinds = {tensor.data_type for tensor in program.model_proto.graph.initializer}
    assert kinds <= {1, 6, 7, 11}  # float32, int32, int64, float64
    assert all(node.name.startswith(bridge.NODES) for node in program.model_proto.graph.node)
    at = np.random.default_rng(0).integers(-9000, 9000, shape).astype(str(dtype)[6:])
    x = normal(2, 5, 3, 8).numpy()
    found = by_onnxruntime(program)(x, at)[0]
    # every further axis that mixes adds an error of its own
    assert np.abs(found - truth(x, at, rope)).max() <= room(x) * rope.axes.n_axes


@pytest.mark.parametrize("place", [0, 8000, 131_000, 16_000_000])
def test_a_graph_in_float16_is_as_right_far_out_as_near(place: int) -> None:
    """The converter of onnxruntime narrows every float; integers of at most 2**24 it leaves."""
    places = place + np.arange(10).reshape(2, 5)
    x = normal(2, 5, 3, 64)
    program = exported(lambda x, p: rotate(x, p, LLAMA), x, torch.from_numpy(places))
    half = float16.convert_float_to_float16(program.model_proto, keep_io_types=True)
    import onnxruntime as ort

    session = ort.InferenceSession(half.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    found = session.run(None, dict(zip(names, (x.numpy(), places), strict=True)))[0]
    error = np.abs(found - truth(x.numpy(), places, LLAMA)).max()
    # the polynomials, two products and x are rounded at 2**-11, at most eight times
    assert error <= 8 * 2**-11 * np.abs(x.numpy()).max()


# torch's own lowering still calls what torch deprecates
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_plain_operations_are_those_that_every_program_reads(dtype: torch.dtype) -> None:
    """Core ATen alone, without shifts, bits, signs or addcmul; and they turn."""
    module = Turner(lambda x, p: rotate(x, p, LLAMA, backend="eager")).eval()
    x, places = normal(2, 5, 3, 64), torch.from_numpy(FAR).to(dtype)
    program = torch.export.export(module, (x, places)).run_decompositions()
    targets = {node.target for node in program.graph.nodes if node.op == "call_function"}
    strangers = {str(t) for t in targets if torch.Tag.core not in t.tags}
    assert strangers <= {"aten._assert_tensor_metadata.default"}  # a check, which converters drop
    found = program.module()(x, places).numpy()
    assert np.abs(found - truth(x.numpy(), FAR, LLAMA)).max() <= room(x.numpy())


def test_reach_is_at_most_what_32_bits_hold() -> None:
    """The error says what to do."""
    with pytest.raises(SpecError, match="leave it out for every int64 position"):
        bridge.translation_table(reach=2**40)
