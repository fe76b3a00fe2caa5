"""The benchmark's command line, and the order in which everything is measured."""

from __future__ import annotations

import fnmatch
import json
import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from cases import CASES, LARGE, QUICK
from contenders import everyone, probes, versions
from facts import far_errors, fresh, peak, tables
from report import markdown
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from phasor.bench import Case, Contender, measure
from phasor.torch.backends import cpu

THREADS = 2
#: The commit where there is no history, or nothing that reads it.
UNKNOWN = "unknown"
RESULTS = Path(__file__).parent / "results"
_ALLOCATOR = (
    "glibc's malloc keeps the memory it was given back (no mmap, no trim), as allocators of "
    "training and serving programs do."
)


def machine() -> dict[str, Any]:
    """What it ran on."""
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    paths = cpu.paths()
    return {
        "processor": names[0] if names else platform.processor(),
        "processors": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "path": paths[0] if paths else "eager",
        "allocator": _ALLOCATOR,
        "load": round(os.getloadavg()[0], 1),
    }


def commit() -> str:
    """The commit that is checked out, and whether the source differs from it, or `UNKNOWN`."""

    def git(*arguments: str) -> str:
        try:
            done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return ""
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", "src", "csrc", "bench/*.py")
    return (git("rev-parse", "--short", "HEAD") or UNKNOWN) + (" (changed)" if changed else "")


def selected(known: Sequence[Case], pattern: str | None) -> list[Case]:
    """The cases whose "name, dtype" the pattern matches.

    Raises:
        UsageError: If there are none.
    """
    wanted = pattern or "*"
    cases = [case for case in known if fnmatch.fnmatch(f"{case.name}, {case.dtype}", wanted)]
    if not cases:
        names = "; ".join(dict.fromkeys(case.name for case in known))
        raise click.UsageError(f"no case matches {pattern!r}; names are: {names}")
    return cases


def take(steps: Sequence[tuple[str, Callable[[], None]]]) -> None:
    """Take named steps one after another, and show how far it is."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(steps))
        for what, step in steps:
            progress.update(task, description=what)
            step()
            progress.advance(task)


def now() -> str:
    """Date and time of a result."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


@click.command()
@click.option("--quick", is_flag=True, help="A few cases and rounds: one minute.")
@click.option("--cases", "pattern", metavar="PATTERN", help='As in "prefill*, bfloat16".')
@click.option("--peak", "peak_of", hidden=True)
@click.option("--system-memory", is_flag=True, hidden=True)
def main(pattern: str | None, quick: bool, peak_of: str | None, system_memory: bool) -> None:
    """Measure phasor and the others on this machine's processor."""
    torch.set_num_threads(THREADS)
    if peak_of is not None:
        click.echo(json.dumps(peak(peak_of)))
        return
    seconds = 1.5 if quick else 4.0
    if system_memory:
        wanted = [case for case in CASES if case.name == "prefill 4096"]
        found = [measure(case, everyone(), seconds=seconds) for case in wanted]
        click.echo(json.dumps([m.as_plain() for m in found]))
        return
    cases = selected(QUICK if quick else CASES, pattern)
    whole = pattern is None and not quick
    results = _results(cases, seconds=seconds, facts=whole) | {"quick": not whole}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "cpu.json").write_text(json.dumps(results, separators=(",", ":")) + "\n", "utf-8")
    (RESULTS / "cpu.md").write_text(markdown(results), "utf-8")
    click.echo(f"Written: {RESULTS / 'cpu.json'} and cpu.md")


def _results(cases: list[Case], *, seconds: float, facts: bool) -> dict[str, Any]:
    contenders = everyone()
    about = {"machine": machine()}
    found: dict[str, Any] = {"cases": [], "system_memory": [], "tables": [], "far": {}, "peaks": {}}

    def time_case(case: Case) -> None:
        # a shape compiled afresh is a shape compiled for itself
        torch.compiler.reset()
        measured = measure(case, contenders + probes(case), seconds=seconds)
        found["cases"].append(measured.as_plain())

    def time_system_memory() -> None:
        found["system_memory"] = fresh("--system-memory")

    def build_tables() -> None:
        found["tables"] = tables()

    def look_far(contender: Contender) -> None:
        found["far"][contender.key] = far_errors(contender)

    def find_peak(contender: Contender) -> None:
        found["peaks"][contender.key] = fresh("--peak", contender.key)

    steps: list[tuple[str, Callable[[], None]]] = [
        (f"{case.name}, {case.dtype}", partial(time_case, case)) for case in cases
    ]
    if facts:
        steps += [("the system's allocator", time_system_memory), ("tables", build_tables)]
        steps += [(f"exactness: {one.key}", partial(look_far, one)) for one in contenders]
        steps += [(f"memory: {one.key}", partial(find_peak, one)) for one in contenders]
    take(steps)
    return (
        found
        | about
        | {
            "date": now(),
            "commit": commit(),
            "threads": THREADS,
            "versions": versions(),
            "inputs": sum(x.numel() * x.element_size() for x in LARGE.tensors()),
        }
    )
