"""How long phasor takes to start, beside NumPy: the import, and ``phasor show`` as a program.

Every round starts each once, in turn, so that all meet the same machine. The import is timed within
its process, the program from outside, beside ``python -c "import numpy"``.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial

from report import table
from timing import interleave, spread

_TIMED = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"
IMPORT_LIMIT, SHOW_LIMIT = 1.5, 3.0


def run(*arguments: str) -> str:
    """What Python prints with these arguments."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def page() -> str:
    """Both, with their limits."""
    imports: dict[str, list[float]] = {"numpy": [], "phasor": []}
    for _ in range(20):
        for name, times in imports.items():
            times.append(float(run("-c", _TIMED.format(name))))
    programs = interleave(
        {
            "numpy": partial(run, "-c", "import numpy"),
            "phasor": partial(run, "-m", "phasor", "show", "llama-3.1-8b"),
        },
        seconds=0.0, warm=False, rounds=(20, 20),
    )  # fmt: skip
    rows: list[list[str]] = []
    for what, times, limit in (("import", imports, IMPORT_LIMIT), ("show", programs, SHOW_LIMIT)):
        numpy, phasor = (spread(some).median for some in times.values())
        held = "held" if phasor <= limit * numpy else "**short**"
        rows.append([what, f"{1e3 * numpy:.1f}", f"{1e3 * phasor:.1f}", f"{phasor / numpy:.2f}",
                     f"≤ {limit}", held])  # fmt: skip
    return table(("", "NumPy, ms", "phasor, ms", "phasor / NumPy", "limit", ""), rows)
