"""A run that can be stopped anywhere: its state in one file, replaced in one step."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

State = dict[str, Any]


class Run:
    """What a run has found so far.

    Attributes:
        weights: Of the first training, once it is done.
        under_way: The training that was interrupted: its name, step, weights and optimizer.
        found: Bits by stage and way, ``[windows, bins]``.
        final: The loss of the last steps of each training.
    """

    def __init__(self, path: Path, made_of: dict[str, Any]) -> None:
        self._path, self._made_of = path, made_of
        self._spent, self._since = 0.0, time.process_time()
        self.weights: State | None = None
        self.under_way: State | None = None
        self.found: dict[str, Tensor] = {}
        self.final: dict[str, float] = {}
        if path.exists():
            self._load()

    @property
    def cpu_seconds(self) -> float:
        """Time of the processors on what the file holds and what came since."""
        return self._spent + time.process_time() - self._since

    def done(self, name: str) -> int:
        """Steps of this training that are behind."""
        return self.under_way["step"] if self.under_way and self.under_way["name"] == name else 0

    def save(self) -> None:
        """Write the file; whoever reads it finds the old state or the new one."""
        state = {
            "made_of": self._made_of,
            "spent": self.cpu_seconds,
            "weights": self.weights,
            "under_way": self.under_way,
            "found": self.found,
            "final": self.final,
        }
        replace(self._path, lambda temporary: torch.save(state, temporary))

    def finish(self) -> None:
        """Forget the state: the results are written."""
        self._path.unlink(missing_ok=True)

    def _load(self) -> None:
        state = torch.load(self._path, weights_only=True)
        other = [key for key, value in self._made_of.items() if state["made_of"].get(key) != value]
        if other:
            raise click.ClickException(
                f"{self._path} is the state of a run with other {', '.join(other)}; "
                "start that one again to finish it, or delete the file"
            )
        self._spent = state["spent"]
        self.weights, self.under_way = state["weights"], state["under_way"]
        self.found, self.final = state["found"], state["final"]


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Have ``write`` make a file beside ``path``, then put it in its place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
