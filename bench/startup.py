"""How long phasor takes to start, beside NumPy: the import, and ``phasor show`` as a program.

    python bench/startup.py [rounds]

Every round starts each once, in turn, so that all meet the same machine; medians are compared. The
import is timed within its process, the program from outside, beside `python -c "import numpy"`.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

TIMED = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"
IMPORT_LIMIT, SHOW_LIMIT = 1.5, 3.0
SHOW = ["-m", "phasor", "show", "llama-3.1-8b"]


def import_seconds(module: str) -> float:
    """Seconds that ``import module`` takes in a new process."""
    command = [sys.executable, "-c", TIMED.format(module)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def program_seconds(arguments: list[str]) -> float:
    """Seconds from the start to the end of Python with these arguments."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
    return time.perf_counter() - start


def main(rounds: int) -> None:
    """Measure, print, and end with 1 if a limit is passed."""
    measures = {
        "import numpy": lambda: import_seconds("numpy"),
        "import phasor": lambda: import_seconds("phasor"),
        'python -c "import numpy"': lambda: program_seconds(["-c", "import numpy"]),
        "phasor show llama-3.1-8b": lambda: program_seconds(SHOW),
    }
    seconds: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(rounds):
        for name, measure in measures.items():
            seconds[name].append(measure())
    medians = [statistics.median(times) for times in seconds.values()]
    for name, median in zip(measures, medians, strict=True):
        print(f"{1e3 * median:7.1f} ms  {name}")
    numpy, phasor, python, show = medians
    print(f"import phasor takes {phasor / numpy:.2f} times NumPy's; the limit is {IMPORT_LIMIT}")
    print(f"phasor show takes {show / python:.2f} times NumPy's; the limit is {SHOW_LIMIT}")
    sys.exit(phasor / numpy > IMPORT_LIMIT or show / python > SHOW_LIMIT)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
