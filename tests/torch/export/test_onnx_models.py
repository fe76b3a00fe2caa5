"""Models become ONNX files of every length, or are refused in words of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from phasor import Rope
from phasor.axes import Sectioned
from phasor.errors import BackendError, SpecError, TensorError
from phasor.scaling import DynamicNTK
from phasor.torch import RotaryAttention, rotate, rotate_, rotate_qk
from phasor.torch import export as bridge

from ...rounding import rounding
from ..live.live_models import difference
from ..torch_arrays import normal
from .onnx_engines import (
    CHANGING,
    PLACES,
    PLAIN,
    WAYS,
    Turner,
    by_onnxruntime,
    by_reference,
    exported,
    operators,
    room,
)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tensors_of_16_bits_are_turned_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    """So that rows are not 16 bits, as the operator's own type rule would have it."""
    x, places = normal(2, 5, 3, 8, dtype=dtype), torch.from_numpy(PLACES)
    program = exported(
        lambda x, p: rotate(x.to(dtype), p, PLAIN).float(), x.float(), places, longest=4096
    )
    found = by_onnxruntime(program)(x.float().numpy(), PLACES)[0]
    expected = rotate(x, places, PLAIN).float().numpy()
    # the last bit may differ where the sums before rounding do
    unit = torch.finfo(dtype).eps
    assert np.abs(found - expected).max() <= unit * np.abs(expected).max()
    assert (found != expected).mean() < 0.01


class Layers(nn.Module):
    """Two layers of attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            RotaryAttention(PLAIN, 16, num_heads=2, num_kv_heads=1) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Through both."""
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize("way", WAYS)
def test_attention_runs_in_onnxruntime_at_every_length(way: str) -> None:
    """To a rounding; layers that share a Rope share its tables, or its formula."""
    model = Layers().eval()
    program = bridge.export(
        model,
        (normal(2, 5, 16),),
        dynamic_shapes=({0: CHANGING, 1: CHANGING},),
        longest=WAYS[way],
    )
    named = operators(program)
    assert named["RotaryEmbedding"] == 4
    assert named["Gather"] == (0 if way == "formula" else 2)
    assert named["Abs"] == (3 if way == "formula" else 0)
    wide = [one for one in program.model_proto.graph.initializer if np.prod(one.dims) >= 4096]
    assert len(wide) == (0 if way == "formula" else 2)
    for engine in (by_reference, by_onnxruntime):
        run = engine(program)
        for length in (1, 2, 5, 300):
            x = normal(3, length, 16, seed=length)
            with torch.no_grad():
                expected, room = model(x), rounding(model, lambda model, x=x: model(x))
            assert difference(expected, torch.from_numpy(run(x.numpy())[0])) <= room


def test_a_program_of_torch_export_is_taken_as_it_is() -> None:
    """And the table of translations serves who calls torch.onnx.export alone."""
    x, places = normal(2, 5, 3, 8), torch.from_numpy(PLACES)
    module = Turner(lambda x, p: rotate_qk(x, x[:, :, :1], p, PLAIN)).eval()
    program = bridge.export(torch.export.export(module, (x, places)))
    assert operators(program)["RotaryEmbedding"] == 2
    found = by_onnxruntime(program)(x.numpy(), PLACES)
    for y, expected in zip(found, module(x, places), strict=True):
        assert np.abs(y - expected.numpy()).max() <= 2 * room(x.numpy())
    assert list(bridge.translation_table()) == [
        torch.ops.phasor.cos_sin.default,
        torch.ops.phasor.turn.default,
    ]


def refused(function: Callable[..., Any], **more: Any) -> None:
    """Export something that cannot be."""
    exported(function, normal(2, 5, 3, 8), torch.from_numpy(PLACES), **more)


def test_what_the_operator_cannot_say_is_refused_in_our_words() -> None:
    """Not in a report of torch's around them."""
    with pytest.raises(BackendError, match="must not rotate in place"):
        refused(lambda x, p: rotate_(x * 2, p, PLAIN))
    with pytest.raises(TensorError, match="must be float32, float16 or bfloat16"):
        refused(lambda x, p: rotate(x.double(), p, PLAIN))
    with pytest.raises(SpecError, match="got positions fractions"):
        refused(lambda x, p: rotate(x, p + 0.5, PLAIN), longest=64)
    three = Rope(head_dim=8, pairing="half", axes=Sectioned((2, 1, 1)))
    with pytest.raises(SpecError, match="on 3 axes"):
        refused(lambda x, p: rotate(x, torch.stack((p, p, p), -1), three), longest=64)
    with pytest.raises(SpecError, match="longest must be a whole number >= 1, got 0"):
        refused(lambda x, p: rotate(x, p, PLAIN), longest=0)
    rule = DynamicNTK(factor=2.0, original_max_positions=4096)
    with pytest.raises(SpecError, match=r"rope\.at\(seq_len\)"):
        refused(lambda x, p: rotate(x, p, Rope(head_dim=8, pairing="half", scaling=rule)))


def test_what_torch_cannot_export_keeps_torchs_own_reason() -> None:
    """The error at the bottom is what tells a user which operation it is."""

    class Decomposes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            turned = rotate(x, torch.arange(4), Rope(head_dim=8, pairing="half"))
            return torch.linalg.svd(turned[:, 0])[1]

    with pytest.raises(torch.onnx.errors.OnnxExporterError) as raised:
        bridge.export(Decomposes(), (normal(4, 1, 8),))
    assert raised.value.__cause__ is not None


def test_a_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is done."""
    monkeypatch.setattr(bridge, "find_spec", lambda name: None if name == "onnxscript" else name)
    with pytest.raises(BackendError, match=r"pip install 'phasor-rope\[onnx\]'"):
        refused(lambda x, p: rotate(x, p, PLAIN))
