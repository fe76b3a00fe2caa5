"""Inductor keeps the operator where that was measured to be faster, and fuses operations elsewhere.

Every test of values runs on both sides of the rule, against angles of 60 digits.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._functorch import config as joint
from torch._inductor import config as graph_caches
from torch._inductor.utils import run_and_get_code

from phasor import Rope
from phasor.torch import Rotation, chosen_backend, rotate, rotate_, rotate_qk, rotate_qk_
from phasor.torch._operator import cpu
from phasor.torch._operator import inductor as _inductor

from ...oracle import exact_rows
from ...rotation_cases import THREE
from ..torch_arrays import assert_rotated, normal
from ..torch_cases import HALF, MIXED, PART

ROPES = {"half": HALF, "interleaved": Rope(head_dim=8, pairing="interleaved"), "mixed": MIXED,
         "part": PART,
         "part of halves": Rope(head_dim=8, pairing="half", rotary_dim=6, rotary_start=1),
         "wide": Rope(head_dim=64, pairing="half", direction=-1, base=500_000.0)}  # fmt: skip
SIDES = {"decomposition": _inductor.NEVER, "operator": _inductor.ALWAYS}
# to the ends of int64, where products overflow
FAR = torch.tensor([0, -1, 70_001, 2**31, -(2**40), 2**41 + 12_345, 2**63 - 1, -(2**63)])
BUILT = pytest.mark.skipif(not cpu.paths(), reason="the rule is for the kernel in C++")


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """Every test compiles from nothing, and a second graph for one function is an error."""
    torch._dynamo.reset()
    counters.clear()
    # a graph on disk has the choice of the size that it was first compiled for
    no_disk = graph_caches.patch(fx_graph_cache=False), joint.patch(enable_autograd_cache=False)
    with no_disk[0], no_disk[1], torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


@pytest.fixture(params=SIDES)
def side(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which side of the rule every size is on."""
    set_limit(monkeypatch, SIDES[request.param])
    return request.param


def set_limit(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Keep the operator from ``limit`` elements on."""
    monkeypatch.setattr(_inductor, "OPERATOR_FROM", dict.fromkeys(_inductor.OPERATOR_FROM, limit))


def compiled(
    function: Callable[..., Any], *arguments: Any, dynamic: bool = False
) -> tuple[Any, str]:
    """What the compiled function returns, and what Inductor made of it."""
    quick = torch.compile(function, fullgraph=True, dynamic=dynamic)
    result, code = run_and_get_code(quick, *arguments)
    return result, "operator" if any("phasor.turn" in each for each in code) else "decomposition"


@pytest.mark.parametrize(
    ("side", "dtypes"),
    [
        ("decomposition", (torch.float32, torch.bfloat16)),
        ("decomposition", (torch.bfloat16, torch.float32)),
        ("operator", (torch.float16,)),
    ],
    indirect=["side"],
)
def test_values_and_gradients_are_right_at_every_position(
    dtypes: tuple[torch.dtype, ...], side: str
) -> None:
    """A rotation and its derivative, the inverse rotation, with a gain, in int64's whole range."""
    ropes = list(ROPES.values())
    by_turns = zip(ropes, cycle(dtypes), strict=False)
    xs = [normal(2, len(FAR), 3, r.head_dim, dtype=dtype).requires_grad_() for r, dtype in by_turns]
    grads = [normal(*x.shape, dtype=x.dtype, seed=1) for x in xs]

    def step(*xs: Tensor) -> list[Tensor]:  # one graph of all, for a graph takes seconds
        return [rotate(x, FAR, rope, gain=1.5) for x, rope in zip(xs, ropes, strict=True)]

    ys, made = compiled(step, *xs)
    assert made == side
    backs = torch.autograd.grad(ys, xs, grads)
    for rope, x, y, grad, back in zip(ropes, xs, ys, grads, backs, strict=True):
        assert_rotated(y, x, FAR, rope, gain=1.5)
        again = rotate(back, FAR, rope)  # 1.5 times the gradient, but for what is not rotated
        expected = grad.clone()
        expected[..., rope.rotary_start : rope.rotary_start + rope.rotary_dim] *= 1.5
        coarse = torch.finfo(x.dtype).eps
        assert (again - expected).abs().max() <= 8 * coarse * expected.abs().max()


@pytest.mark.parametrize("rope", [ROPES["half"], ROPES["interleaved"]], ids=lambda r: r.pairing)
def test_any_strides_are_right_and_kept(rope: Rope, side: str) -> None:
    """Tensors as others lay them out, rotated both ways at expanded and transposed positions."""
    x = normal(4, 5, 3, 8)
    xs = [
        x.transpose(1, 2).contiguous().transpose(1, 2),  # heads first
        x[:, :, :1].expand(-1, -1, 3, -1),
        torch.cat((x, x), -1)[..., :8],
        x.transpose(-1, -2).contiguous().transpose(-1, -2),
    ]
    places = torch.arange(20).reshape(5, 4).T * 1001
    first = places[:1].expand(4, 5)
    both, made = compiled(
        lambda *xs: [
            (x, rotate(x, places, rope), rotate(x, first, rope, inverse=True)) for x in xs
        ],
        *xs,
    )
    assert made == side
    for x, y, z in both:
        assert_rotated(y, x, places, rope)
        assert_rotated(z, x, -first, rope)
        if x.stride(-1) <= 1:  # head_dim is the last in memory
            assert y.stride() == z.stride() == torch.empty_like(x).stride()


def test_queries_keys_rows_axes_and_writes_are_right(side: str) -> None:
    """Every way to say what is rotated, on both sides."""
    q, k = normal(2, 5, 3, 8), normal(2, 5, 1, 8, dtype=torch.bfloat16)
    places = torch.arange(5) * 70_001
    several = torch.stack((places, places * 2, -places), -1)
    rows = exact_rows(HALF, places)
    cos, sin = torch.from_numpy(rows.real.copy()), torch.from_numpy(rows.imag.copy())

    def step(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        return (
            *rotate_qk(q, k, places, HALF),
            rotate(q, 7, HALF),
            rotate(q, several, THREE),
            Rotation(cos, sin, pairing="half")(q),
        )

    (q2, k2, one, many, by), made = compiled(step, q, k)
    assert made == side
    for y, x in ((q2, q), (k2, k), (by, q)):
        assert_rotated(y, x, places, HALF)
    assert_rotated(one, q, torch.full((5,), 7), HALF)
    assert_rotated(many, q, several, THREE)

    def write(q: Tensor, k: Tensor) -> Tensor:
        rotate_qk_(q, k, places, HALF)
        return rotate_(q * 2, places, HALF)

    q3, k3 = q.clone(), k.clone()
    twice, _ = compiled(write, q3, k3)
    assert_rotated(q3, q, places, HALF)
    assert_rotated(k3, k, places, HALF)
    assert_rotated(twice, q3 * 2, places, HALF)


@BUILT
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("pairing", "length", "made"),
    [("half", 4, "decomposition"), ("half", 300, "decomposition"),
     ("interleaved", 4, "decomposition"), ("interleaved", 300, "operator")],
)  # fmt: skip
def test_the_rule_chooses_by_pairing_and_size_and_can_be_asked(
    pairing: str, length: int, made: str, dynamic: bool
) -> None:
    """The size of the first call decides, for every later one, without a second graph."""
    rope = Rope(head_dim=128, pairing=pairing)
    x = normal(1, length, 8, 128)
    assert (chosen_backend(x, compiled_for=rope) == "inductor") == (made == "decomposition")
    function = torch.compile(
        lambda x: rotate(x, torch.arange(x.shape[1]), rope), fullgraph=True, dynamic=dynamic
    )
    _, code = run_and_get_code(function, x)
    assert any("phasor.turn" in each for each in code) == (made == "operator")
    for other in (5, 600) if dynamic else ():
        x = normal(1, other, 8, 128)
        assert_rotated(function(x), x, torch.arange(other), rope)
    assert counters["stats"]["unique_graphs"] == 1


def test_a_query_and_a_key_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the elements each, on the two sides of the limit together and alone."""
    set_limit(monkeypatch, 200)
    x = normal(1, 5, 3, 8)  # 120 elements
    assert chosen_backend(x, compiled_for=HALF) == "inductor"
    assert chosen_backend(x, x, compiled_for=HALF) == chosen_backend(x)
    assert compiled(lambda x: rotate(x, 3, HALF), x)[1] == "decomposition"
    torch._dynamo.reset()
    assert compiled(lambda x: rotate_qk(x, x * 2, 3, HALF), x)[1] == "operator"


def test_float64_keeps_the_operator() -> None:
    """Nobody measured its operations."""
    x = normal(2, 5, 3, 8, dtype=torch.float64)
    y, made = compiled(lambda x: rotate(x, torch.arange(5), HALF), x)
    assert made == "operator"
    assert torch.equal(y, rotate(x, torch.arange(5), HALF))


def test_fractions_of_positions_are_operations_too() -> None:
    """Right where they have an angle, and NaN where not, which the operator would refuse."""
    x = normal(2, 5, 3, 8)
    places = torch.tensor([0.5, -70_000.25, 2.0**31 + 7.5, 2.0**63, torch.nan])
    y, made = compiled(lambda x, p: rotate(x, p, HALF), x, places)
    assert made == "decomposition"
    assert_rotated(y[:, :3], x[:, :3], places[:3], HALF)
    assert bool(y[:, 3:].isnan().all())


@BUILT
def test_a_named_backend_is_never_replaced() -> None:
    """By its name the operator is kept at a size that "auto" decomposes."""
    x = normal(1, 5, 3, 8)
    y, made = compiled(lambda x: rotate(x, 3, HALF, backend="cpu"), x)
    assert made == "operator"
    assert torch.equal(y, rotate(x, 3, HALF))


_PROCESS = """
import sys, torch
from phasor import Rope
from phasor.torch import rotate
from torch._dynamo.utils import counters
import phasor.torch._operator.inductor as rule
rope = Rope(head_dim=8, pairing="half")
for limit in sys.argv[1:]:
    for key in rule.OPERATOR_FROM:
        rule.OPERATOR_FROM[key] = int(limit)
    torch._dynamo.reset()
    quick = torch.compile(lambda x: rotate(x * 2, torch.arange(5), rope), fullgraph=True)
    x = torch.randn(5, 2, 8, requires_grad=True)
    quick(x).sum().backward()
    with torch.profiler.profile() as seen:
        quick(x).sum().backward()
    names = [event.key for event in seen.key_averages()]
    print("operator" if "phasor::turn" in names else "decomposition",
          counters["aot_autograd"]["autograd_cache_hit"])
"""


@BUILT
def test_a_graph_kept_on_disk_is_found_again_under_the_same_rule_only(tmp_path: Path) -> None:
    """Two processes share a folder: the second finds what the first made, under a new rule not."""
    never = _inductor.NEVER
    found = [
        subprocess.run(
            [sys.executable, "-c", _PROCESS, *map(str, limits)],
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
            capture_output=True, text=True, check=True,
        ).stdout.split()
        for limits in ((never,), (never, 0))
    ]  # fmt: skip
    assert found == [["decomposition", "0"], ["decomposition", "1", "operator", "1"]]


def test_importing_phasor_imports_no_compiler() -> None:
    """Nor does rotating; only torch.compile does."""
    code = (
        "import sys, torch, phasor, phasor.torch\n"
        "x = torch.ones(5, 2, 8, requires_grad=True)\n"
        "phasor.torch.rotate(x, 3, phasor.Rope(head_dim=8, pairing='half')).sum().backward()\n"
        "assert 'torch._inductor' not in sys.modules\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# torch's own lowering still calls what torch deprecates
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_other_compilers_and_exports_keep_the_operator() -> None:
    """Whatever Inductor was given before."""

    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return rotate(x, torch.arange(5), HALF)

    x = normal(2, 5, 3, 8)
    assert compiled(Module(), x)[1] == "decomposition"
    torch._dynamo.reset()
    seen: list[str] = []

    def look(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    from torch._dynamo.backends.common import aot_autograd

    torch.compile(Module(), fullgraph=True, backend=aot_autograd(fw_compiler=look))(x)
    assert "phasor.turn.default" in seen
    program = torch.export.export(Module(), (x,)).run_decompositions()
    calls = {str(node.target): node for node in program.graph.nodes if "phasor" in str(node.target)}
    assert calls.keys() == {"phasor.cos_sin.default", "phasor.turn.default"}
    assert calls["phasor.turn.default"].args[-1] == "auto"  # which is resolved where it runs
    assert torch.equal(program.module()(x), Module()(x))
