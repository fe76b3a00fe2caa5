"""A new instance of a foreign embedding class, and which Rope its arithmetic is.

A live module may have been cast to 16 bit, moved to the meta device, or changed by what it was
called with. What its class computes from its config has no such past.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from phasor.errors import PhasorError
from phasor.identification import identify
from phasor.rope import Rope
from phasor.torch._internals import outside_modes, outside_transforms
from phasor.torch.transformers._axial import axial_rope
from phasor.torch.transformers._carriers import Form, Ids
from phasor.torch.transformers._forms import called_with, measured

#: What foreign code may raise that is built and called as it was not meant to be.
FOREIGN = (
    TypeError, ValueError, RuntimeError, AttributeError, LookupError, ArithmeticError,
    AssertionError, ImportError,
)  # fmt: skip
#: Near, and far enough for slow pairs to show.
_NEAR, _FAR = (0, 1, 2, 3), (1, 64, 4096, 65536)
# float32 frequencies and float32 angles: an ulp or two of each angle, and of its cosine
_ANGLE_ERROR, _ROW_ERROR = 4e-7, 2e-6
_HIDDEN = ("embed_dim", "hidden_size")


@contextmanager
def undisturbed() -> Generator[None]:
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


def held(module: nn.Module) -> dict[str, Tensor]:
    """What a module multiplies positions and cosines by: its buffers and attention factors."""
    factors = {
        name: torch.as_tensor(value)
        for name, value in vars(module).items()
        if name.endswith("attention_scaling") and isinstance(value, (int, float, Tensor))
    }
    return factors | dict(module.named_buffers())


def built(cls: Any, config: Any) -> Any:
    """A new instance, which may write into its config."""
    return cls(copy.deepcopy(config))


def asked(module: Any, grid: NDArray[np.int64], ids: Ids, label: str | None, like: Tensor) -> Any:
    """What an embedding module answers at positions ``[axes, seq]``.

    Args:
        module: The module.
        grid: The positions.
        ids: How it takes them.
        label: The kind of layer to ask it for, if it takes one.
        like: Hidden states, which it takes its dtype and device from.
    """
    if ids.order:
        grid = grid[np.argsort(ids.order)]
    given = grid.T if ids.last else grid
    if ids.batched:
        given = given[None] if ids.last else given[:, None]
    if len(grid) == 1 and not ids.last:
        given = given[0]
    words = [] if label is None else [label]
    return module(like, torch.as_tensor(given.copy(), device=like.device), *words)


class Fresh:
    """What an embedding class makes of positions, for one kind of layer.

    Args:
        cls: The class, built from a config alone.
        config: Its config.
        label: The kind of layer to ask it for, or None where it takes none.
    """

    def __init__(self, cls: Any, config: Any, label: str | None) -> None:
        self._cls, self._config, self._label = cls, config, label
        self.held = held(built(cls, config))
        self.axes, self.ids = self._taken()
        self.single = isinstance(self(np.zeros((self.axes, 1), int)), Tensor)
        self.most = 1 << 62
        self.form: Form | None = None

    def __call__(self, grid: NDArray[np.int64]) -> Any:
        """Cosines and sines ``[seq, width]``, or complex numbers, at positions ``[axes, seq]``."""
        return unbatched(self._answer(grid, self.ids), self.ids)

    def _answer(self, grid: NDArray[np.int64], ids: Ids) -> Any:
        like = torch.zeros(1, grid.shape[1], 1)
        return asked(built(self._cls, self._config), grid, ids, self._label, like)

    def is_by(self, rope: Rope, functions: Sequence[Any]) -> bool:
        """Whether one of the functions, given this, turns as ``rope`` says, near and far."""
        if rope.axes.n_axes != self.axes:
            return False
        for places in (_NEAR, tuple(min(place, self.most) for place in _FAR)):
            grid = np.stack([np.roll(places, axis) for axis in range(rope.axes.n_axes)])
            law, answer = rope.at(max(places) + 1), self(grid)
            if not any(self.explains(answer, law, grid, function) for function in functions):
                return False
        return True

    def explains(self, answer: Any, rope: Rope, grid: NDArray[np.int64], function: Any) -> bool:
        """Whether ``function`` and the answer together turn as ``rope`` does at those positions."""
        form = measured(function, self.ids.batched)
        if form is None or (form.width == "complex") is not isinstance(answer, Tensor):
            return False
        geometry = rope.pairing, rope.output_pairing, rope.direction
        if (form.pairing, form.pairing_out, form.direction) != geometry:
            return False
        pairs = rope.num_pairs
        doubled = form.width in ("twice", "repeated")
        rows = torch.view_as_real(answer).unbind(-1) if isinstance(answer, Tensor) else answer
        if rows[0].shape[-1] != (2 * pairs if doubled else pairs):
            return False
        cos, sin = halved(rows, form)
        angles = grid[list(rope.axes.axis_of_pair(pairs))].T * rope.inv_freq
        gain = rope.attention_factor
        bound = gain * (_ROW_ERROR + _ANGLE_ERROR * np.abs(angles))
        near = np.abs(cos - gain * np.cos(angles)) <= bound
        if not np.all(near & (np.abs(sin - gain * np.sin(angles)) <= bound)):
            return False
        self.form = form
        return True

    def identified(self, functions: Sequence[Any]) -> Rope | None:
        """The Rope that is read off one of the functions, given this."""
        for function in functions:
            form = measured(function, self.ids.batched)
            if form is None or (form.width == "complex") is not self.single:
                continue
            found = self._axial(form) if self.ids.last else self._named(function, form)
            if found is not None and self.is_by(found, functions):
                return found
        return None

    def _axial(self, form: Form) -> Rope | None:
        found = axial_rope(
            lambda grid: halved(self(grid), form), self.axes, form, base_of(self._config)
        )
        if found is None:
            return None
        rope, order = found
        self.ids = self.ids._replace(order=order)
        return rope

    def _named(self, function: Any, form: Form) -> Rope | None:
        """What `phasor.identify` calls it."""
        rows = self(np.zeros((self.axes, 1), int))
        width = _each(rows)[0].shape[-1]
        doubled = form.width in ("twice", "repeated")
        try:
            return identify(
                self._turning(function, form), width if doubled else 2 * width,
                takes="x positions", layout="bshd", arrays="torch", n_axes=self.axes,
            ).rope  # fmt: skip
        except PhasorError:
            return None

    def _turning(self, function: Any, form: Form) -> Any:
        def turn(x: Tensor, positions: Tensor) -> Tensor:
            grid = positions.reshape(x.shape[1], -1).T.numpy()
            given = x.transpose(1, 2) if form.heads_first else x
            done = called_with(function, given, self._answer(grid, self.ids))
            return done.transpose(1, 2) if form.heads_first else done

        return turn

    def _taken(self) -> tuple[int, Ids]:
        """How many coordinates a position may have, and how they have to stand."""
        first, last = Ids(), Ids(last=True)
        for axes, ids in [
            *((axes, first) for axes in (3, 2, 4)),
            *((axes, one) for axes in (4, 3, 2) for one in (last._replace(batched=False), last)),
        ]:
            try:
                answer = self._answer(np.arange(5 * axes).reshape(axes, 5), ids)
                shapes = {rows.shape[:-1] for rows in _each(answer)}
                fits = shapes == {(1, 5) if ids.batched else (5,)}
                if fits and (not ids.last or self._all_count(axes, ids)):
                    return axes, ids
            except FOREIGN:
                continue
        return 1, first

    def _all_count(self, axes: int, ids: Ids) -> bool:
        """Whether every coordinate turns something, and all together no more than a head."""
        answers = [self._answer(np.eye(axes, dtype=int)[:, [axis]], ids) for axis in range(axes)]
        still = self._answer(np.zeros((axes, 1), int), ids)
        hidden = next((n for key in _HIDDEN if (n := getattr(self._config, key, None))), 0)
        width = getattr(self._config, "head_dim", None) or (
            hidden // self._config.num_attention_heads
        )
        return _each(still)[0].shape[-1] <= width and not any(
            torch.equal(_each(one)[-1], _each(still)[-1]) for one in answers
        )


def base_of(config: Any) -> float | None:
    """The base that a config states, in its block or beside."""
    block: Any = getattr(config, "rope_parameters", None)
    inside = cast(Any, block).get("rope_theta") if isinstance(block, Mapping) else None
    return cast("float | None", inside or getattr(config, "rope_theta", None))


def halved(rows: Any, form: Form) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Cosines and sines ``[seq, num_pairs]``, of rows as a rotation of that form takes them."""
    if isinstance(rows, Tensor):
        rows = torch.view_as_real(rows).unbind(-1)
    pairs = rows[0].shape[-1] // 2 if form.width in ("twice", "repeated") else rows[0].shape[-1]
    once = slice(None, None, 2) if form.width == "repeated" else slice(None, pairs)
    cos, sin = (row[:, once].double().numpy() for row in rows)
    return cos, sin


def unbatched(answer: Any, ids: Ids) -> Any:
    """Rows ``[seq, width]`` of an answer for one sequence."""
    strip = tuple(rows[0] if ids.batched else rows for rows in _each(answer))
    return strip[0] if isinstance(answer, Tensor) else strip


def _each(answer: Any) -> tuple[Tensor, ...]:
    return (answer,) if isinstance(answer, Tensor) else tuple(answer)
