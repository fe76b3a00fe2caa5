"""The benchmark: ``make bench``, or ``python bench/run.py --quick``.

Writes ``bench/results/cpu.json`` with every sample, and ``cpu.md`` with the tables.
"""

from __future__ import annotations

import os
import sys

# the allocator and OpenMP read these when the process starts
_ENVIRONMENT = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "OMP_NUM_THREADS": "2",
}

if __name__ == "__main__":
    if "PHASOR_BENCH" in os.environ:
        from program import main

        main()
    else:
        environment = os.environ | _ENVIRONMENT | {"PHASOR_BENCH": "1"}
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
