"""Models as ONNX files in which every rotation is the standard operator RotaryEmbedding.

What is in the file is what `phasor.torch.rotate` does, with the same rows of cos and sin. How a
standard operator is read, and caches of cos and sin become a Rope again, is in
`phasor.translation.onnx`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch.export
import torch.fx
import torch.onnx
from torch import nn

from phasor._checks import whole
from phasor.errors import BackendError, PhasorError, install_hint
from phasor.torch import ops
from phasor.torch.export import _graph

#: The first opset that has the operator.
OPSET = 23


def export(
    model: nn.Module | torch.export.ExportedProgram,
    args: Sequence[Any] = (),
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    longest: int | None = None,
    **options: Any,
) -> Any:
    """``model`` as an ONNX program, by way of ``torch.export`` and ``torch.onnx.export``.

    Every `phasor.torch.rotate` and its kin, but for those that write in place, becomes one
    RotaryEmbedding per tensor, in the pairing it reads. What the operator has no word for stands
    around it: a slice that begins inside the head, and a pairing of the result that differs, are
    one permutation of coordinates each; direction and inverse are the sign of sin; a gain is
    multiplied into both rows. Tensors of 16 bits are rotated in float32 and rounded once.

    Rows of cos and sin come from one of two places.

    * Unless ``longest`` is given, from the digit tables of `phasor.angles`, as on every other
      backend: correct to `phasor.angles.ROW_ERROR_40` at every whole position below 2**40 either
      way, NaN beyond; fractions and several axes included. 2 MB for 64 pairs.
    * With ``longest``, from two tables of that many rows, which are the operator's caches, indexed
      by its position_ids. Every entry is rounded once from within 1e-15. Positions are whole, on
      one axis and from 0 to ``longest - 1``; what an engine does at others is its own affair.

    Args:
        model: A module, or a program that ``torch.export.export`` made.
        args: Its example arguments, as for ``torch.export.export``.
        kwargs: Its example keyword arguments.
        dynamic_shapes: As for ``torch.export.export``.
        longest: Rows of a table of cos and sin; None for digits.
        options: The rest goes to ``torch.onnx.export``.

    Returns:
        A ``torch.onnx.ONNXProgram``: ``save`` writes it, calling it runs it in onnxruntime.

    Raises:
        BackendError: If ONNX's packages are not installed, or the model rotates in place.
        TensorError: If float64 is rotated, which the operator is not made for, or tensors with a
            changing number of heads.
        SpecError: If ``longest`` meets positions that are no rows of a table.

    >>> import torch
    >>> from phasor import Rope
    >>> from phasor.torch import RotaryAttention
    >>> rope = Rope(head_dim=8, pairing="half")
    >>> attention = RotaryAttention(16, query_heads=2, rope=rope).eval()
    >>> program = export(attention, (torch.zeros(1, 5, 16),), longest=1024)
    >>> [node.op_type for node in program.model.graph].count("RotaryEmbedding")
    2
    """
    for package in ("onnx", "onnxscript"):
        if find_spec(package) is None:
            raise BackendError(
                f"ONNX files are written with {package}, which is not installed: "
                f"{install_hint('onnx')}"
            )
    with warnings.catch_warnings():
        # torch's own lowering still calls what torch deprecates
        warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
        if isinstance(model, torch.export.ExportedProgram):
            program = model
        else:
            program = torch.export.export(
                model, tuple(args), dict(kwargs or {}), dynamic_shapes=dynamic_shapes
            )
        _refuse_writes(program)
        table = translation_table(longest)
        given: dict[str, Any] = {"opset_version": OPSET, "verbose": False} | options
        try:
            made: Any = torch.onnx.export(
                program, dynamo=True, custom_translation_table=table, **given
            )
        except Exception as error:
            # torch wraps what a translation raises in reports of its own
            found = _refusal(error)
            if found is None:
                raise
            raise found from None
    _share_tables(made.model.graph)
    # layers of one Rope at the same positions then have the same rows
    import_module("onnx_ir.passes.common").CommonSubexpressionEliminationPass()(made.model)
    return made


def translation_table(longest: int | None = None) -> dict[Callable[..., Any], Callable[..., Any]]:
    """What `export` gives to ``torch.onnx.export`` as ``custom_translation_table``.

    For callers with a table of their own to merge it into. The opset must be 23 or later.

    Args:
        longest: As for `export`.

    Raises:
        SpecError: If ``longest`` is not a whole number >= 1.

    >>> list(translation_table())
    [<OpOverload(op='phasor.rotate', overload='default')>]
    """
    if longest is not None:
        whole("longest", longest, least=1)

    def rotation(
        xs: Sequence[Any],
        angles: Sequence[Any],
        rope: str,
        inverse: bool,
        gain: float,
        backend: str,
    ) -> Sequence[Any]:
        del backend  # that of the machine that exports
        op = import_module("onnxscript").opset23
        return _graph.rotated(op, xs, angles, rope, inverse, gain, longest)

    return {ops.rotate: rotation}


def _refuse_writes(program: torch.export.ExportedProgram) -> None:
    for module in program.graph_module.modules():
        nodes = module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ()
        if any(node.target is ops.rotate_ for node in nodes):
            raise BackendError(
                "model must not rotate in place to become ONNX, which has no writes; use rotate, "
                "rotate_qk or rotate_by in place of their twins with an underscore"
            )


def _share_tables(graph: Any) -> None:
    """One initializer for each array, however many nodes brought it."""
    first: dict[int, Any] = {}
    for name, value in list(graph.initializers.items()):
        kept = first.setdefault(id(value.const_value.raw), value)
        if kept is not value and not value.is_graph_output():
            value.replace_all_uses_with(kept)
            del graph.initializers[name]


def _refusal(error: BaseException | None) -> PhasorError | None:
    while error is not None and not isinstance(error, PhasorError):
        error = error.__cause__
    return error
