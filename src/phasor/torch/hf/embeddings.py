"""The cosines and sines that embedding classes compute, and which Rope they belong to.

A live module may have been cast to 16 bit, moved to the meta device, or changed by earlier calls.
The reference is therefore a new instance of its class, built from its config.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import permutations, product
from operator import itemgetter
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from phasor.axes import Axial
from phasor.errors import PhasorError
from phasor.identification import Identification, identify_samples
from phasor.positions import every_axis
from phasor.rope import Rope
from phasor.torch._operator.internals import outside_modes, outside_transforms
from phasor.torch.functional import rotate_by
from phasor.torch.hf.modules import TABLE, TABLE_MAKER, ModuleInfo
from phasor.torch.hf.rotations import (
    PositionFormat,
    RopeOfKind,
    RotationSignature,
    measure_signature,
)

Grid = NDArray[np.int64]  # positions [axes, seq]
_Rows = NDArray[np.float64]  # [seq, num_pairs]
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
# that are compared with exact cosines
_MAX_POSITIONS = 1 << 16
# of the random vectors that rows are identified by
_HEADS = 8


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


def each_row(answer: Any) -> tuple[Tensor, ...]:
    """The tensors of an answer: cosines and sines, or one tensor that holds both."""
    return (answer,) if isinstance(answer, Tensor) else tuple(answer)


def half_rows(answer: Any, signature: RotationSignature | None) -> tuple[_Rows, _Rows]:
    """Cosines and sines ``[seq, num_pairs]`` of one sequence, from rows for that signature."""
    assert signature is not None, "a rope was found for it"
    # [1, seq, width] -> [seq, subheads, width / subheads]
    shape = (-1, signature.subheads, each_row(answer)[0].shape[-1] // signature.subheads)
    rows = [row.reshape(shape) for row in each_row(answer)]
    match signature.width:
        case "complex":
            rows = torch.view_as_real(rows[0]).unbind(-1)
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
    if signature[:3] != (rope.pairing, rope.output_pairing, rope.direction):
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


def rolled_positions(positions: Sequence[int], n_axes: int) -> Grid:
    """Positions ``[axes, seq]`` of tokens with another coordinate on each axis."""
    return np.stack([np.roll(positions, axis) for axis in range(n_axes)])


def identify_rows(answer: Any, signature: RotationSignature, grid: Grid) -> Identification | None:
    """What rows made for ``grid`` turn by, told by vectors that they rotate; None if nothing."""
    cos, sin = (torch.from_numpy(row) for row in half_rows(answer, signature))
    generator = torch.Generator().manual_seed(0)
    # [seq, heads, head_dim] -> [seq * heads, head_dim]
    x = torch.randn(len(cos), _HEADS, 2 * cos.shape[-1], generator=generator, dtype=torch.float64)
    y = rotate_by(
        x, cos, signature.direction * sin, pairing=signature.pairing,
        pairing_out=signature.pairing_out, backend="eager",
    )  # fmt: skip
    before, after = (tensor.flatten(0, 1).numpy() for tensor in (x, y))
    with suppress(PhasorError):
        return identify_samples(before, after, positions_of_grid(grid).repeat(_HEADS, axis=0))
    return None


def with_powers(rope: Rope, base: float | None) -> Rope | None:
    """``rope`` with frequencies that are powers of ``base``; None if those it has are not close.

    Towers have such powers, but in which order differs, and a law that fits a few of them too.
    """
    if base is None or base <= 1:
        return None
    pairs = rope.num_pairs
    exponents = -np.log(rope.inv_freq) / math.log(base) * pairs
    powers = exponents.round()
    if np.abs(exponents - powers).max() > 0.01:  # float32 cosines give whole numbers to 1e-4
        return None
    plain = replace(rope, base=base, scaling=None, explicit_inv_freq=None)
    exact = tuple(base ** (-power / pairs) for power in powers)
    if np.allclose(plain.inv_freq, exact, rtol=1e-14, atol=0):  # of the same numbers in float64
        return plain
    return replace(plain, base=None, explicit_inv_freq=exact)


class _Table(nn.Module):
    """Makes rows as attention with a table of sines does, such as that of GPT-J and CodeGen."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer(TABLE, table)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        del x
        sin, cos = self.get_buffer(TABLE)[position_ids].chunk(2, -1)
        return cos, sin


class Embedding:
    """The rotary embeddings of one class and config, as a new instance of it answers."""

    # of the function that rotates by its rows, once a rope has been found
    signature: RotationSignature | None = None
    position_format = PositionFormat()
    limit = 1 << 62  # positions are below this

    def __init__(self, modules: Sequence[ModuleInfo]) -> None:
        self.modules, self.info = modules, modules[0]
        module, cls = self.info.module, cast(Any, self.info.cls)
        by_kind: Any = getattr(module, "rope_type", None)
        self.kinds: list[str | None] = (isinstance(by_kind, dict) and [*by_kind]) or [None]
        self.ropes: dict[str | None, Rope] = {}  # of every kind of layer that it has cosines for
        if self.info.holds_table:
            shape = module.get_buffer(TABLE).shape
            self.limit = shape[0]
            self.instance: Any = _Table(cls.forward.__globals__[TABLE_MAKER](*shape))
        else:
            # a copy, because the class may write into its config
            self.instance = cls(copy.deepcopy(self.info.config))
        self.buffers = buffers_and_factors(self.instance)
        self.position_format = self._find_position_format()
        is_complex = isinstance(self(np.zeros((self.n_axes, 1), int)), Tensor)
        self.position_format = self.position_format._replace(is_complex=is_complex)

    @property
    def n_axes(self) -> int:
        """The number of coordinates of a position."""
        return self.position_format.n_axes

    def __call__(self, grid: Grid, kind: str | None = None) -> Any:
        """Cosines and sines, or complex numbers, at positions ``[axes, seq]``."""
        hidden = torch.zeros(1, grid.shape[1], 1)
        return self.rows_of(self.instance, grid, kind or self.kinds[0], hidden)

    def rows_of(self, module: Any, grid: Grid, kind: str | None, hidden: Tensor) -> Any:
        """The same from any module of the class, for hidden states ``[1, seq, 1]``."""
        if self.info.holds_table:
            module = _Table(module.get_buffer(TABLE))
        ids = torch.tensor(self.position_format.position_ids(grid), device=hidden.device)
        # a copy is called, because some modules keep what they were called with
        return copy.deepcopy(module)(hidden, ids, *([] if kind is None else [kind]))

    def _find_position_format(self) -> PositionFormat:
        """Try how many coordinates a position may have, and in which order of dimensions."""
        if self.info.holds_table:
            return PositionFormat()
        last = PositionFormat(axes_last=True)
        found = [(0, PositionFormat())]
        for it in [
            *(PositionFormat(n) for n in (3, 2, 4)),
            *(last._replace(n_axes=n, batched=b) for n in (4, 3, 2) for b in (False, True)),
        ]:
            self.position_format = it
            # the tower of Sam 3 adds a batch that its positions have not
            expected = {(1, 5)} if it.batched else {(5,), (1, 5)}
            with suppress(*FOREIGN_ERRORS):
                rows = each_row(self(np.arange(5 * it.n_axes).reshape(it.n_axes, 5)))
                if {row.shape[:-1] for row in rows} <= expected:
                    if not it.axes_last:
                        return it
                    if self._uses_every_axis():
                        found.append((rows[0].shape[-1], it))
        # what takes a coordinate for a token has narrower rows
        return max(found, key=itemgetter(0))[1]

    def _uses_every_axis(self) -> bool:
        """Whether every coordinate changes the rows, and these are no wider than a head."""
        # the origin, and a step from it along each axis
        grid = np.eye(self.n_axes, self.n_axes + 1, 1, dtype=int)
        origin, *moved = each_row(self(grid))[-1].reshape(self.n_axes + 1, -1)
        config = self.info.config
        hidden = getattr(config, "embed_dim", None) or getattr(config, "hidden_size", None) or 0
        width = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
        return len(origin) <= width and not any(torch.equal(row, origin) for row in moved)

    def _signatures_of(self, functions: Sequence[Any]) -> list[RotationSignature]:
        """The geometry of each function that takes the rows of this instance."""
        its_format = self.position_format
        found = (measure_signature(it, its_format.batched) for it in functions)
        return [it for it in found if it and (it.width == "complex") is its_format.is_complex]

    def sample_grids(self) -> list[Grid]:
        """Positions ``[axes, seq]`` near and far, or all to which the module is fixed."""
        if fixed := self.position_format.fixed_positions:
            return [np.array(fixed).T]
        far = [min(p, self.limit - 1) for p in _FAR]
        return [rolled_positions(positions, self.n_axes) for positions in (_NEAR, far)]

    def spread_grid(self, context: int) -> Grid:
        """Positions ``[axes, seq]`` below ``context``, equal on every axis, or all fixed ones."""
        if self.position_format.fixed_positions:
            return self.sample_grids()[0]
        context = min(context, self.limit)
        count = min(context, _MAX_POSITIONS)
        positions = np.unique(np.linspace(0, context - 1, count).round().astype(np.int64))
        return np.tile(positions, (self.n_axes, 1))

    def matches(self, rope: Rope, functions: Sequence[Any], kind: str | None) -> bool:
        """Whether one of the functions, with these rows, rotates as ``rope`` does; sets that."""
        cases = [(rope.at(int(it.max()) + 1), self(it, kind), it) for it in self.sample_grids()]
        for signature in self._signatures_of(functions):
            if all(rope_error(law, signature, rows, grid) <= 1 for law, rows, grid in cases):
                self.signature = signature
                return True
        return False

    def identify(self, functions: Sequence[Any], kind: str | None) -> Rope | None:
        """The Rope by which one of the functions rotates with these rows; None if none is found."""
        grid = spread_positions(min(FARTHEST, self.limit), self.n_axes)
        in_order, is_picture = tuple(range(self.n_axes)), self.position_format.axes_last
        orders = list(permutations(in_order)) if is_picture else [in_order]
        for signature, order in product(self._signatures_of(functions), orders):
            axis_order = () if order == in_order else order
            self.position_format = self.position_format._replace(axis_order=axis_order)
            found = identify_rows(self(grid, kind), signature, grid)
            rope = found and found.rope
            if rope is not None and is_picture:
                rope = with_powers(rope, base_of_config(self.info.config))
            if rope is not None and self.matches(rope, functions, kind):
                return rope
        return None

    def ropes_of_kinds(self, seq_len: int | None) -> dict[str | None, RopeOfKind]:
        """How every kind of layer rotates, under the law for ``seq_len`` tokens if one is given."""
        laws = {kind: it if seq_len is None else it.at(seq_len) for kind, it in self.ropes.items()}
        its_format = self.position_format
        return {kind: RopeOfKind(replace(it, direction=1), its_format) for kind, it in laws.items()}


class EmbeddingGrid(Embedding):
    """One table of complex rows for the only size of a picture, as Llama 4 has; it is read."""

    def _find_position_format(self) -> PositionFormat:
        answers = [self.instance(torch.zeros(shape)) for shape in ((1, 1, 1), (2, 7, 3))]
        if not torch.equal(*answers) or not answers[0].is_complex():
            raise TypeError("its forward does not return a table of complex rows")
        return PositionFormat(2, axes_last=True)

    def rows_of(self, module: Any, grid: Grid, kind: str | None, hidden: Tensor) -> Any:
        """The module's table, whatever the positions."""
        return module(hidden)

    def identify(self, functions: Sequence[Any], kind: str | None) -> Rope | None:
        """A Rope with a spectrum for height and one for width, if it gives rows of the table."""
        table = self.instance(torch.zeros(1, 1, 1))
        base, pairs = base_of_config(self.info.config), table.shape[-1]
        for signature in self._signatures_of(functions) if base and pairs % 2 == 0 else ():
            rope = Rope(
                head_dim=2 * pairs,
                base=base,
                axes=Axial((pairs // 2, pairs // 2)),
                pairing=signature.pairing,
                pairing_out=signature.pairing_out,
                direction=cast(Any, signature.direction),
            )
            cos, sin = half_rows(table, signature)
            # positions from the slowest pair of each axis, which makes less than half a turn
            slowest = [pairs // 2 - 1, pairs - 1]
            steps = np.arctan2(sin, cos)[:, slowest] / rope.inv_freq[slowest]
            positions = tuple((int(y), int(x)) for y, x in steps.round())
            self.position_format = self.position_format._replace(fixed_positions=positions)
            if self.matches(rope, functions, kind):
                return rope
        return None
