"""Compilers see one operator and modules hold no tensor: nothing recompiles, nothing is cast.

What Inductor makes of the operator is tested in `test_inductor`.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad
from torch.fx.experimental.proxy_tensor import make_fx

from phasor import Rope
from phasor.torch import Rotation, rotate, rotate_, rotate_qk, rotate_qk_

from ...rotation_cases import THREE
from ..torch_arrays import assert_rotated, normal
from ..torch_cases import HALF, MIXED, PLACES, agree, rows_of, turn_

SEQUENCES = [5, 6, 9, 17]
BACKENDS = ["eager", "aot_eager", "inductor"]


pytestmark = pytest.mark.usefixtures("one_graph")


def compiled(function: Callable[..., Any], backend: str = "aot_eager") -> Callable[..., Any]:
    """``function`` as one graph for every length."""
    return torch.compile(function, fullgraph=True, dynamic=True, backend=backend)


def same(y: Tensor, expected: Tensor, backend: str, *more: Any) -> bool:
    """Eager's bits, but where Inductor rotates with operations of its own."""
    return agree(y, expected, *more) if backend == "inductor" else torch.equal(y, expected)


class Encoder(torch.nn.Module):
    """A module as users write it: the Rope is a plain attribute."""

    def __init__(self, rope: Rope) -> None:
        super().__init__()
        self.rope = rope

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        """The encoded tokens."""
        return rotate(x, places, self.rope)


def by_closure(rope: Rope) -> Callable[[Tensor, Tensor], Tensor]:
    """The Rope as a constant of the enclosing scope."""
    return lambda x, places: rotate(x, places, rope)


def by_argument(rope: Rope) -> Callable[[Tensor, Tensor], Tensor]:
    """The Rope as an argument of the compiled function."""
    return lambda x, places: rotated(x, places, rope)


def rotated(x: Tensor, places: Tensor, rope: Rope) -> Tensor:
    """A function that takes a Rope."""
    return rotate(x, places, rope, inverse=True, gain=1.25)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("held", [by_closure, Encoder], ids=["closure", "module attribute"])
def test_one_graph_serves_every_length(held: Callable[..., Any], backend: str) -> None:
    """Four lengths, one compilation, eager's values, however the function holds its Rope."""
    plain = held(MIXED)
    quick = compiled(plain, backend)
    for length in SEQUENCES:
        x, places = normal(2, length, 3, 8), torch.arange(length) * 70_001
        y = quick(x, places)
        assert same(y, plain(x, places), backend)
        assert_rotated(y, x, places, MIXED)


def test_a_rope_may_be_an_argument() -> None:
    """The compiled function takes it, and an equal Rope is the same Rope."""
    quick = compiled(rotated)
    for length in SEQUENCES:
        x, places = normal(2, length, 3, 8), torch.arange(length)
        assert torch.equal(quick(x, places, MIXED), rotated(x, places, MIXED))


def test_another_rope_is_another_rotation() -> None:
    """A graph made for one Rope is never used for another."""
    x, places = normal(2, 5, 3, 8), torch.arange(5)
    with torch._dynamo.config.patch(error_on_recompile=False):
        quick = compiled(rotated)
        for rope in (HALF, MIXED, Rope(head_dim=8, pairing="half", base=9.0), HALF):
            assert torch.equal(quick(x, places, rope), rotated(x, places, rope))


VERBS: dict[str, Callable[..., Any]] = {
    "scalar": lambda x, p: rotate(x, 7, HALF),
    "float positions": lambda x, p: rotate(x, p + 0.5, HALF),
    "axes": lambda x, p: rotate(x, torch.stack((p, p * 2, p * 3), -1), THREE),
    "axes, floats": lambda x, p: rotate(x, torch.stack((p, p * 2, p * 3), -1) + 0.5, THREE),
    "far": lambda x, p: rotate(x, p + 2**41, HALF),
    "query and key": lambda x, p: rotate_qk(x, x[:, :, :1] * 2, p, HALF, inverse=True, gain=1.5),
    "in place": lambda x, p: rotate_(x * 2, p, MIXED) + 1,
    "in place, both": lambda x, p: rotate_qk_(x * 2, x[:, :, :1] * 3, p, MIXED),
    "rows": lambda x, p: Rotation(*rows_of(p), pairing="half", pairing_out="interleaved")(x),
    "rows in place": lambda x, p: turn_(x * 2, *rows_of(p), pairing="half"),
}


def both(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """One result or two, as a tuple."""
    return (result,) if isinstance(result, Tensor) else result


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_compiles_to_eagers_values(verb: str, backend: str) -> None:
    """Out of place and in place, positions and rows, at two lengths."""
    quick = compiled(VERBS[verb], backend)
    for length in SEQUENCES[:2]:
        x, places = normal(2, length, 3, 8), torch.arange(length)
        for y, expected in zip(both(quick(x, places)), both(VERBS[verb](x, places)), strict=True):
            assert same(y, expected, backend)
            assert y.stride() == expected.stride()


@pytest.mark.parametrize("backend", BACKENDS)
def test_writing_an_argument_in_place_is_seen_outside(backend: str) -> None:
    """The compiled function mutates what it was given, and returns it."""
    quick = compiled(lambda x, places: rotate_(x, places, HALF), backend)
    for length in SEQUENCES:
        x, places = normal(2, length, 3, 8), torch.arange(length)
        expected = rotate(x, places, HALF)
        y = quick(x, places)
        assert same(x, expected, backend)
        assert y.data_ptr() == x.data_ptr()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_training_step_compiles(dtype: torch.dtype, backend: str) -> None:
    """Gradients through out-of-place and in-place verbs are eager's.

    Beside the verbs there are powers of two and one sum, which no fusion rounds otherwise.
    """

    def step(x: Tensor, places: Tensor) -> Tensor:
        q, k = rotate_qk(x * 2, x * 4, places, MIXED)
        return rotate_(q * 2, places, HALF) + k

    places, out = torch.arange(5) * 70_001, normal(2, 5, 3, 8, dtype=dtype, seed=1)
    grads: list[Tensor] = []
    for function in (step, compiled(step, backend)):
        x = normal(2, 5, 3, 8, dtype=dtype).requires_grad_()
        grads += torch.autograd.grad(function(x, places), x, out)
    assert same(grads[1], grads[0], backend, 2, 8 * float(out.abs().max()))


def test_learned_rows_train_when_compiled() -> None:
    """The gradient of cos and sin is eager's."""
    x = normal(2, 5, 3, 8)

    def function(cos: Tensor, sin: Tensor) -> Tensor:
        return Rotation(cos, sin, pairing="half")(x).pow(2).sum()

    grads: list[tuple[Tensor, ...]] = []
    for call in (function, compiled(function)):
        leaves = [normal(5, 4, seed=s).requires_grad_() for s in (1, 2)]
        grads.append(torch.autograd.grad(call(*leaves), leaves))
    assert all(map(torch.equal, *grads))


def test_a_length_that_depends_on_data_is_written_in_place() -> None:
    """Nobody asks how many tokens there are."""

    def function(x: Tensor, wanted: Tensor) -> Tensor:
        places = wanted.nonzero().squeeze(-1)
        return rotate_(x[places], places, HALF)

    x, wanted = normal(6, 2, 8), torch.tensor([True, False, True, True, False, True])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        quick = torch.compile(function, fullgraph=True, backend="aot_eager")
        assert torch.equal(quick(x, wanted), function(x, wanted))


def targets(graph: torch.fx.Graph) -> list[str]:
    """Names of the operators of phasor in a graph."""
    calls = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return [name for name in calls if name.startswith("phasor")]


@pytest.mark.parametrize("rope", [HALF, MIXED, THREE], ids=["half", "mixed", "axes"])
def test_an_exported_program_names_the_operator(rope: Rope) -> None:
    """Saved, loaded, and run at other lengths: one call of each operator, eager's bits."""
    several = rope is THREE

    def tokens(length: int) -> tuple[Tensor, Tensor]:
        places = torch.arange(length) * 70_001
        return normal(2, length, 3, 8), places[:, None].expand(-1, 3) if several else places

    length = torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(
        Encoder(rope), tokens(5), dynamic_shapes=({1: length}, {0: length})
    )
    assert targets(program.graph) == ["phasor.cos_sin.default", "phasor.turn.default"]
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file)
    assert targets(loaded.graph) == ["phasor.cos_sin.default", "phasor.turn.default"]
    for seq in SEQUENCES:
        assert torch.equal(loaded.module()(*tokens(seq)), Encoder(rope)(*tokens(seq)))


# torch's own lowering still calls what torch deprecates
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_an_exported_program_decomposes_to_the_same_operator() -> None:
    """The operator is atomic: lowering leaves it whole, in place becomes functional."""

    class Writer(torch.nn.Module):
        def forward(self, x: Tensor, places: Tensor) -> Tensor:
            return rotate_(x * 2, places, HALF)

    x, places = normal(2, 5, 3, 8), torch.arange(5)
    for module in (Encoder(HALF), Writer()):
        program = torch.export.export(module, (x, places))
        lowered = program.run_decompositions()
        assert torch.equal(lowered.module()(x, places), module(x, places))
    made = targets(torch.export.export(Writer(), (x, places)).graph)
    assert made == ["phasor.cos_sin.default", "phasor.turn_.default"]


def test_a_traced_graph_holds_the_operator() -> None:
    """make_fx sees through nothing, forwards and backwards."""

    def step(x: Tensor, places: Tensor) -> Tensor:
        return torch.autograd.grad(rotate(x, places, HALF).sum(), x)[0]

    x, places = normal(2, 5, 3, 8).requires_grad_(), torch.arange(5)
    for mode in ("real", "fake", "symbolic"):
        traced = make_fx(step, tracing_mode=mode)(x, places)
        assert targets(traced.graph) == ["phasor.cos_sin.default", "phasor.turn.default"] * 2
        assert torch.equal(traced(x, places), step(x, places))


def test_fake_tensors_rotate_to_fake_tensors() -> None:
    """Forward, backward and in place, where no value may be looked at."""
    with FakeTensorMode():
        x = torch.randn(2, 3, 4, 8, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        y = rotate(x, torch.arange(4), HALF)
        y.sum().backward()
        rotate_(x.detach(), [1, 2, 3, 4], HALF)
        assert x.grad is not None
        assert (y.shape, y.stride(), x.grad.shape) == (x.shape, x.stride(), x.shape)


def test_fake_tensors_leave_no_fake_table_behind() -> None:
    """A transform that was traced with fake tensors does not spoil real ones."""
    rope, x = Rope(head_dim=8, pairing="half", base=91.0), normal(4, 2, 8)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x), mode.from_tensor(PLACES)
        # torch may refuse to mix a real table with fake tensors, and says so
        with contextlib.suppress(AssertionError):
            grad(lambda t: rotate(t, fake[1], rope).sum())(fake[0])
    assert_rotated(rotate(x, PLACES, rope), x, PLACES, rope)


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers whose gradient is wanted."""
    return normal(*shape, dtype=dtype).requires_grad_()


def stacked(places: Tensor) -> Tensor:
    """Positions on three axes."""
    return torch.stack((places, places * 2, places * 3), -1)


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Any cosines and sines."""
    return normal(*shape, dtype=dtype, seed=1), normal(*shape, dtype=dtype, seed=2)


TURNED: dict[str, tuple[list[Tensor], tuple[Tensor, Tensor], tuple[Any, ...]]] = {
    "query alone": ([leaf(2, 4, 3, 8)], rows(4, 4), ("half", "half", 0, False)),
    "query and key": (
        [leaf(4, 3, 8), leaf(4, 1, 8)],
        rows(4, 2),
        ("interleaved", "half", 2, True),
    ),
    "one row": ([leaf(4, 3, 8, dtype=torch.float64)], rows(4), ("half", "half", 0, False)),
    "bfloat16": ([leaf(4, 3, 8, dtype=torch.bfloat16)], rows(4, 4), ("half", "half", 0, False)),
    "heads first": (
        [leaf(2, 3, 4, 8).detach().transpose(1, 2)],
        rows(4, 4),
        ("half", "half", 0, False),
    ),
    "no gradient": ([normal(4, 3, 8)], rows(4, 3), ("half", "interleaved", 1, False)),
}
PLACED: dict[str, tuple[Tensor, Rope, float, torch.dtype]] = {
    "whole": (PLACES, HALF, 1.0, torch.float32),
    "with a gain": (PLACES, MIXED, 1.5, torch.float64),
    "floats": (PLACES + 0.5, HALF, 1.0, torch.float32),
    "a scalar": (torch.tensor(7), HALF, 1.0, torch.float32),
    "several axes": (stacked(PLACES), THREE, 1.0, torch.float32),
}


@pytest.mark.parametrize("case", TURNED)
def test_the_operator_that_turns_passes_torchs_own_checks(case: str) -> None:
    """Schema, fake, autograd registration and AOT dispatch, out of place and in place."""
    xs, given, layout = TURNED[case]
    torch.library.opcheck(torch.ops.phasor.turn.default, (xs, *given, *layout, "auto"), {})
    plain = [x.detach().clone() for x in xs]
    torch.library.opcheck(torch.ops.phasor.turn_.default, (plain, *given, *layout, "auto"), {})


@pytest.mark.parametrize("case", PLACED)
def test_the_operator_that_makes_rows_passes_torchs_own_checks(case: str) -> None:
    """The same."""
    positions, rope, gain, dtype = PLACED[case]
    given = positions, rope.to_json(), gain, dtype, "auto"
    torch.library.opcheck(torch.ops.phasor.cos_sin.default, given, {})


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(copy.deepcopy, id="deepcopy"),
        pytest.param(lambda m: pickle.loads(pickle.dumps(m)), id="pickle"),
        pytest.param(lambda m: m.half(), id="half"),
        pytest.param(lambda m: m.to(torch.bfloat16), id="to bfloat16"),
        pytest.param(lambda m: m.double(), id="double"),
        pytest.param(lambda m: m.to("meta"), id="to meta"),
        pytest.param(lambda m: m.to_empty(device="cpu"), id="to_empty"),
    ],
)
def test_nothing_done_to_a_module_changes_its_rotation(change: Callable[..., Any]) -> None:
    """There is no tensor to cast, to move, to save or to lose."""
    rope = Rope(head_dim=8, pairing="half", base=93.0)
    module = Encoder(rope)
    x = normal(4, 2, 8)
    expected = module(x, PLACES)
    changed = change(module)
    assert changed.rope == rope
    assert changed.state_dict() == {}
    assert torch.equal(changed(x, PLACES), expected)
