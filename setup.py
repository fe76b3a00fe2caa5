"""The CPU kernel's extension. Everything else about the package is in pyproject.toml.

It is optional: where it does not compile, phasor installs without it and runs on plain torch
operations.
"""

import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

SOURCES = ("module", "portable", "avx2", "avx512", "avx512bf16", "neon")
UNIX = ["-std=c++17", "-O3", "-ffp-contract=off", "-fvisibility=hidden"]
# one OpenMP runtime, torch's own, serves both: it is found by its name because torch loads first
OPENMP = ["-fopenmp"] if sys.platform == "linux" else []

# one wheel for every Python from 3.11, but for those without a GIL, which lack the stable interface
STABLE = not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE else {},
    ext_modules=[
        Extension(
            "phasor._native",
            sources=[f"csrc/{name}.cpp" for name in SOURCES],
            depends=[str(path) for path in Path("csrc").iterdir()],
            extra_compile_args=UNIX + OPENMP,
            extra_link_args=[*OPENMP, "-Wl,-s"] if OPENMP else [],
            define_macros=[("Py_LIMITED_API", "0x030B0000")] if STABLE else [],
            py_limited_api=STABLE,
            optional=True,
        )
    ],
)
