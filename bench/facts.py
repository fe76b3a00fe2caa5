"""What is measured of a rotation besides its time: memory, the size of tables, errors far out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import others
import torch
from cases import CASES, FAR, LARGE, TABLE_LENGTHS, Case
from contenders import everyone
from device import Cpu, alone, peak_rise
from measure import UnableError, admit, measure
from torch import Tensor

from phasor.angles import turn_limbs

_SAMPLE = Case(name="table", dtype="bfloat16", seq=1024)


def peak(key: str) -> int | None:
    """Bytes by which one call raises this process's resident memory; None if it is unable."""
    contender = next(one for one in everyone(LARGE, "cpu") if one.key == key)
    try:
        rotation = contender.build(LARGE, LARGE.positions())
    except UnableError:
        return None
    q, k = (x.transpose(1, 2) if contender.heads_first else x for x in LARGE.tensors())
    rotation(q, k)
    return peak_rise(lambda: rotation(q, k))


def peaks() -> dict[str, int | None]:
    """`peak` of every contender, each in a process of its own."""
    return {one.key: alone(peak, one.key) for one in everyone(LARGE, "cpu")}


def system_memory(seconds: float) -> list[dict[str, Any]]:
    """The large prefill again, for a process with malloc as it comes."""
    some = [case for case in CASES["cpu"] if case.name == "prefill 4096"]
    return [asdict(measure(case, everyone(case, "cpu"), seconds=seconds)) for case in some]


def far_errors(device: Cpu) -> dict[str, dict[str, float | str]]:
    """Each contender's error at far positions, by position and dtype, or why there is none.

    The gate's tolerance is for cases nearer by; here the error itself is the result.
    """
    found: dict[str, dict[str, float | str]] = {}
    for case in FAR[device.kind]:
        torch.compiler.reset()
        measured, _ = admit(case, everyone(case, device.kind), device.where)
        for key, result in (measured.left_out | measured.errors).items():
            found.setdefault(key, {})[case.label] = result
    return found


def tables(device: torch.device) -> list[dict[str, Any]]:
    """Seconds to build and bytes of each recipe's position tables, by length, for heads of 128.

    A table of rows is built for a thousand positions, and its time and bytes are multiplied.
    """
    found: list[dict[str, Any]] = []
    for recipe, build in _recipes(device).items():
        seconds: list[float] = []
        try:
            for _ in range(4):  # the first is not counted
                start = time.perf_counter()
                made = build()
                seconds.append(time.perf_counter() - start)
        except ImportError:
            continue
        size = sum(x.numel() * x.element_size() for x in made)
        for length in TABLE_LENGTHS:
            times = 1 if recipe == "phasor" else length / _SAMPLE.seq
            row = {"recipe": recipe, "length": length, "bytes": size * times}
            found.append(row | {"seconds": median(seconds[1:]) * times})
    return found


def _recipes(device: torch.device) -> dict[str, Callable[[], Sequence[Tensor]]]:
    positions = _SAMPLE.positions(device)

    def cos_and_sin(dtype: torch.dtype) -> Sequence[Tensor]:
        made = positions.float()[:, None] * others.usual_inv_freq(_SAMPLE, device)
        return made.cos().to(dtype), made.sin().to(dtype)

    def constants() -> Sequence[Tensor]:
        """The same for every position."""
        made = turn_limbs.__wrapped__(_SAMPLE.rope("half"))
        return [torch.from_numpy(made.copy()).to(device)]

    return {
        "transformers, Liger": lambda: others.transformers_rows(_SAMPLE, positions),
        "Meta, complex": lambda: [others.meta_turns(_SAMPLE, positions)],
        "torchtune": lambda: [others.torchtune_module(_SAMPLE, _SAMPLE.seq).cache],
        "flash-attention": lambda: cos_and_sin(torch.bfloat16),
        "flashinfer, in place": lambda: cos_and_sin(torch.float32),
        "Transformer Engine": lambda: [torch.cat(tuple(cos_and_sin(torch.float32)), -1)],
        "phasor": constants,
    }
