"""What embedding classes answer, and which Rope their cosines and sines are.

A live module may have been cast to 16 bit, moved to the meta device, or changed by what it was
called with. What a new instance of its class computes from its config has no such past.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from itertools import permutations
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
from phasor.torch._internals import outside_modes, outside_transforms
from phasor.torch.hf.carriers import Form, PositionLayout
from phasor.torch.hf.functions import call_rotation, measure_form
from phasor.torch.hf.modules import TABLE_MAKER

Grid = NDArray[np.int64]  # positions [axes, seq]
#: What foreign code may raise that is built and called as it was not meant to be.
FOREIGN_ERRORS = (
    TypeError, ValueError, RuntimeError, AttributeError, LookupError, ArithmeticError,
    AssertionError, ImportError,
)  # fmt: skip
#: Near, and far enough for slow pairs to show.
_NEAR, _FAR = (0, 1, 2, 3), (1, 64, 4096, 65536)
#: Far enough that slow pairs move by more than float32 loses.
FARTHEST = 1 << 14
_ROUNDING = 2.0**-24
_HEADS = 8
_WIDTH_KEYS = ("embed_dim", "hidden_size")
# exponents are whole numbers; float32 cosines give them to 1e-4
_WHOLE = 0.01
# one and the same real number, by two ways in float64
_SAME = 1e-14


@contextmanager
def isolated_torch_state() -> Generator[None]:
    """On the CPU and in float32, whatever device, dtype, mode or transformation is on outside."""
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
    """What a module multiplies positions and cosines by: its buffers and attention factors."""
    factors = {
        name: torch.as_tensor(value)
        for name, value in vars(module).items()
        if name.endswith("attention_scaling") and isinstance(value, (int, float, Tensor))
    }
    return factors | dict(module.named_buffers())


def base_of_config(config: Any) -> float | None:
    """The base that a config states, in its block or beside."""
    block: Any = getattr(config, "rope_parameters", None)
    inside = cast(Any, block).get("rope_theta") if isinstance(block, Mapping) else None
    return cast("float | None", inside or getattr(config, "rope_theta", None))


def call_embedding(
    module: Any, grid: Grid, layout: PositionLayout, kind: str | None, like: Tensor
) -> Any:
    """What an embedding module answers at positions ``[axes, seq]``.

    Args:
        module: The module.
        grid: The positions.
        layout: How it takes them.
        kind: The kind of layer to ask it for, if it takes one.
        like: Hidden states, which it takes its dtype and device from.
    """
    if layout.axis_order:
        grid = grid[np.argsort(layout.axis_order)]
    given = grid.T if layout.axes_last else grid
    if layout.batched:
        given = given[None] if layout.axes_last else given[:, None]
    if len(grid) == 1 and not layout.axes_last:
        given = given[0]
    kinds = [] if kind is None else [kind]
    return module(like, torch.as_tensor(given.copy(), device=like.device), *kinds)


# ---- rows of cosines and sines, and the Rope that they are ----


def each_row(answer: Any) -> tuple[Tensor, ...]:
    """Cosines and sines, or the one tensor that is both."""
    return (answer,) if isinstance(answer, Tensor) else tuple(answer)


def half_rows(answer: Any, form: Form) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Cosines and sines ``[seq, num_pairs]``, of rows as a rotation of that form takes them.

    Args:
        answer: ``(cos, sin)`` or one tensor for both, of one sequence, with or without a batch.
        form: The rotation's.
    """
    # [1, seq, width] -> [seq, width]
    rows = [row.reshape(-1, row.shape[-1]) for row in each_row(answer)]
    match form.width:
        case "complex":
            rows = torch.view_as_real(rows[0]).unbind(-1)
        case "table":
            rows = rows[0].chunk(2, -1)[::-1]
        case "twice":
            rows = [row.chunk(2, -1)[0] for row in rows]
        case "repeated":
            rows = [row[:, ::2] for row in rows]
        case "half":
            pass
    cos, sin = (row.double().numpy() for row in rows)
    return cos, sin


def rope_error(rope: Rope, form: Form, answer: Any, grid: Grid, gain: float | None = None) -> float:
    """How far ``rope`` is from what a rotation turns by, as a share of what float32 explains.

    At most 1 is right. The logarithm of a frequency is the product of ln(base) and an exponent,
    and a rounding of that is a relative error of the frequency; some roundings more make the law,
    the angle, the cosine and its gain.

    Args:
        rope: Whose angles and attention factor are compared; its head and slice are not.
        form: The rotation's geometry; infinity if the rope has another.
        answer: The rows that it is given, as in `half_rows`.
        grid: The positions ``[axes, seq]`` that they were made for.
        gain: Measured to 32 roundings, in the place of the rope's factor.
    """
    geometry = rope.pairing, rope.output_pairing, rope.direction
    if (form.pairing, form.pairing_out, form.direction) != geometry:
        return math.inf
    rows, pairs = half_rows(answer, form), rope.num_pairs
    if rows[0].shape[-1] != pairs or len(grid) != rope.axes.n_axes:
        return math.inf
    angles = grid[list(rope.axes.axis_of_pair(pairs))].T * rope.inv_freq
    roundings = np.log(rope.base or 1e4) * np.arange(pairs) / pairs + 8
    allowed = np.abs(angles) * roundings + (8 if gain is None else 40)
    gain = rope.attention_factor if gain is None else gain
    off = np.hypot(rows[0] - gain * np.cos(angles), rows[1] - gain * np.sin(angles))
    share = off / (gain * allowed * _ROUNDING)
    # a NaN is less than nothing, and right to nobody
    return float(share.max()) if np.isfinite(share).all() else math.inf


def spread_positions(end: int, n_axes: int = 1) -> Grid:
    """Positions ``[axes, seq]`` below ``end`` that show both the fastest and the slowest pair.

    Of several axes, equal coordinates first, then one axis after the other alone.
    """
    steps = list(range(min(9, max(end, 2))))
    while (farther := steps[-1] + steps[-1] // 2) < end:
        steps.append(farther)
    together = np.array(steps)
    if n_axes == 1:
        return together[None]
    alone = [np.where(np.arange(n_axes) == axis, together[1:, None], 0) for axis in range(n_axes)]
    return np.concatenate([every_axis(together, n_axes), *alone]).T


def identify_rows(
    function: Any, form: Form, answer: Any, grid: Grid, head_dim: int | None = None
) -> Identification:
    """Which rope random vectors show that ``function`` turns by these rows.

    Args:
        function: The rotation function.
        form: Its geometry.
        answer: The rows, of one sequence, with the batch and width that it wants.
        grid: The positions ``[axes, seq]`` that they were made for.
        head_dim: Width of the vectors; as many coordinates as the rows turn if None.
    """
    count, width = grid.shape[1], head_dim or 2 * half_rows(answer, form)[0].shape[-1]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, count, _HEADS, width, generator=generator, dtype=torch.float64)
    y = call_rotation(function, x.transpose(1, 2) if form.heads_first else x, answer)
    y = y.transpose(1, 2) if form.heads_first else y
    # [1, seq, heads, width] -> [seq * heads, width]
    before, after = (one.double().reshape(-1, width).numpy() for one in (x, y))
    positions = grid[0] if len(grid) == 1 else grid.T
    return identify_samples(before, after, positions.repeat(_HEADS, axis=0))


# ---- what a new instance answers ----


class FreshEmbedding:
    """What an embedding class makes of positions, for one kind of layer.

    Args:
        cls: The class, built from a config alone.
        config: Its config.
        kind: The kind of layer to ask it for, or None where it takes none.
    """

    form: Form | None = None
    farthest = _FAR[-1]

    def __init__(self, cls: Any, config: Any, kind: str | None) -> None:
        self._cls, self._config, self._kind = cls, config, kind
        self.buffers = buffers_and_factors(self._new())
        self.n_axes, self.layout = self._find_layout()
        self.single = isinstance(self(np.zeros((self.n_axes, 1), int)), Tensor)

    def __call__(self, grid: Grid) -> Any:
        """Cosines and sines, or complex numbers, at positions ``[axes, seq]``."""
        return self._answer(grid, self.layout)

    def _new(self) -> Any:
        # it may write into its config
        return self._cls(copy.deepcopy(self._config))

    def _answer(self, grid: Grid, layout: PositionLayout) -> Any:
        like = torch.zeros(1, grid.shape[1], 1)
        return call_embedding(self._new(), grid, layout, self._kind, like)

    def _forms(self, functions: Sequence[Any]) -> list[tuple[Any, Form]]:
        forms = [(function, measure_form(function, self.layout.batched)) for function in functions]
        return [
            (function, form)
            for function, form in forms
            if form is not None and (form.width == "complex") is self.single
        ]

    def turns_by(self, rope: Rope, functions: Sequence[Any]) -> bool:
        """Whether one of the functions, given this, turns as ``rope`` says, near and far."""
        if rope.axes.n_axes != self.n_axes:
            return False
        for places in (_NEAR, tuple(min(place, self.farthest) for place in _FAR)):
            grid = np.stack([np.roll(places, axis) for axis in range(self.n_axes)])
            if not self._is_explained(rope.at(max(places) + 1), functions, self(grid), grid):
                return False
        return True

    def _is_explained(self, rope: Rope, functions: Sequence[Any], answer: Any, grid: Grid) -> bool:
        for _, form in self._forms(functions):
            if rope_error(rope, form, answer, grid) <= 1:
                self.form = form
                return True
        return False

    def identify(self, functions: Sequence[Any]) -> Rope | None:
        """The Rope that is read off one of the functions, given this."""
        for function, form in self._forms(functions):
            rope = (
                self._axial(form) if self.layout.axes_last else self._identify_rope(function, form)
            )
            if rope is not None and self.turns_by(rope, functions):
                return rope
        return None

    def _axial(self, form: Form) -> Rope | None:
        found = axial_rope(half_rows(self(np.eye(self.n_axes, dtype=np.int64)), form), form,
                           base_of_config(self._config))  # fmt: skip
        if found is None:
            return None
        rope, order = found
        self.layout = self.layout._replace(axis_order=order)
        return rope

    def _identify_rope(self, function: Any, form: Form) -> Rope | None:
        grid = spread_positions(min(FARTHEST, self.farthest + 1), self.n_axes)
        try:
            return identify_rows(function, form, self(grid), grid).rope
        except PhasorError:
            return None

    def _find_layout(self) -> tuple[int, PositionLayout]:
        """How many coordinates a position may have, and how they have to stand."""
        first, last = PositionLayout(), PositionLayout(axes_last=True)
        for n_axes, layout in [
            *((n, first) for n in (3, 2, 4)),
            *((n, one) for n in (4, 3, 2) for one in (last._replace(batched=False), last)),
        ]:
            try:
                answer = self._answer(np.arange(5 * n_axes).reshape(n_axes, 5), layout)
                shapes = {rows.shape[:-1] for rows in each_row(answer)}
                fits = shapes == {(1, 5) if layout.batched else (5,)}
                if fits and (not layout.axes_last or self._uses_every_axis(n_axes, layout)):
                    return n_axes, layout
            except FOREIGN_ERRORS:
                continue
        return 1, first

    def _uses_every_axis(self, n_axes: int, layout: PositionLayout) -> bool:
        """Whether every coordinate turns something, and all together no more than a head."""
        steps = np.eye(n_axes, dtype=int)
        answers = [self._answer(steps[:, [axis]], layout) for axis in range(n_axes)]
        still = self._answer(np.zeros((n_axes, 1), int), layout)
        hidden = next((n for key in _WIDTH_KEYS if (n := getattr(self._config, key, None))), 0)
        width = getattr(self._config, "head_dim", None) or (
            hidden // self._config.num_attention_heads
        )
        return each_row(still)[0].shape[-1] <= width and not any(
            torch.equal(each_row(one)[-1], each_row(still)[-1]) for one in answers
        )


class FreshTable(FreshEmbedding):
    """What a new table of sines and cosines says, as GPT-J and CodeGen keep in attention.

    Args:
        cls: The class of attention that keeps the table.
        table: The table it has.
        name: What it is called.
    """

    def __init__(self, cls: Any, table: Tensor, name: str) -> None:
        self._table: Tensor = cls.forward.__globals__[TABLE_MAKER](*table.shape)
        self.buffers = {name: self._table}
        self.single, self.n_axes, self.layout = False, 1, PositionLayout()
        self.farthest = min(len(self._table) - 1, _FAR[-1])

    def __call__(self, grid: Grid) -> Any:
        sin, cos = self._table[torch.as_tensor(grid[:1])].chunk(2, -1)
        return cos, sin


class FreshGrid(FreshEmbedding):
    """What a module says that answers with one table of complex rows, whatever it is given.

    Llama 4's is of the patches of its one size of picture; positions are what explains its rows.

    Args:
        cls: The class, built from a config alone.
        config: Its config.
    """

    def __init__(self, cls: Any, config: Any) -> None:
        self._cls, self._config = cls, config
        made = self._new()
        answers = [made(torch.zeros(shape)) for shape in ((1, 1, 1), (2, 7, 3))]
        if not torch.equal(*answers) or not answers[0].is_complex():
            raise TypeError("what it answers is no table of complex rows")
        self._table = answers[0]
        self.buffers = buffers_and_factors(made)
        self.single, self.n_axes, self.layout = True, 2, PositionLayout(axes_last=True)

    def identify(self, functions: Sequence[Any]) -> Rope | None:
        """Height and width with a spectrum each, if whole positions explain every row."""
        base, pairs = base_of_config(self._config), self._table.shape[-1]
        for _, form in self._forms(functions):
            if base is None or pairs % 2:
                continue
            rope = _rope_of_form(form, pairs, Axial((pairs // 2, pairs // 2)), base, None)
            cos, sin = half_rows(self._table, form)
            # the slowest pair of each axis is the last to come round
            slow = [pairs // 2 - 1, pairs - 1]
            grid = (np.arctan2(sin, cos)[:, slow] / rope.inv_freq[slow]).round().T.astype(np.int64)
            if self._is_explained(rope, functions, self._table, grid):
                fixed = tuple((int(y), int(x)) for y, x in grid.T)
                self.layout = self.layout._replace(fixed=fixed)
                return rope
        return None


# ---- embeddings of pictures ----


def axial_rope(
    rows: tuple[NDArray[np.float64], ...], form: Form, base: float | None
) -> tuple[Rope, tuple[int, ...]] | None:
    """The Rope of several axes that an embedding of pictures makes cosines by.

    Each pair follows one coordinate. The frequencies are powers of one base, but which power a
    pair has, and which axis, differs from tower to tower: both are read off single steps.

    Args:
        rows: Cosines and sines ``[axes, num_pairs]`` one step along each axis.
        form: The geometry of the function that rotates by them.
        base: What the frequencies are powers of.

    Returns:
        The Rope, and which coordinate each of its axes is where they are given in another order.
    """
    cos, sin = rows
    steps = np.arctan2(sin, cos)  # [axis, pair]: a step along that axis turns the pair by this
    axes, pairs = steps.shape
    axis_of_pair = np.argmax(np.abs(steps), 0)
    turns = steps.max(0)
    if base is None or base <= 1 or np.count_nonzero(steps) > pairs or turns.min() <= 0:
        return None
    exponents = -np.log(turns) / math.log(base) * pairs
    powers = exponents.round()
    if np.abs(exponents - powers).max() > _WHOLE:
        return None
    counts = tuple(int(n) for n in np.bincount(axis_of_pair, minlength=axes))
    for order in permutations(range(axes)):
        wanted = tuple(order.index(int(axis)) for axis in axis_of_pair)
        for kind in (Axial, Sectioned, InterleavedSections):
            layout = kind(tuple(counts[axis] for axis in order))
            if _axis_of_pair(layout, pairs) == wanted:
                plain = _rope_of_form(form, pairs, layout, base, None)
                exact = tuple(base ** (-power / pairs) for power in powers)
                if not np.allclose(plain.inv_freq, exact, rtol=_SAME, atol=0):
                    if kind is Axial:
                        continue
                    plain = _rope_of_form(form, pairs, layout, None, exact)
                return plain, () if order == tuple(range(axes)) else order
    return None


def _axis_of_pair(layout: Axes, pairs: int) -> tuple[int, ...] | None:
    try:
        return layout.axis_of_pair(pairs)
    except SpecError:
        return None


def _rope_of_form(
    form: Form, pairs: int, axes: Axes, base: float | None, exact: tuple[float, ...] | None
) -> Rope:
    return Rope(
        head_dim=2 * pairs,
        pairing=form.pairing,
        pairing_out=form.pairing_out,
        direction=1 if form.direction > 0 else -1,
        base=base,
        axes=axes,
        explicit_inv_freq=exact,
    )
