"""The benchmark: ``python bench/run.py``, for a page of `PAGES` with its name.

Without a name it measures the rotation itself: ``make bench``, ``make bench-gpu``, or ``--quick``
for a few cases. That needs phasor and torch; whoever else is installed takes part. Every sample is
written to ``bench/results/<device>.json`` after every step, and a page of tables beside it. The
results of other cases are kept if they are of the same commit, machine and versions, so that a
machine that is at hand for minutes can be used again and again.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from cases import CASES, LARGE, LAUNCH, QUICK, Case
from contenders import everyone, probes, versions
from device import Cpu, Cuda, Device, alone, host_timer, progress, restart_with_kept_memory
from facts import far_errors, peaks, tables
from measure import admit, first_line, measure
from report import circumstances, markdown
from timing import interleave

#: Every other page: the module and the function that measure and write it.
PAGES = {
    "models": ("models", "page"),
    "model-memory": ("models", "memory_page"),
    "linear-attention": ("linear_attention", "page"),
    "compiled": ("compiled", "page"),
    "small-calls": ("small_calls", "page"),
    "startup": ("startup", "page"),
}
#: The commit where there is no history, or nothing that reads it.
UNKNOWN = "unknown"
RESULTS = Path(__file__).parent / "results"
_NO_GPU = (
    "--device cuda needs a CUDA device, and torch {version} sees none. On a machine with one, "
    "install torch for CUDA and run PYTHONPATH=src python3 bench/run.py --device cuda; "
    "make bench measures this machine's processor."
)
_NOTHING: dict[str, Any] = {
    "launches": [], "system_memory": [], "tables": [], "far": {}, "peaks": {}, "too_large": [],
    "failed": {},
}  # fmt: skip


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


def about(device: Device) -> dict[str, Any]:
    """When, where and with what."""
    return {
        "device": device.name, "machine": device.about(), "python": platform.python_version(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), "commit": commit(),
        "versions": versions(),
    }  # fmt: skip


def selected(known: Sequence[Case], pattern: str) -> list[Case]:
    """The cases whose "name, dtype" the pattern matches; leaves the program if there are none."""
    cases = [case for case in known if fnmatch.fnmatch(case.label, pattern)]
    if not cases:
        names = "; ".join(dict.fromkeys(case.name for case in known))
        sys.exit(f"no case matches {pattern!r}; names are: {names}")
    return cases


def kept_cases(path: Path, about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Earlier results that may stand beside new ones."""
    if about["commit"].startswith(UNKNOWN) or not path.exists():
        return []
    before = json.loads(path.read_text("utf-8"))
    same = all(before.get(name) == about[name] for name in ("device", "commit", "versions"))
    return before["cases"] if same else []


def write(path: Path, results: Mapping[str, Any]) -> None:
    """The samples, and the page; a run that is cut off leaves the results before."""
    path.parent.mkdir(exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(results, separators=(",", ":")) + "\n", "utf-8")
    part.replace(path)
    path.with_suffix(".md").write_text(markdown(results), "utf-8")


def measure_all(
    device: Device,
    cases: Sequence[Case],
    *,
    seconds: float,
    facts: bool,
    kept: Sequence[Mapping[str, Any]] = (),
    keep: Callable[[Mapping[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """Everything, as JSON values.

    Args:
        device: Where.
        cases: What.
        seconds: For the calls of each case, and again for the replays.
        facts: Also what is no ratio of times: memory, tables, exactness, the host's part.
        kept: Results of other cases, as they were written.
        keep: Told after every step what has been found so far.
    """
    kind = device.kind
    found: dict[str, Any] = json.loads(json.dumps(_NOTHING)) | {"cases": []}
    order = {case.label: i for i, case in enumerate(CASES[kind])}
    by_case = {f"{one['case']['name']}, {one['case']['dtype']}": dict(one) for one in kept}

    def time_case(case: Case) -> None:
        contenders = everyone(case, kind) + (probes(case) if kind == "cpu" else [])
        done = measure(case, contenders, seconds=seconds, device=device)
        by_case[case.label] = done.as_plain()
        labels = sorted(by_case, key=lambda label: order.get(label, -1))
        found["cases"] = [by_case[label] for label in labels]

    def time_launches() -> None:
        done, calls = admit(LAUNCH, everyone(LAUNCH, kind), device.where)
        done.seconds.update(interleave(calls, seconds=seconds, warm=True, timed=host_timer))
        found["launches"] = [done.as_plain()]

    def find(**facts: Callable[[], Any]) -> None:
        found.update({name: fact() for name, fact in facts.items()})

    steps: list[tuple[str, Callable[[], Any]]] = [
        (case.label, partial(time_case, case)) for case in cases
    ]
    if facts:
        steps += [
            ("tables", partial(find, tables=lambda: tables(device.where))),
            ("exactness", partial(find, far=lambda: far_errors(device))),
        ]
        if kind == "cpu":
            system = partial(alone, "facts", "system_memory", seconds)
            steps.append(("the system's allocator", partial(find, system_memory=system)))
            steps.append(("memory", partial(find, peaks=peaks, inputs=lambda: LARGE.size)))
        else:
            steps.append(("the host's part", time_launches))
    for done, (what, step) in enumerate(steps, 1):
        progress(f"{done}/{len(steps)} {what}")
        torch.compiler.reset()  # a shape compiled afresh is a shape compiled for itself
        device.forget()
        try:
            step()
        except torch.OutOfMemoryError:
            found["too_large"].append(what)
        except Exception as reason:
            # others' kernels can break anything, and what was measured before stays
            found["failed"][what] = f"{type(reason).__name__}: {first_line(reason)}"
        keep(found)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Check and measure phasor and the others on a processor or a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", nargs="?", choices=tuple(PAGES))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="a few cases: about a minute")
    parser.add_argument("--cases", default="*", metavar="PATTERN", help='as in "prefill*, bf*"')
    parser.add_argument("--seconds", type=float, metavar="S", help="for each case")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--alone", nargs=3, help=argparse.SUPPRESS)
    wanted = parser.parse_args(arguments)
    if wanted.alone:
        module, function, given = wanted.alone
        print(json.dumps(getattr(import_module(module), function)(*json.loads(given))))
        return
    if wanted.page:
        module, function = PAGES[wanted.page]
        head = circumstances(about(Cpu()))
        text = f"{head}\n\n{getattr(import_module(module), function)()}\n"
        (wanted.results / f"{wanted.page}.md").write_text(text, "utf-8")
        print(text)
        return
    if wanted.device == "cuda" and not torch.cuda.is_available():
        print(_NO_GPU.format(version=torch.__version__), file=sys.stderr)
        sys.exit(2)
    seconds = wanted.seconds or (1.5 if wanted.quick else 4.0 if wanted.device == "cpu" else 1.0)
    cases = selected((QUICK if wanted.quick else CASES)[wanted.device], wanted.cases)
    device = Cuda() if wanted.device == "cuda" else Cpu()
    told = about(device) | {"whole": cases == CASES[wanted.device]}
    path = wanted.results / f"{device.name}.json"
    found = measure_all(
        device, cases, seconds=seconds, facts=wanted.cases == "*" and not wanted.quick,
        kept=kept_cases(path, told), keep=lambda found: write(path, told | found),
    )  # fmt: skip
    print(f"Written: {path} and {path.with_suffix('.md').name}")
    if found["failed"]:
        print(f"Failed, as told there: {'; '.join(found['failed'])}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    restart_with_kept_memory()
    main()
