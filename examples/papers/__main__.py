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

import torch
from tools.pictures import draw

from .study import Row, Study

HERE = Path(__file__).parent
PAGES = HERE.parents[1] / "docs" / "papers"
NAMES = (
    *("previous_token", "convergence", "linear_attention", "frequency_usage"),
    *("translation", "long_documents", "longer_context", "decay", "elementwise", "live_model"),
)
#: The part of a page that is written: of all tables and paragraphs those with these numbers.
MEASURED = re.compile(r"(<!-- measured([ \d]+)-->\n).*?(<!-- /measured -->)", re.DOTALL)


def main(arguments: list[str] | None = None) -> None:
    """Run one experiment, or write the pages of all from their results."""
    parser = argparse.ArgumentParser(prog="python -m examples.papers", description=__doc__)
    parser.add_argument("name", choices=(*NAMES, "pages"), help="pages: write docs/papers anew")
    parser.add_argument("--quick", action="store_true", help="seconds, on a tiny model; no page")
    parser.add_argument("--seeds", type=int, default=3, help="runs of every contender (3)")
    parser.add_argument("--first-seed", type=int, default=0, help="they count from here (0)")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="of the results")
    parser.add_argument("--model", help="of live_model: a folder of transformers' (SmolLM2-135M)")
    given = parser.parse_args(arguments)
    for option, number, least in (("seeds", given.seeds, 1), ("first-seed", given.first_seed, 0)):
        if number < least:
            parser.error(f"--{option} must be {least} or more, got {number}")
    if given.model and given.name != "live_model":
        parser.error(f"--model is of live_model, not of {given.name}")
    if given.name == "pages":
        missing = [name for name in NAMES if not (given.output / f"{name}.json").exists()]
        if missing:
            parser.error(f"no results of {', '.join(missing)} in {given.output}; run them first")
        for name in NAMES:
            write_page(name, given.output)
        return
    output = given.output / "quick" if given.quick else given.output
    torch.set_num_threads(1)  # sums in one order, so that a run gives the same numbers anew
    experiment = load(given.name)
    settings: Row = experiment.settings(given.quick)
    if given.model:
        settings["model"] = given.model
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    study = Study(given.name, settings, output, seeds)
    experiment.run(study)
    (output / f"{given.name}.svg").write_text(draw(experiment.chart(study)), "utf-8")
    print(experiment.tables(study))


def load(name: str) -> ModuleType:
    """The module of an experiment."""
    return importlib.import_module(f".{name}", __package__)


def write_page(name: str, results: Path) -> None:
    """Put what the experiment's page has of ``results`` into it, and all of it beside them."""
    page = PAGES / f"{name.replace('_', '-')}.md"
    everything = measured(name, results)
    (results / f"{name}.md").write_text(everything, "utf-8")
    page.write_text(fill(page.read_text("utf-8"), name, everything), "utf-8")
    shutil.copy(results / f"{name}.svg", page.with_suffix(".svg"))


def fill(page: str, name: str, everything: str) -> str:
    """The text of a page with its choice of what was measured, and where the rest is."""
    parts = everything.split("\n\n")
    command = parts[-1].split("`")[1].removesuffix(" --seeds 3")  # which is the default

    def chosen(found: re.Match[str]) -> str:
        some = [parts[int(number) - 1] for number in found[2].split()]
        end = f"`{command}`; more: `examples/papers/results/{name}.md`."
        return "\n\n".join((f"{found[1]}{some[0]}", *some[1:], f"{end}\n{found[3]}"))

    return MEASURED.sub(chosen, page)


def measured(name: str, results: Path) -> str:
    """All that comes out of ``results/NAME.json``: tables, and what made them."""
    saved: Row = json.loads((results / f"{name}.json").read_text("utf-8"))
    seeds = range(saved["first_seed"], saved["first_seed"] + saved["seeds"])
    study = Study(name, saved["settings"], results, seeds)
    versions = ", ".join(f"{package} {number}" for package, number in saved["versions"].items())
    command = f"python -m examples.papers {name} --seeds {saved['seeds']}"
    minutes = f"{saved['seconds'] / 60:.1f} minutes of processor time"
    made = f"`{command}`, {saved['date']}, {versions}, {saved['machine']}: {minutes}."
    return f"{load(name).tables(study)}\n\n{made}\n"


if __name__ == "__main__":
    main()
