"""The benchmark: ``python bench/run.py``, for a page of `PAGES` with its name.

Without a name it measures the rotation itself: ``make bench``, ``make bench-gpu``. That needs
phasor and torch; whoever else is installed takes part. After every step all samples are written to
``bench/results/``, and a page of tables beside them. What was measured before is kept if it is of
the same commit (or the same source, where there is no history), machine and versions, so that a
machine that is at hand for minutes can be used again and again. ``--quick`` prints a page of a few
cases and writes nothing. With ``TRITON_INTERPRET=1`` a run for a GPU is rehearsed on the processor,
with few tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from contenders import versions
from device import Cpu, Cuda, Rehearsal, restart_with_kept_memory
from measure import reason_text
from report import markdown

#: Each is a module: its ``steps`` are what can be measured, by name, ``QUICK`` says which of them
#: are a few, and its ``sections`` are written of what they returned, which is JSON.
PAGES = ("rotation", "layers", "models", "linear-attention", "compiled", "frameworks")
ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
# what results depend on
_SOURCE = "src/phasor/**/*.py", "csrc/*", "bench/*.py"


def commit() -> str:
    """The commit that is checked out, and whether the source differs from it.

    A digest of the source where there is no history, or nothing that reads it.
    """

    def git(*arguments: str) -> str:
        try:
            done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return ""
        return done.stdout.strip()

    head = git("rev-parse", "--short", "HEAD")
    if not head:
        return f"unknown (source {digest()})"
    changes = git("status", "--porcelain", "--", "src", "csrc", "bench/*.py")
    return head + (" (changed)" if changes else "")


def digest() -> str:
    """The first digits of a hash of all source."""
    hasher = hashlib.sha256()
    for path in sorted(match for pattern in _SOURCE for match in ROOT.glob(pattern)):
        hasher.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return hasher.hexdigest()[:12]


def about(device: Cpu) -> dict[str, Any]:
    """When, where and with what."""
    return {
        "device": device.name, "machine": device.about(), "python": platform.python_version(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), "commit": commit(),
        "versions": versions(),
    }  # fmt: skip


def selected(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """The names that a pattern matches; leaves the program if there are none."""
    chosen = [name for name in names if any(fnmatch(name, pattern) for pattern in patterns)]
    return chosen or sys.exit(f"no case matches {patterns[0]!r}; they are: {'; '.join(names)}")


def kept_cases(path: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """Earlier results that may stand beside new ones."""
    if not path.exists():
        return {}
    before = json.loads(path.read_text("utf-8"))
    same = all(before.get(name) == about[name] for name in ("device", "commit", "versions"))
    return before["cases"] if same else {}


def write(path: Path, results: Mapping[str, Any], page: str) -> None:
    """The samples, and the page; a run that is cut off leaves the results before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(results, separators=(",", ":")) + "\n", "utf-8")
    part.replace(path)
    path.with_suffix(".md").write_text(page, "utf-8")


def measure_all(
    steps: Mapping[str, Callable[[], Any]],
    names: Sequence[str],
    device: Cpu,
    kept: dict[str, Any],
) -> Iterator[dict[str, Any]]:
    """After each step of these names, what there is by then of all steps."""
    cases, failed = dict(kept), {}
    for done, name in enumerate(names, 1):
        print(f"{datetime.now(UTC):%H:%M:%S} {done}/{len(names)} {name}", file=sys.stderr)
        torch.compiler.reset()  # a shape compiled afresh is a shape compiled for itself
        device.forget()
        try:
            cases[name] = steps[name]()
        except Exception as reason:
            # a case may be too large for the device, others' kernels can break anything, and what
            # was measured before stays
            failed[name] = reason_text(reason)
        yield {
            "cases": {name: cases[name] for name in steps if name in cases},
            "whole": steps.keys() <= cases.keys(), "failed": failed,
        }  # fmt: skip


def device_of(name: str) -> Cpu:
    """The processor or the GPU; a rehearsal of the GPU where Triton interprets."""
    if name == "cpu":
        return Cpu()
    return Rehearsal() if os.environ.get("TRITON_INTERPRET") == "1" else Cuda()


def main(arguments: Sequence[str] | None = None) -> None:
    """Check and measure phasor and the others on a processor or a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", nargs="?", choices=PAGES, default=PAGES[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--quick", action="store_true", help="a few cases, printed: about a minute")
    group.add_argument("--cases", default="*", metavar="PATTERN", help='as in "prefill*, bf*"')
    without = 'leave out contenders whose names have it, as in "compiled"'
    parser.add_argument("--without", action="append", default=[], metavar="WORD", help=without)
    into = "of the results, and of those before, instead of bench/results"
    parser.add_argument("--into", type=Path, default=RESULTS, metavar="FOLDER", help=into)
    parsed = parser.parse_args(arguments)
    if parsed.page != PAGES[0] and (parsed.device == "cuda" or parsed.without):
        parser.error(f"{parsed.page} is measured on a processor alone, with everyone")
    device = device_of(parsed.device)
    page: Any = import_module(parsed.page.replace("-", "_"))
    seconds = min(1.5, device.seconds) if parsed.quick else device.seconds
    options = {"without": parsed.without} if parsed.without else {}
    steps = page.steps(device, seconds, **options)
    names = selected([*steps], page.QUICK if parsed.quick else [parsed.cases])
    machine = about(device)
    path = parsed.into / f"{device.name if parsed.page == PAGES[0] else parsed.page}.json"
    results, text = {}, ""
    for results in measure_all(
        steps, names, device, {} if parsed.quick else kept_cases(path, machine)
    ):
        text = markdown(machine | results, page.sections(results["cases"], device.kind))
        if not parsed.quick:
            write(path, machine | results, text)
    print(text if parsed.quick else f"Written: {path} and {path.with_suffix('.md').name}")
    if results["failed"]:
        print(f"Failed, as told there: {'; '.join(results['failed'])}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    restart_with_kept_memory()
    main()
