"""``backend="eager"``, named to a compiler: plain operations in its graph, the same rotation."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from phasor import Rope
from phasor.angles import COS_SIN_ERROR_FLOAT32
from phasor.torch import Rotation, rotate, rotate_, rotate_qk, rotate_qk_

from ...rotation_cases import THREE
from ..torch_arrays import assert_rotated, normal
from ..torch_cases import HALF, MIXED, PLACES, rows_of

pytestmark = pytest.mark.usefixtures("one_graph")


class Graphs:
    """A compiler that runs what it is given, and keeps it."""

    def __init__(self) -> None:
        self.seen: list[GraphModule] = []

    def __call__(self, graph: GraphModule, inputs: Any) -> Callable[..., Any]:
        """Keep the graph."""
        self.seen.append(graph)
        return graph.forward

    def operators(self) -> set[str]:
        """Names of everything that was called."""
        return {str(node.target) for graph in self.seen for node in graph.graph.nodes}


VERBS: dict[str, Callable[..., Any]] = {
    "one": lambda x, p, b: rotate(x, p, MIXED, gain=1.5, backend=b),
    "both": lambda x, p, b: rotate_qk(x, x[:, :, :1] * 2, p, HALF, inverse=True, backend=b),
    "fractions": lambda x, p, b: rotate(x, p + 0.5, HALF, backend=b),
    "axes": lambda x, p, b: rotate(x, torch.stack((p, p * 2, p * 3), -1), THREE, backend=b),
    "in place": lambda x, p, b: rotate_(x * 2, p, MIXED, backend=b),
    "in place, both": lambda x, p, b: rotate_qk_(x * 2, x[:, :, :1] * 3, p, HALF, backend=b),
    "rows": lambda x, p, b: Rotation(*rows_of(p), pairing="half")(x, backend=b),
    "rows in place": lambda x, p, b: Rotation(*rows_of(p), pairing="half").rotate_(
        x * 2, backend=b
    ),
}


def both(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """One result or two, as a tuple."""
    return (result,) if isinstance(result, Tensor) else result


@pytest.mark.parametrize("verb", VERBS)
def test_named_to_a_compiler_every_verb_is_plain_operations(verb: str) -> None:
    """One graph for two lengths, without an operator of phasor, and the definition's values."""
    graphs = Graphs()
    quick = torch.compile(VERBS[verb], fullgraph=True, dynamic=True, backend=graphs)
    for length in (5, 9):
        x, places = normal(2, length, 3, 8), torch.arange(length) * 70_001
        for y, expected in zip(
            both(quick(x, places, "eager")), both(VERBS[verb](x, places, "eager")), strict=True
        ):
            assert torch.equal(y, expected)
    assert len(graphs.seen) == 1
    assert not [name for name in graphs.operators() if "phasor" in name]


@pytest.mark.parametrize("rope", [HALF, MIXED], ids=["half", "mixed"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_plain_operations_in_a_graph_rotate(rope: Rope, dtype: torch.dtype) -> None:
    """Within the bound of every backend, at positions of any size, in any strides."""
    quick = torch.compile(
        lambda x, p: rotate(x, p, rope, backend="eager"), fullgraph=True, backend="aot_eager"
    )
    x = normal(2, 3, 4, 8, dtype=dtype).transpose(1, 2)
    assert_rotated(quick(x, PLACES), x, PLACES, rope)


def test_automatic_choice_keeps_the_operator() -> None:
    """Only a caller who says so trades the operator for its definition."""
    graphs = Graphs()
    quick = torch.compile(VERBS["one"], fullgraph=True, backend=graphs)
    quick(normal(2, 5, 3, 8), torch.arange(5), "auto")
    assert "phasor.turn.default" in graphs.operators()


def test_plain_operations_train() -> None:
    """Gradients of both verbs through the compiler's own derivative: the turn back."""
    out, places = normal(2, 5, 3, 8, seed=1), torch.arange(5) * 70_001

    def step(x: Tensor) -> Tensor:
        return rotate_(rotate(x, places, MIXED, backend="eager") * 2, places, HALF, backend="eager")

    x = normal(2, 5, 3, 8).requires_grad_()
    (grad,) = torch.autograd.grad(
        torch.compile(step, fullgraph=True, backend="aot_eager")(x), x, out
    )
    back = rotate(2 * rotate(out, places, HALF, inverse=True), places, MIXED, inverse=True)
    # two turns each way, of pairs twice as long as two of these numbers: rows, and two roundings
    longest = 2 * 2**0.5 * out.abs().max()
    assert (grad - back).abs().max() <= 2 * 2 * (
        2**0.5 * COS_SIN_ERROR_FLOAT32 + 2 * 2**-24
    ) * longest


class Turned(torch.nn.Module):
    """A module whose exported form shall not need phasor."""

    def forward(self, x: Tensor) -> Tensor:
        """Tokens, encoded."""
        return rotate(x, torch.arange(x.shape[1]), HALF, backend="eager")


RUNNER = """
import sys, torch
kind, package, given, wanted, error = sys.argv[1:]
if kind == "exported":
    run = torch.export.load(package).module()
else:
    run = torch._inductor.aoti_load_package(package)
for x, y in zip(torch.load(given), torch.load(wanted), strict=True):
    assert (run(x) - y).abs().max() <= float(error) * x.abs().max()
assert "phasor" not in sys.modules
"""


# torch's own lowering still calls what torch deprecates
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("kind", ["exported", "compiled"])
def test_an_exported_program_of_plain_operations_needs_no_phasor(kind: str, tmp_path: Path) -> None:
    """Another process loads and runs it, as it is or compiled, and phasor is never imported."""
    package, given, wanted = (str(tmp_path / name) for name in ("turned.pt2", "x.pt", "y.pt"))
    changing = {"x": {1: torch.export.Dim.DYNAMIC}}
    program = torch.export.export(Turned(), (normal(2, 5, 3, 8),), dynamic_shapes=changing)
    if kind == "exported":
        torch.export.save(program, package)
    else:
        torch._inductor.aoti_compile_and_package(program, package_path=package)
    xs = [normal(2, length, 3, 8, seed=length) for length in (2, 5, 2000)]
    torch.save(xs, given)
    torch.save([Turned()(x) for x in xs], wanted)
    # an exported graph makes its angles of digits: both are off by a row and two roundings
    error = 2 * 2**0.5 * (2**0.5 * COS_SIN_ERROR_FLOAT32 + 2 * 2**-24)
    command = [sys.executable, "-c", RUNNER, kind, package, given, wanted, str(error)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
