"""What a program is asked to turn, and how the code that was written is run."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from phasor import LayerRopes
from phasor.files.translation import ProgramSettings


@dataclass(frozen=True)
class Job:
    """Tokens to turn with what was written.

    Attributes:
        ropes: The model's.
        part: What was written for some of its layers.
        kind: The kind of layer to perform.
        x: float32 ``[seq, head_dim]``, with pairs as the program reads them.
        offset: Position of the first token.
        coordinates: Those of the tokens on each axis, ``[n_axes, seq]``, instead of the offset.
    """

    ropes: LayerRopes
    part: ProgramSettings
    kind: str
    x: np.ndarray
    offset: int
    coordinates: np.ndarray | None = None

    @property
    def positions(self) -> np.ndarray:
        """``[seq]``, or ``[n_axes, seq]`` for a model with several axes."""
        if self.coordinates is not None:
            return self.coordinates
        line = np.arange(self.offset, self.offset + len(self.x))
        n_axes = self.part.ropes[self.kind].axes.n_axes
        return line if n_axes == 1 else np.tile(line, (n_axes, 1))


def run_code(part: ProgramSettings, **names: Any) -> Any:
    """The value of the last line of ``part.code``, with its settings and ``names`` as variables.

    The code imports what else it needs.
    """
    return run_all(part, **names)[0]


def run_all(part: ProgramSettings, **names: Any) -> tuple[Any, dict[str, Any]]:
    """The same, and all variables that the code leaves."""
    *before, last = ast.parse(part.code).body
    assert isinstance(last, ast.Expr), "the code ends in a call"
    scope = {**part.settings, **names}
    exec(compile(ast.Module(before, []), "<code>", "exec"), scope)
    return eval(compile(ast.Expression(last.value), "<code>", "eval"), scope), scope


def on_slice(job: Job, turn: Callable[[np.ndarray], Any]) -> np.ndarray:
    """The tokens with what ``turn`` makes of the slice of a head that its program is given."""
    start = job.part.ropes[job.kind].rotary_start
    turned = np.asarray(turn(job.x[:, start:]), dtype=np.float64)
    return np.concatenate([job.x[:, :start], turned], axis=-1)


def own_block(job: Job) -> dict[str, Any]:
    """A config's keys with the block of a kind of layer, as a class gives them its reader."""
    keys = dict(job.part.settings)
    block = keys["rope_parameters"]
    if "rope_type" in block:
        assert keys["rope_theta"] == block["rope_theta"]
        assert keys["rope_scaling"] in (block, None)
        assert keys["rope_scaling"] or block["rope_type"] == "default"
        return keys
    # what is outside is for classes that read no block for each kind
    assert keys["rope_scaling"] is None or keys["rope_scaling"] in block.values()
    own = block[job.ropes.in_config.label(job.kind)]
    inside = {key: keys[key] for key in keys if key not in ("rope_theta", "rope_local_base_freq")}
    return inside | {"rope_parameters": own, "rope_scaling": None}
