"""How long phasor takes to start beside NumPy, in turn: ``python bench/startup.py``.

An import is timed within its process, ``phasor show`` from outside, beside a bare import of NumPy.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median

_IMPORT = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"
ROUNDS = 20


def run(*arguments: str) -> str:
    """What Python prints with these arguments."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def import_seconds(name: str) -> float:
    """Seconds of an import, for its own process."""
    return float(run("-c", _IMPORT.format(name)))


def program_seconds(*arguments: str) -> float:
    """Seconds of a program, from its start to its end."""
    start = time.perf_counter()
    run(*arguments)
    return time.perf_counter() - start


#: What is timed, what it is compared with, and the most that it may take of that.
COMPARED: dict[str, tuple[Callable[[], float], Callable[[], float], float]] = {
    "import phasor": (partial(import_seconds, "phasor"), partial(import_seconds, "numpy"), 1.5),
    "phasor show": (
        partial(program_seconds, "-m", "phasor", "show", "llama-3.1-8b"),
        partial(program_seconds, "-c", "import numpy"),
        3.0,
    ),
}


def main() -> None:
    """Print a line for each."""
    for name, (ours, numpys, limit) in COMPARED.items():
        rounds = [(ours(), numpys()) for _ in range(ROUNDS)]
        phasor, numpy = (1e3 * median(times) for times in zip(*rounds, strict=True))
        verdict = "held" if phasor <= limit * numpy else "short"
        ratio = f"{phasor / numpy:.2f} (at most {limit}: {verdict})"
        print(f"{name}: {phasor:.1f} ms, NumPy: {numpy:.1f} ms, ratio {ratio}")


if __name__ == "__main__":
    main()
