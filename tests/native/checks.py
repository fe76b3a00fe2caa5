"""Checks of csrc/ that need tools of their own: ``python tests/native/checks.py CHECK...``.

sanitize  the extension under AddressSanitizer and UndefinedBehaviorSanitizer, over its tests
valgrind  the sweeps under memcheck, without Python
neon      the sweeps for 64-bit Arm, cross-compiled and emulated
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
DRIVER = Path(__file__).with_name("driver.cpp")
# GCC 12 takes its own AVX-512 headers for uninitialised
QUIET = ["-Wno-maybe-uninitialized", "-Wno-uninitialized"]
FLAGS = ["-std=c++17", "-ffp-contract=off", "-Wall", "-Wextra", *QUIET]
SANITIZED = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
TESTS = [
    f"tests/torch/operator/test_{name}.py" for name in ("cpu", "cpu_angles", "cpu_fuzz", "written")
]


def main(names: list[str]) -> None:
    """Run the named checks, one after the other; the first that fails ends it."""
    checks = {"sanitize": sanitize, "valgrind": valgrind, "neon": neon}
    if not names or not checks.keys() >= set(names):
        raise SystemExit(f"say which of {', '.join(checks)}")
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            checks[name](Path(folder))
        print(f"{name}: nothing found")


def sanitize(folder: Path) -> None:
    """The sweeps alone on every path of this machine, then the extension under its tests."""
    need("g++", "g++")
    run([build_driver("g++", folder, *SANITIZED), "4"])
    package = folder / "phasor"
    shutil.copytree(ROOT / "src/phasor", package, ignore=shutil.ignore_patterns("_native*"))
    extension = package / "_native.abi3.so"
    headers = sysconfig.get_path("include")
    build = ["g++", *FLAGS, *SANITIZED, "-fPIC", "-shared", "-fopenmp", f"-I{headers}"]
    run([*build, *sorted(map(str, CSRC.glob("*.cpp"))), "-o", str(extension)])
    # libstdc++ too: the sanitizer looks for its throw before torch brings it
    libraries = ["libasan.so", "libubsan.so", "libstdc++.so.6"]
    environment = {
        "LD_PRELOAD": ":".join(map(library, libraries)),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": str(folder),
    }
    loaded = f"import phasor._native as n; assert n.__file__ == {str(extension)!r}, n.__file__"
    run([sys.executable, "-c", loaded], **environment)
    # output is not captured: a sanitizer's last words come from a process that ends at once
    options = ["-q", "-s", "-m", "not slow", "-p", "no:cacheprovider"]
    run([sys.executable, "-m", "pytest", *options, *TESTS], **environment)


def valgrind(folder: Path) -> None:
    """Every path that valgrind's processor has, which AVX-512 is not among."""
    need("g++", "g++")
    need("valgrind", "valgrind")
    driver = build_driver("g++", folder, "-O1", "-g")
    run(["valgrind", "--quiet", "--error-exitcode=9", driver, "2"])


def neon(folder: Path) -> None:
    """NEON and portable code for 64-bit Arm."""
    need("aarch64-linux-gnu-g++", "g++-aarch64-linux-gnu")
    need("qemu-aarch64", "qemu-user")
    driver = build_driver("aarch64-linux-gnu-g++", folder, "-O2", "-static")
    run(["qemu-aarch64", driver, "3"])


def build_driver(compiler: str, folder: Path, *flags: str) -> str:
    """The driver with every sweep that the compiler's processor can have."""
    sources = [str(path) for path in sorted(CSRC.glob("*.cpp")) if path.name != "module.cpp"]
    made = str(folder / "driver")
    run([compiler, *FLAGS, *flags, f"-I{CSRC}", str(DRIVER), *sources, "-o", made])
    return made


def library(name: str) -> str:
    """Where the compiler has that library."""
    asked = ["g++", f"-print-file-name={name}"]
    return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()


def need(program: str, package: str) -> None:
    """End with what to install where a program is missing."""
    if shutil.which(program) is None:
        raise SystemExit(
            f"{program} is not installed, so nothing was checked; Debian and Ubuntu have it in "
            f"the package {package}"
        )


def run(command: list[str], **environment: str) -> None:
    """Run a command from the root of the repository; end where it fails."""
    print("$", " ".join(command), flush=True)
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, check=False)
    if done.returncode != 0:
        raise SystemExit(f"failed with {done.returncode}: {command[0]}")


if __name__ == "__main__":
    main(sys.argv[1:])
