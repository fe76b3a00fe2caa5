"""The everyday suite on every machine that this one can pass for, one line of result each.

    python tools/machines.py [--only WORD] [arguments of pytest]

A processor: the kernel and torch, oneDNN, MKL and NumPy are held to each instruction set that it
has. Threads: 1, 2 and 4. A place: another time zone, language or home. And a copy of the checkout:
without its kernel, or that cannot be written, with phasor installed in an environment elsewhere.
What a failing suite printed is kept in a file that its line names.

With ``--only``, other versions of packages as well: "oldest PyTorch", "oldest transformers",
"newest PyTorch", "oldest NumPy" (with click and rich), "runtimes". Most are gigabytes from the
package index.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# what torch and its libraries call the instruction sets of the kernel's paths
LIBRARIES = {
    "avx512bf16": {},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    "portable": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_CBWR": "COMPATIBLE",
    },
}
PLACES = {
    "a time zone of 5:45": {"TZ": "Asia/Kathmandu"},
    "no language": {"LC_ALL": "C", "LANG": ""},
    "no home": {"HOME": "/nonexistent", "XDG_CACHE_HOME": ""},
}


#: What is installed on top of this environment, and further arguments of pytest.
VERSIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "oldest PyTorch": (("torch==2.11.0",), ()),
    # the other tests compare files with classes of transformers that older versions lack
    "oldest transformers": (("torch==2.11.0", "transformers==5.4.0"), ("tests/torch",)),
    "newest PyTorch": (("torch>2.13", "transformers>5.23"), ()),
    "oldest NumPy": (
        # with SciPy and pandas that this NumPy suits
        ("numpy==1.26.0", "click==8.1.0", "rich==13.0.0", "scipy<1.17", "pandas<3"),
        (
            *("tests/cli", "tests/scaling", "tests/files"),
            *(str(path) for path in sorted((ROOT / "tests").glob("test_*.py"))),
            # its signatures include those of phasor.jax, and JAX needs NumPy 2
            "--deselect=tests/test_public_names.py::test_the_signatures_are_those_of_the_file",
        ),
    ),
    "runtimes": (
        ("executorch==1.5.1", "litert-torch==0.10.0", "coremltools==9.0"),
        # an older anyio comes along, whose plug-in pytest warns of
        ("-p", "no:anyio", "-m", "compile", "tests/torch/export/test_runtimes.py"),
    ),
}


def main(arguments: list[str]) -> None:
    """Run the suite as each, and end with 1 if any failed."""
    only = arguments[1] if arguments[:1] == ["--only"] else ""
    pytest_arguments = arguments[2:] if only else arguments
    outputs = Path(tempfile.mkdtemp(prefix="machines-"))
    failed = 0
    for name, run in machines(pytest_arguments, outputs).items():
        if only not in name or (name in VERSIONS and not only):
            continue
        start = time.monotonic()
        done = run()
        last = (done.stdout.strip().splitlines() or ["nothing was printed"])[-1].strip(" =")
        ending, where = "passes", ""
        if done.returncode != 0:
            failed += 1
            printed = outputs / f"{name.replace(' ', '-').replace(':', '')}.txt"
            printed.write_text(done.stdout)
            ending, where = "FAILS", f"; see {printed}"
        print(f"{name:35} {ending} in {time.monotonic() - start:.0f} s: {last}{where}", flush=True)
    raise SystemExit(failed > 0)


Run = Callable[[], subprocess.CompletedProcess[str]]


def machines(pytest_arguments: list[str], folder: Path) -> dict[str, Run]:
    """What to run, by name."""
    settings = {f"instructions {p}": {"PHASOR_CPU": p} | find_minima(p) for p in paths()}
    settings |= {f"threads {n}": {"OMP_NUM_THREADS": n} for n in ("1", "2", "4")} | PLACES
    source = {"PYTHONPATH": str(ROOT / "src")}
    runs: dict[str, Run] = {
        name: partial(suite, ROOT, pytest_arguments, source | environment)
        for name, environment in settings.items()
    }
    runs["no kernel"] = lambda: without_kernel(pytest_arguments, folder / "unbuilt")
    runs["a checkout that cannot be written"] = lambda: unwritable(
        pytest_arguments, folder / "unwritable"
    )
    for name, (requirements, options) in VERSIONS.items():
        place = folder / name.replace(" ", "-")
        runs[name] = partial(other_versions, requirements, [*options, *pytest_arguments], place)
    return runs


def run_program(program: str, python: str = sys.executable) -> str:
    """What a program of Python prints."""
    command = [python, "-c", program]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def paths() -> list[str]:
    """The instruction sets that this machine has a kernel for."""
    return run_program("from phasor.torch._operator import cpu; print(*cpu.paths())").split()


def find_minima(path: str) -> dict[str, str]:
    """What keeps torch's libraries and NumPy to the instructions of ``path``."""
    found = run_program(
        "from numpy._core import _multiarray_umath as n\n"
        "print(*[name for name in n.__cpu_dispatch__ if n.__cpu_features__[name]])"
    ).split()
    wide = [name for name in found if name.startswith(("AVX512", "X86_V4"))]
    lacking = {"portable": found, "avx2": wide}.get(path, [])
    numpys = {"NPY_DISABLE_CPU_FEATURES": " ".join(lacking)} if lacking else {}
    return LIBRARIES.get(path, {}) | numpys


def suite(
    root: Path,
    pytest_arguments: list[str],
    environment: dict[str, str],
    python: str = sys.executable,
) -> subprocess.CompletedProcess[str]:
    """The suite of the checkout at ``root``, its output in one."""
    everyday = ["-n", "auto", "--dist", "loadfile", "-m", "not slow"]  # as `make test`
    command = [python, "-m", "pytest", "-q", *everyday, *pytest_arguments]
    if os.geteuid() == 0:  # who may otherwise write where nobody may
        command = ["setpriv", "--bounding-set=-dac_override", "--inh-caps=-all", *command]
    return subprocess.run(
        command, cwd=root, env={**os.environ, **environment}, check=False, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def copy_checkout(to: Path) -> Path:
    """The files that git knows, and nothing that was built."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, to / name)
    return to


def without_kernel(pytest_arguments: list[str], root: Path) -> subprocess.CompletedProcess[str]:
    """As where no C++ compiler is."""
    return suite(copy_checkout(root), pytest_arguments, {"PYTHONPATH": str(root / "src")})


def unwritable(pytest_arguments: list[str], root: Path) -> subprocess.CompletedProcess[str]:
    """With phasor installed, and all else is borrowed from this environment."""
    copy_checkout(root)
    python = borrowing_environment(root.with_name("environment"))
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*install, str(root)], check=True)
    for built in (root / "build", *root.glob("src/*.egg-info")):
        shutil.rmtree(built)
    for path in (root, *root.rglob("*")):
        path.chmod(path.stat().st_mode & ~0o222)
    return suite(root, ["-p", "no:cacheprovider", *pytest_arguments], {"PYTHONPATH": ""}, python)


def other_versions(
    requirements: Sequence[str], pytest_arguments: list[str], environment: Path
) -> subprocess.CompletedProcess[str]:
    """With other packages on top of this environment."""
    python = borrowing_environment(environment)
    install = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--no-compile"]
    subprocess.run([*install, *requirements], check=True)
    return suite(ROOT, pytest_arguments, {"PYTHONPATH": str(ROOT / "src")}, python)


def borrowing_environment(place: Path) -> str:
    """The Python of a new environment, which imports what it lacks from this one.

    Pip as well: with its own come older build tools of Python's, which hide those of this one.
    """
    python = str(place / "bin" / "python")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    site = run_program("import sysconfig; print(sysconfig.get_path('purelib'))", python)
    Path(site, "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    return python


if __name__ == "__main__":
    main(sys.argv[1:])
