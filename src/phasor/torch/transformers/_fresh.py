"""A new instance of a foreign embedding class, and which Rope its arithmetic is.

A live module may have been cast to 16 bit, moved to the meta device, or changed by what it was
called with. What its class computes from its config has no such past.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phasor.conventions import identify
from phasor.errors import PhasorError
from phasor.frequencies import inv_freq
from phasor.spec import Rope
from phasor.torch.transformers._carriers import Form
from phasor.torch.transformers._forms import called_with, measured

#: Near, and far enough for slow pairs to show.
_NEAR, _FAR = (0, 1, 2, 3), (1, 64, 4096, 65536)
# float32 frequencies and float32 angles: an ulp or two of each angle, and of its cosine
_ANGLE_ERROR, _ROW_ERROR = 4e-7, 2e-6


def held(module: torch.nn.Module) -> dict[str, Tensor]:
    """What a module multiplies positions and cosines by: its buffers and attention factors."""
    factors = {
        name: torch.as_tensor(value)
        for name, value in vars(module).items()
        if name.endswith("attention_scaling") and isinstance(value, (int, float, Tensor))
    }
    return factors | dict(module.named_buffers())


class Fresh:
    """What an embedding class makes of positions, for one kind of layer.

    Args:
        cls: The class, built from a config alone.
        config: Its config.
        label: The kind of layer to ask it for, or None where it takes none.
    """

    def __init__(self, cls: Any, config: Any, label: str | None) -> None:
        self._cls, self._config, self._label = cls, config, label
        self.held = held(self._built())
        self.single = isinstance(self(np.array([[0]])), Tensor)
        self.axes = self._axes()
        self.most = 1 << 62

    def _built(self) -> Any:
        with torch.device("cpu"):
            return self._cls(copy.deepcopy(self._config))

    def __call__(self, grid: NDArray[np.int64]) -> Any:
        """Cosines and sines, or one complex tensor, at positions ``[axes, seq]``."""
        ids = torch.as_tensor(grid)[:, None]
        given = [torch.zeros(1, grid.shape[1], 1), ids if len(grid) > 1 else ids[0]]
        with torch.no_grad():
            built = self._built()
            return built(*given) if self._label is None else built(*given, self._label)

    def is_by(self, rope: Rope, functions: Sequence[Any]) -> bool:
        """Whether one of the functions, given this, turns as ``rope`` says, near and far."""
        if rope.axes.n_axes != self.axes:
            return False
        for places in (_NEAR, tuple(min(place, self.most) for place in _FAR)):
            grid = np.stack([np.roll(places, axis) for axis in range(rope.axes.n_axes)])
            law, answer = rope.at(max(places) + 1), self(grid)
            if not any(_explains(answer, law, grid, function) for function in functions):
                return False
        return True

    def identified(self, functions: Sequence[Any]) -> Rope | None:
        """The Rope that `phasor.identify` reads off one of the functions, given this."""
        for function in functions:
            form = cast(Form, measured(function))
            if (form.width == "complex") is not self.single:
                continue
            rows = self(np.array([[0]]))
            width = (rows if self.single else rows[0]).shape[-1]
            doubled = form.width in ("twice", "repeated")
            try:
                found = identify(
                    self._turning(function, form), width if doubled else 2 * width,
                    takes="x positions", layout="bshd", arrays="torch", n_axes=self.axes,
                )  # fmt: skip
            except PhasorError:
                continue
            if found.rope is not None and self.is_by(found.rope, functions):
                return found.rope
        return None

    def _turning(self, function: Any, form: Form) -> Any:
        def turn(x: Tensor, positions: Tensor) -> Tensor:
            grid = positions.reshape(x.shape[1], -1).T.numpy()
            given = x.transpose(1, 2) if form.heads_first else x
            done = called_with(function, given, self(grid))
            return done.transpose(1, 2) if form.heads_first else done

        return turn

    def _axes(self) -> int:
        """How many coordinates a position may have: more than one for images and videos."""
        for axes in (3, 2, 4):
            try:
                answer = self(np.arange(2 * axes).reshape(axes, 2))
            except (RuntimeError, ValueError, IndexError):
                continue
            if (answer if self.single else answer[0]).dim() == 3:
                return axes
        return 1


def _explains(answer: Any, rope: Rope, grid: NDArray[np.int64], function: Any) -> bool:
    """Whether ``function`` and the answer together turn as ``rope`` does at those positions."""
    form = cast(Form, measured(function))
    if (form.width == "complex") is not isinstance(answer, Tensor):
        return False
    geometry = rope.pairing, rope.output_pairing, rope.direction
    if (form.pairing, form.pairing_out, form.direction) != geometry:
        return False
    rows = torch.view_as_real(answer).unbind(-1) if isinstance(answer, Tensor) else answer
    pairs = rope.num_pairs
    if rows[0].shape[-1] != (2 * pairs if form.width in ("twice", "repeated") else pairs):
        return False
    once = slice(None, None, 2) if form.width == "repeated" else slice(None, pairs)
    cos, sin = (row[0, :, once].double().numpy() for row in rows)
    angles = grid[list(rope.axes.axis_of_pair(pairs))].T * inv_freq(rope)
    gain = rope.attention_factor
    bound = gain * (_ROW_ERROR + _ANGLE_ERROR * np.abs(angles))
    near = np.abs(cos - gain * np.cos(angles)) <= bound
    return bool(np.all(near & (np.abs(sin - gain * np.sin(angles)) <= bound)))
