"""The commands of ``bench/gpu_session.md``, without a GPU: none may lack an import or an option.

    python -m bench.rehearse_gpu

They run with this Python, in a copy of the checkout without ``.git``, without a network where the
system can take it away. Triton interprets, the benchmark takes few tokens, and torch compiles
nothing.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tools.machines import ROOT, copy_checkout

_SESSION = "bench/gpu_session.md"
_NO_NETWORK = ("unshare", "--map-root-user", "--net")
_NO_GPU = {"TRITON_INTERPRET": "1", "TORCH_COMPILE_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}


def commands(page: str, language: str) -> Iterator[str]:
    """The lines of the blocks in a language, which may be indented."""
    for block in re.findall(rf"^ *```{language}\n(.*?)^ *```", page, re.M | re.S):
        yield from map(str.strip, block.splitlines())


def main() -> None:
    """Run all, and end with 1 if any failed."""
    page = (ROOT / _SESSION).read_text("utf-8")
    carry, *_ = commands(page, "console")
    setting, *todo = commands(page, "sh")
    environment = os.environ | _NO_GPU
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    offline = _NO_NETWORK if succeeds(*_NO_NETWORK, "true") else ()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="rehearse-gpu-") as folder:
        copy = copy_checkout(Path(folder))
        subprocess.run(["bash", "-ec", carry], cwd=copy, env=environment, check=True)
        for command in todo:
            start = time.monotonic()
            program = [*offline, "bash", "-ec", f"{setting}\n{command}"]
            done = subprocess.run(program, cwd=copy, env=environment, check=False)
            failed += done.returncode != 0
            ending = "FAILS" if done.returncode else "runs"
            print(f"{ending} in {time.monotonic() - start:.0f} s: {command}", flush=True)
    raise SystemExit(failed > 0)


def succeeds(*command: str) -> bool:
    """Whether a program is there and ends with 0."""
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


if __name__ == "__main__":
    main()
