"""The measurements of an experiment: made once, kept, and read over seeds."""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

SEARCH_SEED = 1000  # learning rates are chosen on it, and nothing is reported of it
Row = dict[str, Any]


@dataclass
class Study:
    """The measurements of one experiment, saved after each one, so that a run can go on.

    Attributes:
        name: Of the experiment.
        settings: What the measurements depend on; others are discarded.
        folder: Where ``NAME.json``, ``NAME.svg`` and the trained weights are kept.
        seeds: Those that each contender runs with.
        measured: What has been measured, by key.
        seconds: Spent on it so far, over all sessions.
    """

    name: str
    settings: Row
    folder: Path
    seeds: range
    measured: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        path = self.folder / f"{self.name}.json"
        if path.exists():
            saved = json.loads(path.read_text("utf-8"))
            if saved["settings"] == json.loads(json.dumps(self.settings)):
                self.measured, self.seconds = saved["measured"], saved["seconds"]

    def measure(self, key: str, measurement: Callable[[], Any]) -> Any:
        """The result of ``measurement``, or what is saved under this key."""
        if key not in self.measured:
            begin, earlier = time.process_time(), self.seconds
            self.measured[key] = _rounded(measurement())
            # a measurement may contain others, whose time is in this one's
            self.seconds = earlier + time.process_time() - begin
            self.save()
        return self.measured[key]

    def each_seed(self, name: str, run: Callable[[int], Any]) -> None:
        """Measure for every seed what is drawn by it."""
        for seed in self.seeds:
            self.measure(f"{name}/seed {seed}", lambda s=seed: run(s))

    def weights(self, key: str) -> Path:
        """Where the weights of this training are kept."""
        return self.folder / "weights" / self.name / f"{key.replace('/', ', ')}.pt"

    def keep(self, key: str, model: nn.Module) -> None:
        """Keep the weights of a trained model under this key."""
        self.weights(key).parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), self.weights(key))

    def train(self, key: str, model: nn.Module, training: Callable[[], Any]) -> None:
        """Give ``model`` its weights after ``training``, or those kept under this key."""
        if not self.weights(key).exists():
            self.measured.pop(key, None)
            self.measure(key, training)
            self.keep(key, model)
        model.load_state_dict(torch.load(self.weights(key), weights_only=True))

    def search(
        self, contender: str, run: Callable[[str, float, int], Row], rates: str = "rates"
    ) -> float:
        """The rate of those in the settings with the lowest ``loss`` on the search seed.

        Args:
            contender: Its name, the beginning of its keys.
            run: Called with a key, a rate and a seed; returns at least a ``loss``.
            rates: Where in the settings the rates are.
        """
        choice: list[float] = self.settings[rates]
        losses: list[float] = []
        for rate in choice if len(choice) > 1 else []:
            key = f"{contender}/rate {rate:g}"
            loss = self.measure(key, lambda k=key, r=rate: run(k, r, SEARCH_SEED))["loss"]
            losses.append(loss if math.isfinite(loss) else math.inf)
        return choice[losses.index(min(losses))] if losses else choice[0]

    def compare(
        self, contender: str, run: Callable[[str, float, int], Row], rates: str = "rates"
    ) -> None:
        """Search the rate as `search` does, then run every seed with it."""
        rate = self.search(contender, run, rates)
        for seed in self.seeds:
            key = f"{contender}/seed {seed}"
            self.measure(key, lambda k=key, s=seed: run(k, rate, s))

    def over_seeds(self, contender: str, *path: str) -> list[Any]:
        """One number, or list, of every seed: ``measured["CONTENDER/seed 0"][path[0]]...``."""
        found = [self.measured[f"{contender}/seed {seed}"] for seed in self.seeds]
        for name in path:
            found = [one[name] for one in found]
        return found

    def rate(self, contender: str) -> str:
        """The learning rate that was chosen for it."""
        return f"{self.over_seeds(contender, 'rate')[0]:g}"

    def columns(self, contender: str, *path: str) -> list[list[float]]:
        """For each number in a list: that of every seed."""
        return [list(column) for column in zip(*self.over_seeds(contender, *path), strict=True)]

    def save(self) -> None:
        """Write ``NAME.json``; what was there stays whole until the new one is."""
        self.folder.mkdir(parents=True, exist_ok=True)
        packages = {name: version(name) for name in ("torch", "numpy", "altair")}
        content = {
            "name": self.name,
            "date": datetime.now(UTC).date().isoformat(),
            "versions": {"python": platform.python_version(), **packages},
            "machine": f"{platform.system()} {platform.machine()}, one thread",
            "seconds": round(self.seconds, 1),
            "seeds": len(self.seeds),
            "first_seed": self.seeds.start,
            "settings": self.settings,
            "measured": self.measured,
        }
        path = self.folder / f"{self.name}.json"
        draft = path.with_suffix(".tmp")
        draft.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
        draft.replace(path)


def _rounded(value: Any) -> Any:
    """The value with numbers of five digits, which is more than three seeds can tell."""
    if isinstance(value, Mapping):
        return {str(key): _rounded(part) for key, part in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_rounded(part) for part in value]
    return float(f"{value:.5g}") if isinstance(value, float | np.floating) else value
