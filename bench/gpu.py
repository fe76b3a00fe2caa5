"""The benchmark on a GPU: ``make bench-gpu``, or ``python bench/gpu.py --quick``.

Writes ``bench/results/gpu-<device>.json`` with every sample, and a page of tables beside it, after
every case. With ``--cases`` the results of the others are kept if they are of the same commit and
the same versions, so that a machine that is at hand for minutes can be used again and again.
"""

from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from contenders import versions
from gpu_cases import CASES, LAUNCH, QUICK
from gpu_contenders import PACKAGES, everyone, fused_calls
from gpu_device import Cuda, Device
from gpu_facts import far_errors, tables
from gpu_measure import References, launch_times, measure_on
from gpu_report import markdown
from program import UNKNOWN, commit, now, selected, take

from phasor.bench import Case

RESULTS = Path(__file__).parent / "results"
_NO_GPU = (
    "bench/gpu.py needs a CUDA device, and torch {version} sees none. On a machine with one, "
    "install torch for CUDA and phasor (pip install -e '.[torch]'), then run it again; "
    "make bench measures this machine's processor."
)


@click.command()
@click.option("--quick", is_flag=True, help="A few cases: one minute.")
@click.option("--cases", "pattern", metavar="PATTERN", help='As in "Llama-3-8B*, bfloat16".')
@click.option("--seconds", default=1.0, show_default=True, help="For each case, twice.")
def main(pattern: str | None, quick: bool, seconds: float) -> None:
    """Check and measure phasor and the others on this machine's GPU."""
    if not torch.cuda.is_available():
        click.echo(_NO_GPU.format(version=torch.__version__), err=True)
        sys.exit(2)
    from gpu_empty import empty_kernel

    cases = selected(QUICK if quick else CASES, pattern)
    about = _about()
    path = RESULTS / f"gpu-{_file_name(about['machine']['device'])}.json"
    kept = _kept(path, about) if path.exists() else []
    RESULTS.mkdir(exist_ok=True)

    def keep(found: Mapping[str, Any]) -> None:
        results = about | found
        # what is cut off here leaves the results before
        part = path.with_suffix(".part")
        part.write_text(json.dumps(results, separators=(",", ":")) + "\n", "utf-8")
        part.replace(path)
        path.with_suffix(".md").write_text(markdown(results), "utf-8")

    found = measured(Cuda(), cases, kept, seconds=seconds, references=empty_kernel, keep=keep)
    click.echo(f"Written: {path} and {path.with_suffix('.md').name}")
    if found["failed"]:
        click.echo(f"Failed, as told there: {'; '.join(found['failed'])}", err=True)
        sys.exit(1)


def measured(
    device: Device,
    cases: Sequence[Case],
    kept: Sequence[Mapping[str, Any]],
    *,
    seconds: float,
    references: References,
    keep: Callable[[Mapping[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """Everything, as JSON values.

    Args:
        device: Where.
        cases: What.
        kept: Results of other cases, as they were written.
        seconds: For the calls of each case, and again for the replays.
        references: More calls to compare with.
        keep: Told after every step what has been found so far.
    """
    found: dict[str, Any] = {"launches": [], "tables": tables(device.where), "far": {}}
    found |= {"too_large": [], "failed": {}}
    order = {(case.name, case.dtype): i for i, case in enumerate(CASES)}
    by_case = {(plain["case"]["name"], plain["case"]["dtype"]): dict(plain) for plain in kept}

    def time_case(case: Case) -> None:
        torch.compiler.reset()
        device.forget()
        done = measure_on(device, case, everyone(case), seconds=seconds, references=references)
        by_case[case.name, case.dtype] = done.as_plain()

    def time_launches() -> None:
        torch.compiler.reset()
        done = launch_times(
            device, LAUNCH, everyone(LAUNCH), seconds=seconds, references=fused_calls
        )
        found["launches"].append(done.as_plain())

    def look_far() -> None:
        torch.compiler.reset()
        for contender in everyone(LAUNCH):
            found["far"][contender.key] = far_errors(contender, device.where)

    def attempt(what: str, step: Callable[[], None]) -> None:
        try:
            step()
        except torch.OutOfMemoryError:
            found["too_large"].append(what)
        except Exception as reason:
            # others' kernels can break anything, and what was measured before stays
            line = (str(reason).strip() or type(reason).__name__).splitlines()[0]
            found["failed"][what] = line[:160]
        found["cases"] = [by_case[key] for key in sorted(by_case, key=lambda k: order.get(k, -1))]
        keep(found)

    steps: list[tuple[str, Callable[[], None]]] = [
        (f"{case.name}, {case.dtype}", partial(time_case, case)) for case in cases
    ]
    steps += [("the host's part", time_launches), ("exactness", look_far)]
    take([(what, partial(attempt, what, step)) for what, step in steps])
    return found


def _about() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    machine = {
        "device": properties.name,
        "memory": f"{properties.total_memory / 2**30:.0f} GB",
        "cache": f"{properties.L2_cache_size / 2**20:.0f} MB",
        "cuda": torch.version.cuda,
        "driver": _driver(),
        "python": platform.python_version(),
    }
    return {
        "machine": machine, "date": now(), "commit": commit(), "versions": versions(PACKAGES)
    }  # fmt: skip


def _driver() -> str:
    path = Path("/proc/driver/nvidia/version")
    found = re.search(r"\d+\.\d+(\.\d+)?", path.read_text("ascii")) if path.exists() else None
    return found[0] if found else "unknown"


def _file_name(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def _kept(path: Path, about: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Earlier results that may stand beside new ones."""
    if about["commit"].startswith(UNKNOWN):
        return []
    before = json.loads(path.read_text("utf-8"))
    same = all(before[name] == about[name] for name in ("machine", "commit", "versions"))
    return before["cases"] if same else []


if __name__ == "__main__":
    main()
