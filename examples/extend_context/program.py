"""The command line, and the order in which everything is trained and measured."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from corpus import Corpus, corpus, library
from findings import findings
from losses import binned, bits_by_position, bits_under_a_rule
from model import ByteModel, fresh
from picture import write_picture
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from run import Run, replace
from settings import FULL, QUICK, RULE_STEPS, WORKERS, Settings, Training
from tables import markdown
from torch import Tensor
from training import train
from ways import Stage, Way, is_rule, ways

ROOT = Path(__file__).parents[2]
Weights = dict[str, Tensor]


@click.command()
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the results; without it, they replace the repository's.",
)
@click.option("--quick", is_flag=True, help="A tiny model that learns little, in a minute.")
@click.option("--seed", default=0, show_default=True, help="Of the weights and the batches.")
def main(output: Path | None, quick: bool, seed: int) -> None:
    """Train on 256 tokens, go to 1024 with every law, and measure loss against position.

    Stopped and started again, it goes on where it was.
    """
    if quick and output is None:
        raise click.UsageError("--quick needs --output: its results must not replace the full ones")
    settings = QUICK if quick else FULL
    text = corpus(library(), length=settings.target, windows=settings.windows)
    made_of = ingredients(settings, seed, text)
    state, results, drawn = _places(output)
    run = Run(state, made_of)
    torch.set_num_threads(1)  # the workers are the parallelism
    threads = ThreadPoolExecutor(WORKERS, initializer=torch.set_num_threads, initargs=(1,))
    with threads as pool, _bar() as bar:
        Experiment(settings, seed, text, run, pool, bar).everything()
    found = made_of | findings(settings, run) | {"cpu_seconds": round(run.cpu_seconds)}
    plain = json.dumps(found, indent=1) + "\n"
    replace(results.with_suffix(".json"), lambda path: path.write_text(plain, "utf-8"))
    replace(results.with_suffix(".md"), lambda path: path.write_text(markdown(found), "utf-8"))
    replace(drawn, lambda path: write_picture(found, path))
    run.finish()
    click.echo(f"Written: {results.with_suffix('.json')}, {results.with_suffix('.md')}, {drawn}")


def ingredients(settings: Settings, seed: int, text: Corpus) -> dict[str, Any]:
    """All that the numbers depend on, as JSON values: a run goes on only with the same."""
    return {
        "settings": settings.as_plain(),
        "seed": seed,
        "text": {
            "what": "sources of Python's standard library, without tests and tables of encodings",
            "python": platform.python_version(),
            "files": text.files,
            "bytes": sum(map(len, text.training)),
            "windows": text.windows.shape[0],
            "sha256": text.sha256,
        },
        "versions": {"torch": str(torch.__version__), "numpy": np.__version__},
    }


def _places(output: Path | None) -> tuple[Path, Path, Path]:
    """Where the state, the results and the picture go."""
    if output is None:
        state = ROOT / "artefacts" / "extend_context.state"
        return state, ROOT / "examples/results/extend_context", ROOT / "docs/images/extending.png"
    return output / "state", output / "extend_context", output / "extend_context.png"


@contextmanager
def _bar() -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=Console(stderr=True), speed_estimate_period=60) as bar:
        yield bar


@dataclass
class Experiment:
    """Everything that is trained and measured, in its order; what the run has is not done again."""

    settings: Settings
    seed: int
    text: Corpus
    run: Run
    pool: Executor
    bar: Progress
    task: TaskID = field(init=False)

    def everything(self) -> None:
        """Train, measure every way as it is, then fine-tune with each law and measure again."""
        known = ways(self.settings)
        jobs: list[tuple[float, Callable[[], None]]] = []
        if self.run.weights is None:
            jobs.append((self._training_work("first"), self._first_training))
        for name, way in known.items():
            if f"zero-shot/{name}" not in self.run.found:
                jobs.append((self._scoring_work(way), partial(self._zero_shot, name)))
        for name in dict.fromkeys(way.tuned_as for way in known.values()):
            takers = [key for key, way in known.items() if name and way.tuned_as == name]
            if name is None or all(f"fine-tuned/{key}" in self.run.found for key in takers):
                continue
            work = self._training_work(name) + sum(self._scoring_work(known[k]) for k in takers)
            jobs.append((work, partial(self._fine_tuned, name, takers)))
        self.task = self.bar.add_task("", total=sum(work for work, _ in jobs))
        for _, job in jobs:
            job()
            self.run.save()

    def _first_training(self) -> None:
        plain = ways(self.settings)["none"].rope
        model = fresh(self.settings, plain, self.seed)
        self._train("first", model)
        self.run.weights = model.state_dict()

    def _zero_shot(self, name: str) -> None:
        self._measure("zero-shot", name, self._trained())

    def _fine_tuned(self, name: str, takers: list[str]) -> None:
        model = self._model(name, self.settings.target, self._trained())
        self._train(name, model)
        for taker in takers:
            self._measure("fine-tuned", taker, model.state_dict())

    def _trained(self) -> Weights:
        assert self.run.weights is not None  # the first training is the first job
        return self.run.weights

    def _plan(self, name: str) -> Training:
        return self.settings.first if name == "first" else self.settings.longer

    def _train(self, name: str, model: ByteModel) -> None:
        plan, before = self._plan(name), self.run.done(name)
        what = f"training on {plan.length}" if name == "first" else f"fine-tuning, {name}"

        def tell(step: int, loss: float) -> None:
            nonlocal before
            said = f"{what}: {step}/{plan.steps}, {loss:.2f} bits"
            work = 3.0 * plan.batch * _cost(plan.length) * (step - before)
            self.bar.update(self.task, description=said, advance=work)
            before = step

        train(
            name,
            model,
            plan,
            run=self.run,
            text=self.text,
            seed=self.seed,
            settings=self.settings,
            pool=self.pool,
            tell=tell,
        )

    def _model(self, name: str, length: int, weights: Weights) -> ByteModel:
        way = ways(self.settings)[name]
        rope = way.rope.at(length)
        model = ByteModel(self.settings, rope, window=way.window, distance=way.distance)
        model.load_state_dict(weights)
        return model

    def _measure(self, stage: Stage, name: str, weights: Weights) -> None:
        way = ways(self.settings)[name]
        self.bar.update(self.task, description=f"measuring, {stage}, {name}")
        windows, scored = self.text.windows, self.settings.scored
        if is_rule(way):
            bits = bits_under_a_rule(
                self.pool,
                lambda length: self._model(name, length, weights),
                windows,
                scored,
                context=self.settings.context,
                steps=RULE_STEPS,
            )
        else:
            model = self._model(name, self.settings.target, weights)
            bits = bits_by_position(self.pool, model, windows, scored)
        found = binned(bits, self.settings.bin)
        self.run.found[f"{stage}/{name}"] = found
        self.bar.advance(self.task, self._scoring_work(way))
        last = float(found[:, found.shape[1] // 2 :].mean())
        self.bar.console.print(f"{stage}, {way.title}: {last:.3f} bits in the second half")

    def _training_work(self, name: str) -> float:
        """What is left of it, in bytes that are read once without context."""
        plan = self._plan(name)
        return 3.0 * (plan.steps - self.run.done(name)) * plan.batch * _cost(plan.length)

    def _scoring_work(self, way: Way) -> float:
        target, context = self.settings.target, self.settings.context
        lengths = range(context, target + 1, context // RULE_STEPS) if is_rule(way) else [target]
        dearer = 2.5 if way.distance is not None else 1.0
        return dearer * self.text.windows.shape[0] * sum(map(_cost, lengths))


def _cost(length: int) -> float:
    """Of one window of a length: attention doubles it at about 1250 tokens."""
    return length * (1 + length / 1250)
