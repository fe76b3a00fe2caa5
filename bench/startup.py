"""How long phasor takes to start, beside NumPy: the import, and ``phasor show`` as a program.

All meet the same machine, in turn. The import is timed within its process, the program from
outside, beside ``python -c "import numpy"``.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from report import Section
from timing import Times, interleave

QUICK = ("*",)
_IMPORT = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"
LIMITS = {"import": 1.5, "show": 3.0}


def run(*arguments: str) -> str:
    """What Python prints with these arguments."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def steps(device: Any, seconds: float) -> dict[str, Callable[[], Any]]:
    """Both."""
    imports = {name: partial(run, "-c", _IMPORT.format(name)) for name in ("numpy", "phasor")}
    show = partial(run, "-m", "phasor", "show", "llama-3.1-8b")
    programs = {"numpy": partial(run, "-c", "import numpy"), "phasor": show}
    turns = partial(interleave, seconds=seconds, rounds=(20, 20))
    inside = partial(turns, imports, timed=lambda call, repeats: float(str(call())))
    return {"import": inside, "show": partial(turns, programs)}


def sections(found: Mapping[str, Any], device: str) -> Iterator[Section]:
    """Both, with their limits."""
    rows: dict[str, dict[str, str]] = {}
    for what, plain in found.items():
        numpy, phasor = (Times(plain).median(name) for name in ("numpy", "phasor"))
        held = "held" if phasor <= LIMITS[what] * numpy else "**short**"
        rows[what] = {
            "NumPy, ms": f"{1e3 * numpy:.1f}",
            "phasor, ms": f"{1e3 * phasor:.1f}",
            "phasor / NumPy": f"{phasor / numpy:.2f}, {held}: ≤ {LIMITS[what]}",
        }
    yield Section(rows=rows)
