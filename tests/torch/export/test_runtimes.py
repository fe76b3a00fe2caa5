"""Runtimes that read torch's own programs turn as everything does, each where it is installed.

`python tools/machines.py --only runtimes` installs them beside what is here.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import openvino
import pytest
import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from phasor.torch import rotate

from ..torch_arrays import normal
from .onnx_engines import FAR, LLAMA, Turner, room, truth

# those of converters and their libraries
pytestmark = pytest.mark.filterwarnings("ignore")

Run = Callable[[Tensor, Tensor], Tensor]
X = normal(2, 5, 3, LLAMA.head_dim)
MODEL = Turner(lambda x, p: rotate(x, p, LLAMA, backend="eager")).eval()
integers = pytest.mark.parametrize("dtype", [torch.int64, torch.int32])


def program_of(dtype: torch.dtype, *, changing: bool = False) -> ExportedProgram:
    """The rotation as a program of plain operations, of any batch and length or of these."""
    shape = {0: Dim("batch", min=1, max=2), 1: Dim("seq", min=1, max=8)}
    given = X, torch.from_numpy(FAR).to(dtype)
    return torch.export.export(MODEL, given, dynamic_shapes=(shape, shape) if changing else None)


def assert_turned(run: Run, dtype: torch.dtype, *, changing: bool = False) -> None:
    """Within the bound of every backend."""
    for rows in (np.s_[:, :], np.s_[:1, 1:3])[: 1 + changing]:
        found = run(X[rows].contiguous(), torch.from_numpy(FAR[rows].copy()).to(dtype))
        expected = truth(X[rows].numpy(), FAR[rows], LLAMA)
        assert np.abs(np.asarray(found) - expected).max() <= room(X.numpy())


@integers
@pytest.mark.parametrize("delegate", ["portable", "XNNPACK"])
def test_executorch_turns(delegate: str, dtype: torch.dtype) -> None:
    """Its own kernels and XNNPACK's."""
    exir = pytest.importorskip("executorch.exir")
    runtime = pytest.importorskip("executorch.runtime")
    partitioners = []
    if delegate == "XNNPACK":
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

        partitioners = [XnnpackPartitioner()]
    program = program_of(dtype, changing=True)
    lowered = exir.to_edge_transform_and_lower(program, partitioner=partitioners).to_executorch()
    method = runtime.Runtime.get().load_program(lowered.buffer).load_method("forward")
    assert_turned(lambda *given: method.execute(given)[0], dtype, changing=True)


@integers
def test_litert_turns(dtype: torch.dtype) -> None:
    """It makes int32 of int64 positions when it converts, and is given those."""
    converter = pytest.importorskip("litert_torch")
    edge = converter.convert(MODEL, (X, torch.from_numpy(FAR).to(dtype)))
    assert_turned(edge, torch.int32)


@integers
def test_openvino_reads_torchs_program(dtype: torch.dtype) -> None:
    """Without ONNX between."""
    model = openvino.convert_model(program_of(dtype, changing=True).run_decompositions())
    run = openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    assert_turned(lambda *given: run([each.numpy() for each in given])[0], dtype, changing=True)


@integers
def test_core_ml_keeps_integers(dtype: torch.dtype) -> None:
    """Converted alone, for it runs on a Mac: no quotient is of floats, which would round it."""
    converter = pytest.importorskip("coremltools")
    mil = converter.convert(
        program_of(dtype).run_decompositions({}),
        convert_to="milinternal",
        minimum_deployment_target=converter.target.iOS17,
    )
    operations = [one for each in mil.functions.values() for one in each.operations]
    quotients = [one for one in operations if one.op_type.endswith("div")]
    assert len(quotients) == (17 if dtype == torch.int64 else 9)
    assert {one.outputs[0].dtype.__type_info__().name for one in quotients} == {"int32"}
