"""A function as an ONNX program, the engines that run it, and what they must say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime as ort
import openvino
import torch
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

from phasor import Rope
from phasor.angles import COS_SIN_ERROR_FLOAT32
from phasor.scaling import Llama3
from phasor.torch import export as bridge

from ...oracle import exact_rows

CHANGING = torch.export.Dim.DYNAMIC
PLAIN = Rope(head_dim=8, pairing="half", base=500_000.0)
LLAMA = Rope(
    head_dim=64,
    pairing="half",
    base=500_000.0,
    scaling=Llama3(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
    ),
)
WAYS = {"formula": None, "table": 4096}
PLACES = np.array([[0, 1, 5, 900, 1023], [1024, 2047, 3000, 4094, 4095]])
FAR = np.array([[0, 1, -1, 4095, 131_071], [2**24 + 1, -(2**24) - 1, 2**31 - 1, -(2**31), 8000]])


class Turner(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, positions: Tensor) -> Any:
        """What the function says."""
        return self.function(x, positions)


def exported(function: Callable[..., Any], x: Tensor, places: Tensor, **more: Any) -> Any:
    """The function as an ONNX program for every batch and length."""
    shapes = ({0: CHANGING, 1: CHANGING}, dict.fromkeys(range(min(places.dim(), 2)), CHANGING))
    return bridge.export(Turner(function).eval(), (x, places), dynamic_shapes=shapes, **more)


def by_reference(program: Any) -> Callable[..., list[np.ndarray]]:
    """The standard's own evaluator."""
    run = ReferenceEvaluator(program.model_proto)
    return lambda *given: run.run(None, dict(zip(run.input_names, given, strict=True)))


def by_onnxruntime(program: Any) -> Callable[..., list[np.ndarray]]:
    """The engine that most people run."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = ort.InferenceSession(
        program.model_proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = [given.name for given in session.get_inputs()]
    return lambda *given: session.run(None, dict(zip(names, given, strict=True)))


def by_openvino(program: Any) -> Callable[..., list[np.ndarray]]:
    """OpenVINO on this processor, in float32."""
    core = openvino.Core()
    model = core.read_model(program.model_proto.SerializeToString())
    run = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda *given: [run([*given])[0]]


def operators(program: Any) -> Counter[str]:
    """How often the file names each operator."""
    return Counter(node.op_type for node in program.model_proto.graph.node)


def truth(x: np.ndarray, places: np.ndarray, rope: Rope, *, inverse: bool = False) -> np.ndarray:
    """Complex multiplication by 60-digit turns, coordinate by coordinate."""
    z = exact_rows(rope, places)[..., None, :]
    z = z.conj() if inverse else z
    source, target = rope.pairing, rope.pairing_out or rope.pairing
    source, target = (target, source) if inverse else (source, target)
    pairs, start = rope.rotary_dim // 2, rope.rotary_start
    y = x.astype(np.float64).copy()

    def member(pairing: str, k: int, which: int) -> int:
        return start + (k + which * pairs if pairing == "half" else 2 * k + which)

    for k in range(pairs):
        a, b = (x[..., member(source, k, which)].astype(np.float64) for which in (0, 1))
        turned = (a + 1j * b) * z[..., k]
        y[..., member(target, k, 0)], y[..., member(target, k, 1)] = turned.real, turned.imag
    return y


def room(x: np.ndarray) -> float:
    """A row's error and three roundings on the largest pair."""
    return float(2**0.5 * np.abs(x).max() * (2**0.5 * COS_SIN_ERROR_FLOAT32 + 3 * 2**-24))
