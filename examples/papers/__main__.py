"""``python -m examples.papers NAME [--quick] [--seeds 3]``: measure, draw, and write the page.

A run may be stopped at any time; started again, it goes on with the measurement it was at.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .shared import Study, write_picture

HERE = Path(__file__).parent
PAGES = HERE.parents[1] / "docs" / "papers"
NAMES = (
    *("previous_token", "convergence", "linear_attention", "frequency_usage"),
    *("longer_context", "decay", "elementwise"),
)
MEASURED = re.compile(r"(<!-- measured -->\n).*?(<!-- /measured -->)", re.DOTALL)


def main(arguments: list[str] | None = None) -> None:
    """Run one experiment, or write the pages of all from their results."""
    parser = argparse.ArgumentParser(prog="python -m examples.papers", description=__doc__)
    parser.add_argument("name", choices=(*NAMES, "pages"), help="pages: write docs/papers anew")
    parser.add_argument("--quick", action="store_true", help="seconds, on a tiny model; no page")
    parser.add_argument("--seeds", type=int, default=3, help="runs of every contender (3)")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="folder of the results")
    given = parser.parse_args(arguments)
    if given.name == "pages":
        for name in NAMES:
            write_page(name, given.output)
        return
    output = given.output / "quick" if given.quick else given.output
    torch.set_num_threads(1)  # sums in one order, so that a run gives the same numbers anew
    experiment = load(given.name)
    study = Study(given.name, experiment.settings(given.quick), output, given.seeds)
    experiment.run(study)
    study.save()
    write_picture(experiment.chart(study), output / f"{given.name}.svg")
    print(experiment.tables(study))


def load(name: str) -> ModuleType:
    """The module of an experiment."""
    return importlib.import_module(f".{name}", __package__)


def write_page(name: str, results: Path) -> None:
    """Put the tables and the picture of ``results`` into the experiment's page."""
    page = PAGES / f"{name.replace('_', '-')}.md"
    text = page.read_text("utf-8")
    page.write_text(MEASURED.sub(lambda found: found[1] + measured(name, results) + found[2], text), "utf-8")
    shutil.copy(results / f"{name}.svg", PAGES / f"{name.replace('_', '-')}.svg")


def measured(name: str, results: Path) -> str:
    """The part of a page that comes out of ``results/NAME.json``: tables, and what made them."""
    saved: dict[str, Any] = json.loads((results / f"{name}.json").read_text("utf-8"))
    study = Study(name, saved["settings"], results, saved["seeds"])
    versions = ", ".join(f"{package} {number}" for package, number in saved["versions"].items())
    made = (
        f"`python -m examples.papers {name} --seeds {saved['seeds']}`, {saved['date']}, {versions}, "
        f"{saved['machine']}: {saved['seconds'] / 60:.1f} minutes of processor time."
    )
    return f"{load(name).tables(study)}\n\n{made}\n"


if __name__ == "__main__":
    main()
