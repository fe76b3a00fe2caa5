"""Where the time of a small call goes.

Takes `phasor.torch.rotate_qk_` apart, in place and in bfloat16: the loop in C++ on one thread and
on all, reading and checking the arguments there, each check in Python, and what is left for the
calls from one Python function to the next. A second table compares plain torch operations, which
run where there is no kernel, with transformers' function, whose cos and sin are made beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import contenders
import torch
from cases import CASES, Case
from measure import COPY, MULTIPLY, references
from report import Section
from timing import Call, Times, interleave

from phasor.torch import cos_sin, rotate_by, rotate_qk, rotate_qk_
from phasor.torch._operator import cpu
from phasor.torch._operator.internals import count_writes, dispatch_is_plain, may_write

NAMES = ("decode 1", "decode 32", "prefill 64", "prefill 512")
QUICK = ("decode *",)
WHOLE, EXTENSION, ALONE, ARGUMENTS = "call", "extension", "one thread", "no tokens"
APPLY, ROWS, POSITIONS = "apply", "rows", "positions"
# the checks in Python, each by itself
CHECKS = ("plain dispatch?", "may write?", "count writes", "find the plan")
_TITLES = (
    *("", "call / `copy_`", "call / multiply", "the loop", "on one thread", "arguments", *CHECKS),
    "Python's calls",
)
_PLAIN_TITLES = "plain torch over transformers", "rows given", "positions"
_NOTE = """\
In place, half pairing, bfloat16; shares are of the median call. The loop rotates on all threads,
beside it the same on one; arguments are the call of the extension on tensors without tokens."""


def parts(case: Case) -> dict[str, Call]:
    """The whole call and its parts, each on tensors of that case."""
    (q, k), out = case.tensors(), case.tensors()
    positions, rope = case.positions(), case.rope("half")
    plan, native = cpu._prepare_plan(rope.to_json()), cpu._native

    def extension(q: Any, k: Any, positions: Any) -> Call:
        rest = positions, None, False, 1.0, cpu._path_index, False, q, q, k, k
        return lambda: native.rotate(plan, *rest)

    checks = (
        lambda: dispatch_is_plain((q, k)), lambda: may_write((q, k)), lambda: count_writes((q, k)),
        lambda: cpu._prepare_plan(rope.to_json()),
    )  # fmt: skip
    return {
        **references(case, (q, k), out, out),
        WHOLE: lambda: rotate_qk_(q, k, positions, rope),
        EXTENSION: extension(q, k, positions),
        # the same tensors without tokens: everything is read and checked, and there is no work
        ARGUMENTS: extension(q[:, :0], k[:, :0], positions[..., :0]),
        **dict(zip(CHECKS, checks, strict=True)),
    }


def time_parts(case: Case, seconds: float) -> Times:
    """Every part in turn, and the loop on one thread."""
    calls, threads = parts(case), torch.get_num_threads()
    found = interleave(calls, seconds=seconds, warm=True)
    # by itself, because a change of their number starts threads anew
    torch.set_num_threads(1)
    found |= interleave({ALONE: calls[EXTENSION]}, seconds=seconds / 10, warm=True)
    torch.set_num_threads(threads)
    return found


def plain(case: Case, seconds: float) -> Times:
    """Plain torch operations, with rows given and with positions, beside transformers' function."""
    q, k = case.tensors()
    positions, rope = case.positions(), case.rope("half")
    rows, theirs = cos_sin(positions, rope), contenders.transformers_half(case, positions)
    heads_first = q.transpose(1, 2), k.transpose(1, 2)
    calls: dict[str, Call] = {
        APPLY: lambda: theirs(*heads_first),
        ROWS: lambda: [rotate_by(x, *rows, pairing="half", backend="eager") for x in (q, k)],
        POSITIONS: lambda: rotate_qk(q, k, positions, rope, backend="eager"),
    }
    return interleave(calls, seconds=seconds, warm=True)


def steps(device: Any, seconds: float) -> dict[str, Callable[[], Any]]:
    """The four cases, and the same in plain torch operations."""
    cases = {case.label: case for case in CASES["cpu"] if case.name in NAMES}
    kernel = {name: partial(time_parts, cases[f"{name}, bfloat16"], seconds) for name in NAMES}
    return kernel | {
        f"{name}, plain": partial(plain, case, seconds) for name, case in cases.items()
    }


def sections(found: Mapping[str, Any], device: str) -> Iterator[Section]:
    """Shares of the whole call's median, and ratios to transformers' function."""
    rows: list[list[str]] = []
    plain_rows: list[list[str]] = []
    for name, samples in found.items():
        took = {part: Times(samples).median(part) for part in samples}
        if APPLY in took:
            ratios = [f"{took[part] / took[APPLY]:.2f}" for part in (ROWS, POSITIONS)]
            plain_rows.append([name.removesuffix(", plain"), *ratios])
            continue
        whole, loop, arguments = (took[part] for part in (WHOLE, EXTENSION, ARGUMENTS))
        checks = [took[part] for part in CHECKS]
        shares = [loop - arguments, took[ALONE] - arguments, arguments, *checks,
                  whole - loop - sum(checks)]  # fmt: skip
        ratios = [f"{whole / took[to]:.2f}" for to in (COPY, MULTIPLY)]
        rows.append([name, *ratios, *(f"{share / whole:.0%}" for share in shares)])
    yield Section("", _NOTE, _TITLES, rows)
    yield Section("", "", _PLAIN_TITLES, plain_rows)
