"""What is not a ratio of times: peaks of memory, position tables, exactness far out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign
import torch
from cases import FAR, LARGE, TABLE_LENGTHS
from contenders import everyone
from torch import Tensor

from phasor import Rope, angles
from phasor.bench import Case, Contender, UnableError, measure, spread

_ROPE = Rope(head_dim=128, pairing="half", base=500_000.0)
_USUAL = Case(name="table", dtype="float32", seq=2)


def fresh(*arguments: str) -> Any:
    """What a new interpreter prints, as JSON, when it runs the benchmark with ``arguments``.

    Its malloc is the system's, which gives large tensors back.
    """
    program = [sys.executable, str(Path(__file__).with_name("run.py")), *arguments]
    usual = {name: v for name, v in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(program, capture_output=True, text=True, check=False, env=usual)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def peak(key: str) -> int | None:
    """Bytes by which one call raises this process's resident memory; None if it is unable.

    The same call is made before, for what is compiled and loaded once; then the kernel is asked
    to forget the peak of that (Linux). Not `getrusage`: a child's begins at its parent's peak.
    """
    contender = next(one for one in everyone() if one.key == key)
    try:
        rotation = contender.build(LARGE, LARGE.positions())
    except UnableError:
        return None
    q, k = (x.transpose(1, 2) if contender.heads_first else x for x in LARGE.tensors())
    rotation(q, k)
    Path("/proc/self/clear_refs").write_text("5", "ascii")
    before = _resident("VmHWM")
    outputs = rotation(q, k)
    after = _resident("VmHWM")
    del outputs
    return after - before


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def far_errors(contender: Contender) -> dict[str, float | str]:
    """Error of its rows at far positions, by position, or why there is none.

    The tolerance is for cases nearer by; here the error itself is the result.
    """
    found: dict[str, float | str] = {}
    for case in FAR:
        measured = measure(case, [contender], seconds=0.0)
        reason = measured.left_out.get(contender.key)
        found[case.name] = measured.errors[contender.key] if reason is None else reason
    return found


def tables() -> list[dict[str, Any]]:
    """Seconds to build and bytes of each recipe's position tables, by length."""
    recipes: dict[str, Callable[[int], list[Tensor]]] = {
        "transformers": _transformers,
        "Meta, complex": _meta,
        "torchtune": _torchtune,
        "phasor": _digits,
    }
    found: list[dict[str, Any]] = []
    for length in TABLE_LENGTHS:
        for name, build in recipes.items():
            try:
                build(256)
            except ImportError:
                continue
            seconds: list[float] = []
            for _ in range(3):
                start = time.perf_counter()
                made = build(length)
                seconds.append(time.perf_counter() - start)
            size = sum(x.numel() * x.element_size() for x in made)
            row = {"recipe": name, "length": length, "bytes": size, "seconds": seconds}
            found.append(row | {"median": spread(seconds).median})
    return found


def _transformers(length: int) -> list[Tensor]:
    return list(foreign.transformers_rows(_USUAL, torch.arange(length)))


def _meta(length: int) -> list[Tensor]:
    return [foreign.meta_turns(_USUAL, torch.arange(length))]


def _torchtune(length: int) -> list[Tensor]:
    return [foreign.torchtune_module(_USUAL, length).cache]


def _digits(length: int) -> list[Tensor]:
    """The same 2 MB for every length below 2**40."""
    import numpy as np

    return [torch.from_numpy(angles.digit_tables.__wrapped__(_ROPE, np.float32).copy())]
