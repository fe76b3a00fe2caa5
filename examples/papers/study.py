"""The measurements of an experiment: made once, kept, and read over seeds."""

from __future__ import annotations

import json
import math
import platform
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

WIDENED = 2  # times that further rates are tried where the best one is at an end
Row = dict[str, Any]


@dataclass
class Study:
    """The measurements of one experiment, saved after each one, so that a run can go on."""

    name: str
    settings: Row  # what the measurements depend on; others are discarded
    folder: Path  # of NAME.json, NAME.svg and the trained weights
    seeds: range  # those that each contender runs with
    measured: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0  # of processor time spent so far, over all sessions

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

    def train(self, key: str, model: nn.Module, training: Callable[[], Any]) -> None:
        """Give ``model`` its weights after ``training``, or those kept under this key."""
        weights = self.folder / "weights" / self.name / f"{key.replace('/', ', ')}.pt"
        if not weights.exists():
            self.measured.pop(key, None)
            self.measure(key, training)
            weights.parent.mkdir(parents=True, exist_ok=True)
            torch.save(model.state_dict(), weights)
        model.load_state_dict(torch.load(weights, weights_only=True))

    def compare(
        self, contender: str, run: Callable[[str, float, int], Row], rates: str = "rates"
    ) -> None:
        """Run every rate of the settings with every seed, and more beyond an end that is best.

        ``run`` is called with a key, a rate and a seed, and returns at least a ``loss``.
        """
        tried: list[float] = self.settings[rates]
        for _ in range(1 + WIDENED):
            for rate, seed in product(tried, self.seeds):
                key = f"{contender}/rate {rate:g}/seed {seed}"
                self.measure(key, partial(run, key, rate, seed))
            best = self.rate(contender, tried)
            if len(tried) == 1 or tried[0] < best < tried[-1]:
                return
            beyond = best / 3 if best == tried[0] else best / 0.3  # 0.001, 0.003, 0.01, ...
            tried = sorted([*tried, float(f"{beyond:.0e}")])

    def losses(self, contender: str) -> dict[float, float]:
        """The mean loss over all seeds of every rate that it ran with."""
        runs, found = re.compile(re.escape(contender) + "/rate ([^/]+)/seed"), dict[float, float]()
        for rate in sorted({float(run[1]) for run in map(runs.match, self.measured) if run}):
            keys = [f"{contender}/rate {rate:g}/seed {seed}" for seed in self.seeds]
            if all(key in self.measured for key in keys):
                loss = statistics.mean(self.measured[key]["loss"] for key in keys)
                found[rate] = loss if math.isfinite(loss) else math.inf
        return found

    def rate(self, contender: str, rates: Sequence[float] | None = None) -> float:
        """The one of the lowest mean loss; of those whose loss is ``enough``, the lowest rate.

        Where several rates lose next to nothing, the lowest of their losses would be drawn by the
        seeds. ``rates`` are those that it is one of, all that were measured if None.
        """
        losses, enough = self.losses(contender), self.settings.get("enough", -math.inf)
        candidates = sorted(losses if rates is None else rates)
        low = [rate for rate in candidates if losses[rate] < enough]
        return low[0] if low else min(candidates, key=losses.__getitem__)

    def told_rate(self, contender: str) -> str:
        """The best rate; where others were added, of how many, and whether it is at their end."""
        best, tried = self.rate(contender), list(self.losses(contender))
        if len(tried) == len(self.settings["rates"]):
            return f"{best:g}"
        ends = {tried[0]: "lowest ", tried[-1]: "highest "}
        return f"{best:g}, {ends.get(best, '')}of {len(tried)}"

    def key(self, contender: str, seed: int) -> str:
        """That of its measurement with this seed, at the best rate where there are rates."""
        rate = f"rate {self.rate(contender):g}/" if self.losses(contender) else ""
        return f"{contender}/{rate}seed {seed}"

    def over_seeds(self, contender: str, *path: str) -> list[Any]:
        """One number, or list, of every seed: ``measured[key][path[0]]...``."""
        found = [self.measured[self.key(contender, seed)] for seed in self.seeds]
        for name in path:
            found = [one[name] for one in found]
        return found

    def columns(self, contender: str, *path: str) -> list[list[float]]:
        """Of a number, or of each in a list: that of every seed."""
        return np.atleast_2d(np.transpose(self.over_seeds(contender, *path))).tolist()

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
