"""The benchmark: ``make bench`` and ``make bench-gpu``, or ``python bench/run.py --quick``.

Needs phasor and torch; whoever else is installed takes part. Writes ``bench/results/<device>.json``
with every sample, and a page of tables beside it, after every step. The results of other cases are
kept if they are of the same commit, machine and versions, so that a machine that is at hand for
minutes can be used again and again.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cases import CASES, LARGE, LAUNCH, QUICK, Case
from contenders import everyone, probes, versions
from device import Cpu, Cuda, Device, host_timer, restart_with_kept_memory
from facts import far_errors, fresh, peak, tables
from measure import admit, first_line, measure
from report import markdown
from timing import interleave

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

    def find_peaks() -> None:
        keys = [contender.key for contender in everyone(LARGE, kind)]
        found["peaks"] = {key: fresh("run.py", "--peak", key) for key in keys}
        found["inputs"] = sum(x.numel() * x.element_size() for x in LARGE.tensors())

    steps: list[tuple[str, Callable[[], Any]]] = [
        (case.label, partial(time_case, case)) for case in cases
    ]
    if facts:
        steps += [
            ("tables", lambda: found.update(tables=tables(device.where))),
            ("exactness", lambda: found.update(far=far_errors(device))),
        ]
        if kind == "cpu":
            system = partial(fresh, "run.py", "--system-memory")
            steps += [("the system's allocator", lambda: found.update(system_memory=system())),
                      ("memory", find_peaks)]  # fmt: skip
        else:
            steps.append(("the host's part", time_launches))
    begun = time.perf_counter()
    for done, (what, step) in enumerate(steps, 1):
        print(f"{time.perf_counter() - begun:5.0f} s {done}/{len(steps)} {what}", file=sys.stderr)
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
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="a few cases: about a minute")
    parser.add_argument("--cases", default="*", metavar="PATTERN", help='as in "prefill*, bf*"')
    parser.add_argument("--seconds", type=float, metavar="S", help="for each case")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    parser.add_argument("--system-memory", action="store_true", help=argparse.SUPPRESS)
    wanted = parser.parse_args(arguments)
    if wanted.device == "cuda" and not torch.cuda.is_available():
        print(_NO_GPU.format(version=torch.__version__), file=sys.stderr)
        sys.exit(2)
    seconds = wanted.seconds or (1.5 if wanted.quick else 4.0 if wanted.device == "cpu" else 1.0)
    if wanted.peak is not None:
        print(json.dumps(peak(wanted.peak)))
        return
    if wanted.system_memory:
        some = [case for case in CASES["cpu"] if case.name == "prefill 4096"]
        found = [measure(case, everyone(case, "cpu"), seconds=seconds) for case in some]
        print(json.dumps([m.as_plain() for m in found]))
        return
    cases = selected((QUICK if wanted.quick else CASES)[wanted.device], wanted.cases)
    device = Cuda() if wanted.device == "cuda" else Cpu()
    about = {
        "device": device.name, "machine": device.about(), "python": platform.python_version(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), "commit": commit(),
        "versions": versions(), "whole": cases == CASES[wanted.device],
    }  # fmt: skip
    path = wanted.results / f"{device.name}.json"
    found = measure_all(
        device, cases, seconds=seconds, facts=wanted.cases == "*" and not wanted.quick,
        kept=kept_cases(path, about), keep=lambda found: write(path, about | found),
    )  # fmt: skip
    print(f"Written: {path} and {path.with_suffix('.md').name}")
    if found["failed"]:
        print(f"Failed, as told there: {'; '.join(found['failed'])}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    restart_with_kept_memory()
    main()
