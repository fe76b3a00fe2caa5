"""Attention leaves Python through torch.export and AOTInductor; TorchScript is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phasor import Rope
from phasor.errors import BackendError
from phasor.torch import (
    RotaryAttention,
    Rotation,
    rotate,
    rotate_,
    rotate_qk,
    rotate_qk_,
)

from ...rounding import rounding
from ..torch_arrays import assert_rotated, normal

ROPE = Rope(head_dim=8, pairing="half", base=500_000.0)
# torch deprecates what is refused here, and warns of more on the way to the refusal
pytestmark = [
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]
CHANGING = {"x": {1: torch.export.Dim.DYNAMIC}}


def attention() -> RotaryAttention:
    """Two query heads that share a key head."""
    torch.manual_seed(0)
    return RotaryAttention(ROPE, 16, num_heads=2, num_kv_heads=1).eval()


def test_exported_attention_is_saved_and_runs_at_every_length(tmp_path: Path) -> None:
    """Exported at 5 tokens, loaded, run from 1 to 8192: eager's bits, and one rotation."""
    module = attention()
    program = torch.export.export(module, (normal(2, 5, 16),), dynamic_shapes=CHANGING)
    torch.export.save(program, tmp_path / "attention.pt2")
    loaded = torch.export.load(tmp_path / "attention.pt2")
    called = [str(node.target) for node in loaded.graph.nodes if node.op == "call_function"]
    assert called.count("phasor.turn.default") == 1
    with torch.no_grad():
        for length in (1, 2, 5, 64, 8192):
            x = normal(2, length, 16, seed=length)
            assert torch.equal(loaded.module()(x), module(x))


RUNNER = """
import sys, torch
{imported}
package, given, wanted = sys.argv[1:]
run = torch._inductor.aoti_load_package(package)
for x, (y, room) in zip(torch.load(given), torch.load(wanted), strict=True):
    assert (run(x) - y).abs().max() <= room, len(x[0])
"""


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_aot_inductor_compiles_attention_for_another_process(tmp_path: Path) -> None:
    """A package that knows phasor's operator by name, and needs it to be registered."""
    module = attention()
    package, given, wanted = (str(tmp_path / name) for name in ("a.pt2", "x.pt", "y.pt"))
    with torch.no_grad():
        program = torch.export.export(module, (normal(2, 5, 16),), dynamic_shapes=CHANGING)
        torch._inductor.aoti_compile_and_package(program, package_path=package)
        xs = [normal(2, length, 16, seed=length) for length in (2, 5, 64, 4096)]
        torch.save(xs, given)
        rooms = [rounding(module, lambda module, x=x: module(x)) for x in xs]
        torch.save([(module(x), room) for x, room in zip(xs, rooms, strict=True)], wanted)

    def run(imported: str) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-c", RUNNER.format(imported=imported)]
        return subprocess.run(
            [*program, package, given, wanted], capture_output=True, text=True, check=False
        )

    with_phasor, without = run("import phasor.torch"), run("")
    assert with_phasor.returncode == 0, with_phasor.stderr
    assert "phasor::cos_sin" in without.stderr


def turned(x: Tensor) -> Tensor:
    """A function that rotates."""
    return rotate(x, torch.arange(x.shape[0]), ROPE)


def written(x: Tensor) -> Tensor:
    """A function that rotates in place."""
    return rotate_(x * 2, torch.arange(x.shape[0]), ROPE)


def by_rows(x: Tensor) -> Tensor:
    """A function that rotates by given rows."""
    return Rotation(x[:, 0, :4], x[:, 0, 4:], pairing="half")(x)


@pytest.mark.parametrize("gradient", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("function", [turned, written, by_rows, "module"])
def test_tracing_is_refused(function: Callable[..., Any] | str, gradient: bool) -> None:
    """The short way past the dispatcher would be recorded as memory that nobody fills."""
    x = normal(2, 5, 16) if function == "module" else normal(5, 2, 8)
    target = attention() if function == "module" else function
    with torch.set_grad_enabled(gradient), pytest.raises(BackendError, match=r"torch\.export"):
        torch.jit.trace(target, (x,))


@pytest.mark.parametrize(
    "target",
    [turned, rotate, rotate_, rotate_qk, rotate_qk_, attention, "nested"],
    ids=lambda target: getattr(target, "__name__", target),
)
def test_scripting_is_refused(target: Any) -> None:
    """In our words, not in those of a parser that stumbles over a signature."""
    made = {"nested": lambda: nn.Sequential(attention()), attention: attention}
    with pytest.raises(BackendError, match=r"torch\.export\.export\(model, args\)"):
        torch.jit.script(made[target]() if target in made else target)


def test_tracing_leaves_nothing_behind() -> None:
    """After a refusal everything works as before."""
    x = normal(5, 2, 8)
    with pytest.raises(BackendError), torch.no_grad():
        torch.jit.trace(turned, (x,))
    assert_rotated(turned(x), x, range(5), ROPE)
