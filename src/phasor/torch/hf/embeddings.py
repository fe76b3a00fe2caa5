"""The cosines and sines that embedding classes compute, and which Rope they belong to.

A live module may have been cast to 16 bit, moved to the meta device, or changed by earlier calls.
The reference is therefore a new instance of its class, built from its config.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import permutations
from operator import itemgetter
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from phasor.axes import Axes, Axial, InterleavedSections, Sectioned
from phasor.errors import PhasorError, SpecError
from phasor.identification import Identification, identify_samples
from phasor.positions import every_axis
from phasor.rope import Rope
from phasor.scaling import Rule
from phasor.torch._operator.internals import outside_modes, outside_transforms
from phasor.torch.hf.deferred import PositionFormat, RopeOfKind
from phasor.torch.hf.modules import TABLE, TABLE_MAKER, ModuleInfo
from phasor.torch.hf.signatures import RotationSignature, call_rotation, measure_signature

Grid = NDArray[np.int64]  # positions [axes, seq]
#: What foreign code may raise when it is built or called in a way that it was not written for.
FOREIGN_ERRORS = (
    TypeError, ValueError, RuntimeError, AttributeError, LookupError, ArithmeticError,
    AssertionError, ImportError,
)  # fmt: skip
#: Positions for fast pairs, and positions far enough to show slow pairs.
_NEAR, _FAR = (0, 1, 2, 3), (1, 64, 4096, 65536)
#: At this position the angle of a slow pair exceeds the rounding of float32.
FARTHEST = 1 << 14
_FLOAT32_ROUNDING = 2.0**-24
_HEADS = 8
# what a Rope and a signature have both
_GEOMETRY = ("pairing", "pairing_out", "direction")
_WIDTH_KEYS = ("embed_dim", "hidden_size")
# exponents are whole numbers; float32 cosines give them to 1e-4
_EXPONENT_TOLERANCE = 0.01
# between two float64 computations of the same real number
_FLOAT64_TOLERANCE = 1e-14


@contextmanager
def isolated_torch_state() -> Generator[None]:
    """Compute on the CPU in float32, whatever device, dtype, mode or transformation is active."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with (
            outside_modes(), outside_transforms(), torch.inference_mode(mode=False),
            torch.no_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"),
        ):  # fmt: skip
            yield
    finally:
        torch.set_default_dtype(usual)


def buffers_and_factors(module: nn.Module) -> dict[str, Tensor]:
    """The factors of a module's positions and cosines: its buffers and attention factors."""
    factors = {
        name: torch.as_tensor(value)
        for name, value in vars(module).items()
        if name.endswith("attention_scaling") and isinstance(value, (int, float, Tensor))
    }
    return factors | dict(module.named_buffers())


def base_of_config(config: Any) -> float | None:
    """The base that a config states in ``rope_parameters``, or else at its top level."""
    block: Any = getattr(config, "rope_parameters", None)
    inside = cast(Any, block).get("rope_theta") if isinstance(block, Mapping) else None
    return cast("float | None", inside or getattr(config, "rope_theta", None))


# ---- rows of cosines and sines, and the Rope that they belong to ----


def each_row(answer: Any) -> tuple[Tensor, ...]:
    """The tensors of an answer: cosines and sines, or one tensor that holds both."""
    return (answer,) if isinstance(answer, Tensor) else tuple(answer)


def half_rows(
    answer: Any, signature: RotationSignature
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Cosines and sines ``[seq, num_pairs]`` of one sequence, from rows for that signature."""
    # [1, seq, width] -> [seq, subheads, width / subheads]
    shape = (-1, signature.subheads, each_row(answer)[0].shape[-1] // signature.subheads)
    rows = [row.reshape(shape) for row in each_row(answer)]
    match signature.width:
        case "complex":
            rows = torch.view_as_real(rows[0]).unbind(-1)
        case "table":
            rows = rows[0].chunk(2, -1)[::-1]
        case "twice":
            rows = [row.chunk(2, -1)[0] for row in rows]
        case "repeated":
            rows = [row[..., ::2] for row in rows]
        case "half":
            pass
    # [seq, subheads, num_pairs / subheads] -> [seq, num_pairs]
    cos, sin = (row.flatten(-2).double().numpy() for row in rows)
    return cos, sin


def rope_error(rope: Rope, signature: RotationSignature, answer: Any, grid: Grid) -> float:
    """The distance of the rows from those of ``rope``, as a share of what float32 explains.

    At most 1 is right; infinity where pairs or direction differ. Head and slice are not compared.
    """
    geometry = rope.pairing, rope.output_pairing, rope.direction
    if tuple(getattr(signature, name) for name in _GEOMETRY) != geometry:
        return math.inf
    rows, pairs = half_rows(answer, signature), rope.num_pairs
    if rows[0].shape[-1] != pairs or len(grid) != rope.axes.n_axes:
        return math.inf
    angles = grid[list(rope.axes.axis_of_pair(pairs))].T * rope.inv_freq
    # the logarithm of a frequency is ln(base) times an exponent, and a rounding of that is a
    # relative error; the law, the angle, the cosine and its gain add some roundings more
    roundings = np.log(rope.base or 1e4) * np.arange(pairs) / pairs + 8
    allowed = np.abs(angles) * roundings + 8
    gain = rope.attention_factor
    error = np.hypot(rows[0] - gain * np.cos(angles), rows[1] - gain * np.sin(angles))
    share = error / (gain * allowed * _FLOAT32_ROUNDING)
    # rows with a NaN match no rope
    return float(share.max()) if np.isfinite(share).all() else math.inf


def spread_positions(end: int, n_axes: int = 1) -> Grid:
    """Positions ``[axes, seq]`` below ``end``: on all axes at once, then along each alone."""
    # close together for the fastest pair, and far apart for the slowest
    steps = list(range(min(9, max(end, 2))))
    while (next_step := steps[-1] + steps[-1] // 2) < end:
        steps.append(next_step)
    positions = np.array(steps)
    if n_axes == 1:
        return positions[None]
    single = [np.where(np.arange(n_axes) == axis, positions[1:, None], 0) for axis in range(n_axes)]
    return np.concatenate([every_axis(positions, n_axes), *single]).T


def positions_of_grid(grid: Grid) -> NDArray[np.int64]:
    """Positions ``[axes, seq]`` as a Rope takes them: ``[seq]``, or ``[seq, axes]`` of several."""
    return grid[0] if len(grid) == 1 else grid.T


def identify_module_rows(
    function: Any,
    signature: RotationSignature,
    answer: Any,
    grid: Grid,
    head_dim: int | None = None,
) -> Identification:
    """Identify the rope of ``function`` with rows made for ``grid``, by random vectors."""
    count, width = grid.shape[1], head_dim or 2 * half_rows(answer, signature)[0].shape[-1]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, count, _HEADS, width, generator=generator, dtype=torch.float64)
    y = call_rotation(function, x.transpose(1, 2) if signature.heads_first else x, answer)
    y = y.transpose(1, 2) if signature.heads_first else y
    # [1, seq, heads, width] -> [seq * heads, width]
    before, after = (tensor.double().reshape(-1, width).numpy() for tensor in (x, y))
    positions = positions_of_grid(grid).repeat(_HEADS, axis=0)
    return identify_samples(before, after, positions)


# ---- new instances as references ----


class ReferenceEmbedding:
    """A new instance of an embedding class, built from a config, for one kind of layer."""

    # of the function that rotates by its rows, once a rope has been found
    signature: RotationSignature | None = None
    position_format = PositionFormat()
    n_axes = 1
    farthest = _FAR[-1]  # the farthest position that it accepts

    def __init__(self, cls: Any, config: Any, kind: str | None) -> None:
        # a copy, because the class may write into its config
        self.instance: Any = cls(copy.deepcopy(config))
        self._config, self._kind = config, kind
        self.buffers = buffers_and_factors(self.instance)
        self._find_position_format()
        # whether it returns one complex tensor
        self.single = isinstance(self(np.zeros((self.n_axes, 1), int)), Tensor)

    def __call__(self, grid: Grid, kind: str | None = None) -> Any:
        """Cosines and sines, or complex numbers, at positions ``[axes, seq]``."""
        hidden = torch.zeros(1, grid.shape[1], 1)
        return self.rows_of(self.instance, grid, kind or self._kind, hidden)

    def rows_of(self, module: Any, grid: Grid, kind: str | None, hidden: Tensor) -> Any:
        """The same from any module of the class, for hidden states ``[1, seq, 1]``."""
        kinds = [] if kind is None else [kind]
        # a copy is called, because some modules keep what they were called with
        return copy.deepcopy(module)(hidden, self.position_ids(grid).to(hidden.device), *kinds)

    def position_ids(self, grid: Grid) -> Tensor:
        """Positions ``[axes, seq]`` in the layout in which the class takes them."""
        if self.position_format.axis_order:
            grid = grid[np.argsort(self.position_format.axis_order)]
        positions = grid.T if self.position_format.axes_last else grid
        if self.position_format.batched:
            positions = positions[None] if self.position_format.axes_last else positions[:, None]
        if len(grid) == 1 and not self.position_format.axes_last:
            positions = positions[0]
        return torch.tensor(positions)

    def _find_position_format(self) -> None:
        """Try how many coordinates a position may have, and in which order of dimensions."""
        last = PositionFormat(axes_last=True)
        found = [(0, 1, PositionFormat())]
        for self.n_axes, self.position_format in [
            *((n, PositionFormat()) for n in (3, 2, 4)),
            *((n, it) for n in (4, 3, 2) for it in (last._replace(batched=False), last)),
        ]:
            try:
                rows = each_row(self(np.arange(5 * self.n_axes).reshape(self.n_axes, 5)))
                # the tower of Sam 3 adds a batch that its positions have not
                expected = {(1, 5)} if self.position_format.batched else {(5,), (1, 5)}
                if not {it.shape[:-1] for it in rows} <= expected:
                    continue
                if not self.position_format.axes_last:
                    return
                if self._uses_every_axis():
                    found.append((rows[0].shape[-1], self.n_axes, self.position_format))
            except FOREIGN_ERRORS:
                continue
        # what takes a coordinate for a token has narrower rows
        _, self.n_axes, self.position_format = max(found, key=itemgetter(0))

    def _uses_every_axis(self) -> bool:
        """Whether every coordinate changes the rows, and these are no wider than a head."""
        steps = np.eye(self.n_axes, dtype=int)
        moved = [each_row(self(steps[:, [axis]]))[-1] for axis in range(self.n_axes)]
        at_zero = each_row(self(np.zeros((self.n_axes, 1), int)))
        config = self._config
        hidden = next((n for key in _WIDTH_KEYS if (n := getattr(config, key, None))), 0)
        width = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
        is_narrow = at_zero[0].shape[-1] <= width
        return is_narrow and not any(torch.equal(rows, at_zero[-1]) for rows in moved)

    def _signatures_of(self, functions: Sequence[Any]) -> list[tuple[Any, RotationSignature]]:
        """The functions that take the rows of this instance, each with its geometry."""
        found = ((it, measure_signature(it, self.position_format.batched)) for it in functions)
        return [(it, s) for it, s in found if s and (s.width == "complex") is self.single]

    def matches(self, rope: Rope, functions: Sequence[Any]) -> bool:
        """Whether one of the functions, with these rows, rotates as ``rope`` does, near and far."""
        if rope.axes.n_axes != self.n_axes:
            return False
        for positions in (_NEAR, tuple(min(p, self.farthest) for p in _FAR)):
            grid = np.stack([np.roll(positions, axis) for axis in range(self.n_axes)])
            if not self._find_signature(rope.at(max(positions) + 1), functions, self(grid), grid):
                return False
        return True

    def _find_signature(
        self, rope: Rope, functions: Sequence[Any], answer: Any, grid: Grid
    ) -> bool:
        """Set `signature` to that of a function that rotates as ``rope``; False if none does."""
        for _, signature in self._signatures_of(functions):
            if rope_error(rope, signature, answer, grid) <= 1:
                self.signature = signature
                return True
        return False

    def identify(self, functions: Sequence[Any]) -> Rope | None:
        """The Rope by which one of the functions rotates with these rows; None if none is found."""
        for function, signature in self._signatures_of(functions):
            if self.position_format.axes_last:
                steps = half_rows(self(np.eye(self.n_axes, dtype=np.int64)), signature)
                rope, order = axial_rope(steps, signature, base_of_config(self._config))
                self.position_format = self.position_format._replace(axis_order=order)
            else:
                grid = spread_positions(min(FARTHEST, self.farthest + 1), self.n_axes)
                try:
                    rope = identify_module_rows(function, signature, self(grid), grid).rope
                except PhasorError:
                    continue
            if rope is not None and self.matches(rope, functions):
                return rope
        return None


class ReferenceTable(ReferenceEmbedding):
    """A new table of sines and cosines, such as GPT-J and CodeGen keep in attention."""

    single, _kind = False, None

    def __init__(self, cls: Any, table: Tensor) -> None:
        self.instance = nn.Module()
        self.instance.register_buffer(TABLE, cls.forward.__globals__[TABLE_MAKER](*table.shape))
        self.buffers = buffers_and_factors(self.instance)
        self.farthest = min(len(table) - 1, _FAR[-1])

    def rows_of(self, module: Any, grid: Grid, kind: str | None, hidden: Tensor) -> Any:
        """The rows of a module's table."""
        sin, cos = module.get_buffer(TABLE)[torch.as_tensor(grid[:1])].chunk(2, -1)
        return cos, sin


class ReferenceGrid(ReferenceEmbedding):
    """A new module that returns one table of complex rows, for the only size of a picture.

    Llama 4 has one. The positions are found from the rows.
    """

    single, n_axes, position_format = True, 2, PositionFormat(axes_last=True)
    _kind = None

    def __init__(self, cls: Any, config: Any) -> None:
        self.instance, self._config = cls(copy.deepcopy(config)), config
        answers = [self.instance(torch.zeros(shape)) for shape in ((1, 1, 1), (2, 7, 3))]
        if not torch.equal(*answers) or not answers[0].is_complex():
            raise TypeError("its forward does not return a table of complex rows")
        self._table = answers[0]
        self.buffers = buffers_and_factors(self.instance)

    def rows_of(self, module: Any, grid: Grid, kind: str | None, hidden: Tensor) -> Any:
        """The module's table, whatever the positions."""
        return module(hidden)

    def identify(self, functions: Sequence[Any]) -> Rope | None:
        """A Rope with a spectrum for height and one for width, if it gives rows of the table."""
        base, pairs = base_of_config(self._config), self._table.shape[-1]
        for _, signature in self._signatures_of(functions):
            if base is None or pairs % 2:
                continue
            rope = _make_rope(signature, pairs, Axial((pairs // 2, pairs // 2)), base=base)
            cos, sin = half_rows(self._table, signature)
            # positions from the slowest pair of each axis, which makes less than half a turn
            slowest = [pairs // 2 - 1, pairs - 1]
            steps = np.arctan2(sin, cos)[:, slowest] / rope.inv_freq[slowest]
            grid = steps.round().T.astype(np.int64)
            if self._find_signature(rope, functions, self._table, grid):
                positions = tuple((int(y), int(x)) for y, x in grid.T)
                self.position_format = self.position_format._replace(fixed_positions=positions)
                return rope
        return None


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """A module that makes cosines and sines of positions."""

    info: ModuleInfo
    ropes: dict[str | None, Rope]  # of every kind of layer that it makes cosines for
    reference: ReferenceEmbedding

    def ropes_of_kinds(self, seq_len: int | None) -> dict[str | None, RopeOfKind]:
        """How every kind of layer rotates, under the law for ``seq_len`` tokens if one is given."""
        ropes_of_kinds: dict[str | None, RopeOfKind] = {}
        for kind, rope in self.ropes.items():
            law = rope if seq_len is None else rope.at(seq_len)
            gain = 1.0 if isinstance(law.scaling, Rule) else law.attention_factor
            text = replace(law, direction=1).to_json()
            ropes_of_kinds[kind] = RopeOfKind(text, gain, self.reference.position_format)
        return ropes_of_kinds


# ---- embeddings of pictures ----


def axial_rope(
    rows: tuple[NDArray[np.float64], ...], signature: RotationSignature, base: float | None
) -> tuple[Rope | None, tuple[int, ...]]:
    """The Rope of an embedding of pictures, if any, and its axes' coordinates if out of order.

    Frequencies are powers of one base, but a pair's power and axis differ from tower to tower.
    Both are found from ``rows``, cosines and sines ``[axes, num_pairs]`` one step along each axis.
    """
    cos, sin = rows
    steps = np.arctan2(sin, cos)  # [axis, pair]: the pair's angle after one step along the axis
    axes, pairs = steps.shape
    axis_of_pair = np.argmax(np.abs(steps), 0)
    frequencies = steps.max(0)
    if base is None or base <= 1 or np.count_nonzero(steps) > pairs or frequencies.min() <= 0:
        return None, ()
    exponents = -np.log(frequencies) / math.log(base) * pairs
    powers = exponents.round()
    if np.abs(exponents - powers).max() > _EXPONENT_TOLERANCE:
        return None, ()
    counts = tuple(int(n) for n in np.bincount(axis_of_pair, minlength=axes))
    for order in permutations(range(axes)):
        expected = tuple(order.index(int(axis)) for axis in axis_of_pair)
        sections = tuple(counts[axis] for axis in order)
        for layout in (Axial(sections), Sectioned(sections), InterleavedSections(sections)):
            try:
                if layout.axis_of_pair(pairs) != expected:
                    continue
            except SpecError:  # this layout cannot have these sections
                continue
            rope = _make_rope(signature, pairs, layout, base=base)
            exact = tuple(base ** (-power / pairs) for power in powers)
            if not np.allclose(rope.inv_freq, exact, rtol=_FLOAT64_TOLERANCE, atol=0):
                if isinstance(layout, Axial):
                    continue
                rope = _make_rope(signature, pairs, layout, base=None, explicit_inv_freq=exact)
            return rope, () if order == tuple(range(axes)) else order
    return None, ()


def _make_rope(signature: RotationSignature, pairs: int, axes: Axes, **frequencies: Any) -> Rope:
    geometry: dict[str, Any] = {name: getattr(signature, name) for name in _GEOMETRY}
    return Rope(head_dim=2 * pairs, axes=axes, **geometry, **frequencies)
