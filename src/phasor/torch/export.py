"""Export models to ONNX, with the standard operator RotaryEmbedding for every rotation.

The file computes the same as `phasor.torch.rotate`, with the same cos and sin. The names of its
nodes begin with `NODES`. `phasor.identification.from_cache` converts caches of cos and sin to a
Rope.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, cast

import numpy as np
import torch.export
import torch.fx
import torch.onnx
from numpy.typing import NDArray
from torch import nn

from phasor._angle_digits import DIGITS_32, DIGITS_64, cos_sin_of_positions
from phasor._checks import whole
from phasor.angles import cos_sin
from phasor.errors import BackendError, PhasorError, SpecError, TensorError, install_hint
from phasor.pairings import Pairing, by_pairing, slices
from phasor.rope import Rope
from phasor.torch._operator import ops
from phasor.torch._operator.arguments import Layout, Turn
from phasor.torch._operator.text import read_rope

_OPSET = 23  # the first opset that has the operator
#: The prefix of the names of all nodes for rotations, for example for a quantizer's exclusions.
NODES = "phasor/"
_FLOATS = ("FLOAT", "FLOAT16", "BFLOAT16")
_FLOAT, _INT32, _INT64 = 1, 6, 7  # numbers of ONNX's dtypes
_Table = NDArray[np.float32]


def export(
    model: nn.Module | torch.export.ExportedProgram,
    args: Sequence[Any] = (),
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    longest: int | None = None,
    reach: int | None = None,
    opset_version: int = _OPSET,
    **options: Any,
) -> Any:
    """``model`` as an ONNX program, by ``torch.export`` and ``torch.onnx.export``.

    Every call of `phasor.torch.rotate`, and of its variants that do not work in place, becomes one
    RotaryEmbedding per tensor, in the pairing it reads. Other nodes do what the operator cannot: a
    slice that begins inside the head, or a different pairing of the result, takes one permutation
    of coordinates; direction and inverse change the sign of sin; the attention factor is in cos and
    sin. 16-bit tensors are rotated in float32 and rounded once.

    Cos and sin come from one of two places.

    * Without ``longest``, from the digits of the positions, in numbers of at most 2**24, which also
      suits engines without 64-bit integers: within `COS_SIN_ERROR_FLOAT32` of `phasor.angles` at
      every int64 position, also for fractions and several axes. An engine that narrows its inputs
      to 32 bits is correct below 2**31.
    * With ``longest``, from two tables with that many rows. Every entry is computed to 1e-15 and
      rounded once. Positions must be whole, on one axis, and from 0 to ``longest - 1``; for others
      the result depends on the engine.

    Args:
        model: A module, or a program that ``torch.export.export`` made.
        args: Its example arguments, as for ``torch.export.export``.
        kwargs: Its example keyword arguments.
        dynamic_shapes: As for ``torch.export.export``.
        longest: Rows of a table of cos and sin; None for no table.
        reach: A bound on the magnitude of all positions, at most 2**31, which saves a third of the
            nodes. None for every int64 position; no effect on int32 positions.
        opset_version: 23 or later for the operator RotaryEmbedding; an earlier one, such as 18,
            uses products and sums instead, which older engines support.
        options: Other arguments of ``torch.onnx.export``.

    Returns:
        A ``torch.onnx.ONNXProgram``: ``save`` writes it, calling it runs it in onnxruntime.

    Raises:
        BackendError: If ONNX's packages are not installed, or the model rotates in place.
        TensorError: If float64 is rotated, or tensors with a changing number of heads.
        SpecError: If ``longest`` is given and positions are fractional or have several axes, or if
            ``reach`` is above 2**31.

    >>> import torch
    >>> from phasor import Rope
    >>> from phasor.torch import RotaryAttention
    >>> rope = Rope(head_dim=8, pairing="half")
    >>> attention = RotaryAttention(rope, 16, num_heads=2).eval()
    >>> program = export(attention, (torch.zeros(1, 5, 16),), longest=1024)
    >>> [node.op_type for node in program.model.graph].count("RotaryEmbedding")
    2
    """
    for package in ("onnx", "onnxscript"):
        if find_spec(package) is None:
            raise BackendError(
                f"writing ONNX files needs {package}, which is not installed: "
                f"{install_hint('onnx')}"
            )
    with warnings.catch_warnings():
        # torch's own lowering still calls deprecated functions
        warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
        if isinstance(model, torch.export.ExportedProgram):
            program = model
        else:
            program = torch.export.export(
                model, tuple(args), dict(kwargs or {}), dynamic_shapes=dynamic_shapes
            )
        _refuse_writes(program)
        table = translation_table(longest, reach, opset_version)
        options = {"opset_version": opset_version, "verbose": False} | options
        try:
            onnx_program: Any = torch.onnx.export(
                program, dynamo=True, custom_translation_table=table, **options
            )
        except Exception as error:
            # torch wraps errors of translation functions in its own reports
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, PhasorError):
                cause = cause.__cause__
            if cause is None:
                raise
            raise cause from None
    _name_nodes(onnx_program.model.graph)
    _share_tables(onnx_program.model.graph)
    # with shared tables, layers of one Rope at the same positions compute the same cos and sin
    import_module("onnx_ir.passes.common").CommonSubexpressionEliminationPass()(onnx_program.model)
    return onnx_program


def translation_table(
    longest: int | None = None, reach: int | None = None, opset_version: int = _OPSET
) -> dict[Callable[..., Any], Callable[..., Any]]:
    """The ``custom_translation_table`` that `export` passes to ``torch.onnx.export``.

    For callers that merge it into their own table; pass the same ``opset_version``.

    >>> [operator.name() for operator in translation_table()]
    ['phasor::cos_sin', 'phasor::turn']
    """
    if longest is not None:
        whole("longest", longest, least=1)
    if reach is not None and whole("reach", reach, least=1) > 2**31:
        raise SpecError(
            f"reach must be at most 2**31, got {reach}; leave it out for every int64 position"
        )
    op = getattr(import_module("onnxscript"), f"opset{min(opset_version, _OPSET)}")
    turn_tensor = _turn_tensor if opset_version >= _OPSET else _turn_by_pairs

    def make_rows(
        positions: Any, text: str, gain: float, dtype: Any, backend: str
    ) -> tuple[Any, Any]:
        del dtype, backend  # these run during the export
        return _make_rows(op, positions, read_rope(text), gain, longest, reach)

    def turn(
        xs: Sequence[Any],
        cos: Any,
        sin: Any,
        pairing: Pairing,
        pairing_out: Pairing,
        rotary_start: int,
        transposed: bool,
        backend: str,
    ) -> Sequence[Any]:
        call = Turn(xs, cos, sin, pairing, pairing_out, rotary_start, transposed, backend)
        for x in xs:
            if x.dtype.name not in _FLOATS or not all(type(n) is int for n in x.shape[-2:]):
                raise TensorError(
                    "x must be float32, float16 or bfloat16 with a fixed number of heads for "
                    f"ONNX's RotaryEmbedding, got {x.dtype.name.lower()} of shape {list(x.shape)}; "
                    "export the model in float32"
                )
        num_pairs = cos.shape[-1]
        rows = [op.Cast(row, to=_FLOAT) for row in (cos, sin)]
        if transposed:
            rows[1] = op.Neg(rows[1])
        return [turn_tensor(op, x, rows, num_pairs, call.layout()) for x in xs]

    return {ops.cos_sin_operator: make_rows, ops.operator: turn}


def _refuse_writes(program: torch.export.ExportedProgram) -> None:
    for module in program.graph_module.modules():
        nodes = module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ()
        if any(node.target is ops.operator_ for node in nodes):
            raise BackendError(
                "model must not rotate in place, because ONNX has no writes; use rotate, rotate_qk "
                "or "
                "a Rotation instead of the functions with an underscore"
            )


def _name_nodes(graph: Any) -> None:
    """Give the names of all nodes of a rotation the prefix `NODES`."""
    for node in graph:
        if "torch.ops.phasor." in node.metadata_props.get("pkg.torch.onnx.fx_node", ""):
            node.name = NODES + str(node.name).removeprefix("node_")


def _share_tables(graph: Any) -> None:
    """Make all nodes with the same array use one initializer."""
    shared_values: dict[int, Any] = {}
    for name, value in list(graph.initializers.items()):
        shared = shared_values.setdefault(id(value.const_value.raw), value)
        if shared is not value and not value.is_graph_output():
            value.replace_all_uses_with(shared)
            del graph.initializers[name]


# The operator as nodes of a graph: calling an attribute of ``op`` makes a node, and so do ``+``,
# ``-``, ``*`` and ``<``, which convert a plain number to a constant in float32


def _turn_tensor(op: Any, x: Any, rows: Sequence[Any], num_pairs: int, layout: Layout) -> Any:
    """``x`` rotated by the standard operator, with a row of cos and of sin for every token."""
    heads, head_dim = cast(tuple[int, int], tuple(x.shape[-2:]))
    before, after = _permutations(head_dim, num_pairs, layout)
    shape, seq, tokens = op.Shape(x), op.Shape(x, start=-3, end=-2), op.Shape(x, end=-2)
    batch = op.Constant(value_ints=[-1])
    y = x if before is None else op.Gather(x, before, axis=-1)
    # cos, sin and arithmetic are float32, as in every other backend; the result is rounded once
    y = y if x.dtype.name == "FLOAT" else op.Cast(y, to=_FLOAT)
    # [..., seq, heads, head_dim] -> [batch, seq, heads * head_dim]
    width = op.Constant(value_ints=[heads * head_dim])
    y = op.Reshape(y, op.Concat(batch, seq, width, axis=0))
    # [..., seq, num_pairs], broadcast -> [batch, seq, num_pairs]
    pairs = op.Constant(value_ints=[num_pairs])
    full, flat = op.Concat(tokens, pairs, axis=0), op.Concat(batch, seq, pairs, axis=0)
    y = op.RotaryEmbedding(
        y,
        *[op.Reshape(op.Expand(row, full), flat) for row in rows],
        interleaved=by_pairing(layout.pairing, half=0, interleaved=1),
        num_heads=heads,
        rotary_embedding_dim=2 * num_pairs if 2 * num_pairs < head_dim else 0,
    )
    y = op.Reshape(y, shape)
    y = y if x.dtype.name == "FLOAT" else op.CastLike(y, x)
    return y if after is None else op.Gather(y, after, axis=-1)


def _permutations(
    head_dim: int, num_pairs: int, layout: Layout
) -> tuple[list[int] | None, list[int] | None]:
    """Coordinates to gather before and after the operator; None where nothing moves.

    Before, the rotated slice comes to the front, where the operator expects it. After, everything
    goes back, the slice in the pairing of the result.
    """
    start, width = layout.rotary_start, 2 * num_pairs
    indices = list(range(head_dim))
    before = [*indices[start : start + width], *indices[:start], *indices[start + width :]]
    after = [before.index(coordinate) for coordinate in indices]
    written_slices = slices(layout.pairing_out, num_pairs, start)
    for target, source in zip(written_slices, slices(layout.pairing, num_pairs), strict=True):
        after[target] = indices[source]
    return (None if before == indices else before), (None if after == indices else after)


def _turn_by_pairs(op: Any, x: Any, rows: Sequence[Any], num_pairs: int, layout: Layout) -> Any:
    """``x`` rotated by products and sums, which every opset has."""
    head_dim = int(x.shape[-1])
    indices, end = range(head_dim), layout.rotary_start + 2 * num_pairs
    unrotated = [*indices[: layout.rotary_start], *indices[end:]]
    read, written = (
        [i for part in slices(pairing, num_pairs, layout.rotary_start) for i in indices[part]]
        for pairing in (layout.pairing, layout.pairing_out)
    )
    # [..., seq, num_pairs] -> [..., seq, 1, num_pairs]
    cos, sin = (op.Unsqueeze(row, op.Constant(value_ints=[-2])) for row in rows)
    y = x if x.dtype.name == "FLOAT" else op.Cast(x, to=_FLOAT)
    # [..., seq, heads, head_dim] -> twice [..., seq, heads, num_pairs]
    x0, x1 = (op.Gather(y, part, axis=-1) for part in (read[:num_pairs], read[num_pairs:]))
    y0, y1 = op.Sub(op.Mul(x0, cos), op.Mul(x1, sin)), op.Add(op.Mul(x0, sin), op.Mul(x1, cos))
    unrotated_values = [op.Gather(y, unrotated, axis=-1)] if unrotated else []
    y = op.Concat(y0, y1, *unrotated_values, axis=-1)
    output_order = [*written, *unrotated]
    if output_order != [*indices]:
        y = op.Gather(y, [output_order.index(i) for i in indices], axis=-1)
    return y if x.dtype.name == "FLOAT" else op.CastLike(y, x)


class _OnnxOperations(NamedTuple):
    """The operations of `phasor._angle_digits` as nodes; ``op`` makes them."""

    op: Any

    def number(self, value: float, like: Any) -> Any:
        """A Constant."""
        return _constant(self.op, np.array(value, like.dtype.numpy()))

    def divide(self, numbers: Any, divisor: Any) -> Any:
        """Truncated according to the standard; some engines floor."""
        return self.op.Div(numbers, divisor)

    def as_int32(self, numbers: Any) -> Any:
        """A Cast."""
        return _typed(self.op.Cast(numbers, to=_INT32), _INT32)

    def as_float32(self, numbers: Any) -> Any:
        """A Cast."""
        return self.op.Cast(numbers, to=_FLOAT)

    def absolute(self, numbers: Any) -> Any:
        """An Abs."""
        return self.op.Abs(numbers)

    def nearest(self, numbers: Any) -> Any:
        """A Round, which rounds halves to even numbers."""
        return self.op.Round(numbers)

    def select_axis(self, numbers: Any, axis: int) -> Any:
        """A Gather."""
        return self.op.Gather(numbers, axis, axis=-2)

    def nan_unless(self, condition: Any, numbers: Any) -> Any:
        """A Where."""
        return self.op.Where(condition, numbers, np.nan)

    def constant(self, values: NDArray[Any]) -> Any:
        """A Constant, or for digits a list of Constants, because they are read one by one."""
        return [_constant(self.op, value) for value in values]


def _make_rows(
    op: Any, positions: Any, rope: Rope, gain: float, longest: int | None, reach: int | None
) -> tuple[Any, Any]:
    """Cos and sin ``[..., seq, num_pairs]`` float32, times the gain."""
    fractional = positions.dtype.name in ("FLOAT", "DOUBLE")
    if longest is None:
        is_short = reach is not None or positions.dtype.name not in ("INT64", "FLOAT", "DOUBLE")
        count = DIGITS_32 if is_short else DIGITS_64
        cos, sin = _compute_rows(op, positions, rope, fractional, count)
        return (cos, sin) if gain == 1.0 else (cos * gain, sin * gain)
    if fractional or rope.axes.n_axes > 1:
        problem = "fractions" if fractional else f"on {rope.axes.n_axes} axes"
        raise SpecError(
            f"longest makes tables for whole positions on one axis, got positions "
            f"{problem}; leave longest out"
        )
    rows = op.Cast(positions, to=_INT64)
    cos, sin = (
        op.Gather(_constant(op, table), rows, axis=0)
        for table in _position_tables(rope, longest, gain)
    )
    return cos, sin


def _compute_rows(
    op: Any, positions: Any, rope: Rope, fractional: bool, count: int
) -> tuple[Any, Any]:
    """Cos and sin ``[..., seq, num_pairs]`` float32, from ``count`` digits of the positions."""
    dtype = int(positions.dtype)
    if count == DIGITS_32 and not fractional:
        positions, dtype = op.Cast(positions, to=_INT32), _INT32
    if rope.axes.n_axes == 1:
        # [..., seq] -> [..., seq, 1]
        positions = op.Unsqueeze(positions, op.Constant(value_ints=[-1]))
    else:
        # [..., seq, n_axes] -> [..., seq, num_pairs]; with Mixed axes [..., seq, n_axes, num_pairs]
        indices = _constant(op, np.array(rope.axes.indices(rope.num_pairs)))
        positions = op.Gather(positions, indices, axis=-1)
    return cos_sin_of_positions(
        _typed(positions, dtype), rope, _OnnxOperations(op), fractional=fractional, count=count
    )


def _typed(value: Any, dtype: int) -> Any:
    """``value`` with its dtype set, which onnxscript would infer only for a complete graph."""
    value.dtype = import_module("onnxscript").ir.DataType(dtype)
    return value


@lru_cache(maxsize=4)
def _position_tables(rope: Rope, longest: int, gain: float) -> tuple[_Table, _Table]:
    cos, sin = cos_sin(range(longest), rope)
    return (gain * cos).astype(np.float32), (gain * sin).astype(np.float32)


def _constant(op: Any, values: Any) -> Any:
    return op.Constant(value=import_module("onnxscript").ir.tensor(np.asarray(values)))
